"""The conditions of the paper's theorems, against the numbers of its remarks and those worked out by hand."""

import numpy as np
import pytest
from helpers import refusals

from jaxfl.graphs import TrackingPair, five_agents, five_agents_self_loops
from jaxfl.graphs.spectral import laplacian, spanning_tree_roots
from jaxfl.graphs.tracking_conditions import (
    ExponentialBases,
    PolynomialExponents,
    StepSizes,
    assumption_1,
    assumption_4,
    assumption_5,
    common_roots,
    step_size_bounds,
    theorem_4,
    theorem_5,
    violated,
)
from jaxfl.privacy.tracking import exponential_schedule, polynomial_schedule

RING = TrackingPair(np.roll(np.eye(5), 1, axis=0), np.roll(np.eye(5), 1, axis=0))
AGENTS = np.arange(1, 6)
LINE = TrackingPair(
    np.eye(3, k=-1), np.eye(3, k=-1).T
)  # states from 0 to 2, trackers from 2 to 0: agent 0 is both root


def steps_of(schedule):
    return StepSizes(schedule.state_mixing, schedule.tracker_mixing, schedule.step_size)


S1 = steps_of(polynomial_schedule(2000, state_noise_exponent=0.1, tracker_noise_exponent=0.1, horizon_offset=0))
S2 = steps_of(exponential_schedule(2000, state_noise_base=0.9996, tracker_noise_base=0.9996))


def failures(conditions):
    """Violated conditions, without the theorem's name, and the numbers."""
    return {c.name.split(": ")[1]: (c.found, c.required) for c in violated(conditions)}


def exponents(state_noise, tracker_noise, num_samples=1.78):
    return PolynomialExponents(state_noise=state_noise, tracker_noise=tracker_noise, num_samples=num_samples)


def both(pair, powers, steps=S1):
    """Conditions of Corollary 1 (i): Assumption 4 and Theorem 4."""
    return assumption_4(pair, steps, powers, smoothness=1.0) + theorem_4(pair, steps, powers)


def test_the_named_pairs_have_the_promised_roots_and_sums():
    for pair, total in ((five_agents(), 1.0), (five_agents_self_loops(), 2.0)):
        assert spanning_tree_roots(pair.state_weights) == (0, 1)
        assert spanning_tree_roots(pair.tracker_weights.T) == (0, 4)
        assert common_roots(pair) == (0,)
        assert not violated(assumption_1(pair))
        np.testing.assert_array_equal(pair.state_weights.sum(axis=1), total)
        np.testing.assert_array_equal(pair.tracker_weights.sum(axis=0), total)
    plain, loops = five_agents(), five_agents_self_loops()
    np.testing.assert_array_equal(np.diagonal(plain.state_weights), 0)
    np.testing.assert_array_equal(np.diagonal(plain.tracker_weights), 0)
    np.testing.assert_array_equal(laplacian(plain.state_weights), laplacian(loops.state_weights))
    np.testing.assert_array_equal(laplacian(plain.tracker_weights.T), laplacian(loops.tracker_weights.T))


def test_self_loops_halve_the_bounds_by_sums_alone():
    # Eigenvalues of both Laplacians are 0, 1, 1, 1, 2: the bounds by eigenvalues are 1/2 and 2/5.
    plain, loops = (step_size_bounds(pair, smoothness=2.0) for pair in (five_agents(), five_agents_self_loops()))
    np.testing.assert_allclose(plain, (0.4, 0.4, 5 / (4 * 2.5**2 * 2)), rtol=1e-9)  # v1 and v2 meet at agent 0 only
    np.testing.assert_allclose(loops, plain, rtol=1e-12)
    heavy = TrackingPair(RING.state_weights + 9 * np.eye(5), RING.tracker_weights)
    np.testing.assert_allclose(step_size_bounds(heavy, smoothness=1.0).state_mixing, 1 / 10)


def test_common_roots_read_trackers_against_their_direction():
    assert common_roots(LINE) == (0,)
    same_way = TrackingPair(LINE.state_weights, LINE.state_weights)
    assert failures(assumption_1(same_way)) == {"agents that are roots in both >= 1": (0, 1)}
    apart = TrackingPair(np.eye(3), LINE.tracker_weights)
    assert failures(assumption_1(apart)) == {
        "roots of spanning trees of G_R >= 1": (0, 1),
        "agents that are roots in both >= 1": (0, 1),
    }
    backwards = TrackingPair(LINE.state_weights, np.eye(3))
    assert "roots of spanning trees of G_{C^T} >= 1" in failures(assumption_1(backwards))


