"""Privacy of whole clients."""

import pytest

from jaxfl.privacy.clients import (
    SampledReleases,
    UpdateRelease,
    client_level_account,
    sampled_epsilon,
)
from jaxfl.privacy.dominating_pairs import gaussian_epsilon
from jaxfl.privacy.statements import caption, statement_text

DELTA = 1e-5
RELEASE = UpdateRelease("poisson", 0.1, clip_norm=2.0, noise_multiplier=1.2)


def spent(rounds, rate, noise):
    return client_level_account(UpdateRelease("poisson", rate, 1.0, noise), num_clients=40, dp_delta=DELTA).epsilon(
        rounds
    )


@pytest.mark.parametrize(("rounds", "rate", "noise"), [(1000, 0.01, 1.0), (50, 0.3, 2.5), (1, 0.5, 0.8)])
def test_it_is_that_of_poisson_sampled_releases(rounds, rate, noise):
    """These are held against dp-accounting in test_sampled_releases.py."""
    assert spent(rounds, rate, noise) == sampled_epsilon([SampledReleases(rate, noise, rounds)], DELTA)[0]


def test_at_participation_rate_1_it_is_that_of_the_gaussian_mechanism():
    assert spent(25, 1, 5.0) == gaussian_epsilon(1.0, DELTA)


@pytest.mark.parametrize(("target", "rate"), [(0.5, 0.02), (2.0, 0.5), (8.0, 1.0)])
def test_never_overspends_and_01_percent_less_noise_does(target, rate):
    account = client_level_account(UpdateRelease("poisson", rate, 1.0, 1.0), num_clients=40, dp_delta=DELTA)
    noise = account.calibrate(200, target)
    assert spent(200, rate, noise) <= target < spent(200, rate, 0.999 * noise)
    assert account.calibrate(0, target) == 0.0


def test_the_statement_has_relation_bound_and_what_it_rests_on():
    (stated,) = client_level_account(RELEASE, num_clients=40, dp_delta=DELTA).statements(300)
    expected = spent(300, 0.1, 1.2)
    assert (stated.bound, stated.dp_epsilon, stated.nodes) == ("proven", expected, 40)
    assert stated.neighboring_relation == "zero_out_client"
    assert "every client's whole update is clipped to the L2 norm 2" in stated.assumptions
    text = statement_text(stated._asdict())
    observer = f"against {stated.observer}"
    assert observer == "against all other clients, but not the server"
    ground = f"proven {observer} (zero out one client, δ = 1e-05"
    assert f"{ground}; 300 rounds, noise multiplier 1.2, clients drawn at rate 0.1" in text
    assert caption({"A": [stated._asdict()]})[0].startswith(f"{ground}): A: ε = ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"clip_norm": None}, "Updates are not clipped"),
        ({"noise_multiplier": 0.0}, "No noise is added"),
        ({"sampler": "fixed"}, "A fixed number of clients takes part in each round"),
    ],
)
def test_where_nothing_is_clipped_no_noise_is_added_or_a_fixed_number_takes_part_there_is_a_reason(changes, reason):
    (stated,) = client_level_account(RELEASE._replace(**changes), num_clients=40, dp_delta=DELTA).statements(300)
    assert (stated.dp_epsilon, stated.accountant) == (None, "none")
    assert stated.reason is not None
    assert stated.reason.startswith(reason)
    (nothing,) = client_level_account(RELEASE._replace(**changes), num_clients=40, dp_delta=DELTA).statements(0)
    assert (nothing.dp_epsilon, nothing.accountant) == (0.0, "nothing was released")


def test_where_all_clients_take_part_how_they_are_drawn_does_not_matter():
    both = [
        client_level_account(
            RELEASE._replace(sampler=sampler, participation_rate=1.0), num_clients=4, dp_delta=DELTA
        ).statements(9)
        for sampler in ("poisson", "fixed")
    ]
    assert both[0] == both[1]
    assert both[0][0].dp_epsilon == gaussian_epsilon(3 / 1.2, DELTA)
