"""From an experiment's arguments to its configuration, and one sentence for whatever is wrong with them."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, Union

import tyro

from jaxfl.core import ArgumentError

Config = TypeVar("Config")


class Preset(NamedTuple):
    """A named set of option values that reproduces a figure, a table or a setting of the paper."""

    description: str
    cost: str  # measured time and the machine it was measured on
    options: dict[str, Any]


def parse(
    arguments: Sequence[str],
    config_type: type[Config],
    presets: Mapping[str, Preset],
    *,
    prog: str = "experiment",
    description: str = "",
) -> tuple[Config, str | None]:
    """The configuration that the arguments ask for, and the preset's name.

    `--preset NAME` sets the defaults, `--set key=value` is another way to write `--key value`, and options given
    explicitly win over the preset.

    Raises:
        ArgumentError: an unknown preset, key or option, a value of another type, or an option given twice.
    """
    plain, preset = _expand(arguments, config_type)
    if preset is not None and preset not in presets:
        known = ", ".join(presets) or "none"
        raise ArgumentError("--preset", "must name a preset", f"got {preset!r}", f"This experiment has: {known}.")
    default = config_type(**presets[preset].options) if preset is not None else config_type()
    groups = _by_option(plain)
    _refuse_repeats(groups, config_type)

    def parsed(tokens: Sequence[str]) -> tuple[Config, list[str]]:
        return tyro.cli(
            config_type,
            args=tokens,
            default=default,
            prog=prog,
            description=description + " --preset NAME, --list-presets and --set KEY=VALUE work too.",
            config=(tyro.conf.FlagCreatePairsOff,),
            return_unknown_args=True,
        )

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            config, unknown = parsed(plain)
    except SystemExit as done:
        if not done.code:  # --help
            raise
        unknown = []
    else:
        if not unknown:
            return config, preset
    # The parser reports in a box of several lines. Which option it means is found by parsing each one by itself.
    for group in groups:
        try:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                rest = parsed(group)[1]
        except SystemExit as done:
            rest = group if done.code else []
        if rest:
            _refuse(group, config_type, default)
    remedy = "See --help for all options."
    raise ArgumentError("the arguments", "must be options of this experiment", f"got {' '.join(plain)!r}", remedy)


def take(arguments: Sequence[str], name: str, default: str) -> tuple[str, list[str]]:
    """The value of an option that every experiment has, and the other arguments.

    Raises:
        ArgumentError: it is given twice, or without a value.

    Example:
        >>> take(["--nodes", "4", "--compilation-cache=off"], "--compilation-cache", "default")
        ('off', ['--nodes', '4'])
    """
    values, others = [], []
    for group in _by_option(arguments):
        key, equals, value = group[0].partition("=")
        if key.replace("_", "-") != name:
            others += group
            continue
        given = ([value] if equals else []) + list(group[1:])
        if len(given) != 1 or not given[0]:
            raise ArgumentError(name, "must have one value", f"got {' '.join(given)!r}", f"Write for example {name} x.")
        values += given
    if len(values) > 1:
        raise ArgumentError(name, "must be given once", f"got {' and '.join(map(repr, values))}", "Remove one of them.")
    return (values[0] if values else default), others


def _expand(arguments: Sequence[str], config_type: type) -> tuple[list[str], str | None]:
    """The arguments with every `--set` written as its option, and the preset's name."""
    plain, settings, preset = [], [], None
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name == "--preset":
            preset = value if equals else next(rest, "")
        elif name == "--set":
            settings.append(value if equals else next(rest, ""))
        else:
            plain.append(argument)
    fields = options(config_type)
    for setting in settings:
        key, equals, value = setting.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key not in fields:
            known = ", ".join(fields)
            raise ArgumentError("--set", "must be KEY=VALUE with a known key", f"got {setting!r}", f"Keys: {known}.")
        if fields[key] is bool:
            if value not in ("true", "false"):
                raise ArgumentError("--set", f"must give {key} as true or false", f"got {setting!r}", "Write one.")
            plain += [flag(key)] if value == "true" else []
        else:
            several = any(typing.get_origin(kind) is tuple for kind in _alternatives(fields[key]))
            plain += [flag(key), *(value.split() if several else [value])]
    return plain, preset


def _by_option(arguments: Sequence[str]) -> list[list[str]]:
    """The arguments cut before every option; a negative number is a value."""
    groups: list[list[str]] = []
    for argument in arguments:
        if not groups or re.match(r"--?[A-Za-z]", argument):
            groups.append([])
        groups[-1].append(argument)
    return groups


def _refuse_repeats(groups: Sequence[Sequence[str]], config_type: type) -> None:
    """Of an option given twice, one value would be ignored."""
    seen: dict[str, Sequence[str]] = {}
    for group in groups:
        key = group[0].partition("=")[0].lstrip("-").replace("-", "_")
        if key in seen and key in options(config_type):
            found = f"got {' '.join(seen[key])!r} and {' '.join(group)!r}"
            raise ArgumentError(key, "must be given once", found, "Remove one of them.")
        seen[key] = group


def _refuse(group: Sequence[str], config_type: type, default: object) -> NoReturn:
    """The error of one option, with its values, that the parser does not take."""
    name, equals, value = group[0].partition("=")
    key = name.lstrip("-").replace("-", "_")
    values = ([value] if equals else []) + list(group[1:])
    fields = options(config_type)
    if key not in fields:
        near = difflib.get_close_matches(key, fields, n=1)
        remedy = (f"Did you mean {flag(near[0])}? " if near else "") + "See --help for all options."
        raise ArgumentError(name, "must be an option of this experiment", "there is none of that name", remedy)
    found = f"got {' '.join(values)!r}" if values else "got no value"
    if fields[key] is bool:
        raise ArgumentError(key, "takes no value", found, f"Write {flag(key)} alone, or leave it out.")
    known = getattr(default, key)
    example = _example(fields[key]) if known is None else known
    text = " ".join(map(str, example)) if isinstance(example, tuple) else str(example)
    remedy = f"Write for example {flag(key)} {text}, or leave it out for the default."
    raise ArgumentError(key, f"must be {_described(fields[key])}", found, remedy)


def options(config_type: type) -> dict[str, Any]:
    """Name -> type of every option, in the order of --help."""
    hints = typing.get_type_hints(config_type)
    return {field.name: hints[field.name] for field in dataclasses.fields(config_type)}


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


def _described(kind: Any) -> str:
    """What values an option takes, in words."""
    words = {int: "an integer", float: "a number", str: "a text", types.NoneType: "None"}
    parts = []
    for one in _alternatives(kind):
        if typing.get_origin(one) is tuple:
            parts.append(f"{_described(typing.get_args(one)[0])} (or several)")
        elif typing.get_origin(one) is Literal:
            parts += [str(choice) for choice in typing.get_args(one)]
        else:
            parts.append(words.get(one, str(one)))
    return " or ".join(parts)


def _example(kind: Any) -> str:
    """A value that an option takes."""
    first = _alternatives(kind)[0]
    if typing.get_origin(first) is tuple:
        return _example(typing.get_args(first)[0])
    if typing.get_origin(first) is Literal:
        return str(typing.get_args(first)[0])
    return {int: "1", float: "0.5"}.get(first, "NAME")


def flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"
