"""One row an algorithm, with the facts that tests and tools need. Tests read the row; they never test for a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxfl.algorithms.gossip import d_psgd
from jaxfl.algorithms.push_sum import push_sum
from jaxfl.core import Algorithm


class Row(NamedTuple):
    """Facts about one algorithm."""

    constructor: Callable[..., Algorithm]
    topology: str  # "graph" for peer to peer, "server" for a server and its clients
    mixing: str  # what the mixing matrix must be: "column" or "doubly" (stochastic)
    private: bool  # takes a noise mechanism
    gradient: bool  # takes a gradient estimator
    sends: str  # what one node sends to one neighbor in one round


REGISTRY: dict[str, Row] = {
    "push_sum": Row(push_sum, "graph", "column", True, True, "params and push_sum_weight"),
    "d_psgd": Row(d_psgd, "graph", "doubly", True, True, "params"),
}
