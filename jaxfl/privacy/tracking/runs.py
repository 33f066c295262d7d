"""Runs of gradient tracking, and of the methods that it is compared with, as accounts: what was sent, and its cost.

An account covers what has left an agent after r rounds, with x~ its noisy state and y~ its noisy tracker:

- gradients at the broadcast state: x~_0, ..., x~_r, the last of which it returns, and y~_0, ..., y~_{r-1};
- gradients at its own state, which is then what it returns: the first r of both;
- a perturbed output: the first r outputs.

A cost is a function of a factor on all noise. The changes that the noise must hide do not depend on that factor, so a
search for the least noise computes them once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxfl.core import ArgumentError, check
from jaxfl.privacy import accountant as verbs
from jaxfl.privacy.accountant import NOTHING, Account, Bound, Claim, Family
from jaxfl.privacy.statements import ASSUMED, is_unbounded
from jaxfl.privacy.tracking.schedules import TrackingSchedule

# Words of the assumption of a published epsilon that is no bound.
NO_BOUND = (
    "no bound: gradients are taken at the un-noised state, which differs between neighboring runs, so that all samples'"
    " gradients change and not one's alone; and the state that is returned carries no noise"
)

_SILENT = "Some of what is broadcast carries no noise."
_LAPLACE_ONLY = "This bound holds for Laplace noise only."
_AT_STATE = (
    "Gradients are taken at the un-noised state, which differs between neighboring runs, and the state that is returned"
    " carries no noise."
)
_SETTING = (
    "the other agents see all that an agent broadcasts, and know data, batches and noise of each other; nobody sees"
    " losses or metrics",
    "all other samples, and the point that all agents start from, are the same in both runs",
    "a sample is held by one agent, and where samples are placed does not depend on the changed one",
    "an agent's number of samples and m are public and fixed; batches do not depend on data",
)
_MECHANISM = "the cited papers' own accounting was not at hand: this is Lemma 3's argument for their mechanism"
_NOISES = ("state_noise_scale", "tracker_noise_scale")
Cost = Callable[[float], Bound]  # a factor on all noise, above 0 -> what the run costs with it


class TrackingRelease(NamedTuple):
    """Form in which gradients enter the agents' broadcasts, and the noise on these."""

    clip_norm: float | None  # bound on a sample's gradient, L1, or L2 for Gaussian noise; None: unclipped
    assumed: bool = False  # clip_norm is assumed of unclipped gradients, not enforced
    gradient_at: str = "broadcast"  # the noisy state that is sent; or "state", the agent's own without noise
    distribution: str = "laplace"  # or "gaussian"


class Run(NamedTuple):
    """A run with checked arguments: what has left the agents, and what it costs."""

    sent: TrackingSchedule  # infinite noise on what has not left them
    num_rounds: int
    num_nodes: int
    release: TrackingRelease
    output: bool  # whether outputs are perturbed
    dp_delta: float  # of a statement without an epsilon
    costs: dict[str, Callable[[float], Cost]]  # bound -> (C -> its cost); the published or reconstructed one first
    notes: tuple[str, ...] = ()  # where no bound has any
    num_samples: float = 0  # of an agent, on average; 0: unknown


class Plan(NamedTuple):
    """Runs of a method, of which one is accounted for."""

    runs: Callable[[int, float], list[Run]]  # (num_rounds, factor on all noise) -> runs
    which: int


def account_of(runs: Callable[[TrackingSchedule, int], list[Run]], schedule: TrackingSchedule) -> Account:
    """Account for a method that sends what a schedule says.

    Args:
        runs: (schedule, num_rounds) -> runs whose costs are the method's claims.
        schedule: of the whole run.
    """

    def scaled(num_rounds: int, factor: float) -> list[Run]:
        noise = {name: factor * np.asarray(getattr(schedule, name)) for name in _NOISES}
        return runs(schedule._replace(**noise), num_rounds)

    start = scaled(0, 1.0)
    plans = [(bound, (Plan(scaled, index),)) for index, run in enumerate(start) for bound in run.costs]
    return Account(TRACKING, tuple(Claim(bound, "replace_one", plan) for bound, plan in plans), start[0].num_nodes)


