"""The device refuses what the host refuses."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from toy_problem import TOY_LEDGER

from jaxfl.core.info import FatalCount
from jaxfl.training.chunks import Diverged, refuse_bad
from jaxfl.training.evaluate import Scores
from jaxfl.training.finite import refuse_bad_scores, rounds_if_good, stays_finite

NUM_ROUNDS, NUM_NODES = 3, 4


def good_numbers(num_lanes):
    """(infos, measured) with an axis of lanes in front, on the host."""
    rng = np.random.default_rng(0)

    def measurements(*shape):
        return rng.random((num_lanes, *shape), np.float32)

    def counts(*shape):
        return rng.integers(9, size=(num_lanes, *shape), dtype=np.int32)

    infos = {
        "loss": measurements(NUM_ROUNDS, NUM_NODES),
        "half": measurements(NUM_ROUNDS, NUM_NODES).astype(jnp.bfloat16),
        "consensus_distance": measurements(NUM_ROUNDS),
        "drops": counts(NUM_ROUNDS, NUM_NODES),
        "batch_overflow": 0 * counts(NUM_ROUNDS, NUM_NODES),
        "prefetch_misses": 0 * counts(NUM_ROUNDS),
    }
    parts: Any = {"loss": measurements(NUM_NODES)}, {"loss": measurements()}, counts()
    scores = Scores(*parts)
    return infos, {"test": scores, "size": {"norm": measurements(), "norms": measurements(NUM_NODES)}}


def host_refuses(infos, measured):
    try:
        refuse_bad(infos, "A", 0, first_round=1)
        refuse_bad_scores(measured, "A", 0, 0, NUM_ROUNDS)
    except (Diverged, FatalCount):
        return True
    return False


def of_lane(tree: Any, lane: int) -> Any:
    if isinstance(tree, dict):
        return {name: of_lane(value, lane) for name, value in tree.items()}
    return Scores(*(of_lane(part, lane) for part in tree)) if isinstance(tree, Scores) else tree[lane]


BAD = [
    *((name, value) for name in ("loss", "half", "consensus_distance") for value in (np.nan, np.inf, -np.inf)),
    *((name, value) for name in ("batch_overflow", "prefetch_misses") for value in (1, -1)),
    *(("nodes", np.nan), ("average_model", np.inf), ("norm", np.nan), ("norms", -np.inf)),
]
GOOD = [("loss", np.finfo(np.float32).max), ("drops", 2**31 - 1), ("num_samples", 0)]


@pytest.mark.parametrize(
    ("name", "value", "is_bad"), [*((*case, True) for case in BAD), *((*case, False) for case in GOOD)]
)
def test_the_device_refuses_what_the_host_refuses(name, value, is_bad):
    """Check lanes along an axis, and each lane without one."""
    infos, measured = good_numbers(2)
    for place in (infos, measured["size"]):
        if name in place:
            place[name][(1, *(-1 for _ in place[name].shape[1:]))] = value
    scores = measured["test"]
    if name in ("nodes", "average_model"):
        getattr(scores, name)["loss"][1] = value
    if name == "num_samples":
        scores.num_samples[1] = value
    refused = [host_refuses(of_lane(infos, lane), of_lane(measured, lane)) for lane in (0, 1)]
    assert refused == [False, is_bad]
    for lane in (0, 1):
        alone = rounds_if_good(of_lane(infos, lane), of_lane(measured, lane), np.bool_(True), np.int32(7))
        assert (alone.dtype, alone.shape, int(alone)) == (jnp.int32, (), 0 if refused[lane] else 7)
    together = rounds_if_good(infos, measured, np.array([True, True]), np.int32(7))
    assert int(together) == (0 if refused[1] else 7)


def test_lanes_that_have_ended_are_not_asked():
    infos, measured = good_numbers(3)
    infos["loss"][0, 0, 0] = measured["size"]["norm"][1] = np.nan
    infos["batch_overflow"][0, 1, 2] = 5
    for ended, rounds in (((), 0), ((0,), 0), ((1,), 0), ((0, 1), 7)):
        runs = np.array([lane not in ended for lane in range(3)])
        assert int(rounds_if_good(infos, measured, runs, np.int32(7))) == rounds


def test_without_an_evaluation_infos_decide():
    infos, _ = good_numbers(1)
    assert int(rounds_if_good(infos, None, np.array([True]), np.int32(7))) == 7
    infos["loss"][0, 2, 1] = np.nan
    assert int(rounds_if_good(infos, None, np.array([True]), np.int32(7))) == 0


def test_costs_that_a_ledger_makes_of_counts_stay_finite_or_may_not():
    assert stays_finite(None)
    assert stays_finite(TOY_LEDGER)
    assert stays_finite(TOY_LEDGER._replace(uplink_bits_per_second=np.inf))  # takes no time
    gradient = TOY_LEDGER.gradient._replace(joules=np.nan)
    forward = TOY_LEDGER.forward._replace(simulated_seconds=1e300)
    for change in ({"transmit_watts": np.inf}, {"gradient": gradient}, {"forward": forward}):
        assert not stays_finite(TOY_LEDGER._replace(**change))
