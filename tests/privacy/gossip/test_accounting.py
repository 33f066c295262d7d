"""Statements, epsilons and sensitivities of what a node releases."""

import functools
import json
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
from helpers import refused
from scipy.stats import norm

from jaxfl.privacy.dominating_pairs import gaussian_delta, gaussian_epsilon
from jaxfl.privacy.gossip import (
    A_DP2_SGD,
    DP2_SGD,
    PRIVSGP,
    PRIVSGP_VR,
    Release,
    account,
    sensitivities,
)
from jaxfl.privacy.gossip.proven import constant_gradient_epsilon, proven_bound
from jaxfl.privacy.statements import statement_text

DELTA, ROUNDS, SAMPLES = 1e-5, 3120, 3125  # the paper's CIFAR-10 runs


def release(estimator="saga", sampler="poisson", *, b=64, z=1.0, J=SAMPLES, **changes):
    return Release(estimator, sampler, b, J, clip_norm=1.0, noise_std=z / b)._replace(**changes)


def proven(*args, relation, rounds=ROUNDS, **options):
    return proven_bound(release(*args, **options), relation, rounds, DELTA).dp_epsilon


def test_constant_gradients_refute_the_published_noise():
    """mu = 2 eps / (3 c2 sqrt(log 1/delta)), whatever K, J and b are."""
    for rounds, samples in ((3120, 3125), (575, 1200)):
        noise = 3 * 0.37247 * math.sqrt(rounds * math.log(1 / DELTA)) / (3 * samples)
        one = Release("saga", "uniform", 1, samples, clip_norm=1.0, noise_std=noise)
        mu = sensitivities(one, "replace_one").absent * math.sqrt(rounds) / noise
        assert mu == pytest.approx(1.5825, abs=1e-4)
        assert constant_gradient_epsilon(one, "replace_one", rounds, DELTA) == pytest.approx(7.52, abs=5e-3)
        assert constant_gradient_epsilon(one, "zero_out", rounds, DELTA) == pytest.approx(3.34, abs=5e-3)


def test_the_published_statement_says_that_it_is_refuted():
    paper = Release("saga", "uniform", 1, SAMPLES, clip_norm=10.0, noise_std=0.2259)
    published = account(PRIVSGP_VR, [paper], dp_delta=DELTA).statements(ROUNDS)[0]
    assert published.dp_epsilon == pytest.approx(3.0, abs=1e-3)
    assert any("refuted" in text and "7.51" in text for text in published.assumptions)
    sound = account(PRIVSGP_VR, [paper], dp_delta=DELTA, c2=20.0).statements(ROUNDS)[0]
    assert not any("refuted" in text for text in sound.assumptions)


def test_sensitivities():
    one = Release("saga", "poisson", 4, 20, clip_norm=3.0, noise_std=1.0)
    plain = one._replace(estimator="mini_batch")
    assert sensitivities(plain, "zero_out") == pytest.approx((0.0, 3 / 4))
    assert sensitivities(plain, "replace_one") == pytest.approx((0.0, 6 / 4))
    assert sensitivities(one, "zero_out") == pytest.approx((3 / 20, 3 * (2 / 4 - 1 / 20)))
    assert sensitivities(one, "replace_one") == pytest.approx((6 / 20, 6 * (2 / 4 - 1 / 20)))


SOUND = [
    (PRIVSGP, release("mini_batch", b=16, J=1200, z=1.2)),
    (PRIVSGP, release("mini_batch", "fixed", b=16, J=1200, z=2.0)),
    (PRIVSGP, release("mini_batch", "uniform", b=16, J=1200, z=2.0)),
    (PRIVSGP_VR, release(b=16, J=1200, z=2.0)),
    (PRIVSGP_VR, release("saga", "fixed", b=16, J=1200, z=9.0)),
    (PRIVSGP_VR, release("saga", "uniform", b=16, J=1200, z=9.0)),
    (DP2_SGD, release("mini_batch", b=1, J=1200, z=0.6)),
    (A_DP2_SGD, release("mini_batch", b=1, J=1200, z=0.6)),
]


@pytest.mark.parametrize(("accountant", "one"), SOUND)
@pytest.mark.parametrize("bound", ["proven", "published"])
def test_more_rounds_less_noise_or_fewer_entries_never_lower_it(accountant, one, bound):
    def spent(rounds=500, **changes):
        return account(accountant, one._replace(**changes), dp_delta=DELTA, num_nodes=4).epsilon(rounds, bound)

    base = spent()
    assert spent(rounds=520) >= base
    assert spent(noise_std=one.noise_std * 0.97) >= base
    assert spent(num_entries=1150) >= base
    assert spent(rounds=0) == 0.0


