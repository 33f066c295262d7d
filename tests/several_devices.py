"""Run by `tests/core/test_several_devices.py` in a process whose CPU has three devices: prints its findings as JSON."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from processes import interrupted
from run_files import run_bytes

from jaxfl import graphs, training
from jaxfl.algorithms import client_sgd, fed_avg, local_steps, push_sum
from jaxfl.core import over_nodes, update_over_nodes
from jaxfl.core.node_loop import automatic
from jaxfl.data import federate
from jaxfl.gradients import fixed, saga
from jaxfl.models import classification, cnn

SIZES = (2, 3, 5, 4, 3)  # five nodes: three devices cannot share them evenly
KEY = jax.random.key(1)
STRATEGIES = ("devices:vmap", "devices:map", "devices:chunk:2")


def make_data():
    rng = np.random.default_rng(3)
    images = rng.integers(0, 17, (sum(SIZES), 8, 8, 1), dtype=np.uint8)
    parts = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    return federate(images, rng.integers(0, 3, sum(SIZES)).astype(np.int32), parts)


def make_task(node_loop=None):
    return classification(cnn((8, 8, 1), channels=(2,), window=3, hidden=None, num_classes=3), node_loop=node_loop)


def learners(task, num_nodes=5):
    clients = local_steps(2, batch_size=2, optimizer=client_sgd(0.5, momentum=0.9))
    table = saga(sampler=fixed(2), clip_norm=0.5)
    return {
        "push_sum": push_sum(task, graph=graphs.exponential(num_nodes), gradient=table, step_size=0.5),
        "fed_avg": fed_avg(task, clients=clients, num_active=4),
    }


def largest_difference(mine, other):
    pairs = zip(*map(jax.tree.leaves, (mine, other)), strict=True)
    return max(float(np.abs(np.float64(a) - np.float64(b)).max()) for a, b in pairs)


def loops():
    values, shifts = jnp.arange(10.0).reshape(5, 2), jnp.arange(5.0)
    keys = jax.random.split(KEY, 5)

    def step(row, shift, key):
        return row * shift + shifts.sum() + jax.random.uniform(key, (2,))  # closes over an array of the caller

    expected = jax.vmap(step)(values, shifts, keys)
    return {
        f"{loop.__name__} {name}": largest_difference(jax.jit(loop(step, name))(values, shifts, keys), expected)
        for loop in (over_nodes, update_over_nodes)
        for name in STRATEGIES
    }


def two_rounds(data):
    actual = {}
    for name, one in learners(make_task("map")).items():
        first = jax.jit(one.init)(KEY, data)
        expected = jax.jit(lambda s, one=one: one.round(KEY, one.round(KEY, s, data)[0], data))(first)
        other = learners(make_task())[name]
        mine = jax.jit(lambda s, other=other: other.round(KEY, other.round(KEY, s, data)[0], data))(first)
        actual[name] = largest_difference(mine, expected)
    return actual


def trained(out, data, *, name="fed_avg", node_loop=None, interrupt_after=None, resume=False):
    """The lines of a run, and the strategy that it used."""
    task = make_task(node_loop)
    run = training.open_run(out, {}, experiment="devices", resume=resume)
    test = training.evaluation_set(np.zeros((4, 8, 8, 1), np.uint8), np.arange(4) % 3)
    algorithm = learners(task, data.num_nodes)[name]
    case = training.Case(lambda numbers: algorithm, task, test, lambda seed: data, (0,), 6, evaluate_every=2)
    try:
        with interrupted(interrupt_after):
            training.train({name: case}, run=run, quiet=True, checkpoint_every=1)
        assert interrupt_after is None, "it was not interrupted"
    except KeyboardInterrupt:
        assert interrupt_after is not None
    return run_bytes(out).decode(), task.node_loop


def largest_of_lines(mine, other):
    """Largest difference of two runs' metrics."""
    lines = [[json.loads(line) for line in text.splitlines()] for text in (mine, other)]
    return max(
        abs(ours[name] - theirs[name])
        for ours, theirs in zip(*lines, strict=True)
        for name in ours
        if isinstance(ours[name], float)
    )


def main(out):
    data = make_data()
    whole, used = trained(out / "whole", data)
    alone, _ = trained(out / "alone", data, node_loop="map")
    trained(out / "halves", data, interrupt_after=3)  # with a checkpoint of round 2
    halves, _ = trained(out / "halves", data, resume=True)
    # Six nodes, which three devices share evenly, with a state of their own.
    even = data._replace(
        indices=data.indices[jnp.array([0, 1, 2, 3, 4, 0])], sizes=data.sizes[jnp.array([0, 1, 2, 3, 4, 0])]
    )
    shared, own = (
        trained(out / f"even {loop}", even, name="push_sum", node_loop=loop)[0] for loop in ("devices:map", "map")
    )
    actual = {
        "devices": jax.device_count(),
        "automatic": automatic(True),
        "automatic without convolutions": automatic(False),
        "used": used,
        "differences": {
            **loops(),
            **two_rounds(data),
            "metrics": largest_of_lines(whole, alone),
            "metrics of an even share": largest_of_lines(shared, own),
        },
        "resumed alike": whole == halves,
    }
    print(json.dumps(actual))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
