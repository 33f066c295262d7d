"""Gaussian noise in gradient tracking, all broadcasts bounded together: against dense matrices, worst sequences and
integration over an adaptive choice."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from jaxfl.privacy import tracking
from jaxfl.privacy.dominating_pairs import gaussian_delta, mixed_gaussian_epsilon
from jaxfl.privacy.tracking import TrackingAgent, TrackingSchedule, joint_shift, shifted_epsilon
from jaxfl.privacy.tracking.joint_bound import _prices, gram_rows, joint_epsilon, worst_changes

UNIT = TrackingAgent(1.0, 1.0, 1.0)
AGENTS = {"mild": TrackingAgent(2.0, 1.5, 0.8), "negative factors": TrackingAgent(1.0, 5.0, 9.0)}


def schedule(num_iterations, seed=0):
    scales = np.random.default_rng(seed).uniform(0.5, 3.0, (2, num_iterations + 1))
    return TrackingSchedule(0.3, 0.2, 0.25, 4, *scales)


def paper(scheme, num_iterations):
    if scheme == "S1":
        return tracking.polynomial_schedule(
            num_iterations, state_noise_exponent=0.1, tracker_noise_exponent=0.1, horizon_offset=0
        )
    return tracking.exponential_schedule(num_iterations, state_noise_base=0.9996, tracker_noise_base=0.9996)


def shifts(run, agent):
    """(2 (K + 1), K + 1): what a change of C / m in each gradient moves, in units of the noise."""
    rows = []
    for response, scale in zip(tracking.impulse_responses(run, agent), run[-2:], strict=True):
        size = len(response)
        matrix = np.array([[response[k - j] if k >= j else 0.0 for j in range(size)] for k in range(size)])
        rows.append(matrix / scale[:, None])
    return np.concatenate(rows)


def dense(run, agent):
    size = len(run.state_noise_scale)
    gram = np.zeros((size, size))
    for j, row in zip(reversed(range(size)), gram_rows(run, agent), strict=True):
        gram[j, : j + 1] = gram[: j + 1, j] = row
    return gram


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
@pytest.mark.parametrize("num_iterations", [0, 1, 2, 12])
def test_gram_matrix_is_that_of_the_shifts(agent, num_iterations):
    run = schedule(num_iterations)
    matrix = shifts(run, agent)
    np.testing.assert_allclose(dense(run, agent), matrix.T @ matrix, rtol=1e-10, atol=1e-13)
    without = run._replace(tracker_noise_scale=np.full(num_iterations + 1, np.inf))
    half = matrix[: num_iterations + 1]
    np.testing.assert_allclose(dense(without, agent), half.T @ half, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_no_sequence_of_gradients_moves_more_and_some_come_close(agent):
    run = schedule(10)
    matrix, bound = shifts(run, agent), float(joint_shift(run, agent))
    signs = np.array(list(itertools.product([-1.0, 1.0], repeat=11)))
    moved = np.linalg.norm(signs @ matrix.T, axis=1)
    assert moved.max() <= bound
    generator = np.random.default_rng(1)
    for _ in range(200):
        changes = generator.normal(size=(11, 3))
        changes /= np.linalg.norm(changes, axis=1, keepdims=True)
        assert np.linalg.norm(matrix @ changes) <= bound
    reached = np.linalg.norm(matrix @ worst_changes(matrix.T @ matrix))
    assert max(moved.max(), reached) > 0.97 * bound, "a bound 5 % lower is exceeded"


@pytest.mark.parametrize("scheme", ["S1", "S2"])
@pytest.mark.parametrize("num_iterations", [40, 200])
def test_a_sequence_of_gradients_of_the_papers_schedules_comes_within_half_a_percent(scheme, num_iterations):
    run = paper(scheme, num_iterations)
    matrix, bound = shifts(run, UNIT), float(joint_shift(run, UNIT))
    changes = worst_changes(matrix.T @ matrix)
    np.testing.assert_allclose(np.linalg.norm(changes, axis=1), 1.0)
    assert 0.995 * bound < np.linalg.norm(matrix @ changes) <= bound


def test_a_long_run_falls_back_on_the_sum_of_absolute_values(monkeypatch):
    run = paper("S1", 60)
    tight = joint_shift(run, UNIT)
    monkeypatch.setattr("jaxfl.privacy.tracking.joint_bound.LARGEST", 60)
    loose = float(joint_shift(run, UNIT))
    assert loose == pytest.approx(math.sqrt(np.abs(dense(run, UNIT)).sum()), rel=1e-7)
    assert tight < loose


def sets_of(count):
    return np.array(list(itertools.product([False, True], repeat=count)))


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_no_set_of_iterations_moves_more_than_its_prices(agent):
    run = schedule(7)
    matrix, prices = shifts(run, agent), _prices(run, agent)
    reached = 0.0
    for chosen in sets_of(8)[1:]:
        part = matrix[:, chosen]
        signs = np.array(list(itertools.product([-1.0, 1.0], repeat=int(chosen.sum()))))
        squares = np.square(signs @ part.T).sum(axis=1)
        spread = np.square(part @ worst_changes(part.T @ part)).sum()
        largest = max(squares.max(), spread)
        assert largest <= prices[chosen].sum() * (1 + 1e-9)
        reached = max(reached, largest / prices[chosen].sum())
    assert reached > 0.97, "prices 3 % lower are exceeded"


@pytest.mark.parametrize(("rate", "dp_delta"), [(0.5, 1e-5), (0.1, 1e-5), (0.1, 1e-2), (0.01, 1e-9)])
def test_epsilon_is_that_of_the_mean_over_all_sets(rate, dp_delta):
    run, agent = schedule(11), AGENTS["mild"]
    sets = sets_of(12)
    mus = np.sqrt(sets @ _prices(run, agent))
    chances = np.prod(np.where(sets, rate, 1 - rate), axis=1)
    exact = mixed_gaussian_epsilon(mus, chances, dp_delta)
    size = round(run.num_samples / rate)
    actual = joint_epsilon(run, agent, dp_delta=dp_delta, num_local_samples=size)
    assert exact <= actual(1.0) < 1.02 * exact
    assert mixed_gaussian_epsilon(mus / 3, chances, dp_delta) <= actual(3.0)
    assert actual(1.0) <= joint_epsilon(run, agent, dp_delta=dp_delta)(1.0)


def test_a_sample_in_every_batch_gains_nothing():
    run = schedule(11)
    every = joint_epsilon(run, UNIT, dp_delta=1e-5)(1.0)
    assert every == pytest.approx(shifted_epsilon(joint_shift(run, UNIT), 1e-5), rel=1e-7)
    sizes = np.array([4, 5, 40, 400])
    agents = UNIT._replace(state_in_weight=np.ones(4))
    actual = joint_epsilon(run, agents, dp_delta=1e-5, num_local_samples=sizes)(1.0)
    assert actual[0] == every
    assert (np.diff(actual) < 0).all()


@pytest.mark.parametrize("rate", [1.0, 0.4])
def test_gradients_chosen_after_the_first_broadcast_cost_no_more(rate):
    """K = 1, y_0, x_1 and y_1 are broadcast; the second change is any function of the first release, by integration.
    Each of both gradients changes with probability `rate`, which the observer sees."""
    run, agent = schedule(1, seed=3), TrackingAgent(4.0, 1.0, 2.0)
    matrix, prices = shifts(run, agent), _prices(run, agent)
    keep = [2, 1, 3]  # y_0, then x_1 and y_1; x_0 does not change
    assert not matrix[0].any()
    x = np.linspace(-9.0, 10.0, 1501)
    sets = sets_of(2)
    chances = np.prod(np.where(sets, rate, 1 - rate), axis=1)
    tightest = 0.0
    for dp_epsilon in (0.0, 0.3, 1.0, 2.0):
        delta = 0.0
        for chosen, chance in zip(sets, chances, strict=True):
            first, second = (matrix[keep, at] * chosen[at] for at in (0, 1))
            densities = norm.pdf(x, first[0]), norm.pdf(x)
            of_set = 0.0
            for own, other in zip(*densities, strict=True):
                # Given y_0 the pair (x_1, y_1) is shifted by first +- second: the better sign is taken for every y_0.
                threshold = dp_epsilon + math.log(other / own)
                moved = [float(np.linalg.norm(first[1:] + sign * second[1:])) for sign in (-1, 1)]
                of_set += own * max(_hockey_stick(shift, threshold) for shift in moved)
            delta += chance * of_set * (x[1] - x[0])
        mus = np.sqrt(sets @ prices)
        bound = float(chances @ gaussian_delta(dp_epsilon, mus))
        assert delta <= bound * (1 + 1e-6)
        tightest = max(tightest, delta / bound)
        assert delta > float(chances @ gaussian_delta(dp_epsilon, 0.8 * mus))
    assert tightest > 0.9


def _hockey_stick(shift, threshold):
    """E max(1 - exp(threshold - loss), 0) for the losses of N(shift, 1) against N(0, 1), any threshold."""
    if shift == 0:
        return max(0.0, -math.expm1(threshold))
    above = norm.sf(threshold / shift - shift / 2)
    return above - math.exp(threshold) * norm.sf(threshold / shift + shift / 2)


def test_agents_together_are_as_each_alone():
    scales = np.random.default_rng(2).uniform(0.5, 2.0, (2, 3, 21))
    run = TrackingSchedule(0.3, 0.2, 0.25, 4, *scales)
    received, sent = np.array([1.0, 1.5, 0.2]), np.array([0.4, 0.0, 1.2])
    agents = TrackingAgent(2.0, received, sent)
    together = joint_shift(run, agents)
    assert together.shape == (3,)
    for node in range(3):
        one = run._replace(state_noise_scale=scales[0, node], tracker_noise_scale=scales[1, node])
        alone = joint_shift(one, TrackingAgent(2.0, received[node], sent[node]))
        assert together[node] == alone
    assert joint_shift(run, agents._replace(gradient_l1_change=6.0)) == pytest.approx(3 * together, rel=1e-6)
    singly = tracking.gaussian_shift(run, tracking.proven_sensitivities(run, agents))
    singly, jointly = (shifted_epsilon(mu, 1e-5) for mu in (singly, together))
    assert (jointly < [0.9, 1 + 1e-7, 0.9] * singly).all(), "without a weight out nothing leaves a tracker again"