@pytest.mark.parametrize("sampler", ["poisson", "fixed", "uniform"])
@pytest.mark.parametrize(("accountant", "estimator"), [(PRIVSGP, "mini_batch"), (PRIVSGP_VR, "saga")])
@pytest.mark.parametrize("noise_std", [0.02, 1e-6])
def test_absurdly_little_noise_gives_a_finite_bound(accountant, estimator, sampler, noise_std):
    one = Release(estimator, sampler, 1, 1200, clip_norm=1.0, noise_std=noise_std)
    actual = account(accountant, one, dp_delta=DELTA).epsilon(3000)
    drawn_always = sensitivities(one, "replace_one").present * math.sqrt(3000) / noise_std
    assert 1e3 < actual <= gaussian_epsilon(drawn_always, DELTA)


def test_a_full_batch_is_a_gaussian():
    one = release("mini_batch", "fixed", b=50, J=50, z=30.0)
    for relation, change in (("zero_out", 1), ("replace_one", 2)):
        actual = account(PRIVSGP, one, dp_delta=DELTA).epsilon(100, "proven", relation)
        assert actual == pytest.approx(gaussian_epsilon(change / 30 * 10, DELTA), rel=1e-6)


def test_one_relation_holds_for_every_algorithm_or_is_refused():
    """Noise for a budget under one relation, whatever the sampler; a relation that is not stated is refused."""
    cases = [(PRIVSGP, "mini_batch"), (PRIVSGP_VR, "saga"), (DP2_SGD, "mini_batch"), (A_DP2_SGD, "mini_batch")]
    for sampler in ("poisson", "fixed", "uniform"):
        for accountant, estimator in cases:
            one = release(estimator, sampler, b=1, J=300)
            options: Any = {"dp_delta": DELTA, "num_nodes": 4}
            noise = {}
            for relation in ("zero_out", "replace_one"):
                std = account(accountant, one, **options).calibrate(50, 2.0, "proven", relation)
                noise[relation] = std
                actual = account(accountant, [one._replace(noise_std=std)] * 4, **options).statements(50)
                (held,) = (row for row in actual if (row.bound, row.neighboring_relation) == ("proven", relation))
                assert held.dp_epsilon == pytest.approx(2.0, rel=5e-3)
            assert noise["zero_out"] <= noise["replace_one"]
            assert noise["zero_out"] < noise["replace_one"] or sampler != "poisson"
            call = functools.partial(account(accountant, one, **options).epsilon, 50, "proven", "add_or_remove_one")
            refused(call, "neighboring_relation", "zero_out")
    one = release("saga")
    refused(
        lambda: account(PRIVSGP_VR, one, dp_delta=DELTA).epsilon(50, "published", "zero_out"),
        "neighboring_relation",
        "replace_one for the published bound",
    )


def test_a_batch_that_repeats_samples_against_enumeration():
    """Two rounds of three draws from four samples: every pair of counts."""
    b, J, z = 3, 4, 3.0
    chances = [math.comb(b, c) * 0.25**c * 0.75 ** (b - c) for c in range(b + 1)]
    moved = [(c + abs(c - b / J)) / z for c in range(b + 1)]
    actual = proven("saga", "uniform", b=b, J=J, z=z, rounds=2, relation="zero_out")
    delta = sum(
        p * r * float(gaussian_delta(actual, math.hypot(u, v)))
        for p, u in zip(chances, moved, strict=True)
        for r, v in zip(chances, moved, strict=True)
    )
    assert 0.2 * DELTA < delta <= DELTA


def test_entries_of_several_samples_need_a_bound_of_their_own():
    """One release, batches of one from ten entries of nine samples: the others of an entry tell whether it was drawn,
    so its secrecy hides nothing. What is proven for entries of one sample fails, what is given for nine holds."""
    q, z, dp_epsilon = 0.1, 2.0, 1.0
    x = np.linspace(-10.0, 20.0, 200_001)

    def density(fresh, stored):  # of an entry; other entries are zero
        return (1 - q) * norm.pdf(x, q * stored / z) + q * norm.pdf(x, (fresh - (1 - q) * stored) / z)

    upper, lower = density(9.0, -9.0), density(8.0, -8.0)  # with the sample, and without it
    exact = float(scipy.integrate.trapezoid(np.maximum(upper - math.exp(dp_epsilon) * lower, 0.0), x))
    several = Release("saga", "poisson", 1, 10, clip_norm=1.0, noise_std=z, entry_size=9)
    assert proven_bound(several, "zero_out", 1, exact).dp_epsilon >= dp_epsilon
    assert proven_bound(several._replace(entry_size=1), "zero_out", 1, exact).dp_epsilon < 0.9 * dp_epsilon


