"""Choices by name: which options a choice takes is read from the signature of the function that it names.

An option counts at a point if every choice that knows it takes it there. What does not count is idle: given on the
command line it is refused, in a grid it makes no further points.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from jaxfl.core import ArgumentError

_REQUIRED = inspect.Parameter.empty


class Choice(NamedTuple):
    """An option whose value names a function.

    Keyword-only parameters of the functions are options; positional ones are what the caller gives. A record lists its
    choices in the class variable CHOICES, a point those that concern several records.
    """

    option: str
    functions: Mapping[str, Callable[..., Any]]

    def taken(self, name: str) -> frozenset[str]:
        """The options that the function of this name takes; none for a name that is not in the table (a file)."""
        return frozenset(_keywords(self.functions[name])) if name in self.functions else frozenset()

    def known(self) -> frozenset[str]:
        """The options that any of the functions takes."""
        return frozenset[str]().union(*map(self.taken, self.functions))

    def owners(self, option: str) -> list[str]:
        """The names whose functions take an option."""
        return [name for name in self.functions if option in self.taken(name)]


class Owned(NamedTuple):
    """Options that count with some values of another option where no function's signature says so.

    It stands in CHOICES beside choices.
    """

    option: str
    owned: Mapping[str, Collection[str]]  # option -> the values of `option` with which it counts

    def taken(self, name: str) -> frozenset[str]:
        """The options that count with this value."""
        return frozenset(option for option, names in self.owned.items() if name in names)

    def known(self) -> frozenset[str]:
        """The options that this is about."""
        return frozenset(self.owned)

    def owners(self, option: str) -> list[str]:
        """The values with which an option counts."""
        return list(self.owned.get(option, ()))


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


def choices_of(point: Any) -> list[Choice | Owned]:
    """All choices of a point and its records."""
    holders = [point, *(getattr(point, name) for name in vars(point))]
    return [choice for holder in holders for choice in getattr(type(holder), "CHOICES", ())]


def idle_options(point: Any, options: Mapping[str, Any]) -> set[str]:
    """The options that change nothing at this point."""
    idle: set[str] = set()
    for choice in choices_of(point):
        idle |= choice.known() - choice.taken(options[choice.option])
    holders = [point, *(getattr(point, name) for name in vars(point))]
    for holder in holders:  # what no table says
        idle |= set(holder.idle(options)) if hasattr(holder, "idle") else set()
    return idle


def refuse_idle(point: Any, option: str, options: Mapping[str, Any]) -> None:
    """Raise for an option that was given and does not count at this point."""
    value = options[option]
    for choice in choices_of(point):
        owners = choice.owners(option)
        if option in choice.known() and options[choice.option] not in owners:
            text = " ".join(map(str, value)) if isinstance(value, tuple) else value
            remedy = f"Leave it out, or pass --{choice.option.replace('_', '-')} {owners[0]}."
            raise ArgumentError(option, f"belongs to {', '.join(owners)}", f"got {text} without it", remedy)
    for holder in (point, *vars(point).values()):
        idle = holder.idle(options) if hasattr(holder, "idle") else ()
        if option in idle and isinstance(idle, Mapping):  # option -> what it belongs to
            raise ArgumentError(option, f"belongs to {idle[option]}", f"got {value} without any", "Leave it out.")
    raise ArgumentError(option, "must change something", f"got {value} where nothing uses it", "Leave it out.")


def counted(point: Any, options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Those of the named options that count at this point, with their values."""
    idle = idle_options(point, options)
    return {name: options[name] for name in names if name not in idle}


@functools.cache
def _keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """Keyword-only parameters of a function and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
