"""Numbers of a round by name, and the counts among them that must stay 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from jaxfl.core.types import Array

Value = TypeVar("Value")

_MUST_BE_ZERO: dict[str, bool] = {}  # name of a count -> whether `train` stops at it


class Info(NamedTuple):
    """Numbers of one round. The code that makes a number names it; no code that passes it on lists the names.

    A number is read by its name: `info.gradient_norm` is `info.measurements["gradient_norm"]`. A name that is not there
    raises AttributeError.

    Attributes:
        loss: () or (n,), float32.
        measurements: name -> () or (n,), float32. Training writes their mean over rounds and nodes.
        counts: name -> () or (n,), int32. Training writes their sum.

    Examples:
        >>> info = Info(jnp.float32(0.5)).plus(gradient_norm=jnp.ones(3), gradient_evaluations=jnp.array([1, 0, 2]))
        >>> info.gradient_norm.tolist(), list(info.counts), list(info.named())
        ([1.0, 1.0, 1.0], ['gradient_evaluations'], ['loss', 'gradient_norm', 'gradient_evaluations'])
    """

    loss: Array
    measurements: Mapping[str, Array] = {}
    counts: Mapping[str, Array] = {}

    def plus(self, *others: Mapping[str, Array], **numbers: Array) -> Info:
        """Add numbers: floats are measurements, integers are counts. A number replaces an earlier one of its name."""
        new: dict[str, Array] = {}
        for each in (*others, numbers):
            new |= each
        floating = {name: bool(jnp.issubdtype(value.dtype, jnp.floating)) for name, value in new.items()}
        return Info(
            loss=self.loss,
            measurements={**self.measurements, **{name: new[name] for name in new if floating[name]}},
            counts={**self.counts, **{name: new[name] for name in new if not floating[name]}},
        )

    def named(self) -> dict[str, Array]:
        """All numbers by name, the loss as "loss"."""
        return {"loss": self.loss, **self.measurements, **self.counts}

    def __getattr__(self, name: str) -> Array:
        for numbers in (self.measurements, self.counts):
            if name in numbers:
                return numbers[name]
        raise AttributeError(f"this info has no {name!r}; it has {', '.join(self.named())}")


class FatalCount(RuntimeError):
    """A count that must stay 0 rose above 0: the rounds were not those that the algorithm assumes.

    Attributes:
        rounds: (first, last) round of the stretch in which it was noticed, counted from 1; None from `check_info`.
    """

    def __init__(self, message: str, rounds: tuple[int, int] | None = None):
        self.rounds = rounds
        super().__init__(message)


def must_be_zero(name: str, *, stops_training: bool = True) -> str:
    """Declare a count that must stay 0, in the file that makes it.

    Args:
        name: of the count.
        stops_training: True where a count above 0 means that rounds did not do what the algorithm (and its privacy
            bound) assumes: `train` stops. False where it mostly means a fault in the data: only `check_info` refuses.

    Returns:
        The name.
    """
    _MUST_BE_ZERO[name] = stops_training
    return name


def fatal(numbers: Mapping[str, Value]) -> dict[str, Value]:
    """Select the counts at which training stops where they are above 0."""
    return {name: values for name, values in numbers.items() if _MUST_BE_ZERO.get(name, False)}


def check_info(info: Info) -> None:
    """Refuse an info with a count that must be 0 and is not. `train` checks by itself; call this in a loop of your own.

    Args:
        info: of `Algorithm.round`, or of several rounds, stacked by `jax.lax.scan`. It is fetched from the device.

    Raises:
        FatalCount: a count that `must_be_zero` is above 0: samples without room in a batch, table rows that were not
            read ahead; also (`train` lets these pass) gradients or updates that were not finite and counted as zero.

    Examples:
        >>> overflow = must_be_zero("batch_overflow")
        >>> check_info(Info(np.ones((2, 3))).plus({overflow: np.zeros((2, 3), np.int32)}))
        >>> check_info(Info(np.ones(3)).plus({overflow: np.array([0, 6, 0])}))
        Traceback (most recent call last):
        ...
        jaxfl.core.info.FatalCount: batch_overflow: must stay 0; got 6 in all, first 6 at position 1 ...
    """
    zero_counts: dict[str, Any] = {name: count for name, count in info.counts.items() if name in _MUST_BE_ZERO}
    for name, count in sorted(zero_counts.items(), key=lambda each: not _MUST_BE_ZERO[each[0]]):
        values = np.asarray(count)
        if values.any():
            first = np.argwhere(values)[0]
            where = f", first {values[tuple(first)]} at position {', '.join(map(str, first))} of shape {values.shape}"
            remedy = (
                "The rounds were not those that the algorithm's guarantees assume: check the nodes' sizes by `init`"
                " outside of jit, and give batches more room."
                if _MUST_BE_ZERO[name]
                else "Check that inputs and labels are finite and in range, or use a smaller step size."
            )
            total = values.sum(dtype=np.int64)
            raise FatalCount(f"{name}: must stay 0; got {total} in all{where if values.ndim else ''}. {remedy}")
