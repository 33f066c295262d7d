"""Leading slices of a model's parameters, which a narrower model with the same layers shares with a wider one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from jaxfl.core import ArgumentError, Array, Task, Variables, check

AxisGroups = Mapping[str, Mapping[int, int]]
"""Path of a leaf in the parameters or in the model state, as "dense_1/kernel" -> axis -> number of equal runs along
that axis. A slice keeps the first part of each run. An axis that is not named is one run."""


class Slices(NamedTuple):
    """The part of a model's variables that a narrower model has.

    Attributes:
        take: wide variables -> narrow variables.
        put: (wide variables, narrow variables) -> the wide ones with that part replaced.
    """

    take: Callable[[Variables], Variables]
    put: Callable[[Variables, Variables], Variables]


def variable_shapes(task: Task) -> Variables:
    """Shapes of a task's parameters and model state, which is None where it has none; nothing is computed."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    model_state = None if task.init_state is None else jax.eval_shape(task.init_state)
    return Variables(params=jax.eval_shape(task.init, key), model_state=model_state)


def leading_slices(wide: Variables, narrow: Variables, axis_groups: AxisGroups) -> Slices:
    """Slices between two models.

    Args:
        wide: arrays or shapes of the wider model; the model state may be None.
        narrow: those of the narrower model: the same trees, each leaf at most as large along every axis.
        axis_groups: see `AxisGroups`.

    Raises:
        ArgumentError: trees that differ in more than size, a larger axis, an unknown path, or runs that do not fit.

    Guarantees:
        - what is put is taken back, and all else stays bit for bit.
        - a slice of every run is taken.

    Examples:
        >>> import jax.numpy as jnp
        >>> wide, narrow = (Variables({"w": jnp.arange(size)}, None) for size in (6, 4))
        >>> slices = leading_slices(wide, narrow, {"w": {0: 2}})
        >>> slices.take(wide).params["w"].tolist()
        [0, 1, 3, 4]
        >>> slices.put(wide, Variables({"w": jnp.zeros(4, jnp.int32)}, None)).params["w"].tolist()
        [0, 0, 2, 0, 0, 5]
    """
    wide_leaves, structure = jax.tree.flatten_with_path(wide)
    narrow_leaves, narrow_structure = jax.tree.flatten(narrow)
    if structure != narrow_structure:
        found = f"got {narrow_structure} for {structure}"
        remedy = "Build all tasks from one network, with different numbers of channels."
        raise ArgumentError("tasks", "must have the same parameters and model state but for their sizes", found, remedy)
    names = [jax.tree_util.keystr(path[1:], simple=True, separator="/") for path, _ in wide_leaves]
    unknown = [name for name in axis_groups if name not in names]
    if unknown:
        remedy = f"Choose among {', '.join(names)}."
        raise ArgumentError("axis_groups", "must name parameters or model state", f"got {unknown[0]!r}", remedy)
    boxes = [
        _box(name, leaf.shape, part.shape, axis_groups.get(name, {}))
        for name, (_, leaf), part in zip(names, wide_leaves, narrow_leaves, strict=True)
    ]

    def take(tree):
        leaves = structure.flatten_up_to(tree)
        return structure.unflatten([box.take(leaf) for box, leaf in zip(boxes, leaves, strict=True)])

    def put(tree, part):
        pairs = zip(boxes, structure.flatten_up_to(tree), structure.flatten_up_to(part), strict=True)
        return structure.unflatten([box.put(leaf, values) for box, leaf, values in pairs])

    return Slices(take, put)


class _Box(NamedTuple):
    """A leaf's slice. With every axis cut into (runs, length of a run), the slice is a box at the origin."""

    wide: tuple[int, ...]
    narrow: tuple[int, ...]
    wide_runs: tuple[int, ...]  # (runs, length, runs, length, ...)
    narrow_runs: tuple[int, ...]

    def take(self, leaf: Array) -> Array:
        in_runs = leaf.reshape(self.wide_runs)
        return jax.lax.slice(in_runs, (0,) * in_runs.ndim, self.narrow_runs).reshape(self.narrow)

    def put(self, leaf: Array, part: Array) -> Array:
        in_runs, part_in_runs = leaf.reshape(self.wide_runs), part.reshape(self.narrow_runs)
        return jax.lax.dynamic_update_slice(in_runs, part_in_runs, (0,) * in_runs.ndim).reshape(self.wide)


def _box(name: str, wide: tuple[int, ...], narrow: tuple[int, ...], groups: Mapping[int, int]) -> _Box:
    """The slice of the leaf called `name`."""
    if len(wide) != len(narrow) or any(part > whole for part, whole in zip(narrow, wide, strict=True)):
        found = f"{name} has shape {narrow} in a task after one in which it has {wide}"
        remedy = "Order the models from the widest to the narrowest."
        raise ArgumentError("tasks", "must not have a larger leaf than the task before", found, remedy)
    for axis, runs in groups.items():
        check.at_least(1, **{f"axis_groups[{name!r}]": runs})
        if not 0 <= axis < len(wide) or wide[axis] % runs or narrow[axis] % runs:
            found = f"got {runs} for axis {axis} of {name}, which is {wide} and {narrow}"
            remedy = "Count the channels, gates or directions that lie one after the other there."
            raise ArgumentError("axis_groups", "must cut an axis of every model into equal runs", found, remedy)

    def in_runs(shape: tuple[int, ...]) -> tuple[int, ...]:
        counts = [groups.get(axis, 1) for axis in range(len(shape))]
        return tuple(number for runs, size in zip(counts, shape, strict=True) for number in (runs, size // runs))

    return _Box(wide, narrow, in_runs(wide), in_runs(narrow))
