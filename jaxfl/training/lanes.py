"""Lanes of a sweep: each one's own values, the data of its seed, and maps of a function of one lane over all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfl.core import Array, FederatedData, PyTree, RunKey, run_key
from jaxfl.core.keys import run_keys, run_words, settings_text
from jaxfl.core.threefry import fold_in
from jaxfl.training.case import Case
from jaxfl.training.processes import fetched, put
from jaxfl.training.sharding import LANES, node_mesh, place_data


class Lane(NamedTuple):
    """One case with one seed."""

    name: str
    case: Case
    seed: int
    data_digest: str  # of its training data; for keys, and in no file where the seed is secret
    node_names: tuple[str, ...] | None = None  # (n,), of its training data
    sizes: tuple[int, ...] = ()  # (n,), samples of each node
    secret: Array | None = None  # (), typed: makes every seed's base key; None: the seed alone makes it
    width: int = 0  # columns of its index table at least: those of the largest node over the seeds of its case

    @property
    def base(self) -> Array:
        """The base key of its seed, the same for all cases."""
        return _base_key(self.secret, np.uint32(self.seed))

    @property
    def identity(self) -> Mapping[str, Any]:
        """Everything that tells its runs from those of other lanes on the same data, but for the seed."""
        case = self.case
        default = {"name": self.name, "settings": case.settings, "numbers": case.numbers, "rounds": case.num_rounds}
        return case.identity or default

    @property
    def key(self) -> RunKey:
        """The key of its rounds; the key of initial parameters is the same for all cases."""
        return run_key(self.base, self.identity, self.data_digest)

    @property
    def label(self) -> tuple[str, int]:
        """Name of the lane in metrics.jsonl and config.json."""
        return self.name, self.seed


class LaneValues(NamedTuple):
    """Traced values of one lane, or of all lanes with the lane axis first."""

    key: RunKey
    row: Array  # (), int32, of its seed in leaves of `Tables` that have a seed axis
    numbers: dict[str, Array]  # name -> (), or (k,) for a tuple, float32


class Tables(NamedTuple):
    """Data and arrays of the seeds. A leaf that all seeds share is held once; any other has a seed axis first."""

    data: FederatedData
    arrays: dict[str, PyTree]  # measure -> what it prepared


class Strategy(NamedTuple):
    """Way to compute the lanes of one program."""

    num_slots: int  # lanes, padding included; 1 for a lane without an axis
    at_once: int  # lanes computed together on a device
    num_devices: int = 1  # that share the lanes
    num_node_shares: int = 1  # devices that share the nodes of every lane

    @property
    def text(self) -> str:
        """The strategy in words, for the screen and for config.json."""
        how = "one after the other" if self.at_once == 1 else f"in groups of {self.at_once}"
        if self.at_once > 1 and self.num_slots == self.num_devices * self.at_once:
            how = "side by side"
        if self.num_node_shares > 1:
            how += f", their nodes over {self.num_node_shares} devices"
        return how + (f" on each of {self.num_devices} devices" if self.num_devices > 1 else "")

    @property
    def mesh(self) -> Mesh | None:
        """The devices that share the nodes, or the lanes; None where one does all."""
        if self.num_node_shares > 1:
            return node_mesh(self.num_node_shares)
        return Mesh(np.array(jax.devices()[: self.num_devices]), (LANES,)) if self.num_devices > 1 else None

    def sharding(self, *axes: str) -> NamedSharding | None:
        """The sharding over these axes of the mesh; without axes the whole array is on every device."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec(*axes))

    def place(self, arrays: PyTree, *axes: str) -> PyTree:
        """The same arrays, laid over these axes of the mesh."""
        sharding = self.sharding(*axes)
        return arrays if sharding is None else jax.tree.map(partial(put, sharding=sharding), arrays)


class Uploads:
    """Training data on the devices, of the latest source only; arrays that its seeds share are there once."""

    def __init__(self) -> None:
        self._source: Any = None
        self._shares = 1
        self._held: dict[tuple[int, int], FederatedData] = {}  # seed, width
        self._tables: tuple[Any, Any] = None, None
        self._stacked: tuple[Any, Any] = None, None

    def of(self, lane: Lane) -> FederatedData:
        """The data of a case and seed, with an index table as wide as that of the other seeds of the case."""
        shares = lane.case.num_node_shares
        if self._source is not lane.case.data or self._shares != shares:
            self._held, self._stacked = {}, (None, None)  # frees the device's memory first
            self._source, self._shares = lane.case.data, shares
        if (lane.seed, lane.width) not in self._held:
            data = _widened(self._source(lane.seed), lane.width)
            if lane.case.placement is not None:
                lane.case.placement.check(data.num_nodes)
            data = place_data(data, shares)
            for other in list(self._held.values())[:1]:
                pairs = zip(jax.tree.leaves(other), jax.tree.leaves(data), strict=True)
                data = jax.tree.unflatten(jax.tree.structure(data), [_first_if_equal(*pair) for pair in pairs])
            self._held[lane.seed, lane.width] = data
        return self._held[lane.seed, lane.width]

    def stacked(self, lanes: Sequence[Lane]) -> tuple[FederatedData, list[bool]]:
        """`stack_seeds` of the data of these lanes, one of each seed; made once for programs with equal seeds."""
        data, whose = [self.of(lane) for lane in lanes], tuple((lane.seed, lane.width) for lane in lanes)
        if self._stacked[0] != whose:
            self._stacked = None, None
            self._stacked = whose, stack_seeds(data)
        return self._stacked[1]

    def tables(self, whose: Any, make: Callable[[], Tables]) -> Tables:
        """The tables that were made last, if they are of the same lanes; else they are freed, and made."""
        if self._tables[0] != whose:
            self._tables = None, None
            self._tables = whose, make()
        return self._tables[1]


