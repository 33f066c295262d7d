"""Files that a run has left on disk, for comparisons."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from jaxfl.training import read_run


def pass_folders(out: str | os.PathLike[str]) -> list[Path]:
    """Directories of the passes, in their order."""
    return sorted((path for path in Path(out).glob("passes/*") if path.is_dir()), key=lambda path: int(path.name))


def begun(out: str | os.PathLike[str], number: int = 0) -> dict[str, Any]:
    """Content of a pass's pass.json."""
    record = read_run(out).passes[number].begun()
    assert record is not None
    return record


def content(directory: Path) -> dict[Path, bytes]:
    """The bytes of every file below a directory."""
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def run_bytes(out: str | os.PathLike[str]) -> bytes:
    """The bytes of all lines of a run, pass by pass."""
    return b"".join(path.read_bytes() for one in pass_folders(out) if (path := one / "metrics.jsonl").exists())


def run_lines(out: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All lines of a run."""
    return [json.loads(line) for line in run_bytes(out).splitlines()]
