"""A small algorithm for the tests of the training loop: gossip averaging with SGD on a softmax model.

Its state holds what makes checkpoints hard: many dtypes, a None, an empty leaf, a table updated by a scatter.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl import core, training
from jaxfl.channel import Costs, Ledger
from jaxfl.core import tree
from jaxfl.core.info import Fatal
from jaxfl.training.case import check_counted
from jaxfl.training.program import Program

NUM_NODES, NUM_FEATURES, NUM_CLASSES = 4, 5, 3


class State(NamedTuple):
    params: dict[str, jax.Array]  # leaves (n, *leaf), float32
    table: jax.Array  # (n, J, table_width), uint16: the sample's last gradient's bits
    seen: jax.Array  # (n, J), bool
    counters: jax.Array  # (n,), uint32
    empty: jax.Array  # (n, 0), float32
    nothing: None
    half: jax.Array  # (n,), bfloat16
    round_index: jax.Array  # (), int32


class Draws(NamedTuple):
    batch_indices: jax.Array  # (n,), int32


def _numbers(key, round_index, count):
    """`count` scrambled numbers of (key, round), float32 in [0, 1009): cheap to compile, which counts in tests."""
    seed = jax.random.key_data(key)[-1].astype(jnp.int32)
    mixed = (jnp.arange(count, dtype=jnp.int32) + 1) * 7919 + (round_index + 3) * 104729 + (seed + 5) * 15485863
    return ((mixed ^ (mixed >> 7)) % 1009).astype(jnp.float32)


def toy_task(node_loop: str = "vmap") -> core.Task:
    def logits(params, inputs):
        return inputs @ params["kernel"] + jnp.broadcast_to(params["bias"], (inputs.shape[0], NUM_CLASSES))

    return core.from_functions(
        lambda key: {
            "kernel": 0.1 * jnp.sin(_numbers(key, 0, NUM_FEATURES * NUM_CLASSES)).reshape(NUM_FEATURES, NUM_CLASSES),
            "bias": jnp.zeros(NUM_CLASSES, jnp.float32),
        },
        lambda params, inputs, labels: core.cross_entropy(logits(params, inputs), labels),
        lambda params, inputs, labels: {"accuracy": core.accuracy(logits(params, inputs), labels)},
        node_loop=node_loop,
    )


def toy_data(seed: int = 0, num_samples: int = 40) -> tuple[core.FederatedData, np.ndarray, np.ndarray]:
    """(training data, test inputs, test labels) of a linearly separable problem with noise."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(num_samples + 37, NUM_FEATURES)).astype(np.float32)
    labels = (inputs @ np.random.default_rng(99).normal(size=(NUM_FEATURES, NUM_CLASSES))).argmax(1).astype(np.int32)
    rows = rng.permutation(num_samples).reshape(NUM_NODES, -1).astype(np.int32)
    data = core.FederatedData(
        inputs=jnp.asarray(inputs[:num_samples]),
        labels=jnp.asarray(labels[:num_samples]),
        indices=jnp.asarray(rows),
        sizes=jnp.full(NUM_NODES, rows.shape[1], jnp.int32),
    )
    return data, inputs[num_samples:], labels[num_samples:]


def toy_algorithm(
    task: core.Task,
    *,
    step_size: float = 0.2,
    table_width: int = 2,
    bad_round: Any = None,
    overflow_round: int | None = None,
    counts: bool = False,
) -> core.Algorithm:
    """Ring gossip; node 2's loss is NaN from `bad_round` (counted from 0), node 1 overflows in `overflow_round`.

    With `counts` it says that it made 1 to 3 local iterations, as many as its draws say, and as many forward
    evaluations at each node; and it counts the bits that it received.
    """

    def init(key, data):
        n = data.num_nodes
        params = tree.replicate(task.init(core.purpose_key(key, core.Purpose.INIT)), n)
        return State(
            params=params,
            table=jnp.zeros((n, data.max_size, table_width), jnp.uint16),
            seen=jnp.zeros((n, data.max_size), bool),
            counters=data.sizes.astype(jnp.uint32) + jnp.uint32(4_000_000_000),
            empty=jnp.zeros((n, 0), jnp.float32),
            nothing=None,
            half=jnp.full(n, 0.1, jnp.bfloat16),
            round_index=jnp.asarray(0, jnp.int32),
        )

    def draw(key, state, data):
        own = key.own if isinstance(key, core.RunKey) else key
        numbers = _numbers(own, state.round_index + 1, data.num_nodes)
        return Draws(batch_indices=(numbers.astype(jnp.int32) % data.sizes).astype(jnp.int32))

    def update(state, data, draws):
        nodes = jnp.arange(data.num_nodes)
        rows = data.indices[nodes, draws.batch_indices]

        def loss(params, inputs, label):
            return task.loss(params, inputs[None], label[None])[0]

        losses, gradients = jax.vmap(jax.value_and_grad(loss))(state.params, data.inputs[rows], data.labels[rows])
        params = jax.tree.map(
            lambda leaf, gradient: 0.5 * (leaf + jnp.roll(leaf, 1, axis=0)) - step_size * gradient,
            state.params,
            gradients,
        )
        if bad_round is not None:
            bad = (state.round_index.astype(jnp.float32) >= bad_round) & (nodes == 2)
            losses = jnp.where(bad, jnp.float32(np.nan), losses)
        overflow = jnp.zeros(data.num_nodes, jnp.int32)
        if overflow_round is not None:
            overflow = jnp.where((state.round_index == overflow_round) & (nodes == 1), jnp.int32(3), overflow)
        new = State(
            params=params,
            table=state.table.at[nodes, draws.batch_indices].add(jnp.ones((), jnp.uint16)),
            seen=state.seen.at[nodes, draws.batch_indices].set(True),
            counters=state.counters + jnp.uint32(1),
            empty=state.empty,
            nothing=None,
            half=state.half * jnp.bfloat16(1.01),
            round_index=state.round_index + 1,
        )
        bits = jnp.full(data.num_nodes, 32.0 * NUM_FEATURES * NUM_CLASSES, jnp.float32)
        info = core.Info(loss=losses).plus(
            bits_sent=bits,
            gradient_evaluations=jnp.ones(data.num_nodes, jnp.int32),
            batch_overflow=Fatal(overflow),
        )
        if counts:
            samples = 1 + draws.batch_indices % 3
            info = info.plus(local_iterations=samples[0], bits_received=bits, forward_evaluations=samples)
        return new, info

    return core.algorithm(init, draw, update, lambda state: state.params)


