"""Arguments that no accountant takes: every call is refused by the name of the argument that is wrong."""

from typing import Any

import numpy as np
import pytest
from helpers import refusals, refused

from jaxfl.privacy import Grid, clients, gossip, tracking
from jaxfl.privacy.gossip import A_DP2_SGD, DP2_SGD, PRIVSGP, PRIVSGP_VR, Release
from jaxfl.privacy.tracking import TrackingAgent, TrackingRelease, TrackingSchedule

DELTA: dict[str, Any] = {"dp_delta": 1e-5}
SEVERAL: Any = [0.1]  # where one number belongs
NAME: Any = "PrivSGP"  # where an accountant belongs

PLAIN = Release("mini_batch", "poisson", 16, 1200, clip_norm=2.0, noise_std=0.5)
TABLE = PLAIN._replace(estimator="saga")


def of_table(**changes):
    return lambda: gossip.account(PRIVSGP_VR, TABLE._replace(**changes), **DELTA)


def of_plain(accountant=PRIVSGP, releases: Any = PLAIN, **changes):
    return lambda: gossip.account(accountant, releases, **{**DELTA, **changes})


def most(**changes):
    """A limit of no rounds excuses no argument."""
    good = {"target_epsilon": 3.0, "limit": 0}
    return lambda: gossip.account(PRIVSGP, PLAIN, **DELTA).most_rounds(**{**good, **changes})


test_of_gossip = refusals(
    [
        (of_table(sampler="random"), "sampler"),
        (of_table(estimator="svrg"), "estimator"),
        (of_table(estimator="mini_batch"), "estimator"),
        (of_table(storage="float16"), "storage"),
        (of_table(batch_size=4000), "batch_size"),
        (of_table(batch_size=0), "batch_size"),
        (of_table(clip_norm=-1.0), "clip_norm"),
        (of_table(clip_norm=np.ones(2)), "clip_norm"),
        (of_table(noise_std=-1.0), "noise_std"),
        (of_table(noise_std=None), "noise_std"),
        (of_table(entry_size=0), "entry_size"),
        (of_table(grid=Grid(7, 10)), "bits"),
        (of_table(grid=Grid(17, 10)), "bits"),
        (of_table(grid=Grid(12, 0)), "num_params"),
        (of_plain(releases=[]), "releases"),
        (of_plain(releases=[PLAIN], dp_delta=[1e-5] * 2), "dp_delta"),
        (of_plain(releases=[PLAIN], num_nodes=0), "num_nodes"),
        (of_plain(c2=SEVERAL), "c2"),
        (of_plain(dp_delta=1.0), "dp_delta"),
        (of_plain(DP2_SGD, PLAIN._replace(entry_size=2)), "entry_size"),
        (of_plain(A_DP2_SGD), "num_nodes"),
        (of_plain(NAME), "accountant"),
        (of_plain(releases=PLAIN._replace(batch_size=0)), "batch_size"),
        (lambda: gossip.account(PRIVSGP, PLAIN, **DELTA).statements(-1), "num_rounds"),
        (lambda: gossip.account(PRIVSGP, PLAIN, **DELTA).epsilon(-1), "num_rounds"),
        (lambda: gossip.account(PRIVSGP, PLAIN, **DELTA).calibrate(-1, 1.0), "num_rounds"),
        (lambda: gossip.account(PRIVSGP, PLAIN._replace(noise_std=0.0), **DELTA).calibrate(10, 1.0), "bound"),
        (most(bound="guessed"), "bound"),
        (most(target_epsilon=[1.0, 2.0]), "target_epsilon"),
        (most(target_epsilon=0.0), "target_epsilon"),
        (most(limit=-1), "limit"),
        (lambda: gossip.sensitivities(TABLE, "swap"), "neighboring_relation"),
        (lambda: gossip.sensitivities(TABLE._replace(clip_norm=None), "zero_out"), "clip_norm"),
    ]
)


def theory(**changes):
    good = {"dp_epsilon": 3.0, **DELTA, "num_nodes": 3}
    return lambda: gossip.optimal_iterations(gossip.CIFAR10_CONSTANTS, **{**good, **changes})


test_of_the_theory = refusals(
    [
        (theory(dp_epsilon=[1.0, 2.0]), "dp_epsilon"),
        (theory(dp_epsilon=0.0), "dp_epsilon"),
        (theory(dp_delta=2.0), "dp_delta"),
        (theory(c2=0.0), "c2"),
        (theory(num_nodes=0), "num_nodes"),
    ]
)

