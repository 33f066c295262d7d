"""Checkpoints: exact for every dtype, the newest few kept, damage noticed."""

import errno
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_problem import OWNER, assert_same, damage, fill, raising, restore, structure, toy_state
from run_files import content

from jaxfl.core import ArgumentError
from jaxfl.training.checkpoint import Checkpoints, DamagedCheckpoint, _sums


def test_what_is_restored_equals_what_was_saved_bit_for_bit(tmp_path):
    state = toy_state()
    assert state.empty.size == 0
    assert state.nothing is None
    special = state._replace(half=jnp.array([np.nan, np.inf, -0.0, 1e-40], jnp.bfloat16))
    checkpoints = Checkpoints(tmp_path, owner=OWNER)
    checkpoints.save(7, special)
    checkpoints.close()
    round_index, restored = restore(tmp_path, special)
    assert round_index == 7
    assert_same(restored, special)


@pytest.mark.parametrize("state", [np.arange(3.0, dtype=np.float32), {"a/b": np.int32(3), "a": {"b": np.int32(4)}}])
def test_any_tree_is_told_apart_by_its_paths(tmp_path, state):
    state = jax.tree.map(jnp.asarray, state)
    checkpoints = Checkpoints(tmp_path, owner=OWNER)
    checkpoints.save(1, state)
    checkpoints.close()
    assert_same(restore(tmp_path, state)[1], state)


def test_only_the_newest_stay(tmp_path):
    fill(tmp_path, rounds=(5, 10, 15, 20), keep=3)
    checkpoints = Checkpoints(tmp_path, 3, OWNER)
    assert checkpoints.rounds() == [10, 15, 20]
    checkpoints.close()


def test_an_empty_directory_has_nothing_to_restore(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new")
    assert checkpoints.rounds() == []
    assert checkpoints.restore(structure(toy_state())) is None
    checkpoints.close()


def test_a_checkpoint_that_was_not_completed_does_not_count(tmp_path):
    fill(tmp_path)
    # What a process killed while saving leaves behind.
    shutil.copytree(tmp_path / "20", tmp_path / "30.orbax-checkpoint-tmp-1")
    (tmp_path / "finished.json").write_text("{}")
    checkpoints = Checkpoints(tmp_path, owner=OWNER)
    assert checkpoints.rounds() == [10, 20]
    checkpoints.save(30, toy_state(30))
    assert checkpoints.rounds() == [20, 30]
    checkpoints.close()
    assert_same(restore(tmp_path, toy_state(30))[1], toy_state(30))


@pytest.mark.parametrize("kind", ["half", "empty", "flipped", "missing"])
@pytest.mark.quick_cases(2)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, kind):
    fill(tmp_path / "good")
    files = sorted(path.relative_to(tmp_path / "good") for path in (tmp_path / "good" / "20").rglob("*"))
    assert len([file for file in files if (tmp_path / "good" / file).is_file()]) >= 4
    passed_over = 0
    for file in files:
        # A process died before these were written, or the storage layer does not read them.
        if (tmp_path / "good" / file).is_dir() or file.name in ("commit_success.txt", "_CHECKPOINT_METADATA"):
            continue
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tmp_path / "good", copy)
        damage(copy / file, kind)
        if (copy / file).exists() and (copy / file).read_bytes() == (tmp_path / "good" / file).read_bytes():
            continue  # it was empty
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            round_index, restored = restore(copy, toy_state(20))
        # Either it is passed over, with a warning, or the bytes do not matter to what is read.
        assert round_index in (10, 20), file
        assert (round_index == 10) == any(item.category is DamagedCheckpoint for item in caught), file
        assert_same(restored, toy_state(round_index))
        passed_over += round_index == 10
    assert passed_over >= 3


def test_whole_arrays_of_another_checkpoint_are_noticed_by_their_checksums(tmp_path):
    """orbax reads them without a word."""
    fill(tmp_path)
    shutil.rmtree(tmp_path / "20" / "arrays")
    shutil.copytree(tmp_path / "10" / "arrays", tmp_path / "20" / "arrays")
    with pytest.warns(DamagedCheckpoint, match="round 20 .* is altered"):
        round_index, state = restore(tmp_path, toy_state(10))
    assert round_index == 10
    assert_same(state, toy_state(10))


def test_after_a_damaged_checkpoint_its_round_can_be_saved_again(tmp_path):
    fill(tmp_path)
    for path in (tmp_path / "20").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    checkpoints = Checkpoints(tmp_path, owner=OWNER)
    with pytest.warns(DamagedCheckpoint, match="round 20 .* is damaged"):
        actual = checkpoints.restore(structure(toy_state(20)))
    assert actual is not None
    assert actual.round_index == 10
    assert (tmp_path / "damaged_20").is_dir()
    checkpoints.save(20, toy_state(20))
    checkpoints.close()
    assert restore(tmp_path, toy_state(20))[0] == 20


