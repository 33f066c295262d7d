"""Short texts of records, for people who print them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def short_repr(self: Any) -> str:
    """The `__repr__` of a record of arrays and functions: shapes, counts and names in place of contents.

    Examples:
        >>> import numpy as np
        >>> from typing import NamedTuple
        >>> class State(NamedTuple):
        ...     params: dict
        ...     round_index: np.ndarray
        ...     __repr__ = short_repr
        >>> State({"w": np.zeros((4, 3)), "b": np.zeros((4, 1))}, np.int32(0))
        State(params=2 arrays of 16 numbers, round_index=int32())
    """
    fields = {name: short(value) for name, value in self._asdict().items() if not _is_empty(value)}
    return f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in fields.items())})"


def layers_repr(self: Any) -> str:
    """The `__repr__` of a model: the names of its layers, and the counts of its parameters."""
    return f"{type(self).__name__}({some([name for name, _ in self.layers])}; {of_params(self.init)})"


def of_params(init: Any) -> str:
    """Counts of what `init` (key -> params) gives.

    Examples:
        >>> import numpy as np
        >>> of_params(lambda key: {"w": np.zeros((4, 3)), "b": np.zeros(4)})
        '2 arrays of 16 numbers'
    """
    import jax

    return short(jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0))))


def some(names: Sequence[str]) -> str:
    """Names with commas, of many the first and the last ones.

    Examples:
        >>> some(["in", "out"]), some([*"abcdefgh"])
        ('in, out', '8: a, b, c, ..., g, h')
    """
    shown = [*names] if len(names) <= 6 else [*names[:3], "...", *names[-2:]]
    return f"{len(names)}: " * (len(names) > 6) + ", ".join(shown)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | tuple | dict) and not value)


def short(value: Any) -> str:
    """One field of a record."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}({', '.join(map(str, value.shape))})"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__).partition(".")[0]
    import jax  # on use: data sets do without it

    leaves = jax.tree.leaves(value)
    if leaves and all(hasattr(leaf, "shape") for leaf in leaves):
        return f"{len(leaves)} arrays of {sum(math.prod(leaf.shape) for leaf in leaves):,} numbers"
    if hasattr(value, "_asdict"):
        return repr(value)
    return f"{len(value)} of {type(value[0]).__name__}" if type(value) is tuple and len(value) > 3 else repr(value)
