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
from jaxfl.training.lanes import Point, Uploads
from jaxfl.training.program import Program
from jaxfl.training.variant import Variant


def points_of(variants: Mapping[str, Variant], key: Array | None = None) -> list[Point]:
    """Every variant with each of its seeds, in the order of results.csv."""
    digests: dict[tuple[int, int], tuple[str, tuple[str, ...] | None]] = {}
    for variant in variants.values():
        for seed in variant.seeds:
            if (id(variant.data), seed) not in digests:
                data = variant.data(seed)
                digests[id(variant.data), seed] = digest(data), data.names
    return [
        Point(name, variant, seed, *digests[id(variant.data), seed], key)
        for name, variant in variants.items()
        for seed in variant.seeds
    ]


def programs_of(points: Sequence[Point]) -> list[Program]:
    """The programs that points make, checked on the host; nothing is compiled.

    Args:
        points: of one run. Those whose variants differ in numbers alone, and whose data have the same shapes, share a
            program.

    Raises:
        ArgumentError: an algorithm cannot run on its data.
    """
    uploads = Uploads()
    groups: dict[Any, list[Point]] = {}
    for point in points:
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(uploads.of(point)))
        groups.setdefault((_identity(point.variant), shapes), []).append(point)
    programs = [Program(group, uploads) for group in groups.values()]
    for program in programs:
        program.check()
    return programs


def recorded_settings(points: Sequence[Point]) -> dict[str, Any]:
    """Collect the settings of the training loop for config.json, which a resumed run must have, too."""
    tests = {id(point.variant.test): point.variant.test for point in points}
    of_tests = {number: digest(test) for number, test in tests.items()}
    settings: dict[str, Any] = {}
    for name, variant, seed, data_digest, *_ in points:
        if name not in settings:
            settings[name] = {**_settings(variant), "data": {"test": of_tests[id(variant.test)]}}
        settings[name]["data"][str(seed)] = data_digest
    return {"variants": settings}


def _identity(variant: Variant) -> Any:
    """Return the objects and settings that variants of one program have in common."""
    objects = (variant.algorithm, variant.data, variant.task, variant.test)
    rounds = (variant.num_rounds, variant.evaluate_every, variant.chunk_rounds, variant.placement)
    return tuple(map(id, objects)), rounds, tuple(variant.measures.items()), tuple(sorted(variant.numbers))


def _settings(variant: Variant) -> dict[str, Any]:
    """Collect the settings of a variant for config.json, which a resumed run must have, too."""
    return {
        "seeds": variant.seeds,
        "num_rounds": variant.num_rounds,
        "max_rounds": variant.max_rounds,
        "evaluate_every": variant.evaluate_every,
        "chunk_rounds": variant.rounds_per_call,
        "numbers": dict(variant.numbers),
        "budgets": dict(variant.budgets),
        **({"released": variant.released} if variant.released else {}),
        **({"ledger": _ledger_facts(variant.ledger)} if variant.ledger is not None else {}),
        "measures": list(variant.measures),
        "test": list(variant.test.counts.shape),
        "node_loop": variant.task.node_loop,
    }


def _ledger_facts(ledger: Ledger | Costs) -> dict[str, Any]:
    """Its numbers; of those of each node a checksum, as there may be many."""

    def fact(value):
        if isinstance(value, Costs):
            return _ledger_facts(value)
        return float(value) if np.ndim(value) == 0 else zlib.crc32(np.asarray(value, np.float64).tobytes())

    return {name: fact(value) for name, value in ledger._asdict().items()}
