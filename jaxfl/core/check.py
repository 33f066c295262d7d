"""Argument checks: one clear error before any work, and none on traced values.

Every message has four parts: the argument's name, the requirement, the value found (and where), and the remedy. A
number is checked only when it is concrete, so that the same constructor can be called inside `jax.jit`, `jax.vmap` or
`jax.grad` with traced hyper-parameters.
"""

from __future__ import annotations

import inspect
import math
import numbers
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxfl.core.vocabulary import hint


class ArgumentError(ValueError):
    """An argument that cannot be used.

    Args:
        argument: name of the argument as the caller wrote it.
        requirement: what the argument must satisfy.
        found: the offending value, with its position where there is one.
        remedy: what the caller can do about it.

    Examples:
        >>> str(ArgumentError("batch_size", "must be at least 1", "got 0", "Pass a positive integer."))
        'batch_size: must be at least 1; got 0. Pass a positive integer.'
    """

    def __init__(self, argument: str, requirement: str, found: str, remedy: str):
        self.argument = argument
        self.requirement = requirement
        self.found = found
        self.remedy = remedy
        super().__init__(f"{argument}: {requirement}; {found}. {remedy}")

    def __reduce__(self) -> tuple[type[ArgumentError], tuple[str, str, str, str]]:
        """Return the arguments for pickle. The method of exceptions would call `type(self)` with the message only."""
        return type(self), (self.argument, self.requirement, self.found, self.remedy)


def is_traced(value: Any) -> bool:
    """True for an abstract value, whose numbers cannot be read."""
    core = sys.modules.get("jax.core")  # without JAX nothing is traced, and accounting does without it
    return core is not None and isinstance(value, core.Tracer)


def _concrete(value: Any) -> np.ndarray | None:
    """`value` as a NumPy array, or None when it is traced, a schedule or None."""
    if value is None or is_traced(value) or callable(value):
        return None
    array = np.asarray(value)
    if array.dtype != object:
        return array
    try:
        return array.astype(np.float64)  # integers of 2^63 and more
    except OverflowError:
        return np.full(array.shape, np.inf)


def _all(
    is_good: Callable[[np.ndarray], np.ndarray], arguments: Mapping[str, Any], requirement: str, remedy: str
) -> None:
    """Refuse the first number of a concrete value that is not good."""
    for name, value in arguments.items():
        array = _concrete(value)
        if array is not None and array.dtype.kind not in "biuf":
            raise ArgumentError(name, "must hold real numbers", f"got {value!r}"[:60], "Pass a float.")
        bad = np.zeros(0, int) if array is None else np.flatnonzero(~is_good(array))
        if array is not None and bad.size:
            where = "" if array.ndim == 0 else f" at position {bad[0]}"
            raise ArgumentError(name, requirement, f"got {array.reshape(-1)[bad[0]]}{where}", remedy)


def takes(count: int, **functions: Any) -> None:
    """Each value is a function that can be called with `count` arguments by position.

    Examples:
        >>> takes(2, loss=lambda params, inputs: 0)
        >>> takes(3, loss=lambda params, inputs: 0)
        Traceback (most recent call last):
        ...
        jaxfl.core.check.ArgumentError: loss: must be a function of 3 arguments; it takes (params, inputs). See ...
    """
    for name, function in functions.items():
        found = f"got {function!r}".partition("\n")[0][:60]
        if callable(function):
            try:
                signature = inspect.signature(function)
            except ValueError:  # a builtin
                continue
            found = f"it takes {signature}"
            try:
                signature.bind(*range(count))
                continue
            except TypeError:
                pass
        requirement = f"must be a function of {count} argument{'s' * (count > 1)}"
        raise ArgumentError(name, requirement, found, "See docs/own_model.md.")


def in_float32(**arguments: Any) -> None:
    """Each value (scalar or array) except 0 is neither 0 nor infinite as float32; traced values and schedules pass.

    Examples:
        >>> in_float32(noise_std=1e-46)
        Traceback (most recent call last):
        ...
        jaxfl.core.check.ArgumentError: noise_std: must lie between 1.2e-38 and 3.4e+38 in size; got 1e-46. Check ...
    """
    limits = np.finfo(np.float32)
    least, most = float(limits.tiny), float(limits.max)

    def is_good(array: np.ndarray) -> np.ndarray:
        size = np.abs(array.astype(np.float64))
        return ~(size > most) & ~((size > 0) & (size < least))

    _all(is_good, arguments, f"must lie between {least:.1e} and {most:.1e} in size", "Check its unit.")


def clip_norm(**arguments: Any) -> None:
    """Each value is None or a single norm that float32 can hold a gradient to; traced values and schedules pass.

    Squares below 1.2e-38 count as 0. At 1e-12 those of 10^9 coordinates change a squared norm by 1e-5 of it at most. At
    1e-17 they hide a gradient of ten times the clip norm in a million coordinates.
    """
    scalar(**arguments)
    positive(**arguments)
    least, most = 1e-12, math.sqrt(np.finfo(np.float32).max)
    requirement = f"must lie between {least:g} and {most:.1e}, so that float32 holds squares of what it bounds"
    _all(lambda x: (x >= np.float32(least)) & (x <= most), arguments, requirement, "Check its unit.")


