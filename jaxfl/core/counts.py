"""Counts of a round that must stay 0, and the error where one did not."""

from __future__ import annotations

from typing import Any

import numpy as np

FATAL_COUNTS = ("batch_overflow", "prefetch_misses")
"""Counts that must stay 0: above it, the rounds did not do what the algorithm (and its privacy bound) assumes."""

DISCARDED = ("discarded_gradients", "discarded_updates")
"""Counts of what was not finite, and counted as zero: no fault of a round, but mostly one of the data or labels."""


class FatalCount(RuntimeError):
    """A count of `FATAL_COUNTS` rose above 0: the rounds were not those that the algorithm assumes.

    Attributes:
        rounds: (first, last) round of the stretch in which it was noticed, counted from 1; None from `check_info`.
    """

    def __init__(self, message: str, rounds: tuple[int, int] | None = None):
        self.rounds = rounds
        super().__init__(message)


def check_info(info: Any) -> None:
    """Refuse an info whose rounds did not do what was asked: `training.train` looks by itself, an embedder by this.

    Args:
        info: of `Algorithm.round`, or of several rounds, stacked by `jax.lax.scan`. It is fetched from the device.

    Raises:
        FatalCount: samples without room in a batch, table rows that were not read
            ahead; beyond what `train` refuses, gradients or updates that were not finite and counted as zero.

    Example:
        >>> from typing import NamedTuple
        >>> class Info(NamedTuple):
        ...     loss: np.ndarray
        ...     batch_overflow: np.ndarray
        >>> check_info(Info(loss=np.ones((2, 3)), batch_overflow=np.zeros((2, 3), np.int32)))
        >>> check_info(Info(loss=np.ones(3), batch_overflow=np.array([0, 6, 0])))
        Traceback (most recent call last):
        ...
        jaxfl.core.counts.FatalCount: batch_overflow: must stay 0; got 6 in all, first 6 at position 1 ...
    """
    for name in (*FATAL_COUNTS, *DISCARDED):
        count = getattr(info, name, None)
        values = np.asarray(0 if count is None else count)
        if values.any():
            first = np.argwhere(values)[0]
            where = f", first {values[tuple(first)]} at position {', '.join(map(str, first))} of shape {values.shape}"
            remedy = (
                "The rounds were not those that the algorithm's guarantees assume: check the nodes' sizes by `init`"
                " outside of jit, and give batches more room."
                if name in FATAL_COUNTS
                else "Check that inputs and labels are finite and in range, or use a smaller step size."
            )
            total = values.sum(dtype=np.int64)
            raise FatalCount(f"{name}: must stay 0; got {total} in all{where if values.ndim else ''}. {remedy}")
