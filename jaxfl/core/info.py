"""Numbers of a round by name, and the counts among them that must stay 0."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxfl.core.check import ArgumentError
from jaxfl.core.reprs import short
from jaxfl.core.types import Array


class Fatal(NamedTuple):
    """Count that must stay 0: above it, rounds did not do what the algorithm and its privacy bound assume.

    `train` stops at it, and `check_info` refuses it. The mark is part of an info's structure: it stays under `jax.jit`
    and in exported rounds.
    """

    number: Array  # () or (n,), int32


class Discarded(NamedTuple):
    """Count of what was not finite and counted as zero, mostly a fault of the data. Only `check_info` refuses it."""

    number: Array  # () or (n,), int32


Count = Array | Fatal | Discarded


def plain(count: Any) -> Any:
    """The numbers of a count, without its mark."""
    return count.number if isinstance(count, Fatal | Discarded) else count


class Info(NamedTuple):
    """Numbers of one round. The code that makes a number names it; no code that passes it on lists the names.

    A number is read by its name: `info.gradient_norm` is `info.measurements["gradient_norm"]`. A name that is not there
    raises AttributeError.

    Attributes:
        loss: () or (n,), float32.
        measurements: name -> () or (n,), float32. Training writes their mean over rounds and nodes.
        counts: name -> () or (n,), int32, marked as `Fatal` or `Discarded` where they must be 0. Training writes their
            sum.

    Examples:
        >>> info = Info(jnp.float32(0.5)).plus(gradient_norm=jnp.ones(3), gradient_evaluations=jnp.array([1, 0, 2]))
        >>> info.gradient_norm.tolist(), list(info.counts), list(info.named())
        ([1.0, 1.0, 1.0], ['gradient_evaluations'], ['loss', 'gradient_norm', 'gradient_evaluations'])
    """

    loss: Array
    measurements: Mapping[str, Array] = {}
    counts: Mapping[str, Count] = {}

    def plus(self, *others: Mapping[str, Count], **numbers: Count) -> Info:
        """Add numbers: floats are measurements, integers are counts. A number replaces an earlier one of its name.

        A count keeps the mark of the one that it replaces.
        """
        new: dict[str, Any] = dict(self.counts)
        for name, value in itertools.chain(*(each.items() for each in (*others, numbers))):
            old = new.get(name)
            new[name] = type(old)(plain(value)) if isinstance(old, Fatal | Discarded) else value
        floating = {name: bool(jnp.issubdtype(plain(value).dtype, jnp.floating)) for name, value in new.items()}
        return Info(
            loss=self.loss,
            measurements={**self.measurements, **{name: new[name] for name in new if floating[name]}},
            counts={name: new[name] for name in new if not floating[name]},
        )

    def named(self) -> dict[str, Array]:
        """All numbers by name, the loss as "loss"."""
        return {"loss": self.loss, **self.measurements, **{name: plain(each) for name, each in self.counts.items()}}

    def fatal(self) -> tuple[str, ...]:
        """Names of the counts at which training stops where they are above 0."""
        return tuple(name for name, count in self.counts.items() if isinstance(count, Fatal))

    def __repr__(self) -> str:
        """Means and sums, as training writes them; counts that must be 0 only where they are not."""
        try:
            means = {name: f"{np.mean(each):.5g}" for name, each in {"loss": self.loss, **self.measurements}.items()}
            sums = {name: np.sum(plain(each)) for name, each in self.counts.items()}
        except (TypeError, RuntimeError):  # traced, on other processes' devices, or donated
            return f"Info({', '.join(f'{name}={short(each)}' for name, each in self.named().items())})"
        marked = {name for name, each in self.counts.items() if isinstance(each, Fatal | Discarded)}
        sums = {name: total for name, total in sums.items() if total or name not in marked}
        texts = [", ".join(f"{name}={value}" for name, value in each.items()) for each in (means, sums)]
        return f"Info(means of {np.shape(self.loss)}: {texts[0]}{'; sums: ' * bool(sums)}{texts[1]})"

    def __getattr__(self, name: str) -> Array:
        for numbers in (self.measurements, self.counts):
            if name in numbers:
                return plain(numbers[name])
        raise AttributeError(f"this info has no {name!r}; it has {', '.join(self.named())}")


class FatalCount(RuntimeError):
    """A count that must stay 0 rose above 0: the rounds were not those that the algorithm assumes.

    Attributes:
        rounds: (first, last) round of the stretch in which it was noticed, counted from 1; None from `check_info`.
    """

    def __init__(self, message: str, rounds: tuple[int, int] | None = None):
        self.rounds = rounds
        super().__init__(message)


def check_info(info: Info) -> None:
    """Refuse an info with a count that must be 0 and is not. `train` checks by itself; call this in a loop of your own.

    Args:
        info: of `Algorithm.round`, or of several rounds, stacked by `jax.lax.scan`. It is fetched from the device.

    Raises:
        ArgumentError: what is no info.
        FatalCount: a `Fatal` count is above 0: samples without room in a batch, table rows that were not read ahead;
            or a `Discarded` one, which `train` lets pass: gradients or updates that were not finite.

    Examples:
        >>> check_info(Info(np.ones((2, 3))).plus(batch_overflow=Fatal(np.zeros((2, 3), np.int32))))
        >>> check_info(Info(np.ones(3)).plus(batch_overflow=Fatal(np.array([0, 6, 0]))))
        Traceback (most recent call last):
        ...
        jaxfl.core.info.FatalCount: batch_overflow: must stay 0; got 6 in all, first 6 at position 1 ...
    """
    if not isinstance(info, Info):
        found, remedy = f"got {type(info).__name__}", "Pass the second result of a round."
        raise ArgumentError("info", "must be a jaxfl.Info", found, remedy)
    marked = [(name, count) for name, count in info.counts.items() if isinstance(count, Fatal | Discarded)]
    for name, count in sorted(marked, key=lambda each: isinstance(each[1], Discarded)):
        values = np.asarray(count.number)
        if values.any():
            first = np.argwhere(values)[0]
            where = f", first {values[tuple(first)]} at position {', '.join(map(str, first))} of shape {values.shape}"
            remedy = (
                "The rounds were not those that the algorithm's guarantees assume: check the nodes' sizes by `init`"
                " outside of jit, and give batches more room."
                if isinstance(count, Fatal)
                else "Check that inputs and labels are finite and in range, or use a smaller step size."
            )
            total = values.sum(dtype=np.int64)
            raise FatalCount(f"{name}: must stay 0; got {total} in all{where if values.ndim else ''}. {remedy}")
