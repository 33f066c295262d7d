"""Several processes that train one run together, started by `jax.distributed.initialize`.

All of them make the same calls in the same order, on a disk that they have in common. Only process 0 writes, and
decides by clocks and signals (`on_first`); all of them read files (`on_all`). Both end in an exchange: no process goes
on before the others are there, and a failure of one ends all. With a single process, every function here does the same
for that process and sends nothing.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from jaxfl.core import ArgumentError, PyTree

_T = TypeVar("_T")
_P = ParamSpec("_P")

_BLOCK = 4096  # bytes: texts are padded to multiples of it, so that few lengths are compiled
_ERRORS = {kind.__name__: kind for kind in (ArgumentError, OSError, MemoryError, RuntimeError)}  # the last: all else
_OF_ANOTHER = "of_another_process"  # attribute of an exception
_at_work = threading.local()  # whether this thread is in a call of `on_first` or `on_all`


def is_multiprocess() -> bool:
    """True if more than one process trains. With a single process this starts no backend of JAX."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """True if this is process 0, which writes files and messages."""
    return not is_multiprocess() or jax.process_index() == 0


def on_first(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function whose body only process 0 runs. All get its result, which JSON can hold, or its exception.

    Inside such a function, or one of `on_all`, both decorators only call.

    Guarantees:
        - every process gets what process 0 got, or its exception.

    Examples:
        >>> on_first(lambda: 3)()
        3
    """

    @functools.wraps(call)
    def shared(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return _agreed(lambda: call(*args, **kwargs) if is_first() else None, is_told=True)

    return shared


def on_all(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function that every process runs, on the same files or on its own facts, such as its free memory.

    Each process gets its own result; results are not sent.

    Guarantees:
        - a failure on one process fails on all.

    Examples:
        >>> on_all(lambda: 3)()
        3
    """

    @functools.wraps(call)
    def shared(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return _agreed(functools.partial(call, *args, **kwargs), is_told=False)

    return shared


def any_process(flag: bool) -> bool:
    """True if this holds on any process.

    Examples:
        >>> any_process(False)
        False
    """
    return not least(not flag)


def least(value: float) -> float:
    """The least of all processes' values, in float32 where there are several."""
    return float(np.min(multihost_utils.process_allgather(np.float32(value)))) if is_multiprocess() else value


def of_another_process(error: BaseException) -> bool | None:
    """True if an exception was first raised on another process, which reports it; None without an exchange."""
    return getattr(error, _OF_ANOTHER, None)


def fetched(arrays: PyTree) -> PyTree:
    """The same arrays; whole, and of NumPy, where other processes hold parts of them.

    All processes call it at the same time. Each leaf in turn passes through every device.
    """

    def whole(leaf: Any) -> Any:
        here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
        return leaf if here else multihost_utils.process_allgather(leaf, tiled=True)

    return jax.tree.map(whole, arrays)


def put(leaf: Any, sharding: Sharding) -> jax.Array:
    """Lay an array that every process has over the devices of all; each process fills its own devices."""
    if sharding.is_fully_addressable or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        return jax.device_put(leaf, sharding)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(put(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
    values = np.asarray(leaf)
    return jax.make_array_from_callback(values.shape, sharding, lambda where: values[where])


def _agreed(call: Callable[[], Any], *, is_told: bool) -> Any:
    """The call's own result, or process 0's with `is_told`. If a process fails, raise the first one's exception."""
    if not is_multiprocess() or getattr(_at_work, "now", False):
        return call()
    result, failure, text = None, None, ""
    _at_work.now = True
    try:
        result = call()
        text = json.dumps([None, result], default=os.fspath) if is_told and result is not None else ""
    except Exception as error:
        failure, text = error, json.dumps([_described(error), None], default=str)
    finally:
        _at_work.now = False
    outcomes = [json.loads(text or "[null, null]") for text in _gathered(text)]
    for index, (described, _) in enumerate(outcomes):
        if described is not None:
            is_own = index == jax.process_index()
            raised = failure if is_own and failure else _ERRORS[described[0]](*described[1:])
            setattr(raised, _OF_ANOTHER, not is_own)
            raise raised
    return outcomes[0][1] if is_told and not is_first() else result


def _described(error: Exception) -> list[Any]:
    """The class and the arguments of the exception that other processes raise for this one."""
    kind = next((name for name, kind in _ERRORS.items() if isinstance(error, kind)), "RuntimeError")
    text = f"{type(error).__name__}: {error}"
    return [kind, text] if kind == "RuntimeError" else [kind, *error.__reduce__()[1]]  # an OSError's path, too


def _gathered(text: str) -> list[str]:
    """Exchange texts: every process gets the text of each."""
    content = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(content.size))
    length = -(-int(sizes.max()) // _BLOCK) * _BLOCK
    if not length:
        return [""] * len(sizes)
    rows = multihost_utils.process_allgather(np.pad(content, (0, length - content.size)))
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]
