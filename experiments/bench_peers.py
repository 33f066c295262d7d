"""Rounds per second on the workloads that other libraries are measured on, alone or beside PyTorch.

    python -m experiments.bench peers --json bench.json
    python -m experiments.bench peers --against torch --json bench.json

| row | what one round is |
|---|---|
| w1 | `fed_avg`: 10 of 100 clients, 10 local steps, batch 32, 784-128-10 |
| w2 | `fed_avg`: 10 of 100 clients, 5 local steps, batch 32, the CNN of `jaxfl.models.cnn` (1,663,370 parameters) |
| w3_mlp | `dp_fed_avg`, below: 10 clients, 3 local steps, batch 75, 784-128-10 |
| w3_cnn | the same with the CNN |
| w4_n16, w4_n64 | `push_sum` over the exponential graph, without noise, 16 or 64 nodes, batch 32, 784-32-10 |
| w5 | `fed_avg`: 4 clients, 2 local steps, batch 32, ResNet-20 with batch normalization and projections, 32x32x3 |

Images of noise, float32, 600 samples a client, SGD without momentum. A call runs several rounds in one loop with the
state donated; batches are drawn in it, and the infos dropped. The rows of PyTorch are in `bench_peers_torch`: the same
rounds from the same parameters, which take turns with ours in one process. w1_vs_torch and its like are our rate over
that of PyTorch's fastest row. Run that alone on the machine: where other processes take cores, PyTorch's threads wait
for one another, and ratios flatter us without bound (w1: 32 beside many, 1.3 by the processor's time on one core).
"""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench_round import KEY, without_info
from experiments.timing import Measurement, Runner, compile_times, in_turns, ratio, runner
from jaxfl import gradients, graphs, privacy
from jaxfl.algorithms import fed_avg, push_sum
from jaxfl.core import Algorithm, ArgumentError, Array, FederatedData, Purpose, PyTree, Task, algorithm, purpose_key
from jaxfl.core.tree import replicate, size
from jaxfl.data import federate
from jaxfl.gradients import Batch
from jaxfl.models import Model, classification, cnn, mlp, resnet20

PEERS = ("torch",)

# What is asked of our rate over that of the peer's fastest row.
WANTED = {
    "peers/w1_vs_torch": 1.3,
    "peers/w2_vs_torch": 1.0,
    "peers/w3_mlp_vs_torch": 1.3,
    "peers/w3_cnn_vs_torch": 1.3,
    "peers/w4_n16_vs_torch": 1.3,
    "peers/w4_n64_vs_torch": 1.3,
    "peers/w5_vs_torch": 1.0,
}


class Setting(NamedTuple):
    """Shapes and repeats of the suite."""

    samples: int = 600  # of each node
    num_clients: int = 100
    num_active: int = 10
    image_shape: tuple[int, int, int] = (28, 28, 1)
    num_classes: int = 10
    mlp_hidden: int = 128
    channels: tuple[int, int] = (32, 64)
    window: int = 5
    hidden: int = 512
    batch_size: int = 32
    dp_clients: int = 10
    dp_batch_size: int = 75
    clip_norm: float = 1.0
    noise_std: float = 0.01
    push_sum_nodes: tuple[int, ...] = (16, 64)
    push_sum_hidden: int = 32
    resnet_clients: int = 4
    resnet_shape: tuple[int, int, int] = (32, 32, 3)
    resnet_widths: tuple[int, ...] = (16, 32, 64)
    resnet_blocks: tuple[int, ...] = (3, 3, 3)
    step_size: float = 0.01
    max_rounds: int = 100  # in one call
    repeats: int = 7


class Workload(NamedTuple):
    """One row of the suite; what a peer must do, too."""

    method: str  # "fed_avg", "dp_fed_avg" or "push_sum"
    network: str  # "mlp", "cnn" or "resnet"
    model: Model
    sample_shape: tuple[int, ...]
    num_nodes: int
    num_active: int
    num_local_steps: int
    batch_size: int
    rounds: int  # in one call, at least 2: the compiler turns a loop of one round into none
    text: str


