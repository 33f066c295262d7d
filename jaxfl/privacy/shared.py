"""Noise that pairs of nodes share, and what an observer still does not know of a node's noise. JAX is not imported.

Nodes i and v of a key graph share a secret seed. In every round node i adds to its gradient

    N_i = s_i xi_i + sum over v of sign(v - i) c_iv xi_iv

with standard normal numbers; both ends of a pair draw the same xi_iv, so that shared parts cancel in the sum over
nodes. s is the own and c the shared standard deviation. Over nodes N has the covariance Sigma = diag(s^2) + L, with L
the Laplacian of the key graph with weights c^2.

An observer sees all messages, and knows data, noise and seeds of a fixed set A of colluding nodes. Sigma_A is Sigma
over the honest nodes without the pairs of A. The *effective* noise of node u is sigma_u = 1 / sqrt((Sigma_A^-1)_uu).

Split lemma: N = sigma_u zeta e_u + R, with zeta standard normal and R independent of it. Proof: by Cauchy and Schwarz
x_u^2 <= x' Sigma_A x (Sigma_A^-1)_uu, so that Sigma_A - sigma_u^2 e_u e_u' is positive semidefinite: a covariance of R.
R and all else that is seen is made without the changed sample of u from releases g_u + sigma_u zeta so far, so every
bound for noise of one's own of standard deviation sigma_u holds for u as it stands, adaptively over rounds.

A record that two nodes hold is out of scope: with shared noise it costs more than with noise of one's own.

References:
    Allouah, Koloskova, El Firdoussi, Jaggi, Guerraoui: "The Privacy Power of Correlated Noise in Decentralized
    Learning" (DECOR), ICML 2024, arXiv:2405.01031.
    Sabater, Bellet, Ramon: "An Accurate, Scalable and Verifiable Protocol for Federated Differentially Private
    Averaging" (GOPA), Machine Learning 2022.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxfl.core.check import ArgumentError, at_least, is_traced, one_of, positive

if TYPE_CHECKING:
    from jaxfl.graphs import Graph

KEY_GRAPHS = ("ring", "exponential", "complete")
MOST_RATIO = 1e3  # float32 leaves 1e-7 c of a shared part in the sum over nodes: a ten-thousandth of s here
_MOST_SETS = 100_000  # colluding sets times nodes that are tried
_CHUNK = 512  # sets whose matrices are in memory together


@dataclasses.dataclass(frozen=True, eq=False)
class KeyGraph:
    """Pairs of nodes that share a seed; made by `key_graph` or `pairs`.

    Attributes:
        name: "ring", "exponential", "complete", or that of a communication graph.
        weights: (n, n) float64, symmetric, zero on the diagonal: the shared standard deviation at ratio 1 and own noise
            1; 0 where two nodes share no seed.
    """

    name: str
    weights: np.ndarray

    @property
    def num_nodes(self) -> int:
        """n."""
        return len(self.weights)

    @functools.cached_property
    def is_complete(self) -> bool:
        """True where all pairs share noise of the same weight, 1."""
        return bool((self.weights + np.eye(self.num_nodes) == 1).all())

    @functools.cached_property
    def is_circulant(self) -> bool:
        """True where every node sees the same graph, weights included, up to a shift."""
        rows = np.stack([np.roll(row, -node) for node, row in enumerate(self.weights)])
        return bool((rows == rows[0]).all())

    def shared(self, own: np.ndarray) -> np.ndarray:
        """Shared standard deviations at ratio 1, (n, n): the weight times the smaller of both nodes' own noise."""
        return self.weights * np.minimum(own[:, None], own[None, :])


class Effective(NamedTuple):
    """Effective noise against the worst colluding nodes."""

    noise: np.ndarray  # (n,), or (ratios, n)
    method: str  # "exact", or "bound" where it is bounded from below


_SERVER = "the server sees every update, holds no seed, and the nodes are the active clients of a round"


