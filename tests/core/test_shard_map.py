"""In a caller's `shard_map`, with JAX's checks of what varies between devices, every setting traces."""

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec
from problems import problem
from registry import REGISTRY
from test_keys_of_a_round import CASES

import jaxfl

LINKED = {name for name, changes in CASES if changes.keys() & {"links", "uplink"}}
# Over links where a row takes them, which has all that it has without. A special case has the rounds of another row.
SETTINGS = [
    *((name, changes) for name, changes in CASES if changes or not (name in LINKED or REGISTRY[name].special_case_of)),
    ("ali_dpfl", {"constants": jaxfl.published_constants()}),
    ("embracing", {"num_active": (2, 1)}),
]


def scanned(algorithm, key, data):
    return jax.lax.scan(lambda state, _: algorithm.round(key, state, data), algorithm.init(key, data), None, length=2)[
        0
    ]


ALONE = ("ali_dpfl", "embracing", "width_reduction")  # what differs where no vmap makes choices of conditionals


@pytest.mark.parametrize(
    ("name", "changes", "seeds"),
    [(*setting, seeds) for setting in SETTINGS for seeds in (1, 2) if seeds == 2 or setting[0] in ALONE],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_every_setting_traces_in_a_shard_map_with_checks(name, changes, seeds):
    """One seed a device, and two by vmap."""
    p = problem(name)
    algorithm = p.algorithm(clip_norm=1.0, **changes)
    mesh, points = jax.make_mesh((1,), ("points",), axis_types=(AxisType.Auto,)), PartitionSpec("points")

    def of_device(keys, data):
        if seeds > 1:
            return jax.vmap(lambda key: scanned(algorithm, key, data))(keys)
        return jax.tree.map(lambda leaf: leaf[None], scanned(algorithm, keys[0], data))

    inside = jax.shard_map(of_device, mesh=mesh, in_specs=(points, PartitionSpec()), out_specs=points)
    jax.jit(inside).trace(jax.random.split(jax.random.key(0), seeds), p.data)
