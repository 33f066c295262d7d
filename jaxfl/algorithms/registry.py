"""One row an algorithm, with the facts that tests and tools need. Tests read the row; they never test for a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxfl.algorithms import asynchronous_gossip, gossip
from jaxfl.algorithms.push_sum import push_sum
from jaxfl.algorithms.push_sum import released_gradients as released_by_push_sum
from jaxfl.core import Algorithm, PyTree


class Row(NamedTuple):
    """Facts about one algorithm."""

    constructor: Callable[..., Algorithm]
    topology: str  # "graph" for peer to peer, "server" for a server and its clients
    mixing: str  # what the mixing matrix must be: "column" or "doubly" (stochastic), "any" where only edges count
    private: bool  # takes a noise mechanism
    gradient: bool  # takes a gradient estimator
    sends: str  # what one node sends to one neighbor in one round
    released: Callable[..., PyTree]  # (graph, step_size, state before, state after) -> what messages tell of gradients
    undirected: bool  # refuses a graph that changes over time or has an edge without its reverse
    requires_noise: bool  # refuses to run without a noise mechanism
    stateful_gradient: bool  # takes estimators that keep state, such as SAGA tables
    synchronous: bool  # all nodes act at once in a round; else it is n events of random nodes, and `max_delay` is taken
    special_case_of: str | None = None  # the row whose rounds these are, on fewer arguments


REGISTRY: dict[str, Row] = {
    "push_sum": Row(
        constructor=push_sum,
        topology="graph",
        mixing="column",
        private=True,
        gradient=True,
        sends="params and push_sum_weight",
        released=released_by_push_sum,
        undirected=False,
        requires_noise=False,
        stateful_gradient=True,
        synchronous=True,
    ),
    "d_psgd": Row(
        constructor=gossip.d_psgd,
        topology="graph",
        mixing="doubly",
        private=True,
        gradient=True,
        sends="params",
        released=gossip.released_gradients,
        undirected=False,
        requires_noise=False,
        stateful_gradient=True,
        synchronous=True,
    ),
    "dp2_sgd": Row(
        constructor=gossip.dp2_sgd,
        topology="graph",
        mixing="doubly",
        private=True,
        gradient=True,
        sends="params",
        released=gossip.released_gradients,
        undirected=True,
        requires_noise=True,
        stateful_gradient=True,
        synchronous=True,
        special_case_of="d_psgd",
    ),
    "a_dp2_sgd": Row(
        constructor=asynchronous_gossip.a_dp2_sgd,
        topology="graph",
        mixing="any",
        private=True,
        gradient=True,
        sends="params",
        released=asynchronous_gossip.released_gradients,
        undirected=True,
        requires_noise=False,
        stateful_gradient=False,
        synchronous=False,
    ),
}
