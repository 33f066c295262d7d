"""The states that a run has saved."""

from __future__ import annotations

import operator
from pathlib import Path

from jaxfl.core import ArgumentError, PyTree
from jaxfl.training.case import Case
from jaxfl.training.checkpoint import Checkpoints, Restored
from jaxfl.training.lanes import Lane, Uploads
from jaxfl.training.pass_directory import CHECKPOINTS, ENDED
from jaxfl.training.program import Program
from jaxfl.training.run_directory import RunDirectory


def restore_state(run: RunDirectory, name: str, case: Case, seed: int) -> tuple[int, PyTree]:
    """The newest saved state of one case and seed; of one that ended before others, the state at its end.

    Args:
        run: from `open_run` or `read_run`.
        name: of the case.
        case: as it was trained.
        seed: its seed.

    Returns:
        (round, state).

    Raises:
        ArgumentError: there is no readable checkpoint, or it is another run's, or holds a state of another form. One
            that diverged has no state at its end.
        OSError: it cannot be read.

    Guarantees:
        - reading a state changes nothing.
    """
    program = Program([Lane(name, case, seed, "")], Uploads())  # no key is made of it
    for one in run.passes:
        begun = one.begun() if (name, seed) in one.lanes else None
        if begun is not None:
            lane, slots = one.lanes.index((name, seed)), begun["slots"]
            restored = _restored(one.path / ENDED / str(lane), program.structure, one.owner)
            if restored is not None:
                return restored.round_index, restored.state
            restored = _restored(one.path / CHECKPOINTS, program.slots_structure(slots), one.owner)
            if restored is not None and restored.record["lanes"][lane]["ended"] is None:
                state = restored.state
                return restored.round_index, state if slots == 1 else program.map_lanes(
                    operator.itemgetter(lane), state
                )
    found, remedy = f"{name}, seed {seed}, has none in {run.path}", "Name a case and seed of this run."
    raise ArgumentError("case", "must have a readable checkpoint", found, remedy)


def _restored(directory: Path, structure: PyTree, owner: str) -> Restored | None:
    if not directory.exists():
        return None
    checkpoints = Checkpoints(directory, None, owner)
    try:
        return checkpoints.restore(structure)
    finally:
        checkpoints.close()
