"""Distance from a known optimum at evaluations, and the regret of runs.

The objective is F = (1/n) sum_i f_i with f_i the mean loss over node i's samples, and x* its minimum, which the user
gives. Regret after K rounds is (1/K) sum_{k < K} l_k - F(x*), with l_k the loss that round k reports: of the batches
before the step, mean over nodes. Every round counts, whether it is evaluated or not.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import ArgumentError, Array, PyTree, Task, Variables, over_nodes
from jaxfl.core.lines import Label, Lines
from jaxfl.core.tasks import evaluated, sample_losses
from jaxfl.core.tree import squared_norm
from jaxfl.data.pool import SomeSamples, some_samples
from jaxfl.training.case import Measure
from jaxfl.training.measures import average_model


def optimality(task: Task, optimum: PyTree) -> Measure:
    """Make the measure of how far the models are from a known optimum.

    Args:
        task: its loss, on all training samples. A model state is that of the average model.
        optimum: x*, parameters of the task, leaves (*leaf).

    Returns:
        The measurement of `optimum_distance`, the mean over nodes of |x_i - x*|^2, of
        `optimum_distance_average_model`, |x_bar - x*|^2, of `excess_loss_average_model`, F(x_bar) - F(x*), and of
        `optimum_loss`, F(x*), which `regret` reads.

    Raises:
        ArgumentError: an optimum that has not the form of the task's parameters.

    Guarantees:
        - distances and excess loss are 0 at the optimum.
        - the excess is a mean of differences by sample, so that it keeps its digits near the optimum.
    """
    form = jax.eval_shape(task.init, jax.eval_shape(lambda: jax.random.key(0)))
    best = jax.tree.map(jnp.asarray, optimum)
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree) for tree in (best, form)]
    if shapes[0] != shapes[1]:
        remedy = "Pass arrays as task.init makes them."
        raise ArgumentError("optimum", f"must have the form {shapes[1]}", f"got {shapes[0]}"[:200], remedy)

    def params_of(model):
        return model if task.train_loss is None else model.params

    def compute(node_params: PyTree, arrays: tuple[PyTree, SomeSamples]) -> dict[str, Array]:
        best, samples = arrays
        average = average_model(node_params)
        at_best = evaluated(task, best, average.model_state if isinstance(average, Variables) else None)

        def of_node(own):
            losses = [sample_losses(task, model, own.inputs, own.labels) for model in (average, at_best)]
            return jnp.sum(own.weights * (losses[0] - losses[1])), jnp.sum(own.weights * losses[1])

        excess, of_best = over_nodes(of_node, task.node_loop)(samples)

        def distances(models):
            return squared_norm(jax.tree.map(lambda leaf, at: leaf - at[None], params_of(models), best))

        return {
            "optimum_loss": of_best.mean(),
            "excess_loss_average_model": excess.mean(),
            "optimum_distance": distances(node_params).mean(),
            "optimum_distance_average_model": distances(jax.tree.map(lambda leaf: leaf[None], average))[0],
        }

    return Measure(compute, prepare=lambda key, data: (best, some_samples(data, data.max_size)))


def regret(lines: Lines) -> Mapping[Label, tuple[np.ndarray, np.ndarray]]:
    """Compute the regret of each run at its evaluations from `RunDirectory.read_metrics`.

    Args:
        lines: with `optimum_loss`, of the measure `optimality`.

    Returns:
        (case, seed) -> (rounds (r,), int64; regret up to them (r,), float64), in order.

    Guarantees:
        - does not depend on how often a run is evaluated.

    Examples:
        >>> rows = [(10, 3.0), (30, 1.5)]  # mean losses of rounds 1 to 10 and 11 to 30
        >>> line = {"case": "A", "seed": 0, "optimum_loss": 1.0}
        >>> rounds, values = regret(Lines({**line, "round": k, "train_loss": loss} for k, loss in rows))["A", 0]
        >>> rounds.tolist(), values.tolist()
        ([10, 30], [2.0, 1.0])
    """
    curves = {}
    for case, own in lines.by_case().items():
        seeds, rounds, losses, optima = own.columns("seed", "round", "train_loss", "optimum_loss")
        for seed in np.unique(seeds).tolist():
            at, of_seed, best = (column[seeds == seed] for column in (rounds, losses, optima))
            curves[case, seed] = at, np.cumsum(np.diff(at, prepend=0) * of_seed) / at - best
    return curves
