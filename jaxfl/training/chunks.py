"""Chunks of rounds: many rounds of any algorithm in one compiled call, and a summary of their infos.

A chunk runs up to a static number of rounds in one `fori_loop` whose length is an argument. First, last, short and
resumed chunks therefore run the same executable, so that a resumed run repeats the bits of an uninterrupted one and
nothing compiles twice. The state is donated (a round overwrites it), and nothing goes to or comes from the host inside
a chunk. On accelerators the executable holds a second loop, of static length, for full chunks: with a length that is on
the device, the host would wait in every round. The results of the two loops may differ in the last bits, but a resumed
run cuts its rounds into the same chunks as an uninterrupted one, and so repeats its bits.

An algorithm's `Info` holds () or (n,) arrays by name: measurements are averaged over rounds and nodes, counts are
summed. The exceptions are the costs below and the counts that their makers declare as fatal, which must stay 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.channel import Costs
from jaxfl.channel.ledger import COUNTED
from jaxfl.core import Algorithm, ArgumentError, Array, FederatedData, Info, Key, PyTree
from jaxfl.core.devices import axis_size
from jaxfl.core.info import FatalCount
from jaxfl.core.platform import is_cpu
from jaxfl.core.types import node_text
from jaxfl.training.early_draws import draws_of_rounds

COSTS = (*COUNTED, "local_iterations", "estimate_releases", *Costs._fields)
"""Costs of a run, summed over rounds and nodes; a metrics line carries each as `total_<name>`.

The first are numbers of infos, which may lack any of them. Local iterations, and releases of estimates from the data,
are (), int32: every client does the same number of them, and they count once a round. The last need a ledger.
"""

UPKEEP_EVERY = 100_000
"""Rounds after which a call on an accelerator ends with `Algorithm.upkeep`."""

Infos = dict[str, np.ndarray]


class Diverged(ArithmeticError):
    """A measurement became infinite or NaN.

    Attributes:
        case, seed: which run of the experiment.
        metric: name of the info field or of the evaluation metric.
        rounds: (first, last) round of the chunk in which it was noticed, counted from 1.
        first_round: first round with a non-finite value.
        node: the one node with such a value in that round, or, for a number of the whole network, the one whose
            parameters were not finite at the end of that chunk. None where there is no such node, or several: each may
            be the cause.
    """

    def __init__(
        self,
        case: str,
        seed: int,
        metric: str,
        *,
        rounds: tuple[int, int],
        first_round: int,
        node: int | None,
        value: float,
        node_of_params: int | None = None,
        names: Sequence[str] | None = None,
    ):
        self.case, self.seed, self.metric = case, seed, metric
        self.rounds, self.first_round, self.node = rounds, first_round, node_of_params if node is None else node
        whose = "all nodes" if self.node is None else node_text(self.node, names)
        where = "" if node is None else f" at {whose}"
        after = "" if node_of_params is None else f", which left {whose} with parameters that are not finite"
        steps, data = "Use a smaller step size, or clip the gradients", f"the samples and labels of {whose}"
        super().__init__(
            f"{metric}: must stay finite; got {value}{where} in round {first_round} (rounds {rounds[0]} to {rounds[1]} "
            f"of {case}, seed {seed}){after}. "
            # No step was taken before the losses and gradients of round 1.
            + (f"Check {data}." if first_round == 1 and node is not None else f"{steps}; if it stays, check {data}.")
        )


def rounds_fn(algorithm: Algorithm, chunk_rounds: int) -> Callable[..., tuple[PyTree, Any]]:
    """The function that runs up to `chunk_rounds` rounds, to be compiled.

    Returns:
        (key, state, data, num_rounds () int32) -> (state, buffers). Buffers are the info with (chunk_rounds, ...)
        values of each name, zero after `num_rounds` of them.

    Guarantees:
        - a chunk equals as many calls of `round`.
        - splitting the same rounds into chunks differently gives the same bits on a CPU, elsewhere to rounding.
        - a large array that a round updates in place is not copied, where the state is donated.
    """

    def run(key: Key, state: PyTree, data: FederatedData, num_rounds: Array):
        shapes = jax.eval_shape(algorithm.round, key, state, data)[1]
        info_fields(shapes, data.num_nodes)  # refuses infos of another form
        pack, unpack = _packer(shapes)
        draws = draws_of_rounds(algorithm, key, state, data, chunk_rounds)
        empty = jax.tree.map(
            lambda leaf: jnp.zeros((chunk_rounds, *leaf.shape), leaf.dtype), jax.eval_shape(pack, shapes)
        )

        def body(index, carry):
            state, buffers = carry
            if draws is None:
                state, info = algorithm.round(key, state, data)
            else:
                state, info = algorithm.update(state, data, draws(state, index))
            write = partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
            return state, jax.tree.map(write, buffers, pack(info))

        held, done, first = (state, empty), jnp.int32(0), state
        if not is_cpu():
            # A full chunk is one iteration of an outer loop. With a branch in its place, XLA copied the whole state.
            is_full = (num_rounds == chunk_rounds).astype(jnp.int32)
            held = jax.lax.fori_loop(0, is_full, lambda _, held: jax.lax.fori_loop(0, chunk_rounds, body, held), held)
            done = is_full * num_rounds
        state, buffers = jax.lax.fori_loop(done, num_rounds, body, held)
        if algorithm.upkeep is not None and not is_cpu():
            due = state.round_index // UPKEEP_EVERY > first.round_index // UPKEEP_EVERY
            state = algorithm.upkeep(state, data, due)
        return state, unpack(buffers)

    return run


def _packer(info: PyTree) -> tuple[Callable[[PyTree], PyTree], Callable[[PyTree], PyTree]]:
    """Functions from an info to a row of its numbers for each type, and from the rows of all rounds back.

    An accelerator writes each array of a round by a kernel of its own. Numbers stay apart on a CPU, whose kernels cost
    less, and where nodes lie over devices, each of which writes the numbers of its nodes.
    """
    if is_cpu() or axis_size() > 1:
        return (lambda info: info), (lambda buffers: buffers)
    leaves, structure = jax.tree.flatten(info)
    types = list(dict.fromkeys(leaf.dtype for leaf in leaves))

    def pack(info):
        numbers = jax.tree.leaves(info)
        return [jnp.concatenate([one.ravel() for one in numbers if one.dtype == dtype]) for dtype in types]

    def unpack(rows):
        columns = {}
        for dtype, whole in zip(types, rows, strict=True):
            sizes = [leaf.size for leaf in leaves if leaf.dtype == dtype]
            columns[dtype] = iter(jnp.split(whole, np.cumsum(sizes)[:-1], axis=1))
        return structure.unflatten([next(columns[leaf.dtype]).reshape(-1, *leaf.shape) for leaf in leaves])

    return pack, unpack


def first_state(algorithm: Algorithm, key: Key, data: FederatedData) -> PyTree:
    """`init` without weak types: neither a round nor a checkpoint keeps one, and compiled rounds would refuse it."""
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype), algorithm.init(key, data))


def check_start(algorithm: Algorithm, key: Key, data: FederatedData) -> PyTree:
    """Shapes of the first state, after every check that `init` makes on the host; it may look at the nodes' sizes."""
    return jax.eval_shape(lambda key: algorithm.init(key, data), key)


