"""Cost of an iteration of gradient tracking beside the gradients it needs.

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

from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments.bench.setting import KEY, Network, Setting, by, descend, random_data, training
from experiments.bench.timing import Measurement, Report, runner
from jaxfl import gradients, graphs
from jaxfl.algorithms import gradient_tracking
from jaxfl.core import Algorithm, Array, FederatedData, PyTree, Task, from_functions
from jaxfl.models import cnn
from jaxfl.privacy.tracking import polynomial_schedule

# The batch is m_K of Scheme (S1) at K = 2000.
NETWORK = Network(cnn(channels=(4, 8), window=3, hidden=None), "CNN (4, 8), 3x3")
SETTING = Setting(NETWORK, 5, batch_size=53, samples=12_000, rounds=10, repeats=9)


def without_gradients(task: Task) -> Task:
    """The same parameters under a loss that adds them up: its gradient is all ones."""

    def loss(params, inputs, labels):
        total = sum((leaf.sum() for leaf in jax.tree.leaves(params)), start=jnp.float32(0.0))
        return jnp.broadcast_to(total, (inputs.shape[0],))

    return from_functions(task.init, loss)


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


def evaluations(
    setting: Setting, task: Task, *, clip_norm: float | None
) -> Callable[[tuple[PyTree, Array], FederatedData], PyTree]:
    """((params, round index), data) -> the same after one gradient, and a step along it, in each of a call's rounds."""
    sampler = gradients.fixed(setting.batch_size)
    estimator = gradients.mini_batch(sampler=sampler, clip_norm=clip_norm, clip_order=1)

    def one(held, data):
        params, k = held
        gradient, _, _ = estimator.estimate(task, params, None, data, estimator.draw(KEY, k, data), k)
        return descend(params, gradient, setting.step_size), k + 1

    return lambda held, data: jax.lax.fori_loop(0, setting.rounds, lambda _, state: one(state, data), held)


def suite(setting: Setting = SETTING) -> dict[str, Measurement]:
    """Measure; see the module's text. About a minute on two cores."""
    task, data, clip_norm = setting.task(), random_data(setting), setting.clip_norm
    whole = tracking(setting, task, clip_norm=clip_norm)
    rest = tracking(setting, without_gradients(task), clip_norm=None)
    iteration, state = training(whole, data, setting.rounds, infos=True)
    bare = (state.broadcast_params, jnp.int32(1))
    rows = {
        "iteration": iteration,
        "gradients": runner(evaluations(setting, task, clip_norm=clip_norm), bare, data),
        "unclipped": runner(evaluations(setting, task, clip_norm=None), bare, data),
        "rest": training(rest, data, setting.rounds, infos=True)[0],
    }
    network = f"{setting.network.text}, {setting.network.num_params()} parameters"
    shapes = f"n = {setting.num_nodes}, m = {setting.batch_size}, {by(setting.network.sample_shape)}, {network}"
    report = Report("tracking/", shapes)
    rivals = ("gradients", "unclipped")
    ratios = {f"iteration_vs_{name}": ("iteration", name, f"iteration over {name}") for name in rivals}
    report.compare(rows, setting.repeats, setting.rounds, ratios, per="iteration")
    return report.measurements