def test_another_structure_is_refused_and_nothing_is_set_aside(tmp_path):
    fill(tmp_path)
    state = toy_state(20)
    for other, message in [
        (state._replace(table=jnp.zeros((4, 10, 3), jnp.uint16)), r"state\.table: must be uint16\[4, 10, 3\]"),
        (state._replace(table=state.table.astype(jnp.int32)), r"state\.table: must be int32.* has uint16\[4, 10, 2\]"),
        (state._replace(params={"kernel": state.params["kernel"]}), r"state\.params\['bias'\]: must be absent"),
        (state._replace(nothing=jnp.zeros(2)), r"state\.nothing: must be float\d+\[2\]; .* has absent"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            restore(tmp_path, other)
    assert restore(tmp_path, state)[0] == 20


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="keep_checkpoints"):
        Checkpoints(tmp_path, 0)


def test_what_is_saved_beside_a_state_comes_back(tmp_path):
    beside = {"info:loss": np.arange(6.0).reshape(2, 3), "rounds": np.array([2, 1], np.int32)}
    checkpoints = Checkpoints(tmp_path, owner=OWNER)
    checkpoints.save(3, toy_state(), {"metrics": [17, 99], "total": 0.1 + 0.2}, beside)
    checkpoints.wait()
    actual = checkpoints.restore(structure(toy_state()))
    checkpoints.close()
    assert actual is not None
    assert actual.record == {"metrics": [17, 99], "total": 0.1 + 0.2}
    assert sorted(actual.beside) == sorted(beside)
    for name, array in beside.items():
        np.testing.assert_array_equal(actual.beside[name], array, strict=True)
    assert_same(actual.state, toy_state())


def test_a_checkpoint_of_another_owner_is_refused_and_left_as_it_is(tmp_path):
    fill(tmp_path)
    before = content(tmp_path)
    with pytest.raises(ArgumentError, match=r"^out: must hold checkpoints of its own lanes only; .*20 is of other"):
        restore(tmp_path, toy_state(20), owner="another")
    assert content(tmp_path) == before


@pytest.mark.parametrize("keep", [1, 2])
def test_the_one_before_stays_where_the_next_cannot_be_written(tmp_path, keep, monkeypatch):
    fill(tmp_path, rounds=(10, 20), keep=keep)
    checkpoints = Checkpoints(tmp_path, keep, OWNER)
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "full")
        patch.setattr("orbax.checkpoint.CheckpointManager.save", raising(full))
        with pytest.raises(OSError, match="full"):
            checkpoints.save(30, toy_state(30))
    checkpoints.close()
    round_index, state = restore(tmp_path, toy_state(20), keep)
    assert round_index == 20
    assert_same(state, toy_state(20))


def test_a_state_that_is_donated_after_save_returns_is_saved_as_it_was(tmp_path):
    grow = jax.jit(lambda state: {name: leaf + 1 for name, leaf in state.items()}, donate_argnums=0)
    state = {"a": jnp.arange(300_000.0), "b": jnp.ones((3, 5), jnp.bfloat16)}
    checkpoints = Checkpoints(tmp_path, 2, OWNER)
    for round_index in (1, 2, 3):
        state = grow(state)
        expected = jax.tree.map(np.array, state)
        checkpoints.save(round_index, state)
        for _ in range(3):
            state = grow(state)
    checkpoints.close()
    _, restored = restore(tmp_path, expected)
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(one, other, strict=True), restored, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "uint16", "int8", "int32"])
def test_any_bit_that_flips_changes_the_checksum(dtype):
    """One bit of any word, and two words exchanged."""
    rng = np.random.default_rng(3)
    words = rng.integers(0, 2, size=(3, 5, 7)) if dtype == "bool" else rng.integers(1, 99, size=(3, 5, 7))
    leaf = np.asarray(words).astype(jnp.dtype(dtype))
    (before,) = _sums({"leaf": leaf})
    raw = bytearray(leaf.tobytes())
    for _ in range(40):
        place, bit = int(rng.integers(len(raw))), 0 if dtype == "bool" else int(rng.integers(8))
        raw[place] ^= 1 << bit
        changed = np.frombuffer(bytes(raw), leaf.dtype).reshape(leaf.shape)
        raw[place] ^= 1 << bit
        assert _sums({"leaf": changed}) != [before]
    exchanged = leaf.copy()
    first, other = np.argwhere(leaf != leaf[0, 0, 0])[0], (0, 0, 0)
    exchanged[tuple(first)], exchanged[other] = leaf[other], leaf[tuple(first)]
    assert _sums({"leaf": exchanged}) != [before]


def test_reading_a_state_changes_nothing(tmp_path):
    """Neither damage nor what a process at work has half written."""
    fill(tmp_path, rounds=(10, 20, 30), keep=3)
    damage(next((tmp_path / "30").rglob("_METADATA")), "half")
    shutil.copytree(tmp_path / "20", tmp_path / "40.orbax-checkpoint-tmp-1")
    before = content(tmp_path)
    with pytest.warns(DamagedCheckpoint, match="round 30"):
        assert restore(tmp_path, toy_state(20), keep=None)[0] == 20
    assert content(tmp_path) == before
