"""Options: fields of records, flat on the command line, each with its value.

A record is a frozen dataclass whose fields are options; a configuration is a frozen dataclass of records. Names of
options are unique in a configuration, so that a flat mapping says as much as the nested one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

import tyro

from jaxfl.core import ArgumentError, check
from jaxfl.core.vocabulary import by_spaces, chosen, flag, hint, spelled

ABSENT = object()
_WORDS = {int: "an integer", float: "a number", str: "a text", types.NoneType: "None"}


class Option(NamedTuple):
    """One option of an experiment."""

    record: str  # field of the configuration that holds it
    kind: Any  # type of its value
    traced: bool  # a number that may differ between configurations of one compiled program
    saved: bool  # decides the results, and so stands in config.json
    in_program: bool  # decides what is compiled; budgets and deltas do not
    old_key_values: Mapping[Any, Any] = {}  # value -> what stands for it in the key of random numbers
    constant_where: Callable[[Mapping[str, Any]], bool] | None = None  # all options -> whether it is not traced there


def traced(
    default: float | str | tuple[float, ...] | None, constant_where: Callable[[Mapping[str, Any]], bool] | None = None
) -> Any:
    """A field that one compiled program may hold with many values: a step size, a noise scale, a clip norm.

    Args:
        default: its default; a tuple holds a number of each node.
        constant_where: tells by all options where its value is compiled in; None: nowhere.
    """
    return dataclasses.field(default=default, metadata={"traced": True, "constant_where": constant_where})


def unsaved(default: Any) -> Any:
    """A field that decides no result, such as a folder or the output."""
    return dataclasses.field(default=default, metadata={"saved": False, "in_program": False})


def affects_statements_only(default: Any) -> Any:
    """A field that decides statements, stops or pictures of a run, but not its program."""
    return dataclasses.field(default=default, metadata={"in_program": False})


def added_later(default: Any, old_key_values: Mapping[Any, Any], *, is_traced: bool = False) -> Any:
    """A field that was added later: some of its values leave random numbers as they were without it.

    Args:
        default: its default.
        old_key_values: value -> what stands for it in the key of random numbers, ABSENT for nothing.
        is_traced: whether one compiled program may hold many values, as of `traced`.
    """
    return dataclasses.field(default=default, metadata={"old_key_values": old_key_values, "traced": is_traced})


@functools.cache
def options(point_type: type) -> dict[str, Option]:
    """Name -> option, in the order of --help."""
    result: dict[str, Option] = {}
    record_types = typing.get_type_hints(point_type)
    for record in [field.name for field in dataclasses.fields(point_type)]:  # no class variables
        record_type = record_types[record]
        kinds = typing.get_type_hints(record_type)
        for field in dataclasses.fields(record_type):
            assert field.name not in result, f"two options are named {field.name}"
            flags = {"traced": False, "saved": True, "in_program": True, **field.metadata}
            result[field.name] = Option(record, kinds[field.name], **flags)
    return result


def is_argument(option: Option, value: Any, values: Mapping[str, Any]) -> bool:
    """True where the compiled program takes the value: a traced option whose numbers switch nothing off.

    `values` has all options.
    """
    each = value if isinstance(value, tuple) else (value,)
    is_traced = option.traced and not (option.constant_where is not None and option.constant_where(values))
    are_on = (isinstance(one, int | float) and one != 0 and math.isfinite(one) for one in each)
    return is_traced and bool(each) and all(are_on)


def flat(config: Any) -> dict[str, Any]:
    """Name -> value of every option."""
    return {name: getattr(getattr(config, option.record), name) for name, option in options(type(config)).items()}


def override(config: Any, changes: Mapping[str, Any]) -> Any:
    """The configuration with other values of some options; a name that is no option is refused."""
    table = options(type(config))
    of_record: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        if name not in table:
            raise unknown(name, table)
        of_record.setdefault(table[name].record, {})[name] = value
    records = {name: dataclasses.replace(getattr(config, name), **values) for name, values in of_record.items()}
    return dataclasses.replace(config, **records)


def named(word: str, known: Collection[str]) -> str:
    """Name of the option that a word of a command line, a grid or a file means, by whichever command's name for it."""
    name = word.strip().removeprefix("--").replace("-", "_")
    return spelled(name, known) or name


def unknown(word: str, known: Collection[str], remedy: str = "See --help-all for all options.") -> ArgumentError:
    """The error of a word that names no option, with the option that it most likely stands for."""
    near = hint(word.strip("-").replace("-", "_"), known, flag)
    return ArgumentError(word, "must be an option of this experiment", "there is none of that name", near + remedy)