@pytest.mark.parametrize(
    ("state_noise", "tracker_noise", "failing"),
    [
        (0.142, 0.1885, []),
        (-0.3199, -0.3099, []),
        (0.1421, 0.1, ["2 p_alpha - p_beta - 2 max(p_zeta, 0) >= 1"]),
        (0.15, 0.15, ["2 p_alpha - p_beta - 2 max(p_zeta, 0) >= 1"]),  # Remark 19's own end
        (0.1, 0.1886, ["p_gamma + 2 p_beta - 2 max(p_eta, 0) >= 2"]),
        (-0.32, 0.1, ["p_m + min(0, p_gamma - p_alpha - p_beta) + min(p_zeta - 1, 0) > 0"]),
        (0.1, -0.31, ["p_m - p_beta + min(p_eta - 1, 0) > 0"]),
    ],
)
def test_ranges_of_remark_19_under_the_first_scheme(state_noise, tracker_noise, failing):
    assert list(failures(both(RING, exponents(state_noise, tracker_noise, num_samples=2)))) == failing


def test_equality_is_not_above_zero_whatever_the_rounding():
    assert 1.52 - 0.69 + (0.17 - 1) > 0  # 0 but for rounding
    failed = failures(theorem_4(RING, S1, exponents(0.17, 0.17, num_samples=1.52)))
    assert "p_m - p_beta + min(p_eta - 1, 0) > 0" in failed


@pytest.mark.parametrize(("base", "holds"), [(0.9090, False), (0.9091, True), (0.95, True), (0.99, True), (1.0, False)])
def test_range_of_remark_19_under_the_second_scheme(base, holds):
    bases = ExponentialBases(state_noise=base, tracker_noise=0.95, num_samples=1.1)
    swapped = ExponentialBases(state_noise=0.95, tracker_noise=base, num_samples=1.1)
    steps = StepSizes(0.1, 0.1, 0.01)
    for given in (bases, swapped):
        assert (not violated(theorem_5(RING, steps, given))) == holds


@pytest.mark.parametrize("pair", [RING, five_agents(), five_agents_self_loops()], ids=["ring", "plain", "loops"])
def test_which_of_the_experiments_noises_fail_which_theorem(pair):
    decreasing, constant, increasing = (start + 0.01 * AGENTS for start in (-0.11, 0.09, 0.19))
    powers = exponents(decreasing, decreasing)
    assert not violated(assumption_4(pair, S1, powers, smoothness=1.0))
    failed = failures(theorem_4(pair, S1, powers))
    assert list(failed) == [
        "p_m - p_beta + min(p_eta - 1, 0) > 0",
        "p_m + min(0, p_gamma - p_alpha - p_beta) + min(p_zeta - 1, 0) > 0",
    ]
    np.testing.assert_allclose(list(failed.values()), [(-0.01, 0), (0, 0)], atol=1e-12)
    assert not violated(theorem_4(pair, S1, exponents(-0.099, -0.089)))
    assert not violated(both(pair, exponents(constant, constant)))
    powers = exponents(increasing, increasing)
    assert not violated(theorem_4(pair, S1, powers))
    failed = failures(assumption_4(pair, S1, powers, smoothness=1.0))
    assert failed["2 p_alpha - p_beta - 2 max(p_zeta, 0) >= 1"][0] == pytest.approx(0.804)
    assert failed["p_gamma + 2 p_beta - 2 max(p_eta, 0) >= 2"][0] == pytest.approx(1.897)
    assert len(failed) == 2
    for start in (0.99939, 0.99959, 0.99979):
        bases = ExponentialBases(state_noise=start + 1e-5 * AGENTS, tracker_noise=start + 1e-5 * AGENTS)
        assert not violated(theorem_5(pair, S2, bases))


@pytest.mark.parametrize(
    ("changed", "failing"),
    [
        ({"tracker_mixing": 0.5}, "p_beta > 1/2"),
        ({"state_mixing": 0.69}, "p_alpha > p_beta"),
        ({"step_size": 0.987}, "p_gamma > p_alpha"),
        ({"step_size": 1.0}, "p_gamma < 1"),
        ({"num_samples": 1.6899}, "p_m - p_beta >= 1"),
        ({"step_size": 0.9934}, "2 p_gamma - p_alpha >= 1"),
    ],
)
def test_each_exponent_of_assumption_4_can_fail(changed, failing):
    powers = exponents(0.0, 0.0)._replace(**changed)
    assert failing in failures(assumption_4(RING, S1, powers, smoothness=1.0))
    if failing == "p_m - p_beta >= 1":
        assert not violated(assumption_4(RING, S1, powers._replace(num_samples=1.69), smoothness=1.0))


