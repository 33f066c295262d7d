"""Checkpoints by orbax: written in the background, as arrays lie on devices; the newest few stay; reading checks them.

A checkpoint holds arrays and a record, in JSON. The record lists the arrays with their forms and checksums, and has a
checksum of its own, so that damage is noticed even where the storage layer (tensorstore) does not notice it. The arrays
are a flat dict from tree path to array: the NamedTuples and Nones of a state need not exist in the reader.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import os
import re
import sys
import threading
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import ArgumentError, Array, PyTree
from jaxfl.core.check import at_least
from jaxfl.training.json_files import Damaged, checked, with_checksum
from jaxfl.training.processes import on_first

_SECONDS_TO_END = 2.0  # of one thread
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # how orbax's storage layer reports an error of the system
_LATE = ("Event loop is closed", "Encountered error while reading array", "coroutine 'Store.")
_BESIDE = "beside:"  # no leaf's path begins with this


class DamagedCheckpoint(UserWarning):
    """A checkpoint differs from what was written. It is set aside, and an older one, or the beginning, replaces it."""


class Restored(NamedTuple):
    """A checkpoint that was read."""

    round_index: int
    state: PyTree
    beside: dict[str, np.ndarray]  # what was saved with the state
    record: dict[str, Any]


class Checkpoints:
    """The checkpoints in one directory. Where several processes train, all of them make the same calls.

    Args:
        directory: made if missing; one subdirectory a checkpoint, named by its round.
        keep: how many of the newest stay, at least 1. None only reads: nothing is made, renamed or removed.
        owner: text that names the run and lanes of the checkpoints; those of another owner are refused.

    Guarantees:
        - what is restored equals what was saved, bit for bit, for every dtype.
        - only the newest `keep` checkpoints stay.
        - a truncated or altered checkpoint is skipped, with a warning, for the one before it.
        - a checkpoint that was not completed does not count, and is removed.
        - a checkpoint of another owner is refused and left as it is.
        - a file that cannot be read does not count as damaged.
        - a state that is donated after `save` returns is saved as it was.
    """

    def __init__(self, directory: Path, keep: int | None = 2, owner: str = ""):
        if keep is not None:
            at_least(1, keep_checkpoints=keep)
        self._directory, self._writes, self._owner = Path(directory).absolute(), keep is not None, owner
        _silence_threads()
        if self._writes:
            on_first(self._directory.mkdir)(parents=True, exist_ok=True)
        with os_errors(self._directory), _quiet():
            import orbax.checkpoint as ocp  # takes half a second, which a run without checkpoints saves

            self._args = ocp.args
            options = ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=False, read_only=not self._writes, cleanup_tmp_directories=self._writes
            )
            self._manager = ocp.CheckpointManager(self._directory, options=options)

    def save(
        self,
        round_index: int,
        state: PyTree,
        record: Mapping[str, Any] | None = None,
        beside: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Begin to write the state after `round_index` rounds; the checkpoint before it is complete when this returns.

        Args:
            record: values that JSON can hold. `restore` gives it back, like `state` and `beside`.
            beside: name -> further NumPy array, with at least one entry.

        Raises:
            OSError: this or the checkpoint before it cannot be written. Earlier checkpoints stay.
        """
        self.wait()
        # Empty leaves are left out: the storage layer refuses them, and `restore` adds them by the structure.
        leaves = {name: leaf for name, leaf in _named_leaves(state) if leaf.size}
        leaves |= {_BESIDE + name: array for name, array in (beside or {}).items()}
        forms = {name: [*_form(leaf), value] for (name, leaf), value in zip(leaves.items(), _sums(leaves), strict=True)}
        content = with_checksum({"owner": self._owner, "arrays": forms, "record": dict(record or {})})
        args = self._args.Composite(arrays=self._args.StandardSave(leaves), record=self._args.JsonSave(content))
        step = self._directory / str(round_index)
        with os_errors(step), _quiet(), _joined():
            done = self._manager.save(round_index, args=args, force=True)
        if not done:
            raise RuntimeError(f"no checkpoint of round {round_index} was written to {self._directory}")

    def wait(self) -> None:
        """Return once everything is complete on disk; OSError where it cannot be written."""
        with os_errors(self._directory), _quiet(), _joined():
            self._manager.wait_until_finished()
        _give_back_memory()

    def restore(self, structure: PyTree, shardings: PyTree | None = None) -> Restored | None:
        """The newest undamaged checkpoint, or None, laid over devices by `shardings` (None: on the first device).

        Damaged ones are renamed to damaged_<round> with a warning (`DamagedCheckpoint`), so that their rounds can be
        saved again.

        Raises:
            ArgumentError: the checkpoint is another owner's, or its leaves are not those of `structure`.
            OSError: it cannot be read; nothing is changed then.
        """
        for round_index in self.rounds()[::-1]:
            try:
                return self._read(round_index, structure, shardings)
            except Damaged as error:
                message = f"the checkpoint of round {round_index} in {self._directory} is damaged ({error})"
                warnings.warn(f"{message}; going back to the one before it.", DamagedCheckpoint, stacklevel=4)
                if self._writes:
                    on_first(self._set_aside)(round_index)
                    self._manager.reload()
        return None

    def rounds(self) -> list[int]:
        """Rounds of the checkpoints, ascending; some may be damaged, which only `restore` finds out."""
        return sorted(self._manager.all_steps())

    def close(self) -> None:
        """Wait until everything is written, and release the directory."""
        with os_errors(self._directory), _quiet():
            self._manager.close()

    def _read(self, round_index: int, structure: PyTree, shardings: PyTree | None) -> Restored:
        step = self._directory / str(round_index)
        with _damage(step):
            args = self._args.Composite(record=self._args.JsonRestore())
            content = self._manager.restore(round_index, args=args)["record"]
        content = checked(content, {"owner": str, "arrays": dict, "record": dict})
        if content["owner"] != self._owner:
            requirement = "must hold checkpoints of its own lanes only"
            remedy = "Put back the checkpoint that belongs there, or remove this one; then resume again."
            raise ArgumentError("out", requirement, f"{step} is of other lanes or of another run", remedy)
        stored, expected = content["arrays"], dict(_named_leaves(structure))
        of_state = {name: form for name, form in stored.items() if not name.startswith(_BESIDE)}
        self._refuse_form(of_state, expected, round_index)
        first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        placed = dict(_named_leaves(shardings)) if shardings is not None else {}
        wanted: dict[str, Any] = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed.get(name, first))
            for name, leaf in expected.items()
            if leaf.size
        }
        others = {name: form for name, form in stored.items() if name.startswith(_BESIDE)}
        wanted |= {name: np.empty(shape, dtype) for name, (dtype, shape, _) in others.items()}
        with _damage(step):
            args = self._args.Composite(arrays=self._args.StandardRestore(wanted))
            arrays = self._manager.restore(round_index, args=args)["arrays"]
        for (name, (*_, value)), found in zip(
            stored.items(), _sums({name: arrays[name] for name in stored}), strict=True
        ):
            if value != found:
                raise Damaged(f"{name} is altered")
        leaves = [arrays[name] if leaf.size else jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in expected.items()]
        state = jax.tree.unflatten(jax.tree.structure(structure), leaves)
        beside = {name.removeprefix(_BESIDE): arrays[name] for name in others}
        return Restored(round_index, state, beside, content["record"])

    def _refuse_form(self, stored: Mapping[str, Any], expected: Mapping[str, Any], round_index: int) -> None:
        """ArgumentError where leaves, shapes or dtypes differ from those that are expected."""
        wanted = {name: _form(leaf) for name, leaf in expected.items() if leaf.size}
        entries = {name: [dtype, shape] for name, (dtype, shape, _) in stored.items()}
        for name in (*wanted, *(name for name in entries if name not in wanted)):
            if entries.get(name) != wanted.get(name):
                where = f"the checkpoint of round {round_index} in {self._directory} has {_shown(entries.get(name))}"
                remedy = "Resume with the program that wrote it, or start again with another out."
                raise ArgumentError(f"state{name}", f"must be {_shown(wanted.get(name))}", where, remedy)

    def _set_aside(self, round_index: int) -> None:
        """Rename a damaged checkpoint, of which somebody may still use a part."""
        free = (self._directory / f"damaged_{round_index}{'-' * number}" for number in range(1000))
        (self._directory / str(round_index)).rename(next(path for path in free if not path.exists()))