def workloads(setting: Setting) -> dict[str, Workload]:
    """The rows by name."""
    flat, classes, batch_size = math.prod(setting.image_shape), setting.num_classes, setting.batch_size
    perceptron = mlp((flat, setting.mlp_hidden, classes))
    small = mlp((flat, setting.push_sum_hidden, classes))
    images = cnn(
        setting.image_shape,
        channels=setting.channels,
        window=setting.window,
        hidden=setting.hidden,
        num_classes=classes,
    )
    residual = resnet20(
        setting.resnet_shape,
        classes,
        shortcut="projection",
        widths=setting.resnet_widths,
        blocks=setting.resnet_blocks,
    )
    found = {}

    def add(name, method, network, model, sample_shape, num_nodes, num_active, num_local_steps, batch_size, rounds):
        text = f"{method}, {network}, {num_active} of {num_nodes}, {num_local_steps} steps, batch {batch_size}"
        rounds = min(rounds, setting.max_rounds)
        found[name] = Workload(
            method,
            network,
            model,
            sample_shape,
            num_nodes,
            num_active,
            num_local_steps,
            batch_size,
            rounds,
            text,
        )

    clients, active, few = setting.num_clients, setting.num_active, setting.resnet_clients
    private, private_batch = setting.dp_clients, setting.dp_batch_size
    add("w1", "fed_avg", "mlp", perceptron, (flat,), clients, active, 10, batch_size, 20)
    add("w2", "fed_avg", "cnn", images, setting.image_shape, clients, active, 5, batch_size, 2)
    add("w3_mlp", "dp_fed_avg", "mlp", perceptron, (flat,), private, private, 3, private_batch, 10)
    add("w3_cnn", "dp_fed_avg", "cnn", images, setting.image_shape, private, private, 3, private_batch, 2)
    for nodes in setting.push_sum_nodes:
        add(f"w4_n{nodes}", "push_sum", "mlp", small, (flat,), nodes, nodes, 1, batch_size, 1600 // nodes)
    add("w5", "fed_avg", "resnet", residual, setting.resnet_shape, few, few, 2, batch_size, 2)
    return found


class DpState(NamedTuple):
    """What the next round of `dp_fed_avg` needs."""

    params: PyTree  # the server's, leaves (*leaf), float32
    round_index: Array  # (), int32, rounds completed


class DpDraws(NamedTuple):
    """The random numbers of one round of `dp_fed_avg`."""

    batches: Batch  # leaves (tau, n, ...)
    noise_keys: Array  # (tau,), typed keys, one for the noise of each step


def dp_fed_avg(
    task: Task,
    *,
    num_nodes: int,
    num_local_steps: int,
    batch_size: int,
    clip_norm: float,
    noise_std: float,
    step_size: float,
) -> Algorithm:
    """DP-SGD at every client and the mean of their models, made of the engine's parts.

    Each client starts a round from the server's model and makes `num_local_steps` steps, each along the mean of a
    batch's gradients (`gradients.mini_batch`), every one clipped to `clip_norm` in L2, plus Gaussian noise of its own.
    """
    estimator = gradients.mini_batch(sampler=gradients.uniform(batch_size), clip_norm=clip_norm)
    noise = privacy.gaussian(noise_std)

    def init(key, data):
        return DpState(task.init(purpose_key(key, Purpose.INIT)), jnp.int32(0))

    def draw(key, state, data):
        steps = state.round_index * num_local_steps + jnp.arange(num_local_steps, dtype=jnp.int32)
        return DpDraws(
            batches=jax.vmap(lambda step: estimator.draw(key, step, data))(steps),
            noise_keys=jax.vmap(lambda step: purpose_key(key, Purpose.NOISE, step))(steps),
        )

    def update(state, data, draws):
        def step(params, one):
            batch, noise_key = one
            gradient, _, _ = estimator.estimate(task, params, None, data, batch, state.round_index)
            noisy = jax.tree.map(jnp.add, gradient, noise.draw(noise_key, params))
            return jax.tree.map(lambda x, g: x - step_size * g, params, noisy), None

        params, _ = jax.lax.scan(step, replicate(state.params, num_nodes), (draws.batches, draws.noise_keys))
        return DpState(jax.tree.map(lambda leaf: leaf.mean(axis=0), params), state.round_index + 1), None

    return algorithm(init, draw, update, lambda state: replicate(state.params, 1))


def learner(setting: Setting, workload: Workload) -> Algorithm:
    """The workload's algorithm."""
    task = classification(workload.model)
    if workload.method == "fed_avg":
        return fed_avg(
            task,
            num_active=workload.num_active,
            num_local_steps=workload.num_local_steps,
            batch_size=workload.batch_size,
            step_size=setting.step_size,
        )
    if workload.method == "push_sum":
        return push_sum(
            task,
            graph=graphs.exponential(workload.num_nodes),
            gradient=gradients.mini_batch(sampler=gradients.uniform(workload.batch_size)),
            step_size=setting.step_size,
        )
    return dp_fed_avg(
        task,
        num_nodes=workload.num_nodes,
        num_local_steps=workload.num_local_steps,
        batch_size=workload.batch_size,
        clip_norm=setting.clip_norm,
        noise_std=setting.noise_std,
        step_size=setting.step_size,
    )


def random_data(setting: Setting, workload: Workload) -> FederatedData:
    """Images of noise, node after node in the pool, every node the same number."""
    rng = np.random.default_rng(0)
    count = workload.num_nodes * setting.samples
    inputs = rng.random((count, *workload.sample_shape), np.float32)
    labels = rng.integers(0, setting.num_classes, count).astype(np.int32)
    return federate(inputs, labels, np.split(np.arange(count, dtype=np.int32), workload.num_nodes))


def require_peer(peer: str | None) -> None:
    """Refuse a peer that is unknown, not installed, or would run on another device than we.

    Raises:
        ArgumentError: one of these.
    """
    if peer is None:
        return
    if peer not in PEERS:
        raise ArgumentError("--against", f"must be one of {', '.join(PEERS)}", f"got {peer!r}", "Choose one of these.")
    if importlib.util.find_spec(peer) is None:
        remedy = f"Install it (pip install {peer}), or leave --against out."
        raise ArgumentError("--against", "must name an installed library", f"{peer} is not installed", remedy)
    if jax.default_backend() != "cpu":
        found = f"JAX runs on {jax.default_backend()}"
        raise ArgumentError("--against", "compares on a CPU", found, "Set JAX_PLATFORMS=cpu.")


def suite(setting: Setting | None = None, against: str | None = None) -> dict[str, Measurement]:
    """Measure; see the module's text. About a minute on two cores, with PyTorch about five.

    Args:
        setting: shapes and repeats.
        against: a name of `PEERS`, or None for our rows alone.

    Raises:
        ArgumentError: the peer is unknown or not installed.
    """
    setting = Setting() if setting is None else setting
    require_peer(against)
    report = {}
    for name, workload in workloads(setting).items():
        report |= _measure(setting, name, workload, against)
    return report


def _measure(setting: Setting, name: str, workload: Workload, against: str | None) -> dict[str, Measurement]:
    """One workload: ours, and the peer's rows in turns with it."""
    algorithm, data = learner(setting, workload), random_data(setting, workload)
    ours = runner(without_info(algorithm, workload.rounds), jax.jit(algorithm.init)(KEY, data), data)
    calls: dict[str, Callable[[], float]] = {"jaxfl": ours.call}
    rounds = {"jaxfl": workload.rounds}
    if against is not None:
        for row, (call, count) in _peer_calls(setting, workload, data).items():
            calls[f"{against}_{row}"], rounds[f"{against}_{row}"] = call, count
    seconds = in_turns(calls, dict.fromkeys(calls, setting.repeats))
    return _report(name, workload, ours, {row: [s / rounds[row] for s in found] for row, found in seconds.items()})


def _peer_calls(
    setting: Setting, workload: Workload, data: FederatedData
) -> dict[str, tuple[Callable[[], float], int]]:
    """Row -> (function that runs rounds and returns their seconds, number of rounds)."""
    from experiments import bench_peers_torch  # not at the top: without a peer nothing of it need be installed

    return bench_peers_torch.calls(setting, workload, data)


def _report(name: str, workload: Workload, ours: Runner, each: dict[str, list[float]]) -> dict[str, Measurement]:
    """Rates and ratios of one workload.

    Args:
        name: of the workload.
        workload: what was run.
        ours: our compiled rounds.
        each: row -> seconds of a round in each repeat; "jaxfl" is ours.
    """
    shapes = f"{workload.text}, {size(jax.eval_shape(workload.model.init, KEY)):,} parameters"
    report = {}
    for row, found in each.items():
        rates = [1 / seconds for seconds in found]
        against = f"jaxfl, {shapes}" if row == "jaxfl" else f"{row.replace('_', ' ')}, {shapes}"
        report[f"peers/{name}_{row}"] = Measurement(
            statistics.median(rates), "rounds/s", (min(rates), max(rates)), against
        )
    peers = {row: found for row, found in each.items() if row != "jaxfl"}
    if peers:
        best = min(peers, key=lambda row: statistics.median(peers[row]))
        value, spread = ratio(peers[best], each["jaxfl"])
        peer = best.partition("_")[0]
        report[f"peers/{name}_vs_{peer}"] = Measurement(
            value, "x", spread, f"our rate over that of {best.replace('_', ' ')}, its fastest row; {shapes}"
        )
    return report | compile_times("peers", {name: ours}, shapes)
