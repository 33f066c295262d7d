"""Training a convolutional network with parameters of its own at every node, against flax's layers under vmap.

    python -m experiments.bench conv --json bench.json

n = 32 nodes, batch 32, images 28x28x1, the network of `jaxfl.models.cnn`; one SGD step a round, parameters donated.
Both rows train the same network on the same batches in the same process and take turns.

jaxfl's rounds run in a `lax.scan`, as its experiments run them. For the first number flax's rounds are single jitted
steps: in a loop its convolutions fall to a slower kernel yet, which the number "in_scan", at fewer nodes, shows.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.timing import Measurement, compile_times, gemm_call, gemm_flops, in_turns, ratio, runner
from jaxfl.core import Array, PyTree, Task, from_flax, node_keys, update_over_nodes
from jaxfl.models import classification, cnn


class Setting(NamedTuple):
    """Shapes and repeats of the suite."""

    num_nodes: int = 32
    batch_size: int = 32
    sample_shape: tuple[int, int, int] = (28, 28, 1)
    channels: tuple[int, int] = (32, 64)
    window: int = 5
    hidden: int = 512
    num_classes: int = 10
    rounds: int = 2  # in one call of the jaxfl row; flax's are single steps
    scan_nodes: int = 4  # nodes of the comparison in which both rows run in a scan
    scan_repeats: int = 3
    repeats: int = 6
    flax_repeats: int = 3
    gemm_size: int = 2048


class FlaxCNN(nnx.Module):
    """The network of `jaxfl.models.cnn` made of flax's own layers."""

    def __init__(self, setting: Setting, rngs: nnx.Rngs):
        height, width, channels = setting.sample_shape
        first, second = setting.channels
        window = (setting.window, setting.window)
        self.conv_1 = nnx.Conv(channels, first, window, rngs=rngs)
        self.conv_2 = nnx.Conv(first, second, window, rngs=rngs)
        self.dense_1 = nnx.Linear((height // 4) * (width // 4) * second, setting.hidden, rngs=rngs)
        self.dense_2 = nnx.Linear(setting.hidden, setting.num_classes, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        hidden = nnx.max_pool(nnx.relu(self.conv_1(images)), (2, 2), strides=(2, 2))
        hidden = nnx.max_pool(nnx.relu(self.conv_2(hidden)), (2, 2), strides=(2, 2))
        return self.dense_2(nnx.relu(self.dense_1(hidden.reshape(hidden.shape[0], -1))))


def tasks(setting: Setting) -> dict[str, Task]:
    """The same network twice; parameter trees have the same names and shapes."""
    model = cnn(
        setting.sample_shape,
        channels=setting.channels,
        window=setting.window,
        hidden=setting.hidden,
        num_classes=setting.num_classes,
    )
    return {"jaxfl": classification(model), "flax": from_flax(lambda rngs: FlaxCNN(setting, rngs))}


def sgd_rounds(task: Task, rounds: int, step_size: float = 0.01):
    """(params, inputs, labels) -> params after `rounds` steps at every node; one round needs no loop."""

    def step(params, inputs, labels):
        gradient = jax.grad(lambda p: task.loss(p, inputs, labels).mean())(params)
        return jax.tree.map(lambda leaf, slope: leaf - step_size * slope, params, gradient)

    one_round = update_over_nodes(step, task.node_loop)

    def train(params, inputs, labels):
        if rounds == 1:
            return one_round(params, inputs, labels)
        return jax.lax.scan(lambda carry, _: (one_round(carry, inputs, labels), None), params, length=rounds)[0]

    return train


def step_flops(setting: Setting) -> int:
    """Floating-point operations of the products of one round at all nodes.

    Counts the forward product, the gradient to the weights and, except at the first layer, the one to the inputs.
    """
    height, width, channels = setting.sample_shape
    first, second = setting.channels
    taps = setting.window**2
    multiplications = [
        (height * width * taps * channels * first, 2),
        ((height // 2) * (width // 2) * taps * first * second, 3),
        ((height // 4) * (width // 4) * second * setting.hidden, 3),
        (setting.hidden * setting.num_classes, 3),
    ]
    per_sample = sum(2 * count * products for count, products in multiplications)
    return per_sample * setting.batch_size * setting.num_nodes


def node_batches(setting: Setting, num_nodes: int) -> tuple[PyTree, Array, Array]:
    """Initial parameters, images and labels of every node."""
    key = jax.random.key(0)
    params = jax.jit(jax.vmap(tasks(setting)["jaxfl"].init))(node_keys(key, num_nodes))
    shape = (num_nodes, setting.batch_size)
    inputs = jax.random.uniform(jax.random.fold_in(key, 1), (*shape, *setting.sample_shape), jnp.float32)
    return params, inputs, jax.random.randint(jax.random.fold_in(key, 2), shape, 0, setting.num_classes, jnp.int32)


def suite(setting: Setting | None = None) -> dict[str, Measurement]:
    """Measure; see the module's text. About two minutes on two cores, most of it flax's rows."""
    setting = Setting() if setting is None else setting
    both = tasks(setting)
    arguments = node_batches(setting, setting.num_nodes)
    rounds = {"jaxfl": setting.rounds, "flax": 1}
    runners = {name: runner(sgd_rounds(task, rounds[name]), *arguments) for name, task in both.items()}
    calls = {"gemm": gemm_call(setting.gemm_size), **{name: one.call for name, one in runners.items()}}
    repeats = {"gemm": setting.repeats, "jaxfl": setting.repeats, "flax": setting.flax_repeats}
    seconds = in_turns(calls, repeats)

    per_round = {name: [call / count for call in seconds[name]] for name, count in rounds.items()}
    speedup, speedup_spread = ratio(per_round["flax"], per_round["jaxfl"])
    ideal = [call * step_flops(setting) / gemm_flops(setting.gemm_size) for call in seconds["gemm"]]
    share, share_spread = ratio(ideal, per_round["jaxfl"])
    rate = [step_flops(setting) / call / 1e9 for call in per_round["jaxfl"]]
    megabytes = runners["jaxfl"].temp_bytes / 1e6

    arguments = node_batches(setting, setting.scan_nodes)
    scanned = {name: runner(sgd_rounds(task, 2), *arguments).call for name, task in both.items()}
    seconds = in_turns(scanned, dict.fromkeys(scanned, setting.scan_repeats))
    in_scan, in_scan_spread = ratio(seconds["flax"], seconds["jaxfl"])

    shapes = f"batch {setting.batch_size}, {'x'.join(map(str, setting.sample_shape))}"
    nodes = f"n = {setting.num_nodes}, {shapes}"
    network = "the same network of flax nnx layers under vmap"
    loop = f"jaxfl's node_loop {both['jaxfl'].node_loop}"
    return {
        "conv/speedup_vs_flax_vmap": Measurement(
            speedup, "x", speedup_spread, f"{network}, in single jitted steps; {nodes}; {loop}"
        ),
        "conv/speedup_vs_flax_vmap_in_scan": Measurement(
            in_scan, "x", in_scan_spread, f"{network}, both in a scan; n = {setting.scan_nodes}, {shapes}; {loop}"
        ),
        "conv/share_of_gemm": Measurement(
            share, "fraction", share_spread, f"float32 matrix product of size {setting.gemm_size}; {nodes}"
        ),
        "conv/training_gflops": Measurement(statistics.median(rate), "GFLOP/s", (min(rate), max(rate)), nodes),
        "conv/temp_memory": Measurement(megabytes, "MB", (megabytes, megabytes), f"parameters apart; {nodes}"),
        **compile_times("conv", runners, nodes),
    }
