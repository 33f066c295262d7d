"""Options that count at a configuration, and choices by name: a function's keyword-only parameters are its options.

A record lists, in its class variable COUNTS, mappings from options to conditions on the flat options. A configuration
lists conditions that involve several of its records. An option counts where all its conditions hold. An option that
does not count is idle: on the command line it is refused, and in a grid it makes no further configurations.

A configuration whose property `exists` is False is a combination that a grid leaves out.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxfl.core import ArgumentError
from jaxfl.frame.options import flag

_REQUIRED = inspect.Parameter.empty


class Where(NamedTuple):
    """Condition that another option has one of these values."""

    option: str
    values: Collection[Any]
    known: Collection[Any] = ()  # all values that the option takes besides files; () where nothing else can be given

    def __call__(self, options: Mapping[str, Any]) -> bool:
        """True where the condition holds."""
        return options[self.option] in self.values


def where(option: str, values: Collection[Any], *names: str) -> dict[str, Where]:
    """Conditions by which the named options count only where another option has one of these values.

    Examples:
        >>> where("links", ("given", "wireless"), "lost")["lost"]({"links": "perfect"})
        False
    """
    return dict.fromkeys(names, Where(option, values))


class Choice:
    """An option whose value names a function; keyword-only parameters of the functions are options.

    The caller passes the positional parameters.

    Attributes:
        option: its name.
        functions: value -> function.
        counts: each option of the functions -> the condition that the chosen function takes it.
    """

    def __init__(self, option: str, functions: Mapping[str, Callable[..., Any]]):
        self.option, self.functions = option, functions
        taking: dict[str, list[str]] = {}
        for name, function in functions.items():
            for keyword in _keywords(function):
                taking.setdefault(keyword, []).append(name)
        self.counts = {keyword: Where(option, names, functions) for keyword, names in taking.items()}


def choose(choice: Choice, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The function that the options name, with its own options bound.

    Args:
        choice: the table.
        options: flat; options that the function does not take are ignored.

    Raises:
        ArgumentError: an unknown name, or an option of the function that is None without a default.

    Examples:
        >>> shapes = Choice("shape", {"circle": lambda *, radius: 3 * radius**2, "square": lambda *, side: side**2})
        >>> choose(shapes, {"shape": "square", "side": 3, "radius": None})()
        9
        >>> choose(shapes, {"shape": "circle", "side": 3, "radius": None})()
        Traceback (most recent call last):
        ...
        jaxfl.core.check.ArgumentError: radius: is needed by circle; got none. Pass it, or choose another shape.
    """
    name = options[choice.option]
    if name not in choice.functions:
        names = ", ".join(choice.functions)
        raise ArgumentError(choice.option, f"must be one of {names}", f"got {name!r}", "Choose one of these.")
    function = choice.functions[name]
    arguments = {key: options[key] for key in _keywords(function)}
    for key, default in _keywords(function).items():
        if arguments[key] is None and default is _REQUIRED:
            remedy = f"Pass it, or choose another {choice.option.replace('_', ' ')}."
            raise ArgumentError(key, f"is needed by {name}", "got none", remedy)
    return functools.partial(function, **arguments)


def conditions(config: Any) -> Iterator[tuple[str, Callable[[Mapping[str, Any]], bool]]]:
    """All conditions of a configuration and its records, each with the option that it is about."""
    for holder in (config, *vars(config).values()):
        for table in getattr(type(holder), "COUNTS", ()):
            yield from table.items()


def idle_options(config: Any, options: Mapping[str, Any]) -> set[str]:
    """The options that change nothing at this configuration."""
    return {name for name, holds in conditions(config) if not holds(options)}


def refuse_idle(config: Any, option: str, options: Mapping[str, Any]) -> None:
    """Raise for an option that was given and does not count at this configuration."""
    condition = next(holds for name, holds in conditions(config) if name == option and not holds(options))
    value = options[option]
    text = " ".join(map(str, value)) if isinstance(value, tuple) else value
    if not isinstance(condition, Where):
        raise ArgumentError(option, "must change something", f"got {text} where nothing uses it", "Leave it out.")
    if condition.known and options[condition.option] not in condition.known and "." not in options[condition.option]:
        found, remedy = f"got {options[condition.option]!r}", "Choose one of these."  # the cause of the idle option
        raise ArgumentError(condition.option, f"must be one of {', '.join(condition.known)}", found, remedy)
    owners = [condition.option if value is True else str(value) for value in condition.values]
    remedy = f"Leave it out, or pass {flag(condition.option)}{'' if True in condition.values else f' {owners[0]}'}."
    raise ArgumentError(option, f"belongs to {', '.join(owners)}", f"got {text} without it", remedy)


def counted(config: Any, options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Select the named options that count at this configuration, with their values."""
    idle = idle_options(config, options)
    return {name: options[name] for name in names if name not in idle}


def existing(points: Sequence[Any], changes: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Select the configurations of a grid that exist, and their changes.

    Where none exists all are kept: the experiment says what is wrong.
    """
    exist = [getattr(config, "exists", True) for config in points]
    exist = exist if any(exist) else [True] * len(exist)
    return [*itertools.compress(points, exist)], [*itertools.compress(changes, exist)]


@functools.cache
def _keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """Keyword-only parameters of a function and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
