"""Compute cases as users do: `python tests/optimized/compute.py` with JSON rows [function, arguments] on its input.

A line of JSON is printed for each: null, or what is wrong. tests/processes.py starts it without the settings of
tests/conftest.py.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from problems import problem, small_task, uneven_data

import jaxfl

KEY, ROUNDS = jax.random.key(1), 2
TOLERANCE = 1e-3  # of a number, beside the largest of its leaf: rounding of two rounds, and of differences of losses


def crash():
    """End the process as a compiled program does that reads foreign memory."""
    os.kill(os.getpid(), signal.SIGSEGV)


def lookup(nodes, samples):
    """Look up all samples for two readers: XLA then finds their places in a loop of its own."""
    data = uneven_data((samples,) * nodes)
    positions = jnp.broadcast_to(jnp.arange(samples, dtype=jnp.int32), (nodes, samples))

    @jax.jit
    def read(data):
        rows = data.places(positions)
        return data.inputs[rows], data.labels[rows]

    expected = np.asarray(data.inputs)[np.asarray(data.indices)]
    return None if np.array_equal(read(data)[0], expected) else "other samples are read"


def row(name, nodes, samples):
    """Compute an algorithm of the registry where every node has so many samples."""
    p = problem(name)
    return computed(p.algorithm(batch_size=1, **p.example.resized(nodes)), uneven_data((samples,) * nodes))


def stored(nodes, entries, table, sampler):
    """Compute a table of gradients of so many entries a node."""
    entry_size, one = 2 if table == "per_batch" else None, getattr(jaxfl.gradients, sampler)(1)
    gradient = jaxfl.saga(table=table, entry_size=entry_size, clip_norm=2.0, sampler=one)
    graph, noise = jaxfl.graphs.exponential(nodes), jaxfl.gaussian(0.1)
    learner = jaxfl.push_sum(small_task(), graph=graph, gradient=gradient, noise=noise, step_size=0.2)
    return computed(learner, uneven_data((entries * (entry_size or 1),) * nodes))


def computed(algorithm, data):
    """Say what is wrong after `init` and some rounds: numbers that are not finite, or not those of plain code."""
    ours = leaves_of(algorithm, data)
    if not all(np.isfinite(leaf).all() for leaf in ours if leaf.dtype.kind == "f"):
        return "a number is not finite"
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        theirs = leaves_of(algorithm, data)
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    off = max(map(difference, ours, theirs))
    return None if off <= TOLERANCE else f"differs from what is compiled without optimization by {off:.1e}"


def leaves_of(algorithm, data):
    """Arrays of the last state and info; functions of their own, so that each call compiles."""
    last: Any = (jax.jit(lambda key, data: algorithm.init(key, data))(KEY, data), None)
    step = jax.jit(lambda key, state, data: algorithm.round(key, state, data))
    for _ in range(ROUNDS):
        last = step(KEY, last[0], data)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(last)]


def difference(mine, other):
    """The largest difference of two arrays by the largest number in them."""
    scale = max(1.0, float(np.abs(other).max(initial=0)))
    return float(np.abs(mine.astype(float) - other.astype(float)).max(initial=0)) / scale


def outcome(function, arguments):
    """Whatever goes wrong, as a text."""
    try:
        return globals()[function](*arguments)
    except Exception:
        return traceback.format_exc()[-2000:]


if __name__ == "__main__":
    for function, *arguments in json.load(sys.stdin):
        print(json.dumps(outcome(function, arguments)), flush=True)
        jax.clear_caches()
