"""Host's record of a lane while it runs, and the form of infos without a line yet in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxfl.training.chunks import Infos, add_costs
from jaxfl.training.lanes import Point

_INFO = "info:"


@dataclass
class LaneRecord:
    """Record of one lane on the host."""

    index: int
    point: Point
    totals: dict[str, float | int]
    stretch: list[Infos] = field(default_factory=list)  # infos since its last line, chunk by chunk
    last_line: int | None = None  # its round
    seconds: float = 0.0  # its share of the time that rounds took
    timed_rounds: int = 0
    ended: dict[str, Any] | None = None  # the record of `RunDirectory.mark_finished`

    def add(self, infos: Infos) -> Infos:
        """Append a chunk's infos to the stretch, with what the ledger makes of them, and return these."""
        if self.point.variant.ledger is not None:
            infos = infos | self.point.variant.ledger.of_round(infos)._asdict()
        self.stretch.append(infos)
        return infos

    def spent(self) -> str | None:
        """Which budget is reached, by the rounds since the last line, too; None without any."""
        budgets = self.point.variant.budgets
        totals = add_costs(self.totals, self.stretch) if budgets else {}
        return next(
            (f"{name} reached {totals[name]:g}" for name, most in budgets.items() if totals[name] >= most), None
        )

    def released(self) -> dict[str, dict[str, float | int]]:
        """Return the part for statements in the record of its end: "released", the totals of all rounds that ran."""
        names, totals = self.point.variant.released, add_costs(self.totals, self.stretch)
        return {"released": {name: totals[name] for name in names}} if names else {}


def packed(lanes: Sequence[LaneRecord], fields: Sequence[str]) -> dict[str, np.ndarray]:
    """The stretches of lanes as arrays; none where they are empty.

    Args:
        lanes: those that run; all had their last line in the same round.
        fields: of the infos; what a ledger made of them is made again.

    Guarantees:
        - stretches come back bit for bit, as if of one chunk.
    """
    if not lanes or not lanes[0].stretch:
        return {}
    whole = {"lanes": np.array([lane.index for lane in lanes], np.int32)}
    for name in fields:
        whole[_INFO + name] = np.stack([np.concatenate([infos[name] for infos in lane.stretch]) for lane in lanes])
    return whole


def unpack(lanes: Sequence[LaneRecord], arrays: Mapping[str, np.ndarray]) -> None:
    """Give lanes the stretches that `packed` made arrays of."""
    by_index = {lane.index: lane for lane in lanes}
    for row, index in enumerate(arrays["lanes"].tolist() if "lanes" in arrays else ()):
        names = [name for name in arrays if name.startswith(_INFO)]
        # Contiguous, as they came from the device: the order of a sum depends on it.
        by_index[index].add({name.removeprefix(_INFO): np.ascontiguousarray(arrays[name][row]) for name in names})


def rounds_since_line(lane: LaneRecord) -> int:
    """Rounds of its stretch."""
    return sum(_num_rounds(infos) for infos in lane.stretch)


def _num_rounds(infos: Infos) -> int:
    return len(next(iter(infos.values())))
