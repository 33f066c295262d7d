"""The base-(k+1) graph: at most k neighbors a round, and the exact mean after a period, for any number of nodes.

Takezawa, Sato, Bao, Niwa, Yamada, "Beyond Exponential Graph: Communication-Efficient Topologies for Decentralized
Learning via Finite-time Convergence", NeurIPS 2023, arXiv:2305.11420, Algorithms 1 to 3.

A hyper-hypercube of m = m_1 ... m_l nodes, each m_t at most k + 1, joins in round t the nodes that differ in digit t of
the mixed radix. Other numbers are n = sum_l a_l (k+1)^{p_l}, p_1 > p_2 > ..., 1 <= a_l <= k: V_l is a_l subsets of
(k+1)^{p_l} nodes.

    1. Each V_l runs its hyper-hypercube until V_1 is done; shorter ones begin again.
    2. For l = 1, 2, ...: each node of V_{l+1}, V_{l+2}, ... joins one fresh node of each subset of V_l, with weight
       |V_l| / (a_l sum_{l' >= l} |V_l'|).
    3. After its turn each subset of V_l runs its hyper-hypercube.

For n = q m, q without a prime factor above k + 1, such a sequence of m in each of q groups and a hyper-hypercube across
them do it, too. The shorter one is taken.

Differences from the paper: nodes that wait keep their values (the authors' code mixes some of them, with the same
product).
"""

from __future__ import annotations

import math
from itertools import chain

import numpy as np
import scipy

from jaxfl.core import check
from jaxfl.core.calls import by_name
from jaxfl.graphs.graph import Graph

_Edges = list[tuple[int, int, float]]  # (node, node, weight both ways) of one round


@by_name
def base(num_nodes: int, num_neighbors: int) -> Graph:
    """The base-(k+1) graph: undirected, doubly stochastic, and a period is the exact mean.

    Args:
        num_nodes: n, at least 1.
        num_neighbors: k, at least 1: the most neighbors of a node in a round.

    Returns:
        A graph that changes over rounds. Methods with one matrix for all rounds refuse it. With `num_mixings` of its
        period a round takes the exact mean.

    Guarantees:
        - the product over a period is the mean, each matrix is symmetric, and no node has more than k neighbors.

    Examples:
        >>> base(6, 1).period, base(8, 1).period, base(9, 2).period, base(6, 1).out_degree.max().item()
        (4, 3, 2, 1)
        >>> np.linalg.multi_dot(base(6, 1).mixing_matrices)[0].round(3).tolist()
        [0.167, 0.167, 0.167, 0.167, 0.167, 0.167]
    """
    check.at_least(1, num_nodes=num_nodes)
    check.at_least(1, num_neighbors=num_neighbors)
    most = num_neighbors + 1
    rounds, shared = _simple(list(range(num_nodes)), most), _smooth_part(num_nodes, most)
    if 1 < shared < num_nodes:
        copies = np.arange(num_nodes).reshape(shared, -1)
        inner = zip(*(_simple(copy.tolist(), most) for copy in copies), strict=True)
        across = zip(*(_hypercube(one.tolist(), most) for one in copies.T), strict=True)
        rounds = min(rounds, [[*chain.from_iterable(edges)] for edges in (*inner, *across)], key=len)
    matrices = tuple(_matrix(edges, num_nodes) for edges in rounds or [[]])
    return Graph(f"base({num_nodes}, {num_neighbors})", num_nodes, matrices)


def _simple(nodes: list[int], most: int) -> list[_Edges]:
    """The rounds of Algorithm 2."""
    if _smooth_part(len(nodes), most) == len(nodes):
        return _hypercube(nodes, most)
    digits = [(len(nodes) // most**p % most, most**p) for p in range(int(math.log(len(nodes), most)) + 1, -1, -1)]
    places = iter(nodes)
    # V_1, V_2, ..., each a list of its equal subsets.
    parts = [[[next(places) for _ in range(size)] for _ in range(count)] for count, size in digits if count]
    cubes = [_hypercube([*chain.from_iterable(part)], most) for part in parts]
    first = len(cubes[0])
    rounds: list[_Edges] = [[] for _ in range(2 * first + len(parts))]
    for cube in cubes:
        for place in range(first if cube else 0):
            rounds[place] += cube[place % len(cube)]
    for turn, part in enumerate(parts[:-1]):
        later, place = [node for other in parts[turn + 1 :] for subset in other for node in subset], first + turn
        own = len(part) * len(part[0])
        weight = own / (len(part) * (own + len(later)))
        for subset in part:
            rounds[place] += [(node, fresh, weight) for node, fresh in zip(later, subset, strict=False)]
            for wait, edges in enumerate(_hypercube(subset, most)):
                rounds[place + 1 + wait] += edges
    return [edges for edges in rounds if edges]


def _hypercube(nodes: list[int], most: int) -> list[_Edges]:
    """The rounds of Algorithm 1, for a number of nodes without a prime factor above `most`."""
    rounds, stride = [], 1
    for radix in _radices(len(nodes), most):
        places = np.array(nodes).reshape(-1, radix, stride)
        cliques = places.transpose(0, 2, 1).reshape(-1, radix).tolist()
        rounds.append([(a, b, 1 / radix) for one in cliques for i, a in enumerate(one) for b in one[:i]])
        stride *= radix
    return rounds


def _radices(count: int, most: int) -> list[int]:
    """Fewest factors of `count`, each in [2, most]; `count` has no prime factor above `most`."""
    if count == 1:
        return []
    options = [radix for radix in range(min(most, count), 1, -1) if count % radix == 0]
    return min(([radix, *_radices(count // radix, most)] for radix in options), key=len)


def _smooth_part(count: int, most: int) -> int:
    """The largest divisor of `count` whose prime factors are at most `most`."""
    part = 1
    for prime in range(2, most + 1):
        while count % prime == 0:
            part, count = part * prime, count // prime
    return part


def _matrix(edges: _Edges, num_nodes: int) -> scipy.sparse.csr_array:
    """The symmetric matrix of a round, rows summing to 1."""
    one, other, weights = (
        (np.array(column) for column in zip(*edges, strict=True)) if edges else (np.zeros(0, int),) * 3
    )
    own = 1 - np.bincount(np.r_[one, other], np.r_[weights, weights], num_nodes)
    rows, columns = np.r_[one, other, :num_nodes], np.r_[other, one, :num_nodes]
    entries = np.r_[weights, weights, own], (rows, columns)
    return scipy.sparse.csr_array(entries, shape=(num_nodes, num_nodes))