def test_entries_of_several_samples_take_the_better_of_two_bounds():
    def actual(entry_size, z):
        return proven_bound(release(b=1, J=2000, z=z, entry_size=entry_size), "zero_out", 500, DELTA)

    assert "one sample or the other" in actual(2, 2.5).accountant
    assert "averaged" in actual(30, 2.5).accountant
    assert actual(1, 2.5).dp_epsilon < actual(2, 2.5).dp_epsilon < actual(30, 2.5).dp_epsilon


def test_releases_of_several_runs_are_those_of_one_network():
    """Nodes of two seeds, 16 each: a node wakes as often as in a network of 16."""
    one = release("mini_batch", b=64, z=2.0)
    alone = account(A_DP2_SGD, [one] * 16, dp_delta=DELTA).statements(100)
    together = account(A_DP2_SGD, [one] * 32, dp_delta=[DELTA] * 32, num_nodes=16).statements(100)
    assert [each._replace(node_epsilons=2 * each.node_epsilons) for each in alone] == together
    assert alone[1].nodes == 16
    assert alone[1].dp_epsilon == account(A_DP2_SGD, one, dp_delta=DELTA, num_nodes=16).epsilon(100)


def texts_of(accountant, bound, *args, **options):
    actual = account(accountant, [release(*args, **options)], dp_delta=DELTA).statements(100)
    return "; ".join(next(one for one in actual if one.bound == accountant.bound_name(bound)).assumptions)


def test_what_bounds_a_gradient_is_among_the_assumptions():
    clipped, assumed = "gradient is clipped to the L2 norm 1,", "gradients stay below the norm 1: assumed, not enforced"
    for accountant, estimator in ((PRIVSGP_VR, "saga"), (DP2_SGD, "mini_batch"), (A_DP2_SGD, "mini_batch")):
        for bound in ("proven", "published"):
            assert clipped in texts_of(accountant, bound, estimator)
            assert "clipped" not in texts_of(accountant, bound, estimator, clip_norm=None)
            actual = texts_of(accountant, bound, estimator, assumed=True)
            assert "clipped" not in actual
            assert (assumed in actual) == (bound == "published")
    several = texts_of(PRIVSGP_VR, "proven", "saga", entry_size=3, clip_norm=0.25)
    assert "gradient is clipped to add at most 0.25 (L2) to its entry's," in several
    nodes = [release(), release(clip_norm=None)]
    for one in account(PRIVSGP_VR, nodes, dp_delta=DELTA).statements(10):
        assert "clipped" not in " ".join(one.assumptions), "not every node's are"


def test_nothing_is_proven_of_a_bound_that_is_assumed():
    published, *proven = account(DP2_SGD, [release("mini_batch", assumed=True)], dp_delta=DELTA).statements(100)
    assert published.dp_epsilon == account(DP2_SGD, release("mini_batch"), dp_delta=DELTA).epsilon(100, "published")
    assert [one.dp_epsilon for one in proven] == [None, None]
    assert all("not clipped" in (one.reason or "") for one in proven)
    assert account(DP2_SGD, release("mini_batch", assumed=True), dp_delta=DELTA).epsilon(100) == math.inf


def test_statements_of_a_run():
    actual = account(PRIVSGP_VR, [release(z=5.0)] * 3, dp_delta=DELTA).statements(100)
    assert [(one.bound, one.neighboring_relation) for one in actual] == [
        ("published", "replace_one"),
        ("proven", "zero_out"),
        ("proven", "replace_one"),
    ]
    assert all(one.nodes == 3 and one.dp_delta == DELTA and one.reason is None for one in actual)
    assert actual[1].dp_epsilon == account(PRIVSGP_VR, release(z=5.0), dp_delta=DELTA).epsilon(100)
    assert (actual[2].dp_epsilon or 0.0) > (actual[1].dp_epsilon or 0.0)
    assert json.loads(json.dumps(actual[1]._asdict()))["bound"] == "proven"


def test_dp_epsilon_is_that_of_the_worst_node():
    nodes = [release(z=5.0), release(z=4.0), release(z=5.0, J=2000)]
    deltas = [1e-5, 1e-5, 1e-4]
    each = [account(PRIVSGP_VR, r, dp_delta=d).epsilon(100) for r, d in zip(nodes, deltas, strict=True)]
    actual = account(PRIVSGP_VR, nodes, dp_delta=deltas).statements(100)[1]
    assert actual.dp_epsilon == max(each)
    assert actual.dp_delta == 1e-4


