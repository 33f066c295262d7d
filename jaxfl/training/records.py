"""What a run leaves on disk, and what a resumed run may rely on.

    config.json      the resolved configuration, the settings of the training loop, and the environment
    metrics.jsonl    one line per evaluation, appended and flushed to disk; holds no times, so that a resumed run
                     reproduces it byte for byte
    summary.json, results.csv    written when the run ends
    privacy.json     the epsilon of every node, where there is any; summary.json has that of the worst, and the median
    checkpoints/<variant>/seed_<s>/    finished.json once that lane has ended, <round>/ (see `checkpoint.py`) of a lane
                     that ran by itself, and ended/<round>/ of one that ended before the others, or diverged
    checkpoints/lanes_<program>_<pass>/<round>/    of lanes that ran together
    plots/           pictures
    private/key      the key of a run that is published, of mode 0600 (`secret_key.py`)

Checkpoints hold raw gradients (tables of SAGA) and states without noise; metrics, status and pictures are measured
without noise. No statement of privacy covers them: `publish.py` copies what is covered.

Every file but metrics.jsonl is replaced atomically. A line of metrics.jsonl is on disk before the checkpoint of its
round, so that whatever checkpoint a resumed run finds, the lines up to it are there. A lane's finished.json is there
before the first checkpoint behind its end, so that one of an older checkpoint is known to be out of date.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxfl.core import ArgumentError
from jaxfl.training.environment import describe_environment
from jaxfl.training.json_files import jsonable, read_json, refuse_difference, write_atomically, write_json

CONFIG, METRICS, SUMMARY, FINISHED = "config.json", "metrics.jsonl", "summary.json", "finished.json"
PRIVACY = "privacy.json"
PRIVATE = "private"
ENDED = "ended"  # beside finished.json: the state of a lane that ended before the others, or diverged
_PROGRAMS = "programs"  # in "training": what was measured and chosen, not compared on resume

_BITS_DEPEND_ON = ("jax", "jaxlib", "platform", "device_kind", "x64")


class RunDirectory:
    """One run's directory. Build it with `open_run`.

    Attributes:
        path: the directory.
        config: content of config.json: "experiment", "preset", "config", "environment" and, once training has begun,
            "training".
        resumed: whether a run was found and is continued.
    """

    def __init__(self, path: Path, config: dict[str, Any], *, resumed: bool):
        self.path, self.config, self.resumed = path, config, resumed

    def record_training(self, settings: Mapping[str, Any]) -> None:
        """Add the training loop's settings to config.json, or compare them with those already there.

        Raises:
            ArgumentError: a setting differs from the run that is resumed.
        """
        given = jsonable(settings, "training")
        if "training" in self.config:
            recorded = {name: value for name, value in self.config["training"].items() if name != _PROGRAMS}
            refuse_difference(recorded, given, self.path)
            return
        self.config = {**self.config, "training": {**given, _PROGRAMS: []}}
        write_json(self.path / CONFIG, self.config)

    def record_program(self, index: int, choice: Mapping[str, Any]) -> None:
        """Add how the lanes of a program, counted from 0, are computed; programs come in their order."""
        training = self.config["training"]
        programs = [*training[_PROGRAMS][:index], jsonable(choice, _PROGRAMS)]
        self.config = {**self.config, "training": {**training, _PROGRAMS: programs}}
        write_json(self.path / CONFIG, self.config)

    def recorded_programs(self) -> list[dict[str, Any]]:
        """What `record_program` noted."""
        return self.config.get("training", {}).get(_PROGRAMS, [])

    def withdraw(self) -> None:
        """Undo `open_run` of a run that was refused before anything was trained; one that was found stays as it is."""
        if not self.resumed:
            (self.path / CONFIG).unlink(missing_ok=True)
            shutil.rmtree(self.path / PRIVATE, ignore_errors=True)
            with contextlib.suppress(OSError):  # other files are there
                self.path.rmdir()

    def append_metrics(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines and flush them to disk together."""
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        with open(self.path / METRICS, "ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self) -> list[dict[str, Any]]:
        """All complete lines; one that was cut off while being written is left out.

        Raises:
            ArgumentError: a line other than the last is not JSON.
        """
        return [line for _, line in self._lines()]

    def keep_metrics_until(self, lanes: Collection[tuple[str, int]], round_index: int | None) -> list[dict[str, Any]]:
        """Drop every line behind the last of these lanes' up to a round, atomically.

        Args:
            lanes: (variant, seed) of those that are about to go on together.
            round_index: the round of their checkpoint; None drops all their lines and all that follow.

        Returns:
            The lines of these lanes that remain.

        Guarantees:
            - exactly the lines up to the checkpoint remain, byte for byte.
        """
        lines = self._lines()
        own = [index for index, (_, line) in enumerate(lines) if lane_of(line) in lanes]
        if round_index is None:
            end = own[0] if own else len(lines)
        else:
            end = 1 + max((index for index in own if lines[index][1]["round"] <= round_index), default=len(lines) - 1)
        kept = b"".join(raw for raw, _ in lines[:end])
        path = self.path / METRICS
        if not path.exists() or path.read_bytes() != kept:
            write_atomically(path, kept)
        return [lines[index][1] for index in own if index < end]

    def lane_directory(self, variant: str, seed: int) -> Path:
        """Where finished.json and the checkpoints of one (variant, seed) lie."""
        return self.path / "checkpoints" / slug(variant) / f"seed_{seed}"

    def pass_directory(self, program: int, number: int) -> Path:
        """Where the checkpoints of lanes lie that ran together, both counted from 0."""
        return self.path / "checkpoints" / f"lanes_{program}_{number}"  # no slug has an underscore

    def mark_finished(self, variant: str, seed: int, record: Mapping[str, Any]) -> None:
        """Note that (variant, seed) has ended; `record` holds at least "round", that of its last line."""
        write_json(self.lane_directory(variant, seed) / FINISHED, jsonable(record, FINISHED))

    def finished(
        self, lanes: Iterable[tuple[str, int]], lines: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[tuple[str, int], dict[str, Any]]:
        """The records of those of these lanes that have ended and whose lines are all there.

        Args:
            lanes: (variant, seed).
            lines: of metrics.jsonl; read where they are not given.
        """
        last = {lane_of(line): line["round"] for line in (self.read_metrics() if lines is None else lines)}
        paths = {lane: self.lane_directory(*lane) / FINISHED for lane in lanes}
        records = {lane: read_json(path) for lane, path in paths.items() if path.exists()}
        return {lane: record for lane, record in records.items() if last.get(lane) == record["round"]}

    def forget_finished(self, variant: str, seed: int) -> None:
        """Undo `mark_finished`."""
        (self.lane_directory(variant, seed) / FINISHED).unlink(missing_ok=True)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        write_json(self.path / SUMMARY, jsonable(summary, "summary"))

    def write_privacy(self, node_epsilons: Mapping[str, Any]) -> None:
        """Write privacy.json, where any node has an epsilon."""
        if node_epsilons:
            write_json(self.path / PRIVACY, jsonable(node_epsilons, "privacy"))

    def read_summary(self) -> dict[str, Any]:
        """Content of summary.json."""
        return read_json(self.path / SUMMARY)

    def _lines(self) -> list[tuple[bytes, dict[str, Any]]]:
        """(raw bytes with line end, parsed line) of every complete line."""
        path = self.path / METRICS
        raw_lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        lines = []
        for number, raw in enumerate(raw_lines, start=1):
            if not raw.endswith(b"\n"):
                break
            try:
                lines.append((raw, json.loads(raw)))
            except ValueError:
                remedy = "Restore the file, or start again with another out."
                raise ArgumentError("out", f"{path} must hold JSON lines", f"line {number} is not", remedy) from None
        return lines


def make_writable(path: Path) -> None:
    """Make a directory that is missing; ArgumentError, naming `out`, where nothing can be written to it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        found = f"{path}: {(error.strerror or str(error)).lower()}"
        remedy = "Name a directory that you may write to."
        raise ArgumentError("out", "must be a writable directory", found, remedy) from None


def open_run(
    out: str | os.PathLike[str],
    config: Mapping[str, Any],
    *,
    experiment: str = "custom",
    preset: str | None = None,
    resume: bool = False,
) -> RunDirectory:
    """Make a run directory, or find the one to resume.

    Args:
        out: the directory itself; made if missing.
        config: everything that decides the results, resolved; values that JSON can hold, NumPy scalars and arrays,
            paths. Infinite numbers are stored as the strings "inf", "-inf", "nan".
        experiment: name for the summary.
        preset: name for the summary.
        resume: continue the run found there; where there is none, begin one.

    Returns:
        The directory, its config.json written.

    Raises:
        ArgumentError: `out` cannot be written or holds a run already, or the run to resume had another configuration.

    Guarantees:
        - a directory that holds a run is never written to without resume.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = open_run(Path(folder) / "first", {"step_size": 0.1})
        ...     open_run(Path(folder) / "first", {"step_size": 0.2}, resume=True)
        Traceback (most recent call last):
        ...
        jaxfl.core.check.ArgumentError: step_size: must be as in the run that is resumed; ...
    """
    path, given = Path(out), jsonable(config, "config")
    make_writable(path)
    environment = describe_environment()
    holds_run = (path / CONFIG).exists() or (path / METRICS).exists()
    if not holds_run:
        content = {"experiment": experiment, "preset": preset, "config": given, "environment": environment}
        write_json(path / CONFIG, content)
        return RunDirectory(path, content, resumed=False)
    if not resume:
        remedy = "Resume it (--resume), or name another directory."
        raise ArgumentError("out", "must not hold a run yet", f"{path} holds one", remedy)
    if not (path / CONFIG).exists():
        remedy = "Restore the file, or name another directory."
        raise ArgumentError("out", f"must hold {CONFIG} to be resumed", f"{path} has none", remedy)
    content = read_json(path / CONFIG)
    if content["experiment"] != experiment:
        refuse_difference({"experiment": content["experiment"]}, {"experiment": experiment}, path)
    refuse_difference(content["config"], given, path)
    changed = [name for name in _BITS_DEPEND_ON if content["environment"].get(name) != environment[name]]
    if changed:
        pairs = ", ".join(f"{name} {content['environment'].get(name)} -> {environment[name]}" for name in changed)
        warnings.warn(f"{path} was begun elsewhere ({pairs}): the last bits may differ from here on.", stacklevel=2)
    # A summary of the interrupted part would describe a run that is going on.
    (path / SUMMARY).unlink(missing_ok=True)
    return RunDirectory(path, content, resumed=True)


def read_run(path: str | os.PathLike[str]) -> RunDirectory:
    """A run directory for reading, whether the run has ended or not.

    Raises:
        ArgumentError: there is no run.
    """
    config = Path(path) / CONFIG
    if not config.exists():
        raise ArgumentError("run", f"must be a directory with a {CONFIG}", f"{path} has none", "Name a run directory.")
    return RunDirectory(Path(path), read_json(config), resumed=True)


def lane_of(line: Mapping[str, Any]) -> tuple[str, int]:
    """(variant, seed) of a line."""
    return line["variant"], line["seed"]


def slug(name: str) -> str:
    """A variant's name as a directory name.

    Example:
        >>> slug("PrivSGP-VR (b = 32)")
        'privsgp-vr-b-32'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
