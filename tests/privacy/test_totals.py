"""Several runs on the same data: their releases composed, against single accounts and against kinds by hand."""

import numpy as np
import pytest

from jaxfl.privacy import PRIVSGP, PRIVSGP_VR, Release, clients, gossip, tracking
from jaxfl.privacy.clients.sampled_releases import SampledReleases, sampled_epsilon
from jaxfl.privacy.totals import total_epsilons

PLAIN = Release("mini_batch", "poisson", 10, 200, clip_norm=2.0, noise_std=0.4)  # noise multiplier 2


def of(release, accountant=PRIVSGP, nodes=2):
    each = release if isinstance(release, list) else [release] * nodes
    return gossip.account(accountant, each, dp_delta=1e-4)


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
@pytest.mark.parametrize("estimator", ["mini_batch", "saga"])
def test_equal_runs_cost_as_much_as_one_with_all_their_rounds(estimator, sampler, relation):
    accountant = PRIVSGP if estimator == "mini_batch" else PRIVSGP_VR
    account = of(PLAIN._replace(estimator=estimator, sampler=sampler), accountant)
    expected = account.epsilon(70, "proven", relation)
    assert total_epsilons([(account, 40), (account, 20), (account, 10)], relation) == [expected] * 2
    assert expected < sum(account.epsilon(rounds, "proven", relation) for rounds in (40, 20, 10))


@pytest.mark.parametrize(("relation", "exchange"), [("zero_out", False), ("replace_one", True)])
def test_unequal_runs_compose_as_kinds(relation, exchange):
    other = of(PLAIN._replace(noise_std=0.8, batch_size=20))
    kinds = [SampledReleases(0.05, 2.0, 60), SampledReleases(0.1, 8.0, 30)]
    expected, _ = sampled_epsilon(kinds, 1e-4, exchange=exchange)
    actual = total_epsilons([(of(PLAIN), 40), (other, 30), (of(PLAIN), 20)], relation)
    assert actual == pytest.approx([expected] * 2)
    assert of(PLAIN).epsilon(60, "proven", relation) < expected


def test_clients_and_whole_clients():
    release = clients.ClientRelease("poisson", 200, 10, clip_norm=1.0, noise_multiplier=2.0)
    account = clients.account([release] * 3, dp_delta=1e-4)
    expected, _ = sampled_epsilon([SampledReleases(0.05, 2.0, 60)], 1e-4)
    assert total_epsilons([(account, 40), (account, 20)], "zero_out") == [expected] * 3
    assert total_epsilons([(account, 40), (of(PLAIN, nodes=3), 20)], "zero_out") == [expected] * 3
    update = clients.UpdateRelease("poisson", 0.05, clip_norm=1.0, noise_multiplier=2.0)
    whole = clients.client_level_account(update, num_clients=3, dp_delta=1e-4)
    assert total_epsilons([(whole, 40), (whole, 20)], whole.claims[0].relation) == [expected]


def test_nodes_that_differ_count_one_by_one_where_a_sample_stays():
    account = of([PLAIN, PLAIN._replace(num_entries=100)])
    small, large = total_epsilons([(account, 40), (account, 20)], "zero_out") or (0, 0)
    assert small < large == account.epsilon(60)
    moved = total_epsilons([(account, 40), (account, 20)], "zero_out", nodes_agree=False)
    assert moved == pytest.approx([large], rel=1e-3)  # the smaller node in every run
    loud = of([PLAIN._replace(noise_std=0.2), PLAIN._replace(num_entries=100)])  # less noise, or a larger rate
    (either,) = total_epsilons([(loud, 40), (loud, 20)], "zero_out", nodes_agree=False) or (0,)
    dominated = of(PLAIN._replace(noise_std=0.2, num_entries=100))
    assert loud.epsilon(60) < either == pytest.approx(dominated.epsilon(60), rel=1e-3)
    tables = of([PLAIN._replace(estimator="saga", num_entries=size) for size in (200, 100)], PRIVSGP_VR)
    assert total_epsilons([(tables, 40), (tables, 20)], "zero_out", nodes_agree=False) is None
    alike = total_epsilons([(of(PLAIN), 40), (of(PLAIN), 20)], "zero_out", nodes_agree=False)
    assert alike == [of(PLAIN).epsilon(60)]


def test_what_is_not_known_to_compose():
    table = of(PLAIN._replace(estimator="saga"), PRIVSGP_VR)
    assert total_epsilons([(table, 40), (of(PLAIN), 20)], "zero_out") is None
    assert total_epsilons([(of(PLAIN._replace(noise_std=0.0)), 40), (of(PLAIN), 20)], "zero_out") is None
    assert total_epsilons([(of(PLAIN), 40), (of(PLAIN, nodes=3), 20)], "zero_out") is None
    assert total_epsilons([(of(PLAIN), 40), (of(PLAIN), 20)], "add_or_remove_one") is None
    schedule = tracking.polynomial_schedule(10, state_noise_exponent=0.1, tracker_noise_exponent=0.1)
    weights = {"state_in_weights": np.ones(2), "tracker_out_weights": np.ones(2), "dp_delta": 1e-4}
    noisy = tracking.TrackingRelease(clip_norm=1.0, distribution="gaussian")
    account = tracking.gradient_tracking_account(schedule, noisy, **weights)
    assert total_epsilons([(account, 10), (account, 10)], "replace_one") is None