@pytest.mark.parametrize(
    ("changes", "word"), [({"clip_norm": None}, "clipped"), ({"noise_std": 0.0}, "No noise"), ({}, None)]
)
@pytest.mark.parametrize("accountant", [PRIVSGP_VR, DP2_SGD])
def test_a_reason_and_no_epsilon(accountant, changes, word):
    good = release("saga" if accountant == PRIVSGP_VR else "mini_batch", z=5.0)
    actual = account(accountant, [good, good._replace(**changes)], dp_delta=DELTA).statements(100)
    for one in actual:
        assert (one.dp_epsilon is None) == (word is not None) == (one.reason is not None)
        if word is not None:
            assert word in (one.reason or "")
            assert (one.reason or "").endswith(".")
    unclipped = good._replace(**changes)
    value = account(accountant, unclipped, dp_delta=DELTA).epsilon(100)
    assert math.isfinite(value) == (word is None)


@pytest.mark.parametrize("number", [np.float32, jnp.float32, np.array])
def test_numbers_of_any_library_count(number):
    one = release("mini_batch", z=2.0)
    same = one._replace(noise_std=number(one.noise_std), clip_norm=number(one.clip_norm))
    actual = account(PRIVSGP, same, dp_delta=number(DELTA), c2=number(0.5)).epsilon(10)
    assert actual == pytest.approx(account(PRIVSGP, one, dp_delta=DELTA).epsilon(10), rel=1e-5)
    stated = account(PRIVSGP, [same] * 2, dp_delta=number([DELTA, DELTA]) if number is np.array else DELTA).statements(
        10
    )
    assert type(stated[1].dp_delta) is type(stated[1].dp_epsilon) is float


def test_nothing_is_published_for_plain_privsgp():
    actual = account(PRIVSGP, [release("mini_batch")], dp_delta=DELTA).statements(10)
    assert actual[0].dp_epsilon is None
    assert "no privacy theorem" in (actual[0].reason or "")
    assert [one.neighboring_relation for one in actual[1:]] == ["zero_out", "replace_one"]
    fixed = account(PRIVSGP, [release("mini_batch", "fixed")], dp_delta=DELTA).statements(10)
    assert [one.neighboring_relation for one in fixed[1:]] == ["zero_out", "replace_one"]


def test_what_nobody_published_is_not_called_so():
    for accountant in (DP2_SGD, A_DP2_SGD):
        actual = account(accountant, [release("mini_batch")] * 4, dp_delta=DELTA).statements(10)
        assert [one.bound for one in actual] == ["reconstructed", "proven", "proven"]
        assert " reconstructed against all other nodes (" in statement_text(actual[0]._asdict())
    assert "at the expected number of wake-ups" in statement_text(actual[0]._asdict())
    assert account(PRIVSGP_VR, [release("saga")], dp_delta=DELTA).statements(10)[0].bound == "published"


def test_nothing_is_spent_in_0_rounds():
    silent = release("mini_batch", noise_std=0.0, clip_norm=None)
    for one in account(DP2_SGD, [silent], dp_delta=DELTA).statements(0):
        assert one.dp_epsilon == 0.0
        assert one.reason is None


def test_nothing_is_proven_for_rounded_sums_of_several_samples():
    release = Release("saga", "poisson", 2, 36, clip_norm=0.2, noise_std=1.0, entry_size=10)
    exact, rounded = (
        account(PRIVSGP_VR, [release._replace(storage=storage)], dp_delta=1e-5).statements(10)
        for storage in ("float32", "bfloat16")
    )
    assert all(one.dp_epsilon is not None for one in exact)
    assert [one.dp_epsilon is None for one in rounded] == [one.bound == "proven" for one in rounded]
    assert "rounded to bfloat16 as a sum" in str(rounded[1].reason)
    single = release._replace(entry_size=1, storage="bfloat16")
    assert account(PRIVSGP_VR, single, dp_delta=1e-5).epsilon(10) < math.inf


@pytest.mark.parametrize("estimator", ["saga", "mini_batch"])
def test_counts_of_a_large_batch_that_are_left_out_hardly_change_epsilon(estimator, monkeypatch):
    small = Release(estimator, "uniform", 60, 90, clip_norm=1.0, noise_std=0.5)
    actual = proven_bound(small, "replace_one", 10, 1e-5)
    monkeypatch.setattr("jaxfl.privacy.gossip.proven._UNLIKELY_COUNT", 0.0)
    of_all = proven_bound(small, "replace_one", 10, 1e-5)  # a bound that holds for larger counts, too, is looser
    assert 0.98 * of_all.dp_epsilon < actual.dp_epsilon <= (1 + 1e-9) * of_all.dp_epsilon
    large = small._replace(batch_size=1500, num_entries=3000, noise_std=20 / 1500)
    monkeypatch.undo()
    assert proven_bound(large, "replace_one", 10, 1e-5).dp_epsilon < 5
