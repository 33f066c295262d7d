"""Checkpoints of one (variant, seed), by orbax: complete or absent, the newest few kept, checked on restoring.

A state is stored as a flat dict from tree path to array, so that its NamedTuples and Nones need not exist in the
reader. A list of the checkpoint's files with their checksums lies beside them (`file_list.py`) and is compared before
anything is read: a damaged checkpoint is noticed whatever the storage layer would make of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import ArgumentError, PyTree
from jaxfl.core.check import at_least
from jaxfl.training.file_list import (
    Damaged,
    FileList,
    Owner,
    has_list,
    os_errors,
    read_list,
    remove_leftovers,
    write_list,
)
from jaxfl.training.processes import of_first, on_first, several

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import orbax.checkpoint as ocp


_NOBODY = Owner("", ())
_ALONE = ocp.options.MultiprocessingOptions(active_processes={0}, barrier_sync_key_prefix="jaxfl")
_BESIDE = "beside:"  # no path of a leaf begins so


class DamagedCheckpoint(UserWarning):
    """A checkpoint is not what was written and was set aside; an older one, or the beginning, takes its place."""


class Restored(NamedTuple):
    """A checkpoint that was read."""

    round_index: int
    state: PyTree
    beside: dict[str, np.ndarray]  # what was saved with the state
    mark: list[int]  # of metrics.jsonl at its time


class Checkpoints:
    """The checkpoints in one directory.

    Args:
        directory: made if missing; one subdirectory a checkpoint, named by its round.
        keep: how many of the newest stay, at least 1. An older one goes when the newer one is complete. None only
            reads: nothing is made, renamed or removed.
        owner: whose they are; those of another are refused. By default nobody's.

    Guarantees:
        - what is restored equals what was saved, bit for bit, for every dtype.
        - only the newest `keep` checkpoints stay.
        - a truncated or altered checkpoint is passed over, with a warning, for the one before it.
        - a checkpoint that was not completed is none, and goes.
        - a checkpoint of another owner is refused and left as it is.
        - a file that cannot be read is no damage.
    """

    def __init__(self, directory: Path, keep: int | None = 2, owner: Owner = _NOBODY):
        if keep is not None:
            at_least(1, keep_checkpoints=keep)
        self._directory = Path(directory).absolute()
        self._keep, self._owner = keep, owner
        of_first(self._open)

    @on_first
    def save(
        self,
        round_index: int,
        state: PyTree,
        beside: Mapping[str, np.ndarray] | None = None,
        mark: Sequence[int] = (0, 0),
    ) -> None:
        """Write the state after `round_index` rounds; returns once it is complete on disk.

        Args:
            round_index: that has no checkpoint yet.
            state: what `restore` gives back in its structure.
            beside: name -> array with at least one entry, which `restore` gives back, too.
            mark: size and checksum of metrics.jsonl, as `RunDirectory.mark` gives them.

        Raises:
            OSError: it cannot be written, whatever the storage layer makes of that. What was there before stays, and
                what was half written is in nobody's way.
        """
        # Empty leaves are left out: the storage layer refuses them, and the structure brings them back.
        leaves = {name: np.asarray(leaf) for name, leaf in _named_leaves(state) if leaf.size}
        leaves |= {_BESIDE + name: np.asarray(array) for name, array in (beside or {}).items()}
        step = self._directory / str(round_index)
        with os_errors(step), _quiet():
            done = self._manager.save(round_index, args=ocp.args.StandardSave(leaves), force=True)
        if not done:
            raise RuntimeError(f"no checkpoint of round {round_index} was written to {self._directory}")
        _give_back_memory()
        write_list(step, FileList(self._owner, list(mark)))
        self._remove_old()

    def restore(self, structure: PyTree) -> Restored | None:
        """The newest whole checkpoint.

        Every file is compared with its checksum first. An error of the storage layer behind that is none of the bytes,
        but a passing one (too many open files) or one of another version: the checkpoint stays where it is.

        Args:
            structure: what the state must look like, as `jax.eval_shape(algorithm.init, key, data)` gives it.

        Returns:
            What was saved, or None if there is no whole checkpoint. Damaged ones are renamed to damaged_<round> with a
            warning (`DamagedCheckpoint`), so that their rounds can be saved again.

        Raises:
            ArgumentError: the checkpoint is another owner's, or holds other leaves, shapes or dtypes.
            OSError: it cannot be read; nothing is changed then.
        """
        read = self._read()
        if read is None:
            return None
        round_index, leaves, mark = read
        beside = {name: leaves.pop(name) for name in list(leaves) if name.startswith(_BESIDE)}
        beside = {name.removeprefix(_BESIDE): array for name, array in beside.items()}
        return Restored(round_index, self._build(structure, leaves, round_index), beside, mark)

    @on_first
    def rounds(self) -> list[int]:
        """Rounds of the checkpoints, ascending; which of them are whole, `restore` tells."""
        return sorted(self._manager.all_steps())

    @on_first
    def close(self) -> None:
        """Release the directory."""
        with _quiet():
            self._manager.close()

    @on_first
    def _read(self) -> tuple[int, dict[str, np.ndarray], list[int]] | None:
        """(round, leaves by their names, mark) of the newest whole checkpoint; damaged ones are set aside."""
        for round_index in self.rounds()[::-1]:
            step = self._directory / str(round_index)
            if not has_list(step):  # a process died, or still writes it
                continue
            try:
                listed = read_list(step)
            except Damaged as error:
                message = f"the checkpoint of round {round_index} in {self._directory} is damaged ({error})"
                warnings.warn(f"{message}; going back to the one before it.", DamagedCheckpoint, stacklevel=4)
                self._set_aside(round_index)
                continue
            self._refuse_foreign(listed.owner, step)
            with os_errors(step, otherwise=errno.EIO), _quiet():
                read = self._manager.restore(round_index, args=ocp.args.StandardRestore())
                return round_index, {name: np.asarray(leaf) for name, leaf in read.items()}, listed.mark
        return None

    def _open(self) -> None:
        writes = self._keep is not None
        # How many stay is none of the manager's business: it would remove one before the next has its list.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=writes,
            create=False,
            multiprocessing_options=_ALONE if several() else ocp.options.MultiprocessingOptions(),
        )
        if writes:
            self._directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self._directory)
        with os_errors(self._directory), _quiet():
            self._manager = ocp.CheckpointManager(self._directory, options=options)
        if writes:
            self._remove([at for at in self.rounds() if not has_list(self._directory / str(at))])  # were not completed
        self._remove_old()

    def _remove_old(self) -> None:
        """Remove all before the newest few that were completed."""
        completed = [round_index for round_index in self.rounds() if has_list(self._directory / str(round_index))]
        if self._keep is not None and len(completed) >= self._keep:
            self._remove([round_index for round_index in self.rounds() if round_index < completed[-self._keep]])

    def _remove(self, rounds: Sequence[int]) -> None:
        for round_index in rounds:
            with os_errors(self._directory / str(round_index)), _quiet():
                self._manager.delete(round_index)

    def _refuse_foreign(self, owner: Owner, step: Path) -> None:
        """Raise ArgumentError where a checkpoint is another owner's."""
        if owner == self._owner:
            return
        lanes = ", ".join(f"{name}, seed {seed}" for name, seed in owner.lanes[:2]) + (
            " and more" * (owner.lanes[2:] != ())
        )
        of = "another run" if owner.run != self._owner.run else lanes or "nobody"
        remedy = "Put back the checkpoint that belongs there, or remove this one; then resume again."
        raise ArgumentError("out", "must hold checkpoints of its own lanes alone", f"{step} is of {of}", remedy)

    def _set_aside(self, round_index: int) -> None:
        # Renamed, not deleted: what is left of it may be of use to somebody.
        if self._keep is None:
            return
        aside = self._directory / f"damaged_{round_index}"
        shutil.rmtree(aside, ignore_errors=True)
        (self._directory / str(round_index)).rename(aside)
        # The manager remembers which rounds it has; only a new one sees what was changed behind its back.
        self.close()
        self._open()

    def _build(self, structure: PyTree, leaves: dict[str, np.ndarray], round_index: int) -> PyTree:
        """The state in its structure, on the device; ArgumentError where leaves, shapes or dtypes differ."""
        expected = dict(_named_leaves(structure))
        stored = {name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
        wanted = {name: (leaf.shape, np.dtype(leaf.dtype)) for name, leaf in expected.items() if leaf.size}
        for name in (*wanted, *(name for name in stored if name not in wanted)):
            if stored.get(name) != wanted.get(name):
                where = f"the checkpoint of round {round_index} in {self._directory} has {_shown(stored.get(name))}"
                remedy = "Resume with the program that wrote it, or start again with another out."
                raise ArgumentError(f"state{name}", f"must be {_shown(wanted.get(name))}", where, remedy)
        arrays = []
        for name, leaf in expected.items():
            # Popped one by one, so that no more than one leaf is held twice.
            arrays.append(jnp.array(leaves.pop(name)) if leaf.size else jnp.zeros(leaf.shape, leaf.dtype))
        return jax.tree.unflatten(jax.tree.structure(structure), arrays)


def _give_back_memory() -> None:
    """Give freed memory of the storage layer back to the system. glibc keeps much, and more with every checkpoint."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def _named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf; the path of a bare array is "."."""
    return [(jax.tree_util.keystr(path) or ".", leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _shown(found: tuple[tuple[int, ...], np.dtype] | None) -> str:
    return "absent" if found is None else f"{found[1]}{list(found[0])}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence orbax's notices: what matters about a checkpoint is raised or warned of here."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
