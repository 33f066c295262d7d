"""Gradient tracking: the paper's schedules, Lemmas 3 and 4, Remark 23, and the bound by impulse responses."""

import math

import numpy as np
import pytest

from jaxfl.privacy import tracking
from jaxfl.privacy.tracking import TrackingAgent, TrackingSchedule

K = 2000
UNIT = TrackingAgent(gradient_l1_change=1.0, state_in_weight=1.0, tracker_out_weight=1.0)


def s1(exponent, num_iterations=K, horizon_offset=0):
    return tracking.polynomial_schedule(
        num_iterations,
        state_noise_exponent=exponent,
        tracker_noise_exponent=exponent,
        horizon_offset=horizon_offset,
    )


def s2(base, num_iterations=K):
    return tracking.exponential_schedule(num_iterations, state_noise_base=base, tracker_noise_base=base)


def published(schedule, agent=UNIT):
    return tracking.cumulative_epsilon(schedule, tracking.published_sensitivities(schedule, agent))


def proven(schedule, agent=UNIT):
    return tracking.cumulative_epsilon(schedule, tracking.proven_sensitivities(schedule, agent))


def small_schedule(rng, num_iterations=30, num_nodes=3):
    return TrackingSchedule(
        state_mixing=0.3,
        tracker_mixing=0.2,
        step_size=0.25,
        num_samples=4,
        state_noise_scale=rng.uniform(0.5, 2.0, (num_nodes, num_iterations + 1)),
        tracker_noise_scale=rng.uniform(0.5, 2.0, (num_nodes, num_iterations + 1)),
    )


def follow(schedule, agent, gradients, transcript):
    """x_k and y_k of Algorithm 1, line by line, for one agent with given gradients (K + 1, d) and transcript."""
    alpha, beta, gamma = schedule.state_mixing, schedule.tracker_mixing, schedule.step_size
    x, y = [transcript["start"]], [gradients[0]]
    for k in range(len(gradients) - 1):
        x.append((1 - alpha * agent.state_in_weight) * x[k] + alpha * transcript["x"][k] - gamma * y[k])
        received = (1 - beta * agent.tracker_out_weight) * y[k] + beta * transcript["y"][k]
        y.append(received + gradients[k + 1] - gradients[k])
    return np.array(x), np.array(y)


def changes(schedule, agent, gradient_changes, rng):
    """L1 changes (K + 1,) of x_k and y_k, for the same transcript and gradients that differ by `gradient_changes`."""
    shape = gradient_changes.shape
    transcript = {"start": rng.normal(size=shape[1]), "x": rng.normal(size=shape), "y": rng.normal(size=shape)}
    gradients = rng.normal(size=shape)
    one, other = (follow(schedule, agent, g, transcript) for g in (gradients, gradients + gradient_changes))
    return [np.abs(a - b).sum(axis=1) for a, b in zip(one, other, strict=True)]


def test_schedules_of_the_papers_runs():
    schedule = s1(0.1)
    assert schedule.num_samples == 53
    assert s2(0.9996).num_samples == 55
    np.testing.assert_allclose(
        [schedule.state_mixing, schedule.tracker_mixing, schedule.step_size], [0.039739, 0.0050120, 0.050130], rtol=2e-5
    )
    np.testing.assert_allclose(schedule.state_noise_scale[[0, 1, K]], [1, 2**0.1, 2001**0.1])
    np.testing.assert_allclose(s2(0.9996).tracker_noise_scale, np.full(K + 1, 0.9996**K))
    # The scheme itself divides by (K + 1)^p.
    np.testing.assert_allclose(s1(0.1, horizon_offset=1).step_size, 98 / 2001**0.997)


TABLE = [
    ("s1", -0.1, 60_374, 270.4, 3.56),
    ("s1", 0.1, 15_422, 70.43, 1.20),
    ("s1", 0.2, 7_852.5, 36.37, 0.834),
    ("s2", 0.9994, 45_810, 418.5, 5.39),
    ("s2", 0.9996, 30_701, 280.5, 3.61),
    ("s2", 0.9998, 20_577, 188.0, 2.42),
]


@pytest.mark.parametrize(("scheme", "noise", "lemma_4", "tight", "participation"), TABLE)
def test_the_three_bounds_of_the_papers_runs(scheme, noise, lemma_4, tight, participation):
    schedule = {"s1": s1, "s2": s2}[scheme](noise)
    np.testing.assert_allclose(published(schedule), lemma_4, rtol=3e-5)
    np.testing.assert_allclose(proven(schedule), tight, rtol=2e-4)
    actual = tracking.participation_epsilon(schedule, UNIT, num_local_samples=12_000, dp_delta=1e-5)
    np.testing.assert_allclose(actual, participation, rtol=3e-3)


