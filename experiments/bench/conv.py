"""Training a convolutional network with parameters of its own at every node, against flax's layers under vmap.

n = 32 nodes, batch 32, images 28x28x1, the network of `jaxfl.models.cnn`; one SGD step a round, parameters donated.
Both rows train the same network on the same batches in the same process and take turns.

jaxfl's rounds run in a `lax.scan`, as its experiments run them. For the first number flax's rounds are single jitted
steps: in a loop its convolutions fall to a slower kernel yet, which the number "in_scan", at fewer nodes, shows.
"""

import jax

from experiments.bench.flax_rows import FlaxNetwork
from experiments.bench.setting import Network, Setting, descend, layer_flops, node_batches, node_params, node_rounds
from experiments.bench.timing import Measurement, Report, Runner, gemm_call, in_turns, runner
from jaxfl.core import Task, from_flax
from jaxfl.models import cnn

NETWORK = Network(cnn(), "CNN")
SETTINGS = {
    "steps": Setting(NETWORK, 32, repeats=6, slow_rounds=1),  # flax's rows are the slow ones
    "scan": Setting(NETWORK, 4, repeats=3),
}


def tasks(setting: Setting) -> dict[str, Task]:
    """The same network twice; parameter trees have the same names and shapes."""
    return {"jaxfl": setting.task(), "flax": from_flax(lambda rngs: FlaxNetwork(setting.network.model, rngs))}


def sgd_rounds(task: Task, rounds: int, step_size: float):
    """(params, inputs, labels) -> params after `rounds` steps at every node."""

    def step(params, inputs, labels):
        return descend(params, jax.grad(lambda p: task.loss(p, inputs, labels).mean())(params), step_size)

    return node_rounds(step, task.node_loop, rounds)


def rows(setting: Setting, rounds: dict[str, int]) -> dict[str, Runner]:
    """Both libraries' compiled rounds, from the same parameters."""
    both = tasks(setting)
    arguments = node_params(both["jaxfl"].init, setting.num_nodes), *node_batches(setting)
    return {name: runner(sgd_rounds(task, rounds[name], setting.step_size), *arguments) for name, task in both.items()}


def suite(settings: dict[str, Setting] = SETTINGS) -> dict[str, Measurement]:
    """Measure; see the module's text. About two minutes on two cores, most of it flax's rows."""
    steps, scan = settings["steps"], settings["scan"]
    rounds = {"jaxfl": steps.rounds, "flax": steps.slow_rounds}
    runners = rows(steps, rounds)
    seconds = in_turns(
        {"gemm": gemm_call(steps.gemm_size), **runners},
        {"gemm": steps.repeats, "jaxfl": steps.repeats, "flax": steps.slow_repeats},
        {"gemm": 1, **rounds},
    )
    scanned = in_turns(rows(scan, dict.fromkeys(rounds, scan.rounds)), scan.repeats)
    per_sample = sum(flops for _, flops in layer_flops(steps.network).values())
    flops = steps.batch_size * steps.num_nodes * per_sample
    ours, network = seconds["jaxfl"], "the same network of flax nnx layers under vmap"
    loop = f"jaxfl's node_loop {tasks(steps)['jaxfl'].node_loop}"

    report = Report("conv/", steps.images())
    report.on(f"{steps.images()}; {loop}").ratio(
        "speedup_vs_flax_vmap", seconds["flax"], ours, f"{network}, in single jitted steps"
    )
    report.on(f"{scan.images()}; {loop}").ratio(
        "speedup_vs_flax_vmap_in_scan", scanned["flax"], scanned["jaxfl"], f"{network}, both in a scan"
    )
    yardstick = f"float32 matrix product of size {steps.gemm_size}"
    report.ratio("share_of_gemm", flops * seconds["gemm"], ours, yardstick, "fraction")
    report.median("training_gflops", flops / ours / 1e9, "GFLOP/s")
    report.median("temp_memory", runners["jaxfl"].temp_bytes / 1e6, "MB", "parameters apart")
    report.compile_times(runners)
    return report.measurements
