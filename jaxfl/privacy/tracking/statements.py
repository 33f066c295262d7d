"""Statements about runs of gradient tracking, and of the methods that it is compared with.

What counts is what has left an agent after r rounds. With gradients at the broadcast state that is x~_0, ..., x~_r, the
last of which it returns, and y~_0, ..., y~_{r-1}; with gradients at its own state, which is then what it returns, the
first r of both; of a perturbed output the first r. The proofs are in `sensitivities` and
`perturbed_states`. The neighboring relation is "replace_one" throughout: the gradients of the changed
sample, each of norm at most `clip_norm`, differ by at most C = 2 `clip_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxfl.core import ArgumentError, check
from jaxfl.privacy import accountant as verbs
from jaxfl.privacy.accountant import NOTHING, Bound, Family
from jaxfl.privacy.statements import ASSUMED, Statement, is_unbounded
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

# Words of the assumption of a published epsilon that is no bound.
NO_BOUND = (
    "no bound: gradients are taken at the un-noised state, which differs between neighboring runs, so that all samples'"
    " gradients change and not one's alone; and the state that is returned carries no noise"
)

_UNCLIPPED = "Gradients are not clipped, so that nothing bounds what one sample changes."
_SILENT = "Some of what is broadcast carries no noise."
_LAPLACE_ONLY = "This budget is that of Laplace noise."
_AT_STATE = (
    "Gradients are taken at the un-noised state, which differs between neighboring runs, and the state that is returned"
    " carries no noise."
)
_SETTING = (
    "it holds against whoever sees all that an agent broadcasts, and no losses or metrics",
    "all other samples, and the point that all agents start from, are the same in both runs",
    "a sample is held by one agent, and where samples are placed does not depend on the changed one",
    "an agent's number of samples and m are public and fixed; batches do not depend on data",
)
_GIVEN = "sums of impulse responses, given everything broadcast"
_MECHANISM = "the cited papers' own accounting was not at hand: this is Lemma 3's argument for their mechanism"


class TrackingRelease(NamedTuple):
    """Form in which gradients enter the agents' broadcasts, and the noise on these."""

    clip_norm: float | None  # bound on a sample's gradient, L1, or L2 for Gaussian noise; None: unclipped
    assumed: bool = False  # clip_norm is assumed of unclipped gradients, not enforced
    gradient_at: str = "broadcast"  # or "state"
    distribution: str = "laplace"  # or "gaussian"


class Run(NamedTuple):
    """Checked: what has left the agents, and what it costs."""

    sent: TrackingSchedule  # infinite noise on what has not left them
    num_rounds: int
    num_nodes: int
    release: TrackingRelease
    output: bool  # whether outputs are perturbed
    dp_delta: float  # of a statement without an epsilon
    costs: dict[str, Callable[[float], Bound]]  # bound -> (C -> it); the published or reconstructed one first
    notes: tuple[str, ...] = ()  # where no bound has any


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
    """List the privacy statements on a run of gradient tracking: the published one, then the proven ones.

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
    run = _run(schedule, num_rounds, release, len(received), dp_delta)

    def agents(change: float) -> TrackingAgent:
        return TrackingAgent(gradient_l1_change=change, state_in_weight=received, tracker_out_weight=sent)

    def jointly(change: float) -> Bound:
        joint = joint_gaussian_epsilon(run.sent, agents(change), dp_delta=run.dp_delta)
        how = "Gaussian mechanisms, all broadcasts bounded together by their Gram matrix"
        return Bound(joint, f"{_GIVEN}; {how}")

    published = _noise(
        run, lambda change: published_sensitivities(run.sent, agents(change)), "Lemmas 3 and 4 of the paper"
    )
    singly = _noise(run, lambda change: proven_sensitivities(run.sent, agents(change)), _GIVEN)
    costs = {"published": published, "proven": jointly if release.distribution == "gaussian" else singly}
    stated = _statements(run._replace(costs=costs))
    if release.distribution != "laplace" or (dp_delta is None and num_local_samples is None):
        return stated
    delta, sizes = _required(dp_delta), None if num_local_samples is None else np.asarray(num_local_samples)
    if sizes is not None:
        check.per_node(len(received), num_local_samples=num_local_samples)
        check.at_least(schedule.num_samples, num_local_samples=sizes.min())

    def at_delta(change: float) -> Bound:
        best = smallest_at_delta(run.sent, agents(change), dp_delta=delta, num_local_samples=sizes)
        return best._replace(accountant=f"{_GIVEN}; {best.accountant}")

    notes = () if sizes is None else (counted_note(delta),)
    return stated + _statements(run._replace(dp_delta=delta, costs={"proven": at_delta}, notes=notes))


def perturbed_state_statements(
    schedule: TrackingSchedule,
    num_rounds: int,
    release: TrackingRelease,
    *,
    num_nodes: int,
    dp_delta: float | None = None,
) -> list[Statement]:
    """List the privacy statements on perturbed states, quantized afterwards or not: published, then proven.

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
    run = _run(states_only(schedule), num_rounds, release, num_nodes, dp_delta)
    return _of_states(
        run,
        lambda change: perturbed_state_sensitivities(run.sent, change),
        ("sums of norms", "sum of the impulse response, given everything broadcast"),
    )


