"""Pickled integer arrays, read without trusting the file.

A pickle is a program: it may import and call anything. And even where only NumPy's own array constructors are
admitted, a damaged file can hand them a state that crashes the interpreter. So no class that a file names is ever used:
simple stand-ins note what the file says about its arrays, and `unpickle_arrays` builds these from the notes.

A pickle may also name one object many times, so that a few bytes unfold to more than any memory or time. So the
file's own size bounds what is done with an object. Keys are short text, since the hash of a tuple walks through all
that it holds. No list is unfolded. Texts become no more bytes than the file has.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np

_MAX_OPCODES = 1_000_000  # ten times those of a batch: 10,000 labels and 10,000 names of files, of up to five each
_MAX_KEY = 100  # characters
_MAX_AXES = 32
_ORDERS, _CODES = tuple("<>|="), tuple(kind + size for kind in "iu" for size in "1248")
# What arrays and plain values are written with, from the oldest protocol to the newest. No sets, no instances.
_OPCODES = frozenset(
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "
    "STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 "
    "UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 EMPTY_LIST APPEND APPENDS LIST "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS "
    "GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL REDUCE BUILD".split()
)


class _Dtype:
    """Stands in for numpy.dtype: a code such as u1 and, from the state, the byte order."""

    def __init__(self, code: Any, *flags: Any):
        self.code = code
        self.byte_order: Any = "|"

    def __setstate__(self, state: Any) -> None:
        self.byte_order = state[1]

    def resolve(self) -> np.dtype:
        """The dtype, which must be one of integers: no others can hold pixels or labels."""
        order, code = (_short_text(part) for part in (self.byte_order, self.code))
        if order not in _ORDERS or code not in _CODES:
            raise pickle.UnpicklingError(f"an array has the dtype {order}{code}")
        return np.dtype(order + code)


def _short_text(part: Any) -> str:
    """Text of a dtype, of Python 2 or 3."""
    if not isinstance(part, bytes | str) or not 0 < len(part) <= 2:
        raise pickle.UnpicklingError("an array has a dtype of another kind")
    return part.decode("latin1") if isinstance(part, bytes) else part


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
        is_shape = isinstance(shape, tuple) and len(shape) <= _MAX_AXES and all(type(axis) is int for axis in shape)
        if not isinstance(raw, bytes | bytearray) or not is_shape or not isinstance(dtype, _Dtype):
            raise pickle.UnpicklingError("an array has no bytes or no shape")
        return np.frombuffer(raw, dtype.resolve()).reshape(shape, order=order)


class _BufferArray(_Array):
    """Stands in for numpy's _frombuffer, the constructor of protocol 5."""

    def __init__(self, buffer: Any, dtype: Any, shape: Any, order: Any):
        self.content = (shape, dtype, order, buffer)


class _Named:
    """Callable stand-in for a name in the file, on which nothing can be set.

    A class or a function would not do: a file can set attributes of either, which the next file would meet.
    """

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]):
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it sets the state of a class")


# NumPy 2 moved its core package; files written before and after name it differently.
_STAND_INS: dict[tuple[str, str], type] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _BufferArray,
    ("numpy._core.numeric", "_frombuffer"): _BufferArray,
}


def _with_checked_keys(opcode: bytes) -> Callable[[Any], None]:
    """Wrap an opcode that sets entries of a dictionary in a check of the keys. Only short text is hashed."""
    set_entries: Callable[[Any], None] = pickle._Unpickler.dispatch[opcode[0]]

    def load(unpickler: Any) -> None:
        stack = unpickler.stack  # since the last mark: keys and values by turns
        for key in stack[-2:-1] if opcode == pickle.SETITEM else stack[::2]:
            if not isinstance(key, bytes | str) or len(key) > _MAX_KEY:
                raise pickle.UnpicklingError("a dictionary has a key that is no short text")
        set_entries(unpickler)

    return load


# The Python implementation: that in C sizes its memo table by a number in the file, so that one damaged byte can ask
# for gigabytes, and it has been seen to leave buffers behind. A CIFAR-10 file takes under half a second.
class _Unpickler(pickle._Unpickler):
    """Resolves every global to a stand-in or refuses it, and looks at keys before they are hashed."""

    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content), encoding="bytes")
        self._bytes_left = len(content)

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in of `module.name`."""
        if (module, name) == ("_codecs", "encode"):
            return _Named(self._encode)
        try:
            return _Named(_STAND_INS[module, name])
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None

    def _encode(self, text: str, encoding: str) -> bytes:
        """Stands in for codecs.encode, by which Python 3 writes bytes in protocol 2; no other codec is admitted."""
        if not isinstance(text, str) or not isinstance(encoding, str) or encoding != "latin1":
            raise pickle.UnpicklingError(f"it asks for the codec {encoding if isinstance(encoding, str) else 'none'}")
        self._bytes_left -= len(text)
        if self._bytes_left < 0:
            raise pickle.UnpicklingError("it encodes a text again and again")
        return text.encode("latin1")

    dispatch = pickle._Unpickler.dispatch | {
        opcode[0]: _with_checked_keys(opcode) for opcode in (pickle.DICT, pickle.SETITEM, pickle.SETITEMS)
    }


def unpickle_arrays(content: bytes) -> dict[Any, Any]:
    """A pickled dictionary of integer arrays and plain values, from Python 2 or 3.

    Args:
        content: the pickle. Text of Python 2 becomes bytes.

    Returns:
        The dictionary, its keys text; its values may be arrays of integers, numbers, text, and lists or dictionaries
        of plain values. One list may be there many times, so that unfolding it may take any time.

    Raises:
        pickle.UnpicklingError: the pickle is damaged, holds something else, or asks for anything but arrays.

    Guarantees:
        - nothing is imported or called on behalf of the file.
        - reading a file changes nothing for the next.
        - time and memory are bounded by a multiple of the file's size.

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
        for position, (opcode, _, _) in enumerate(pickletools.genops(content)):
            if opcode.name not in _OPCODES or position >= _MAX_OPCODES:
                surplus = f"more than {_MAX_OPCODES:,} opcodes" if position >= _MAX_OPCODES else opcode.name
                raise pickle.UnpicklingError(f"it has {surplus}")
        loaded = _Unpickler(content).load()
        if not isinstance(loaded, dict):
            raise pickle.UnpicklingError(f"it holds a {type(loaded).__name__}")
        return {key: value.resolve() if isinstance(value, _Array) else value for key, value in loaded.items()}
    except pickle.UnpicklingError:
        raise
    # A damaged pickle can raise nearly anything, from IndexError to MemoryError.
    except Exception as error:
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from None
