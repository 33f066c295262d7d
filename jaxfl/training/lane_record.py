"""Record of a lane (a case with one seed) while it runs: totals, infos since its last metrics line, how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxfl.training.chunks import add_costs, joined
from jaxfl.training.lanes import Lane


@dataclass
class LaneRecord:
    """Record of one lane on the host."""

    index: int
    lane: Lane
    totals: dict[str, float | int]
    stretch: list[dict[str, np.ndarray]] = field(default_factory=list)  # infos since its last line, chunk by chunk
    last_line: int | None = None  # its round
    nodes: dict[str, list[float]] = field(default_factory=dict)  # metric -> every node's value at that line
    seconds: float = 0.0  # its share of the time that rounds took
    timed_rounds: int = 0
    ended: dict[str, Any] | None = None  # its record in `PassDirectory.finish`

    def add(self, infos: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Append a chunk's infos, with the ledger's results, to the stretch, and return these."""
        if self.lane.case.ledger is not None:
            infos = infos | self.lane.case.ledger.of_round(infos)._asdict()
        self.stretch.append(infos)
        return infos

    def spent(self) -> str | None:
        """Name a budget that is reached, rounds since the last line included; None without any."""
        budgets = self.lane.case.budgets
        totals = add_costs(self.totals, self.stretch) if budgets else {}
        return next(
            (f"{name} reached {totals[name]:g}" for name, most in budgets.items() if totals[name] >= most), None
        )

    def released(self) -> dict[str, dict[str, float | int]]:
        """Return, for the record of the end, the totals of all rounds that statements depend on, as "released"."""
        names, totals = self.lane.case.released, add_costs(self.totals, self.stretch)
        return {"released": {name: totals[name] for name in names}} if names else {}

    def saved(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The lane's record and its stretch, for a checkpoint."""
        whole = joined(self.stretch if self.ended is None else [])
        record = {"totals": self.totals, "last_line": self.last_line, "ended": self.ended}
        record |= {"nodes": self.nodes} if self.nodes and self.ended is None else {}
        return record, {f"{self.index}:{name}": values for name, values in whole.items()}

    def restore(self, record: Mapping[str, Any], stretches: Mapping[str, np.ndarray]) -> None:
        """Take over what `saved` gave; a stretch comes back bit for bit, as if of one chunk."""
        self.totals, self.last_line, self.ended = dict(record["totals"]), record["last_line"], record["ended"]
        self.nodes, own = record.get("nodes", {}), f"{self.index}:"
        infos = {name.removeprefix(own): values for name, values in stretches.items() if name.startswith(own)}
        self.stretch = [infos] if infos else []
