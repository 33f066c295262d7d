"""Training a convolutional network with parameters of its own at every node, against flax's layers under vmap.

n = 32 nodes, batch 32, images 28x28x1, the network of `jaxfl.models.cnn`; one SGD step a round, parameters donated.
Both rows train the same network on the same batches in the same process and take turns.

jaxfl's rounds run in a `lax.scan`, as its experiments run them. For the first number flax's rounds are single jitted
steps: in a loop XLA takes a still slower kernel for its convolutions, as the number "in_scan" at fewer nodes shows.
"""

from experiments.bench.flax_rows import compiled, rows
from experiments.bench.setting import Network, Setting, layer_flops
from experiments.bench.timing import Measurement, Report, gemm_call, in_turns
from jaxfl.models import cnn

NETWORK = Network(cnn(), "CNN")
SETTINGS = {
    "steps": Setting(NETWORK, 32, repeats=6, slow_rounds=1),  # flax's rows are the slow ones
    "scan": Setting(NETWORK, 4, repeats=3),
}


def suite(settings: dict[str, Setting] = SETTINGS) -> dict[str, Measurement]:
    """Measure; see the module's text. About two minutes on two cores, most of it flax's rows."""
    steps, scan = settings["steps"], settings["scan"]
    rounds = {"jaxfl": steps.rounds, "flax": steps.slow_rounds}
    both = rows(steps.network.model)
    runners = {name: compiled(row, steps, rounds[name]) for name, row in both.items()}
    seconds = in_turns(
        {"gemm": gemm_call(steps.gemm_size), **runners},
        {"gemm": steps.repeats, "jaxfl": steps.repeats, "flax": steps.slow_repeats},
        {"gemm": 1, **rounds},
    )
    loops = {name: compiled(row, scan, scan.rounds) for name, row in rows(scan.network.model).items()}
    scanned = in_turns(loops, scan.repeats)
    per_sample = sum(flops for _, flops in layer_flops(steps.network).values())
    flops = steps.batch_size * steps.num_nodes * per_sample
    ours, network = seconds["jaxfl"], "the same network of flax nnx layers under vmap"
    loop = f"jaxfl's node_loop {both['jaxfl'].node_loop}"

    report = Report("conv/", f"{steps.images()}; {loop}")
    report.ratio("speedup_vs_flax_vmap", seconds["flax"], ours, f"{network}, in single jitted steps")
    in_scan, text = report.on(f"{scan.images()}; {loop}"), f"{network}, both in a scan"
    in_scan.ratio("speedup_vs_flax_vmap_in_scan", scanned["flax"], scanned["jaxfl"], text)
    yardstick = f"float32 matrix product of size {steps.gemm_size}"
    report.ratio("share_of_gemm", flops * seconds["gemm"], ours, yardstick, "fraction")
    report.median("training_gflops", flops / ours / 1e9, "GFLOP/s")
    report.median("temp_memory", runners["jaxfl"].temp_bytes / 1e6, "MB", "parameters apart")
    report.compile_times(runners)
    return report.measurements
