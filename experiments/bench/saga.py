"""Cost of a SAGA table: time per iteration against the number of samples, and against having no table.

Dense table: PrivSGP-VR with one uniform sample, n = 20, 784-32-10 (d = 25,450), J = 100 and J = 2,000 samples a node,
the longer one also in bfloat16.
Factored table: PrivSGP-VR against PrivSGP, batch 32, n = 50, J = 1,200. Iterations run in a loop with the state
donated; the rows of a comparison take turns in one process.
"""

from experiments.bench.setting import Setting, learner, perceptron, random_data, training
from experiments.bench.timing import Measurement, Report
from jaxfl import gradients
from jaxfl.core import FederatedData
from jaxfl.gradients import GradientEstimator

Row = tuple[FederatedData, GradientEstimator]
NETWORK = perceptron(784, 32, 10)
SETTINGS = {
    "short": Setting(NETWORK, 20, batch_size=1, samples=100, rounds=25, repeats=9),
    "long": Setting(NETWORK, 20, batch_size=1, samples=2000, rounds=25, repeats=9),
    "factored": Setting(NETWORK, 50, samples=1200, rounds=25, repeats=9),
}


def compare(report: Report, setting: Setting, rows: dict[str, Row], ratios: dict, group: str = ""):
    """Time noisy push-sum over the exponential graph; returns the compiled rows and the bytes of their tables."""
    runners, table_bytes = {}, {}
    for name, (data, gradient) in rows.items():
        runners[name], state = training(learner(setting, gradient), data, setting.rounds)
        table_bytes[name] = 0 if state.gradient is None else state.gradient.table.nbytes
    report.compare(runners, setting.repeats, setting.rounds, ratios, group, "iteration")
    return runners, table_bytes


def suite(settings: dict[str, Setting] = SETTINGS) -> dict[str, Measurement]:
    """Measure; see the module's text. About two minutes on two cores; the dense tables of J = 2,000 take 6 GB twice."""
    fewer, more, whole = settings["short"], settings["long"], settings["factored"]
    short, long = f"j{fewer.samples}", f"j{more.samples}"
    rounded, report = f"{long}_bfloat16", Report("saga/", fewer.layers())
    rows = {short: (random_data(fewer), gradients.saga()), long: (random_data(more), gradients.saga())}
    rows[rounded] = (rows[long][0], gradients.saga(storage="bfloat16"))
    ratios = {
        f"time_ratio_{long}_{short}": (long, short, f"dense table, {long} over {short}"),
        "bfloat16_vs_float32": (rounded, long, f"time with the dense table in bfloat16 over float32, {long}"),
    }
    runners, tables = compare(report, fewer, rows, ratios, "dense_")
    report.median("bfloat16_table_share", tables[rounded] / tables[long], "of the float32 table", long)
    temporary = runners[long].temp_bytes / tables[long]
    report.median("dense_temp_share", temporary, "of the table", f"temporary memory of the compiled loop, {long}")

    data, sampler = random_data(whole), gradients.uniform(whole.batch_size)
    table = gradients.saga(sampler=sampler, table="factored")
    rows = {"plain": (data, gradients.mini_batch(sampler=sampler)), "factored": (data, table)}
    report = report.on(f"{whole.layers()}, J = {whole.samples}")
    ratios = {"factored_vs_plain": ("factored", "plain", "PrivSGP-VR over PrivSGP")}
    _, tables = compare(report, whole, rows, ratios)
    report.median("factored_table_bytes", float(tables["factored"]), "bytes")
    return report.measurements