class Secrets(NamedTuple):
    """Secrets of shared noise that an observer does not know, as statements say it."""

    key_graph: str
    num_nodes: int
    colluding: int
    method: str  # of `Effective`; "sum" where a server sees nothing but the sum over clients
    partners: tuple[int, ...]  # of each node, with whom it has agreed on a seed

    @property
    def observer(self) -> str:
        """From whom a node's effective noise protects, in words.

        Examples:
            >>> [Secrets("ring", 16, colluding, "exact", ()).observer for colluding in (0, 1, 2, 15)]
            ['an outside observer', 'any one other node', 'any 2 other nodes together', 'all other nodes']
        """
        if self.colluding >= self.num_nodes - 1:
            return "all other nodes"
        few = ("an outside observer", "any one other node")
        return few[self.colluding] if self.colluding < 2 else f"any {self.colluding} other nodes together"

    @property
    def with_server(self) -> tuple[str, tuple[str, ...]]:
        """This observer together with a server of clients, and sentences on what both see and know."""
        if self.method != "sum":
            return f"the server and {self.observer}", (self.setting, _SERVER)
        sees = (
            "the server sees only the sum of all active clients' messages (secure aggregation), and may know data,"
            f" batches and noise of {self.colluding} of {self.num_nodes} clients, chosen before anything was seen; the"
            " noise is what the others add to the sum together"
        )
        return f"a server that sees sums only and {self.observer}", (sees,)

    @property
    def setting(self) -> str:
        """Sentence on what this observer sees and knows, and on how the noise is computed."""
        how = {"exact": "the exact least", "bound": "a lower bound by currents"}[self.method]
        return (
            f"{self.observer} may see all messages, but no losses or metrics, and know data, batches, noise and seeds"
            f" of {self.colluding} of {self.num_nodes} nodes, chosen before anything was seen; pairs of the others"
            f" share seeds that it does not know ({self.key_graph} key graph); the noise is the effective one against"
            f" it, {how} over all such nodes"
        )


def pairs(num_nodes: int, edges: Sequence[tuple[int, int]], weights: Any = 1.0, name: str = "pairs") -> KeyGraph:
    """Make a key graph from its pairs.

    Args:
        num_nodes: n.
        edges: pairs of nodes, each once, in either order.
        weights: shared standard deviation at ratio 1 and own noise 1, one or one for each pair, positive.
        name: for statements.

    Raises:
        ArgumentError: a pair of a node with itself, a node beyond the last, a pair that stands twice.
    """
    at_least(1, num_nodes=num_nodes)
    positive(weights=weights)
    ends = np.asarray(edges, int).reshape(-1, 2)
    remedy = "Pass each pair of different nodes once."
    if ends.size and (ends.min() < 0 or ends.max() >= num_nodes or (ends[:, 0] == ends[:, 1]).any()):
        raise ArgumentError("edges", f"must join different nodes below {num_nodes}", f"got {edges!r:.60}", remedy)
    if len({frozenset(pair) for pair in ends.tolist()}) < len(ends):
        raise ArgumentError("edges", "must hold each pair once", f"got {edges!r:.60}", remedy)
    each = np.zeros((num_nodes, num_nodes))
    each[ends[:, 0], ends[:, 1]] = each[ends[:, 1], ends[:, 0]] = weights
    return KeyGraph(name, each)


def key_graph(which: str | Graph | KeyGraph, num_nodes: int) -> KeyGraph:
    """Make a key graph of weight 1 over n nodes.

    Args:
        which: "ring", "exponential" (pairs at distances 1, 2, 4, ...), "complete", or a communication graph, whose
            edges of all rounds are taken, in either direction. A key graph passes.
        num_nodes: n.

    Raises:
        ArgumentError: another name, or a graph over another number of nodes.

    Examples:
        >>> key_graph("ring", 4).weights.astype(int).tolist()
        [[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]]
    """
    at_least(1, num_nodes=num_nodes)
    if not isinstance(which, str):
        if which.num_nodes != num_nodes:
            found = f"{which.name} has {which.num_nodes}"
            raise ArgumentError("key_graph", f"must be over {num_nodes} nodes", found, "Make it for the network.")
        if isinstance(which, KeyGraph):
            return which
        joined = (which.mixing_matrices > 0).any(axis=0)
        return KeyGraph(which.name, np.where(np.eye(num_nodes, dtype=bool), 0.0, joined | joined.T))
    one_of(KEY_GRAPHS, key_graph=which)
    powers = [2**power for power in range(num_nodes.bit_length()) if 2**power < num_nodes]
    offsets = {"ring": powers[:1], "exponential": powers, "complete": range(1, num_nodes)}[which]
    nodes, weights = np.arange(num_nodes), np.zeros((num_nodes, num_nodes))
    for offset in offsets:
        there = (nodes + offset) % num_nodes
        weights[nodes, there] = weights[there, nodes] = 1.0
    return KeyGraph(which, weights)