CLIENT = clients.ClientRelease("poisson", num_samples=5000, batch_size=75, clip_norm=0.1, noise_multiplier=1.1)
PRIVATE: dict[str, Any] = {"estimates": "private", "estimate_batch_size": 5, "estimate_noise_multiplier": 2.0}
BAD_CLIENTS = [
    ({"num_samples": 0}, "num_samples"),
    ({"batch_size": 0}, "batch_size"),
    ({"batch_size": 5001}, "batch_size"),
    ({"clip_norm": 0.0}, "clip_norm"),
    ({"noise_multiplier": -1.0}, "noise_multiplier"),
    ({"sampler": "fixed"}, "sampler"),
    ({"estimates": "some"}, "estimates"),
    ({**PRIVATE, "estimate_batch_size": 0}, "estimate_batch_size"),
    ({**PRIVATE, "estimate_batch_size": 6000}, "estimate_batch_size"),
    ({**PRIVATE, "estimate_noise_multiplier": -1.0}, "estimate_noise_multiplier"),
    ({"estimate_batch_size": 5}, "estimate_batch_size"),
    ({"estimates": "as_published", "estimate_noise_multiplier": 2.0}, "estimate_noise_multiplier"),
]


@pytest.mark.parametrize(("changes", "argument"), BAD_CLIENTS)
def test_of_a_clients_release(changes, argument):
    bad = CLIENT._replace(**changes)
    refused(lambda: clients.account([CLIENT, bad], **DELTA), argument)


def of_client(releases: Any = CLIENT, rounds=1, claim=(), **changes):
    return lambda: clients.account(releases, **{**DELTA, **changes}).epsilon(rounds, *claim)


def of_iterations(**changes):
    good = {"sampling_rate": 0.015, "noise_multiplier": 1.1, **DELTA}
    return lambda: clients.local_iterations_epsilon(**{"num_iterations": 10, **good, **changes})


def of_updates(settings=DELTA, **changes):
    release = clients.UpdateRelease("poisson", 0.1, clip_norm=2.0, noise_multiplier=1.2)
    return lambda: clients.client_level_account(release._replace(**changes), **{"num_clients": 4, **DELTA, **settings})


test_of_clients = refusals(
    [
        (of_client(rounds=-1), "num_rounds"),
        (of_client(counts=lambda _: (-1, 0)), "num_iterations"),
        (of_client(num_estimates=3), "num_estimates"),
        (of_client(claim=["tight"]), "bound"),
        (of_client(dp_delta=1.0), "dp_delta"),
        (of_client(claim=["published", "zero_out"]), "neighboring_relation"),
        (of_client([]), "releases"),
        (of_client(num_clients=0), "num_clients"),
        (of_iterations(sampling_rate=0.0), "sampling_rate"),
        (of_iterations(sampling_rate=1.1), "sampling_rate"),
        (of_iterations(noise_multiplier=0.0), "noise_multiplier"),
        (of_iterations(dp_delta=0.0), "dp_delta"),
        (of_iterations(dp_delta=1.5), "dp_delta"),
        (of_iterations(num_iterations=-1), "num_iterations"),
        (of_updates(sampler="uniform"), "sampler"),
        (of_updates(participation_rate=0.0), "participation_rate"),
        (of_updates(participation_rate=1.1), "participation_rate"),
        (of_updates(clip_norm=-1.0), "clip_norm"),
        (of_updates(noise_multiplier=-0.1), "noise_multiplier"),
        (of_updates({"dp_delta": 0.0}), "dp_delta"),
        (of_updates({"num_clients": 0}), "num_clients"),
        (lambda: of_updates()().most_rounds(1.0, 5, "published"), "bound"),
    ]
)


def test_a_sample_that_is_added_or_removed_is_one_whose_gradient_is_0():
    refused(of_client(claim=["proven", "add_or_remove_one"]), "neighboring_relation", "zero_out")


K, NODES = 30, 3
SCHEDULE = TrackingSchedule(0.3, 0.2, 0.25, 4, np.ones((NODES, K + 1)), np.ones((NODES, K + 1)))
SHORT = TrackingSchedule(0.3, 0.2, 0.25, 4, np.ones(5), np.ones(5))
UNHEARD = SHORT._replace(state_noise_scale=np.zeros(5))
UNIT = TrackingAgent(1.0, 1.0, 1.0)
RELEASE = TrackingRelease(clip_norm=0.75)
WEIGHTS: dict[str, Any] = {"state_in_weights": np.ones(NODES), "tracker_out_weights": np.ones(NODES)}
MOVES = tracking.proven_sensitivities(SHORT, UNIT)


