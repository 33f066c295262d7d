"""Scores that must stay finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxfl.core import PyTree
from jaxfl.training.chunks import Diverged
from jaxfl.training.evaluate import Scores


def refuse_bad_scores(
    measured: Mapping[str, PyTree],
    case: str,
    seed: int,
    since: int,
    round_index: int,
    names: Sequence[str] | None = None,
) -> None:
    """Stop on a score that is not finite.

    Args:
        measured: measure -> what it computed for one lane.
        case, seed: named in the error.
        since: round of the lane's last line.
        round_index: of the evaluation.
        names: (n,), of the nodes; None where they are numbers.

    Raises:
        Diverged: a number is not finite.
    """
    for name, values in _scored(measured):
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            raise Diverged(
                case,
                seed,
                name,
                rounds=(min(since + 1, round_index), round_index),
                first_round=round_index,
                node=int(bad[0]) if np.ndim(values) and len(bad) == 1 else None,
                value=float(np.ravel(values)[bad[0]]),
                names=names,
            )


def _scored(measured: Mapping[str, PyTree]) -> list[tuple[str, Any]]:
    """(name, values) of every number that an evaluation computed."""
    named: list[tuple[str, Any]] = []
    for measure, values in measured.items():
        if isinstance(values, Scores):
            named += [(f"{measure}_{name}", value) for name, value in values.nodes.items()]
            named += [(f"{measure}_{name}_average_model", value) for name, value in values.average_model.items()]
        else:
            named += values.items()
    return named
