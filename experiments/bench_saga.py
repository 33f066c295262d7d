"""What a SAGA table costs: time per iteration against the number of samples, and against having no table.

    python -m experiments.bench saga --json bench.json

Dense table: PrivSGP-VR with one uniform sample, n = 20, 784-32-10 (d = 25,450), J = 100 and J = 2,000 samples a node,
the longer one also in bfloat16.
Factored table: PrivSGP-VR against PrivSGP, batch 32, n = 50, J = 1,200. Iterations run in a loop with the state
donated; the rows of a comparison take turns in one process.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

import jax
import numpy as np

from experiments.timing import Measurement, Runner, compile_times, in_turns, ratio, runner
from jaxfl import gradients, graphs, privacy
from jaxfl.algorithms import push_sum
from jaxfl.core import FederatedData
from jaxfl.data import federate
from jaxfl.gradients import GradientEstimator
from jaxfl.models import classification, mlp


class Setting(NamedTuple):
    """Shapes and repeats of the suite."""

    widths: tuple[int, ...] = (784, 32, 10)
    dense_nodes: int = 20
    dense_samples: tuple[int, int] = (100, 2000)
    factored_nodes: int = 50
    factored_samples: int = 1200
    factored_batch_size: int = 32
    rounds: int = 25  # in one call
    repeats: int = 9


class Row(NamedTuple):
    """One side of a comparison."""

    runner: Runner
    table_bytes: int


def random_data(setting: Setting, num_nodes: int, samples: int) -> FederatedData:
    """Images of noise in one pool, every node the same number."""
    rng = np.random.default_rng(0)
    count = num_nodes * samples
    inputs = rng.integers(0, 256, (count, setting.widths[0]), dtype=np.uint8)
    labels = rng.integers(0, setting.widths[-1], count).astype(np.int32)
    return federate(inputs, labels, np.split(np.arange(count, dtype=np.int32), num_nodes))


def iterations(setting: Setting, data: FederatedData, gradient: GradientEstimator) -> Row:
    """A compiled loop of noisy push-sum iterations over the exponential graph."""
    algorithm = push_sum(
        classification(mlp(setting.widths)),
        graph=graphs.exponential(data.num_nodes),
        gradient=gradient,
        noise=privacy.gaussian(0.01),
        step_size=0.01,
    )
    key = jax.random.key(0)

    def loop(state, data):
        return jax.lax.fori_loop(0, setting.rounds, lambda _, s: algorithm.round(key, s, data)[0], state)

    state = algorithm.init(key, data)
    table = 0 if state.gradient is None else state.gradient.table.nbytes
    return Row(runner(loop, state, data), table)


def suite(setting: Setting | None = None) -> dict[str, Measurement]:
    """Measure; see the module's text. About two minutes on two cores; the dense tables of J = 2,000 take 6 GB twice."""
    setting = Setting() if setting is None else setting
    return {**_dense(setting), **_factored(setting)}


def _per_iteration(setting: Setting, rows: dict[str, Row]) -> dict[str, list[float]]:
    """Milliseconds per iteration of each row, in turns."""
    seconds = in_turns({name: row.runner.call for name, row in rows.items()}, dict.fromkeys(rows, setting.repeats))
    return {name: [1e3 * call / setting.rounds for call in calls] for name, calls in seconds.items()}


def _measurement(milliseconds: list[float], against: str) -> Measurement:
    return Measurement(statistics.median(milliseconds), "ms/iteration", (min(milliseconds), max(milliseconds)), against)


def _dense(setting: Setting) -> dict[str, Measurement]:
    """The dense table, short against long."""
    rows = {
        f"j{samples}": iterations(setting, random_data(setting, setting.dense_nodes, samples), gradients.saga())
        for samples in setting.dense_samples
    }
    short, long = rows
    rounded = f"{long}_bfloat16"
    longest = random_data(setting, setting.dense_nodes, setting.dense_samples[1])
    rows[rounded] = iterations(setting, longest, gradients.saga(storage="bfloat16"))
    times = _per_iteration(setting, rows)
    value, spread = ratio(times[long], times[short])
    rounded_value, rounded_spread = ratio(times[rounded], times[long])
    share = rows[rounded].table_bytes / rows[long].table_bytes
    size = f"n = {setting.dense_nodes}, {'-'.join(map(str, setting.widths))}, batch 1"
    temporary = rows[long].runner.temp_bytes / rows[long].table_bytes
    return {
        f"saga/time_ratio_{long}_{short}": Measurement(value, "x", spread, f"dense table, {long} over {short}; {size}"),
        f"saga/dense_{short}": _measurement(times[short], size),
        f"saga/dense_{long}": _measurement(times[long], size),
        f"saga/dense_{rounded}": _measurement(times[rounded], size),
        "saga/bfloat16_vs_float32": Measurement(
            rounded_value, "x", rounded_spread, f"time with the dense table in bfloat16 over float32, {long}; {size}"
        ),
        "saga/bfloat16_table_share": Measurement(share, "of the float32 table", (share, share), f"{long}; {size}"),
        "saga/dense_temp_share": Measurement(
            temporary, "of the table", (temporary, temporary), f"temporary memory of the compiled loop, {long}; {size}"
        ),
        **compile_times("saga", {f"dense_{name}": row.runner for name, row in rows.items()}, size),
    }


def _factored(setting: Setting) -> dict[str, Measurement]:
    """The factored table against no table."""
    data = random_data(setting, setting.factored_nodes, setting.factored_samples)
    sampler = gradients.uniform(setting.factored_batch_size)
    rows = {
        "plain": iterations(setting, data, gradients.mini_batch(sampler=sampler)),
        "factored": iterations(setting, data, gradients.saga(sampler=sampler, table="factored")),
    }
    times = _per_iteration(setting, rows)
    value, spread = ratio(times["factored"], times["plain"])
    table = float(rows["factored"].table_bytes)
    size = (
        f"n = {setting.factored_nodes}, J = {setting.factored_samples}, {'-'.join(map(str, setting.widths))}, "
        f"batch {setting.factored_batch_size}"
    )
    return {
        "saga/factored_vs_plain": Measurement(value, "x", spread, f"PrivSGP-VR over PrivSGP; {size}"),
        "saga/factored": _measurement(times["factored"], size),
        "saga/plain": _measurement(times["plain"], size),
        "saga/factored_table_bytes": Measurement(table, "bytes", (table, table), size),
        **compile_times("saga", {name: row.runner for name, row in rows.items()}, size),
    }
