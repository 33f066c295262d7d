"""Lanes of a sweep share what their seeds share: one pool, hashed once, and their keys in a few calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_problem import toy_case

from jaxfl.core.keys import digest
from jaxfl.frame import Clients, Data
from jaxfl.training.lanes import Lane, keys_of


@pytest.mark.parametrize("secret", [None, jax.random.key(7)])
def test_keys_of_lanes_are_those_of_each(secret):
    lanes = [Lane(name, toy_case(), seed, f"data of {seed}", secret=secret) for name in "AB" for seed in (0, 3, 2**31)]
    together = keys_of(lanes)
    for index, lane in enumerate(lanes):
        for half, whole in zip(lane.key, together, strict=True):
            assert whole[index] == half
    assert len(np.unique(jax.random.key_data(together.own), axis=0)) == len(lanes)


def test_seeds_share_one_pool_whose_hash_is_made_once(monkeypatch):
    first, second = map(Clients(nodes=4).data(Data()), (0, 1))
    assert (first.inputs is second.inputs, first.labels is second.labels) == (True, True)
    assert not jnp.array_equal(first.indices, second.indices)
    hashed = {}
    assert [digest(data, hashed) for data in (first, second)] == [digest(first), digest(second)]
    monkeypatch.setattr(np, "ascontiguousarray", lambda leaf: pytest.fail("hashed again"))
    assert digest(second, hashed) == digest(first._replace(**second._asdict()), hashed)