def positive(**arguments: Any) -> None:
    """Each value (scalar or array) is finite and above zero; traced values and schedules pass.

    Examples:
        >>> positive(step_size=0.1)
        >>> positive(step_size=-0.1)
        Traceback (most recent call last):
        ...
        jaxfl.core.check.ArgumentError: step_size: must be positive and finite; got -0.1. Pass a number above 0.
    """
    _all(lambda x: np.isfinite(x) & (x > 0), arguments, "must be positive and finite", "Pass a number above 0.")


def non_negative(**arguments: Any) -> None:
    """Each value (scalar or array) is finite and at least zero; traced values and schedules pass."""
    requirement, remedy = "must be non-negative and finite", "Pass 0 or a number above it."
    _all(lambda x: np.isfinite(x) & (x >= 0), arguments, requirement, remedy)


def at_least(minimum: int, **arguments: Any) -> None:
    """Each value is a static integer of at least `minimum`; traced values are refused, since they change shapes."""
    for name, value in arguments.items():
        if is_traced(value):
            raise ArgumentError(name, "must be a static integer", "got a traced value", "Pass a Python int.")
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ArgumentError(name, f"must be an integer of at least {minimum}", f"got {value!r}", "Pass an int.")
        if int(value) < minimum:
            remedy = f"Pass {minimum} or more."
            raise ArgumentError(name, f"must be an integer of at least {minimum}", f"got {value}", remedy)


def whole(**arguments: Any) -> None:
    """Each value (scalar or array) is a whole number of any type; traced values and schedules pass."""
    _all(lambda x: x == np.floor(x), arguments, "must be a whole number", "Round it.")


def probability(**arguments: Any) -> None:
    """Each value lies in [0, 1]; traced values pass."""
    _all(lambda x: (x >= 0) & (x <= 1), arguments, "must lie in [0, 1]", "Pass a probability.")


def open_unit(**arguments: Any) -> None:
    """Each value lies strictly between 0 and 1; traced values pass."""
    requirement, remedy = "must lie strictly between 0 and 1", "Pass a number between them."
    _all(lambda x: (x > 0) & (x < 1), arguments, requirement, remedy)


def below(stop: float, **arguments: Any) -> None:
    """Each value (scalar or array) lies in [0, stop); traced values pass."""
    _all(lambda x: (x >= 0) & (x < stop), arguments, f"must lie in [0, {stop})", "Count from 0.")


def finite(place: Callable[[int], str] = "sample {}".format, /, **arguments: Any) -> None:
    """Each array (N, ...) of floats is finite; `place` says where a row stands."""
    for name, array in arguments.items():
        if array.dtype.kind not in "fc" or np.isfinite(array).all():
            continue
        rows = np.asarray(array)
        where = tuple(np.argwhere(~np.isfinite(rows))[0].tolist())
        remedy = "Remove or repair it."
        raise ArgumentError(name, "must be finite", f"got {rows[where]} in {place(where[0])}", remedy)


def integers(**arguments: Any) -> None:
    """Each value is a vector of integers: a NumPy array, or something that NumPy makes one of."""
    for name, value in arguments.items():
        array = np.asarray(value)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            found = f"got {array.dtype} of shape {array.shape}"
            raise ArgumentError(name, "must be a vector of integers", found, "Pass shape (N,), no one-hot rows.")


def one_of(allowed: tuple[Any, ...], **arguments: Any) -> None:
    """Each value is one of `allowed`."""
    for name, value in arguments.items():
        if value not in allowed:
            choices = [*map(str, allowed)]
            remedy = f"{hint(value, choices) if isinstance(value, str) else ''}Choose one of these."
            raise ArgumentError(name, f"must be one of {', '.join(choices)}", f"got {value!r}", remedy)


def scalar(**arguments: Any) -> None:
    """Each value is a single number, traced or not; schedules and None pass.

    An array would be broadcast against the last axis of a parameter, not against the nodes.
    """
    for name, value in arguments.items():
        shape = () if value is None or callable(value) else tuple(getattr(value, "shape", np.shape(value)))
        if shape != ():
            found, remedy = f"got shape {shape}", "Pass one number; to compare several, vmap over the constructor."
            if hasattr(value, "update"):
                found, remedy = "got an optimizer", "Pass it as optimizer=."
            raise ArgumentError(name, "must be a single number", found, remedy)


def per_node(num_nodes: int, **arguments: Any) -> None:
    """Each value is a scalar or has shape (num_nodes,)."""
    for name, value in arguments.items():
        if value is None or callable(value):
            continue
        shape = tuple(getattr(value, "shape", np.shape(value)))
        if shape not in ((), (num_nodes,)):
            found = f"got shape {shape} for {num_nodes} nodes"
            raise ArgumentError(name, "must be a scalar or hold one number per node", found, "Pass shape (num_nodes,).")


def bytes_text(count: float) -> str:
    """A number of bytes for people, in powers of 1000.

    Examples:
        >>> bytes_text(17_760_000)
        '17.8 MB'
    """
    if count < 1000:
        return f"{int(count)} B"
    power = min(int(math.log(count, 1000)), 5)
    return f"{count / 1000**power:.1f} {['B', 'kB', 'MB', 'GB', 'TB', 'PB'][power]}"
