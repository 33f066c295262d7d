"""Directory of a run: its configuration, its passes, and the results that are made of them when it ends.

    config.json      the resolved configuration, the settings of the training loop, the lanes (cases with one seed
                     each) of each pass, and the environment
    passes/<k>/      lanes that run together: their metrics lines, checkpoints and ends (`pass_directory.py`)
    summary.json, results.csv    made of the passes when the run ends
    privacy.json     the epsilon of every node, if there is one; summary.json has the worst node's, and the median
    sites.csv        samples, epsilon, noise and metric of every node at the end of every lane (`sites.py`)
    plots/           pictures
    final/           the parameters at the end of each lane (`final_params.py`)
    crash.txt        Python's stack where a compiled program ended the process (`crash.py`)
    private/key      the key of a run that is published, of mode 0600 (`publish.py`)

Do not publish the folder: checkpoints hold raw gradients (tables of SAGA) and states without noise; metrics, status and
pictures are measured without noise; config.json holds digests of the data, keyed where the seed is secret; parameters
in final/ may be of a run that no privacy statement covers. `publish.py` copies what the statements cover.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock

from jaxfl.core import ArgumentError
from jaxfl.core.lines import METRICS, Label, Lines, lines_of
from jaxfl.training.environment import describe_environment
from jaxfl.training.json_files import jsonable, read_json, refuse_difference, refuse_form, write_json
from jaxfl.training.pass_directory import PassDirectory
from jaxfl.training.processes import is_first, on_all, on_first

CONFIG, SUMMARY, PRIVACY, PASSES, PRIVATE = "config.json", "summary.json", "privacy.json", "passes", "private"
_CONFIG_FORM = {"experiment": str, "preset": (str, type(None)), "config": dict, "environment": dict}
LOCK, RESUME = "lock", "open_run(..., resume=True)"
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # answers of file systems without locks


class RunDirectory:
    """One run's directory. Build it with `open_run`.

    Where several processes train together, all read its files, and process 0 writes.

    Attributes:
        path: the directory.
        config: content of config.json: "experiment", "preset", "config", "environment" and, once training has begun,
            "training".
        resumed: whether a run was found and is continued.
    """

    def __init__(self, path: Path, config: dict[str, Any], *, resumed: bool, made_above: Sequence[str] = ()):
        self.path, self.config, self.resumed = path, config, resumed
        self._made_above = made_above  # directories, the nearest first

    def __repr__(self) -> str:
        lanes = [label for one in self.passes for label in one.lanes]
        cases = f"{len(dict(lanes))} cases, {len(lanes)} runs" if lanes else "no runs yet"
        return f"RunDirectory({str(self.path)!r}: {self.config.get('experiment')}, {cases})"

    def record_training(self, settings: Mapping[str, Any], words: Mapping[str, str] = {}) -> None:
        """Add the training loop's settings to config.json; `refuse_difference` where they are not a resumed run's."""
        given = jsonable(settings, "training")
        if "training" not in self.config:
            self._rewrite({"training": {**given, PASSES: []}})
            return
        recorded = {name: value for name, value in self.config["training"].items() if name != PASSES}
        refuse_difference(recorded, given, self.path, words=words)

    def record_environment(self, environment: Mapping[str, Any]) -> None:
        """Replace the environment in config.json by that of the processes which trained."""
        self._rewrite({"environment": dict(environment)})

    def record_passes(self, lanes: Sequence[Sequence[Label]]) -> None:
        """Divide the lanes into passes: (case, seed) of each lane of each pass, in their order."""
        self._rewrite({"training": {**self.config["training"], PASSES: jsonable(lanes, PASSES)}})

    def _rewrite(self, changes: Mapping[str, Any]) -> None:
        self.config = {**self.config, **changes}
        on_first(write_json)(self.path / CONFIG, self.config)

    @property
    def passes(self) -> list[PassDirectory]:
        """The passes, as recorded; none before the lanes were divided."""
        lanes = [[(name, seed) for name, seed in one] for one in self.config.get("training", {}).get(PASSES, [])]
        return [
            PassDirectory(self.path / PASSES / str(number), one, self.fingerprint) for number, one in enumerate(lanes)
        ]

    def withdraw(self) -> None:
        """Undo `open_run` of a run that was refused before anything was trained; a resumed run stays as it is.

        This waits for no other process, so that a thread may call it.
        """
        if is_first() and not self.resumed:
            for name in (CONFIG, LOCK):
                (self.path / name).unlink(missing_ok=True)
            for name in (PRIVATE, PASSES):
                shutil.rmtree(self.path / name, ignore_errors=True)
            with contextlib.suppress(OSError):  # other files are there
                for folder in (self.path, *map(Path, self._made_above)):
                    folder.rmdir()

    @property
    def fingerprint(self) -> str:
        """Checksum of the configuration and of the training loop's settings, which tells this run from another."""
        training = {name: value for name, value in self.config.get("training", {}).items() if name != PASSES}
        content = json.dumps([self.config["experiment"], self.config["config"], training], sort_keys=True)
        return f"{zlib.crc32(content.encode()):08x}"

    @on_all
    def read_metrics(self) -> Lines:
        """All complete lines, pass by pass, in columns; a line that is being written right now is left out.

        Iteration gives a dict for each line. ArgumentError where a file is damaged.
        """
        return lines_of(one.path / METRICS for one in self.passes if one.has_lines())

    def ended(self) -> dict[Label, dict[str, Any]]:
        """Return the end of each lane of the passes that are over."""
        return {label: record for one in self.passes for label, record in (one.end() or {}).items()}

    @on_all
    def seconds_of_command(self) -> dict[str, float] | None:
        """Seconds by phase of the command that wrote summary.json; None where there is no such file."""
        return self.read_summary()["seconds"].get("command") if (self.path / SUMMARY).exists() else None

    @on_first
    def drop_summary(self) -> None:
        """Remove the summary.json of an interrupted run, which would not describe the run that now goes on."""
        (self.path / SUMMARY).unlink(missing_ok=True)

    @on_first
    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        write_json(self.path / SUMMARY, jsonable(summary, "summary"))

    @on_all
    def read_summary(self) -> dict[str, Any]:
        """Content of summary.json."""
        return read_json(self.path / SUMMARY)


