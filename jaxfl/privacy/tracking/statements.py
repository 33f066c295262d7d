"""Statements about runs of gradient tracking, and of the methods that it is compared with.

What counts is what has left an agent after r rounds. With gradients at the broadcast state that is x~_0, ..., x~_r, the
last of which it returns, and y~_0, ..., y~_{r-1}; with gradients at its own state, which is then what it returns, the
first r of both; of a perturbed output the first r. The proofs are in `sensitivities` and
`perturbed_states`. The neighboring relation is "replace_one" throughout: the gradients of the changed
sample, each of norm at most `clip_norm`, differ by at most C = 2 `clip_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxfl.core import ArgumentError, check
from jaxfl.privacy.statements import ASSUMED, Statement, is_unbounded, statement
from jaxfl.privacy.tracking.joint_bound import joint_gaussian_epsilon
from jaxfl.privacy.tracking.laplace_at_delta import counted_note, smallest_at_delta
from jaxfl.privacy.tracking.perturbed_states import (
    cumulative_delta_curve,
    exhausted_at,
    output_sensitivities,
    perturbed_state_sensitivities,
    quantization_deltas,
    states_only,
)
from jaxfl.privacy.tracking.schedules import TrackingSchedule
from jaxfl.privacy.tracking.sensitivities import (
    Sensitivities,
    TrackingAgent,
    cumulative_epsilon,
    gaussian_epsilon,
    proven_sensitivities,
    published_sensitivities,
)

# How the assumption of a published epsilon reads that is no bound, word for word.
NO_BOUND = (
    "no bound: gradients are taken at the un-noised state, which differs between neighboring runs, so that all samples'"
    " gradients change and not one's alone; and the state that is returned carries no noise"
)

_UNCLIPPED = "Gradients are not clipped, so that nothing bounds what one sample changes."
_SILENT = "Some of what is broadcast carries no noise."
_LAPLACE_ONLY = "The published budget is that of Laplace noise."
_AT_STATE = (
    "Gradients are taken at the un-noised state, which differs between neighboring runs, and the state that is returned"
    " carries no noise."
)
_SETTING = (
    "all that an agent broadcasts is visible and nothing else (no losses, no metrics)",
    "all other samples, and the point that all agents start from, are the same in both runs",
    "a sample is held by one agent, and where samples are placed does not depend on the changed one",
    "an agent's number of samples and m are public and fixed; batches do not depend on data",
)
_MECHANISM = "the cited papers' own accounting was not at hand: this is Lemma 3's argument for their mechanism"


class TrackingRelease(NamedTuple):
    """How gradients enter what the agents broadcast, and the noise on it."""

    clip_norm: float | None  # bound on a sample's gradient, L1, or L2 for Gaussian noise; None: unclipped
    assumed: bool = False  # clip_norm is assumed of unclipped gradients, not enforced
    gradient_at: str = "broadcast"  # or "state"
    distribution: str = "laplace"  # or "gaussian"


def gradient_tracking_statements(
    schedule: TrackingSchedule,
    num_rounds: int,
    release: TrackingRelease,
    *,
    state_in_weights: np.ndarray,
    tracker_out_weights: np.ndarray,
    dp_delta: float | None = None,
    num_local_samples: Sequence[int] | None = None,
) -> list[Statement]:
    """What can be said about a run of gradient tracking: the published statement, then the proven ones.

    Args:
        schedule: of the whole run, k = 0, ..., K.
        num_rounds: rounds that really ran, at most K + 1.
        release: what the algorithm was told.
        state_in_weights, tracker_out_weights: (n,), sum_j R_ij and sum_j C_ji of every agent.
        dp_delta: in (0, 1), for Gaussian noise. With Laplace noise, whose delta is 0, it adds a proven statement at
            this delta: the smallest of all that hold.
        num_local_samples: D of every agent, at least m_K; needs a dp_delta. With Laplace noise the added statement then
            counts the iterations in which a sample takes part.

    Raises:
        ArgumentError: an argument out of range, or no dp_delta where it is needed.

    Guarantees:
        - dp_epsilon is that of the worst agent, of what has left it in the rounds that ran.
        - where nothing is clipped or some noise is absent there is a reason and no epsilon; nothing is proven for
          bounds that are assumed, or for gradients taken at the own state.
        - nothing is spent in 0 rounds.

    Example:
        >>> from jaxfl.privacy.tracking import polynomial_schedule
        >>> schedule = polynomial_schedule(2000, state_noise_exponent=0.1, tracker_noise_exponent=0.1, horizon_offset=0)
        >>> options = {"state_in_weights": np.ones(5), "tracker_out_weights": np.ones(5)}
        >>> options |= {"dp_delta": 1e-5, "num_local_samples": [12_000] * 5}
        >>> for found in gradient_tracking_statements(schedule, 2000, TrackingRelease(clip_norm=0.5), **options):
        ...     print(found.bound, found.dp_delta, round(found.dp_epsilon, 1))
        published 0.0 15418.6
        proven 0.0 70.4
        proven 1e-05 0.2
    """
    received, sent = np.asarray(state_in_weights, float), np.asarray(tracker_out_weights, float)
    if received.ndim != 1 or not received.size or received.shape != sent.shape:
        found, remedy = f"got shapes {received.shape} and {sent.shape}", "Pass R.sum(axis=1) and C.sum(axis=0)."
        raise ArgumentError("state_in_weights", "must hold one number per agent, as tracker_out_weights", found, remedy)
    run = _checked(schedule, num_rounds, release, len(received), dp_delta)

    def agents(change: float) -> TrackingAgent:
        return TrackingAgent(gradient_l1_change=change, state_in_weight=received, tracker_out_weight=sent)

    published, proven = _noise_statements(
        run,
        lambda change: published_sensitivities(run.sent, agents(change)),
        lambda change: proven_sensitivities(run.sent, agents(change)),
        accountants=("Lemmas 3 and 4 of the paper", "sums of impulse responses, given everything broadcast"),
        notes=(),
        jointly=lambda change, delta: joint_gaussian_epsilon(run.sent, agents(change), dp_delta=delta),
    )
    if release.distribution != "laplace" or (dp_delta is None and num_local_samples is None):
        return [published, proven]
    delta, sizes = _required(dp_delta), None if num_local_samples is None else np.asarray(num_local_samples)
    if sizes is not None:
        check.per_node(len(received), num_local_samples=num_local_samples)
        check.at_least(schedule.num_samples, num_local_samples=sizes.min())
    return [published, proven, _at_delta(run, agents, delta, sizes)]


def perturbed_state_statements(
    schedule: TrackingSchedule,
    num_rounds: int,
    release: TrackingRelease,
    *,
    num_nodes: int,
    dp_delta: float | None = None,
) -> list[Statement]:
    """What can be said about perturbed states, quantized afterwards or not: published, then proven.

    Args:
        schedule: of the whole run, k = 0, ..., K; nothing of trackers counts.
        num_rounds: rounds that really ran, at most K + 1.
        release: what the algorithm was told.
        num_nodes: n; the weights of each agent sum to 1.
        dp_delta: in (0, 1), for Gaussian noise.

    Raises:
        ArgumentError: an argument out of range, or no dp_delta where it is needed.

    Guarantees:
        - as for `gradient_tracking_statements`.
    """
    run = _checked(states_only(schedule), num_rounds, release, num_nodes, dp_delta)

    def sensitivities(change: float) -> Sensitivities:
        return perturbed_state_sensitivities(run.sent, change)

    accountants = ("sums of norms", "sum of the impulse response, given everything broadcast")
    return _noise_statements(run, sensitivities, sensitivities, accountants=accountants, notes=(_MECHANISM,))


def output_perturbation_statements(
    schedule: TrackingSchedule,
    num_rounds: int,
    release: TrackingRelease,
    *,
    num_nodes: int,
    dp_delta: float | None = None,
) -> list[Statement]:
    """What can be said about perturbed outputs: published and proven are the same.

    Args:
        schedule, num_rounds, num_nodes, dp_delta: as for `perturbed_state_statements`.
        release: what the algorithm was told. Where gradients are taken does not matter: the own state is known.

    Raises:
        ArgumentError: an argument out of range, or no dp_delta where it is needed.

    Guarantees:
        - as for `gradient_tracking_statements`.
    """
    run = _checked(states_only(schedule), num_rounds, release, num_nodes, dp_delta, output=True)

    def sensitivities(change: float) -> Sensitivities:
        return output_sensitivities(run.sent, change)

    accountants = ("one gradient a broadcast", "one gradient a broadcast")
    return _noise_statements(run, sensitivities, sensitivities, accountants=accountants, notes=(_MECHANISM,))


def quantization_statements(
    schedule: TrackingSchedule,
    num_rounds: int,
    release: TrackingRelease,
    *,
    num_nodes: int,
    quantization_step: float,
) -> list[Statement]:
    """What can be said about states that quantization alone protects: (0, delta), published, then proven.

    Args:
        schedule, num_rounds, num_nodes: as for `perturbed_state_statements`; noise does not count.
        release: what the algorithm was told; gradients are clipped in L1 norm, as for Laplace noise.
        quantization_step: distance of neighboring grid points, or the threshold of a ternary quantizer.

    Raises:
        ArgumentError: an argument out of range, or Gaussian noise.

    Guarantees:
        - the published delta adds up those of all broadcasts; the proven one couples them and is never larger.
        - at delta 1 there is a reason, which says when it is reached, and no epsilon.
        - nothing is spent in 0 rounds.
    """
    if release.distribution != "laplace":
        remedy = "Clip in L1 norm."
        raise ArgumentError("distribution", "must be laplace: L1 norms count", f"got {release.distribution}", remedy)
    check.at_least(0, num_rounds=num_rounds)
    unlimited = states_only(schedule._replace(state_noise_scale=np.ones(num_rounds + 1)))
    run = _checked(unlimited, num_rounds, release, num_nodes, None)

    def budget(composition: str) -> Callable[[float], _Budget]:
        def of(change: float) -> _Budget:
            sensitivities = perturbed_state_sensitivities(run.sent, change)
            deltas = quantization_deltas(sensitivities, quantization_step=quantization_step)
            curve = cumulative_delta_curve(deltas, composition=composition)
            if curve[-1] < 1:
                return _Budget(0.0, float(curve[-1]))
            return _Budget(
                None, 1.0, f"delta reaches 1 with broadcast {exhausted_at(curve)}, so that nothing is guaranteed."
            )

        return of

    accountant = "total variation of unbiased rounding; deltas"
    return [
        _statement(run, "published", budget("sum"), 1.0, f"{accountant} added up", (_MECHANISM,)),
        _statement(run, "proven", budget("coupling"), 1.0, f"{accountant} composed by coupling", ()),
    ]


def _at_delta(run: _Run, agents: Callable[[float], TrackingAgent], delta: float, sizes: np.ndarray | None) -> Statement:
    """The smallest of the proven bounds for Laplace noise at a delta above 0, by name."""
    reason = _reason(run, "proven")
    if run.num_rounds == 0 or reason is not None:
        notes = () if sizes is None else (counted_note(delta),)
        return _statement(run, "proven", lambda change: _Budget(None, delta, reason), delta, "none", notes)
    assert run.release.clip_norm is not None
    best = smallest_at_delta(run.sent, agents(2 * run.release.clip_norm), dp_delta=delta, num_local_samples=sizes)
    accountant = f"sums of impulse responses, given everything broadcast; {best.accountant}"
    return _statement(run, "proven", lambda change: _Budget(best.dp_epsilon, delta), delta, accountant, best.notes)


class _Budget(NamedTuple):
    """Of the worst agent."""

    dp_epsilon: float | None
    dp_delta: float
    reason: str | None = None  # why there is no dp_epsilon


class _Run(NamedTuple):
    """Checked."""

    sent: TrackingSchedule  # of what has left the agents: infinite noise on what has not
    num_rounds: int
    num_nodes: int
    release: TrackingRelease
    dp_delta: float | None
    output: bool  # whether outputs are perturbed


def _checked(
    schedule: TrackingSchedule,
    num_rounds: int,
    release: TrackingRelease,
    num_nodes: int,
    dp_delta: float | None,
    *,
    output: bool = False,
) -> _Run:
    """Refuse what cannot be accounted for, and cut off what has not left after so many rounds."""
    check.at_least(0, num_rounds=num_rounds)
    check.at_least(1, num_nodes=num_nodes)
    check.one_of(("broadcast", "state"), gradient_at=release.gradient_at)
    check.one_of(("laplace", "gaussian"), distribution=release.distribution)
    check.positive(clip_norm=release.clip_norm)
    if dp_delta is not None or release.distribution == "gaussian":
        check.open_unit(dp_delta=_required(dp_delta))
    noise = {name: np.asarray(getattr(schedule, name)) for name in ("state_noise_scale", "tracker_noise_scale")}
    check.non_negative(**{name: np.where(np.isposinf(scale), 1.0, scale) for name, scale in noise.items()})
    for name, scale in noise.items():
        if scale.shape[:-1] not in ((), (num_nodes,)):
            requirement = f"must hold K + 1 numbers, or K + 1 for each of {num_nodes} agents"
            raise ArgumentError(name, requirement, f"got shape {scale.shape}", "Pass the schedule of the run.")
    states, trackers = noise.values()
    if num_rounds > states.shape[-1]:
        found = f"got {num_rounds} for K + 1 = {states.shape[-1]}"
        raise ArgumentError("num_rounds", "must be at most K + 1 of the schedule", found, "Pass what really ran.")
    num_states = num_rounds + 1 if release.gradient_at == "broadcast" and not output else num_rounds
    trackers = np.where(np.arange(trackers.shape[-1]) < num_rounds, trackers, np.inf)
    sent = schedule._replace(state_noise_scale=states[..., :num_states], tracker_noise_scale=trackers[..., :num_states])
    return _Run(sent, num_rounds, num_nodes, release, dp_delta, output)


def _required(dp_delta: float | None) -> float:
    """The delta that this needs."""
    if dp_delta is None:
        requirement = "must be given for Gaussian noise and for num_local_samples"
        raise ArgumentError("dp_delta", requirement, "got None", "Pass one, 1e-5 say.")
    return dp_delta


def _noise_statements(
    run: _Run,
    published: Callable[[float], Sensitivities],
    proven: Callable[[float], Sensitivities],
    *,
    accountants: tuple[str, str],
    notes: tuple[str, ...],
    jointly: Callable[[float, float], np.ndarray] | None = None,
) -> list[Statement]:
    """The published statement, on `notes`, and the proven one; both take C and give sensitivities.

    `jointly` takes C and delta and gives what Gaussian noise costs when all broadcasts are bounded together.
    """
    gaussian = run.release.distribution == "gaussian"
    delta = _required(run.dp_delta) if gaussian else 0.0

    def of_published(change: float) -> _Budget:
        return _Budget(float(np.max(cumulative_epsilon(run.sent, published(change)))), 0.0)

    def of_proven(change: float) -> _Budget:
        if jointly is not None and gaussian:
            return _Budget(float(np.max(jointly(change, delta))), delta)
        if gaussian:
            return _Budget(float(np.max(gaussian_epsilon(run.sent, proven(change), dp_delta=delta))), delta)
        return _Budget(float(np.max(cumulative_epsilon(run.sent, proven(change)))), 0.0)

    noise = "Gaussian mechanisms composed" if gaussian else "Laplace mechanisms added up"
    if jointly is not None and gaussian:
        noise = "Gaussian mechanisms, all broadcasts bounded together by their Gram matrix"
    return [
        _statement(run, "published", of_published, delta, f"{accountants[0]}; Laplace mechanisms added up", notes),
        _statement(run, "proven", of_proven, delta, f"{accountants[1]}; {noise}", ()),
    ]


def _statement(
    run: _Run,
    bound: str,
    budget: Callable[[float], _Budget],
    dp_delta: float,
    accountant: str,
    notes: tuple[str, ...],
) -> Statement:
    """From the budget for a given C; with `dp_delta` where there is none."""
    reason = _reason(run, bound)
    if run.num_rounds == 0:
        spent, accountant = _Budget(0.0, 0.0), "nothing was released"
    elif reason is None:
        assert run.release.clip_norm is not None
        spent = budget(2 * run.release.clip_norm)
    else:
        spent = _Budget(None, dp_delta, reason)
    return statement(
        bound,
        "replace_one",
        dp_epsilon=spent.dp_epsilon,
        dp_delta=spent.dp_delta,
        accountant=accountant,
        nodes=run.num_nodes,
        gradients=None if is_unbounded(run.release, bound) else _bound_on_gradients(run.release),
        setting=_SETTING,
        notes=(NO_BOUND, *notes) if bound == "published" and _is_at_state(run) else notes,
        reason=spent.reason,
    )


def _reason(run: _Run, bound: str) -> str | None:
    """Why there is no epsilon, or None."""
    if run.num_rounds == 0:
        return None
    if is_unbounded(run.release, bound):
        return _UNCLIPPED
    if not all(np.all(scale > 0) for scale in (run.sent.state_noise_scale, run.sent.tracker_noise_scale)):
        return _SILENT
    if bound == "published":
        return _LAPLACE_ONLY if run.release.distribution == "gaussian" else None
    return _AT_STATE if _is_at_state(run) else None


def _is_at_state(run: _Run) -> bool:
    """True if gradients are taken at a state that others do not know."""
    return run.release.gradient_at == "state" and not run.output


def _bound_on_gradients(release: TrackingRelease) -> str:
    """What keeps one sample's gradient small."""
    norm = f"{'L1' if release.distribution == 'laplace' else 'L2'} norm {release.clip_norm:g}"
    how = f"stay below the {norm}: {ASSUMED}" if release.assumed else f"are clipped to the {norm}"
    return f"per-sample gradients {how}"
