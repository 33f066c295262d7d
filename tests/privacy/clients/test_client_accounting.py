"""Clients' local iterations and estimates: published and proven, budgets, statements."""

import re

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

from jaxfl.core import ArgumentError
from jaxfl.privacy.clients import (
    WITHOUT_NOISE,
    ClientRelease,
    SampledReleases,
    account,
    local_iterations_epsilon,
    renyi_divergences,
    sampled_epsilon,
)
from jaxfl.privacy.statements import rounded_up, statement_text

CIFAR = ClientRelease("poisson", num_samples=5000, batch_size=75, clip_norm=0.1, noise_multiplier=1.1)
PRIVATE = CIFAR._replace(estimate_batch_size=150, estimate_noise_multiplier=6.0, estimates="private")
AS_PUBLISHED = CIFAR._replace(estimates="as_published")
DELTA = 1e-5


@pytest.mark.parametrize("num_iterations", [0, 1, 78, 1585])
@pytest.mark.parametrize("release", [CIFAR, CIFAR._replace(num_samples=80, noise_multiplier=0.7)])
def test_the_published_epsilon_is_exactly_that_of_local_iterations_epsilon(release, num_iterations):
    rate = release.batch_size / release.num_samples
    settings = {"sampling_rate": rate, "noise_multiplier": release.noise_multiplier, "dp_delta": DELTA}
    expected = local_iterations_epsilon(num_iterations, **settings)
    assert account(release, dp_delta=DELTA).epsilon(num_iterations, "published") == expected


def test_private_estimates_add_their_divergence_at_each_order():
    """The same orders in dp-accounting, before either is converted to epsilon."""
    accountant = RdpAccountant(orders=list(range(2, 65)))
    for rate, noise, count in ((75 / 5000, 1.1, 300), (150 / 5000, 6.0, 63)):
        event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise))
        accountant.compose(dp_event.SelfComposedDpEvent(event, count))
    converted = np.asarray(accountant._rdp) - np.log(DELTA) / (np.arange(2, 65) - 1)
    assert account(PRIVATE, dp_delta=DELTA, num_estimates=63).epsilon(300, "published") == pytest.approx(
        converted.min(), rel=1e-6
    )


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_private_estimates_compose_with_iterations(relation):
    kinds = [SampledReleases(75 / 5000, 1.1, 317), SampledReleases(150 / 5000, 6.0, 63)]
    expected, _ = sampled_epsilon(kinds, DELTA, exchange=relation == "replace_one")
    actual = account(PRIVATE, dp_delta=DELTA, num_estimates=63).epsilon(317, "proven", relation)
    assert actual == expected
    alone = [sampled_epsilon([kind], DELTA, exchange=relation == "replace_one")[0] for kind in kinds]
    assert max(alone) < actual < sum(alone)


def test_where_delta_is_too_small_for_a_grid_renyi_dp_is_proven():
    actual = account(PRIVATE, dp_delta=1e-14, num_estimates=63).epsilon(317)
    assert actual == account(PRIVATE, dp_delta=1e-14, num_estimates=63).epsilon(317, "published")
    proven = account([PRIVATE], dp_delta=1e-14, num_estimates=63).statements(317)[1]
    assert proven.accountant == "Renyi DP of local iterations and estimates, integer orders 2 to 64"
    assert (
        "privacy loss distribution"
        in account([PRIVATE], dp_delta=DELTA, num_estimates=63).statements(317)[1].accountant
    )
    divergences = renyi_divergences(sampling_rate=0.015, noise_multiplier=1.1) * 317
    assert actual > (divergences - np.log(1e-14) / np.arange(1, 64)).min()


@pytest.mark.parametrize("seed", range(6))
def test_no_client_spends_more_than_its_budget_and_one_more_iteration_overspends(seed):
    rng = np.random.default_rng(seed)
    batch_size, bound = int(rng.integers(20, 60)), str(rng.choice(["published", "proven"]))
    sizes = rng.integers(batch_size, 6000, int(rng.integers(1, 5)))
    estimates = {}
    if rng.random() < 0.5:
        noise, most = float(rng.uniform(2, 20)), int(min(sizes))
        estimates = {"estimates": "private", "estimate_noise_multiplier": noise}
        estimates["estimate_batch_size"] = int(rng.integers(1, most + 1))
    noise_multiplier = float(rng.uniform(0.6, 4))
    releases = [ClientRelease("poisson", int(size), batch_size, 1.0, noise_multiplier, **estimates) for size in sizes]
    num_rounds, target = int(rng.integers(0, 30)), float(rng.uniform(0.3, 8))
    charged = num_rounds if estimates else 0
    relation = None if bound == "published" else str(rng.choice(["zero_out", "replace_one"]))
    most = account(releases, num_estimates=charged, dp_delta=DELTA).most_rounds(target, 50_000, bound, relation)
    assert most < 50_000

    def largest(num_iterations):
        accounts = [account(release, num_estimates=charged, dp_delta=DELTA) for release in releases]
        return max(one.epsilon(num_iterations, bound, relation) for one in accounts)

    assert most == 0 or largest(most) <= target
    assert largest(most + 1) > target


