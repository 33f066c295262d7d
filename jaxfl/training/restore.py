"""The states that a run has saved."""

from __future__ import annotations

import operator
from pathlib import Path

from jaxfl.core import ArgumentError, PyTree
from jaxfl.training.checkpoint import Checkpoints
from jaxfl.training.file_list import Owner
from jaxfl.training.lanes import Point, Uploads
from jaxfl.training.program import Program
from jaxfl.training.records import ENDED, RunDirectory
from jaxfl.training.variant import Variant


def restore_state(run: RunDirectory, name: str, variant: Variant, seed: int) -> tuple[int, PyTree]:
    """The newest saved state of one variant and seed; of one that ended before others, the state at its end.

    Args:
        run: from `open_run` or `read_run`.
        name: of the variant.
        variant: as it was trained.
        seed: its seed.

    Returns:
        (round, state).

    Raises:
        ArgumentError: there is no readable checkpoint, or it is another run's, or holds a state of another form.
        OSError: it cannot be read.

    Guarantees:
        - reading a state changes nothing.
    """
    point = Point(name, variant, seed, "")  # no key is made of it
    program = Program([point], Uploads())
    directory = run.lane_directory(name, seed)
    for path in (directory / ENDED, directory):
        restored = _restored(path, program.structure, Owner(run.fingerprint, (point.label,)))
        if restored is not None:
            return restored
    for index, recorded in enumerate(run.recorded_programs()):
        if [name, seed] in recorded["lanes"]:
            number, lane = divmod(recorded["lanes"].index([name, seed]), recorded["lanes_a_pass"])
            num_lanes = min(recorded["lanes_a_pass"], len(recorded["lanes"]) - number * recorded["lanes_a_pass"])
            first = number * recorded["lanes_a_pass"]
            owner = Owner(run.fingerprint, tuple((name, seed) for name, seed in recorded["lanes"][first:][:num_lanes]))
            restored = _restored(run.pass_directory(index, number), program.saved_structure(num_lanes), owner)
            if restored is not None:
                return restored[0], program.map_lanes(operator.itemgetter(lane), restored[1])
    remedy = "Name a variant and seed of this run."
    raise ArgumentError("variant", "must have a readable checkpoint", f"{directory} has none", remedy)


def _restored(directory: Path, structure: PyTree, owner: Owner) -> tuple[int, PyTree] | None:
    if not directory.exists():
        return None
    checkpoints = Checkpoints(directory, None, owner)
    try:
        restored = checkpoints.restore(structure)
        return None if restored is None else (restored.round_index, restored.state)
    finally:
        checkpoints.close()
