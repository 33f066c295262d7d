"""What an iteration of gradient tracking costs beside the gradients it needs.

    python -m experiments.bench tracking --json bench.json

Five agents (`graphs.five_agents`), 12,000 images of 28x28 each, the small network of 4,266 parameters, 53 samples a
gradient clipped in L1 norm, Laplace noise on states and trackers. Rows, which take turns in one process:

| row | what one iteration does |
|---|---|
| iteration | gradient tracking: draws, noise, mixing on both graphs, gradients, trackers, all that `Info` measures |
| gradients | draws the same batches, evaluates the same clipped gradients; one SGD step, so that no two are alike |
| unclipped | as "gradients", without clipping |
| rest | as "iteration", with parameters of the same shapes and a loss whose gradient costs next to nothing |

Iterations run in a scan with the state donated, as training runs them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.timing import Measurement, Runner, compile_times, in_turns, ratio, runner
from jaxfl import gradients, graphs
from jaxfl.algorithms import gradient_tracking
from jaxfl.core import Algorithm, Array, FederatedData, PyTree, Task, from_functions
from jaxfl.core.tree import size
from jaxfl.data import federate
from jaxfl.models import classification, cnn
from jaxfl.privacy.tracking import polynomial_schedule


class Setting(NamedTuple):
    """Shapes and repeats of the suite."""

    sample_shape: tuple[int, int, int] = (28, 28, 1)
    channels: tuple[int, ...] = (4, 8)
    window: int = 3
    num_classes: int = 10
    samples: int = 12_000  # of each agent
    batch_size: int = 53  # m_K of Scheme (S1) at K = 2000
    clip_norm: float = 1.0
    rounds: int = 10  # in one call
    repeats: int = 9


KEY = jax.random.key(0)


def network(setting: Setting) -> Task:
    """The small CNN."""
    model = cnn(
        setting.sample_shape,
        channels=setting.channels,
        window=setting.window,
        hidden=None,
        num_classes=setting.num_classes,
    )
    return classification(model)


def without_gradients(task: Task) -> Task:
    """The same parameters under a loss that adds them up: its gradient is all ones."""

    def loss(params, inputs, labels):
        total = sum((leaf.sum() for leaf in jax.tree.leaves(params)), start=jnp.float32(0.0))
        return jnp.broadcast_to(total, (inputs.shape[0],))

    return from_functions(task.init, loss)


def random_data(setting: Setting) -> FederatedData:
    """Images of noise in one pool, every agent the same number."""
    rng = np.random.default_rng(0)
    count = 5 * setting.samples
    inputs = rng.integers(0, 256, (count, *setting.sample_shape), dtype=np.uint8)
    labels = rng.integers(0, setting.num_classes, count).astype(np.int32)
    return federate(inputs, labels, np.split(np.arange(count, dtype=np.int32), 5))


def tracking(setting: Setting, task: Task, *, clip_norm: float | None) -> Algorithm:
    """Gradient tracking over the five agents by Scheme (S1)."""
    pair = graphs.five_agents()
    schedule = polynomial_schedule(2000, state_noise_exponent=-0.1, tracker_noise_exponent=-0.1, horizon_offset=0)
    return gradient_tracking(
        task,
        state_weights=pair.state_weights,
        tracker_weights=pair.tracker_weights,
        schedule=schedule._replace(num_samples=setting.batch_size),
        clip_norm=clip_norm,
        distribution="laplace",
    )


def iterations(setting: Setting, algorithm: Algorithm) -> Callable[[tuple[PyTree, PyTree], FederatedData], PyTree]:
    """((state, infos of earlier rounds), data) -> the same after a call's rounds; infos are kept, as training does."""

    def loop(held, data):
        return jax.lax.scan(lambda state, _: algorithm.round(KEY, state, data), held[0], length=setting.rounds)

    return loop


def evaluations(
    setting: Setting, task: Task, *, clip_norm: float | None, step_size: float = 0.01
) -> Callable[[tuple[PyTree, Array], FederatedData], PyTree]:
    """((params, round index), data) -> the same after one gradient, and a step along it, in each of a call's rounds."""
    sampler = gradients.fixed(setting.batch_size)
    estimator = gradients.mini_batch(sampler=sampler, clip_norm=clip_norm, clip_order=1)

    def one(held, data):
        params, k = held
        gradient, _, _ = estimator.estimate(task, params, None, data, estimator.draw(KEY, k, data), k)
        return jax.tree.map(lambda leaf, slope: leaf - step_size * slope, params, gradient), k + 1

    return lambda held, data: jax.lax.fori_loop(0, setting.rounds, lambda _, state: one(state, data), held)


def suite(setting: Setting | None = None) -> dict[str, Measurement]:
    """Measure; see the module's text. About a minute on two cores."""
    setting = Setting() if setting is None else setting
    task, data = network(setting), random_data(setting)
    clip_norm = setting.clip_norm
    whole = tracking(setting, task, clip_norm=clip_norm)
    rest = tracking(setting, without_gradients(task), clip_norm=None)
    state = jax.jit(whole.init)(KEY, data)
    bare = (state.broadcast_params, jnp.int32(1))
    rows = {
        "iteration": runner(iterations(setting, whole), (state, _infos(setting, whole, state, data)), data),
        "gradients": runner(evaluations(setting, task, clip_norm=clip_norm), bare, data),
        "unclipped": runner(evaluations(setting, task, clip_norm=None), bare, data),
        "rest": runner(iterations(setting, rest), (state, _infos(setting, rest, state, data)), data),
    }
    return _report(setting, rows, size(state.params) // 5)


def _infos(setting: Setting, algorithm: Algorithm, state: PyTree, data: FederatedData) -> PyTree:
    """Zeros in the shapes of a call's infos."""
    info = jax.eval_shape(algorithm.round, KEY, state, data)[1]
    return jax.tree.map(lambda leaf: jnp.zeros((setting.rounds, *leaf.shape), leaf.dtype), info)


def _report(setting: Setting, rows: dict[str, Runner], num_params: int) -> dict[str, Measurement]:
    """Run the rows in turns."""
    seconds = in_turns({name: row.call for name, row in rows.items()}, dict.fromkeys(rows, setting.repeats))
    image = "x".join(map(str, setting.sample_shape))
    network = f"CNN {setting.channels}, {setting.window}x{setting.window}, {num_params} parameters"
    shapes = f"n = 5, m = {setting.batch_size}, {image}, {network}"
    report = {}
    for name in ("gradients", "unclipped"):
        value, spread = ratio(seconds["iteration"], seconds[name])
        report[f"tracking/iteration_vs_{name}"] = Measurement(value, "x", spread, f"iteration over {name}; {shapes}")
    for name, calls in seconds.items():
        each = [1e3 * call / setting.rounds for call in calls]
        middle, spread = statistics.median(each), (min(each), max(each))
        report[f"tracking/{name}"] = Measurement(middle, "ms/iteration", spread, shapes)
    for name in ("iteration", "gradients"):
        held = rows[name].temp_bytes / 1e6
        report[f"tracking/temp_{name}"] = Measurement(held, "MB", (held, held), f"temporary memory; {shapes}")
    return {**report, **compile_times("tracking", rows, shapes)}
