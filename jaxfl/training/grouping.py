"""Which lanes share a program, and what config.json keeps of what is trained."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxfl.channel import Costs, Ledger
from jaxfl.core import Array
from jaxfl.core.keys import digest
from jaxfl.training.case import Case
from jaxfl.training.lanes import Lane, Uploads
from jaxfl.training.program import Program


def lanes_of(cases: Mapping[str, Case], key: Array | None = None) -> list[Lane]:
    """Every case with each of its seeds, in the order of results.csv."""
    digests: dict[tuple[int, int], tuple[str, tuple[str, ...] | None]] = {}
    for case in cases.values():
        for seed in case.seeds:
            if (id(case.data), seed) not in digests:
                data = case.data(seed)
                digests[id(case.data), seed] = digest(data), data.names
    return [
        Lane(name, case, seed, *digests[id(case.data), seed], key)
        for name, case in cases.items()
        for seed in case.seeds
    ]


def programs_of(lanes: Sequence[Lane]) -> list[Program]:
    """The programs that lanes make, checked on the host; nothing is compiled.

    Args:
        lanes: of one run. Those whose cases differ in numbers alone, and whose data have the same shapes, share a
            program.

    Raises:
        ArgumentError: an algorithm cannot run on its data.
    """
    uploads = Uploads()
    groups: dict[Any, list[Lane]] = {}
    for lane in lanes:
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(uploads.of(lane)))
        groups.setdefault((_identity(lane.case), shapes), []).append(lane)
    programs = [Program(group, uploads) for group in groups.values()]
    for program in programs:
        program.check()
    return programs


def recorded_settings(lanes: Sequence[Lane]) -> dict[str, Any]:
    """Collect the settings of the training loop for config.json, which a resumed run must have, too."""
    tests = {id(lane.case.test): lane.case.test for lane in lanes}
    of_tests = {number: digest(test) for number, test in tests.items()}
    settings: dict[str, Any] = {}
    for name, case, seed, data_digest, *_ in lanes:
        if name not in settings:
            settings[name] = {**_settings(case), "data": {"test": of_tests[id(case.test)]}}
        settings[name]["data"][str(seed)] = data_digest
    return {"cases": settings}


def _identity(case: Case) -> Any:
    """Return the objects and settings that cases of one program have in common."""
    objects = (case.algorithm, case.data, case.task, case.test)
    rounds = (case.num_rounds, case.evaluate_every, case.chunk_rounds, case.placement)
    return tuple(map(id, objects)), rounds, tuple(case.measures.items()), tuple(sorted(case.numbers))


def _settings(case: Case) -> dict[str, Any]:
    """Collect the settings of a case for config.json, which a resumed run must have, too."""
    return {
        "seeds": case.seeds,
        "num_rounds": case.num_rounds,
        "max_rounds": case.max_rounds,
        "evaluate_every": case.evaluate_every,
        "chunk_rounds": case.rounds_per_call,
        "numbers": dict(case.numbers),
        "budgets": dict(case.budgets),
        **({"released": case.released} if case.released else {}),
        **({"ledger": _ledger_facts(case.ledger)} if case.ledger is not None else {}),
        "measures": list(case.measures),
        "test": list(case.test.counts.shape),
        "node_loop": case.task.node_loop,
    }


def _ledger_facts(ledger: Ledger | Costs) -> dict[str, Any]:
    """Its numbers; of those of each node a checksum, as there may be many."""

    def fact(value):
        if isinstance(value, Costs):
            return _ledger_facts(value)
        return float(value) if np.ndim(value) == 0 else zlib.crc32(np.asarray(value, np.float64).tobytes())

    return {name: fact(value) for name, value in ledger._asdict().items()}
