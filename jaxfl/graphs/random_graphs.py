"""Random directed graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from jaxfl.core import check
from jaxfl.core.calls import by_name
from jaxfl.core.check import ArgumentError
from jaxfl.core.keys import Purpose, purpose_key
from jaxfl.core.threefry import one_kernel
from jaxfl.core.types import Array
from jaxfl.graphs.graph import Graph
from jaxfl.graphs.validation import unreachable_pair
from jaxfl.graphs.weights import mixing_matrix

_MOST_COINS_NODES = 16_384
MAX_TRIES = 100


@by_name
def random_digraph(num_nodes: int, edge_probability: float, key: Array | int) -> Graph:
    """A strongly connected random directed graph with uniform weights (column stochastic; push-sum weights move).

    Each ordered pair of nodes is an edge with `edge_probability`, independently; graphs that are not strongly
    connected are discarded and drawn again.

    Up to 16,384 nodes each pair has a coin, and the coins take n^2 bytes for a moment: 100 MB for 10,000 nodes. Above,
    the gaps between edges are drawn, with the same distribution: about 2 n log(n) numbers at edge probability
    2 log(n) / n.

    Args:
        num_nodes: n, at least 1.
        edge_probability: in [0, 1]; above about 2 log(n) / n most draws are strongly connected.
        key: typed base key of the run, or an int seed s, which means `jax.random.key(s)`.

    Raises:
        ArgumentError: none of 100 draws was strongly connected, or the key is traced.

    Guarantees:
        - the graph is a function of the arguments only.

    Examples:
        >>> graph = random_digraph(6, 0.4, key=0)
        >>> graph.mixing_matrix(0).sum(axis=0).round(6).tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    check.at_least(1, num_nodes=num_nodes)
    check.probability(edge_probability=edge_probability)
    for name, value in (("edge_probability", edge_probability), ("key", key)):
        if check.is_traced(value):
            remedy = "Build the graph outside jit and vmap: it is static."
            raise ArgumentError(name, "must be concrete", "got a traced value", remedy)
    graph = pair = None
    with jax.ensure_compile_time_eval():  # the graph is static even where it is built while something is traced
        base = jax.random.key(key) if isinstance(key, int) else key
    probability = np.asarray(edge_probability, jnp.result_type(float))
    by_coins = num_nodes <= _MOST_COINS_NODES
    coins = _edges(num_nodes, base.dtype, probability.dtype) if by_coins else None
    with jax.ensure_compile_time_eval():
        for attempt in range(MAX_TRIES):
            # An attempt is to the graph what a round is to the run: it takes the round's place in the key.
            attempt_key = purpose_key(base, Purpose.GRAPH, attempt)
            if coins is None:
                adjacency = _edges_by_gaps(num_nodes, float(probability), attempt_key)
            else:
                adjacency = np.array(coins(attempt_key, probability))
                np.fill_diagonal(adjacency, True)
            name = f"random_digraph({num_nodes}, {edge_probability})"
            graph = Graph(name, num_nodes, (mixing_matrix(scipy.sparse.csr_array(adjacency), "uniform"),))
            pair = unreachable_pair(graph)
            if pair is None:
                return graph
    assert pair is not None
    raise ArgumentError(
        "edge_probability",
        "must make strongly connected graphs likely",
        f"none of {MAX_TRIES} draws of {num_nodes} nodes with edge_probability {edge_probability} was strongly "
        f"connected (the last has no path from node {pair[0]} to node {pair[1]})",
        f"Try {min(1.0, 2 * np.log(num_nodes) / num_nodes):.2g} or more.",
    )


def _edges_by_gaps(num_nodes: int, edge_probability: float, key: Array) -> scipy.sparse.csr_array:
    """(n, n) bool with a full diagonal, every other entry True with a probability, independently.

    The gaps between heads in a row of coins are geometric (Batagelj, Brandes 2005, Phys. Rev. E 71, 036113).
    """
    nodes = np.arange(num_nodes)
    words = np.asarray(jax.random.key_data(key)).astype(np.uint64).reshape(-1)
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(words.tolist())))
    total, chunks, last = num_nodes * (num_nodes - 1), [np.zeros(0, np.int64)], -1
    while edge_probability > 0 and last < total:
        mean = edge_probability * (total - last)
        gaps = generator.geometric(edge_probability, int(mean + 10 * mean**0.5 + 10))
        chunks.append(last + np.cumsum(gaps))
        last = int(chunks[-1][-1])
    places = np.concatenate(chunks)
    receiver, other = np.divmod(places[places < total], num_nodes - 1)
    rows, columns = np.append(receiver, nodes), np.append(other + (other >= receiver), nodes)
    return scipy.sparse.csr_array((np.ones(len(rows), bool), (rows, columns)), shape=(num_nodes, num_nodes))


@functools.lru_cache(maxsize=16)
def _edges(num_nodes: int, key_type: Any, number_type: np.dtype) -> Callable[[Array, np.ndarray], Array]:
    """(key, probability) -> independent coins, (n, n), bool.

    Compiled by hand: where JAX evaluates constants it runs one operation after the other, and holds what each gives
    (10,000 nodes: 1.5 GB and 24 s).
    """

    def coins(key: Array, probability: Array) -> Array:
        return jax.random.bernoulli(one_kernel(key), probability, (num_nodes, num_nodes))

    shapes = (jax.ShapeDtypeStruct((), key_type), jax.ShapeDtypeStruct((), number_type))
    return jax.jit(coins).lower(*shapes).compile()
