"""Finding and reading data files, with one sentence for whatever is wrong with them."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from jaxfl.core.check import ArgumentError

_GZIP_MAGIC = b"\x1f\x8b"
_MAX_LISTED = 4


def bad_file(path: Path, requirement: str, found: str, remedy: str) -> ArgumentError:
    """The error of one unusable file of `data_dir`, to be raised by the caller.

    Example:
        >>> print(bad_file(Path("mnist/train"), "hold 8 bytes", "it holds 7", "Download it again."))
        data_dir: train in mnist must hold 8 bytes; it holds 7. Download it again.
    """
    return ArgumentError("data_dir", f"{path.name} in {path.parent} must {requirement}", found, remedy)


def check_folder(data_dir: str | os.PathLike[str] | None, requirement: str, remedy: str) -> Path:
    """`data_dir` as the path of an existing folder, `~` expanded.

    Args:
        data_dir: what the caller passed.
        requirement: what the folder is for, completing "must be ...".
        remedy: how to get the files.

    Raises:
        ArgumentError: nothing was passed, or there is no folder of that name.
    """
    if data_dir is None:
        raise ArgumentError("data_dir", f"must be {requirement}", "got None", remedy)
    if not isinstance(data_dir, str | os.PathLike):
        raise ArgumentError("data_dir", f"must be {requirement}", f"got {data_dir!r}", remedy)
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        found = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
        raise ArgumentError("data_dir", f"must be {requirement}", found, remedy)
    return folder


def find_file(folder: Path, names: Sequence[str], remedy: str) -> Path:
    """The first of `names` that `folder` holds.

    Raises:
        ArgumentError: it holds none; the sentence says what was looked for and what is there.
    """
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ArgumentError("data_dir", f"must hold {' or '.join(names)}", f"{folder} holds {contents(folder)}", remedy)


def contents(folder: Path) -> str:
    """The first few names in a folder, for an error sentence."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        return f"files that cannot be listed ({error.strerror})"
    rest = len(names) - _MAX_LISTED
    return (", ".join(names[:_MAX_LISTED]) or "nothing") + (f" and {rest} more" if rest > 0 else "")


def read_bytes(path: Path, remedy: str) -> bytes:
    """The content of a file, decompressed when it is gzip.

    Gzip is told by the content, not by the name: browsers and unpackers change either without the other.

    Raises:
        ArgumentError: the file cannot be read, or its gzip stream is cut off or corrupt.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise bad_file(path, "be readable", f"the system says: {error.strerror}", "Check its permissions.") from None
    if not raw.startswith(_GZIP_MAGIC):
        return raw
    requirement = "be a complete gzip file"
    try:
        return gzip.decompress(raw)
    except EOFError:
        raise bad_file(path, requirement, f"it is cut off after {len(raw):,} bytes", remedy) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise bad_file(path, requirement, f"its {len(raw):,} bytes are corrupt ({error})", remedy) from None
