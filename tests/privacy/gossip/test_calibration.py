"""Searches over privacy curves, and what they find for each algorithm."""

import math
from typing import Any

import pytest

from jaxfl.core import ArgumentError
from jaxfl.privacy import accountant as verbs
from jaxfl.privacy.accountant import most_rounds, smallest_noise
from jaxfl.privacy.gossip import (
    A_DP2_SGD,
    DP2_SGD,
    PRIVSGP,
    PRIVSGP_VR,
    Release,
    calibrate_noise_std,
    epsilon,
    max_rounds,
)

PLAIN = Release("mini_batch", "poisson", 16, 1200, clip_norm=2.0, noise_std=0.0)
TABLE = PLAIN._replace(estimator="saga")
BUDGET: dict[str, Any] = {"target_epsilon": 3.0, "dp_delta": 1e-5}
CASES = [
    (PRIVSGP, "proven", PLAIN),
    (PRIVSGP, "proven", PLAIN._replace(sampler="fixed")),
    (PRIVSGP_VR, "proven", TABLE),
    (PRIVSGP_VR, "proven", TABLE._replace(entry_size=4, num_entries=300, batch_size=4, clip_norm=0.5)),
    (PRIVSGP_VR, "published", TABLE),
    (DP2_SGD, "published", PLAIN),
    (A_DP2_SGD, "proven", PLAIN),
]


@pytest.mark.parametrize(("accountant", "bound", "release"), CASES)
@pytest.mark.quick_cases(2)
def test_never_overspends_and_tight(accountant, bound, release):
    found = calibrate_noise_std(accountant, bound, release, 1000, num_nodes=10, **BUDGET)

    def spent(noise_std):
        options = {"dp_delta": 1e-5, "num_nodes": 10}
        return epsilon(accountant, bound, release._replace(noise_std=noise_std), 1000, **options)

    assert spent(found) <= 3.0 < spent(0.999 * found)


@pytest.mark.parametrize("guess", [1e-3, 2.0, 1e4])
def test_any_guess_leads_there(guess):
    found = smallest_noise(lambda noise: 6 / noise, 3.0, guess)
    assert 2.0 <= found <= 2.001


def test_an_epsilon_that_jumps():
    found = smallest_noise(lambda noise: math.inf if noise < 1 else 0.0, 3.0, 0.1)
    assert 1.0 <= found <= 1.001


@pytest.mark.parametrize("bound", ["proven", "published"])
def test_a_machine_with_other_last_bits_finds_the_same_noise(bound, monkeypatch):
    """Noise is part of a run's key: with other last digits a run would have other random numbers."""

    def found(error):
        true = verbs.epsilon
        with monkeypatch.context() as patch:
            patch.setattr(verbs, "epsilon", lambda *account: true(*account) * (1 + error))
            return calibrate_noise_std(PRIVSGP_VR, bound, TABLE, 1000, **BUDGET)

    assert found(0.0) == found(1e-11) == found(-1e-11)


def test_no_noise_may_be_enough():
    with pytest.raises(ArgumentError, match="target_epsilon: must be met by some noise"):
        smallest_noise(lambda noise: 5.0, 3.0, 1.0)


def test_no_noise_may_be_needed():
    with pytest.raises(ArgumentError, match="target_epsilon: must need noise"):
        smallest_noise(lambda noise: 0.0, 3.0, 1.0)


@pytest.mark.parametrize("limit", [0, 1, 5, 6, 7, 100])
def test_most_rounds_of_a_line(limit):
    assert most_rounds([lambda rounds: rounds / 2], 3.2, limit) == min(6, limit)


def test_not_even_one_round():
    assert most_rounds([lambda rounds: 5.0 * rounds], 3.2, 10) == 0


@pytest.mark.parametrize(("accountant", "release"), [(PRIVSGP, PLAIN), (PRIVSGP_VR, TABLE), (A_DP2_SGD, PLAIN)])
def test_one_more_round_overspends(accountant, release):
    release = release._replace(noise_std=0.2 if release is TABLE else 0.14)
    rounds = max_rounds(accountant, "proven", release, limit=5000, num_nodes=4, **BUDGET)
    assert 0 < rounds < 5000
    spent = [epsilon(accountant, "proven", release, k, dp_delta=1e-5, num_nodes=4) for k in (rounds, rounds + 1)]
    assert spent[0] <= 3.0 < spent[1]


def test_rounds_without_a_bound():
    assert max_rounds(PRIVSGP, "proven", PLAIN, limit=10, **BUDGET) == 0
    assert max_rounds(PRIVSGP, "published", PLAIN._replace(noise_std=1.0), limit=10, **BUDGET) == 0


def test_noise_for_no_rounds():
    assert calibrate_noise_std(PRIVSGP, "proven", PLAIN, 0, **BUDGET) == 0.0


@pytest.mark.parametrize(
    ("accountant", "bound", "release", "remedy"),
    [
        (PRIVSGP, "published", PLAIN, "Take the proven bound"),
        (PRIVSGP_VR, "proven", TABLE._replace(clip_norm=None), "Clip, or choose another bound"),
        (PRIVSGP_VR, "proven", TABLE._replace(assumed=True), "Clip, or choose another bound"),
        (PRIVSGP_VR, "proven", TABLE._replace(entry_size=4, storage="bfloat16"), "Store the table in float32"),
    ],
)
def test_no_noise_gives_a_bound_that_does_not_exist(accountant, bound, release, remedy):
    with pytest.raises(ArgumentError, match=rf"bound: must exist .*\. {remedy}\.$"):
        calibrate_noise_std(accountant, bound, release, 10, **BUDGET)


NODES = [Release("saga", "poisson", 4, size, clip_norm=1.0, noise_std=1.0) for size in (40, 80)]


def largest(rounds, **changes):
    options = {"dp_delta": 1e-5, "num_nodes": 2}
    return max(epsilon(PRIVSGP_VR, "proven", node._replace(**changes), rounds, **options) for node in NODES)


@pytest.mark.parametrize("order", [1, -1])
def test_no_node_spends_more_than_its_budget(order):
    noise = calibrate_noise_std(PRIVSGP_VR, "proven", NODES[::order], 10, num_nodes=2, **BUDGET)
    assert 2.97 < largest(10, noise_std=noise) <= 3.0
    assert largest(10, noise_std=0.99 * noise) > 3.0, "less noise must be too little for this to mean something"


def test_the_node_that_spends_most_decides_the_rounds():
    rounds = max_rounds(PRIVSGP_VR, "proven", NODES, limit=500, num_nodes=2, **BUDGET)
    assert largest(rounds) <= 3.0 < largest(rounds + 1)
    assert max_rounds(PRIVSGP_VR, "proven", NODES, limit=3, num_nodes=2, **BUDGET) == 3
