"""What clipping every sample's gradient costs, and what it saves to do so without per-sample gradients.

    python -m experiments.bench clip --json bench.json

Networks: 784-32-10 and 784-128-10 at 20 nodes, the CNN of `jaxfl.models.cnn` at 10 nodes; batch 32. Rows, which take
turns in one process and walk down their gradient, so that no two rounds are alike:

| row | the mean gradient of a node's batch |
|---|---|
| unclipped | by one backward pass |
| clipped | as jaxfl clips: norms from layer inputs and errors, in L2 |
| per_sample | every sample's gradient by `vmap` of `grad`, clipped, averaged |
| one_by_one | of the CNN, every sample's gradient after the other, as jaxfl clips a model without factored layers |
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.timing import Measurement, Runner, compile_times, in_turns, ratio, runner
from jaxfl.core import Array, PyTree, Task, node_keys, over_nodes
from jaxfl.gradients import per_example
from jaxfl.models import classification, cnn, mlp


class Network(NamedTuple):
    """One network of the suite."""

    task: Task
    num_nodes: int
    sample_shape: tuple[int, ...]
    rounds: int  # in one call
    text: str


class Setting(NamedTuple):
    """Shapes and repeats of the suite."""

    mlp_hidden: tuple[int, ...] = (32, 128)
    mlp_nodes: int = 20
    mlp_rounds: int = 25
    cnn_nodes: int = 10
    cnn_rounds: int = 2
    sample_shape: tuple[int, int, int] = (28, 28, 1)
    channels: tuple[int, ...] = (32, 64)
    window: int = 5
    hidden: int = 512
    num_classes: int = 10
    batch_size: int = 32
    clip_norm: float = 1.0
    repeats: int = 7
    per_sample_rounds: int = 2  # in one call: these take far longer
    per_sample_repeats: int = 5


Gradient = Callable[[PyTree, Array, Array], PyTree]


def networks(setting: Setting) -> dict[str, Network]:
    """The networks by name."""
    height, width, channels = setting.sample_shape
    pixels = height * width * channels
    found = {}
    for hidden in setting.mlp_hidden:
        task = classification(mlp((pixels, hidden, setting.num_classes)))
        text = f"{pixels}-{hidden}-{setting.num_classes}, n = {setting.mlp_nodes}"
        found[f"mlp{hidden}"] = Network(task, setting.mlp_nodes, (pixels,), setting.mlp_rounds, text)
    task = classification(
        cnn(
            setting.sample_shape,
            channels=setting.channels,
            window=setting.window,
            hidden=setting.hidden,
            num_classes=setting.num_classes,
        )
    )
    text = f"CNN {setting.channels}, {setting.window}x{setting.window}, {setting.hidden}, n = {setting.cnn_nodes}"
    found["cnn"] = Network(task, setting.cnn_nodes, setting.sample_shape, setting.cnn_rounds, text)
    return found


def as_jaxfl(task: Task, clip_norm: float | None) -> Gradient:
    """(one node's params, inputs, labels) -> mean of the (clipped) gradients, as the engine takes it."""

    def gradient(params, inputs, labels):
        weights = jnp.full(labels.shape[0], 1 / labels.shape[0], jnp.float32)
        return per_example.weighted_sum(task, params, inputs, labels, weights, clip_norm=clip_norm).gradient

    return gradient


def by_samples(task: Task, clip_norm: float) -> Gradient:
    """The same mean from every sample's gradient."""

    def one(params, sample, label):
        return jax.grad(lambda values: task.loss(values, sample[None], label[None])[0])(params)

    def gradient(params, inputs, labels):
        each = jax.vmap(one, in_axes=(None, 0, 0))(params, inputs, labels)
        norms = jnp.sqrt(sum(jnp.sum(leaf**2, axis=tuple(range(1, leaf.ndim))) for leaf in jax.tree.leaves(each)))
        shares = jnp.minimum(1.0, clip_norm / norms) / labels.shape[0]
        # As a product: XLA's CPU backend takes seconds for the sum over samples of a large kernel's gradients.
        return jax.tree.map(lambda leaf: jnp.tensordot(shares, leaf, axes=1), each)

    return gradient


def descent(gradient: Gradient, node_loop: str, rounds: int, step_size: float = 0.01):
    """(params, inputs, labels) -> params after `rounds` steps at every node."""
    everywhere = over_nodes(gradient, node_loop)

    def step(_, params, inputs, labels):
        return jax.tree.map(lambda leaf, slope: leaf - step_size * slope, params, everywhere(params, inputs, labels))

    return lambda params, inputs, labels: jax.lax.fori_loop(
        0, rounds, lambda index, held: step(index, held, inputs, labels), params
    )


def node_batches(setting: Setting, network: Network) -> tuple[PyTree, Array, Array]:
    """Initial parameters, images and labels of every node."""
    key = jax.random.key(0)
    params = jax.jit(jax.vmap(network.task.init))(node_keys(key, network.num_nodes))
    shape = (network.num_nodes, setting.batch_size)
    inputs = jax.random.uniform(jax.random.fold_in(key, 1), (*shape, *network.sample_shape), jnp.float32)
    return params, inputs, jax.random.randint(jax.random.fold_in(key, 2), shape, 0, setting.num_classes, jnp.int32)


def suite(setting: Setting | None = None) -> dict[str, Measurement]:
    """Measure; see the module's text. About two minutes on two cores, most of it the CNN's per-sample gradients."""
    setting = Setting() if setting is None else setting
    report = {}
    for name, network in networks(setting).items():
        report |= _compare(setting, name, network)
    return report


def _compare(setting: Setting, name: str, network: Network) -> dict[str, Measurement]:
    """The rows of one network."""
    task, clip_norm = network.task, setting.clip_norm
    gradient = {
        "unclipped": as_jaxfl(task, None),
        "clipped": as_jaxfl(task, clip_norm),
        "per_sample": by_samples(task, clip_norm),
    }
    if task.node_loop != "vmap":
        gradient["one_by_one"] = as_jaxfl(task._replace(factors=None), clip_norm)
    slow = ("per_sample", "one_by_one")
    rounds = {row: setting.per_sample_rounds if row in slow else network.rounds for row in gradient}
    repeats = {row: setting.per_sample_repeats if row in slow else setting.repeats for row in gradient}
    arguments = node_batches(setting, network)
    rows = {row: runner(descent(gradient[row], task.node_loop, rounds[row]), *arguments) for row in gradient}
    seconds = in_turns({row: one.call for row, one in rows.items()}, repeats)
    each = {row: [call / rounds[row] for call in calls] for row, calls in seconds.items()}
    shapes = f"{network.text}, batch {setting.batch_size}, node_loop {task.node_loop}"
    overhead, overhead_spread = ratio(each["clipped"], each["unclipped"])
    speedups = {row: ratio(each[row], each["clipped"]) for row in slow if row in each}
    return {
        f"clip/{name}_vs_unclipped": Measurement(overhead, "x", overhead_spread, f"clipped over unclipped; {shapes}"),
        **{
            f"clip/{name}_speedup_vs_{row}": Measurement(value, "x", spread, f"{row} over clipped; {shapes}")
            for row, (value, spread) in speedups.items()
        },
        f"clip/{name}_temp_vs_unclipped": _temp_ratio(rows, shapes),
        **{
            f"clip/{name}_{row}": Measurement(
                1e3 * statistics.median(times), "ms/round", (1e3 * min(times), 1e3 * max(times)), shapes
            )
            for row, times in each.items()
        },
        **{
            f"clip/{name}_temp_{row}": Measurement(
                one.temp_bytes / 1e6, "MB", (one.temp_bytes / 1e6, one.temp_bytes / 1e6), f"temporary memory; {shapes}"
            )
            for row, one in rows.items()
        },
        **compile_times("clip", {f"{name}_{row}": one for row, one in rows.items()}, shapes),
    }


def _temp_ratio(rows: dict[str, Runner], shapes: str) -> Measurement:
    """Temporary memory of the clipped row over the unclipped one's."""
    value = rows["clipped"].temp_bytes / max(1, rows["unclipped"].temp_bytes)
    return Measurement(value, "x", (value, value), f"temporary memory, clipped over unclipped; {shapes}")
