"""Checks of numbers that must stay finite, or 0: refusal on the host, and the decision on the next chunk on the device.

`chunks.refuse_bad` and `refuse_bad_scores` read numbers on the host and say which of them is bad. `rounds_if_good` asks
the same of the same numbers before they leave the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.channel.ledger import COUNTED, Ledger
from jaxfl.core import Array, PyTree
from jaxfl.core.info import fatal
from jaxfl.training.chunks import Diverged
from jaxfl.training.evaluate import Scores


def refuse_bad_scores(
    measured: Mapping[str, PyTree],
    variant: str,
    seed: int,
    since: int,
    round_index: int,
    names: Sequence[str] | None = None,
) -> None:
    """Stop on a score that is not finite.

    Args:
        measured: measure -> what it computed for one lane.
        variant, seed: named in the error.
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
                variant,
                seed,
                name,
                rounds=(min(since + 1, round_index), round_index),
                first_round=round_index,
                node=int(bad[0]) if np.ndim(values) and len(bad) == 1 else None,
                value=float(np.ravel(values)[bad[0]]),
                names=names,
            )


def rounds_if_good(
    infos: Mapping[str, Any], measured: Mapping[str, PyTree] | None, runs: Any, num_rounds: Any
) -> Array:
    """Rounds of a chunk behind another: all, or none where the host will refuse a number of what lies before it.

    Args:
        infos: field -> (*lanes, r, ...) values of the chunk before, 0 in rounds that it did not run.
        measured: measure -> what the evaluation between the two computed, leaves (*lanes, ...); None without any.
        runs: (*lanes), bool: lanes whose numbers count. A single lane may go without an axis.
        num_rounds: (), int32.

    Returns:
        (), int32: `num_rounds` or 0.

    Guarantees:
        - the device refuses what the host refuses.
        - lanes that have ended are not asked.

    Example:
        >>> infos = {"loss": jnp.array([[1.0], [jnp.nan]])}
        >>> [int(rounds_if_good(infos, None, jnp.array(runs), jnp.int32(5))) for runs in ([True] * 2, [True, False])]
        [0, 5]
    """
    good = [values == 0 for values in fatal(infos).values()]
    good += [jnp.isfinite(values) for values in infos.values() if jnp.issubdtype(values.dtype, jnp.floating)]
    good += [jnp.isfinite(values) for _, values in _scored(measured or {})]
    of_lanes = [values.reshape(*runs.shape, -1).all(axis=-1) | ~runs for values in good]
    return jnp.where(jnp.stack(of_lanes).all() if of_lanes else True, num_rounds, 0)


def stays_finite(ledger: Ledger | None) -> bool:
    """Whether the costs that a ledger makes of finite counts are finite: they are made on the host alone.

    Costs grow with counts: those of the largest are asked.
    """
    if ledger is None:
        return True
    most = np.full(max(map(np.size, jax.tree.leaves(ledger))), np.finfo(np.float32).max)
    with np.errstate(all="ignore"):
        return bool(np.isfinite(ledger.of_round(dict.fromkeys(COUNTED, most))).all())


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
