"""Layout of training over devices: the axis that they share, and each device's part of a state, of tables and of data.

If devices share the nodes, every device holds an equal number of them: their part of the state, their rows of the index
table, and the samples that they train on. A sample that nodes on several devices use lies on each of these devices.
Arrays without a node axis (a server's parameters, the test set) lie on all devices.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfl.core import ArgumentError, FederatedData, PyTree
from jaxfl.core.check import at_least, one_of
from jaxfl.core.devices import NODES, node_mesh, on_one_device
from jaxfl.core.types import PoolParts
from jaxfl.training.processes import is_multiprocess, put

LANES = "lanes"
"""The axis of a mesh over which the lanes of a sweep lie."""
AXES = (NODES, LANES)


class Placement(NamedTuple):
    """Which devices train, and what they share.

    Attributes:
        num_devices: how many of JAX's devices, the first ones, all processes' devices included.
        shard: "nodes", so that each device holds a share of every network, or "lanes", so that each computes some of
            the cases and seeds that share a program.
    """

    num_devices: int
    shard: str = NODES

    @property
    def num_node_shares(self) -> int:
        """Devices that share the nodes."""
        return self.num_devices if self.shard == NODES else 1

    def check(self, num_nodes: int) -> None:
        """Refuse devices that are not there, or that cannot share the nodes evenly."""
        one_of(AXES, shard=self.shard)
        at_least(1, devices=self.num_devices)
        there = jax.device_count()
        if self.num_devices > there:
            remedy = "On a CPU set JAX_NUM_CPU_DEVICES before Python starts."
            found = f"got {self.num_devices}, but JAX has {there}"
            raise ArgumentError("devices", "must be at most the devices of JAX", found, remedy)
        if is_multiprocess() and self.num_devices < there:
            found = f"got {self.num_devices}, but {jax.process_count()} processes have {there}"
            raise ArgumentError("devices", "must be those of all processes", found, f"Pass {there}, or leave it out.")
        if num_nodes % self.num_node_shares:
            most = max(k for k in range(1, self.num_devices) if num_nodes % k == 0)
            found = f"got {self.num_devices} devices for {num_nodes} nodes"
            raise ArgumentError("devices", "must divide the number of nodes", found, f"Pass {most}, or other nodes.")


def tracing_over(num_devices: int) -> contextlib.AbstractContextManager[Any]:
    """The context in which programs over nodes on these devices are traced."""
    return jax.set_mesh(node_mesh(num_devices)) if num_devices > 1 else on_one_device()


def node_shardings(mesh: Mesh, tree: PyTree, num_nodes: int, num_leading: int = 0) -> PyTree:
    """The sharding of each leaf: by node where the axis after the leading ones has length n, else whole everywhere.

    If an axis of length n is not that of the nodes, the layout is unusual, but the numbers are the same.
    """

    def sharding(leaf):
        by_node = leaf.ndim > num_leading and leaf.shape[num_leading] == num_nodes
        return NamedSharding(mesh, PartitionSpec(*[None] * num_leading, NODES) if by_node else PartitionSpec())

    return jax.tree.map(sharding, tree)


def cut_by_owner(data: FederatedData, num_shares: int) -> FederatedData:
    """Order the pool of samples by the device that uses them; each node keeps its samples in their order.

    Returns:
        NumPy arrays. The pool has `num_shares` equal parts, each filled up with copies of one of its samples.

    Guarantees:
        - every node's samples are the same, in the same order.
        - each node's samples lie in the part of its device, each once.

    Examples:
        >>> data = FederatedData(np.arange(4.0), np.arange(4), np.array([[3, 0], [1, 2]]), np.array([1, 2]))
        >>> cut = cut_by_owner(data, 2)
        >>> cut.inputs.tolist(), cut.indices.tolist()
        ([3.0, 3.0, 1.0, 2.0], [[0, 0], [2, 3]])
    """
    indices, sizes = np.asarray(data.indices), np.asarray(data.sizes)
    held = np.arange(indices.shape[1]) < sizes[:, None]
    groups = zip(np.split(indices, num_shares), np.split(held, num_shares), strict=True)
    rows_of = [np.unique(own[valid]) for own, valid in groups]
    length = max(map(len, rows_of))
    order = np.concatenate([np.append(rows, np.repeat(rows[:1], length - len(rows))) for rows in rows_of])
    places = [np.searchsorted(rows, own) for rows, own in zip(rows_of, np.split(indices, num_shares), strict=True)]
    placed = np.concatenate([share * length + own for share, own in enumerate(places)])
    firsts = np.repeat(np.arange(num_shares) * length, len(indices) // num_shares)[:, None]
    arrays: dict[str, Any] = {
        "inputs": np.asarray(data.inputs)[order],
        "labels": np.asarray(data.labels)[order],
        "indices": np.where(held, placed, firsts).astype(np.int32),
        "sizes": sizes,
    }
    return FederatedData(**arrays, parts=PoolParts(num_shares), node_names=data.node_names)


def place_data(data: FederatedData, num_devices: int) -> FederatedData:
    """Data on their devices: cut by owner where several share the nodes, else on JAX's default device.

    Where several processes train, each has all data and places the parts of its own devices.
    """
    if num_devices == 1:
        return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf), data)
    by_node = NamedSharding(node_mesh(num_devices), PartitionSpec(NODES))
    return jax.tree.map(lambda leaf: put(leaf, by_node), cut_by_owner(data, num_devices))


def share_shapes(tree: PyTree, shardings: PyTree) -> PyTree:
    """Shapes and dtypes of one device's share of each leaf."""

    def share(leaf, sharding):
        return jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype)

    return jax.tree.map(share, tree, shardings)
