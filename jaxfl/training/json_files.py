"""JSON files that are replaced atomically, values that fit into them, and what differs between two of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxfl.core import ArgumentError


def jsonable(value: Any, name: str) -> Any:
    """`value` as what JSON gives back: dicts with string keys, lists, strings, numbers; infinite ones as strings.

    Raises:
        ArgumentError: a value of another kind.

    Example:
        >>> jsonable({"clip_norm": float("inf"), "seeds": (0, 1), "path": Path("a")}, "config")
        {'clip_norm': 'inf', 'seeds': [0, 1], 'path': 'a'}
    """
    if hasattr(value, "tolist"):  # NumPy and JAX arrays and scalars
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): jsonable(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(inner, f"{name}[{index}]") for index, inner in enumerate(value)]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, os.PathLike):
        return str(value)
    found = f"got {type(value).__name__}"
    raise ArgumentError(name, "must be a value that JSON can hold", found, "Pass a number, a string, a list or a dict.")


def read_json(path: Path) -> dict[str, Any]:
    """Content of a JSON file that this module wrote; ArgumentError where it is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        remedy = "Restore the file, or name another directory."
        raise ArgumentError("out", f"{path} must hold JSON", "it does not", remedy) from None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically."""
    write_atomically(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file so that a crash leaves the old or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def refuse_difference(found: Any, given: Any, path: Path, key: str = "") -> None:
    """Raise ArgumentError for the first key, in the order of `given`, whose values differ."""
    if isinstance(found, dict) and isinstance(given, dict):
        for name in (*given, *(name for name in found if name not in given)):
            inner = f"{key}.{name}" if key else name
            refuse_difference(found.get(name, _Absent), given.get(name, _Absent), path, inner)
    elif found is not given and found != given:
        raise ArgumentError(
            key,
            "must be as in the run that is resumed",
            f"{path} has {_shown(found)}, this call has {_shown(given)}",
            f"Pass {_shown(found)}, or start a new run with another out.",
        )


class _Absent:
    """Stands for a key that one side does not have."""


def _shown(value: Any) -> str:
    return "no such key" if value is _Absent else json.dumps(value)