def test_estimates_that_alone_exceed_the_budget_are_named():
    loud = PRIVATE._replace(estimate_noise_multiplier=0.5)
    with pytest.raises(ArgumentError, match="estimate_noise_multiplier: must leave 60 estimates within 2"):
        account([loud], dp_delta=DELTA, num_estimates=60).calibrate(9, 2.0)


def test_no_budget_pays_for_estimates_without_noise():
    assert account([AS_PUBLISHED], num_estimates=63, dp_delta=DELTA).most_rounds(2.0, 10_000) == 0
    assert 0 < account([PRIVATE], num_estimates=63, dp_delta=DELTA).most_rounds(2.0, 10_000) < 716


class TestStatements:
    def test_dp_epsilon_is_that_of_the_client_with_the_largest_node_epsilons_those_of_all(self):
        sizes = (5000, 400, 900)
        releases = [CIFAR._replace(num_samples=size) for size in sizes]
        stated = account(releases, dp_delta=DELTA).statements(100)
        relations = [("published", "add_or_remove_one"), ("proven", "zero_out"), ("proven", "replace_one")]
        assert [(one.bound, one.neighboring_relation) for one in stated] == relations
        for one, (bound, relation) in zip(stated, relations, strict=True):
            accounts = [account(release, dp_delta=DELTA) for release in releases]
            assert one.node_epsilons == tuple(each.epsilon(100, bound, relation) for each in accounts)
            assert one.dp_epsilon == max(one.node_epsilons) == one.node_epsilons[1]
            assert (one.dp_delta, one.nodes, one.reason) == (DELTA, 3, None)
            assert "every sample's gradient is clipped to the L2 norm 0.1" in one.assumptions

    def test_where_estimates_have_no_noise_nothing_has_an_epsilon(self):
        """tau of the next round follows from them, and the models tell it; a note has what T fixed iterations cost."""
        fixed = account([CIFAR] * 3, dp_delta=DELTA).statements(317)
        for one, alone in zip(
            account([AS_PUBLISHED] * 3, dp_delta=DELTA, num_estimates=63).statements(317), fixed, strict=True
        ):
            assert (one.dp_epsilon, one.node_epsilons, one.reason) == (None, (), WITHOUT_NOISE)
            assert re.fullmatch(rf"no {one.bound} ε \(.*\): {WITHOUT_NOISE}", statement_text(one._asdict()))
            assert any(rounded_up(alone.dp_epsilon or 0.0, 4) in text for text in one.assumptions)
        assert account(AS_PUBLISHED, dp_delta=DELTA, num_estimates=63).epsilon(317, "published") == np.inf

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"clip_norm": None}, "Gradients are not clipped"),
            ({"noise_multiplier": 0.0}, "No noise is added, so the releases"),
            ({"estimate_noise_multiplier": 0.0}, "No noise is added to the estimates"),
        ],
    )
    def test_where_nothing_is_clipped_or_no_noise_is_added_there_is_a_reason_and_no_epsilon(self, changes, reason):
        for one in account([PRIVATE, PRIVATE._replace(**changes)], dp_delta=DELTA, num_estimates=2).statements(10):
            assert (one.dp_epsilon, one.node_epsilons, one.accountant) == (None, (), "none")
            assert one.reason is not None
            assert one.reason.startswith(reason)

    def test_of_a_run_that_chose_its_iterations_the_proven_epsilon_is_that_of_its_budget(self):
        """The iterations that ran are an outcome, and no bound that was fixed before."""
        published, *proven = account([PRIVATE], dp_delta=DELTA, num_estimates=20, budget=(317, 63)).statements(100)
        assert (
            published.dp_epsilon == account([PRIVATE], dp_delta=DELTA, num_estimates=20).statements(100)[0].dp_epsilon
        )
        for one, whole in zip(
            proven, account([PRIVATE], dp_delta=DELTA, num_estimates=63).statements(317)[1:], strict=True
        ):
            assert one.dp_epsilon == whole.dp_epsilon
            assert any("its budget of 317 local iterations; 100 ran" in text for text in one.assumptions)
        assert {one.dp_epsilon for one in account([PRIVATE], dp_delta=DELTA, budget=(317, 63)).statements(0)} == {0.0}

    @pytest.mark.parametrize("release", [CIFAR, PRIVATE, CIFAR._replace(clip_norm=None, noise_multiplier=0.0)])
    def test_nothing_is_spent_in_0_iterations(self, release):
        for one in account([release], dp_delta=DELTA).statements(0):
            assert (one.dp_epsilon, one.node_epsilons, one.accountant) == (0.0, (0.0,), "nothing was released")