def output_perturbation_statements(
    schedule: TrackingSchedule,
    num_rounds: int,
    release: TrackingRelease,
    *,
    num_nodes: int,
    dp_delta: float | None = None,
) -> list[Statement]:
    """List the privacy statements on perturbed outputs. Published and proven are the same.

    Args:
        schedule, num_rounds, num_nodes, dp_delta: as for `perturbed_state_statements`.
        release: what the algorithm was told. Where gradients are taken does not matter: the own state is known.

    Raises:
        ArgumentError: an argument out of range, or no dp_delta where it is needed.

    Guarantees:
        - as for `gradient_tracking_statements`.
    """
    run = _run(states_only(schedule), num_rounds, release, num_nodes, dp_delta, output=True)
    accountant = "one gradient a broadcast"
    return _of_states(run, lambda change: output_sensitivities(run.sent, change), (accountant, accountant))


def quantization_statements(
    schedule: TrackingSchedule,
    num_rounds: int,
    release: TrackingRelease,
    *,
    num_nodes: int,
    quantization_step: float,
) -> list[Statement]:
    """List the privacy statements on states that quantization alone protects: (0, delta), published, then proven.

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
    run = _run(unlimited, num_rounds, release, num_nodes, None)

    def cost(composition: str, how: str) -> Callable[[float], Bound]:
        def of(change: float) -> Bound:
            sensitivities = perturbed_state_sensitivities(run.sent, change)
            deltas = quantization_deltas(sensitivities, quantization_step=quantization_step)
            curve = cumulative_delta_curve(deltas, composition=composition)
            accountant = f"total variation of unbiased rounding; deltas {how}"
            if curve[-1] < 1:
                return Bound(0.0, accountant, float(curve[-1]))
            reason = f"delta reaches 1 with broadcast {exhausted_at(curve)}, so that nothing is guaranteed."
            return Bound(np.inf, accountant, 1.0, reason=reason)

        return of

    costs = {"reconstructed": cost("sum", "added up"), "proven": cost("coupling", "composed by coupling")}
    return _statements(run._replace(dp_delta=1.0, costs=costs))


def _of_states(
    run: Run, sensitivities: Callable[[float], Sensitivities], accountants: tuple[str, str]
) -> list[Statement]:
    """The reconstructed statement and the proven one on the same sensitivities."""
    reconstructed, proven = accountants
    costs = {
        "reconstructed": _noise(run, sensitivities, reconstructed),
        "proven": _noise(run, sensitivities, proven, dp_delta=run.dp_delta),
    }
    return _statements(run._replace(costs=costs))


def _noise(
    run: Run, sensitivities: Callable[[float], Sensitivities], accountant: str, dp_delta: float = 0.0
) -> Callable[[float], Bound]:
    """C -> what noise on moves of these sensitivities costs: Gaussian at a delta above 0, else Laplace."""
    if dp_delta:
        return lambda change: Bound(
            gaussian_epsilon(run.sent, sensitivities(change), dp_delta=dp_delta),
            f"{accountant}; Gaussian mechanisms composed",
        )
    return lambda change: Bound(
        cumulative_epsilon(run.sent, sensitivities(change)), f"{accountant}; Laplace mechanisms added up"
    )


def _run(
    schedule: TrackingSchedule,
    num_rounds: int,
    release: TrackingRelease,
    num_nodes: int,
    dp_delta: float | None,
    *,
    output: bool = False,
) -> Run:
    """Refuse what cannot be accounted for, and cut off what has not left yet; without costs."""
    check.at_least(0, num_rounds=num_rounds)
    check.at_least(1, num_nodes=num_nodes)
    check.one_of(("broadcast", "state"), gradient_at=release.gradient_at)
    check.one_of(("laplace", "gaussian"), distribution=release.distribution)
    check.positive(clip_norm=release.clip_norm)
    gaussian = release.distribution == "gaussian"
    if dp_delta is not None or gaussian:
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
    return Run(sent, num_rounds, num_nodes, release, output, _required(dp_delta) if gaussian else 0.0, {})


def _required(dp_delta: float | None) -> float:
    """The delta that this needs."""
    if dp_delta is None:
        requirement = "must be given for Gaussian noise and for num_local_samples"
        raise ArgumentError("dp_delta", requirement, "got None", "Pass one, 1e-5 say.")
    return dp_delta


def _statements(run: Run) -> list[Statement]:
    """One for each of the run's bounds."""
    return verbs.statements(_TRACKING, [run], [(bound, "replace_one") for bound in run.costs], run.num_nodes)


