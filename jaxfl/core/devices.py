"""Over which devices the nodes lie, as the mesh of the context says.

`jax.set_mesh(mesh)` around the tracing and the calls of a round names the devices. The nodes lie over its axis "nodes",
in equal shares and in order: of n nodes on s devices, device k holds those from k n / s on. What is traced outside any
mesh, or where "nodes" is an axis of an enclosing `shard_map`, is told that one device holds all nodes.

Where the nodes lie changes how a round is computed, and never what it computes.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxfl.core.types import PyTree

NODES = "nodes"
"""The axis of a mesh over which nodes lie."""


def num_shares(num_nodes: int) -> int:
    """How many devices share the nodes where this is traced; 1 where a single device holds them all.

    Args:
        num_nodes: n.

    Returns:
        The size of the axis "nodes" of the mesh of the context, where it is Auto or Explicit and divides n; else 1.

    Guarantees:
        - one share without a mesh, inside a shard_map over the nodes, and where devices cannot share evenly.

    Example:
        >>> num_shares(8)
        1
        >>> with jax.set_mesh(jax.make_mesh((1,), (NODES,))):
        ...     num_shares(8)
        1
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if kinds.get(NODES) not in (AxisType.Auto, AxisType.Explicit):
        return 1
    size = mesh.shape[NODES]
    return size if num_nodes % size == 0 else 1


def node_axis(num_nodes: int) -> str | None:
    """The axis of the context's mesh over which the nodes lie, for a PartitionSpec; None where one device has all."""
    return NODES if num_shares(num_nodes) > 1 else None


def by_node(mesh: Mesh) -> NamedSharding:
    """The sharding of an array whose first axis is the nodes: a share on each device of the mesh's axis "nodes"."""
    return NamedSharding(mesh, PartitionSpec(NODES))


def on_each_device(body: Callable[..., PyTree], results: PartitionSpec, *args: tuple[PyTree, PartitionSpec]) -> PyTree:
    """`body` of each device's share of the arguments, where `num_shares` is more than one.

    Args:
        body: of arrays, in which `NODES` is the axis of collectives; it may be differentiated and vmapped.
        results: how what it gives lies over the devices.
        args: each argument, with how it lies; one that lies otherwise is brought there.

    Returns:
        What `body` gives, put together.

    Guarantees:
        - works on Auto and on Explicit meshes, and inside a shard_map over another axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    values, specs = zip(*args, strict=True)
    if dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[NODES] == AxisType.Explicit:
        values = tuple(
            jax.tree.map(lambda leaf, spec=spec: jax.reshard(leaf, spec), value)
            for value, spec in zip(values, specs, strict=True)
        )
    return jax.shard_map(body, in_specs=specs, out_specs=results, axis_names={NODES})(*values)
