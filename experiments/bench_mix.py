"""One mixing step of a large network: structured forms against the dense product, and against the memory's speed.

    python -m experiments.bench mix --json bench.json

x is (64, 1,000,000) float32, 256 MB, on the exponential graph. Rows, which take turns in one process:

| row | what one round does |
|---|---|
| dense | `jaxfl.graphs.mix` by the matrix product |
| circulant | by rolled copies |
| neighbors | by gathers |
| half_sum | 0.5 a + 0.5 b of two arrays of that shape: what any step that reads two numbers and writes one must take |

Rounds run in a loop with the state donated: each reads x (or a and b) and writes over the result of the round before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.timing import Measurement, compile_times, in_turns, ratio, runner
from jaxfl.core import Array
from jaxfl.graphs import Graph, exponential, mix
from jaxfl.graphs.mixing import best_structure


class Setting(NamedTuple):
    """Shapes and repeats of the suite."""

    num_nodes: int = 64
    num_params: int = 1_000_000
    rounds: int = 12  # in one call: two periods of the graph
    repeats: int = 7


def mixing(graph: Graph, structure: str, rounds: int) -> Callable[[tuple[Array, Array]], tuple[Array, Array]]:
    """(result, x) -> the same after writing x, mixed by the matrix of the round, over `result` in each of the rounds.

    The first entry of x becomes that of the round's result, or the compiler would do part of the work only once.
    """

    def one(index, held):
        x = held[1]
        result = mix(graph, x, index, structure)
        return result, x.at[0, 0].set(result[0, 0])

    return lambda held: jax.lax.fori_loop(0, rounds, one, held)


def half_sums(rounds: int) -> Callable[[Array, Array, Array], Array]:
    """(result, a, b) -> 0.5 a + 0.5 b, written over `result` in each of the rounds."""

    def one(index, first, second):
        # Exactly one half, but made from the round, or the compiler would take the sum once for all rounds.
        half = 0.5 + 1e-30 * jnp.asarray(index, jnp.float32)
        return half * first + half * second

    return lambda result, first, second: jax.lax.fori_loop(0, rounds, lambda k, _: one(k, first, second), result)


def suite(setting: Setting | None = None) -> dict[str, Measurement]:
    """Measure; see the module's text. About a minute on two cores, 3 GB."""
    setting = Setting() if setting is None else setting
    graph = exponential(setting.num_nodes)
    shape = (setting.num_nodes, setting.num_params)
    result = jnp.zeros(shape, jnp.float32)
    first, second = (jax.random.normal(jax.random.key(seed), shape, jnp.float32) for seed in range(2))
    forms = ("dense", "circulant", "neighbors")
    rows = {form: runner(mixing(graph, form, setting.rounds), (result, first)) for form in forms}
    rows["half_sum"] = runner(half_sums(setting.rounds), result, first, second)
    seconds = in_turns({name: row.call for name, row in rows.items()}, dict.fromkeys(rows, setting.repeats))

    shapes = f"{shape[0]} x {shape[1]} float32, exponential graph"
    auto = f'"auto" is {best_structure(graph)}'
    report = {}
    for form in forms[1:]:
        for rival, text in (("dense", "the dense product"), ("half_sum", "0.5 a + 0.5 b")):
            value, spread = ratio(seconds[form], seconds[rival])
            report[f"mix/{form}_vs_{rival}"] = Measurement(value, "x", spread, f"{form} over {text}; {shapes}; {auto}")
    for name, calls in seconds.items():
        each = [1e3 * call / setting.rounds for call in calls]
        report[f"mix/{name}"] = Measurement(statistics.median(each), "ms/round", (min(each), max(each)), shapes)
    for name, row in rows.items():
        held = row.temp_bytes / 1e6
        report[f"mix/temp_{name}"] = Measurement(held, "MB", (held, held), f"temporary memory; {shapes}")
    return {**report, **compile_times("mix", rows, shapes)}