def check_ratio(**ratios: Any) -> None:
    """Each value is a static ratio of shared to own noise, 0 ... 1,000."""
    for name, ratio in ratios.items():
        if is_traced(ratio) or not (isinstance(ratio, numbers.Real) and 0 <= float(ratio) <= MOST_RATIO):
            found = "got a traced value" if is_traced(ratio) else f"got {ratio!r}"
            remedy = "Pass the ratio that best_ratio finds."
            raise ArgumentError(name, f"must be a number from 0 to {MOST_RATIO:g}, not traced", found, remedy)


def check_colluding(num_nodes: int, colluding: Any) -> None:
    """Refuse a number of colluding nodes that leaves nobody honest."""
    at_least(0, colluding=colluding)
    if colluding >= num_nodes:
        requirement = f"must leave one of {num_nodes} nodes honest"
        raise ArgumentError("colluding", requirement, f"got {colluding}", "Pass fewer.")


def noise_against(own: Any, shared: Any, colluders: Sequence[int]) -> np.ndarray:
    """Effective noise of every node against one set of colluding nodes, (n,), inf at these.

    Args:
        own: s, (n,), positive.
        shared: c, (n, n), symmetric; 0 where two nodes share no seed.
        colluders: nodes of A.

    Guarantees:
        - falls with every node that joins A, and grows in own and shared noise.

    Examples:
        >>> noise_against([1.0, 1.0, 1.0], key_graph("complete", 3).weights, [2]).round(3).tolist()
        [1.225, 1.225, inf]
    """
    own, sets = np.asarray(own, np.float64), np.array([sorted(colluders)], int)
    return _against(own, np.asarray(shared, np.float64), sets, np.ones(1))[0, 0]


def _against(own: np.ndarray, shared: np.ndarray, sets: np.ndarray, ratios: np.ndarray) -> np.ndarray:
    """(sets, ratios, n) effective noise, inf at colluding nodes, from sets (sets, |A|).

    Sigma_A = D (1 + ratio^2 K) D with D the own noise: one spectrum of K serves all ratios.
    """
    honest = np.array([np.setdiff1d(np.arange(len(own)), colluders) for colluders in sets])
    parts = -np.square(shared)[honest[:, :, None], honest[:, None, :]]
    diagonal = np.arange(honest.shape[1])
    parts[:, diagonal, diagonal] = -parts.sum(axis=2)
    scales = own[honest]
    values, vectors = np.linalg.eigh(parts / (scales[:, :, None] * scales[:, None, :]))
    damped = 1 / (1 + np.square(ratios)[None, :, None] * np.maximum(values, 0)[:, None, :])
    inverse = damped @ np.square(vectors).transpose(0, 2, 1)
    noise = np.full((len(sets), len(ratios), len(own)), np.inf)
    np.put_along_axis(noise, np.broadcast_to(honest[:, None, :], inverse.shape), scales[:, None] / np.sqrt(inverse), 2)
    return noise


