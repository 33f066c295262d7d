"""Training over devices: what lies where, in this process and in one whose CPU has eight of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusals
from processes import printed

from jaxfl.core import FederatedData
from jaxfl.core.types import PoolParts
from jaxfl.gradients.estimator import gather
from jaxfl.training import Placement
from jaxfl.training.sharding import cut_by_owner

DATA = FederatedData(
    jnp.arange(10.0).reshape(5, 2),
    jnp.arange(5),
    jnp.array([[4, 1, 0], [1, 0, 0], [2, 4, 0], [3, 2, 4]]),  # the sample 4 is at nodes 0, 2 and 3
    jnp.array([2, 1, 2, 3]),
)


@pytest.fixture(scope="module")
def actual(tmp_path_factory):
    """Output of `over_devices.py`."""
    return printed("over_devices.py", tmp_path_factory.mktemp("runs"), num_devices=8, seconds=1800)


@pytest.mark.parametrize("num_shares", [1, 2, 4])
def test_every_nodes_samples_are_the_same_in_the_same_order(num_shares):
    cut = cut_by_owner(DATA, num_shares)
    for node, size in enumerate(DATA.sizes.tolist()):
        for name in ("inputs", "labels"):
            mine, own = getattr(cut, name)[cut.indices[node]], getattr(DATA, name)[DATA.indices[node]]
            np.testing.assert_array_equal(mine[:size], own[:size])


def test_each_nodes_samples_lie_in_the_part_of_its_device_each_once():
    cut = cut_by_owner(DATA, 2)
    assert cut.parts == PoolParts(2)
    assert cut.labels.tolist() == [1, 4, 1, 2, 3, 4]  # the first part is filled up
    length = len(cut.labels) // 2
    assert (cut.indices[:2] < length).all()
    assert (cut.indices[2:] >= length).all()


def test_a_pool_that_is_cut_by_owner_gives_the_same_samples():
    positions = jnp.array([[1, 0], [0, 0], [1, 1], [2, 0]])
    expected = gather(DATA, positions)
    for num_shares in (2, 4):
        cut = jax.tree.map(jnp.asarray, cut_by_owner(DATA, num_shares))
        for mine, other in zip(gather(cut, positions), expected, strict=True):
            np.testing.assert_array_equal(mine, other)


test_placements_that_cannot_be_are_refused = refusals(
    [
        (functools.partial(Placement(0).check, 4), "devices"),
        (functools.partial(Placement(4096).check, 4096), "devices"),
        (functools.partial(Placement(1, "samples").check, 4), "shard"),
    ]
)


@pytest.mark.slow
def test_every_algorithm_over_nodes_equals_that_on_one_device(actual):
    assert actual["devices"] == 8
    assert len(actual["rounds"]) >= 15
    for name, compared in actual["rounds"].items():
        assert compared["same draws"], name
        assert compared["difference"] < 1e-5, name


@pytest.mark.slow
def test_each_device_holds_its_share_of_state_tables_and_data(actual):
    for name, compared in actual["rounds"].items():
        assert compared["argument bytes"] < 1.2 * compared["share"], name
    of_device, of_all = actual["pool rows of a device, and of all"]
    assert of_device * 8 == of_all


@pytest.mark.slow
def test_push_sum_sends_parameters_to_neighbors_and_gathers_nothing(actual):
    made = actual["collectives"]
    assert set(made) == {"collective-permute"}


@pytest.mark.slow
def test_rounds_can_be_embedded_in_a_shard_map_with_checks_and_on_explicit_meshes(actual):
    embedded = actual["embedded"]
    assert embedded["node loop"] == "devices:map"
    differences = {name: value for name, value in embedded.items() if isinstance(value, float)}
    assert len(differences) == 6
    assert max(differences.values()) < 1e-5, differences
    assert all(value for name, value in embedded.items() if "in shares" in name), embedded


@pytest.mark.slow
def test_runs_over_devices_equal_those_on_one_and_go_on_with_any_number(actual):
    runs = actual["runs"]
    assert runs["resumed alike"]
    for name in ("nodes", "resumed on two", "several over nodes", "several over lanes"):
        assert runs[name] < 1e-5, name
    assert runs["strategy"] == "one after the other, their nodes over 8 devices"
