"""Numbers that end a lane."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl.core.info import FatalCount
from jaxfl.training.case import Scores
from jaxfl.training.chunks import Diverged, refuse_bad
from jaxfl.training.measures import refuse_bad_scores

NUM_ROUNDS, NUM_NODES = 3, 4


def good_numbers():
    """(infos, measured) of one lane, on the host."""
    rng = np.random.default_rng(0)

    def measurements(*shape):
        return np.array(rng.random(shape, np.float32))

    def counts(*shape):
        return np.array(rng.integers(9, size=shape, dtype=np.int32))

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


def refuses(infos, measured):
    try:
        refuse_bad(infos, "A", 0, first_round=1, fatal=("batch_overflow", "prefetch_misses"))
        refuse_bad_scores(measured, "A", 0, 0, NUM_ROUNDS)
    except (Diverged, FatalCount):
        return True
    return False


BAD = [
    *((name, value) for name in ("loss", "half", "consensus_distance") for value in (np.nan, np.inf, -np.inf)),
    *((name, value) for name in ("batch_overflow", "prefetch_misses") for value in (1, -1)),
    *(("nodes", np.nan), ("average_model", np.inf), ("norm", np.nan), ("norms", -np.inf)),
]
GOOD = [("loss", np.finfo(np.float32).max), ("drops", 2**31 - 1), ("num_samples", 0)]


@pytest.mark.parametrize(
    ("name", "value", "is_bad"), [*((*case, True) for case in BAD), *((*case, False) for case in GOOD)]
)
def test_a_number_that_is_not_finite_or_must_be_0_is_refused(name, value, is_bad):
    infos, measured = good_numbers()
    assert not refuses(infos, measured)
    for place in (infos, measured["size"]):
        if name in place:
            place[name][tuple(-1 for _ in place[name].shape)] = value
    scores = measured["test"]
    if name in ("nodes", "average_model"):
        getattr(scores, name)["loss"][...] = value
    if name == "num_samples":
        scores.num_samples[...] = value
    assert refuses(infos, measured) == is_bad
