"""Searches over privacy curves, and what they find for each algorithm."""

import math

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
    account,
)

PLAIN = Release("mini_batch", "poisson", 16, 1200, clip_norm=2.0, noise_std=1.0)
TABLE = PLAIN._replace(estimator="saga")
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
    actual = account(accountant, release, num_nodes=10, dp_delta=1e-5).calibrate(1000, 3.0, bound)

    def spent(noise_std):
        noisy = release._replace(noise_std=noise_std)
        return account(accountant, noisy, num_nodes=10, dp_delta=1e-5).epsilon(1000, bound)

    assert spent(actual) <= 3.0 < spent(0.999 * actual)


@pytest.mark.parametrize("guess", [1e-3, 2.0, 1e4])
def test_any_guess_leads_there(guess):
    actual = smallest_noise(lambda noise: 6 / noise, 3.0, guess)
    assert 2.0 <= actual <= 2.001


def test_an_epsilon_that_jumps():
    actual = smallest_noise(lambda noise: math.inf if noise < 1 else 0.0, 3.0, 0.1)
    assert 1.0 <= actual <= 1.001


@pytest.mark.parametrize("bound", ["proven", "published"])
def test_a_machine_with_other_last_bits_finds_the_same_noise(bound, monkeypatch):
    """Noise is part of a run's key: with other last digits a run would have other random numbers."""

    def actual(error):
        true = verbs.Family.epsilon
        with monkeypatch.context() as patch:
            patch.setattr(verbs.Family, "epsilon", lambda *spent: true(*spent) * (1 + error))
            return account(PRIVSGP_VR, TABLE, dp_delta=1e-5).calibrate(1000, 3.0, bound)

    assert actual(0.0) == actual(1e-11) == actual(-1e-11)


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


def test_rounds_without_a_bound():
    assert account(PRIVSGP, PLAIN._replace(noise_std=0.0), dp_delta=1e-5).most_rounds(3.0, 10) == 0
    assert account(PRIVSGP, PLAIN, dp_delta=1e-5).most_rounds(3.0, 10, "published") == 0


def test_noise_for_no_rounds():
    assert account(PRIVSGP, PLAIN, dp_delta=1e-5).calibrate(0, 3.0) == 0.0


@pytest.mark.parametrize(
    ("accountant", "bound", "release", "remedy"),
    [
        (PRIVSGP, "published", PLAIN, "Take another bound, or other releases"),
        (PRIVSGP_VR, "proven", TABLE._replace(clip_norm=None), "Clip, or choose another bound"),
        (PRIVSGP_VR, "proven", TABLE._replace(assumed=True), "Clip, or choose another bound"),
        (
            PRIVSGP_VR,
            "proven",
            TABLE._replace(entry_size=4, storage="bfloat16"),
            "Take another bound, or other releases",
        ),
    ],
)
def test_no_noise_gives_a_bound_that_does_not_exist(accountant, bound, release, remedy):
    with pytest.raises(ArgumentError, match=rf"bound: must exist .*\. {remedy}\.$"):
        account(accountant, release, dp_delta=1e-5).calibrate(10, 3.0, bound)


NODES = [Release("saga", "poisson", 4, size, clip_norm=1.0, noise_std=1.0) for size in (40, 80)]


def largest(rounds, **changes):
    accounts = [account(PRIVSGP_VR, node._replace(**changes), num_nodes=2, dp_delta=1e-5) for node in NODES]
    return max(one.epsilon(rounds) for one in accounts)


@pytest.mark.parametrize("order", [1, -1])
def test_no_node_spends_more_than_its_budget(order):
    noise = account(PRIVSGP_VR, NODES[::order], num_nodes=2, dp_delta=1e-5).calibrate(10, 3.0)
    assert 2.97 < largest(10, noise_std=noise) <= 3.0
    assert largest(10, noise_std=0.99 * noise) > 3.0, "less noise must be too little for this to mean something"


def test_the_node_that_spends_most_decides_the_rounds():
    rounds = account(PRIVSGP_VR, NODES, num_nodes=2, dp_delta=1e-5).most_rounds(3.0, 500)
    assert largest(rounds) <= 3.0 < largest(rounds + 1)
    assert account(PRIVSGP_VR, NODES, num_nodes=2, dp_delta=1e-5).most_rounds(3.0, 3) == 3
