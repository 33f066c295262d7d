"""A run in parts: its lanes divided over processes that share no memory, and put together again as one run.

    divide       the lanes, a share of a program in every part
    part_of      the variants of one part; `train` them in a directory of its own, whose `is_part` is set
    merge        lines, ends and states of all parts, into the directory of the run
    train        of all variants in that directory then finds every lane ended, and writes tables and summary

A part is trained as every run is: it is killed, resumed and skipped like one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxfl.core import ArgumentError, Array
from jaxfl.core.check import at_least
from jaxfl.training.checkpoint import Checkpoints
from jaxfl.training.file_list import Owner
from jaxfl.training.grouping import points_of, programs_of, recorded_settings
from jaxfl.training.program import Program
from jaxfl.training.records import CONFIG, RunDirectory, lane_of, read_run
from jaxfl.training.restore import restore_state
from jaxfl.training.variant import Variant, check_variants

Lanes = tuple[tuple[str, int], ...]
"""(variant, seed) of each lane of a part."""


def divide(variants: Mapping[str, Variant], at_once: int, key: Array | None = None) -> list[Lanes]:
    """Divide the lanes of a run, so that about `at_once` parts have work at any time.

    Args:
        variants: as `train` takes them.
        at_once: parts that can run at the same time: jobs, or devices; at least 1.
        key: as `train` takes it.

    Returns:
        Parts, none of them empty. Each lane is in one of them, and no part has lanes of two programs. A program is
        shared out evenly where there are fewer programs than `at_once`. One whose lanes end in different rounds, or
        have budgets, stays whole: an end divides the chunks of all lanes, and sums of costs round chunk by chunk.

    Raises:
        ArgumentError: variants that cannot be trained.

    Guarantees:
        - every lane is in one part.
        - a program whose lanes may end apart stays whole.
    """
    at_least(1, at_once=at_once)
    check_variants(variants)
    programs = programs_of(points_of(variants, key))
    shares = -(-at_once // len(programs))
    parts = []
    for program in programs:
        labels = [point.label for point in program.points]
        count = min(shares, len(labels)) if _end_together(program) else 1
        for share in np.array_split(np.arange(len(labels)), count):
            parts.append(tuple(labels[index] for index in share))
    return parts


def part_of(variants: Mapping[str, Variant], lanes: Collection[tuple[str, int]]) -> dict[str, Variant]:
    """The variants with those of their seeds that are lanes of a part, in the order of the run.

    They state no privacy: the run does, when its parts are together.
    """
    own = {}
    for name, variant in variants.items():
        seeds = tuple(seed for seed in variant.seeds if (name, seed) in lanes)
        if seeds:
            own[name] = variant._replace(seeds=seeds, privacy=None)
    return own


def has_ended(path: str | os.PathLike[str], lanes: Lanes) -> bool:
    """Whether a directory holds a run in which all these lanes have ended."""
    return (Path(path) / CONFIG).exists() and len(read_run(path).finished(lanes)) == len(lanes)


def merge(run: RunDirectory, variants: Mapping[str, Variant], parts: Mapping[Lanes, RunDirectory]) -> None:
    """Put the parts of a run together in its directory, which then is as if one process had trained all lanes.

    Args:
        run: from `open_run`. What an earlier call left in it, that was cut off, is written again.
        variants: all of them, as they were divided.
        parts: lanes -> the directory in which they were trained.

    Raises:
        ArgumentError: a lane is in no part, or has not ended in it; another process is at work in the directory.
        OSError: a file cannot be read or written.

    Guarantees:
        - metrics.jsonl is that of one process that holds all lanes of a program at once, byte for byte.
        - states come over bit for bit.
        - the environment is that of the first part.
        - the parts stay as they are.
    """
    points = points_of(variants)
    part_with = {label: lanes for lanes in parts for label in lanes}
    ends: dict[tuple[str, int], dict[str, Any]] = {}
    for lanes, part in parts.items():
        ends |= part.finished(lanes)
    for point in points:
        if point.label not in ends:
            found = f"{point.name}, seed {point.seed}, has not ended in any"
            raise ArgumentError("parts", "must hold the end of every lane", found, "Train it, and merge again.")
    run.resumed = True  # from here on there is something to go on with, and nothing to withdraw
    with run.held():
        run.record_environment(next(iter(parts.values())).config["environment"])
        run.record_training(recorded_settings(points))
        run.keep_metrics_until(set(ends), None)
        shutil.rmtree(run.path / "checkpoints", ignore_errors=True)
        for program in programs_of(points):
            run.append_metrics(_lines_of(program, parts, part_with))
        for point in points:
            name, seed = point.label
            part = parts[part_with[point.label]]
            round_index, state = restore_state(part, name, part_of(variants, part_with[point.label])[name], seed)
            states = Checkpoints(run.lane_directory(name, seed), 1, Owner(run.fingerprint, (point.label,)))
            states.save(round_index, state, mark=list(run.mark()))
            states.close()
        for point in points:
            run.mark_finished(*point.label, ends[point.label])


def _lines_of(
    program: Program, parts: Mapping[Lanes, RunDirectory], part_with: Mapping[tuple[str, int], Lanes]
) -> list[dict[str, Any]]:
    """The lines of a program's lanes, in the order in which lanes that run together write them."""
    order = {point.label: index for index, point in enumerate(program.points)}
    sources = list(dict.fromkeys(part_with[label] for label in order))
    lines = [line for lanes in sources for line in parts[lanes].read_metrics() if lane_of(line) in order]
    if len(sources) > 1:
        lines.sort(key=lambda line: (line["round"], order[lane_of(line)]))
    return lines


def _end_together(program: Program) -> bool:
    """Whether no lane can end before another but by diverging."""
    variants: Sequence[Variant] = [point.variant for point in program.points]
    return len({variant.last_round for variant in variants}) == 1 and not any(v.budgets for v in variants)
