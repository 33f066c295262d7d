"""Calls by name: an argument that a function lacks, or that is missing, is refused with what the function takes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from jaxfl.core.check import ArgumentError
from jaxfl.core.vocabulary import nearest

_P = ParamSpec("_P")
_T = TypeVar("_T")


def arguments(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    meant: Mapping[str, Sequence[str]] | None = None,
    *,
    signature: inspect.Signature | None = None,
) -> dict[str, Any]:
    """The arguments of a call by name.

    Args:
        function: to be called.
        args, kwargs: by position, and by name.
        meant: another library's name of an argument -> forms of it here, "optimizer=optax.sgd(0.1)" say.
        signature: of the function, where it is known.

    Raises:
        ArgumentError: a name that the function does not take, a missing argument, or too many by position.

    Examples:
        >>> def train(rounds, *, server_step_size): ...
        >>> arguments(train, (), {"rounds": 3, "step_size": 0.1})
        Traceback (most recent call last):
        ...
        jaxfl.core.check.ArgumentError: step_size: must be an argument of train; it takes rounds, server_step_size. ...
        >>> arguments(train, (), {"rounds": 3})
        Traceback (most recent call last):
        ...
        jaxfl.core.check.ArgumentError: server_step_size: must be given as in train(rounds, server_step_size=); ...
    """
    signature, called = signature or inspect.signature(function), getattr(function, "__name__", "the function")
    parameters = {name: one for name, one in signature.parameters.items() if one.kind is not one.VAR_KEYWORD}
    if len(parameters) == len(signature.parameters):
        for name in (one for one in kwargs if one not in parameters):
            forms = [form for form in (meant or {}).get(name, ()) if form.partition("=")[0] in parameters]
            near = nearest(name, parameters)
            forms += [] if near is None or any(form.startswith(f"{near}=") for form in forms) else [f"{near}="]
            found = f"it takes {', '.join(parameters)}"
            remedy = f"Pass {' or '.join(forms)}." if forms else "Leave it out."
            raise ArgumentError(name, f"must be an argument of {called}", found, remedy)
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:  # too few, or too many by position
        needed = [name for name, one in parameters.items() if one.default is one.empty]
        missing = [name for name in needed[len(args) :] if name not in kwargs]
        parts = [f"{name}=" * (one.kind is one.KEYWORD_ONLY) or name for name, one in parameters.items()]
        call = f"{called}({', '.join(parts)})"
        name, requirement, remedy = next(iter(parameters), called), "called", "Name the arguments."
        if missing:
            name, requirement, remedy = missing[0], "given", "Pass it."
        raise ArgumentError(name, f"must be {requirement} as in {call}", f"got {error}", remedy) from None


def by_name(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap a function so that a wrong call is refused in one sentence, as by `arguments`."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        arguments(function, args, kwargs, signature=signature)
        return function(*args, **kwargs)

    return called