def test_published_sensitivities_are_the_closed_form_of_lemma_3():
    schedule = s1(0.1, num_iterations=40)
    agent = TrackingAgent(gradient_l1_change=3.0, state_in_weight=0.7, tracker_out_weight=20.0)
    a, b = schedule.state_mixing * 0.7, schedule.tracker_mixing * 20.0
    assert a > 1, "1 - a and 1 - b are negative, so that their absolute values matter"
    assert b > 1
    one = 3.0 / schedule.num_samples
    y = [sum(abs(1 - b) ** j * 2 * one for j in range(k)) + abs(1 - b) ** k * one for k in range(41)]
    x = [schedule.step_size * sum(abs(1 - a) ** (k - j - 1) * y[j] for j in range(k)) for k in range(41)]
    actual = tracking.published_sensitivities(schedule, agent)
    np.testing.assert_allclose(actual.tracker, y, rtol=1e-12)
    np.testing.assert_allclose(actual.state, x, rtol=1e-12)


def test_impulse_responses_start_as_documented():
    agent = TrackingAgent(gradient_l1_change=4.0, state_in_weight=0.5, tracker_out_weight=3.0)
    state, tracker = tracking.impulse_responses(small_schedule(np.random.default_rng(4)), agent)
    np.testing.assert_allclose(tracker[:4], [1, -0.6, -0.6 * 0.4, -0.6 * 0.4**2], rtol=1e-12)
    np.testing.assert_allclose(state[:3], [0, -0.25, -0.25 * 0.85 + 0.25 * 0.6], rtol=1e-12)


@pytest.mark.parametrize("num_iterations", [5, 40, 400])  # state_mixing 12.3, 1.86 and 0.19
def test_proven_is_never_above_published(num_iterations):
    schedule = s1(0.1, num_iterations)
    for bound, larger in zip(
        tracking.proven_sensitivities(schedule, UNIT), tracking.published_sensitivities(schedule, UNIT), strict=True
    ):
        assert (bound <= larger * (1 + 1e-12)).all()


def test_participation_covers_every_sequence_of_so_few_gradients():
    rng = np.random.default_rng(2)
    schedule = small_schedule(rng, num_nodes=1)
    agent = TrackingAgent(gradient_l1_change=2.0, state_in_weight=1.5, tracker_out_weight=0.8)
    num_rounds, rate, dp_delta = 31, 4 / 100, 1e-3
    pmf = [math.comb(num_rounds, n) * rate**n * (1 - rate) ** (num_rounds - n) for n in range(num_rounds + 1)]
    most = next(n for n in range(num_rounds + 1) if sum(pmf[n + 1 :]) <= dp_delta)
    bound = tracking.participation_epsilon(schedule, agent, num_local_samples=100, dp_delta=dp_delta)[0]
    costs = []
    for _ in range(300):
        sequence = np.zeros((num_rounds, 2))
        rounds = rng.choice(num_rounds, size=most, replace=False)
        sequence[rounds, rng.integers(2, size=most)] = rng.choice([-0.5, 0.5], size=most)
        x, y = changes(schedule, agent, sequence, rng)
        costs.append((x / schedule.state_noise_scale[0] + y / schedule.tracker_noise_scale[0]).sum())
    assert max(costs) <= bound
    assert max(costs) > 0.7 * bound, "not a bound of another quantity"


def test_participation_is_the_proven_bound_where_every_batch_holds_every_sample():
    schedule = small_schedule(np.random.default_rng(3))
    actual = tracking.participation_epsilon(schedule, UNIT, num_local_samples=schedule.num_samples, dp_delta=1e-5)
    np.testing.assert_allclose(actual, proven(schedule), rtol=1e-12)
    assert (tracking.participation_epsilon(schedule, UNIT, num_local_samples=100, dp_delta=1.0) == 0).all()


def test_agents_together_are_as_each_alone():
    exponents, weights = np.array([0.1, 0.12]), np.array([1.0, 1.5])
    agents = TrackingAgent(gradient_l1_change=2.0, state_in_weight=weights, tracker_out_weight=1.0)
    together = s1(exponents, num_iterations=100)
    for node in range(2):
        alone = s1(exponents[node], num_iterations=100)
        agent = TrackingAgent(gradient_l1_change=2.0, state_in_weight=weights[node], tracker_out_weight=1.0)
        for bound in (published, proven):
            np.testing.assert_allclose(bound(together, agents)[node], bound(alone, agent), rtol=1e-12)
        both, one = (
            tracking.participation_epsilon(*pair, num_local_samples=500, dp_delta=1e-5)
            for pair in ((together, agents), (alone, agent))
        )
        np.testing.assert_allclose(both[node], one, rtol=1e-12)