@contextlib.contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Raise as OSError, naming `path`, an error of the system that the storage layer wraps in another class.

    Examples:
        >>> with os_errors(Path("run")):
        ...     raise ValueError("RESOURCE_EXHAUSTED: Failed writing: No space left on device [os_error_code='28']")
        Traceback (most recent call last):
        ...
        OSError: [Errno 28] No space left on device: 'run'
    """
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        named = _OS_ERROR.search(str(error))
        if named is None:
            raise
        raise OSError(int(named.group(1)), os.strerror(int(named.group(1))), str(path)) from error


@contextlib.contextmanager
def _joined() -> Iterator[None]:
    """Let the threads of a checkpoint's other parts end, for a few seconds, where one part cannot be written.

    A process that ends meanwhile gives a thread no place to run, and those that wait for its signal last five minutes.
    """
    try:
        yield
    except Exception:
        for thread in threading.enumerate():
            if type(thread).__module__.startswith("orbax."):
                thread.join(_SECONDS_TO_END)
        raise


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Raise errors of the storage layer while it reads, such as a missing file or unreadable bytes, as `Damaged`."""
    try:
        with os_errors(path), _quiet():
            yield
    except MemoryError:
        raise
    except OSError as error:
        if error.errno not in (None, errno.ENOENT):
            raise
        raise Damaged(str(error).strip().split("\n")[0][:120] or type(error).__name__) from error
    except Exception as error:
        raise Damaged(str(error).strip().split("\n")[0][:120] or type(error).__name__) from error


