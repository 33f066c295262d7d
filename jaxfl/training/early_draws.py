"""Draws that an accelerator makes for all rounds of a chunk at once, before the loop over them: indices, and no noise.

The kernels that hash keys and choose samples are small, and an accelerator launches them one after the other. For all
rounds at once they are as many as for one.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxfl.core import Algorithm, Array, FederatedData, Key, PyTree
from jaxfl.core.platform import is_cpu
from jaxfl.core.tree import num_bytes


def draws_of_rounds(
    algorithm: Algorithm, key: Key, state: PyTree, data: FederatedData, num_rounds: int
) -> Callable[[PyTree, Array], PyTree] | None:
    """Make the function (state, round's place behind that of `state`, () int32) -> draws of the round.

    It is None where nothing is drawn early, as on a CPU.

    Integers and booleans are drawn early if nothing in the state but `round_index` enters them, and if those of all
    rounds take at most the memory of the state.

    Guarantees:
        - equals `algorithm.draw` where every round adds 1 to `round_index`.
    """

    def draw(state: PyTree) -> PyTree:
        return algorithm.draw(key, state, data)

    if is_cpu() or not (hasattr(state, "_replace") and hasattr(state, "round_index")):
        return None
    program, shapes = jax.make_jaxpr(draw, return_shape=True)(state)
    leaves, structure = jax.tree.flatten(shapes)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    entering = {id(leaf) for leaf, path in zip(program.jaxpr.invars, paths, strict=True) if path != ".round_index"}
    for step in program.jaxpr.eqns:
        if any(id(operand) in entering for operand in step.invars):
            entering.update(map(id, step.outvars))
    is_early = [
        id(result) not in entering and (leaf.dtype == bool or jnp.issubdtype(leaf.dtype, jnp.integer))
        for result, leaf in zip(program.jaxpr.outvars, leaves, strict=True)
    ]
    most = num_rounds * num_bytes([leaf for leaf, early in zip(leaves, is_early, strict=True) if early])
    if not 0 < most <= num_bytes(state):
        return None

    def early_of(round_index: Array) -> list[Array]:
        drawn = jax.tree.leaves(draw(state._replace(round_index=round_index)))
        return [leaf for leaf, early in zip(drawn, is_early, strict=True) if early]

    early_leaves = jax.vmap(early_of)(state.round_index + jnp.arange(num_rounds, dtype=state.round_index.dtype))

    def of_round(state: PyTree, place: Array) -> PyTree:
        rows = iter([jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False) for leaf in early_leaves])
        drawn = zip(jax.tree.leaves(draw(state)), is_early, strict=True)
        return structure.unflatten([next(rows) if early else leaf for leaf, early in drawn])

    return of_round
