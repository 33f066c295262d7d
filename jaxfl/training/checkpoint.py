"""Checkpoints of one (variant, seed), by orbax: complete or absent, the newest few kept, checked on restoring.

A state is stored as a flat dict from tree path to array, so that its NamedTuples and Nones need not exist in the
reader. A list of the checkpoint's files with their checksums lies beside them and is compared before anything is read:
a damaged checkpoint is noticed whatever the storage layer would make of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import ArgumentError, PyTree
from jaxfl.core.check import at_least
from jaxfl.training.json_files import write_json

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import orbax.checkpoint as ocp


_FILES = "files.json"


class DamagedCheckpoint(UserWarning):
    """A checkpoint could not be read and was set aside; an older one, or the beginning, takes its place."""


class Checkpoints:
    """The checkpoints in one directory.

    Args:
        directory: made if missing; one subdirectory a checkpoint, named by its round.
        keep: how many of the newest stay, at least 1. With 1 a damaged checkpoint means to begin again.

    Guarantees:
        - what is restored equals what was saved, bit for bit, for every dtype.
        - only the newest `keep` checkpoints stay.
        - a truncated or altered checkpoint is passed over, with a warning, for the one before it.
    """

    def __init__(self, directory: Path, keep: int = 2):
        at_least(1, keep_checkpoints=keep)
        self._directory = Path(directory).absolute()
        self._keep = keep
        self._manager = self._open()

    def save(self, round_index: int, state: PyTree) -> None:
        """Write the state after `round_index` rounds; returns once it is complete on disk."""
        # Empty leaves are left out: the storage layer refuses them, and the structure brings them back.
        leaves = {name: np.asarray(leaf) for name, leaf in _named_leaves(state) if leaf.size}
        with _quiet():
            done = self._manager.save(round_index, args=ocp.args.StandardSave(leaves), force=True)
        if not done:
            raise RuntimeError(f"no checkpoint of round {round_index} was written to {self._directory}")
        # After the checkpoint is complete: one without a list was completed, too, and is read on trust.
        step = self._directory / str(round_index)
        write_json(step / _FILES, _checksums(step))

    def restore(self, structure: PyTree) -> tuple[int, PyTree] | None:
        """The newest readable checkpoint.

        Args:
            structure: what the state must look like, as `jax.eval_shape(algorithm.init, key, data)` gives it.

        Returns:
            (round, state), or None if there is no readable checkpoint. Damaged ones are renamed to damaged_<round>
            with a warning (`DamagedCheckpoint`), so that their rounds can be saved again.

        Raises:
            ArgumentError: the checkpoint is whole but holds other leaves, shapes or dtypes.
        """
        for round_index in self.rounds()[::-1]:
            try:
                self._refuse_damage(round_index)
                with _quiet():
                    found = self._manager.restore(round_index, args=ocp.args.StandardRestore())
                leaves = {name: np.asarray(leaf) for name, leaf in found.items()}
            except MemoryError:
                raise
            except Exception as error:  # whatever a reader of damaged bytes may come to
                reason = str(error).strip().split("\n")[0][:120] or type(error).__name__
                message = f"the checkpoint of round {round_index} in {self._directory} is damaged ({reason})"
                warnings.warn(f"{message}; going back to the one before it.", DamagedCheckpoint, stacklevel=2)
                self._set_aside(round_index)
            else:
                return round_index, self._build(structure, leaves, round_index)
        return None

    def rounds(self) -> list[int]:
        """Rounds of the complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def close(self) -> None:
        """Release the directory."""
        with _quiet():
            self._manager.close()

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,
            create=True,
        )
        self._directory.mkdir(parents=True, exist_ok=True)
        with _quiet():
            return ocp.CheckpointManager(self._directory, options=options)

    def _refuse_damage(self, round_index: int) -> None:
        """Raise ValueError if a file is not the one that was written."""
        step = self._directory / str(round_index)
        if (step / _FILES).exists():
            found = _checksums(step)
            for name, checksum in json.loads((step / _FILES).read_bytes()).items():
                if found.get(name) != checksum:
                    raise ValueError(f"{name} is {'altered' if name in found else 'missing'}")

    def _set_aside(self, round_index: int) -> None:
        # Renamed, not deleted: a reading error may have another cause than the bytes.
        aside = self._directory / f"damaged_{round_index}"
        shutil.rmtree(aside, ignore_errors=True)
        (self._directory / str(round_index)).rename(aside)
        self._reopen()

    def _reopen(self) -> None:
        # The manager remembers which rounds it has; only a new one sees what was changed behind its back.
        self.close()
        self._manager = self._open()

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


def _named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf; the path of a bare array is "."."""
    return [(jax.tree_util.keystr(path) or ".", leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _checksums(directory: Path) -> dict[str, list[int]]:
    """[size in bytes, CRC-32] of every file below a directory, by path."""
    sums = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != _FILES:
            size = checksum = 0
            with open(path, "rb") as file:
                while block := file.read(1 << 24):
                    size, checksum = size + len(block), zlib.crc32(block, checksum)
            sums[path.relative_to(directory).as_posix()] = [size, checksum]
    return sums


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
