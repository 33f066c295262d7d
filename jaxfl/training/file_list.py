"""The list beside a checkpoint: its files with their checksums, whose it is, and how far metrics.jsonl went then.

The list is written after the last file, so that a checkpoint without one was not completed. It carries a checksum of
itself, so that damage to it is never taken for another owner.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxfl.training.json_files import write_json

NAME = "files.json"
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # how orbax's storage layer passes one on
_FORM = {"files": dict, "run": str, "lanes": list, "metrics": list}


class Damaged(Exception):
    """A checkpoint is not what was written; the text says why."""


class Owner(NamedTuple):
    """Owner of a checkpoint.

    Attributes:
        run: `RunDirectory.fingerprint`.
        lanes: (variant, seed) of each lane of the state, in their order.
    """

    run: str
    lanes: tuple[tuple[str, int], ...]


class FileList(NamedTuple):
    """Content of the list apart from the files."""

    owner: Owner
    mark: list[int]  # `RunDirectory.mark` when the checkpoint was written


def write_list(directory: Path, listed: FileList) -> None:
    """List the files below a directory, and flush them to disk."""
    (run, lanes), metrics = listed
    content = {"files": _checksums(directory), "run": run, "lanes": [list(lane) for lane in lanes], "metrics": metrics}
    write_json(directory / NAME, {**content, "checksum": _checksum(content)})


def read_list(directory: Path) -> FileList:
    """The list of a directory whose files are all as they were written.

    Raises:
        Damaged: the list is altered, or a file is.
        OSError: a file cannot be read; nothing is known of its bytes then.

    Guarantees:
        - a file that cannot be read is no damage.
    """
    try:
        content = json.loads((directory / NAME).read_bytes())
    except (ValueError, RecursionError):
        raise Damaged(f"{NAME} is altered") from None
    checksum = content.pop("checksum", None) if isinstance(content, dict) else None
    if checksum is None or checksum != _checksum(content) or {name: type(content[name]) for name in content} != _FORM:
        raise Damaged(f"{NAME} is altered, or of another version")
    present = _checksums(directory)
    for name, expected in content["files"].items():
        if present.get(name) != expected:
            raise Damaged(f"{name} is {'altered' if name in present else 'missing'}")
    lanes = tuple((name, seed) for name, seed in content["lanes"])
    return FileList(Owner(content["run"], lanes), content["metrics"])


def has_list(directory: Path) -> bool:
    """Whether a checkpoint was completed."""
    return (directory / NAME).exists()


def remove_leftovers(directory: Path) -> None:
    """Remove what a process left that died while it wrote the list of a checkpoint in this directory."""
    for path in directory.glob(f"*/{NAME}.tmp"):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def os_errors(path: Path, otherwise: int | None = None) -> Iterator[None]:
    """Pass on as OSError what the storage layer wraps in errors of other classes.

    Args:
        path: named in the error.
        otherwise: the error number of what names none; None leaves such errors as they are.

    Raises:
        OSError: with the number of the operating system's error.

    Example:
        >>> with os_errors(Path("run")):
        ...     raise ValueError("RESOURCE_EXHAUSTED: Failed writing: No space left on device [os_error_code='28']")
        Traceback (most recent call last):
        ...
        OSError: [Errno 28] No space left on device: 'run'
    """
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        number = _error_number(error) or otherwise
        if number is None:
            raise
        reason = os.strerror(number) if number == _error_number(error) else _first_line(error)
        raise OSError(number, reason, str(path)) from error


def _error_number(error: Exception) -> int | None:
    """The operating system's error behind an error of the storage layer; None where it names none."""
    named = _OS_ERROR.search(str(error))
    return int(named.group(1)) if named else None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:120] or type(error).__name__


def _checksum(content: object) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _checksums(directory: Path) -> dict[str, list[int]]:
    """[size in bytes, CRC-32] of every file below a directory but the list, by path."""
    sums = {}
    for path in sorted(_files(directory)):
        size = checksum = 0
        with open(path, "rb") as file:
            while block := file.read(1 << 24):
                size, checksum = size + len(block), zlib.crc32(block, checksum)
        sums[path.relative_to(directory).as_posix()] = [size, checksum]
    return sums


def _files(directory: Path) -> Sequence[Path]:
    """Every file below a directory but the list; OSError where a folder cannot be read, which pathlib passes over."""

    def refuse(error: OSError) -> None:
        raise error

    paths = [Path(folder) / name for folder, _, names in os.walk(directory, onerror=refuse) for name in names]
    return [path for path in paths if path.name not in (NAME, f"{NAME}.tmp")]