def _sums(leaves: Mapping[str, Any]) -> list[int]:
    """A checksum of each leaf: the state's leaves on their devices, others by their bytes."""
    sums = jax.device_get(_device_sums({name: leaf for name, leaf in leaves.items() if not name.startswith(_BESIDE)}))
    return [int(sums[name]) if name in sums else zlib.crc32(leaf.tobytes()) for name, leaf in leaves.items()]


@jax.jit
def _device_sums(leaves: dict[str, Array]) -> dict[str, Array]:
    """Sum of each leaf's words modulo 2^32, each times an odd number by its place. One flipped bit changes the sum."""

    def of(leaf: Array) -> Array:
        size = leaf.dtype.itemsize
        words = leaf.astype(jnp.uint8) if leaf.dtype == bool else leaf
        words = jax.lax.bitcast_convert_type(words, {1: jnp.uint8, 2: jnp.uint16}.get(size, jnp.uint32))
        place = jnp.zeros((), jnp.uint32)  # in row-major order; without a reshape, which would gather shares
        for axis, length in enumerate(words.shape):
            place = place * jnp.uint32(length % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        return jnp.sum(words.astype(jnp.uint32) * (place * jnp.uint32(2654435761) | 1), dtype=jnp.uint32)

    return jax.tree.map(of, leaves)


def _give_back_memory() -> None:
    """Give freed memory of the storage layer back to the system. glibc keeps much of it, more with each checkpoint."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def _named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf; the path of a bare array is "."."""
    return [(jax.tree_util.keystr(path) or ".", leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _form(leaf: Any) -> list[Any]:
    return [np.dtype(leaf.dtype).name, list(leaf.shape)]


def _shown(form: list[Any] | None) -> str:
    return "absent" if form is None else f"{form[0]}{form[1]}"


@functools.cache
def _silence_threads() -> None:
    """Drop messages of storage threads that go on after an error which has been raised already."""
    show = sys.unraisablehook

    def unless_late(unraisable: Any) -> None:
        if not str(unraisable.exc_value).startswith(_LATE):
            show(unraisable)

    sys.unraisablehook = unless_late
    logging.getLogger("asyncio").addFilter(lambda record: "never retrieved" not in record.getMessage())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence orbax's notices: this module raises errors, or warns, where something matters."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
