"""JSON files that are replaced atomically, values that fit into them, and what differs between two of them."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from jaxfl.core import ArgumentError

Form = Mapping[str, Any]
_CHECKSUM = "checksum"
_PLAIN = frozenset((str, int, bool, type(None)))
_LEAVES = _PLAIN | {float}
_RESTORE = "Restore the file, or start again with another out."


def jsonable(value: Any, name: str) -> Any:
    """`value` as JSON would read it back, infinite numbers as strings; ArgumentError for other kinds of values.

    Examples:
        >>> jsonable({"clip_norm": float("inf"), "seeds": (0, 1), "path": Path("a")}, "config")
        {'clip_norm': 'inf', 'seeds': [0, 1], 'path': 'a'}
    """
    if _fits(value):
        return value
    if hasattr(value, "tolist"):  # NumPy and JAX arrays and scalars
        value = value.tolist()
    if isinstance(value, list | tuple) and {*map(type, value)} <= _PLAIN:
        return list(value)
    if isinstance(value, Mapping):
        return {str(key): v if _fits(v) else jsonable(v, f"{name}.{key}") for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [v if _fits(v) else jsonable(v, f"{name}[{index}]") for index, v in enumerate(value)]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, os.PathLike):
        return str(value)
    found = f"got {type(value).__name__}"
    raise ArgumentError(name, "must be a value that JSON can hold", found, "Pass a number, a string, a list or a dict.")


def _fits(value: Any) -> bool:
    """True for what JSON holds as it is; numbers of NumPy are of other types."""
    return type(value) in _PLAIN or (type(value) is float and value - value == 0)


def read_json(path: Path, form: Form | None = None) -> dict[str, Any]:
    """Content of a JSON file that this module wrote; ArgumentError where it is not JSON, or has another form.

    Args:
        path: of the file.
        form: name -> the type of its value, several types, or the form of a dict. Other names may be there, too.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ArgumentError("out", f"{path} must hold JSON", "it does not", _RESTORE) from None
    refuse_form(content, {} if form is None else form, path)
    return content


def refuse_form(content: Any, form: Form, path: Path, key: str = "") -> None:
    """Raise ArgumentError unless the content, part `key` of a file, is a dict of this form, as for `read_json`."""
    if not isinstance(content, dict):
        _refuse_kind(content, (dict,), path, key)
    for name, kinds in form.items():
        inner = f"{key}.{name}" if key else name
        value = content.get(name, _Absent)
        if isinstance(kinds, Mapping):
            refuse_form(value, kinds, path, inner)
        else:
            kinds = kinds if isinstance(kinds, tuple) else (kinds,)
            if type(value) not in kinds:  # JSON's true does not count as an int
                _refuse_kind(value, kinds, path, inner)


def _refuse_kind(value: Any, kinds: tuple[type, ...], path: Path, key: str) -> None:
    wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
    found = "it does not" if value is _Absent else f"it holds {type(value).__name__}"
    raise ArgumentError("out", f"{path} must hold {key + ' as ' if key else ''}{wanted}", found, _RESTORE)


class Damaged(Exception):
    """A content differs from what was written; the text says why."""


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """A content, whose names are strings, with its checksum, for `checked`."""
    return {**content, _CHECKSUM: _checksum_of(content)}


def checked(content: Any, form: Form) -> dict[str, Any]:
    """The content that `with_checksum` was given; `Damaged` where it differs from what was written."""
    content = dict(content) if isinstance(content, dict) else {}
    if content.pop(_CHECKSUM, None) != _checksum_of(content):
        raise Damaged("the record is altered")
    if any(type(content.get(name)) is not kind for name, kind in form.items()):
        raise Damaged("the record is of another version")
    return content


def _checksum_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically."""
    write_atomically(path, (_indented(content) + "\n").encode())


def _indented(value: Any, margin: str = "\n") -> str:
    """`json.dumps(value, indent=2, allow_nan=False)`, by the encoder in C, which knows no indentation."""
    inner = margin + "  "
    values = (value.values() if isinstance(value, dict) else value) if isinstance(value, dict | list | tuple) else ()
    if not values:
        return _encoder(", ").encode(value)
    if {*map(type, values)} <= _LEAVES or not any(isinstance(v, dict | list | tuple) and v for v in values):
        text = _encoder("," + inner).encode(value)
        return text[0] + inner + text[1:-1] + margin + text[-1]
    parts = [_indented(v, inner) for v in values]
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {part}" for name, part in zip(value, parts, strict=True)]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return first + inner + ("," + inner).join(parts) + margin + last


@lru_cache(maxsize=64)
def _encoder(separator: str) -> json.JSONEncoder:
    return json.JSONEncoder(allow_nan=False, separators=(separator, ": "))


def write_atomically(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Replace a file, by its content or blocks of it, so that a crash leaves the old or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # left by a process that died, or a link to elsewhere
    with open(temporary, "xb") as file:
        file.writelines([content] if isinstance(content, bytes) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def refuse_difference(found: Any, given: Any, path: Path, key: str = "", words: Mapping[str, str] = {}) -> None:
    """Raise ArgumentError for the first key, in the order of `given`, whose values differ.

    `words`, key -> words for its value, is for digests, which tell people nothing.
    """
    if isinstance(found, dict) and isinstance(given, dict):
        for name in (*given, *(name for name in found if name not in given)):
            inner = f"{key}.{name}" if key else name
            refuse_difference(found.get(name, _Absent), given.get(name, _Absent), path, inner, words)
    elif found is not given and found != given:
        difference, remedy = (
            f"{path} has {_shown(found)}, this call has {_shown(given)}",
            f"Pass {_shown(found)}, or start",
        )
        if key in words and _Absent not in (found, given):
            difference, remedy = f"{words[key]} are other data than in {path}", "Bring the same data, or start"
        remedy = "Start" if found is _Absent else remedy
        requirement = "must be as in the run that is resumed"
        raise ArgumentError(key, requirement, difference, f"{remedy} a new run with another out.")


class _Absent:
    """Stands for a key that one side does not have."""


def _shown(value: Any) -> str:
    return "no such key" if value is _Absent else json.dumps(value)