def info_fields(info: Any, num_nodes: int | None = None) -> dict[str, Any]:
    """The numbers of an info by name; given n, anything but () and (n,) is refused."""
    if not isinstance(info, Info):
        remedy = "Return jaxfl.Info(loss).plus(name=number, ...)."
        raise ArgumentError("info", "must be a jaxfl.Info", f"the round returned {type(info).__name__}", remedy)
    fields = info.named()
    for name, value in fields.items():
        shape = getattr(value, "shape", None)
        if num_nodes is not None and shape not in ((), (num_nodes,)):
            found = f"got shape {shape} for {num_nodes} nodes"
            raise ArgumentError(
                f"info.{name}", "must be an array of shape () or (n,)", found, "Reduce it in the round."
            )
    return fields


def refuse_bad(
    infos: Infos,
    case: str,
    seed: int,
    first_round: int,
    params: Callable[[], PyTree] | None = None,
    names: Sequence[str] | None = None,
    fatal: Sequence[str] = (),
) -> None:
    """Stop on a measurement that is not finite, or a fatal count, in the infos of some rounds.

    Args:
        infos: field -> (r, ...) values, the first of round `first_round`, counted from 1.
        params: gives the parameters after the last round, leaves (n, *leaf); they show the node when a number of the
            whole network is not finite.
        names: (n,), of the nodes; None where nodes are numbers.
        fatal: names of the counts that must stay 0, `Info.fatal`.

    Raises:
        Diverged: it names the field that was not finite first. Of several in one round it is the one in which the
            fewest nodes are bad; a number of the whole network comes last.
        FatalCount: a count that must stay 0 is above it.
    """
    num_rounds = max((len(values) for values in infos.values()), default=0)
    last_round = first_round + num_rounds - 1
    for name in fatal:
        values = infos[name]
        if values.any():
            rows = values.reshape(num_rounds, -1)
            row, node = np.argwhere(rows)[0]
            where = f" at {node_text(node, names)}" if values.ndim > 1 else ""
            raise FatalCount(
                f"{name}: must stay 0; got {int(rows.sum(dtype=np.int64))} in rounds {first_round} to {last_round} of "
                f"{case}, seed {seed}, first {rows[row, node]}{where} in round {first_round + row}. The rounds were "
                "not those that the algorithm's guarantees assume: give it more room for them, and run again.",
                (first_round, last_round),
            )
    worst = min((bad for name, values in infos.items() if (bad := _first_bad(name, values))), default=None)
    if worst is not None:
        row, _, name = worst
        values = np.atleast_1d(_float64(infos[name][row]))
        nodes = np.flatnonzero(~np.isfinite(values)).tolist()
        has_nodes = infos[name].ndim > 1
        raise Diverged(
            case,
            seed,
            name,
            rounds=(first_round, last_round),
            first_round=first_round + row,
            node=nodes[0] if has_nodes and len(nodes) == 1 else None,
            value=float(values[nodes[0]]),
            node_of_params=_bad_node(params()) if params and not has_nodes else None,
            names=names,
        )


