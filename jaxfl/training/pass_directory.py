"""Files of a pass: lanes (each a case with one seed) that run, are saved and are resumed together.

    pass.json        how the lanes are computed, and where; written when they begin
    metrics.jsonl    a line for each lane and evaluation, appended and flushed to disk; holds no times, so that a
                     resumed pass reproduces it byte for byte
    checkpoints/<round>/    states of all lanes (`checkpoint.py`)
    ended/<lane>/<round>/   the state of a lane that ended before the others, at its end
    end.json         how each lane ended; written last

Lines are on disk before the checkpoint of their round. A checkpoint and end.json hold a mark of metrics.jsonl as it was
then (its size and checksum). Lines before the mark that were edited, doubled, exchanged or lost are noticed. Lines
after it are dropped when the pass goes on. pass.json and end.json have checksums of their own.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxfl.core import ArgumentError
from jaxfl.core.lines import METRICS, Label, parse_lines
from jaxfl.training.json_files import Damaged, checked, jsonable, read_json, with_checksum, write_atomically, write_json
from jaxfl.training.processes import on_all, on_first

BEGUN, END = "pass.json", "end.json"
CHECKPOINTS, ENDED = "checkpoints", "ended"
_RESTORE = "Restore the file, or start again with another out."
_TAIL_BYTES = 2**16  # enough for a line
_BLOCK = 2**20  # bytes of metrics.jsonl in memory
_BEGUN_FORM = {"slots": int, "at_once": int, "strategy": str, "environment": dict}


class Mark(NamedTuple):
    """Fingerprint of the first `size` bytes of metrics.jsonl."""

    size: int
    checksum: int  # CRC-32


class PassDirectory:
    """Directory of one pass. Where several processes train together, all read its small files, and process 0 writes.

    Args:
        path: the directory, which need not exist yet.
        lanes: (case, seed) of each, in their order.
        run: `RunDirectory.fingerprint`.

    Attributes:
        owner: name of its checkpoints, which tells them from those of other lanes and runs.

    Guarantees:
        - a file that another program changed is refused, both for writing and for reading.
    """

    def __init__(self, path: Path, lanes: Sequence[Label], run: str):
        self.path, self.lanes = path, tuple(lanes)
        self.owner = f"{run} {zlib.crc32(json.dumps([list(lane) for lane in lanes]).encode()):08x}"
        self._mark: Mark | None = None  # of all that this object wrote, once it has written

    @on_all
    def begun(self) -> dict[str, Any] | None:
        """The record made by `begin`; None where the pass has not begun."""
        return self._read(BEGUN, _BEGUN_FORM) if (self.path / BEGUN).exists() else None

    @on_first
    def begin(self, choice: Mapping[str, Any]) -> None:
        """Record how the lanes are computed: "slots", "at_once", "strategy", "environment"."""
        write_json(self.path / BEGUN, with_checksum(jsonable(choice, BEGUN)))

    @on_all
    def end(self) -> dict[Label, dict[str, Any]] | None:
        """The end of each lane, None where the pass is not over; ArgumentError where a file was altered."""
        if not (self.path / END).exists():
            return None
        content = self._read(END, {"lanes": list, "metrics": list, "owner": str})
        if content["owner"] != self.owner:
            found = f"{self.path / END} is of other lanes or of another run"
            raise ArgumentError("out", "must hold passes of its own lanes only", found, _RESTORE)
        self.check_lines(content["metrics"], exactly=True)
        return dict(zip(self.lanes, content["lanes"], strict=True))

    @on_first
    def finish(self, records: Mapping[Label, Mapping[str, Any]]) -> None:
        """Write how the lanes ended: the pass is over."""
        lanes = [jsonable(records[lane], END) for lane in self.lanes]
        content = {"lanes": lanes, "metrics": list(self.mark()), "owner": self.owner}
        write_json(self.path / END, with_checksum(content))

    @on_first
    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines and flush them to disk together; OSError where the file is not as this object left it."""
        added = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()
        before = self.mark()
        # A file that must be there already is not created.
        with open(self.path / METRICS, "r+b" if before.size else "ab") as file:
            size = file.seek(0, os.SEEK_END)
            if size != before.size:
                raise self._changed(f"has {size:,} bytes where this run wrote {before.size:,}")
            file.write(added)
            file.flush()
            os.fsync(file.fileno())
        self._mark = Mark(before.size + len(added), zlib.crc32(added, before.checksum))

    def lines(self) -> Iterator[dict[str, Any]]:
        """All complete lines, one after the other, as `parse_lines` gives them."""
        if self.has_lines():
            yield from parse_lines(self.path / METRICS)

    def has_lines(self) -> bool:
        """True if there are lines; OSError where the file is not as this object left it."""
        return self._marked().size > 0

    @on_first
    def mark(self) -> Mark:
        """Mark of all that this object has written, or of the whole file while it has written nothing."""
        if self._mark is None:
            self._mark = self._marked()
        return self._mark

    @on_all
    def check_lines(self, mark: Sequence[int], *, exactly: bool = False) -> None:
        """Raise ArgumentError unless metrics.jsonl begins with what a mark describes, or is exactly that."""
        whole = self._marked()
        size, checksum = mark
        requirement = f"{self.path / METRICS} must be as this run wrote it"
        if whole.size < size or (exactly and whole.size > size):
            found = f"it has {whole.size:,} bytes in place of {size:,}"
            raise ArgumentError("out", requirement, found, _RESTORE)
        if _mark_of(self._blocks(size)).checksum != checksum:
            raise ArgumentError("out", requirement, f"its first {size:,} bytes were altered", _RESTORE)

    @on_first
    def keep_lines(self, mark: Sequence[int] = (0, 0)) -> None:
        """Drop the lines after a mark, atomically. If this drops all lines, metrics.before.jsonl keeps the old file."""
        whole, self._mark = self._marked(), Mark(*mark)
        if not self._mark.size and whole.size:
            write_atomically(self.path / "metrics.before.jsonl", self._blocks())
        if not (self.path / METRICS).exists() or whole.size != self._mark.size:
            write_atomically(self.path / METRICS, self._blocks(self._mark.size))

    def _read(self, name: str, form: Mapping[str, type]) -> dict[str, Any]:
        try:
            return checked(read_json(self.path / name), form)
        except Damaged:
            found = "it was altered"
            raise ArgumentError("out", f"{self.path / name} must be as this run wrote it", found, _RESTORE) from None

    def _blocks(self, size: float = math.inf) -> Iterator[bytes]:
        """The first bytes of metrics.jsonl; none where it is missing."""
        if (self.path / METRICS).exists():
            with open(self.path / METRICS, "rb") as file:
                while block := file.read(int(min(_BLOCK, size))):
                    yield block
                    size -= len(block)

    def _marked(self) -> Mark:
        """Mark of the whole file; OSError where it is not as this object left it."""
        whole = _mark_of(self._blocks())
        if self._mark not in (None, whole):
            raise self._changed(f"has {whole.size:,} bytes, not the {self._mark.size:,} that this run wrote")
        return whole

    def _changed(self, how: str) -> OSError:
        return OSError(f"{self.path / METRICS} was changed by another program: it {how}")


def newest_round(path: Path) -> int:
    """Round of the newest complete line of a metrics.jsonl that another process may be writing; 0 without any."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            whole = file.read().rpartition(b"\n")[0]
        return int(json.loads(whole.rpartition(b"\n")[2])["round"])
    except (OSError, ValueError, KeyError):
        return 0


def _mark_of(blocks: Iterator[bytes]) -> Mark:
    size = checksum = 0
    for block in blocks:
        size, checksum = size + len(block), zlib.crc32(block, checksum)
    return Mark(size, checksum)
