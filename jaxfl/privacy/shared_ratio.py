"""The ratio of shared to own noise at which the nodes of a network are least noisy. JAX is not imported.

At one effective noise (`jaxfl.privacy.shared`) a larger ratio leaves a node more noise before mixing, and less of it in
the average. What mixing takes away decides.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxfl.core.check import ArgumentError, at_least, one_of
from jaxfl.privacy import shared

if TYPE_CHECKING:
    from jaxfl.graphs import Graph

_MOST_MEMORY = 1000.0  # covariances are followed for 21 times as many rounds
_FREE_RATIO = 10.0  # where nothing of the shared noise is left after mixing: within 1 % of the most effective noise


class Variance(NamedTuple):
    """Variances of the states after many rounds, in units of step_size^2."""

    nodes: float  # v: mean over nodes, at own noise 1
    shared: float  # v_L: mean over nodes, at shared noise 1
    mean: float  # v_0: of the average of all states, at own noise 1


def variances(graph: Graph, keys: shared.KeyGraph, *, num_mixings: int = 1, memory: float = 10.0) -> Variance:
    """Variances that noise leaves in the states of push-sum on quadratic losses.

    A round keeps the share kappa of a state, memory = 1 / (1 - kappa^2), takes a noisy step and mixes: the covariance
    of the states follows X <- B (A X A' + Sigma) B' with A = 1 - (1 - kappa) / w, w the push-sum weights, and B the
    product of the round's mixing matrices. The mean over the graph's period is returned.

    Args:
        graph: the communication graph.
        keys: pairs that share noise.
        num_mixings: M, exchanges in a round; round k takes the matrices kM, ..., kM + M - 1.
        memory: T, rounds that a state remembers, above 1 and at most 1,000.

    Examples:
        >>> from jaxfl import graphs
        >>> [round(each, 4) for each in variances(graphs.ring(16), shared.key_graph("complete", 16))]
        [1.5149, 14.2384, 0.625]
    """
    at_least(1, num_mixings=num_mixings)
    if not (np.ndim(memory) == 0 and 1 < memory <= _MOST_MEMORY):
        requirement = f"must be above 1 and at most {_MOST_MEMORY:g}"
        raise ArgumentError("memory", requirement, f"got {memory!r}", "Pass 10, the default.")
    n, period = graph.num_nodes, graph.period // math.gcd(graph.period, num_mixings)
    matrices = [graph.mixing_matrix(k) for k in range(graph.period)]
    kappa = math.sqrt(1 - 1 / memory)
    rounds = [
        functools.reduce(
            lambda done, m, k=k: matrices[(k * num_mixings + m) % graph.period] @ done, range(num_mixings), np.eye(n)
        )
        for k in range(period)
    ]
    squares = np.square(keys.weights)
    added = np.stack([np.eye(n), np.diag(squares.sum(axis=1)) - squares])
    settled = period * math.ceil(memory * math.log(1e9) / period)  # kappa^(2 rounds) is below 1e-9 then
    weight = np.ones(n)
    for k in range(settled):
        weight = rounds[k % period] @ weight
    covariance, seen = np.zeros_like(added), []
    for k in range(settled + period):
        kept = 1 - (1 - kappa) / weight
        mixing, weight = rounds[k % period], rounds[k % period] @ weight
        covariance = mixing @ (kept[:, None] * covariance * kept + added) @ mixing.T
        of_nodes = (np.diagonal(covariance, axis1=1, axis2=2) / np.square(weight)).mean(axis=1)
        seen.append((*of_nodes, covariance[0].sum() / n**2))
    return Variance(*(float(each) for each in np.mean(seen[settled:], axis=0)))


class SharedKeys(NamedTuple):
    """A key graph, its ratio, and what they bring."""

    key_graph: shared.KeyGraph
    ratio: float
    variance: float  # of a node, as a share of that with noise of one's own and the same effective noise


def best_ratio(
    graph: Graph,
    key_graph: str | Graph | shared.KeyGraph = "auto",
    *,
    num_mixings: int = 1,
    colluding: int = 1,
    memory: float = 10.0,
    least: str = "nodes",
    ratio: float | None = None,
) -> SharedKeys:
    """Find the key graph and the ratio of shared to own noise at which nodes are least noisy, at one effective noise.

    A node's variance is V = (v + ratio^2 v_L) / f(ratio)^2, with `variances`, and f the effective noise at own noise 1.
    It is tried at 0, at 100 ratios from 0.01 to 10 and at 100 beside the best; a complete key graph has a closed form.
    Where mixing leaves nothing of shared noise every ratio is free, and 10 is taken.

    Args:
        graph: the communication graph.
        key_graph: as for `key_graph`; "mixing" for the edges of `graph`; "auto" takes the one of least V of these,
            exponential and complete.
        num_mixings, memory: as for `variances`. A memory too small costs little.
        colluding: nodes that share their secrets with the observer.
        least: "nodes", or "mean": the largest ratio at which nodes are no noisier than with noise of their own, for
            where the average of all nodes counts; "auto" then takes the key graph with the least noise in it.
        ratio: in place of the best one; key graphs are compared at it.

    Examples:
        >>> from jaxfl import graphs
        >>> found = best_ratio(graphs.ring(16), "complete", colluding=0)
        >>> round(found.ratio, 4), round(found.variance, 4)
        (0.3746, 0.8148)
    """
    one_of(("nodes", "mean"), least=least)
    shared.check_ratio(ratio=0 if ratio is None else ratio)
    shared.check_colluding(graph.num_nodes, colluding)
    candidates = (
        ("mixing", "exponential", "complete") if isinstance(key_graph, str) and key_graph == "auto" else (key_graph,)
    )
    found = []
    for which in candidates:
        keys = shared.key_graph(graph if isinstance(which, str) and which == "mixing" else which, graph.num_nodes)
        of = variances(graph, keys, num_mixings=num_mixings, memory=memory)
        found.append(_best(keys, of, colluding, least == "mean", ratio))

    def of_mean(choice: SharedKeys) -> float:  # in the mean only own noise is left, 1 / f of the effective one
        return -float(shared.effective_noise(choice.key_graph, ratio=choice.ratio, colluding=colluding).noise.min())

    return min(found, key=of_mean if least == "mean" and ratio is None else lambda choice: choice.variance)


def _best(keys: shared.KeyGraph, of: Variance, colluding: int, even: bool, ratio: float | None) -> SharedKeys:
    """The best ratio for one key graph."""

    def variance(ratios: np.ndarray) -> np.ndarray:
        least = shared.effective_noise(keys, ratio=ratios, colluding=colluding).noise.min(axis=1)
        return (1 + np.square(ratios) * of.shared / of.nodes) / np.square(least)

    def best_of(values: np.ndarray) -> int:
        return int(np.flatnonzero(values <= 1 + 1e-9)[-1] if even and len(values) > 1 else np.argmin(values))

    honest, ratios = keys.num_nodes - colluding, np.array([0.0, *np.geomspace(0.01, 10.0, 100)])
    if ratio is not None:
        ratios = np.array([float(ratio)])
    elif of.shared < 1e-9 * of.nodes:
        ratios = np.array([_FREE_RATIO])
    elif keys.is_complete:
        gain = honest * of.nodes / of.shared
        square = (math.sqrt(max(0.0, (honest - 1) * (gain - 1))) - 1) / honest
        square = (honest - 1) * of.nodes / of.shared - 1 if even else square
        ratios = np.array([min(math.sqrt(max(0.0, square)), shared.MOST_RATIO)])
    if len(ratios) > 1:
        place = best_of(variance(ratios))
        ratios = np.linspace(ratios[max(place - 1, 0)], ratios[min(place + 1, len(ratios) - 1)], 100)
    values = variance(ratios)
    place = best_of(values)
    return SharedKeys(keys, float(ratios[place]), float(values[place]))
