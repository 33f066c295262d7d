"""Pickled integer arrays, read without trusting the file.

A pickle is a program: it may import and call anything. And even where only NumPy's own array constructors are
admitted, a damaged file can hand them a state that crashes the interpreter. So no class that a file names is ever used:
simple stand-ins note what the file says about its arrays, and `unpickle_arrays` builds these from the notes.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from typing import Any

import numpy as np


class _Dtype:
    """Stands in for numpy.dtype: a code such as u1 and, from the state, the byte order."""

    def __init__(self, code: Any, *flags: Any):
        self.code = code
        self.byte_order: Any = "|"

    def __setstate__(self, state: Any) -> None:
        self.byte_order = state[1]

    def resolve(self) -> np.dtype:
        """The dtype, which must be one of integers: no others can hold pixels or labels."""
        order, code = (part.decode() if isinstance(part, bytes) else part for part in (self.byte_order, self.code))
        if not re.fullmatch("[<>|=][iu][1248]", order + code):
            raise pickle.UnpicklingError(f"an array has the dtype {order + code}")
        return np.dtype(order + code)


class _Array:
    """Stands in for numpy.ndarray and its constructor; the content comes as the state."""

    def __init__(self, *arguments: Any):
        self.content: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, raw = state
        self.content = (shape, dtype, "F" if is_fortran else "C", raw)

    def resolve(self) -> np.ndarray:
        """The array; NumPy itself checks that the bytes fill the shape."""
        shape, dtype, order, raw = self.content
        if not isinstance(raw, bytes | bytearray) or not all(isinstance(length, int) for length in shape):
            raise pickle.UnpicklingError("an array has no bytes or no shape")
        return np.frombuffer(bytes(raw), dtype.resolve()).reshape(shape, order=order)


class _BufferArray(_Array):
    """Stands in for numpy's _frombuffer, the constructor of protocol 5."""

    def __init__(self, buffer: Any, dtype: Any, shape: Any, order: Any):
        self.content = (shape, dtype, order, buffer)


class _Latin(bytes):
    """Stands in for codecs.encode, by which Python 3 writes bytes in protocol 2; no other codec is admitted."""

    def __new__(cls, text: str, encoding: str):
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"it asks for the codec {encoding}")
        return bytes.__new__(cls, text.encode("latin1"))


# NumPy 2 moved its core package; files written before and after name it differently.
_STAND_INS: dict[tuple[str, str], type] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _BufferArray,
    ("numpy._core.numeric", "_frombuffer"): _BufferArray,
    ("_codecs", "encode"): _Latin,
}


# The Python implementation: that in C sizes its memo table by a number in the file, so that one damaged byte can ask
# for gigabytes, and it has been seen to leave buffers behind. A CIFAR-10 file takes under half a second.
class _Unpickler(pickle._Unpickler):
    """Resolves every global to a stand-in or refuses it."""

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in of `module.name`."""
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None


def unpickle_arrays(content: bytes) -> dict[Any, Any]:
    """A pickled dictionary of integer arrays and plain values, from Python 2 or 3.

    Args:
        content: the pickle. Text of Python 2 becomes bytes.

    Returns:
        The dictionary; its values may be arrays of integers, numbers, text, and lists or dictionaries of plain values.

    Raises:
        pickle.UnpicklingError: the pickle is damaged, holds something else, or asks for anything but arrays.

    Guarantees:
        - nothing is imported or called on behalf of the file.

    Example:
        >>> unpickle_arrays(pickle.dumps({"labels": [3, 5], "data": np.arange(2)}))
        {'labels': [3, 5], 'data': array([0, 1])}
        >>> unpickle_arrays(pickle.dumps({"data": print}))
        Traceback (most recent call last):
        ...
        pickle.UnpicklingError: it asks for builtins.print
    """
    try:
        # Reads without executing: a damaged length is found here, before anything of that length is allocated.
        for _ in pickletools.genops(content):
            pass
        loaded = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(loaded, dict):
            raise pickle.UnpicklingError(f"it holds a {type(loaded).__name__}")
        return {key: value.resolve() if isinstance(value, _Array) else value for key, value in loaded.items()}
    except pickle.UnpicklingError:
        raise
    # A damaged pickle can raise nearly anything, from IndexError to MemoryError.
    except Exception as error:
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from None
