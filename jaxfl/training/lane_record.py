"""Record of a lane (a case with one seed) while it runs: totals, infos since its last metrics line, how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxfl.training.chunks import Infos, add_costs, doubtful, joined
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

    def spent(self) -> str | None:
        """Name a budget that is reached, rounds since the last line included; None without any."""
        budgets = self.lane.case.budgets
        totals = add_costs(self.totals, self.stretch) if budgets else {}
        return next(
            (f"{name} reached {totals[name]:g}" for name, most in budgets.items() if totals[name] >= most), None
        )

    def released(self) -> dict[str, dict[str, float | int]]:
        """Return, for the record of the end, the totals of all rounds that statements depend on, as "released"."""
        names = self.lane.case.released
        totals = add_costs(self.totals, self.stretch) if names else {}
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


def add_chunk(records: Sequence[LaneRecord], infos: Infos, fatal: Sequence[str] = ()) -> list[LaneRecord]:
    """Append a chunk's infos, with the costs that ledgers make of them, to the stretch of each lane.

    Args:
        records: of the lanes that go on.
        infos: field -> (slots, r, ...) values of r rounds, a row for each slot of the program.
        fatal: names of the counts that must stay 0.

    Returns:
        The lanes whose chunk `refuse_bad` refuses.

    Guarantees:
        - many lanes at once give what each gives alone.
    """
    groups: dict[int, list[LaneRecord]] = {}  # lanes by their ledger
    for record in records:
        groups.setdefault(id(record.lane.case.ledger), []).append(record)
    refused: set[int] = set()
    for group in groups.values():
        rows, ledger = [record.index for record in group], group[0].lane.case.ledger
        own = {name: values[rows] for name, values in infos.items()}
        own |= {} if ledger is None else ledger.of_round(own)._asdict()
        for at, record in enumerate(group):
            record.stretch.append({name: values[at] for name, values in own.items()})
        refused |= {rows[at] for at in np.flatnonzero(doubtful(own, fatal))}
    return [record for record in records if record.index in refused]