def open_run(
    out: str | os.PathLike[str],
    config: Mapping[str, Any],
    *,
    experiment: str = "custom",
    preset: str | None = None,
    resume: bool = False,
    can_resume: bool = True,
) -> RunDirectory:
    """Make a run directory, or find the one to resume.

    Args:
        out: the directory itself; made if missing.
        config: everything that decides the results, resolved; values that JSON can hold, NumPy scalars and arrays,
            paths. Infinite numbers are stored as the strings "inf", "-inf", "nan".
        experiment: its name, for the summary.
        preset: its name, for the summary.
        resume: continue the run in this directory; where there is none, begin one.
        can_resume: whether errors may advise it.

    Returns:
        The directory, its config.json written.

    Raises:
        ArgumentError: `out` cannot be written, or holds a run already; or the run to resume has another configuration,
            or another process that trains with this one has.

    Guarantees:
        - a directory that holds a run is never written to without resume.

    Examples:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = open_run(Path(folder) / "first", {"step_size": 0.1})
        ...     open_run(Path(folder) / "first", {"step_size": 0.2}, resume=True)
        Traceback (most recent call last):
        ...
        jaxfl.core.check.ArgumentError: step_size: must be as in the run that is resumed; ...
    """
    path, given = Path(out), jsonable(config, "config")
    resumed, made_above = on_first(_opened)(path, given, experiment, preset, resume, can_resume)
    run = RunDirectory(path, {}, resumed=resumed, made_above=made_above)
    try:
        run.config = on_all(_read_alike)(path, given)
    except (ArgumentError, OSError):
        run.withdraw()
        raise
    return run


def read_run(path: str | os.PathLike[str]) -> RunDirectory:
    """A run directory for reading, whether the run has ended or not; ArgumentError where there is none."""
    config = Path(path) / CONFIG
    if not config.exists():
        raise ArgumentError("run", f"must be a directory with a {CONFIG}", f"{path} has none", "Name a run directory.")
    return RunDirectory(Path(path), _read_config(Path(path)), resumed=True)


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold a run directory while something is written to it; the operating system lets go when the process dies.

    The lock is the system's (filelock), on the file `lock`, which holds the number of the process and is removed at the
    end. It keeps out processes of the same machine and, where the file system shares locks, of other machines. A file
    system without locks brings a warning.

    Args:
        directory: made if missing. Where several processes train together, process 0 holds it for all of them.

    Raises:
        ArgumentError: another process, or another part of this one, holds it.

    Guarantees:
        - of two processes in a run directory the second is refused, and changes nothing.
        - a process that was killed keeps no other one out.
    """
    descriptor = on_first(_locked)(directory / LOCK)
    try:
        yield
    finally:
        if descriptor is not None and is_first():
            with contextlib.suppress(PermissionError):  # on Windows an open file cannot be removed
                (directory / LOCK).unlink(missing_ok=True)  # while it is locked: nobody else's file is removed
            os.close(descriptor)


def _locked(path: Path) -> int | None:
    """The descriptor that holds the lock; None where there are no locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        if path.is_symlink():
            raise ArgumentError("out", f"{path} must be a file", "it is a link", "Remove it.")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            if not filelock.lock_descriptor(descriptor, blocking=False):
                raise BlockingIOError
            if os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"\n{os.getpid()}\n".encode())
                return descriptor
            os.close(descriptor)  # the holder has removed the file meanwhile
        except BlockingIOError:
            os.lseek(descriptor, 1, os.SEEK_SET)  # Windows locks the first byte to readers, too
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "another one"
            os.close(descriptor)
            found, remedy = f"process {holder} is at work there", "Wait until it ends, or name another directory."
            raise ArgumentError("out", f"{path.parent} must be used by one process at a time", found, remedy) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _WITHOUT_LOCKS:
                raise
            text = f"{path.parent} cannot be locked ({error.strerror}): make sure that no second process resumes it"
            warnings.warn(text, stacklevel=4)
            path.unlink(missing_ok=True)
            return None