def _widened(data: FederatedData, width: int) -> FederatedData:
    """The same data with columns of padding, so that seeds whose largest nodes differ share a program."""
    missing = width - data.max_size
    return data._replace(indices=np.pad(np.asarray(data.indices), ((0, 0), (0, missing)))) if missing > 0 else data


def equally_wide(trees: Sequence[PyTree]) -> list[PyTree]:
    """The trees, where index tables of data in one place are as wide as the widest of them."""

    def is_data(part):
        return isinstance(part, FederatedData)

    def width(*column):
        return max(data.max_size for data in column) if is_data(column[0]) else 0

    def widen(part, width):
        return _widened(part, width) if is_data(part) else part

    widths = jax.tree.map(width, *trees, is_leaf=is_data)
    return [jax.tree.map(widen, tree, widths, is_leaf=is_data) for tree in trees]


def keys_of(lanes: Sequence[Lane]) -> RunKey:
    """`key` of each lane, with a lane axis."""
    texts = {name: settings_text(lane.identity) for name, lane in {lane.name: lane for lane in lanes}.items()}
    words = np.stack([run_words(texts[lane.name], lane.data_digest) for lane in lanes])
    return run_keys(_base_keys(lanes[0].secret, np.array([lane.seed for lane in lanes], np.uint32)), words)


@jax.jit
def _base_key(secret: Array | None, seed: Array) -> Array:
    """`Lane.base` of a seed."""
    return jax.random.key(seed) if secret is None else fold_in(secret, seed)


_base_keys = jax.jit(jax.vmap(_base_key, in_axes=(None, 0)))


def over_lanes(fn: Callable[[PyTree], PyTree], lanes: PyTree, at_once: int) -> PyTree:
    """Map `fn`, a function of one lane, over the lanes."""
    if at_once == jax.tree.leaves(lanes)[0].shape[0]:
        return jax.vmap(fn)(lanes) if at_once > 1 else jax.tree.map(lambda leaf: leaf[None], fn(_only(lanes)))
    if at_once == 1:
        return jax.lax.map(fn, lanes)
    groups = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] // at_once, at_once, *leaf.shape[1:]), lanes)
    return jax.tree.map(_as_lanes, jax.lax.map(jax.vmap(fn), groups))


def update_lanes(
    fn: Callable[[LaneValues, list[Array]], tuple[list[Array], list[Array], PyTree]],
    lanes: LaneValues,
    parts: list[Array],
    at_once: int,
) -> tuple[list[Array], list[Array], PyTree]:
    """Map `fn`, (lane, its part of the state) -> (new part, shared values, results), over the lanes, in place."""
    num_groups = len(lanes.row) // at_once

    def group(lanes, parts):
        if at_once > 1:
            return jax.vmap(fn, out_axes=(0, None, 0))(lanes, parts)
        new, shared, results = fn(_only(lanes), _only(parts))
        new, results = jax.tree.map(lambda leaf: leaf[None], (new, results))
        return new, shared, results

    def step(held, index):
        def take(leaf):
            return jax.lax.dynamic_slice_in_dim(leaf, index * at_once, at_once)

        new, shared, results = group(*jax.tree.map(take, (lanes, held)))
        write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=index * at_once, axis=0)
        return [write(leaf, rows) for leaf, rows in zip(held, new, strict=True)], (shared, results)

    if num_groups == 1:
        return group(lanes, parts)
    parts, (shared, results) = jax.lax.scan(step, parts, jnp.arange(num_groups, dtype=jnp.int32))
    return parts, [leaf[-1] for leaf in shared], jax.tree.map(_as_lanes, results)


def _as_lanes(leaf: Array) -> Array:
    """Groups (g, k, ...) as lanes (g * k, ...)."""
    return leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])


def _only(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], tree)


def stack_seeds(trees: Sequence[PyTree]) -> tuple[PyTree, list[bool]]:
    """Trees of several seeds as one, and which of its leaves have a seed axis: those that are different objects."""
    columns = list(zip(*map(jax.tree.leaves, trees), strict=True))
    stacked = [any(leaf is not column[0] for leaf in column) for column in columns]
    pairs = zip(columns, stacked, strict=True)
    leaves = [_stacked(column) if several else column[0] for column, several in pairs]
    return jax.tree.unflatten(jax.tree.structure(trees[0]), leaves), stacked


def _stacked(leaves: Sequence[Array]) -> Array:
    """The arrays on a new first axis. The host joins what it can read: a program of as many operands compiles long."""
    if any(jnp.issubdtype(leaf.dtype, jax.dtypes.extended) or len(leaf.devices()) > 1 for leaf in leaves):
        return jnp.stack(leaves)
    return jnp.asarray(np.stack([np.asarray(leaf) for leaf in leaves]))


def _first_if_equal(first: Array, second: Array) -> Array:
    same = first.shape == second.shape and first.dtype == second.dtype
    return (
        first
        if first is second or (same and np.array_equal(np.asarray(fetched(first)), np.asarray(fetched(second))))
        else second
    )
