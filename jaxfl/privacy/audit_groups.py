"""Groups that the audit examines together: canaries of several nodes or coordinates, and the layers of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tree

from jaxfl.core import Algorithm, Array, FederatedData, PyTree

_TOGETHER = 8  # coordinates that are added up


def canary_groups(nodes: np.ndarray, coordinates: np.ndarray) -> dict[str, list[np.ndarray]]:
    """Canaries of one coordinate at several nodes, and of adjacent coordinates, as `check_mechanism` adds them up."""
    in_order = np.lexsort((coordinates, nodes))
    groups = {"noise over coordinates": [in_order[at : at + _TOGETHER] for at in range(0, len(in_order), _TOGETHER)]}
    by_coordinate = np.argsort(coordinates, kind="stable")
    ends = np.flatnonzero(np.diff(coordinates[by_coordinate])) + 1
    of_nodes = np.split(by_coordinate, ends)
    return groups if len(of_nodes) == len(in_order) else {"noise over nodes": of_nodes, **groups}


def noise_of_layers(
    algorithm: Algorithm,
    silent: Algorithm,
    released: Callable[[Any, Any], PyTree],
    data: FederatedData,
    key: Array,
    rows: slice = slice(None),
) -> dict[str, np.ndarray]:
    """Compute the noise added to the first release in each leaf of the model, (rows, *leaf) each.

    Args:
        algorithm, released, data, key: as for `canary_scores`.
        silent: the same algorithm with noise of scale 0: it starts from the same parameters and draws the same batch.
        rows: of `released` that are independent.
    """

    sizes = data.sizes  # concrete, so that the algorithm can check them

    @jax.jit
    def first(key, data):
        def release(learner):
            before = learner.init(key, data._replace(sizes=sizes))
            return released(before, learner.round(key, before, data._replace(sizes=sizes))[0])

        return jax.tree.map(jnp.subtract, release(algorithm), release(silent))

    found = first(key, data)
    named = {"/".join(map(str, path)): np.asarray(leaf)[rows] for path, leaf in tree.flatten_with_path(found)}
    return {name: leaf for name, leaf in named.items() if name.split("/")[0] != "canary"}
