"""Run by `tests/training/test_sharding.py` in a process whose CPU has eight devices: prints its findings as JSON.

The examples of the registry are made for sixteen nodes here, two on each device.
"""

import json
import re
import sys
from pathlib import Path

import examples
import jax
import jax.numpy as jnp
import numpy as np
from examples import Numbers
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from processes import interrupted
from registry import REGISTRY
from run_files import begun, run_lines

from jaxfl import graphs, training
from jaxfl.algorithms import fed_avg, local_steps, push_sum
from jaxfl.core import tree
from jaxfl.core.devices import NODES
from jaxfl.data import federate
from jaxfl.gradients import fixed, saga
from jaxfl.models import classification, cnn, mlp
from jaxfl.training.sharding import node_mesh, node_shardings, place_data, tracing_over

NUM_NODES, DEVICES = 16, 8
KEY = jax.random.key(7)
TABLE = saga(sampler=fixed(2), clip_norm=0.7, table="factored")


def make_data(shape=(6,)):
    """Uneven data, the pool shuffled."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(4, 10, NUM_NODES)
    parts = np.split(rng.permutation(sizes.sum()), np.cumsum(sizes)[:-1])
    inputs = rng.normal(size=(sizes.sum(), *shape)).astype(np.float32)
    return federate(inputs, rng.integers(0, 3, sizes.sum()).astype(np.int32), parts)


def algorithms():
    """name -> the row's example on sixteen nodes; with tables, where the row takes them, beside it."""
    examples.NODES = NUM_NODES
    made = {}
    for name, row in REGISTRY.items():
        example = row.example(lambda hidden: classification(mlp((6, hidden, 3), activation="tanh")))
        topology = example.topology if "graph" in example.topology else example.topology | example.resized(NUM_NODES)
        arguments = {**example.tasks, **topology, **example.arguments(Numbers(clip_norm=0.7))}
        made[name] = row.constructor(**arguments)
        if row.stateful_gradient and not row.special_case_of:
            made[f"{name} with tables"] = row.constructor(**{**arguments, "gradient": TABLE})
    return made


def numbers(draws):
    """All arrays of draws, keys as their words."""

    def plain(leaf):
        return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    return [np.asarray(plain(leaf)) for leaf in jax.tree.leaves(draws)]


def largest_difference(mine, other):
    pairs = zip(*map(numbers, (mine, other)), strict=True)
    return max(float(np.abs(np.float64(a) - np.float64(b)).max(initial=0.0)) for a, b in pairs)


def one_round(algorithm):
    def round_with_draws(state, data):
        draws = algorithm.draw(KEY, state, data)
        return (*algorithm.update(state, data, draws), draws)

    return round_with_draws


def over_nodes_compiled(algorithm, data):
    """A first state in shares, and the compiled round over eight devices."""
    with tracing_over(DEVICES):
        shapes = jax.eval_shape(lambda: algorithm.init(KEY, data))
        placed = node_shardings(node_mesh(DEVICES), shapes, NUM_NODES)
        state = jax.jit(lambda data: algorithm.init(KEY, data), out_shardings=placed)(data)
        compiled = jax.jit(one_round(algorithm), in_shardings=(placed, None), out_shardings=(placed, None, None)).lower(
            state, data
        )
    return state, compiled.compile()


def rounds(name, algorithm, data, cut):
    """Two rounds on one device and on eight."""
    state = jax.jit(lambda data: algorithm.init(KEY, data))(data)
    alone = jax.jit(one_round(algorithm))
    shared, compiled = over_nodes_compiled(algorithm, cut)
    whole = tree.num_bytes((state, data))
    by_node = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim and leaf.shape[0] == NUM_NODES]
    memory = compiled.memory_analysis()
    assert memory is not None
    rest = tree.num_bytes(state) - tree.num_bytes(by_node)  # a server's, on every device
    measured = {
        "argument bytes": memory.argument_size_in_bytes,
        "share": (whole - rest) / DEVICES + rest,
        "same draws": True,
        "difference": largest_difference(state, shared),
    }
    for _ in range(2):
        (state, info, draws), (shared, other, others) = alone(state, data), compiled(shared, cut)
        pairs = zip(*map(numbers, (draws, others)), strict=True)
        measured["same draws"] &= all(np.array_equal(*pair) for pair in pairs)
        differences = (largest_difference(state, shared), largest_difference(info, other))
        measured["difference"] = max(measured["difference"], *differences)
    return measured


def collectives(algorithm, data):
    """Collective -> the shapes that it makes, of a compiled round over eight devices."""
    text, made = over_nodes_compiled(algorithm, data)[1].as_text() or "", {}
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    for shapes, name in re.findall(rf"= (.*?) ({names})(?:-start)?\(", text):
        made.setdefault(name, []).extend(re.findall(r"\w+\[[\d,]*\]", shapes))
    return made


def learner():
    """Push-sum with tables, small against the data that it reads."""
    task = classification(mlp((6, 5, 3), activation="tanh"))
    return push_sum(task, graph=graphs.exponential(NUM_NODES), gradient=TABLE, step_size=0.1), task