def tracked(num_rounds=K, schedule=SCHEDULE, options=DELTA, **changes):
    release = RELEASE._replace(**changes)
    return lambda: tracking.gradient_tracking_account(schedule, release, **{**WEIGHTS, **options}).statements(
        num_rounds
    )


def quantized(num_rounds=K, quantization_step=1.0, **changes):
    release, options = RELEASE._replace(**changes), {"num_nodes": NODES, "quantization_step": quantization_step}
    return lambda: tracking.quantization_account(SCHEDULE, release, **options).statements(num_rounds)


def scheduled(num_iterations=9, horizon_offset=0, **exponents):
    noise = {"state_noise_exponent": 0.1, "tracker_noise_exponent": 0.1, **exponents}
    return lambda: tracking.polynomial_schedule(num_iterations, horizon_offset=horizon_offset, **noise)


test_of_tracking = refusals(
    [
        (tracked(K + 2), "num_rounds"),
        (tracked(-1), "num_rounds"),
        (quantized(-1), "num_rounds"),
        (tracked(clip_norm=0.0), "clip_norm"),
        (tracked(gradient_at="tracker"), "gradient_at"),
        (tracked(distribution="cauchy"), "distribution"),
        (quantized(distribution="gaussian"), "distribution"),
        (quantized(quantization_step=0.0), "quantization_step"),
        (tracked(options={"num_local_samples": [100] * NODES}), "dp_delta"),
        (tracked(options={}, distribution="gaussian"), "dp_delta"),
        (tracked(options={"num_local_samples": [100, 3, 100], **DELTA}), "num_local_samples"),
        (tracked(options={"num_local_samples": [100] * 2, **DELTA}), "num_local_samples"),
        (tracked(options={"dp_delta": 1.0}), "dp_delta"),
        (tracked(options={"tracker_out_weights": np.ones(2)}), "state_in_weights"),
        (tracked(schedule=SCHEDULE._replace(state_noise_scale=np.ones((2, K + 1)))), "state_noise_scale"),
        (tracked(schedule=SCHEDULE._replace(tracker_noise_scale=-np.ones(K + 1))), "tracker_noise_scale"),
        (lambda: tracking.perturbed_state_account(SCHEDULE, RELEASE, num_nodes=0), "num_nodes"),
        (scheduled(0), "num_iterations"),
        (scheduled(horizon_offset=2), "horizon_offset"),
        (
            lambda: tracking.exponential_schedule(9, state_noise_base=0.0, tracker_noise_base=1.0),
            "state_noise_base",
        ),
        (
            lambda: tracking.published_sensitivities(SHORT, UNIT._replace(gradient_l1_change=0.0)),
            "gradient_l1_change",
        ),
        (lambda: tracking.published_sensitivities(SHORT, UNIT._replace(state_in_weight=-1.0)), "state_in_weight"),
        (lambda: tracking.participation_epsilon(SHORT, UNIT, num_local_samples=100, dp_delta=0.0), "dp_delta"),
        (lambda: tracking.participation_epsilon(SHORT, UNIT, num_local_samples=0, **DELTA), "num_local_samples"),
        (lambda: tracking.cumulative_epsilon(UNHEARD, MOVES), "state_noise_scale"),
        (lambda: tracking.shifted_epsilon(np.ones(2), 0.0), "dp_delta"),
        (lambda: tracking.gaussian_shift(UNHEARD, MOVES), "state_noise_scale"),
        (lambda: tracking.shifted_epsilon(np.ones(2), 1.0), "dp_delta"),
        (lambda: tracking.joint_shift(UNHEARD, UNIT), "state_noise_scale"),
        (lambda: tracking.joint_shift(SHORT, UNIT._replace(tracker_out_weight=-1.0)), "tracker_out_weight"),
        (lambda: tracking.laplace_epsilon_at_delta(SHORT, UNIT, dp_delta=0.0), "dp_delta"),
        (lambda: tracking.laplace_epsilon_at_delta(SHORT, UNIT, num_local_samples=3, **DELTA), "num_local_samples"),
        (lambda: tracking.laplace_epsilon_at_delta(UNHEARD, UNIT, **DELTA), "state_noise_scale"),
        (lambda: tracking.perturbed_state_sensitivities(SHORT, 0.0), "gradient_change"),
        (lambda: tracking.output_sensitivities(SHORT, -1.0), "gradient_change"),
        (lambda: tracking.quantization_deltas(MOVES, quantization_step=0.0), "quantization_step"),
        (lambda: tracking.cumulative_delta_curve(np.array([0.5, 1.5])), "deltas"),
        (lambda: tracking.cumulative_delta_curve(np.zeros(2), composition="max"), "composition"),
    ]
)
