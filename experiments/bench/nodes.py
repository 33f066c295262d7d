"""Push-sum on up to 10,000 nodes, on one device of a CPU and on eight: rounds a second, memory, and how nodes agree.

Networks of 2,410 parameters on images of noise, batch 8, without noise or clipping, over the exponential graph and over
random digraphs (uniform weights, in-degree 2 log n on average). Every node starts from parameters of its own. Each row
is a process of its own, whose peak memory is published; it makes rounds in a scan with the state donated and the infos
kept. "graph" is the time to build and to check a graph. Eight devices share state and tables of samples by node.
"""

import os
import re
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from experiments.bench.setting import KEY, Setting, node_params, perceptron, random_data
from experiments.bench.timing import Measurement, Report, curve, finish, points
from jaxfl import graphs
from jaxfl.algorithms import push_sum
from jaxfl.analysis.plots import new_figure, save_figure
from jaxfl.core import Algorithm
from jaxfl.core.devices import NODES, by_node
from jaxfl.core.tree import consensus_distance
from jaxfl.gradients import mini_batch, uniform
from jaxfl.graphs import Graph

GRAPHS = {"exponential": "exponential graph", "random": "random digraph"}
PUBLISHED = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 40)  # rounds whose consensus distance is


class Sizes(NamedTuple):
    """Sizes to run: each graph with each number of nodes, and the largest number on several devices as well."""

    num_nodes: tuple[int, ...] = (10, 100, 1000, 10_000)
    num_devices: int = 8
    hidden: int = 32
    rounds: int = 8  # in one call
    calls: int = 5  # the first is not timed


class Row(NamedTuple):
    """Measurements of a process."""

    seconds: list[float]  # of a round, by call
    distances: list[float]  # consensus distance after each round
    graph_seconds: float
    compile_seconds: float
    peak_megabytes: float


def make_graph(name: str, num_nodes: int) -> Graph:
    """The graph of a row."""
    if name == "exponential":
        return graphs.exponential(num_nodes)
    return graphs.random_digraph(num_nodes, 2 * np.log(num_nodes) / num_nodes, key=0)


