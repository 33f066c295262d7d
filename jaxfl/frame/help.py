"""Text of --help: every option with its type, its text and the value that it would have, grouped by record."""

from __future__ import annotations

import ast
import functools
import inspect
import shutil
import textwrap
import types
from collections.abc import Mapping
from typing import Any, get_type_hints

from jaxfl.frame.experiment import Request
from jaxfl.frame.options import flag, in_words, options, text_of

_WORDS = {int: "INTEGER", float: "NUMBER", str: "TEXT", types.NoneType: "None"}


def print_help(asked: Request, of_frame: Mapping[str, str]) -> None:
    """Print the options with the values that were laid, those of the frame, and what is compared.

    Args:
        asked: the request that the arguments beside --help make.
        of_frame: flag -> "VALUE  text" of the options that every experiment has.
    """
    point, known = asked.point, options(type(asked.point))
    print(f"usage: python -m experiments.{asked.experiment.name} [options]\n\n{asked.experiment.description}")
    record_types = get_type_hints(type(point))
    for record in dict.fromkeys(option.record for option in known.values()):
        record_type = record_types[record]
        print()
        _print_paragraph(f"{record}: {' '.join(str(record_type.__doc__).split())}", 0)
        texts = _texts(record_type)
        for name in [name for name, option in known.items() if option.record == record]:
            value = getattr(getattr(point, record), name)
            print(f"  {flag(f'no_{name}' if value is True else name)} {metavar(known[name].kind)}".rstrip())
            _print_paragraph(texts.get(name, "") + _shown(value), 6)
    print("\nevery experiment: Presets, grids and compiled programs.")
    for name, text in of_frame.items():
        value, _, text = text.partition("  ")
        print(f"  {name} {value}")
        _print_paragraph(text, 6)
    varied = [" ".join(f"{name}={','.join(map(text_of, part[name]))}" for name in part) for part in asked.grid]
    if varied:
        print(f"\nwould compare: {', each with '.join(varied)}")


def metavar(kind: Any) -> str:
    """Placeholder of a flag's value: INTEGER, ring|star, NUMBER|None, INTEGER ..., or nothing for a switch."""
    return in_words(kind, _WORDS, "{} ...", "|")


def _shown(value: Any) -> str:
    """The value that an option would have; nothing where there is none."""
    if value is None or value is False:
        return ""
    return " (default: " + ("on" if value is True else text_of(value) or "none") + ")"


def _print_paragraph(text: str, indent: int) -> None:
    width = min(shutil.get_terminal_size().columns, 120)
    print(textwrap.fill(text, width, initial_indent=" " * indent, subsequent_indent=" " * max(indent, 2)))


@functools.cache
def _texts(record_type: type) -> dict[str, str]:
    """Field -> the string below it, of a record and what it inherits from; Python itself forgets these strings."""
    texts: dict[str, str] = {}
    for parent in reversed(record_type.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(parent))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(field.target, ast.Name):
                assert isinstance(after.value, ast.Constant)
                texts[field.target.id] = " ".join(str(after.value.value).split())
    return texts
