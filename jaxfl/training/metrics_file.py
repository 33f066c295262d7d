"""metrics.jsonl: lines that are appended, cut back on resume, and checked against what was written.

Whoever writes the file knows its size and checksum at each moment (`Mark`). A checkpoint and the record of an end keep
the mark of their moment: a resumed run notices whatever was edited, doubled, exchanged or lost before it. A write by
another program, or a file that vanished, is noticed at the next line.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxfl.core import ArgumentError
from jaxfl.training.json_files import write_atomically

_RESTORE = "Restore the file, or start again with another out."
_FIELDS = {"variant": str, "seed": int, "round": int}


class Mark(NamedTuple):
    """Fingerprint of the first `size` bytes of the file."""

    size: int
    checksum: int  # CRC-32


def lane_of(line: Mapping[str, Any]) -> tuple[str, int]:
    """(variant, seed) of a line."""
    return line["variant"], line["seed"]


class MetricsFile:
    """The file of one run.

    Args:
        path: of the file, which need not exist yet.

    Guarantees:
        - a file that another program changed is neither appended to nor read as this run's.
    """

    def __init__(self, path: Path):
        self.path = path
        self._mark: Mark | None = None  # of what this object wrote, once it has written

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines and flush them to disk together.

        Raises:
            OSError: the file is not as this object left it, or cannot be written.
            ValueError: a number that JSON cannot hold.
        """
        added = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()
        before = self.mark()
        # A file that must be there is not made anew.
        with open(self.path, "r+b" if before.size else "ab") as file:
            size = file.seek(0, os.SEEK_END)
            if size != before.size:
                raise self._changed(f"has {size:,} bytes where this run wrote {before.size:,}")
            file.write(added)
            file.flush()
            os.fsync(file.fileno())
        self._mark = Mark(before.size + len(added), zlib.crc32(added, before.checksum))

    def read(self) -> list[dict[str, Any]]:
        """All complete lines; one that was cut off while being written is left out.

        Raises:
            ArgumentError: a line other than the last is none of this project's, or a lane's rounds do not ascend.
            OSError: the file is not as this object left it.
        """
        return [line for _, line in self._lines()]

    def mark(self) -> Mark:
        """Return the mark of all that this object has written.

        Before it wrote anything, the mark is that of the complete lines in the file.
        """
        if self._mark is None:
            content = b"".join(raw for raw, _ in self._lines())
            self._mark = Mark(len(content), zlib.crc32(content))
        return self._mark

    def is_intact(self, marks: Iterable[Sequence[int]]) -> list[bool]:
        """For each mark whether the file still reaches as far.

        Raises:
            ArgumentError: it does, with other bytes.
        """
        wanted, content = [Mark(*mark) for mark in marks], self._content()
        checksums, done, checksum = {}, 0, 0
        for size in sorted({mark.size for mark in wanted if mark.size <= len(content)}):
            checksum, done = zlib.crc32(memoryview(content)[done:size], checksum), size
            checksums[size] = checksum
        for mark in wanted:
            if checksums.get(mark.size, mark.checksum) != mark.checksum:
                found = f"its first {mark.size:,} bytes were altered"
                raise ArgumentError("out", f"{self.path} must be as this run wrote it", found, _RESTORE)
        return [mark.size in checksums for mark in wanted]

    def keep_until(self, lanes: Collection[tuple[str, int]], round_index: int | None) -> list[dict[str, Any]]:
        """Drop every line behind the last of these lanes' up to a round, as `RunDirectory.keep_metrics_until` says."""
        lines = self._lines()
        own = [index for index, (_, line) in enumerate(lines) if lane_of(line) in lanes]
        if round_index is None:
            end = own[0] if own else len(lines)
        else:
            end = 1 + max((index for index in own if lines[index][1]["round"] <= round_index), default=len(lines) - 1)
        kept = b"".join(raw for raw, _ in lines[:end])
        if not self.path.exists() or self.path.read_bytes() != kept:
            write_atomically(self.path, kept)
        self._mark = Mark(len(kept), zlib.crc32(kept))
        return [lines[index][1] for index in own if index < end]

    def keep_copy(self) -> None:
        """Copy the file beside itself: metrics.before.jsonl, or metrics.before-2.jsonl, ... where that is taken."""
        numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
        names = (f"{self.path.stem}.before{number}{self.path.suffix}" for number in numbers)
        copy = next(path for name in names if not (path := self.path.with_name(name)).exists())
        write_atomically(copy, self._content())

    def _content(self) -> bytes:
        content = self.path.read_bytes() if self.path.exists() else b""
        if self._mark is not None and self._mark != (len(content), zlib.crc32(content)):
            raise self._changed(f"has {len(content):,} bytes, not the {self._mark.size:,} that this run wrote")
        return content

    def _lines(self) -> list[tuple[bytes, dict[str, Any]]]:
        """(raw bytes with line end, parsed line) of every complete line."""
        lines: list[tuple[bytes, dict[str, Any]]] = []
        rounds: dict[tuple[str, int], int] = {}
        for number, raw in enumerate(self._content().splitlines(keepends=True), start=1):
            if not raw.endswith(b"\n"):
                break
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError):
                line = None
            if not isinstance(line, dict) or any(type(line.get(name)) is not kind for name, kind in _FIELDS.items()):
                requirement = f"{self.path} must hold JSON lines with {', '.join(_FIELDS)}"
                raise ArgumentError("out", requirement, f"line {number} is not", _RESTORE)
            lane = lane_of(line)
            if line["round"] <= rounds.get(lane, -1):
                requirement = f"{self.path} must hold every line once, in the order of its rounds"
                found = f"line {number} has round {line['round']} of {lane[0]}, seed {lane[1]}, after {rounds[lane]}"
                raise ArgumentError("out", requirement, found, _RESTORE)
            rounds[lane] = line["round"]
            lines.append((raw, line))
        return lines

    def _changed(self, how: str) -> OSError:
        return OSError(f"{self.path} was changed by another program: it {how}")