def value_of(name: str, kind: Any, tokens: Sequence[str]) -> Any:
    """The value that words of a command line or a file give an option.

    Raises:
        ArgumentError: words of another type, or words that cannot name a file.
    """
    refuse_unusable(name, tokens)
    found = f"got {' '.join(tokens)!r}" if tokens else "got no value"
    if kind is bool:
        if list(tokens) not in ([], ["true"], ["false"], ["True"], ["False"]):
            raise ArgumentError(name, "takes no value", found, f"Write {flag(name)} alone, or leave it out.")
        return list(tokens) not in (["false"], ["False"])
    choices = choices_of(kind)
    try:
        return _parse(kind, tuple(chosen(token, choices) or token for token in tokens))
    except (SystemExit, ValueError):  # ValueError: an integer of thousands of digits
        near = "".join(hint(token, choices) for token in tokens if token not in choices)
        remedy = by_spaces(tokens) or f"{near}Pass another, or leave it out for the default."
        raise ArgumentError(name, f"must be {_in_words(kind)}", found, remedy) from None


def refuse_unusable(name: str, tokens: Sequence[str]) -> None:
    """Refuse words that cannot name a file: bytes that are not UTF-8, NUL, the home of an unknown user."""
    for token in tokens:
        if "\0" in token or any("\ud800" <= letter <= "\udfff" for letter in token):
            found, remedy = f"got {token!r}", "Rename the file, or write the word in UTF-8."
            raise ArgumentError(name, "must be UTF-8 without NUL", found, remedy)
        if token.startswith("~"):
            try:
                Path(token).expanduser()
            except RuntimeError:
                found, remedy = f"got {token!r}, and that user has no home", "Write the folder out."
                raise ArgumentError(name, "must name a folder that can be looked up", found, remedy) from None


def refuse_out_of_range(name: str, value: Any, option: Option) -> None:
    """Refuse what no option takes: NaN, integers beyond 32 bits, traced numbers that are 0 or infinite in float32.

    Seeds lie in [0, 2^32), in which no key loses bits; the engine counts in int32.
    """
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and math.isnan(number):
            raise ArgumentError(name, "must be a number", "got nan", "Pass another, or leave it out for the default.")
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if isinstance(number, int) and name.endswith("seed"):
            if not 0 <= number < 2**32:
                remedy = "Pass e.g. --seeds 0 1 2." if name == "seed" else "Pass 0 or more."
                raise ArgumentError(name, "must lie in [0, 2^32)", f"got {number}", remedy)
        elif isinstance(number, int) and abs(number) >= 2**31:
            raise ArgumentError(name, "must be below 2^31: counts have 32 bits", f"got {number}", "Pass fewer.")
        elif option.traced and math.isfinite(number):
            check.in_float32(**{name: number})


@functools.cache
def _parse(kind: Any, tokens: tuple[str, ...]) -> Any:
    """Parse words into a value, by tyro; SystemExit where they do not fit the type."""
    holder = dataclasses.make_dataclass("Value", [("value", kind)])
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        result, rest = tyro.cli(holder, args=["--value", *tokens], return_unknown_args=True)
    if rest or (not tokens and not any(typing.get_origin(part) is tuple for part in alternatives(kind))):
        raise SystemExit(2)
    return result.value


def text_of(value: Any) -> str:
    """A value as a user would write it."""
    if isinstance(value, tuple | list):
        return " ".join(map(text_of, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


def choices_of(kind: Any) -> list[str]:
    """The words that an option takes, one or several."""
    words: list[str] = []
    for part in alternatives(kind):
        inner = typing.get_args(part)
        if typing.get_origin(part) is tuple:
            words += choices_of(inner[0])
        elif typing.get_origin(part) is Literal:
            words += map(str, inner)
    return words


def varies_by_words(kind: Any) -> bool:
    """True for a number or a choice: several words are several values. A text may hold spaces."""
    parts = alternatives(kind)
    return all(part in (int, float, types.NoneType) or typing.get_origin(part) is Literal for part in parts)


def _in_words(kind: Any) -> str:
    """Values that an option takes."""
    parts = []
    for part in alternatives(kind):
        if typing.get_origin(part) is tuple:
            parts.append(f"{_in_words(typing.get_args(part)[0])} (or several)")
        else:
            parts += map(str, typing.get_args(part)) if typing.get_origin(part) is Literal else [_WORDS[part]]
    return " or ".join(parts)