def measure(graph: str, num_nodes: int, sizes: Sizes) -> Row:
    """One row, over all devices of this process."""
    setting = Setting(perceptron(64, sizes.hidden, 10), num_nodes, batch_size=8, samples=16)
    start = time.perf_counter()
    learner = push_sum(
        setting.task(),
        graph=make_graph(graph, num_nodes),
        gradient=mini_batch(sampler=uniform(setting.batch_size)),
        step_size=setting.step_size,
    )
    graph_seconds = time.perf_counter() - start
    data = random_data(setting)
    state = jax.jit(learner.init)(KEY, data)._replace(params=node_params(setting.task().init, num_nodes))
    mesh = jax.make_mesh((jax.device_count(),), (NODES,), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        whole, shares = NamedSharding(mesh, PartitionSpec()), by_node(mesh)
        places = jax.tree.map(lambda leaf: shares if leaf.ndim else whole, state)
        tables = jax.tree.map(lambda _: whole, data)._replace(indices=shares, sizes=shares)
        state, data = jax.device_put((state, data), (places, tables))
        start = time.perf_counter()
        run = jax.jit(
            lambda state, data: rounds(learner, sizes.rounds, state, data),
            in_shardings=(places, tables),
            out_shardings=(places, whole),
            donate_argnums=0,
        )
        compiled = run.lower(state, data).compile()
        compile_seconds = time.perf_counter() - start
        seconds, distances = [], []
        for _ in range(sizes.calls):
            start = time.perf_counter()
            state, distance = jax.block_until_ready(compiled(state, data))
            seconds.append((time.perf_counter() - start) / sizes.rounds)
            distances += np.asarray(distance).tolist()
    return Row(seconds, distances, graph_seconds, compile_seconds, peak_megabytes())


def peak_megabytes() -> float:
    """The most memory that this process has had, in MB. Linux's ru_maxrss begins with that of the parent process."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1.024e-3 * int(re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def rounds(learner: Algorithm, count: int, state: Any, data: Any) -> tuple[Any, jax.Array]:
    """(state after `count` rounds, consensus distance after each)."""

    def one(state, _):
        state, _ = learner.round(KEY, state, data)
        return state, consensus_distance(learner.node_params(state))

    return jax.lax.scan(one, state, length=count)


def in_process(graph: str, num_nodes: int, num_devices: int, sizes: Sizes) -> Row:
    """`measure` in a process of its own, on a CPU that has these devices."""
    before = dict(os.environ)
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices)}  # which the process begins with
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(measure, graph, num_nodes, sizes).result()
    finally:
        os.environ.clear()
        os.environ.update(before)


SIZES = Sizes()


def suite(sizes: Sizes = SIZES) -> dict[str, Measurement]:
    """Measure; see the module's text. About three minutes on two cores."""
    report = Report("nodes/", "")
    for graph, text in GRAPHS.items():
        for num_nodes in sizes.num_nodes:
            alone = in_process(graph, num_nodes, 1, sizes)
            where = report.on(f"{text}, n = {num_nodes}")
            _publish(where, f"{graph}_n{num_nodes}", alone)
            where.median(f"{graph}_n{num_nodes}_graph", alone.graph_seconds, "s", "to build and check the graph")
            for k in (k for k in PUBLISHED if k <= len(alone.distances)):
                name = f"{graph}_n{num_nodes}_distance_{k}"
                where.median(name, alone.distances[k - 1], "", f"consensus distance after round {k}")
            if num_nodes == max(sizes.num_nodes):
                spread = in_process(graph, num_nodes, sizes.num_devices, sizes)
                where = report.on(f"{text}, n = {num_nodes}, {sizes.num_devices} devices of the CPU")
                name = f"{graph}_n{num_nodes}_devices{sizes.num_devices}"
                _publish(where, name, spread)
                pairs = np.array([alone.distances, spread.distances])
                off = float(np.max(np.abs(pairs[1] / pairs[0] - 1)))
                where.median(f"{name}_off", off, "", "largest relative difference of consensus distances to one device")
    return report.measurements


def plot(measurements: dict[str, Measurement], path: Path) -> None:
    """Draw consensus distance against rounds, and rounds a second and memory against n."""
    figure = new_figure(11, 7.4, "Push-sum of networks with 2,410 parameters: agreement, speed and memory by nodes n")
    for column, (graph, title) in enumerate(GRAPHS.items()):
        axes = figure.add_subplot(2, 2, column + 1)
        for number, (num_nodes, reached) in enumerate(sorted(distances(measurements, graph).items())):
            curve(axes, sorted(reached.items()), number, label=f"n = {num_nodes:,}")
        finish(axes, f"consensus distance, {title}", "round", is_size=False)
    for column, (pattern, label) in enumerate({"": "rounds a second", "_memory": "peak memory, MB"}.items()):
        axes = figure.add_subplot(2, 2, 3 + column)
        for number, (graph, title) in enumerate(GRAPHS.items()):
            curve(axes, points(measurements, rf"nodes/{graph}_n(\d+){pattern}"), number, marker="o", label=title)
            for n, devices, value in points(measurements, rf"nodes/{graph}_n(\d+)_devices(\d+){pattern}"):
                text = f"{title}, {devices} devices"
                curve(axes, [(n, value)], number + 2, marker="s", markersize=9, label=text)
        finish(axes, label, "nodes n")
    save_figure(figure, path)


def distances(measurements: dict[str, Measurement], graph: str) -> dict[int, dict[int, float]]:
    """Number of nodes -> round -> consensus distance, on one device."""
    curves: dict[int, dict[int, float]] = {}
    for num_nodes, k, value in points(measurements, rf"nodes/{graph}_n(\d+)_distance_(\d+)"):
        curves.setdefault(num_nodes, {})[k] = value
    return curves


def _publish(report: Report, name: str, row: Row) -> None:
    """Rate, memory and time to compile."""
    report.median(name, 1 / np.array(row.seconds[1:]), "rounds/s")
    report.median(f"{name}_memory", row.peak_megabytes, "MB", "peak memory of the process")
    report.median(f"{name}_compile", row.compile_seconds, "s", "tracing and compiling")
