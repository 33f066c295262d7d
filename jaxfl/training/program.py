"""Compiled program of the lanes of a sweep: one for all cases and seeds that differ in numbers only.

A lane is one case with one seed. The state of all lanes is stacked on a leading axis. Only `round_index` is shared,
so that a branch on it stays a branch: `vmap` would compute both sides. Inside the one executable the lanes are computed
side by side (`vmap`), in groups, or one after the other. The loop over groups lies outside the loop over rounds: a
group's tables are taken out and put back once a call, never once a round. A single lane runs unbatched. Where a CPU has
several devices, each takes a share of the lanes. Where the cases say so, devices share the lanes, or the nodes of every
lane, on any platform.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.stages import Compiled as Executable

from jaxfl.core import Algorithm, Array, FederatedData, PyTree
from jaxfl.core.node_loop import replicated
from jaxfl.core.platform import is_cpu
from jaxfl.training.case import Case, Measure, check_counted
from jaxfl.training.chunks import check_start, first_state, info_fields, rounds_fn
from jaxfl.training.lanes import (
    Lane,
    LaneValues,
    Strategy,
    Tables,
    Uploads,
    equally_wide,
    keys_of,
    over_lanes,
    stack_seeds,
    update_lanes,
)
from jaxfl.training.measures import CONSENSUS, test_scores
from jaxfl.training.peak_memory import PeakMemory, predicted_peak
from jaxfl.training.processes import fetched, is_multiprocess, put
from jaxfl.training.sharding import LANES, node_mesh, node_shardings, share_shapes, tracing_over


class Compiled(NamedTuple):
    """Executables of one program. They take lanes from `Program.lanes` and states from `init` or a checkpoint."""

    strategy: Strategy
    init: Executable  # (lanes, data) -> state
    rounds: Executable  # (lanes, state, data, num_rounds) -> (state, infos); the state is donated
    evaluate: Executable  # (lanes, state, arrays) -> measure -> what it computes
    fields: tuple[str, ...]  # of the info
    peak: PeakMemory  # predicted


class Program:
    """The lanes that share one compiled program.

    Args:
        lanes: the lanes. Their cases differ in nothing that is compiled, and their data have the same shapes.
        uploads: gives the training data of a lane.

    Guarantees:
        - a lane gives the same in a sweep as alone: the same bits one after the other, up to rounding in groups, and
          where a sum goes over all samples of a node while another seed's largest node is larger.
        - no copy of a table in a round.
        - a branch on the round number stays a branch.
    """

    def __init__(self, lanes: Sequence[Lane], uploads: Uploads):
        self.lanes = tuple(lanes)
        self.case = lanes[0].case
        standard = test_scores(self.case.task, self.case.test)
        self.measures: Mapping[str, Measure] = {"test": standard, **self.case.measures, "consensus": CONSENSUS}
        self._uploads = uploads
        spread = replicated(self.case.task.node_loop)
        self._replicated = spread if self.case.num_node_shares == 1 else None
        self._with_seeds: dict[str, list[bool]] = {}  # field of Tables -> which of its leaves carry a seed axis

    def check(self) -> None:
        """Run every check that constructors and `init` make on the host; compute nothing."""
        for case in {lane.name: lane.case for lane in self.lanes}.values():
            case.algorithm(_concrete_numbers(case))
        checked = set()
        for lane in self.lanes:
            if lane.sizes not in checked:
                checked.add(lane.sizes)
                data = self._uploads.of(lane)
                data = data._replace(sizes=fetched(data.sizes))
                check_start(self._algorithm(self._values(lane)), lane.key, data)

    @property
    def label(self) -> str:
        """Names of the cases, for messages."""
        names = list(dict.fromkeys(lane.name for lane in self.lanes))
        return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")

    @property
    def max_devices(self) -> int:
        """Devices that may share the lanes.

        Without a placement this is 1 on accelerators, and where each lane uses all devices by itself.
        """
        placement = self.case.placement
        if placement is not None:
            num_devices = placement.num_devices if placement.shard == LANES else 1
            return num_devices if is_multiprocess() else min(num_devices, len(self.lanes))
        if len(self.lanes) == 1 or not is_cpu() or self.case.task.node_loop.startswith("devices:"):
            return 1
        return min(jax.local_device_count(), len(self.lanes))

    @cached_property
    def structure(self) -> PyTree:
        """Shapes and dtypes of one lane's state."""
        lane, data = self._values(self.lanes[0]), self._uploads.of(self.lanes[0])
        return jax.eval_shape(lambda lane, data: first_state(self._algorithm(lane), lane.key, data), lane, data)

    def tables(self, lanes: Sequence[Lane], strategy: Strategy) -> Tables:
        """Make the tables of these lanes for the compiled functions: of all seeds, or of a single lane's seed."""
        seeds = {lane.seed: lane for lane in (lanes if strategy.num_slots == 1 else self.lanes)}
        whose = id(self), strategy, *seeds
        return self._uploads.tables(whose, lambda: self._made_tables([*seeds.values()], strategy))

    def _made_tables(self, lanes: Sequence[Lane], strategy: Strategy) -> Tables:
        """The tables, of one lane of each seed."""
        data = [self._uploads.of(lane) for lane in lanes]
        own = {name: self._own_data(measure) for name, measure in self.measures.items() if measure.data is not None}
        arrays = [
            {
                name: measure.prepare(lane.base, own[name][lane.seed] if name in own else trained_on)
                for name, measure in self.measures.items()
            }
            for lane, trained_on in zip(lanes, data, strict=True)
        ]
        stacked, self._with_seeds["data"] = self._uploads.stacked(lanes)
        arrays, self._with_seeds["arrays"] = stack_seeds(arrays)
        tables = Tables(stacked, arrays)
        if strategy.num_node_shares > 1:
            return Tables(self._spread("data", stacked, strategy), self._spread("arrays", arrays, strategy))
        return strategy.place(tables)

    def _own_data(self, measure: Measure) -> dict[int, PyTree]:
        """Seed -> the measure's own data, of equal shapes for the seeds of all lanes."""
        assert measure.data is not None
        of_seed = {seed: measure.data(seed) for seed in dict.fromkeys(lane.seed for lane in self.lanes)}
        return dict(zip(of_seed, equally_wide([*of_seed.values()]), strict=True))

    def _spread(self, field: str, tree: PyTree, strategy: Strategy) -> PyTree:
        """Lay tables over the devices that share the nodes: leaves with a node axis by node, a pool by its owners."""
        mesh, nodes = node_mesh(strategy.num_node_shares), self._uploads.of(self.lanes[0]).num_nodes
        pools = {id(tree.inputs), id(tree.labels)} if isinstance(tree, FederatedData) else set()

        def spread(leaf, stacked):
            behind = nodes if id(leaf) not in pools else leaf.shape[int(stacked)]
            return put(leaf, node_shardings(mesh, leaf, behind, int(stacked)))

        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, list(map(spread, leaves, self._with_seeds[field])))

    def lane_values(self, lanes: Sequence[Lane], strategy: Strategy) -> LaneValues:
        """Values of the lanes of one pass, padded with the first lane, or of one lane without an axis."""
        if strategy.num_slots == 1:
            return strategy.place(self._values(lanes[0]))
        rows = {seed: row for row, seed in enumerate(dict.fromkeys(lane.seed for lane in self.lanes))}
        padded = [*lanes, *[lanes[0]] * (strategy.num_slots - len(lanes))]
        columns = {name: [lane.case.numbers[name] for lane in padded] for name in self.case.numbers}
        values = LaneValues(
            key=keys_of(padded),
            row=jnp.asarray([rows[lane.seed] for lane in padded], jnp.int32),
            numbers={name: jnp.asarray(column, jnp.float32) for name, column in columns.items()},
        )
        return strategy.place(values, *([LANES] if strategy.num_devices > 1 else []))

    def slots_structure(self, num_slots: int) -> PyTree:
        """Shapes and dtypes of the state of this many lanes; a lane alone has no axis."""
        if num_slots == 1:
            return self.structure
        return self.map_lanes(lambda leaf: jax.ShapeDtypeStruct((num_slots, *leaf.shape), leaf.dtype), self.structure)

    def lane_state(self, state: PyTree, strategy: Strategy, index: int) -> PyTree:
        """One lane's state, whole, without an axis of lanes."""
        state = fetched(state)
        if strategy.num_slots == 1:
            return state
        return self.map_lanes(lambda leaf: np.asarray(np.asarray(leaf)[index]), state)

    def node_params(
        self, state: PyTree, strategy: Strategy, indices: Sequence[int], lanes: Sequence[Lane]
    ) -> list[PyTree]:
        """Parameters of lanes in these slots, leaves (n, *leaf), of NumPy; what they do not need is not fetched."""
        compute, is_read = self._params_of

        def rows(leaf, is_shared):
            whole = np.asarray(fetched(leaf))
            if strategy.num_slots == 1 or is_shared:
                return np.broadcast_to(whole, (len(lanes), *whole.shape))
            return whole[: len(lanes)] if [*indices] == [*range(len(lanes))] else whole[np.asarray(indices)]

        leaves = zip(jax.tree.leaves(state), self._is_shared, is_read, strict=True)
        columns = {name: [lane.case.numbers[name] for lane in lanes] for name in self.case.numbers}
        numbers = {name: np.asarray(column, np.float32) for name, column in columns.items()}
        params = jax.device_get(compute(numbers, [rows(leaf, is_shared) for leaf, is_shared, read in leaves if read]))
        return [jax.tree.map(lambda leaf, i=i: leaf[i], params) for i in range(len(lanes))]

    @cached_property
    def _params_of(self) -> tuple[Callable[[dict[str, Any], list[Any]], PyTree], list[bool]]:
        """(compiled `Algorithm.node_params` of lanes, from the leaves that it reads; whether it reads each leaf)."""

        def params(numbers: dict[str, Array], state: PyTree) -> PyTree:
            return self.case.algorithm(numbers).node_params(state)

        traced = jax.make_jaxpr(params)(_concrete_numbers(self.case), self.structure).jaxpr
        used = {id(value) for step in traced.eqns for value in step.invars} | set(map(id, traced.outvars))
        leaves, structure = jax.tree.flatten(self.structure)
        is_read = [id(value) in used for value in traced.invars[-len(leaves) :]]

        def of_lane(both: tuple[dict[str, Array], list[Array]]) -> PyTree:
            numbers, own = both[0], iter(both[1])
            pairs = zip(leaves, is_read, strict=True)
            state = [next(own) if read else jnp.zeros(leaf.shape, leaf.dtype) for leaf, read in pairs]
            return params(numbers, jax.tree.unflatten(structure, state))

        return jax.jit(lambda numbers, own: jax.lax.map(of_lane, (numbers, own))), is_read

    def map_lanes(self, fn: Callable[[Any], Any], state: PyTree) -> PyTree:
        """Apply `fn` to every leaf but `round_index`."""
        leaves, shared = self._split(state)
        return self._join([fn(leaf) for leaf in leaves], shared)

    def compile(self, strategy: Strategy) -> Compiled:
        """Trace and compile the program."""
        with ThreadPoolExecutor() as pool:
            return self.begin_compiling(strategy, pool)()

    def begin_compiling(self, strategy: Strategy, pool: Executor) -> Callable[[], Compiled]:
        """Trace the program, and let a pool compile it; the function that this returns waits for the result.

        A part is compiled while the next one is traced: LLVM does not hold the interpreter's lock. The memory
        that the program needs is predicted, but not compared with the free memory.
        """
        lanes = self.lanes[: strategy.num_slots]
        values, tables = self.lane_values(lanes, strategy), self.tables(lanes, strategy)
        state = self.slots_structure(strategy.num_slots)
        shardings = self.shardings(strategy)
        init, rounds, evaluate = self._functions(strategy)
        # Shardings are given for every leaf: an empty leaf would otherwise come back in another one. They are not part
        # of the state's shapes: zeros_like of a leaf that a loop over devices closes over would ask for it there.
        placed = strategy.sharding() if is_multiprocess() else None  # where other processes hold parts of the results
        taken, given = ((None, shardings), (shardings, placed)) if shardings is not None else ((None, None), None)
        jitted = jax.jit(rounds, donate_argnums=1, in_shardings=(*taken, None, None), out_shardings=given)
        with tracing_over(strategy.num_node_shares):
            lowered = jitted.lower(values, state, tables.data, np.int32(0))
            fields = tuple(info_fields(lowered.out_info[1]))
            for case in {lane.name: lane.case for lane in self.lanes}.values():
                check_counted(case, fields, self._uploads.of(self.lanes[0]).num_nodes)
            parts = [pool.submit(lowered.compile)]  # first the part that takes longest
            lowered = jax.jit(init, out_shardings=shardings).lower(values, tables.data)
            parts.append(pool.submit(lowered.compile))
            jitted = jax.jit(evaluate, in_shardings=(*taken, None), out_shardings=placed)
            parts.append(pool.submit(jitted.lower(values, state, tables.arrays).compile))
        copies, divided = strategy.num_devices if is_cpu() else 1, strategy.num_devices > 1
        if self._replicated is not None and is_cpu():  # a CPU's devices share one memory
            copies = jax.device_count()
        inputs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tables)
        if strategy.num_node_shares > 1:
            inputs = share_shapes(tables, jax.tree.map(lambda leaf: leaf.sharding, tables))
            copies, divided = (strategy.num_node_shares, True) if is_cpu() else (1, False)
        held = state if is_cpu() or shardings is None else share_shapes(state, shardings)  # by one device's memory

        def finish() -> Compiled:
            rounds, init, evaluate = [part.result() for part in parts]
            peak = predicted_peak(inputs, held, init, [rounds, evaluate], num_copies=copies, divided=divided)
            return Compiled(strategy, init, rounds, evaluate, fields, peak)

        return finish

    def _functions(self, strategy: Strategy) -> tuple[Callable, Callable, Callable]:
        """The three functions of `Compiled`, not yet compiled."""
        chunk_rounds = self.case.rounds_per_call

        def init(lane: LaneValues, data: FederatedData) -> PyTree:
            return first_state(self._algorithm(lane), lane.key, self._of_seed("data", data, lane.row))

        def rounds(lane: LaneValues, state: PyTree, data: FederatedData, num_rounds: Array):
            run = rounds_fn(self._algorithm(lane), chunk_rounds)
            return run(lane.key, state, self._of_seed("data", data, lane.row), num_rounds)

        def evaluate(lane: LaneValues, state: PyTree, arrays: dict[str, PyTree]) -> dict[str, Any]:
            params, own = self._algorithm(lane).node_params(state), self._of_seed("arrays", arrays, lane.row)
            return {name: measure.compute(params, own[name]) for name, measure in self.measures.items()}

        if strategy.num_slots == 1:
            return init, rounds, evaluate
        at_once = strategy.at_once

        def init_all(lanes, data):
            state = over_lanes(lambda lane: init(lane, data), lanes, at_once)
            parts, shared = self._split(state)
            return self._join(parts, [leaf[0] for leaf in shared])

        def rounds_all(lanes, state, data, num_rounds):
            parts, shared = self._split(state)

            def of_lane(lane, own):
                new, buffers = rounds(lane, self._join(own, shared), data, num_rounds)
                return (*self._split(new), buffers)

            parts, shared, buffers = update_lanes(of_lane, lanes, parts, at_once)
            return self._join(parts, shared), buffers

        def evaluate_all(lanes, state, arrays):
            parts, shared = self._split(state)
            return over_lanes(
                lambda both: evaluate(both[0], self._join(both[1], shared), arrays), (lanes, parts), at_once
            )

        if strategy.num_devices == 1:
            return init_all, rounds_all, evaluate_all
        each, whole = PartitionSpec(LANES), PartitionSpec()
        held = self.map_lanes(lambda leaf: each, jax.tree.map(lambda leaf: whole, self.structure))
        spread = partial(jax.shard_map, mesh=strategy.mesh, check_vma=False)
        return (
            spread(init_all, in_specs=(each, whole), out_specs=held),
            spread(rounds_all, in_specs=(each, held, whole, whole), out_specs=(held, each)),
            spread(evaluate_all, in_specs=(each, held, whole), out_specs=each),
        )

    def _algorithm(self, lane: LaneValues) -> Algorithm:
        return self.case.algorithm(lane.numbers)

    def _values(self, lane: Lane) -> LaneValues:
        return LaneValues(lane.key, jnp.int32(0), _concrete_numbers(lane.case))

    def _of_seed(self, field: str, tree: PyTree, row: Array) -> PyTree:
        """Select one seed's part of a field of the tables."""
        leaves, structure = jax.tree.flatten(tree)
        pairs = zip(leaves, self._with_seeds[field], strict=True)
        return jax.tree.unflatten(structure, [leaf[row] if stacked else leaf for leaf, stacked in pairs])

    @cached_property
    def _is_shared(self) -> list[bool]:
        paths = jax.tree_util.tree_leaves_with_path(self.structure)
        return [jax.tree_util.keystr(path) == ".round_index" for path, _ in paths]

    def _split(self, state: PyTree) -> tuple[list[Any], list[Any]]:
        """(leaves with an axis of lanes, leaves that all lanes share)."""
        pairs = list(zip(jax.tree.leaves(state), self._is_shared, strict=True))
        return [leaf for leaf, shared in pairs if not shared], [leaf for leaf, shared in pairs if shared]

    def _join(self, parts: Sequence[Any], shared: Sequence[Any]) -> PyTree:
        both = {False: iter(parts), True: iter(shared)}
        return jax.tree.unflatten(jax.tree.structure(self.structure), [next(both[kind]) for kind in self._is_shared])

    def shardings(self, strategy: Strategy) -> PyTree | None:
        """Return the tree of a state's shardings, or None where one device does all."""
        if strategy.num_node_shares > 1:
            mesh, nodes = node_mesh(strategy.num_node_shares), self._uploads.of(self.lanes[0]).num_nodes
            # `round_index`, which all lanes share, is a scalar and lies whole on every device.
            return node_shardings(mesh, self.slots_structure(strategy.num_slots), nodes, int(strategy.num_slots > 1))
        if strategy.num_devices > 1:
            whole = jax.tree.map(lambda leaf: strategy.sharding(), self.structure)
            return self.map_lanes(lambda leaf: strategy.sharding(LANES), whole)
        return self._replicated and jax.tree.map(lambda leaf: self._replicated, self.structure)


def _concrete_numbers(case: Case) -> dict[str, Array]:
    return {name: jnp.float32(value) for name, value in case.numbers.items()}
