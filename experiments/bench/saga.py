"""Cost of a SAGA table: time per iteration against the number of samples, and against having no table.

Dense table: PrivSGP-VR with one uniform sample, n = 20, 784-32-10 (d = 25,450), J = 100 and J = 2,000 samples a node,
the longer one also in bfloat16.
Factored table: PrivSGP-VR against PrivSGP, batch 32, n = 50, J = 1,200. Iterations run in a loop with the state
donated; the rows of a comparison take turns in one process.
"""

from experiments.bench.setting import Setting, learner, perceptron, random_data, training
from experiments.bench.timing import Measurement, Report, in_turns
from jaxfl import gradients
from jaxfl.core import FederatedData
from jaxfl.gradients import GradientEstimator

NETWORK = perceptron(784, 32, 10)
SETTINGS = {
    "short": Setting(NETWORK, 20, batch_size=1, samples=100, rounds=25, repeats=9),
    "long": Setting(NETWORK, 20, batch_size=1, samples=2000, rounds=25, repeats=9),
    "factored": Setting(NETWORK, 50, samples=1200, rounds=25, repeats=9),
}


def run(setting: Setting, rows: dict[str, tuple[FederatedData, GradientEstimator]]):
    """Noisy push-sum over the exponential graph: compiled rows, bytes of their tables, seconds of an iteration."""
    runners, table_bytes = {}, {}
    for name, (data, gradient) in rows.items():
        runners[name], state = training(learner(setting, gradient), data, setting.rounds)
        table_bytes[name] = 0 if state.gradient is None else state.gradient.table.nbytes
    return runners, table_bytes, in_turns(runners, setting.repeats, setting.rounds)


def suite(settings: dict[str, Setting] = SETTINGS) -> dict[str, Measurement]:
    """Measure; see the module's text. About two minutes on two cores; the dense tables of J = 2,000 take 6 GB twice."""
    return dense(settings["short"], settings["long"]) | factored(settings["factored"])


def dense(fewer: Setting, more: Setting) -> dict[str, Measurement]:
    """The dense table, short against long."""
    short, long = f"j{fewer.samples}", f"j{more.samples}"
    rounded = f"{long}_bfloat16"
    rows = {short: (random_data(fewer), gradients.saga()), long: (random_data(more), gradients.saga())}
    rows[rounded] = (rows[long][0], gradients.saga(storage="bfloat16"))
    runners, tables, seconds = run(fewer, rows)
    report = Report("saga/", fewer.layers())
    report.ratio(f"time_ratio_{long}_{short}", seconds[long], seconds[short], f"dense table, {long} over {short}")
    report.times({f"dense_{name}": times for name, times in seconds.items()}, "iteration")
    text = f"time with the dense table in bfloat16 over float32, {long}"
    report.ratio("bfloat16_vs_float32", seconds[rounded], seconds[long], text)
    report.median("bfloat16_table_share", tables[rounded] / tables[long], "of the float32 table", long)
    temporary = runners[long].temp_bytes / tables[long]
    report.median("dense_temp_share", temporary, "of the table", f"temporary memory of the compiled loop, {long}")
    report.compile_times({f"dense_{name}": row for name, row in runners.items()})
    return report.measurements


def factored(setting: Setting) -> dict[str, Measurement]:
    """The factored table against no table."""
    data, sampler = random_data(setting), gradients.uniform(setting.batch_size)
    table = gradients.saga(sampler=sampler, table="factored")
    rows = {"plain": (data, gradients.mini_batch(sampler=sampler)), "factored": (data, table)}
    runners, tables, seconds = run(setting, rows)
    samples = f"n = {setting.num_nodes}, J = {setting.samples}"
    report = Report("saga/", f"{samples}, {setting.network.text}, batch {setting.batch_size}")
    report.ratio("factored_vs_plain", seconds["factored"], seconds["plain"], "PrivSGP-VR over PrivSGP")
    report.times(seconds, "iteration")
    report.median("factored_table_bytes", float(tables["factored"]), "bytes")
    report.compile_times(runners)
    return report.measurements
