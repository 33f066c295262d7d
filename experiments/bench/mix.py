"""One mixing step of a large network: structured forms against the dense product, and against the memory's speed.

x is (64, 1,000,000) float32, 256 MB, on the exponential graph. Rows, which take turns in one process, are
`jaxfl.graphs.mix` by the matrix product ("dense"), by rolled copies ("circulant") and by gathers ("neighbors"), and
"half_sum", 0.5 a + 0.5 b of such arrays: what any step that reads two numbers and writes one must take. Rounds run in a
loop with the state donated: each reads x (or a and b) and writes over the result of the round before.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments.bench.setting import Network, Setting
from experiments.bench.timing import Measurement, Report, runner
from jaxfl.core import Array
from jaxfl.graphs import Graph, exponential, mix
from jaxfl.graphs.mixing import best_structure
from jaxfl.models import Model

FORMS = ("dense", "circulant", "neighbors")
SETTING = Setting(Network(Model(()), "", (1_000_000,)), 64, rounds=12)  # two periods of the graph


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


def suite(setting: Setting = SETTING) -> dict[str, Measurement]:
    """Measure; see the module's text. About a minute on two cores, 3 GB."""
    graph, rounds = exponential(setting.num_nodes), setting.rounds
    shape = (setting.num_nodes, *setting.network.sample_shape)
    result = jnp.zeros(shape, jnp.float32)
    first, second = (jax.random.normal(jax.random.key(seed), shape, jnp.float32) for seed in range(2))
    rows = {form: runner(mixing(graph, form, rounds), (result, first)) for form in FORMS}
    rows["half_sum"] = runner(half_sums(rounds), result, first, second)
    arrays = f"{shape[0]} x {shape[1]} float32, exponential graph"
    report = Report("mix/", f'{arrays}; "auto" is {best_structure(graph)}')
    rivals = {"dense": "the dense product", "half_sum": "0.5 a + 0.5 b"}
    ratios = {
        f"{form}_vs_{rival}": (form, rival, f"{form} over {text}")
        for form in FORMS[1:]
        for rival, text in rivals.items()
    }
    report.compare(rows, setting.repeats, rounds, ratios)
    return report.measurements
