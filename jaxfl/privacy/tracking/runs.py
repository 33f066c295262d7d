"""One run of gradient tracking, or of a method that it is compared with: what has left the agents, and a statement."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxfl.core import ArgumentError, check
from jaxfl.privacy.statements import ASSUMED, Statement, is_unbounded, statement
from jaxfl.privacy.tracking.schedules import TrackingSchedule

# How the assumption of a published epsilon reads that is no bound, word for word.
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
    "all that an agent broadcasts is visible and nothing else (no losses, no metrics)",
    "all other samples, and the point that all agents start from, are the same in both runs",
    "a sample is held by one agent, and where samples are placed does not depend on the changed one",
    "an agent's number of samples and m are public and fixed; batches do not depend on data",
)


class TrackingRelease(NamedTuple):
    """Form in which gradients enter the agents' broadcasts, and the noise on these."""

    clip_norm: float | None  # bound on a sample's gradient, L1, or L2 for Gaussian noise; None: unclipped
    assumed: bool = False  # clip_norm is assumed of unclipped gradients, not enforced
    gradient_at: str = "broadcast"  # or "state"
    distribution: str = "laplace"  # or "gaussian"


class Budget(NamedTuple):
    """Privacy budget of every agent, or of all alike."""

    dp_epsilon: np.ndarray | float | None  # () or (n,)
    dp_delta: float
    reason: str | None = None  # why there is no dp_epsilon


class Run(NamedTuple):
    """Checked."""

    sent: TrackingSchedule  # of what has left the agents: infinite noise on what has not
    num_rounds: int
    num_nodes: int
    release: TrackingRelease
    dp_delta: float | None
    output: bool  # whether outputs are perturbed


def checked(
    schedule: TrackingSchedule,
    num_rounds: int,
    release: TrackingRelease,
    num_nodes: int,
    dp_delta: float | None,
    *,
    output: bool = False,
) -> Run:
    """Refuse what cannot be accounted for, and cut off what has not left yet."""
    check.at_least(0, num_rounds=num_rounds)
    check.at_least(1, num_nodes=num_nodes)
    check.one_of(("broadcast", "state"), gradient_at=release.gradient_at)
    check.one_of(("laplace", "gaussian"), distribution=release.distribution)
    check.positive(clip_norm=release.clip_norm)
    if dp_delta is not None or release.distribution == "gaussian":
        check.open_unit(dp_delta=required(dp_delta))
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
    return Run(sent, num_rounds, num_nodes, release, dp_delta, output)


def required(dp_delta: float | None) -> float:
    """The delta that this needs."""
    if dp_delta is None:
        requirement = "must be given for Gaussian noise and for num_local_samples"
        raise ArgumentError("dp_delta", requirement, "got None", "Pass one, 1e-5 say.")
    return dp_delta


def run_statement(
    run: Run,
    bound: str,
    budget: Callable[[float], Budget],
    dp_delta: float,
    accountant: str,
    notes: tuple[str, ...],
) -> Statement:
    """From the budget for a given C; with `dp_delta` where there is none."""
    reason = reason_against(run, bound)
    if run.num_rounds == 0:
        spent, accountant = Budget(0.0, 0.0), "nothing was released"
    elif reason is None:
        assert run.release.clip_norm is not None
        spent = budget(2 * run.release.clip_norm)
    else:
        spent = Budget(None, dp_delta, reason)
    return statement(
        bound,
        "replace_one",
        dp_epsilon=None if spent.dp_epsilon is None else float(np.max(spent.dp_epsilon)),
        dp_delta=spent.dp_delta,
        accountant=accountant,
        nodes=run.num_nodes,
        gradients=None if is_unbounded(run.release, bound) else _bound_on_gradients(run.release),
        setting=_SETTING,
        notes=(NO_BOUND, *notes) if bound != "proven" and _is_at_state(run) else notes,
        reason=spent.reason,
        node_epsilons=() if spent.dp_epsilon is None else np.broadcast_to(spent.dp_epsilon, run.num_nodes).tolist(),
    )


def reason_against(run: Run, bound: str) -> str | None:
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


def _is_at_state(run: Run) -> bool:
    """True if gradients are taken at a state that others do not know."""
    return run.release.gradient_at == "state" and not run.output


def _bound_on_gradients(release: TrackingRelease) -> str:
    """Describe the bound on one sample's gradient."""
    norm = f"{'L1' if release.distribution == 'laplace' else 'L2'} norm {release.clip_norm:g}"
    how = f"stay below the {norm}: {ASSUMED}" if release.assumed else f"are clipped to the {norm}"
    return f"per-sample gradients {how}"
