"""Rounds per second on the workloads that other libraries are measured on, alone or beside one of them.

`SETTINGS` has the rows: `fed_avg`; the same with DP-SGD at every client, "dp_sgd", where each sample's gradient is
clipped to `clip_norm` in L2 and the mean gets noise of `noise_std`; `push_sum` over the exponential graph, without
noise; D-PSGD ("gossip") and GT-SAGA with a dense table over a ring, whose nodes have logistic regressions. The other
networks: an MLP, the CNN of `jaxfl.models.cnn` (1,663,370 parameters), ResNet-20 with batch normalization
and projections.

Images of noise, float32, 600 samples a client, SGD without momentum. A call runs several rounds in one loop with the
state donated; batches are drawn in it, and the infos dropped. The rows of PyTorch are in `torch_rows`, those of fluke,
which has FedAvg of the MLP only, in `fluke_rows`, those of decent-bench, which has the last two methods, in
`decent_bench_rows`: the same rounds from the same parameters, which take turns with ours
in one process. w1_vs_torch and its like are our rate over that of the library's fastest row. Run that alone on the
machine: if other processes take cores, PyTorch's threads wait for one another, and the ratios are far too good for us
(w1: 32 beside many, 1.3 by the processor's time on one core).
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.bench.setting import Network, Setting, clients, learner, random_data, training
from experiments.bench.timing import Measurement, Report, Runner, in_turns
from jaxfl import gradients, graphs, privacy
from jaxfl.algorithms import d_psgd, fed_avg, gt_saga
from jaxfl.core import Algorithm, ArgumentError, FederatedData, Task, from_functions
from jaxfl.core.platform import platform
from jaxfl.models import cnn, mlp, resnet20

PEERS = {"torch": "torch", "fluke": "fluke-fl", "decent_bench": "decent-bench"}  # library -> its package
ALL_CORES = True
MLP = Network(mlp((784, 128, 10)), "mlp", (784,))
SMALL = Network(mlp((784, 32, 10)), "mlp", (784,))
CNN = Network(cnn(), "cnn")
RESNET = Network(resnet20(shortcut="projection"), "resnet", (32, 32, 3))
LOGISTIC = Network(mlp((784, 1)), "logistic regression", (784,), 2)

# A call has at least 2 rounds: the compiler turns a loop of one round into none.
SETTINGS = {
    "w1": Setting(MLP, 100, method="fed_avg", num_active=10, num_local_steps=10, rounds=20),
    "w2": Setting(CNN, 100, method="fed_avg", num_active=10, num_local_steps=5, rounds=2),
    "w3_mlp": Setting(MLP, 10, method="dp_sgd", num_local_steps=3, batch_size=75, rounds=10),
    "w3_cnn": Setting(CNN, 10, method="dp_sgd", num_local_steps=3, batch_size=75, rounds=2),
    "w4_n16": Setting(SMALL, 16, method="push_sum", rounds=100),
    "w4_n64": Setting(SMALL, 64, method="push_sum", rounds=25),
    "w5": Setting(RESNET, 4, method="fed_avg", num_local_steps=2, rounds=2),
    "w6_full": Setting(LOGISTIC, 64, method="gossip", batch_size=280, samples=280, rounds=50, slow_rounds=20),
    "w6": Setting(LOGISTIC, 64, method="gossip", samples=280, rounds=200, slow_rounds=20),
    "w7": Setting(LOGISTIC, 64, method="gt_saga", batch_size=1, samples=280, rounds=200, slow_rounds=20),
}

# The least ratio of our rate to the rate of the peer's fastest row.
WANTED = {f"peers/{name}_vs_torch": 1.0 if name in ("w2", "w5") else 1.3 for name in SETTINGS if name[:2] <= "w5"}


def method(setting: Setting) -> Algorithm:
    """The algorithm of a row."""
    if setting.method in ("gossip", "gt_saga"):
        sampler, is_table = gradients.fixed(setting.batch_size), setting.method == "gt_saga"
        estimator = gradients.saga(sampler=sampler) if is_table else gradients.mini_batch(sampler=sampler)
        graph, build = graphs.ring(setting.num_nodes), gt_saga if is_table else d_psgd
        return build(logistic(), graph=graph, gradient=estimator, step_size=setting.step_size)
    if setting.method == "push_sum":
        return learner(setting, gradients.mini_batch(sampler=gradients.uniform(setting.batch_size)), noise=False)
    options = dp_sgd(setting) if setting.method == "dp_sgd" else {}
    return fed_avg(setting.task(), clients=clients(setting, **options), num_active=setting.active())


def logistic() -> Task:
    """Logistic regression without an intercept, as decent-bench has it: labels 0 and 1."""

    def loss(weights, inputs, label):
        logit = inputs @ weights
        return jnp.logaddexp(0.0, logit) - label.astype(logit.dtype) * logit

    return from_functions(lambda key: jnp.zeros(784, jnp.float32), loss)


def dp_sgd(setting: Setting) -> dict[str, Any]:
    """Options that make local steps DP-SGD; the clients' models weigh alike."""
    return {
        "sampler": gradients.uniform,
        "clip_norm": setting.clip_norm,
        "noise": privacy.gaussian(setting.noise_std),
        "weighting": "uniform",
    }


