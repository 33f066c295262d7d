"""Checkpoints: exact for every dtype, the newest few kept, damage noticed."""

import functools
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_problem import toy_algorithm, toy_data, toy_task

from jaxfl.core import ArgumentError
from jaxfl.training.checkpoint import Checkpoints, DamagedCheckpoint


@functools.cache
def _first_round():
    data, _, _ = toy_data()
    algorithm = toy_algorithm(toy_task())
    return jax.jit(lambda key: algorithm.round(key, algorithm.init(key, data), data)[0])


@functools.cache
def _state(step=0):
    return _first_round()(jax.random.key(step))


def _structure(state):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


def _assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert isinstance(one, jax.Array)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def _fill(directory, rounds=(10, 20), keep=2):
    checkpoints = Checkpoints(directory, keep)
    for round_index in rounds:
        checkpoints.save(round_index, _state(round_index))
    checkpoints.close()


def _restore(directory, state, keep=2):
    checkpoints = Checkpoints(directory, keep)
    try:
        found = checkpoints.restore(_structure(state))
    finally:
        checkpoints.close()
    assert found is not None
    return found


def test_what_is_restored_equals_what_was_saved_bit_for_bit(tmp_path):
    state = _state()
    assert state.empty.size == 0
    assert state.nothing is None
    special = state._replace(half=jnp.array([np.nan, np.inf, -0.0, 1e-40], jnp.bfloat16))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, special)
    checkpoints.close()
    round_index, restored = _restore(tmp_path, special)
    assert round_index == 7
    _assert_same(restored, special)


@pytest.mark.parametrize("state", [np.arange(3.0, dtype=np.float32), {"a/b": np.int32(3), "a": {"b": np.int32(4)}}])
def test_any_tree_is_told_apart_by_its_paths(tmp_path, state):
    state = jax.tree.map(jnp.asarray, state)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    checkpoints.close()
    _assert_same(_restore(tmp_path, state)[1], state)


def test_only_the_newest_stay(tmp_path):
    _fill(tmp_path, rounds=(5, 10, 15, 20), keep=3)
    checkpoints = Checkpoints(tmp_path, 3)
    assert checkpoints.rounds() == [10, 15, 20]
    checkpoints.close()


def test_an_empty_directory_has_nothing_to_restore(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new")
    assert checkpoints.rounds() == []
    assert checkpoints.restore(_structure(_state())) is None
    checkpoints.close()


def test_a_checkpoint_that_was_not_completed_does_not_count(tmp_path):
    _fill(tmp_path)
    # What a process killed while saving leaves behind.
    shutil.copytree(tmp_path / "20", tmp_path / "30.orbax-checkpoint-tmp-1")
    (tmp_path / "finished.json").write_text("{}")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.rounds() == [10, 20]
    checkpoints.save(30, _state(30))
    assert checkpoints.rounds() == [20, 30]
    checkpoints.close()
    _assert_same(_restore(tmp_path, _state(30))[1], _state(30))


def _damage(path, kind):
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


@pytest.mark.parametrize("kind", ["half", "empty", "flipped", "missing"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, kind):
    _fill(tmp_path / "good")
    files = sorted(path.relative_to(tmp_path / "good") for path in (tmp_path / "good" / "20").rglob("*"))
    noticed = 0
    for file in files:
        if (tmp_path / "good" / file).is_dir():
            continue
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tmp_path / "good", copy)
        _damage(copy / file, kind)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = _restore(copy, _state(20))
        round_index, restored = found
        damaged = [item for item in caught if issubclass(item.category, DamagedCheckpoint)]
        # Some files carry nothing that matters: then the newest must still be exact, and nobody warned.
        assert bool(damaged) == (round_index == 10), file
        _assert_same(restored, _state(round_index))
        noticed += bool(damaged)
    assert noticed >= 3


def test_after_a_damaged_checkpoint_its_round_can_be_saved_again(tmp_path):
    _fill(tmp_path)
    for path in (tmp_path / "20").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    checkpoints = Checkpoints(tmp_path)
    with pytest.warns(DamagedCheckpoint, match="round 20 .* is damaged"):
        found = checkpoints.restore(_structure(_state(20)))
    assert found is not None
    assert found[0] == 10
    assert (tmp_path / "damaged_20").is_dir()
    checkpoints.save(20, _state(20))
    checkpoints.close()
    assert _restore(tmp_path, _state(20))[0] == 20


def test_another_structure_is_refused_and_nothing_is_set_aside(tmp_path):
    _fill(tmp_path)
    state = _state(20)
    for other, message in [
        (state._replace(table=jnp.zeros((4, 10, 3), jnp.uint16)), r"state\.table: must be uint16\[4, 10, 3\]"),
        (state._replace(table=state.table.astype(jnp.int32)), r"state\.table: must be int32.* has uint16\[4, 10, 2\]"),
        (state._replace(params={"kernel": state.params["kernel"]}), r"state\.params\['bias'\]: must be absent"),
        (state._replace(nothing=jnp.zeros(2)), r"state\.nothing: must be float\d+\[2\]; .* has absent"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            _restore(tmp_path, other)
    assert _restore(tmp_path, state)[0] == 20


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="keep_checkpoints"):
        Checkpoints(tmp_path, 0)
