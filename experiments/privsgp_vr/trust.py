"""Options of whom a node trusts: noise of its own, or noise that pairs of nodes share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

from jaxfl import graphs, privacy
from jaxfl.core import ArgumentError
from jaxfl.frame import where
from jaxfl.frame.choose import idle_options
from jaxfl.frame.options import ABSENT, added_later
from jaxfl.privacy.shared import check_colluding, check_ratio
from jaxfl.privacy.shared_grid_noise import check_power
from jaxfl.privacy.shared_ratio import SharedKeys


@dataclasses.dataclass(frozen=True)
class Trust:
    """Whom a node trusts."""

    COUNTS: ClassVar = (
        where("trust", ("pairs",), "key_graph", "shared_ratio", "colluding", "memory"),
        {"memory": lambda options: isinstance(options["shared_ratio"], str) or options["key_graph"] == "auto"},
    )
    trust: Literal["everyone", "pairs"] = added_later("everyone", {"everyone": ABSENT})
    """everyone: each node has noise of its own, and epsilon holds against all other nodes together. pairs: pairs of
    nodes share noise that cancels in the average. Epsilon then holds against whoever sees all messages and knows the
    secrets of as many nodes as colluding says."""
    key_graph: Literal["auto", "ring", "exponential", "complete", "mixing"] = "auto"
    """Pairs that share noise: ring, exponential (at distances 1, 2, 4, ...), complete, or mixing, the edges of the
    graph. auto: the best of mixing, exponential and complete."""
    shared_ratio: float | Literal["auto", "even"] = "auto"
    """Standard deviation of shared over own noise. auto: the one at which nodes are least noisy at their epsilon. even:
    the largest at which nodes are no noisier than with noise of their own, for where the average of all models counts
    (--final-mixings). On a grid the nearest power of two."""
    colluding: int = 1
    """Nodes that share their secrets with the observer; 0: an observer from outside."""
    memory: float = 10.0
    """Rounds that a state remembers, for the choice of shared_ratio and key_graph."""

    def counting(self) -> dict[str, Any]:
        """The options that count, for another experiment's request."""
        return {name: value for name, value in vars(self).items() if name not in idle_options(self, vars(self))}

    def choice(self, graph: graphs.Graph, num_mixings: int = 1, *, on_grid: bool = False) -> SharedKeys:
        """The pairs that share noise, and the ratio."""
        ratio = None if isinstance(self.shared_ratio, str) else self.shared_ratio
        least = "mean" if self.shared_ratio == "even" else "nodes"
        options = {"colluding": self.colluding, "memory": self.memory, "ratio": ratio, "least": least}
        best = privacy.best_ratio(graph, self.key_graph, num_mixings=num_mixings, **options)
        if not on_grid or ratio is not None or not best.ratio:
            return best
        options["ratio"] = 2.0 ** round(math.log2(best.ratio))
        return privacy.best_ratio(graph, best.key_graph, num_mixings=num_mixings, **options)

    def noise(self, keys: SharedKeys, grid_bits: int | None = None) -> Callable[..., privacy.NoiseMechanism]:
        """Standard deviation of the effective noise -> its mechanism, among the pairs of a choice."""
        options = {"key_graph": keys.key_graph, "ratio": keys.ratio, "colluding": self.colluding}
        return partial(privacy.shared_gaussian, **options, grid_bits=grid_bits)

    def check(self, num_nodes: int, method: str, success: float, *, on_grid: bool) -> None:
        """Refuse pairs where they bring nothing."""
        if self.trust == "everyone":
            return
        if method == "A(DP)2SGD":
            requirement = "must be everyone with A(DP)2SGD, where one node acts at a time: shared parts do not cancel"
            raise ArgumentError("trust", requirement, "got pairs", "Leave it out.")
        if method == "DP2-SGD" and success < 1:
            requirement = "must be 1 with DP2-SGD and pairs: its losses change the sum, in which shared parts cancel"
            raise ArgumentError("success", requirement, f"got {success:g}", "Leave it out, or pass --method PrivSGP.")
        check_colluding(num_nodes, self.colluding)
        if not isinstance(self.shared_ratio, str):
            check_ratio(shared_ratio=self.shared_ratio)
            if on_grid and self.shared_ratio:
                check_power(shared_ratio=self.shared_ratio)
