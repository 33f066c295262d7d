"""Norms and distances of trees, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl.core import tree

NODES = 7


def values(spread):
    """Nodes that agree up to `spread`, around numbers near 3."""
    rng = np.random.default_rng(0)
    shapes = {"kernel": (5, 4), "bias": (4,), "scalar": ()}
    common = {name: 3 + rng.normal(size=shape) for name, shape in shapes.items()}
    return {
        name: jnp.asarray(common[name] + spread * rng.normal(size=(NODES, *shape)), jnp.float32)
        for name, shape in shapes.items()
    }


def expected_distance(leaves):
    rows = np.concatenate([np.asarray(leaf, np.float64).reshape(NODES, -1) for leaf in jax.tree.leaves(leaves)], axis=1)
    return ((rows - rows.mean(axis=0)) ** 2).sum(axis=1).mean()


@pytest.mark.parametrize(("spread", "tolerance"), [(1.0, 1e-5), (1e-4, 3e-3)])
def test_consensus_distance_is_exact_where_nodes_are_close(spread, tolerance):
    """Values near 3 that differ by 1e-4 are known to 3e-7: to 3e-3 of their difference, no further."""
    leaves = values(spread)
    actual = jax.jit(tree.consensus_distance)(leaves)
    np.testing.assert_allclose(actual, expected_distance(leaves), rtol=tolerance)


def test_consensus_distance_sums_over_nodes_by_products():
    """A reduction over the first axis runs at a tenth of the speed on a CPU."""
    # Of each leaf but a scalar's, whose trailing axes are none.
    text = str(jax.make_jaxpr(tree.consensus_distance)(values(1.0)))
    assert text.count("dot_general[") == 3


def test_equal_nodes_are_at_distance_zero_up_to_rounding():
    same = tree.replicate({"a": jnp.asarray([0.1, -7.0, 1e6], jnp.float32)}, NODES)
    assert float(tree.consensus_distance(same)) <= 3 * (1e6 * 2e-7) ** 2
    assert float(tree.consensus_distance(tree.replicate(jnp.ones(3), 8))) == 0.0


def test_a_broken_value_stays_visible():
    for bad in (np.nan, np.inf):
        assert not np.isfinite(tree.consensus_distance(jnp.array([[1.0, 2.0], [3.0, bad]])))
