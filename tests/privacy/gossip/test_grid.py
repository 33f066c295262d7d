"""Accounting of releases on a grid: the cost of rounding, and the most that it may cost."""

import math
from typing import Any

import numpy as np
import pytest
from helpers import refused
from scipy.stats import norm

from jaxfl.privacy import (
    A_DP2_SGD,
    DP2_SGD,
    PRIVSGP,
    PRIVSGP_VR,
    Grid,
    Release,
)
from jaxfl.privacy.dominating_pairs import gaussian_epsilon
from jaxfl.privacy.gossip import account
from jaxfl.privacy.gossip.proven import proven_bound, sensitivities

DELTA, ROUNDS = 1e-5, 60
RELATIONS = ("zero_out", "replace_one")
PLAIN = Release("mini_batch", "poisson", 16, 200, clip_norm=1.0, noise_std=0.2)
TABLE = PLAIN._replace(estimator="saga")


def spent(accountant, release, relation="zero_out"):
    options: dict[str, Any] = {"dp_delta": DELTA, "num_nodes": 4}
    return account(accountant, release, **options).epsilon(ROUNDS, "proven", relation)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("release", [PLAIN, TABLE])
def test_rounding_adds_to_what_changes_and_to_nothing_else(release, relation):
    before = sensitivities(release, relation)
    after = sensitivities(release._replace(grid=Grid(8, 1024)), relation)
    added = 0.2 * 32 / 256
    assert after.present == pytest.approx(before.present + added, rel=1e-12)
    assert after.absent == pytest.approx(before.absent + added if before.absent else 0.0, rel=1e-12)


@pytest.mark.parametrize(
    ("accountant", "release", "relation"),
    [
        (PRIVSGP, PLAIN, "zero_out"),
        (PRIVSGP_VR, TABLE, "replace_one"),
        (PRIVSGP, PLAIN._replace(sampler="uniform"), "replace_one"),
        (PRIVSGP_VR, TABLE._replace(sampler="fixed"), "zero_out"),
        (A_DP2_SGD, PLAIN, "zero_out"),
    ],
)
def test_epsilon_rises_with_rounding_and_falls_back_without(accountant, release, relation):
    without = spent(accountant, release, relation)
    coarse, fine = (spent(accountant, release._replace(grid=Grid(bits, 4000)), relation) for bits in (8, 12))
    smallest = spent(accountant, release._replace(grid=Grid(16, 1)), relation)
    assert without < fine < coarse
    # A thousandth of delta is kept for the sampler, and the grid of one number costs 2^-16 of the noise; with a table
    # in every release, as if the clip norm were larger by J times that.
    assert without <= smallest <= without * (1.002 if release is TABLE else 1.001)


def true_delta(dp_epsilon, first, second, bits):
    """Exact delta, both ways, of h (round(v / h) + k) with noise_std 1 for two numbers of one coordinate."""
    places = np.arange(-14 << bits, (14 << bits) + 1)
    masses = np.diff(norm.cdf((np.append(places, places[-1] + 1) - 0.5) * 2.0**-bits))
    shift = abs(round(first * 2**bits) - round(second * 2**bits))
    ours, theirs = np.append(masses, np.zeros(shift)), np.append(np.zeros(shift), masses)
    return max(np.maximum(a - math.exp(dp_epsilon) * b, 0).sum() for a, b in ((ours, theirs), (theirs, ours)))


@pytest.mark.parametrize("moved", [1e-6, 0.01, 0.3, 1.0])
def test_bound_holds_for_the_worst_pair_of_numbers(moved):
    """Two numbers at both sides of a rounding boundary move by a step more than they differ; that is what is stated."""
    bits = 8
    first = 0.5 * 2.0**-bits - 1e-9  # rounds down
    one = Release("mini_batch", "poisson", 1, 1, clip_norm=moved, noise_std=1.0, grid=Grid(bits, 1))
    stated = proven_bound(one, "zero_out", 1, DELTA).dp_epsilon
    assert true_delta(stated, first, first + moved, bits) <= DELTA
    without = proven_bound(one._replace(grid=None), "zero_out", 1, DELTA).dp_epsilon
    assert without == pytest.approx(gaussian_epsilon(moved, DELTA), rel=1e-6)
    if round((first + moved) * 2**bits) > moved * 2**bits:
        assert true_delta(without, first, first + moved, bits) > DELTA, "and rounding is not free"


def test_budget_holds_with_the_calibrated_noise_and_more_bits_need_less():
    grids = [None, Grid(14, 2410), Grid(10, 2410)]
    noises = []
    for grid in grids:
        release = TABLE._replace(grid=grid, noise_std=1.0)
        options: dict[str, Any] = {"dp_delta": DELTA}
        noises.append(account(PRIVSGP_VR, release, **options).calibrate(ROUNDS, 2.0))
        assert 1.99 < spent(PRIVSGP_VR, release._replace(noise_std=noises[-1])) <= 2.0
    assert noises == sorted(noises)
    assert noises[2] > 1.05 * noises[0]


def test_a_budget_below_what_rounding_costs_is_refused():
    release = TABLE._replace(grid=Grid(8, 10**6))
    options: dict[str, Any] = {"dp_delta": DELTA}
    refused(
        lambda: account(PRIVSGP_VR, release, **options).calibrate(ROUNDS, 2.0),
        "target_epsilon",
        "rounding to the",
    )


def test_the_sampler_is_paid_for_out_of_delta_or_there_is_no_epsilon():
    grid = Grid(12, 10**6)
    one, distance = PLAIN._replace(grid=grid), ROUNDS * grid.distance
    actual = proven_bound(one, "zero_out", ROUNDS, DELTA).dp_epsilon
    assert actual < math.inf
    assert 2 * distance * math.exp(actual) < 1e-3 * DELTA
    little = one._replace(noise_std=0.02)  # what is kept of delta is below exp(epsilon) times the distance
    assert proven_bound(little, "zero_out", ROUNDS, DELTA).dp_epsilon == math.inf
    without = proven_bound(little._replace(grid=None), "zero_out", ROUNDS, DELTA).dp_epsilon
    assert 1e-3 * DELTA < 2 * distance * math.exp(without) < math.inf


@pytest.mark.parametrize(("accountant", "release"), [(DP2_SGD, PLAIN), (A_DP2_SGD, PLAIN), (PRIVSGP_VR, TABLE)])
def test_formulas_of_papers_know_no_grid_and_say_so(accountant, release):
    plain = account(accountant, [release] * 4, dp_delta=DELTA).statements(ROUNDS)
    on_grid = account(accountant, [release._replace(grid=Grid(12, 2410))] * 4, dp_delta=DELTA).statements(ROUNDS)
    assert on_grid[0].dp_epsilon == plain[0].dp_epsilon
    assert any("knows no grid" in text for text in on_grid[0].assumptions)
    assert not any("knows no grid" in text for text in plain[0].assumptions)
    for before, after in zip(plain[1:], on_grid[1:], strict=True):
        assert (after.dp_epsilon or 0.0) > (before.dp_epsilon or math.inf)
        assert any("9 to 95 %" in text for text in before.assumptions)
        assert not any("9 to 95 %" in text for text in after.assumptions)
        assert any("integers times the noise over 4096" in text for text in after.assumptions)
