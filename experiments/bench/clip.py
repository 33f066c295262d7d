"""Cost of clipping every sample's gradient, and the saving without per-sample gradients.

Networks: 784-32-10 and 784-128-10 at 20 nodes, the CNN of `jaxfl.models.cnn` at 10 nodes; batch 32. Rows, which take
turns in one process and walk down their gradient, so that no two rounds are alike:

| row | the mean gradient of a node's batch |
|---|---|
| unclipped | by one backward pass |
| clipped | as jaxfl clips: norms from layer inputs and errors, in L2 |
| per_sample | every sample's gradient by `vmap` of `grad`, clipped, averaged |
| one_by_one | of the CNN, every sample's gradient after the other, as jaxfl clips a model without factored layers |
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments.bench.setting import Network, Setting, descend, node_batches, node_params, perceptron
from experiments.bench.timing import Measurement, Report, runner
from jaxfl.core import Array, PyTree, Task, over_nodes
from jaxfl.gradients import per_example
from jaxfl.models import cnn

SLOW = ("per_sample", "one_by_one")
SETTINGS = {
    "mlp32": Setting(perceptron(784, 32, 10), 20, rounds=25, slow_repeats=5),
    "mlp128": Setting(perceptron(784, 128, 10), 20, rounds=25, slow_repeats=5),
    "cnn": Setting(Network(cnn(), "CNN (32, 64), 5x5, 512"), 10, slow_repeats=5),
}

Gradient = Callable[[PyTree, Array, Array], PyTree]


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


def descent(gradient: Gradient, node_loop: str, rounds: int, step_size: float):
    """(params, inputs, labels) -> params after `rounds` steps at every node."""
    everywhere = over_nodes(gradient, node_loop)
    return lambda params, inputs, labels: jax.lax.fori_loop(
        0, rounds, lambda _, held: descend(held, everywhere(held, inputs, labels), step_size), params
    )


def gradients(setting: Setting, task: Task) -> dict[str, Gradient]:
    """The rows."""
    rows = {
        "unclipped": as_jaxfl(task, None),
        "clipped": as_jaxfl(task, setting.clip_norm),
        "per_sample": by_samples(task, setting.clip_norm),
    }
    if task.node_loop != "vmap":
        rows["one_by_one"] = as_jaxfl(task._replace(factors=None), setting.clip_norm)
    return rows


def suite(settings: dict[str, Setting] = SETTINGS) -> dict[str, Measurement]:
    """Measure; see the module's text. About two minutes on two cores, most of it the CNN's per-sample gradients."""
    measurements = Report("clip/", "")
    for name, setting in settings.items():
        task = setting.task()
        functions = gradients(setting, task)
        rounds = {row: setting.slow_rounds if row in SLOW else setting.rounds for row in functions}
        repeats = {row: setting.slow_repeats if row in SLOW else setting.repeats for row in functions}
        arguments = node_params(task.init, setting.num_nodes), *node_batches(setting)
        rows = {
            row: runner(descent(one, task.node_loop, rounds[row], setting.step_size), *arguments)
            for row, one in functions.items()
        }
        report = measurements.on(f"{setting.layers()}, node_loop {task.node_loop}")
        ratios = {f"{name}_vs_unclipped": ("clipped", "unclipped", "clipped over unclipped")}
        ratios |= {f"{name}_speedup_vs_{row}": (row, "clipped", f"{row} over clipped") for row in SLOW if row in rows}
        report.compare(rows, repeats, rounds, ratios, f"{name}_")
        growth = rows["clipped"].temp_bytes / max(1, rows["unclipped"].temp_bytes)
        report.median(f"{name}_temp_vs_unclipped", growth, "x", "temporary memory, clipped over unclipped")
    return measurements.measurements
