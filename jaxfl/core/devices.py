"""Devices over which the nodes lie, a share of the nodes on each, as the mesh of the context says.

`jax.set_mesh(mesh)` around the tracing and the calls of a round names the devices. The nodes lie over its axis "nodes",
in equal shares and in order: of n nodes on s devices, device k holds those from k n / s on. Outside any mesh, and where
"nodes" is an axis of an enclosing `shard_map`, one device holds all nodes.

Where the nodes lie changes how a round is computed, and never what it computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxfl.core.types import FederatedData, PyTree

NODES = "nodes"
"""The axis of a mesh over which nodes lie."""

_on_one_device = jax.make_user_context(False)


def num_shares(num_nodes: int) -> int:
    """Count the devices that share the nodes where this is traced. The count is 1 where a single device holds them all.

    Args:
        num_nodes: n.

    Returns:
        The size of the axis "nodes" of the mesh of the context, where it is Auto or Explicit and divides n; else 1.

    Guarantees:
        - one share without a mesh, inside a shard_map over the nodes, and where devices cannot share evenly.

    Examples:
        >>> num_shares(8)
        1
        >>> with jax.set_mesh(node_mesh(1)):
        ...     num_shares(8)
        1
    """
    size = axis_size()
    return size if num_nodes % size == 0 else 1


def axis_size() -> int:
    """Size of the axis "nodes" of the context's mesh, even where they cannot share nodes evenly; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[NODES] if _kinds(mesh).get(NODES) in (AxisType.Auto, AxisType.Explicit) else 1


def on_one_device() -> AbstractContextManager[None]:
    """A context for tracing programs whose nodes all lie on one device, however many devices there are.

    Outside it a caller's shardings may divide the nodes without a mesh in the context, and programs keep to forms that
    JAX can divide.
    """
    return _on_one_device(True)


def may_be_shared() -> bool:
    """True where a caller's shardings may divide the nodes over devices without a mesh in the context."""
    return jax.device_count() > 1 and not _on_one_device.value


def node_mesh(num_devices: int) -> Mesh:
    """A mesh of JAX's first `num_devices` devices, with the axis "nodes"."""
    return Mesh(np.array(jax.devices()[:num_devices]), (NODES,))


def by_node(mesh: Mesh) -> NamedSharding:
    """The sharding of an array whose first axis is the nodes: a share on each device of the mesh's axis "nodes"."""
    return NamedSharding(mesh, PartitionSpec(NODES))


def on_each_device(body: Callable[..., PyTree], results: PartitionSpec, *args: tuple[PyTree, PartitionSpec]) -> PyTree:
    """Apply `body` to each device's share of the arguments, where `num_shares` is more than one.

    Args:
        body: a function of arrays, whose collectives use the axis `NODES`; it may be differentiated and vmapped.
        results: how its results lie over the devices.
        args: each argument with how it shall lie over the devices; an argument that lies otherwise is moved.

    Returns:
        The results of `body`, put together.

    Guarantees:
        - works on Auto and on Explicit meshes, and inside a shard_map over another axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    values, specs = zip(*args, strict=True)
    if _kinds(mesh)[NODES] == AxisType.Explicit:
        values = tuple(
            jax.tree.map(lambda leaf, spec=spec: jax.sharding.reshard(leaf, spec), value)
            for value, spec in zip(values, specs, strict=True)
        )
    return jax.shard_map(body, in_specs=specs, out_specs=results, axis_names={NODES})(*values)


def on_shares(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Let each device compute `fn` on its own nodes, where nodes lie over devices; else return `fn` itself.

    This matters for indexing: where indices include the node, XLA does not know that rows stay on their devices, and
    sends all rows to all devices.

    Args:
        fn: from arrays to arrays, all with the node axis first. Its result for a node depends on that node only.

    Guarantees:
        - equals the function.
    """

    nodes = PartitionSpec(NODES)

    def over_shares(*args):
        if num_shares(jax.tree.leaves(args)[0].shape[0]) == 1:
            return fn(*args)
        return on_each_device(fn, nodes, *((arg, nodes) for arg in args))

    return over_shares


def on_any_mesh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make `fn` work on meshes with Explicit axes, too, and in a `shard_map` that checks what varies between devices.

    With Explicit axes `fn` is traced as on an Auto mesh, and its results lie by node: types with shardings leave
    open how the results of many operations lie (indexing by a sharded array), and the compiler settles it well. In a
    shard_map its results vary wherever an argument does, so that a loop over rounds may carry them.

    Args:
        fn: (*arguments) -> pytree of arrays, as an `Algorithm` has them. Where one argument is `FederatedData`, results
            whose first axis has its number of nodes lie by node; else all results with an axis do.

    Guarantees:
        - equals the function.
    """

    @functools.wraps(fn)
    def wrapper(*args):
        args = varying_like(args, *args)
        mesh = _mesh_of(args)
        explicit = tuple(name for name, kind in _kinds(mesh).items() if kind == AxisType.Explicit)
        if not explicit:
            return varying_like(fn(*args), *args)
        num_nodes = next((part.num_nodes for part in args if isinstance(part, FederatedData)), None)

        def spec(leaf):
            by_node = leaf.ndim and num_nodes in (None, leaf.shape[0]) and num_shares(leaf.shape[0]) > 1
            return PartitionSpec(NODES) if by_node else PartitionSpec()

        with jax.sharding.use_abstract_mesh(mesh):
            auto = functools.partial(jax.sharding.auto_axes, fn, axes=explicit)
            specs = jax.tree.map(spec, jax.eval_shape(auto(out_sharding=PartitionSpec()), *args))
            return varying_like(auto(out_sharding=specs)(*args), *args)

    return wrapper


def varying_like(values: PyTree, *others: PyTree) -> PyTree:
    """Give `values` the type with which a loop may begin that computes new ones from `others`.

    Inside a caller's `shard_map` JAX knows that zeros are the same on all devices, while what a loop computes from
    arguments may vary. Where JAX checks this, a loop must begin with values of the type that it goes on with.

    Args:
        values: arrays.
        others: pytrees of arrays.

    Returns:
        The same values; outside a shard_map the same objects.
    """
    axes = frozenset().union(*(_varying(leaf) for leaf in jax.tree.leaves(others)))

    def cast(leaf):
        missing = tuple(sorted(axes - _varying(leaf)))
        if not missing:
            return leaf
        if hasattr(jax.lax, "pcast"):  # jax from 0.9
            return jax.lax.pcast(leaf, missing, to="varying")
        return jax.lax.pvary(leaf, missing)  # pyright: ignore[reportAttributeAccessIssue]

    return jax.tree.map(cast, values) if axes else values


def _varying(leaf: Any) -> frozenset[str]:
    """The axes of an enclosing shard_map over which an array varies."""
    aval = jax.typeof(leaf)
    axes = getattr(aval, "manual_axis_type", None)  # jax from 0.10
    return frozenset(axes.varying if axes is not None else getattr(aval, "vma", ()))


def _kinds(mesh: AbstractMesh) -> dict[str, AxisType]:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def _mesh_of(args: Any) -> AbstractMesh:
    """The mesh of the context; without one, the mesh in the type of an argument."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return mesh
    shardings = (getattr(jax.typeof(leaf), "sharding", None) for leaf in jax.tree.leaves(args))
    return next((sharding.mesh for sharding in shardings if sharding is not None and not sharding.mesh.empty), mesh)
