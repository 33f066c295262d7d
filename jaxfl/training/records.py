"""Files of a run on disk, and facts that a resumed run may rely on.

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
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxfl.core import ArgumentError
from jaxfl.core.check import at_least
from jaxfl.training.json_files import jsonable, read_json, refuse_difference, refuse_form, write_json
from jaxfl.training.lock import LOCK, held
from jaxfl.training.metrics_file import Mark, MetricsFile, lane_of
from jaxfl.training.processes import is_first, of_first, on_first

CONFIG, METRICS, SUMMARY, FINISHED = "config.json", "metrics.jsonl", "summary.json", "finished.json"
PRIVACY = "privacy.json"
PRIVATE = "private"
ENDED = "ended"  # beside finished.json: the state of a lane that ended before the others, or diverged
_PROGRAMS = "programs"  # in "training": what was measured and chosen, not compared on resume
_MARK = "metrics"  # in finished.json: size and checksum of metrics.jsonl at that moment

_NUMBER, _NONE = (int, float), type(None)
_CONFIG_FORM = {"experiment": str, "preset": (str, _NONE), "config": dict, "environment": dict}
_PROGRAM_FORM = {"lanes": list, "lanes_a_pass": int, "at_once": int}
_FINISHED_FORM = {
    "round": (int, _NONE),
    "until": int,
    "status": str,
    "reason": (str, _NONE),
    "seconds": {"compile": _NUMBER, "run": _NUMBER, "timed_rounds": int, "rounds_a_call": int},
    _MARK: list,
}


class RunDirectory:
    """One run's directory. Build it with `open_run`.

    Where several processes train together, process 0 alone reads and writes it, and the others are told.

    Attributes:
        path: the directory.
        config: content of config.json: "experiment", "preset", "config", "environment" and, once training has begun,
            "training".
        resumed: whether a run was found and is continued.
        is_part: whether what is trained here is a part of a larger run (`parts.py`): a lone lane that diverges then
            ends with its reason, as it does beside others. False unless it is set.
    """

    def __init__(self, path: Path, config: dict[str, Any], *, resumed: bool, made_above: Sequence[Path] = ()):
        self.path, self.config, self.resumed = path, config, resumed
        self.is_part = False
        self._made_above = made_above  # directories, the nearest first
        self._metrics = MetricsFile(path / METRICS)

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
        self._write_config()

    def record_environment(self, environment: Mapping[str, Any]) -> None:
        """Put that of the processes which trained in place of this one's in config.json."""
        self.config = {**self.config, "environment": dict(environment)}
        self._write_config()

    def record_program(self, index: int, choice: Mapping[str, Any]) -> None:
        """Add how the lanes of a program, counted from 0, are computed; programs come in their order."""
        training = self.config["training"]
        programs = [*training[_PROGRAMS][:index], jsonable(choice, _PROGRAMS)]
        self.config = {**self.config, "training": {**training, _PROGRAMS: programs}}
        self._write_config()

    @on_first
    def _write_config(self) -> None:
        write_json(self.path / CONFIG, self.config)

    def recorded_programs(self) -> list[dict[str, Any]]:
        """Return the records made by `record_program`."""
        return self.config.get("training", {}).get(_PROGRAMS, [])

    def withdraw(self) -> None:
        """Undo `open_run` of a run that was refused before anything was trained; one that was found stays as it is.

        It waits for no other process, so that a thread may call it.
        """
        if is_first() and not self.resumed:
            for name in (CONFIG, LOCK):
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self.path / PRIVATE, ignore_errors=True)
            with contextlib.suppress(OSError):  # other files are there
                for folder in (self.path, *self._made_above):
                    folder.rmdir()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes out while this one, or those that train together, do; see `lock.held`."""
        with contextlib.ExitStack() as lock:
            of_first(lambda: lock.enter_context(held(self.path)))
            yield

    @property
    def fingerprint(self) -> str:
        """Checksum of the configuration and of the training loop's settings, which tells this run from another."""
        training = {name: value for name, value in self.config.get("training", {}).items() if name != _PROGRAMS}
        content = json.dumps([self.config["experiment"], self.config["config"], training], sort_keys=True)
        return f"{zlib.crc32(content.encode()):08x}"

    @on_first
    def append_metrics(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines and flush them to disk together; OSError if the file is not as this process left it."""
        self._metrics.append(lines)

    @on_first
    def read_metrics(self) -> list[dict[str, Any]]:
        """All complete lines; one that was cut off while being written is left out.

        Raises:
            ArgumentError: a line other than the last is none of this project's, or a lane's rounds do not ascend.
            OSError: the file is not as this process left it.
        """
        return self._metrics.read()

    @on_first
    def mark(self) -> Mark:
        """Size and checksum of metrics.jsonl as this process has written it, for a checkpoint."""
        return self._metrics.mark()

    @on_first
    def keep_metrics_until(
        self, lanes: Collection[tuple[str, int]], round_index: int | None, mark: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """Drop every line behind the last of these lanes' up to a round, atomically.

        Args:
            lanes: (variant, seed) of those that are about to go on together.
            round_index: the round of their checkpoint; None drops all their lines and all that follow.
            mark: of the checkpoint: `mark` at its time.

        Returns:
            The lines of these lanes that remain.

        Raises:
            ArgumentError: the file does not begin with what the mark describes; nothing is changed then.

        Guarantees:
            - exactly the lines up to the checkpoint remain, byte for byte.
        """
        if mark is not None and not all(self._metrics.is_intact([mark])):
            requirement = f"{self._metrics.path} must hold the lines of every checkpoint"
            found, remedy = f"it ends before byte {mark[0]:,}", "Restore the file, or start again with another out."
            raise ArgumentError("out", requirement, found, remedy)
        return self._metrics.keep_until(lanes, round_index)

    @on_first
    def keep_copy_of_metrics(self) -> None:
        """Copy metrics.jsonl to metrics.before.jsonl, -2, -3, ...: lanes are about to begin again, and lose lines."""
        self._metrics.keep_copy()

    def lane_directory(self, variant: str, seed: int) -> Path:
        """Return the directory of finished.json and the checkpoints of one (variant, seed)."""
        return self.path / "checkpoints" / slug(variant) / f"seed_{seed}"

    def pass_directory(self, program: int, number: int) -> Path:
        """Return the directory of the checkpoints of lanes that ran together. Program and number are counted from 0."""
        return self.path / "checkpoints" / f"lanes_{program}_{number}"  # no slug has an underscore

    @on_first
    def mark_finished(self, variant: str, seed: int, record: Mapping[str, Any]) -> None:
        """Note that (variant, seed) has ended; `record` holds at least "round", that of its last line, or None."""
        content = {**jsonable(record, FINISHED), _MARK: list(self.mark())}
        write_json(self.lane_directory(variant, seed) / FINISHED, content)

    @on_first
    def finished(
        self, lanes: Iterable[tuple[str, int]], lines: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[tuple[str, int], dict[str, Any]]:
        """The records of those of these lanes that have ended and whose lines are all there.

        Args:
            lanes: (variant, seed).
            lines: of metrics.jsonl; read where they are not given.

        Raises:
            ArgumentError: a record is none, or what is now in metrics.jsonl is not what was there.
        """
        last = {lane_of(line): line["round"] for line in (self.read_metrics() if lines is None else lines)}
        paths = {lane: self.lane_directory(*lane) / FINISHED for lane in lanes}
        records = {lane: read_json(path, _FINISHED_FORM) for lane, path in paths.items() if path.exists()}
        intact = self._metrics.is_intact(record.pop(_MARK) for record in records.values())
        return {
            lane: record
            for (lane, record), whole in zip(records.items(), intact, strict=True)
            if whole and last.get(lane) == record["round"]
        }

    @on_first
    def refuse_gaps(self, parts: Sequence[Collection[tuple[str, int]]]) -> None:
        """Refuse a run in which a part has begun although an earlier one has not ended: lines would be lost.

        Args:
            parts: the lanes that run together, (variant, seed) each, in the order in which they run.

        Raises:
            ArgumentError: naming the lane whose end is missing; nothing is changed.
        """
        lines = self.read_metrics()
        began = {lane_of(line) for line in lines}
        done = self.finished((lane for part in parts for lane in part), lines)
        missing: tuple[str, int] | None = None
        for part in parts:
            if missing is not None and not began.isdisjoint(part):
                path = self.lane_directory(*missing) / FINISHED
                found = f"that of {missing[0]}, seed {missing[1]}, does not, and later runs have begun"
                remedy = f"Restore {path}, or start again with another out."
                raise ArgumentError("out", f"{self.path} must hold every run's end", found, remedy)
            if missing is None:
                missing = next((lane for lane in part if lane not in done), None)

    @on_first
    def forget_finished(self, variant: str, seed: int) -> None:
        """Undo `mark_finished`."""
        (self.lane_directory(variant, seed) / FINISHED).unlink(missing_ok=True)

    @on_first
    def drop_summary(self) -> None:
        """Remove summary.json: that of an interrupted run would describe one that is going on."""
        (self.path / SUMMARY).unlink(missing_ok=True)

    @on_first
    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        write_json(self.path / SUMMARY, jsonable(summary, "summary"))

    @on_first
    def write_privacy(self, node_epsilons: Mapping[str, Any]) -> None:
        """Write privacy.json, where any node has an epsilon."""
        if node_epsilons:
            write_json(self.path / PRIVACY, jsonable(node_epsilons, "privacy"))

    @on_first
    def read_summary(self) -> dict[str, Any]:
        """Content of summary.json."""
        return read_json(self.path / SUMMARY)


def read_run(path: str | os.PathLike[str]) -> RunDirectory:
    """A run directory for reading, whether the run has ended or not.

    Raises:
        ArgumentError: there is no run.
    """
    config = Path(path) / CONFIG
    if not config.exists():
        raise ArgumentError("run", f"must be a directory with a {CONFIG}", f"{path} has none", "Name a run directory.")
    return RunDirectory(Path(path), read_config(Path(path)), resumed=True)


def read_config(path: Path) -> dict[str, Any]:
    """Content of a directory's config.json, of the form that `open_run` and `RunDirectory` write."""
    content = read_json(path / CONFIG, _CONFIG_FORM)
    if "training" in content:
        refuse_form(content, {"training": {_PROGRAMS: list}}, path / CONFIG)
        for index, program in enumerate(content["training"][_PROGRAMS]):
            refuse_form(program, _PROGRAM_FORM, path / CONFIG, f"training.{_PROGRAMS}[{index}]")
            at_least(1, **{name: program[name] for name in ("lanes_a_pass", "at_once")})
    return content


def slug(name: str) -> str:
    """A variant's name as a directory name.

    Example:
        >>> slug("PrivSGP-VR (b = 32)")
        'privsgp-vr-b-32'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