def embedded(data):
    """In a caller's shard_map with checks of varying axes, on a mesh of Explicit axes, and a convolutional task."""
    keys, whole = jax.random.split(KEY, DEVICES), PartitionSpec()
    points = PartitionSpec("points")
    mesh = jax.make_mesh((DEVICES,), ("points",), axis_types=(AxisType.Auto,))
    task = classification(cnn((8, 8, 1), channels=(2,), window=3, hidden=None, num_classes=3))
    images = make_data(shape=(8, 8, 1))
    clients = local_steps(2, batch_size=2, optimizer=examples.client_sgd(0.5, momentum=0.9))
    convolutional = fed_avg(task, clients=clients, num_active=3)

    def scanned(algorithm, key, data):
        def body(state, _):
            return algorithm.round(key, state, data)

        return jax.lax.scan(body, algorithm.init(key, data), None, length=2)[0]

    def in_shard_map(algorithm):
        def of_device(keys, data):
            return jax.tree.map(lambda leaf: leaf[None], scanned(algorithm, keys[0], data))

        return jax.jit(jax.shard_map(of_device, mesh=mesh, in_specs=(points, whole), out_specs=points))

    measured: dict[str, object] = {"node loop": task.node_loop}
    for name, algorithm, own in (("push_sum", learner()[0], data), ("convolutional", convolutional, images)):
        expected = jax.jit(scanned, static_argnums=0)(algorithm, keys[3], own)
        mine = jax.tree.map(lambda leaf: leaf[3], in_shard_map(algorithm)(keys, own))
        measured[f"{name} in shard_map"] = largest_difference(mine, expected)
        explicit = jax.make_mesh((DEVICES,), (NODES,), axis_types=(AxisType.Explicit,))
        for where in ("in its context", "by its types"):
            placed = jax.tree.map(jax.device_put, own, node_shardings(explicit, own, NUM_NODES))
            key = jax.device_put(keys[3], NamedSharding(explicit, whole))
            if where == "by its types":
                result = jax.jit(scanned, static_argnums=0)(algorithm, key, placed)
            else:
                with jax.set_mesh(explicit):
                    result = jax.jit(scanned, static_argnums=0)(algorithm, key, placed)
            measured[f"{name} on an Explicit mesh, {where}"] = largest_difference(result, expected)
            per_node = [leaf for leaf in jax.tree.leaves(result) if leaf.ndim and leaf.shape[0] == NUM_NODES]
            measured[f"{name} in shares, {where}"] = all(leaf.sharding.spec[:1] == (NODES,) for leaf in per_node)
    return measured


def trained(out, *, placement=None, seeds=(0,), interrupt_after=None, resume=False):
    """The lines of a run."""
    algorithm, task = learner()
    data = make_data()
    run = training.open_run(out, {}, experiment="devices", resume=resume)
    test = training.evaluation_set(np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32), np.arange(20) % 3)
    measures = {"stationary": training.stationarity(task, 3)}
    case = training.Case(
        lambda numbers: algorithm, task, test, lambda seed: data, seeds, 4, 2, measures=measures, placement=placement
    )
    try:
        with interrupted(interrupt_after):
            training.train({"push_sum": case}, run=run, quiet=True, checkpoint_every=1)
        assert interrupt_after is None, "it was not interrupted"
    except KeyboardInterrupt:
        assert interrupt_after is not None
    return run_lines(out)


def largest_of_lines(mine, other):
    pairs = [(a[name], b[name]) for a, b in zip(mine, other, strict=True) for name in a if isinstance(a[name], float)]
    return max(abs(a - b) for a, b in pairs)


def runs(out):
    """Compare runs of the training loop: on one device, on eight, interrupted there, and gone on with on two."""
    nodes, fewer, lanes = training.Placement(DEVICES), training.Placement(2), training.Placement(3, "lanes")
    alone, shared = trained(out / "alone"), trained(out / "nodes", placement=nodes)
    measured = {"nodes": largest_of_lines(shared, alone)}
    trained(out / "halves", placement=nodes, interrupt_after=2)
    measured["resumed alike"] = trained(out / "halves", placement=nodes, resume=True) == shared
    trained(out / "moved", placement=nodes, interrupt_after=2)
    measured["resumed on two"] = largest_of_lines(trained(out / "moved", placement=fewer, resume=True), alone)
    several = trained(out / "lanes", seeds=(0, 1, 2))
    for axis, placement in (("nodes", nodes), ("lanes", lanes)):
        mine = trained(out / f"lanes {axis}", seeds=(0, 1, 2), placement=placement)
        measured[f"several over {axis}"] = largest_of_lines(mine, several)
    recorded = begun(out / "lanes nodes")["strategy"]
    return {**measured, "strategy": recorded}


def main(out):
    data = make_data()
    cut, made = place_data(data, DEVICES), algorithms()
    pool = [cut.inputs.addressable_shards[0].data.shape[0], max(cut.inputs.shape[0], len(data.inputs))]
    measured = {
        "devices": jax.device_count(),
        "pool rows of a device, and of all": pool,
        "embedded": embedded(data),
        "collectives": collectives(learner()[0], cut),
        "runs": runs(out),
        "rounds": {name: rounds(name, algorithm, data, cut) for name, algorithm in made.items()},
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
