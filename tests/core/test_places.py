"""Where samples lie in the pool; programs that look them up are compiled as users compile them, in another process."""

import jax.numpy as jnp
import numpy as np
from problems import uneven_data
from processes import wrong_as_users_run


def test_a_position_beyond_a_nodes_samples_stands_for_its_last():
    data = uneven_data((1, 3, 2))
    places = np.asarray(data.places(jnp.tile(jnp.arange(5, dtype=jnp.int32), (3, 1))))
    indices = np.asarray(data.indices)
    for node, size in enumerate((1, 3, 2)):
        np.testing.assert_array_equal(places[node], indices[node, np.minimum(np.arange(5), size - 1)])


def test_fifty_nodes_with_two_samples_are_looked_up_right():
    """As XLA compiles a lookup under a mask for AVX-512, the process dies (docs/decisions/xla_gather.md). A process
    that dies is told, and the case behind it is computed."""
    cases = [("crash",), ("lookup", 50, 2), ("stored", 50, 2, "dense", "uniform")]
    wrong = wrong_as_users_run(cases)
    assert wrong.pop(("crash",)).startswith("the process died")
    assert wrong == {}
