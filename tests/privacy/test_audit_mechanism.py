"""Checks of a mechanism on canaries: right runs pass, wrong ones do not, and the error named is the one seen."""

import math

import numpy as np
import pytest
import scipy.stats

from jaxfl import ArgumentError
from jaxfl.privacy.audit_mechanism import Mechanism, check_mechanism, noise_check, smallest_guessed_error

CANARIES, ROUNDS, RATE, VISIT, NOISE, DELTA = 5000, 16, 0.9, 1.0, 12.0, 1e-5
CLAIMED = Mechanism(noise_std=NOISE, signal=ROUNDS * RATE * VISIT, num_releases=ROUNDS)


def released(seed, noise_std=NOISE, visit=VISIT, rounds=ROUNDS, rate=RATE, canaries=CANARIES):
    """Releases of a mini-batch method in every canary's coordinate, (rounds, m), and who is in."""
    rng = np.random.default_rng(seed)
    included = rng.integers(0, 2, canaries).astype(bool)
    visits = rng.random((rounds, canaries)) < rate
    return noise_std * rng.normal(size=(rounds, canaries)) + visit * visits * included, included


def checks(run, dp_epsilon=1.25, significance=0.05, **more):  # what the claimed numbers cost is 1.11
    actual, included = run
    made = check_mechanism(
        actual,
        included,
        CLAIMED,
        dp_epsilon=dp_epsilon,
        dp_delta=DELTA,
        significance=significance,
        **more,
    )
    return {check.name.partition(" (")[0]: check for check in made}


def refuted(run, **options):
    return {name for name, check in checks(run, **options).items() if check.refuted}


@pytest.mark.statistical
@pytest.mark.slow
def test_right_runs_are_refused_as_rarely_as_asked_for():
    refusals = [bool(refuted(released(seed, canaries=1000), significance=0.2)) for seed in range(300)]
    assert np.mean(refusals) < 0.2 + 3 * math.sqrt(0.2 * 0.8 / 300)
    assert np.mean(refusals) > 0.05, "the share is used"
    assert not any(refuted(released(seed), significance=0.001) for seed in range(12))


ERRORS = {
    "noise / 1.1": ({"noise_std": NOISE / 1.1}, {"noise of one release", "noise of all releases"}),
    "noise / 1.25": ({"noise_std": NOISE / 1.25}, {"noise of one release", "noise of all releases"}),
    "noise / 4": ({"noise_std": NOISE / 4}, {"noise of one release", "noise of all releases"}),
    "no clipping": ({"visit": 4 * VISIT}, {"signal", "Gaussian epsilon"}),
    "twice the rounds": ({"rounds": 2 * ROUNDS}, {"releases", "signal"}),
    "twice the rate": ({"visit": 2 * VISIT}, {"signal"}),
    "noise multiplier of twice the batch": (
        {"noise_std": NOISE / 2, "visit": VISIT / 2},
        {"noise of one release", "noise of all releases"},
    ),
}


@pytest.mark.statistical
@pytest.mark.parametrize(("error", "names"), ERRORS.values(), ids=ERRORS)
def test_each_error_is_refused_by_the_checks_that_should(error, names):
    for seed in range(4):
        assert names <= refuted(released(seed, **error))


@pytest.mark.statistical
def test_noise_that_cancels_over_rounds_is_refused():
    actual, included = released(0)
    noise = np.random.default_rng(1).normal(size=actual.shape)
    noise -= 0.5 * noise.mean(axis=0)
    run = noise * NOISE / math.sqrt(1 - 0.75 / ROUNDS) + 0.0 * actual
    names = refuted((run, included))
    assert "noise of all releases" in names
    assert "noise of one release" not in names


def test_no_noise_at_all_is_refused_in_words():
    """Left-out canaries release exactly 0, which once ended in a ZeroDivisionError."""
    included = np.arange(2000) % 2 == 0
    releases = np.zeros((4, 2000)) + 0.05 * included
    claimed = Mechanism(1.0, 0.2, 4)
    made = check_mechanism(releases, included, claimed, dp_epsilon=1.0, dp_delta=1e-5, significance=0.05)
    refused = {check.name: check for check in made if check.refuted}
    assert "noise of one release (none: left-out canaries release exactly 0)" in refused
    assert {"noise of all releases", "Gaussian epsilon"} <= set(refused)
    assert all(math.isfinite(check.limit) for check in made), "files hold finite numbers"


