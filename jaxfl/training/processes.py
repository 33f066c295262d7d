"""Several processes that train one run together, started by `jax.distributed.initialize`.

All of them make the same calls in the same order. What touches files, clocks or signals is done by process 0 alone
(`of_first`), and the others take over what came of it, a value or an exception, so that no process decides by itself.
With a single process every function here is what it says of that process, and sends nothing.
"""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from jaxfl.core import PyTree

_T = TypeVar("_T")
_P = ParamSpec("_P")

_FIRST_BLOCK = 4096  # bytes, their number in front
_LARGEST_BLOCK = 1 << 26
_OF_ANOTHER = "of_another_process"  # attribute of an exception
_at_work = threading.local()  # whether this thread does something for all processes


def several() -> bool:
    """Whether more than one process trains. Starts no backend of JAX where there is one alone."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this is process 0, which writes and tells."""
    return not several() or jax.process_index() == 0


def of_first(call: Callable[[], _T]) -> _T:
    """Return the result of a call that process 0 alone makes. An exception is raised on all (`of_another_process`).

    Args:
        call: its results and exceptions are copied by pickle. Inside of it this function only calls.

    Guarantees:
        - every process gets what process 0 got, or its exception.

    Example:
        >>> of_first(lambda: 3)
        3
    """
    if _alone():
        return call()
    result: Any = None
    failure: Exception | None = None
    if is_first():
        _at_work.first = True
        try:
            result = call()
        except Exception as error:
            failure = error
        finally:
            _at_work.first = False
    return _settled(result, _sent((result, failure), 0))


def on_first(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function whose body process 0 alone runs; see `of_first`."""

    @functools.wraps(method)
    def shared(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return of_first(functools.partial(method, *args, **kwargs))

    return shared


def together(call: Callable[..., _T], *args: Any) -> _T:
    """A call that every process makes, and that fails on all where it fails on any.

    Args:
        call: of what one process alone can know, such as its free memory. It sends nothing to others.
        args: for it.

    Returns:
        What this process got.

    Guarantees:
        - what fails on one process fails on all.

    Example:
        >>> together(lambda: 3)
        3
    """
    if _alone():
        return call(*args)
    result: Any = None
    failure: Exception | None = None
    try:
        result = call(*args)
    except Exception as error:
        failure = error
    failed = np.flatnonzero(multihost_utils.process_allgather(np.array(failure is not None)))
    return _settled(result, _sent((None, failure), int(failed[0]))) if failed.size else result


def any_process(flag: bool) -> bool:
    """Whether this holds on any process.

    Example:
        >>> any_process(False)
        False
    """
    return bool(np.any(multihost_utils.process_allgather(np.array(flag)))) if not _alone() else flag


def least(value: float) -> float:
    """The least of all processes' values, in float32 where there are several."""
    return float(np.min(multihost_utils.process_allgather(np.float32(value)))) if not _alone() else value


def of_another_process(error: BaseException) -> bool | None:
    """Whether an exception was raised on another process, which tells of it; None where nothing was exchanged."""
    return getattr(error, _OF_ANOTHER, None)


def fetched(arrays: PyTree) -> PyTree:
    """The same arrays; whole, and of NumPy, where other processes hold parts of them.

    All processes ask at the same time. Leaf by leaf an array passes through every device.
    """

    def whole(leaf: Any) -> Any:
        here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
        return leaf if here else multihost_utils.process_allgather(leaf, tiled=True)

    return jax.tree.map(whole, arrays)


def put(leaf: Any, sharding: Sharding) -> jax.Array:
    """An array that every process has, laid over devices of all processes: each gives its own devices their parts."""
    if sharding.is_fully_addressable or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        return jax.device_put(leaf, sharding)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(put(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
    values = np.asarray(leaf)
    return jax.make_array_from_callback(values.shape, sharding, lambda where: values[where])


def _alone() -> bool:
    """Whether nothing is exchanged: a lone process, or process 0 while it does something for all."""
    return not several() or getattr(_at_work, "first", False)


def _settled(result: Any, outcome: tuple[Any, Exception | None]) -> Any:
    """The result of the process that had it, or what was sent; an exception is raised."""
    sent, failure = outcome
    if failure is not None:
        raise failure
    return sent if result is None else result


def _sent(outcome: tuple[Any, Exception | None], source: int) -> tuple[Any, Exception | None]:
    """The outcome of one process, in all of them; that one keeps its own."""
    is_source = jax.process_index() == source
    received = _broadcast(_pickled(outcome) if is_source else b"", is_source)
    result, failure = outcome if is_source else pickle.loads(received)
    if failure is not None:
        setattr(failure, _OF_ANOTHER, not is_source)
    return result, failure


def _pickled(outcome: tuple[Any, Exception | None]) -> bytes:
    result, failure = outcome
    try:
        content = pickle.dumps((result, failure), protocol=5)
        pickle.loads(content)
        return content
    except Exception:
        if failure is None:
            raise
        return pickle.dumps((None, RuntimeError(f"{type(failure).__name__}: {failure}")), protocol=5)


def _broadcast(content: bytes, is_source: bool) -> bytes:
    """Bytes of one process, in all of them."""
    size = len(content).to_bytes(8, "little")
    first = _block(size + content, 0, _FIRST_BLOCK, is_source)
    total = 8 + int.from_bytes(first[:8].tobytes(), "little")
    blocks, done = [first], _FIRST_BLOCK
    while done < total:
        length = min(_LARGEST_BLOCK, 1 << (total - done - 1).bit_length())  # few lengths, each of them compiled
        blocks.append(_block(size + content, done, length, is_source))
        done += length
    return np.concatenate(blocks)[8:total].tobytes()


def _block(content: bytes, first: int, length: int, is_source: bool) -> np.ndarray:
    part = np.frombuffer(content[first : first + length], np.uint8)
    padded = np.pad(part, (0, length - len(part)))
    return np.asarray(multihost_utils.broadcast_one_to_all(padded, is_source=is_source))
