"""Making a run directory, or finding the one to go on with."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxfl.core import ArgumentError
from jaxfl.training.environment import describe_environment, warn_of_changes
from jaxfl.training.json_files import jsonable, refuse_difference, write_json
from jaxfl.training.lock import held
from jaxfl.training.processes import of_first, together
from jaxfl.training.records import CONFIG, METRICS, RunDirectory, read_config


def make_writable(path: Path) -> list[Path]:
    """Make a directory that is missing; ArgumentError, naming `out`, where nothing can be written to it.

    Returns:
        The directories above it that were made, too, the nearest first.
    """
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
        experiment: name for the summary.
        preset: name for the summary.
        resume: continue the run found there; where there is none, begin one.
        can_resume: whether the experiment has --resume, so that errors may advise it.

    Returns:
        The directory, its config.json written.

    Raises:
        ArgumentError: `out` cannot be written or holds a run already, or the run to resume, or another process that
            trains with this one, has another configuration.

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
    content, resumed, made_above = of_first(lambda: _opened(path, given, experiment, preset, resume, can_resume))
    run = RunDirectory(path, content, resumed=resumed, made_above=made_above)
    try:
        together(_refuse_other_options, content["config"], given, path)
    except ArgumentError:
        run.withdraw()
        raise
    return run


def _opened(
    path: Path, given: Any, experiment: str, preset: str | None, resume: bool, can_resume: bool
) -> tuple[dict[str, Any], bool, list[Path]]:
    """(content of config.json, whether it was there, directories that were made above) of the run of `open_run`."""
    made_above = make_writable(path)
    if not resume:
        _refuse_run(path, can_resume)
    with held(path):
        environment = describe_environment()
        if not _holds_run(path):
            content = {"experiment": experiment, "preset": preset, "config": given, "environment": environment}
            write_json(path / CONFIG, content)
            return content, False, made_above
        if not resume:  # another process began one meanwhile
            _refuse_run(path, can_resume)
    if not (path / CONFIG).exists():
        remedy = "Restore the file, or name another directory."
        raise ArgumentError("out", f"must hold {CONFIG} to be resumed", f"{path} has none", remedy)
    content = read_config(path)
    if content["experiment"] != experiment:
        refuse_difference({"experiment": content["experiment"]}, {"experiment": experiment}, path)
    refuse_difference(content["config"], given, path)
    warn_of_changes(content["environment"], environment, path)
    return content, True, []


def _refuse_other_options(config: Any, given: Any, path: Path) -> None:
    """ArgumentError where this process was given other options than process 0, which has compared its own."""
    try:
        refuse_difference(config, given, path)
    except ArgumentError as error:
        requirement, remedy = "must be the same in every process", "Start all of them with the same options."
        raise ArgumentError(error.argument, requirement, error.found, remedy) from None


def _holds_run(path: Path) -> bool:
    return (path / CONFIG).exists() or (path / METRICS).exists()


def _refuse_run(path: Path, can_resume: bool) -> None:
    """ArgumentError where a directory holds a run."""
    if _holds_run(path):
        remedy = "Resume it (--resume), or name another directory." if can_resume else "Name another directory."
        raise ArgumentError("out", "must not hold a run yet", f"{path} holds one", remedy)