def messages_of(taus, seed):
    """Checks that refute a right run whose rounds add up tau releases each: with their number, and without."""
    values, included = released(seed, rounds=sum(taus))
    messages = np.add.reduceat(values, np.cumsum([0, *taus[:-1]]), axis=0)
    run = messages, included
    return refuted(run, significance=0.01, counts=np.array(taus)), refuted(run, significance=0.01)


@pytest.mark.statistical
def test_releases_may_be_seen_in_fewer_messages():
    for seed in range(4):
        right, uncounted = messages_of((1, 2, 4, 6, 3), seed)
        assert not right
        assert uncounted >= {"noise of one release"}, "five messages are not 16 releases"


@pytest.mark.statistical
def test_a_run_that_stops_before_its_budget_is_spent_is_not_refused():
    for seed in range(4):
        assert not refuted(released(seed, rounds=ROUNDS // 2), significance=0.01)
        assert "noise of all releases" in refuted(released(seed, rounds=ROUNDS // 2, noise_std=NOISE / 1.25))


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["noise of one release", "noise of all releases", "signal", "Gaussian epsilon"])
@pytest.mark.quick_cases(1)
def test_the_smallest_error_named_is_seen_with_the_probability_named(name):
    """And one a quarter as far from 1 is mostly missed."""
    smallest = checks(released(0))[name].smallest_error
    assert 1 < smallest < 2

    def seen(factor):
        error = {"visit": VISIT * factor} if name == "signal" else {"noise_std": NOISE / factor}
        return np.mean([name in refuted(released(seed, **error)) for seed in range(100)])

    assert seen(smallest) > 0.95 - 3 * math.sqrt(0.95 * 0.05 / 100)
    assert seen(1 + (smallest - 1) / 4) < 0.6


@pytest.mark.statistical
def test_the_smallest_error_that_guesses_see():
    mu, count, share, needed = 0.5, 5000, 0.1, 390

    def right_guesses(factor, seed):
        rng = np.random.default_rng(seed)
        included = rng.integers(0, 2, count).astype(bool)
        scores = rng.normal(size=count) + factor * mu * included
        distance = scores - np.median(scores)
        surest = np.argsort(-np.abs(distance))[: int(share * count)]
        return int(((distance > 0) == included)[surest].sum())

    smallest = smallest_guessed_error(mu, needed, 500, share)
    assert 1 < smallest < 3
    assert np.mean([right_guesses(smallest, seed) >= needed for seed in range(200)]) > 0.88
    assert np.mean([right_guesses(0.8 * smallest, seed) >= needed for seed in range(200)]) < 0.2
    assert smallest_guessed_error(mu, 501, 500, share) == math.inf
    assert smallest_guessed_error(100.0, 300, 500, share) == 1.0


def test_values_by_hand():
    actual = noise_check("noise", 80.0, 100, 1.0, 0.05)
    assert actual.measured == pytest.approx(math.sqrt(0.8))
    assert actual.limit == pytest.approx(math.sqrt(80 / scipy.stats.chi2.ppf(0.025, 100)))
    assert not actual.refuted
    assert noise_check("noise", 60.0, 100, 1.0, 0.05).refuted
    above = noise_check("noise", 150.0, 100, 1.0, 0.05)
    assert above.limit == pytest.approx(math.sqrt(150 / scipy.stats.chi2.ppf(0.975, 100)))
    assert above.refuted
    actual = checks(released(0))
    assert actual["releases"][1:] == (16, 16, 16, False, 17 / 16)
    assert actual["signal"].claimed == pytest.approx(14.4)
    assert actual["signal"].limit < actual["signal"].measured
    assert actual["Gaussian epsilon"].limit < actual["Gaussian epsilon"].measured


def test_bad_arguments_are_refused():
    releases, included = np.ones((16, 6)), np.arange(6) < 3
    options = {"dp_epsilon": 1.0, "dp_delta": DELTA, "significance": 0.05}
    for argument, change in [
        ("releases", {"releases": np.full((16, 6), np.nan)}),
        ("dense", {"noise": {"dense": np.full((16, 1, 6), np.inf)}}),
        ("included", {"included": np.arange(6) < 5}),
        ("dp_delta", {"dp_delta": 0.0}),
        ("significance", {"significance": 1.0}),
        ("noise_std", {"claimed": CLAIMED._replace(noise_std=0.0)}),
    ]:
        given = {"releases": releases, "included": included, "claimed": CLAIMED} | options | change
        with pytest.raises(ArgumentError) as caught:
            check_mechanism(**given)
        assert caught.value.argument == argument