TASK = toy_task()
"""Shared, as the test set is: cases with other objects have programs of their own."""


@functools.cache
def toy_test(batch_size: int = 256) -> training.EvaluationSet:
    """The test set of `toy_data`."""
    _, inputs, labels = toy_data()
    return training.evaluation_set(inputs, labels, batch_size)


@functools.cache
def toy_training_data(seed: int) -> core.FederatedData:
    """The same for every seed."""
    return toy_data()[0]


def toy_with_numbers(numbers: Mapping[str, Any]) -> core.Algorithm:
    """`toy_algorithm` of numbers that may be traced; "bad_round" is one of them."""
    return toy_algorithm(TASK, **numbers)


def toy_that_counts(numbers: Mapping[str, Any]) -> core.Algorithm:
    """`toy_with_numbers` with local iterations."""
    return toy_algorithm(TASK, counts=True, **numbers)


TOY_LEDGER = Ledger(
    gradient=Costs(operations=45.0, simulated_seconds=np.array([0.3, 0.1, 0.7, 0.1]), joules=1.1),  # of each node
    forward=Costs(operations=15.0, simulated_seconds=0.1, joules=np.array([0.1, 0.2, 0.3, 0.4])),
    uplink_bits_per_second=1e3,
    downlink_bits_per_second=2e3,
    slot_seconds=0.0,
    transmit_watts=0.7,
    downlink_watts=0.0,
)
"""Ledger of `toy_that_counts`: numbers whose sums round."""


def toy_statements(rounds: int, **totals: int) -> list[dict[str, Any]]:
    """A statement for each node that depends on the rounds and on the totals."""
    epsilons = [0.1 * rounds + 0.01 * sum(totals.values()) * node for node in range(NUM_NODES)]
    facts = {"bound": "proven", "dp_epsilon": max(epsilons), "dp_delta": 1e-5, "neighboring_relation": "zero_out"}
    return [{**facts, "nodes": NUM_NODES, "node_epsilons": epsilons, "rounds": rounds, **totals}]


def toy_case(algorithm: Any = None, **fields: Any) -> training.Case:
    """A case of the toy problem; `algorithm` may be an `Algorithm`. Every case is of a program of its own in a run."""
    made: Any = algorithm
    if algorithm is None:
        made = functools.partial(toy_with_numbers)  # another object in every case
    elif not callable(algorithm):
        made = lambda numbers: algorithm  # noqa: E731
    defaults = {"task": TASK, "test": toy_test(), "data": toy_training_data, "seeds": (0, 1)}
    return training.Case(algorithm=made, **{**defaults, "num_rounds": 25, "evaluate_every": 10, **fields})


def train_toy(
    out: Any,
    cases: Mapping[str, training.Case],
    *,
    resume: bool = False,
    config: Any = None,
    compiled: bool = False,
    **settings,
):
    """`training.train` with small defaults. Runs share their executables, unless the program is to be `compiled`."""
    run = training.open_run(out, config or {"step_size": 0.2}, experiment="toy", resume=resume)
    with contextlib.nullcontext() if compiled else shared_programs():
        return training.train(cases, run=run, **{"checkpoint_every": 1, "quiet": True, **settings})


def lasting(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary without the seconds of the last command, which a resumed run does not repeat."""
    return {**summary, "seconds": {name: own for name, own in summary["seconds"].items() if name != "command"}}


_EXECUTABLES: dict[Any, Any] = {}


@contextlib.contextmanager
def shared_programs():
    """Programs that would be the same are compiled once for all tests of a process: most of a toy run is compiling."""
    begin = Program.begin_compiling

    def shared(program, strategy, pool):
        case, tables = program.case, program.tables(program.lanes[: strategy.num_slots], strategy)
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(tables))
        function = getattr(case.algorithm, "func", case.algorithm)
        measures = tuple(case.measures.items())
        numbers = case.placement, tuple(case.numbers), case.rounds_per_call
        key = (function, case.task, measures, numbers, strategy, shapes, jax.tree.structure(tables))
        if key not in _EXECUTABLES:
            _EXECUTABLES[key] = begin(program, strategy, pool)()
        for lane in program.lanes:
            check_counted(lane.case, _EXECUTABLES[key].fields, tables.data.num_nodes)
        return lambda: _EXECUTABLES[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "begin_compiling", shared)
        yield