def effective_noise(keys: KeyGraph, *, ratio: Any, own: Any = 1.0, colluding: int = 1) -> Effective:
    """Effective noise of every node against the worst set of colluding nodes.

    It is exact where all sets can be tried (at most 100,000 of them times nodes), on a complete key graph with equal
    noise, and where no node has more partners than there are colluding nodes. Else it is bounded from below: with the
    unit voltage at u, current I_a enters node a, and sigma_u(A)^2 >= sigma_u^2 - the sum of the |A| largest I_a. (Take
    away all paths of the current through A: a flow h <= f of strength C_u - sum I_a is left. Its energy is at most its
    strength, for the voltage falls from 1 to 0 on every path. By Thomson's principle C_u without A is at least that.)

    Args:
        keys: pairs that share noise.
        ratio: c / s, one number, or several, (ratios,).
        own: s, one number or (n,).
        colluding: |A|; 0 for an observer from outside.

    Returns:
        The noise of each node, (n,) or (ratios, n). With |A| >= n - 1 it is the own one.

    Guarantees:
        - never above the noise against any set of that many nodes.

    Examples:
        >>> round(float(effective_noise(key_graph("ring", 16), ratio=3.0).noise[0]), 4)
        1.8817
    """
    n, ratios = keys.num_nodes, np.atleast_1d(np.asarray(ratio, np.float64))
    check_colluding(n, colluding)
    positive(own=own)
    equal = np.ptp(own) == 0
    own = np.broadcast_to(np.asarray(own, np.float64), (n,))
    shared, method = keys.shared(own), "exact"
    orbit = keys.is_circulant and equal  # node 0 stands for all
    others = range(1, n) if orbit else range(n)
    if keys.is_complete and equal:
        honest, squares = n - colluding, np.square(ratios)
        noise = own * np.sqrt((1 + honest * squares) / (1 + squares))[:, None]
    elif colluding >= (shared > 0).sum(axis=1).max():
        noise = np.broadcast_to(own, (len(ratios), n))
    elif math.comb(n - 1, colluding) * (1 if orbit else n) <= _MOST_SETS:
        noise, sets = np.full((len(ratios), n), np.inf), itertools.combinations(others, colluding)
        while some := list(itertools.islice(sets, _CHUNK)):
            noise = np.minimum(noise, _against(own, shared, np.array(some, int), ratios).min(axis=0))
        noise = noise[:, :1] if orbit else noise
    else:
        noise, method = np.stack([_by_currents(own, each * shared, colluding, orbit) for each in ratios]), "bound"
    noise = np.broadcast_to(noise, (len(ratios), n))
    return Effective(noise if np.ndim(ratio) else noise[0], method)


def calibrated(keys: KeyGraph, *, ratio: float, own: Any = 1.0, colluding: int = 1) -> tuple[float, Secrets]:
    """The factor on own noise with which no node's effective noise is below `own`, and what protects it.

    Args:
        keys, ratio, colluding: as for `effective_noise`.
        own: effective noise that nodes shall have, one number or (n,).

    Examples:
        >>> factor, secrets = calibrated(key_graph("complete", 16), ratio=1.0, colluding=0)
        >>> round(1 / factor, 6), secrets.observer
        (2.915476, 'an outside observer')
    """
    worth = effective_noise(keys, ratio=ratio, own=own, colluding=colluding)
    partners = tuple((keys.weights > 0).sum(axis=1).tolist())
    return float((own / worth.noise).max()), Secrets(keys.name, keys.num_nodes, colluding, worth.method, partners)


def _by_currents(own: np.ndarray, shared: np.ndarray, colluding: int, orbit: bool) -> np.ndarray:
    """The bound by currents, (n,), or (1,) for node 0 of an orbit."""
    squares = np.square(shared)
    inverse = np.linalg.inv(np.diag(np.square(own) + squares.sum(axis=1)) - squares)
    noise = []
    for node in range(1 if orbit else len(own)):
        voltage = inverse[node] / inverse[node, node]
        entering = (squares * np.maximum(voltage[:, None] - voltage[None, :], 0)).sum(axis=0)
        entering[node] = 0
        left = 1 / inverse[node, node] - np.sort(entering)[len(own) - colluding :].sum()
        noise.append(max(own[node] ** 2, left))
    return np.sqrt(noise)
