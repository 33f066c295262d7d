"""DP-GT: private gradient tracking, audited by forced transcripts and by its draws."""

from __future__ import annotations

import functools

import jax
import numpy as np

from experiments.audit.options import Point
from jaxfl import graphs, privacy
from jaxfl.algorithms import gradient_tracking
from jaxfl.privacy.accountant import smallest_noise
from jaxfl.privacy.audit import AuditResult
from jaxfl.privacy.tracking import TrackingAgent, TrackingRelease, TrackingSchedule, gradient_tracking_statements
from jaxfl.privacy.tracking.forced_audit import forced_audit

_SAMPLES = 4  # m of the run: samples of each node, all of them in every batch
_KEYS = 64  # runs whose noise is measured


def claimed(point: Point) -> tuple[float, privacy.Statement]:
    """(noise scale of states and trackers, statement) of what is claimed, calibrated to the target."""
    weights, claim = _weights(point), point.claim
    release = TrackingRelease(clip_norm=point.learning.clip_norm, distribution=point.learning.distribution)

    def stated(noise: float) -> privacy.Statement:
        _, proven, *_ = gradient_tracking_statements(
            claimed_schedule(point, noise),
            point.learning.iterations,
            release,
            state_in_weights=weights.sum(axis=1),
            tracker_out_weights=weights.sum(axis=0),
            dp_delta=claim.dp_delta,
        )
        return proven

    def epsilon_of(noise: float) -> float:
        found = stated(noise).dp_epsilon
        assert found is not None
        return found

    noise = smallest_noise(epsilon_of, claim.target_epsilon, guess=point.learning.clip_norm)
    return noise, stated(noise)


def claimed_schedule(point: Point, noise: float) -> TrackingSchedule:
    """Schedule that the accountant is told."""
    num_samples = max(1, round(_SAMPLES * point.claim.sampling_error))
    return _schedule(point.learning.iterations, noise, num_samples)


def audit_tracking(point: Point, noise: float, dp_epsilon: float, significance: float) -> AuditResult:
    """Run, force and measure; `scores` and guesses are none."""
    weights, learning, claim = _weights(point), point.learning, point.claim
    clip_norm = None if claim.no_clipping else learning.clip_norm

    def build(task, schedule):
        return gradient_tracking(
            task,
            state_weights=weights,
            tracker_weights=weights,
            schedule=schedule,
            clip_norm=clip_norm,
            distribution=learning.distribution,
        )

    agent = TrackingAgent(2 * learning.clip_norm, float(weights.sum(axis=1)[0]), float(weights.sum(axis=0)[0]))
    gaussian = learning.distribution == "gaussian"
    found = forced_audit(
        build,
        _schedule(point.rounds, noise / claim.noise_error, _SAMPLES),
        point.rounds,
        claimed_schedule(point, noise),
        learning.iterations,
        agent,
        jax.vmap(jax.random.key)(_KEYS * point.run.seed + np.arange(_KEYS, dtype=np.uint32)),
        node=0,
        num_nodes=point.data.nodes,
        dp_epsilon=dp_epsilon,
        dp_delta=claim.dp_delta if gaussian else 0.0,
        distribution=learning.distribution,
        strength=point.data.canary_strength * learning.clip_norm,
        significance=significance,
    )
    return AuditResult(
        dp_epsilon_lower_bound=found.dp_epsilon_lower_bound,
        dp_delta=found.dp_delta,
        significance=significance,
        neighboring_relation="replace_one",
        num_guesses=0,
        num_correct=0,
        guess_threshold=0.0,
        scores=np.zeros(0),
        smallest_error=found.checks[-1].smallest_error,
        checks=found.checks,
    )


def _schedule(num_rounds: int, noise: float, num_samples: int) -> TrackingSchedule:
    """Constant step sizes and noise, as in Scheme (S2)."""
    scale = np.full(num_rounds + 1, noise)
    return TrackingSchedule(0.3, 0.3, 0.2, num_samples, scale, scale)


@functools.cache
def _ring(nodes: int) -> np.ndarray:
    return graphs.directed_ring(nodes).mixing_matrix(0)


def _weights(point: Point) -> np.ndarray:
    """R and C, both of a directed ring: all agents are alike."""
    return _ring(point.data.nodes)