def _reason(run: Run, bound: str) -> str | None:
    """Why there is no epsilon, or None."""
    if run.num_rounds == 0:
        return None
    if is_unbounded(run.release, bound):
        return _UNCLIPPED
    if not all(np.all(scale > 0) for scale in (run.sent.state_noise_scale, run.sent.tracker_noise_scale)):
        return _SILENT
    if bound != "proven":
        return _LAPLACE_ONLY if run.release.distribution == "gaussian" else None
    return _AT_STATE if _is_at_state(run) else None


def _cost(run: Run, bound: str, _relation: str) -> Bound:
    """The epsilons of all agents; `_reason` is None."""
    if run.num_rounds == 0:
        return NOTHING._replace(dp_epsilon=np.zeros(run.num_nodes), dp_delta=0.0)
    assert run.release.clip_norm is not None
    found = run.costs[bound](2 * run.release.clip_norm)
    return found._replace(dp_epsilon=np.broadcast_to(found.dp_epsilon, run.num_nodes))


def _words(_runs: Sequence[Run], run: Run, bound: str, _relation: str, found: Bound) -> dict[str, Any]:
    """Arguments of `statement`."""
    notes = (NO_BOUND,) if bound != "proven" and _is_at_state(run) else ()
    notes += (_MECHANISM,) if bound == "reconstructed" else ()
    return {
        "gradients": None if is_unbounded(run.release, bound) else _bound_on_gradients(run.release),
        "setting": _SETTING,
        "notes": notes + (run.notes if found.notes is None else found.notes),
    }


def _is_at_state(run: Run) -> bool:
    """True if gradients are taken at a state that others do not know."""
    return run.release.gradient_at == "state" and not run.output


def _bound_on_gradients(release: TrackingRelease) -> str:
    """Describe the bound on one sample's gradient."""
    norm = f"{'L1' if release.distribution == 'laplace' else 'L2'} norm {release.clip_norm:g}"
    how = f"stay below the {norm}: {ASSUMED}" if release.assumed else f"are clipped to the {norm}"
    return f"per-sample gradients {how}"


_TRACKING = Family(_reason, _cost, _words)