def test_smoothness_that_the_experiment_needs_on_a_directed_ring():
    bases = ExponentialBases(state_noise=0.9996, tracker_noise=0.9996)

    def fails(smoothness):
        return failures(assumption_5(RING, S2, bases, smoothness=smoothness))

    assert fails(3.93e-4) == {}
    failed = fails(3.95e-4)
    assert list(failed) == ["gamma < Q2 beta"]
    np.testing.assert_allclose(failed["gamma < Q2 beta"][1] * 3.95e-4 / 0.1, 3.94e-4, rtol=2e-3)
    on_alpha = "alpha < sqrt(2) (v1 . v2) r2 beta / (12 rho(L1) |v1| L)"
    assert on_alpha not in fails(9.5e-3)
    assert on_alpha in fails(9.6e-3)


def test_assumption_5_by_hand_on_two_agents():
    # Weights 1: both Laplacians have the eigenvalues 0 and 2, v1 = v2 = (1, 1), and r1 = r2 = 2 as 1 - 2 alpha > 0.
    swap = np.array([[0.0, 1.0], [1.0, 0.0]])
    pair, steps = TrackingPair(swap, swap), StepSizes(0.3, 0.2, 2.0)
    bases = ExponentialBases(state_noise=np.array([0.9, 0.0]), tracker_noise=np.array([0.9, 1.0]), num_samples=1.0)
    smoothness, mu = 0.5, 0.1
    conditions = assumption_5(pair, steps, bases, smoothness=smoothness, gradient_dominance=mu)
    required = {c.name.split(": ")[1]: c.required for c in conditions}
    root = np.sqrt(2)
    q1 = min(2 * np.sqrt(6) * 2 / (24 * root * 0.5), 2 / (2 * root * 0.5) * np.sqrt(mu / (12 * 0.5 + 2 * mu)))
    q2 = min(
        np.sqrt(3) * 2 / (6 * 2 * 0.5),
        np.sqrt(3) * 2 * 2 / (36 * 2 * 0.5),
        np.sqrt(6) * 2 * 2 * 2 / (144 * 2 * 2 * 0.5),
        np.sqrt(6) * 2 * 2 / (12 * 2 * 0.5) * np.sqrt(mu / (36 * 0.5 + 7 * mu)),
    )
    np.testing.assert_allclose(required["gamma < Q1 alpha"], q1 * 0.3)
    np.testing.assert_allclose(required["gamma < Q2 beta"], q2 * 0.2)
    np.testing.assert_allclose(required["gamma < n / (20 (v1 . v2) L)"], 2 / (20 * 2 * 0.5))
    on_alpha = "alpha < sqrt(2) (v1 . v2) r2 beta / (12 rho(L1) |v1| L)"
    np.testing.assert_allclose(required[on_alpha], root * 2 * 2 * 0.2 / (12 * 2 * root * 0.5))
    failing = {"gamma < 1", "min(p_zeta, p_eta) > 0", "max(p_zeta, p_eta) < 1", "p_m > 1", "gamma < Q1 alpha", on_alpha}
    assert failing <= set(failures(conditions))
    without = assumption_5(pair, steps, bases, smoothness=smoothness)
    q1_without = min(2 * np.sqrt(6) * 2 / (24 * root * 0.5), 2 / (2 * root * 0.5) * np.sqrt(1 / 2))
    np.testing.assert_allclose(
        {c.name.split(": ")[1]: c.required for c in without}["gamma < Q1 alpha"], q1_without * 0.3
    )


def test_each_term_of_q1_and_q2_can_be_the_smallest():
    # But for the second of Q2: the third is at most sqrt(2) / 4 of it, as r1 <= rho(L1).
    bases = ExponentialBases(state_noise=0.9, tracker_noise=0.9)
    of_ring = assumption_5(RING, S2, bases, smoothness=2.0)
    rate = (1 - abs(1 - 0.1 * (1 - np.exp(2j * np.pi / 5)))) / 0.1
    np.testing.assert_allclose(of_ring[-5].required, 0.1 * rate / (2 * np.sqrt(5) * 2.0) * np.sqrt(1 / 2))
    everyone = (np.ones((20, 20)) - np.eye(20)) / 20  # eigenvalues 0 and 1: r1 = r2 = rho(L1) = 1
    of_everyone = assumption_5(TrackingPair(everyone, everyone), S2, bases, smoothness=2.0)
    np.testing.assert_allclose(of_everyone[-4].required, 0.01 * np.sqrt(3) / (6 * 20 * 2.0))


