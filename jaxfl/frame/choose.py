"""Choices by name: which options a choice takes is read from the signature of the function that it names.

An option counts at a point if every choice that knows it takes it there. What does not count is idle: given on the
command line it is refused, in a grid it makes no further points.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxfl.core import ArgumentError
from jaxfl.frame.options import flag

_REQUIRED = inspect.Parameter.empty


class Owned:
    """Options that count with some values of another option, where no function's signature says so.

    A record lists its tables and choices in the class variable CHOICES, a point those that concern several records.

    Attributes:
        option: the other option.
        owned: option -> the values of `option` with which it counts.
    """

    def __init__(self, option: str, owned: Mapping[str, Collection[str]]):
        self.option, self.owned = option, owned

    def taken(self, name: str) -> frozenset[str]:
        """The options that count with this value; none for one that is not in the table (a file)."""
        return frozenset(option for option, names in self.owned.items() if name in names)

    def known(self) -> frozenset[str]:
        """The options that this is about."""
        return frozenset(self.owned)

    def owners(self, option: str) -> list[str]:
        """The values with which an option counts."""
        return list(self.owned.get(option, ()))


class Choice(Owned):
    """An option whose value names a function; keyword-only parameters of the functions are options.

    Positional ones are what the caller gives.
    """

    def __init__(self, option: str, functions: Mapping[str, Callable[..., Any]]):
        self.functions = functions
        owned: dict[str, list[str]] = {}
        for name, function in functions.items():
            for keyword in _keywords(function):
                owned.setdefault(keyword, []).append(name)
        super().__init__(option, owned)


def choose(choice: Choice, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The function that the options name, with its own options bound.

    Args:
        choice: the table.
        options: flat; those that the function does not take are passed over.

    Raises:
        ArgumentError: a name that is not in the table, or an option that the function needs and that is None.

    Example:
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
        known = ", ".join(choice.functions)
        raise ArgumentError(choice.option, f"must be one of {known}", f"got {name!r}", "Choose one of these.")
    function = choice.functions[name]
    bound = {key: options[key] for key in _keywords(function)}
    for key, default in _keywords(function).items():
        if bound[key] is None and default is _REQUIRED:
            remedy = f"Pass it, or choose another {choice.option.replace('_', ' ')}."
            raise ArgumentError(key, f"is needed by {name}", "got none", remedy)
    return functools.partial(function, **bound)


def choices_of(point: Any) -> list[Owned]:
    """All choices of a point and its records."""
    return [choice for holder in _holders(point) for choice in getattr(type(holder), "CHOICES", ())]


def idle_options(point: Any, options: Mapping[str, Any]) -> set[str]:
    """The options that change nothing at this point."""
    of_tables = [choice.known() - choice.taken(options[choice.option]) for choice in choices_of(point)]
    return {*(name for names in of_tables for name in names), *_idle_beside_tables(point, options)}


def refuse_idle(point: Any, option: str, options: Mapping[str, Any]) -> None:
    """Raise for an option that was given and does not count at this point."""
    value = options[option]
    for choice in choices_of(point):
        owners = choice.owners(option)
        if owners and options[choice.option] not in owners:
            text = " ".join(map(str, value)) if isinstance(value, tuple) else value
            remedy = f"Leave it out, or pass {flag(choice.option)} {owners[0]}."
            raise ArgumentError(option, f"belongs to {', '.join(owners)}", f"got {text} without it", remedy)
    owner = _idle_beside_tables(point, options).get(option)
    if owner is not None:
        raise ArgumentError(option, f"belongs to {owner}", f"got {value} without any", "Leave it out.")
    raise ArgumentError(option, "must change something", f"got {value} where nothing uses it", "Leave it out.")


def _holders(point: Any) -> list[Any]:
    """The point and its records."""
    return [point, *vars(point).values()]


def _idle_beside_tables(point: Any, options: Mapping[str, Any]) -> dict[str, str | None]:
    """Option that is idle by a record's own word, its method `idle` -> what it belongs to, where that is said."""
    idle: dict[str, str | None] = {}
    for holder in _holders(point):
        names = holder.idle(options) if hasattr(holder, "idle") else ()
        idle |= names if isinstance(names, Mapping) else dict.fromkeys(names)
    return idle


def counted(point: Any, options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Those of the named options that count at this point, with their values."""
    idle = idle_options(point, options)
    return {name: options[name] for name in names if name not in idle}


@functools.cache
def _keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """Keyword-only parameters of a function and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
