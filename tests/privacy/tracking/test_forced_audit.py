"""Forced transcripts: a right run reaches what is claimed and passes, every mistake is refused."""

import functools

import jax
import numpy as np
import pytest

import jaxfl
from jaxfl import ArgumentError
from jaxfl.privacy import tracking
from jaxfl.privacy.tracking import TrackingAgent, TrackingRelease, TrackingSchedule, gradient_tracking_statements
from jaxfl.privacy.tracking.forced_audit import forced_audit

NODES, CLIP, DELTA, ROUNDS = 3, 0.5, 1e-5, 10
RING = jaxfl.graphs.directed_ring(NODES).mixing_matrix(0)
AGENT = TrackingAgent(2 * CLIP, RING.sum(axis=1)[0], RING.sum(axis=0)[0])
NAMES = ("releases", "noise of states", "noise of trackers", "sensitivity", "epsilon")


def schedule(num_rounds=ROUNDS, noise=1.0, num_samples=4):
    scale = noise * (1 + 0.1 * np.arange(num_rounds + 1))
    return TrackingSchedule(0.4, 0.3, 0.2, num_samples, scale, 1.5 * scale)


@functools.cache
def claim(distribution, num_samples=4):
    statements = gradient_tracking_statements(
        schedule(num_samples=num_samples),
        ROUNDS,
        TrackingRelease(clip_norm=CLIP, distribution=distribution),
        state_in_weights=RING.sum(axis=1),
        tracker_out_weights=RING.sum(axis=0),
        dp_delta=DELTA,
    )
    assert statements[1].dp_epsilon is not None
    return statements[1].dp_epsilon


def audited(distribution, seed=0, *, clip_norm: float | None = CLIP, claim_factor=1.0, claimed_samples=4, **run):
    def build(task, run_schedule):
        return jaxfl.gradient_tracking(
            task,
            state_weights=RING,
            tracker_weights=RING,
            schedule=run_schedule,
            clip_norm=clip_norm,
            distribution=distribution,
        )

    return forced_audit(
        build,
        schedule(**run),
        run.get("num_rounds", ROUNDS),
        schedule(num_samples=claimed_samples),
        ROUNDS,
        AGENT,
        jax.vmap(jax.random.key)(64 * seed + np.arange(64)),
        node=0,
        num_nodes=NODES,
        dp_epsilon=claim_factor * claim(distribution, claimed_samples),
        dp_delta=DELTA if distribution == "gaussian" else 0.0,
        distribution=distribution,
        strength=4 * CLIP,
        significance=0.01,
    )


def refused(found):
    return {check.name for check in found.checks if check.refuted}


@pytest.mark.statistical
@pytest.mark.parametrize("distribution", ["laplace", "gaussian"])
@pytest.mark.quick_cases(1)
def test_right_runs_pass_and_come_close_to_the_claim(distribution):
    for seed in range(8):
        found = audited(distribution, seed)
        assert tuple(check.name for check in found.checks) == NAMES
        assert not refused(found)
        sensitivity = found.checks[3]
        assert sensitivity.measured <= (1 + 1e-4) * sensitivity.claimed
        if distribution == "laplace":
            assert sensitivity.measured == pytest.approx(sensitivity.claimed, rel=1e-4), "all worst cases at once"
        else:
            assert sensitivity.measured > 0.99 * sensitivity.claimed
        assert 0.95 * sensitivity.claimed < found.dp_epsilon_lower_bound < sensitivity.claimed
        assert all(check.smallest_error < 1.15 for check in found.checks)


NOISE = {"noise of states", "noise of trackers"}
MISTAKES = {
    "noise / 1.1": ({"noise": 1 / 1.1}, {*NOISE, "epsilon"}),
    "noise / 1.25": ({"noise": 1 / 1.25}, {*NOISE, "epsilon"}),
    "noise / 4": ({"noise": 1 / 4}, {*NOISE, "epsilon"}),
    "no clipping": ({"clip_norm": None}, {"sensitivity", "epsilon"}),
    "twice the rounds": ({"num_rounds": 2 * ROUNDS}, {"releases", "sensitivity", "epsilon", *NOISE}),  # which grows
    "means of half the samples": ({"claimed_samples": 8}, {"sensitivity", "epsilon"}),
    "a claim 5 % too low": ({"claim_factor": 0.95}, {"sensitivity", "epsilon"}),
}


SLOW = {"noise / 1.25", "noise / 4"}  # larger mistakes than the first one, of the same kind


@pytest.mark.statistical
@pytest.mark.parametrize("distribution", ["laplace", "gaussian"])
@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MISTAKES]
)
@pytest.mark.quick_cases(2)
def test_each_mistake_is_refused_by_the_checks_that_should(mistake, distribution):
    error, names = MISTAKES[mistake]
    found = audited(distribution, **error)
    assert refused(found) == names
    if mistake.startswith("noise /"):
        times = found.dp_epsilon_lower_bound / claim(distribution, 4)
        assert 0.9 / error["noise"] < times < (1.0 if distribution == "laplace" else 2.0) / error["noise"]


def test_claims_at_the_own_state_have_no_epsilon_to_audit():
    assert (
        tracking.gradient_tracking_statements(
            schedule(),
            ROUNDS,
            TrackingRelease(clip_norm=CLIP, gradient_at="state"),
            state_in_weights=np.ones(NODES),
            tracker_out_weights=np.ones(NODES),
        )[1].dp_epsilon
        is None
    )


def test_bad_arguments_are_refused():
    with pytest.raises(ArgumentError, match=r"^dp_epsilon: "):
        audited("laplace", claim_factor=0.0)
    with pytest.raises(ArgumentError, match=r"^num_rounds: "):
        audited("laplace", num_rounds=0)
