"""Checkpoints of the toy problem's state, for tests that damage them."""

from __future__ import annotations

import functools

import jax
import numpy as np
from toy_problem import toy_algorithm, toy_data, toy_task

from jaxfl.training.checkpoint import Checkpoints

OWNER = "1f2e3d4c"


@functools.cache
def first_round():
    data, _, _ = toy_data()
    algorithm = toy_algorithm(toy_task())
    return jax.jit(lambda key: algorithm.round(key, algorithm.init(key, data), data)[0])


@functools.cache
def toy_state(step=0):
    return first_round()(jax.random.key(step))


def structure(state):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert isinstance(one, jax.Array)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def fill(directory, rounds=(10, 20), keep=2, owner=OWNER):
    checkpoints = Checkpoints(directory, keep, owner)
    for round_index in rounds:
        checkpoints.save(round_index, toy_state(round_index))
    checkpoints.close()


def restore(directory, state, keep: int | None = 2, owner=OWNER):
    checkpoints = Checkpoints(directory, keep, owner)
    try:
        actual = checkpoints.restore(structure(state))
    finally:
        checkpoints.close()
    assert actual is not None
    return actual.round_index, actual.state


def damage(path, kind):
    content = path.read_bytes()
    if kind == "half":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :])
    else:
        path.unlink()


def raising(error):
    def fails(*args, **kwargs):
        raise error

    return fails
