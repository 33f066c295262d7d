"""Data files: finding and reading them, with one sentence for each fault."""

from __future__ import annotations

import gzip
import io
import os
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path

from jaxfl.core.check import ArgumentError

_GZIP_MAGIC = b"\x1f\x8b"
_MAX_LISTED = 4
_MAX_SHOWN = 300  # characters: messages repeat text of a file, which must not fill the screen
_STEP = 1 << 20


def on_one_line(text: str) -> str:
    """Text from a file as part of a sentence: without line breaks and control characters, and cut if it is long.

    Examples:
        >>> on_one_line("f01\\n\\x1b[2J")
        'f01??[2J'
    """
    line = "".join(letter if letter.isprintable() else "?" for letter in text[: _MAX_SHOWN + 1])
    return line if len(line) <= _MAX_SHOWN else line[:_MAX_SHOWN] + " and more"


def bad_file(path: Path, requirement: str, found: str, remedy: str) -> ArgumentError:
    """The error of one unusable file of `data_dir`, to be raised by the caller.

    Examples:
        >>> print(bad_file(Path("mnist/train"), "hold 8 bytes", "it holds 7", "Download it again."))
        data_dir: train in mnist must hold 8 bytes; it holds 7. Download it again.
    """
    place = f"{on_one_line(path.name)} in {on_one_line(str(path.parent))}"
    return ArgumentError("data_dir", f"{place} must {on_one_line(requirement)}", on_one_line(found), remedy)


def check_folder(data_dir: str | os.PathLike[str] | None, requirement: str, remedy: str) -> Path:
    """`data_dir` as the path of an existing folder, `~` expanded.

    Args:
        data_dir: the caller's argument.
        requirement: purpose of the folder, completing "must be ...".
        remedy: how to get the files.

    Raises:
        ArgumentError: None, or no folder of that name.
    """
    if data_dir is None:
        raise ArgumentError("data_dir", f"must be {requirement}", "got None", remedy)
    if not isinstance(data_dir, str | os.PathLike):
        raise ArgumentError("data_dir", f"must be {requirement}", f"got {data_dir!r}", remedy)
    # os.path returns False where Path raises: for a name that is too long, or a folder without permission to enter.
    folder = Path(os.path.expanduser(data_dir))
    if not os.path.isdir(folder):
        name = on_one_line(str(folder))
        found = f"{name} is a file" if os.path.exists(folder) else f"there is no folder {name}"
        raise ArgumentError("data_dir", f"must be {requirement}", found, remedy)
    return folder


def find_file(folder: Path, names: Sequence[str], remedy: str) -> Path:
    """The first of `names` that `folder` holds; an error where it holds none."""
    for name in names:
        if os.path.isfile(folder / name):
            return folder / name
    raise ArgumentError("data_dir", f"must hold {' or '.join(names)}", f"{folder} holds {contents(folder)}", remedy)


def contents(folder: Path) -> str:
    """The first few names in a folder, for an error sentence."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        return f"files that cannot be listed ({error.strerror})"
    rest = len(names) - _MAX_LISTED
    text = on_one_line(", ".join(names[:_MAX_LISTED])) or "nothing"
    return text + (f" and {rest} more" if rest > 0 else "")


def read_bytes(path: Path, remedy: str, max_bytes: int, requirement: str | None = None) -> bytes:
    """The content of a file, decompressed when it is gzip.

    The content, not the name, tells whether it is gzip: browsers and unpackers change one without the other.

    Args:
        path: the file.
        remedy: how to get a good copy.
        max_bytes: most bytes of a whole file of its kind, decompressed. A gzip file of 1 MB can hold 1 GB.
        requirement: for the error about a file with more bytes, completing "must ..."; by default it names the limit.

    Raises:
        ArgumentError: a file that is not regular, cannot be read, is too large, or has a corrupt gzip stream.

    Guarantees:
        - at most `max_bytes` and one reading step more are ever held in memory.
        - a pipe, a socket or a device is refused, not opened.
    """
    content = read_start(path, remedy, max_bytes + 1)
    if len(content) > max_bytes:
        raise bad_file(path, requirement or f"hold at most {max_bytes:,} bytes", "it holds more", remedy)
    return content


def read_start(path: Path, remedy: str, num_bytes: int) -> bytes:
    """The first `num_bytes` of a file as `read_bytes` reads it, or a whole shorter file; it refuses the same files."""
    size = 0
    try:
        size = _regular_size(path)
        with path.open("rb") as file:
            is_compressed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            file.seek(0)
            return _steps(gzip.GzipFile(fileobj=file) if is_compressed else file, num_bytes)
    except EOFError:
        raise bad_file(path, "be a complete gzip file", f"it is cut off after {size:,} bytes", remedy) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        found = f"its {size:,} bytes are corrupt ({error})"
        raise bad_file(path, "be a complete gzip file", found, remedy) from None
    except OSError as error:
        found = f"the system says: {error.strerror or error}"
        raise bad_file(path, "be readable", found, "Check its permissions.") from None


def _regular_size(path: Path) -> int:
    """The size of a regular file in bytes. Others are refused: a pipe would block, and a device may never end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        raise bad_file(path, "be a file", f"it is {kind}", "Remove it.")
    return status.st_size


def _steps(file: io.BufferedIOBase, num_bytes: int) -> bytes:
    """Read at most `num_bytes` of a file, step by step, so that memory grows only with what is really there."""
    content = io.BytesIO()
    while (rest := num_bytes - content.tell()) > 0 and (step := file.read(min(rest, _STEP))):
        content.write(step)
    return content.getvalue()