def checked(
    schedule: TrackingSchedule,
    num_rounds: int,
    release: TrackingRelease,
    num_nodes: int,
    dp_delta: float | None,
    *,
    output: bool = False,
    num_local_samples: Sequence[int] | None = None,
) -> Run:
    """Check the arguments and make a run without costs, from which broadcasts that have not been sent are cut off."""
    check.at_least(0, num_rounds=num_rounds)
    check.at_least(1, num_nodes=num_nodes)
    check.one_of(("broadcast", "state"), gradient_at=release.gradient_at)
    check.one_of(("laplace", "gaussian"), distribution=release.distribution)
    check.positive(clip_norm=release.clip_norm)
    gaussian = release.distribution == "gaussian"
    if dp_delta is not None or gaussian:
        check.open_unit(dp_delta=required_delta(dp_delta))
    noise = {name: np.asarray(getattr(schedule, name)) for name in _NOISES}
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
    delta = required_delta(dp_delta) if gaussian else 0.0
    num_samples = 0.0 if num_local_samples is None else float(np.mean(num_local_samples))
    return Run(sent, num_rounds, num_nodes, release, output, delta, {}, num_samples=num_samples)


def required_delta(dp_delta: float | None) -> float:
    """Return the delta that Gaussian noise and num_local_samples need; refuse None."""
    if dp_delta is None:
        requirement = "must be given for Gaussian noise and for num_local_samples"
        raise ArgumentError("dp_delta", requirement, "got None", "Pass one, 1e-5 say.")
    return dp_delta


def _spent(plan: Plan, num_rounds: int, factor: float) -> Run:
    """The run after some rounds, with a factor on its noise."""
    return plan.runs(num_rounds, factor)[plan.which]


def _search(
    spent: Callable[[float], Run], bound: str, _relation: str, target_epsilon: float
) -> tuple[Callable[[float], float], float]:
    """(factor -> epsilon, a guess that is right for Laplace noise whose costs add up)."""
    run = spent(1.0)
    assert run.release.clip_norm is not None
    cost = run.costs[bound](2 * run.release.clip_norm)

    def epsilon_of(factor: float) -> float:
        return float(np.max(cost(factor).dp_epsilon))

    return epsilon_of, min(max(epsilon_of(1.0) / target_epsilon, 1e-12), 1e12)


def _reason(run: Run, bound: str) -> str | None:
    """Why there is no epsilon, or None."""
    if run.num_rounds == 0:
        return None
    if is_unbounded(run.release, bound):
        return verbs.UNCLIPPED
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
    found = run.costs[bound](2 * run.release.clip_norm)(1.0)
    return found._replace(dp_epsilon=np.broadcast_to(found.dp_epsilon, run.num_nodes))


def _words(_runs: Sequence[Run], run: Run, bound: str, _relation: str, found: Bound) -> dict[str, Any]:
    """Arguments of `statement`."""
    notes = (NO_BOUND,) if bound != "proven" and _is_at_state(run) else ()
    notes += (_MECHANISM,) if bound == "reconstructed" else ()
    return {
        "gradients": None if is_unbounded(run.release, bound) else _bound_on_gradients(run.release),
        "observer": "all other agents",
        "setting": _SETTING,
        "notes": notes + (run.notes if found.notes is None else found.notes),
        "mechanism": _mechanism(run),
    }


def _mechanism(run: Run) -> str:
    """Rounds, and the noise on a coordinate over rounds and agents."""
    scales = np.concatenate([np.ravel(scale) for scale in (run.sent.state_noise_scale, run.sent.tracker_noise_scale)])
    sent = scales[np.isfinite(scales)]
    noise = "" if not sent.size else f", {run.release.distribution} noise of scale {sent.min():.4g} to {sent.max():.4g}"
    return f"{run.num_rounds} rounds{noise}"


def _is_at_state(run: Run) -> bool:
    """True if gradients are taken at a state that an observer does not know."""
    return run.release.gradient_at == "state" and not run.output


def _bound_on_gradients(release: TrackingRelease) -> str:
    """Describe the bound on one sample's gradient."""
    norm = f"{'L1' if release.distribution == 'laplace' else 'L2'} norm {release.clip_norm:g}"
    how = f"stay below the {norm}: {ASSUMED}" if release.assumed else f"are clipped to the {norm}"
    return f"per-sample gradients {how}"


TRACKING = Family(_spent, _reason, _cost, _words, lambda run: run.num_samples, _search)