def require_peer(peer: str) -> None:
    """Refuse, by an ArgumentError, a peer that is unknown, not installed, or would run on another device than we."""
    names, backend = ", ".join(PEERS), platform()
    for fits, requirement, found, remedy in (
        (peer in PEERS, f"must be one of {names}", f"got {peer!r}", "Choose one of these."),
        (
            importlib.util.find_spec(peer) is not None,
            "must name an installed library",
            f"{peer} is not installed",
            f"Install it (pip install {PEERS.get(peer, peer)}), or leave --against out.",
        ),
        (backend == "cpu", "compares on a CPU", f"JAX runs on {backend}", "Set JAX_PLATFORMS=cpu."),
    ):
        if not fits:
            raise ArgumentError("--against", requirement, found, remedy)


def suite(settings: dict[str, Setting] = SETTINGS, against: str | None = None) -> dict[str, Measurement]:
    """Measure, `against` a name of `PEERS` or alone. About a minute on two cores, with PyTorch about five."""
    report = {}
    for name, setting in settings.items():
        data = random_data(setting, np.float32)
        ours, _ = training(method(setting), data, setting.rounds)
        calls: dict[str, Callable[[], float]] = {"jaxfl": ours}
        rounds = {"jaxfl": setting.rounds}
        if against is not None:
            for row, (call, count) in peer_calls(against, setting, data).items():
                calls[f"{against}_{row}"], rounds[f"{against}_{row}"] = call, count
        report |= rates(name, setting, ours, in_turns(calls, setting.repeats, rounds))
    return report


def peer_calls(peer: str, setting: Setting, data: FederatedData) -> dict[str, tuple[Callable[[], float], int]]:
    """Row -> (function that runs rounds and returns their seconds, number of rounds)."""
    # Not at the top: without a peer nothing of it need be installed.
    return importlib.import_module(f"{__package__}.{peer}_rows").calls(setting, data)


def rates(name: str, setting: Setting, ours: Runner, seconds: dict[str, np.ndarray]) -> dict[str, Measurement]:
    """Rates and ratios of the workload `name`; `seconds` of a round are ours under "jaxfl"."""
    active = f"{setting.active()} of {setting.num_nodes}, {setting.num_local_steps} steps, batch {setting.batch_size}"
    num_params = setting.network.num_params()
    shapes = f"{setting.method}, {setting.network.text}, {active}, {num_params:,} parameters"
    report = Report("peers/", shapes)
    for row, times in seconds.items():
        library = report.on(f"{row.replace('_', ' ')}, {shapes}")
        library.median(f"{name}_{row}", 1 / times, "rounds/s")
    peers = {row: float(np.median(times)) for row, times in seconds.items() if row != "jaxfl"}
    if peers:
        best = min(peers, key=lambda row: peers[row])
        text = f"our rate over that of {best.replace('_', ' ')}, its fastest row"
        peer = next(peer for peer in PEERS if best.startswith(peer))
        report.ratio(f"{name}_vs_{peer}", seconds[best], seconds["jaxfl"], text)
    report.compile_times({name: ours})
    return report.measurements