def make_writable(path: Path) -> list[Path]:
    """Make a directory; ArgumentError naming `out` if that fails. Return the new ones above it, nearest first."""
    try:
        missing = [folder for folder in path.parents if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, RecursionError) as error:  # pathlib makes directories above each other by recursion
        found = f"{path}: {(getattr(error, 'strerror', None) or str(error)).lower()}"
        remedy = "Name a directory that you may write to."
        raise ArgumentError("out", "must be a writable directory", found, remedy) from None
    return missing


def slug(name: str) -> str:
    """A case's name as a directory name.

    Examples:
        >>> slug("PrivSGP-VR (b = 32)")
        'privsgp-vr-b-32'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _read_config(path: Path) -> dict[str, Any]:
    """Content of a directory's config.json, of the form that `open_run` and `RunDirectory` write."""
    content = read_json(path / CONFIG, _CONFIG_FORM)
    if "training" in content:
        refuse_form(content, {"training": {PASSES: list}}, path / CONFIG)
        lanes = [lane for one in content["training"][PASSES] for lane in (one if isinstance(one, list) else [one])]
        if any(not isinstance(lane, list) or [*map(type, lane)] != [str, int] for lane in lanes):
            found, remedy = "it does not", "Restore the file, or start again with another out."
            requirement = f"{path / CONFIG} must hold training.{PASSES} as lists of [case, seed]"
            raise ArgumentError("out", requirement, found, remedy)
    return content


def _opened(
    path: Path, given: Any, experiment: str, preset: str | None, resume: bool, can_resume: bool
) -> tuple[bool, list[str]]:
    """Open the run for `open_run`: (whether config.json was there, directories that were made above)."""
    made_above = [str(folder) for folder in make_writable(path)]
    if not resume:
        _refuse_run(path, can_resume)
    with held(path):
        if not _holds_run(path):
            environment = describe_environment()
            content = {"experiment": experiment, "preset": preset, "config": given, "environment": environment}
            write_json(path / CONFIG, content)
            return False, made_above
        if not resume:  # another process began a run meanwhile
            _refuse_run(path, can_resume)
    if not (path / CONFIG).exists():
        remedy = "Restore the file, or name another directory."
        raise ArgumentError("out", f"must hold {CONFIG} to be resumed", f"{path} has none", remedy)
    content = _read_config(path)
    if content["experiment"] != experiment:
        refuse_difference({"experiment": content["experiment"]}, {"experiment": experiment}, path)
    refuse_difference(content["config"], given, path)
    return True, []


def _read_alike(path: Path, given: Any) -> dict[str, Any]:
    """Content of config.json. ArgumentError if this process has other options than process 0."""
    content = _read_config(path)
    try:
        refuse_difference(content["config"], given, path)
        return content
    except ArgumentError as error:
        requirement, remedy = "must be the same in every process", "Start all of them with the same options."
        raise ArgumentError(error.argument, requirement, error.found, remedy) from None


def _holds_run(path: Path) -> bool:
    return (path / CONFIG).exists() or (path / PASSES).exists()


def _refuse_run(path: Path, can_resume: bool) -> None:
    """ArgumentError where a directory holds a run."""
    if _holds_run(path):
        remedy = f"Resume it ({RESUME}), or name another directory." if can_resume else "Name another directory."
        raise ArgumentError("out", "must not hold a run yet", f"{path} holds one", remedy)
