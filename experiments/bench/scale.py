"""Time and memory of an iteration against the number of nodes and against the number of parameters.

PrivSGP over the exponential graph, one hidden layer, batch 32 of fixed size, clipped, Gaussian noise. Nodes from 4 to
4,096 with a network of 2,410 parameters; parameters up to 614,410 at 16 nodes. Iterations run in a loop with the state
donated. Memory is what the compiled loop holds: state, data and temporaries, by the compiler's own account.
"""

from pathlib import Path

from experiments.bench.round import private
from experiments.bench.setting import Setting, perceptron, random_data, training
from experiments.bench.timing import Measurement, Report, curve, finish, in_turns, points
from jaxfl import gradients
from jaxfl.analysis.plots import new_figure, save_figure
from jaxfl.core.tree import num_bytes

GIBIBYTES = 24  # of a large desktop machine: the largest number of nodes that it holds is stated
NUMBERS = 5_000_000  # nodes times parameters times rounds of one call, which has at least two rounds
LABELS = {"n": "nodes n", "d": "parameters of a node d"}


def setting(num_nodes: int, hidden: int) -> Setting:
    """One size."""
    return Setting(perceptron(64, hidden, 10), num_nodes, samples=64, repeats=5)


SETTINGS = {
    "n": [setting(num_nodes, 32) for num_nodes in (4, 16, 64, 256, 1024, 4096)],
    "d": [setting(16, hidden) for hidden in (32, 128, 512, 2048, 8192)],
}


def suite(settings: dict[str, list[Setting]] = SETTINGS) -> dict[str, Measurement]:
    """Measure; see the module's text. About two minutes on two cores."""
    report, held = Report("scale/", ""), {}
    for axis, sizes in settings.items():
        for setting in sizes:
            n, d = setting.num_nodes, setting.network.num_params()
            value, shapes = (n, f"n = {n}, d = {d}") if axis == "n" else (d, f"d = {d}, n = {n}")
            data, rounds = random_data(setting), max(2, NUMBERS // (n * d))
            row, state = training(private(setting, gradients.fixed(setting.batch_size)), data, rounds)
            held[axis, n] = num_bytes(state) + num_bytes(data) + row.temp_bytes
            report.on(shapes).times(in_turns({f"time_{axis}{value}": row}, setting.repeats, rounds))
            text = f"state, data and temporaries; {shapes}"
            report.on(text).median(f"memory_{axis}{value}", held[axis, n] / 1e6, "MB")
    fewer, more = settings["n"][-2:]
    growth = f"from n = {fewer.num_nodes} to {more.num_nodes}, d = {more.network.num_params()}"
    each = (held["n", more.num_nodes] - held["n", fewer.num_nodes]) / (more.num_nodes - fewer.num_nodes)
    report.on(growth).median("bytes_per_node", each, "bytes")
    text = f"in {GIBIBYTES} GiB by the bytes a node, {growth}"
    report.on(text).median("largest_n", float(GIBIBYTES * 2**30 // each), "nodes")
    return report.measurements


def plot(measurements: dict[str, Measurement], path: Path) -> None:
    """Draw time and memory against n and d, on logarithmic axes; other suites' measurements are passed over."""
    figure = new_figure(10, 7, "PrivSGP, one hidden layer, batch 32: time and memory of an iteration")
    for row, (kind, label) in enumerate({"time": "ms a round", "memory": "MB"}.items()):
        for column, axis in enumerate(LABELS):
            axes = figure.add_subplot(2, 2, 2 * row + column + 1)
            curve(axes, points(measurements, rf"scale/{kind}_{axis}(\d+)"), 0, marker="o")
            finish(axes, label, LABELS[axis])
    save_figure(figure, path)