def test_norms_of_both_vectors_stand_where_the_theorem_has_them():
    # v1 = (3/2, 3/2, 0) of two agents that exchange and one that hears, v2 = (1, 1, 1) of a ring.
    pair = TrackingPair(np.array([[0, 1, 0], [1, 0, 0], [0, 1, 0]]), np.roll(np.eye(3), 1, axis=0))
    bases = ExponentialBases(state_noise=0.9, tracker_noise=0.9)
    required = {c.name.split(": ")[1]: c.required for c in assumption_5(pair, S2, bases, smoothness=2.0)}
    # r1 = 1, as the eigenvalues of L1 are 1 and 2, and 1 - alpha is larger than |1 - 2 alpha|.
    np.testing.assert_allclose(required["gamma < Q1 alpha"], 0.1 / (np.sqrt(3) * 2.0) * np.sqrt(1 / 2) / 2)
    r2 = (1 - abs(1 - 0.01 * (1 - np.exp(2j * np.pi / 3)))) / 0.01
    on_alpha = "alpha < sqrt(2) (v1 . v2) r2 beta / (12 rho(L1) |v1| L)"
    np.testing.assert_allclose(required[on_alpha], np.sqrt(2) * 3 * r2 * 0.01 / (12 * 2 * np.sqrt(4.5) * 2.0))


def test_fourth_term_of_q2_counts_when_dominance_is_weak():
    bases = ExponentialBases(state_noise=0.9, tracker_noise=0.9)
    strong, weak = (
        assumption_5(RING, S2, bases, smoothness=1.0, gradient_dominance=mu)[-4].required for mu in (1.0, 1e-6)
    )
    # r2 of the ring is (1 - |1 - 0.01 w_2|) / 0.01, and |v1| |v2| = v1 . v2 = 5.
    rate = (1 - abs(1 - 0.01 * (1 - np.exp(2j * np.pi / 5)))) / 0.01
    np.testing.assert_allclose(weak, 0.01 * np.sqrt(6) * rate / 12 * np.sqrt(1e-6 / (36 + 7e-6)))
    assert weak < strong


def test_rest_is_left_out_where_the_graphs_have_no_common_root():
    pair = TrackingPair(LINE.state_weights, LINE.state_weights)
    bases = ExponentialBases(state_noise=0.9, tracker_noise=0.9, num_samples=1.2)
    for conditions in (
        assumption_4(pair, S1, exponents(0.1, 0.1), smoothness=1.0),
        assumption_5(pair, S2, bases, smoothness=1.0),
    ):
        assert list(failures(conditions)) == ["agents that are roots in both >= 1"]
        assert not any("alpha <" in condition.name for condition in conditions)
    assert not violated(theorem_4(pair, S1, exponents(0.1, 0.1)))  # privacy does not need it


def test_sums_of_weights_bound_the_step_sizes_of_both_theorems():
    pair = TrackingPair(2 * RING.state_weights, 4 * RING.tracker_weights)
    steps = StepSizes(state_mixing=0.5, tracker_mixing=0.25, step_size=0.1)
    expected = {"alpha < 1 / max_i sum_j R_ij": (0.5, 0.5), "beta < 1 / max_i sum_j C_ji": (0.25, 0.25)}
    assert failures(theorem_4(pair, steps, exponents(0.1, 0.1))) == expected
    assert failures(theorem_5(pair, steps, ExponentialBases(state_noise=0.9996, tracker_noise=0.9996))) == expected
    one_sender = np.zeros((3, 3))
    one_sender[1:, 0] = 1.0  # rows sum to at most 1, column 0 to 2
    actual = theorem_4(TrackingPair(one_sender, one_sender), steps, exponents(0.1, 0.1))
    assert [condition.required for condition in actual[-2:]] == [1.0, 0.5]


ONE = TrackingPair(np.zeros((1, 1)), np.zeros((1, 1)))
APART = TrackingPair(LINE.state_weights, LINE.state_weights)  # without a common root
test_refusals = refusals(
    [
        (lambda: common_roots(TrackingPair(RING.state_weights, LINE.tracker_weights)), "pair"),
        (lambda: theorem_4(RING, StepSizes(0.0, 0.1, 0.1), exponents(0.1, 0.1)), "state_mixing"),
        (lambda: assumption_4(RING, S1, exponents(0.1, 0.1), smoothness=0.0), "smoothness"),
        (
            lambda: assumption_5(RING, S2, ExponentialBases(0.9, 0.9), smoothness=1.0, gradient_dominance=-1.0),
            "gradient_dominance",
        ),
        (lambda: assumption_4(ONE, S1, exponents(0.1, 0.1), smoothness=1.0), "pair"),
        (lambda: step_size_bounds(APART, smoothness=1.0), "pair"),
    ]
)