def doubtful(infos: Infos, fatal: Sequence[str] = ()) -> np.ndarray:
    """Lanes, (lanes,) bool, whose infos, field -> (lanes, r, ...) values, `refuse_bad` refuses."""
    refused = np.zeros(len(next(iter(infos.values()))), bool)
    for name, values in infos.items():
        flat = values.reshape(len(values), -1)
        if name in fatal:
            refused |= flat.any(axis=1)
        if _is_measurement(values):
            refused |= ~np.isfinite(_float64(flat)).all(axis=1)
    return refused


def _first_bad(name: str, values: np.ndarray) -> tuple[int, float, str] | None:
    """(first row with a number that is not finite, how many nodes have one in it, name); None without any.

    A bad value spreads from node to node: the field with the fewest bad nodes is nearest to the cause.
    """
    if not _is_measurement(values):
        return None
    bad = ~np.isfinite(_float64(values))
    rows = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))
    if not rows.size:
        return None
    return int(rows[0]), float(bad[rows[0]].sum()) if values.ndim > 1 else np.inf, name


def _bad_node(params: PyTree) -> int | None:
    """The node with a parameter that is not finite; None without one, or with several, where the first is unknown."""
    leaves = [_float64(np.asarray(leaf)) for leaf in jax.tree.leaves(params)]
    finite = [np.isfinite(leaf).reshape(len(leaf), -1).all(axis=1) for leaf in leaves]
    bad = np.flatnonzero(~np.all(finite, axis=0))
    return int(bad[0]) if len(bad) == 1 else None


def summarize(stretch: Sequence[Infos]) -> dict[str, float | int]:
    """Field -> one number for consecutive chunks: the mean (float64) of a measurement, the exact sum of a count.

    Examples:
        >>> infos = {"loss": np.array([[1.0, 3.0]], np.float32), "drops": np.array([[2**31 - 1] * 2], np.int32)}
        >>> summarize([infos, infos])
        {'loss': 2.0, 'drops': 8589934588}
    """
    return summarize_lanes([stretch])[0]


def summarize_lanes(stretches: Sequence[Sequence[Infos]]) -> list[dict[str, float | int]]:
    """`summarize` of the stretch of each lane, which have equally many rounds."""
    lanes, columns = [joined(stretch) for stretch in stretches], {}
    for name in lanes[0]:
        values = np.stack([infos[name].reshape(-1) for infos in lanes])
        is_mean = _is_measurement(values)
        columns[name] = (_float64(values).mean(axis=1) if is_mean else values.sum(axis=1, dtype=np.int64)).tolist()
    return [{name: values[index] for name, values in columns.items()} for index in range(len(lanes))]


def add_costs(totals: Mapping[str, float | int], stretch: Sequence[Infos]) -> dict[str, float | int]:
    """`totals` plus each field of `COSTS` summed over the stretch; sums are exact, and rounded once."""
    grown = dict(totals)
    for name, values in joined([{name: own[name] for name in own if name in COSTS} for own in stretch]).items():
        before = grown.get(name, 0)
        if _is_measurement(values):
            grown[name] = math.fsum([before, *_float64(values).reshape(-1).tolist()])
        else:
            grown[name] = before + int(values.sum(dtype=np.int64))
    return grown


def joined(stretch: Sequence[Infos]) -> Infos:
    """The infos of consecutive chunks, joined as if of one."""
    if len(stretch) == 1:
        return dict(stretch[0])
    return {name: np.concatenate([infos[name] for infos in stretch]) for name in (stretch[0] if stretch else ())}


def _float64(values: np.ndarray) -> np.ndarray:
    """Any floating array, bfloat16 included, in float64."""
    return np.asarray(values, dtype=np.float64)


def _is_measurement(values: np.ndarray) -> bool:
    """True if a field is floating (a measurement) and not a count."""
    return bool(jnp.issubdtype(values.dtype, jnp.floating))


def default_chunk_rounds(evaluate_every: int) -> int:
    """The most rounds in one call: all between two evaluations, at most 100 so that progress shows."""
    # Equal chunks: 150 rounds run as two of 75, and the buffers hold no idle rows.
    return math.ceil(evaluate_every / math.ceil(evaluate_every / 100))


SECONDS_AT_ONCE = 30.0
"""Seconds that rounds of one call may take: clocks, signals and progress wait for its end. A round may be longer."""


def rounds_at_once(seconds_a_round: float, most: int) -> int:
    """Compute the number of rounds in a call from the time a round took in a first call.

    Examples:
        >>> [rounds_at_once(seconds, 20) for seconds in (0.01, 4.0, 160.0)]
        [20, 7, 1]
    """
    return max(1, min(most, int(SECONDS_AT_ONCE / max(seconds_a_round, 1e-9))))
