"""Zero-order learning: batches in one pass against a pass a device, a round against its passes, memory of a large one.

| row | what is run |
|---|---|
| round | a round of `dzofl`, messages of a byte that arrive with probability 0.9 |
| forward | the two passes of a round alone: the losses of all devices' batches, at two sets of parameters, in turn |
| batched | the losses of all devices' batches at the same parameters, in one pass |
| shared | the same as a `vmap` over devices, which share the parameters |
| replicated | the same as a `vmap` over devices that each hold a copy of the parameters |
| grouped | the same by JAX's own convolution, which `vmap` turns into a grouped one, in place of our layers |

DZOFL's network, 50 devices, batch 10; rows take turns in one process, and ratios are of their medians. Copies are
temporary memory and outputs of a compiled round whose state is donated, over the bytes of 100 million parameters of an
MLP.
"""

from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from experiments.bench.setting import KEY, Network, Setting, loop, perceptron, random_data, training
from experiments.bench.timing import Measurement, Report, Runner, runner
from jaxfl.algorithms import dzofl
from jaxfl.channel import float_quantizer
from jaxfl.channel.links import links
from jaxfl.core import Algorithm, Array, FederatedData, PyTree, cross_entropy
from jaxfl.core.tree import num_bytes, replicate
from jaxfl.models import dzofl_cnn

CNN = Network(dzofl_cnn(), "DZOFL's CNN", num_classes=2)
SETTINGS = {
    "rows": Setting(CNN, 50, batch_size=10, samples=60, rounds=4, repeats=9),
    "memory": Setting(perceptron(3072, 8192, 8192, 1000), 50, batch_size=10, samples=10),
}
SMOOTHING = 0.1
WANTED = {
    "zero_order/batched_vs_replicated": 5.0,
    "zero_order/round_over_forward": 1.3,  # at most
    "zero_order/copies_100m": 3.0,  # at most
}


def learner(setting: Setting) -> Algorithm:
    """Zero-order learning over links that lose a tenth of all messages, of a byte each."""
    byte = float_quantizer(4, 3)
    return dzofl(
        setting.task(),
        batch_size=setting.batch_size,
        step_size=setting.step_size,
        smoothing=SMOOTHING,
        uplink=links(0.9, byte),
        downlink=byte,
    )


def forward(setting: Setting, data: FederatedData) -> dict[str, Runner]:
    """Passes over the devices' first samples; each goes on from parameters that hang on the losses before it."""
    task, num_nodes = setting.task(), setting.num_nodes
    positions = data.indices[:, : setting.batch_size]
    inputs, labels = data.inputs[positions], data.labels[positions]
    params = jax.jit(task.init)(KEY)

    def together(held, *batches):
        return task.loss(held, *(part.reshape(-1, *part.shape[2:]) for part in batches))

    def shared(held, *batches):
        return jax.vmap(lambda *own: task.loss(held, *own))(*batches)

    def replicated(held, *batches):
        return jax.vmap(task.loss)(replicate(held, num_nodes), *batches)

    def grouped(held, *batches):
        return jax.vmap(plain_losses)(replicate(held, num_nodes), *batches)

    rows = {"batched": together, "shared": shared, "replicated": replicated, "grouped": grouped}
    passes = {name: _chained(losses, setting.rounds) for name, losses in rows.items()}
    passes["forward"] = _chained(together, 2 * setting.rounds)
    return {name: runner(run, params, inputs, labels) for name, run in passes.items()}


def plain_losses(params: PyTree, images: Array, labels: Array) -> Array:
    """The losses (b,) of DZOFL's network without our layers."""
    hidden = images
    for name in ("conv_1", "conv_2"):
        layer, layout = params[name], ("NHWC", "HWIO", "NHWC")
        hidden = jax.lax.conv_general_dilated(hidden, layer["kernel"], (1, 1), "VALID", dimension_numbers=layout)
        hidden = jax.nn.relu(hidden + layer["bias"][None, None, None])
    pixels = nnx.max_pool(hidden, (2, 2), (2, 2)).reshape(len(images), -1)
    return cross_entropy(pixels @ params["dense_1"]["kernel"] + params["dense_1"]["bias"][None], labels)


def _chained(losses: Callable[..., Array], passes: int) -> Callable[..., PyTree]:
    """Passes one after the other, which cannot be left out or made once: each moves the parameters slightly."""

    def run(held, *batches):
        def one_pass(_, state):
            slight = 1e-12 * losses(state, *batches).sum()
            return jax.tree.map(lambda leaf: leaf + slight, state)

        return jax.lax.fori_loop(0, passes, one_pass, held)

    return run


def copies(setting: Setting) -> float:
    """Memory that a compiled round takes beside the donated parameters and the data, over that of the parameters."""
    algorithm, data = learner(setting), random_data(setting, np.float32)
    state = jax.eval_shape(lambda: algorithm.init(KEY, data))
    compiled = jax.jit(loop(algorithm, 1), donate_argnums=0).lower(state, data).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    total = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return total / num_bytes(state.params)


def suite(settings: dict[str, Setting] = SETTINGS) -> dict[str, Measurement]:
    """Measure; see the module's text. About two minutes on two cores."""
    setting, large = settings["rows"], settings["memory"]
    data = random_data(setting, np.float32)
    rows = {"round": training(learner(setting), data, setting.rounds)[0], **forward(setting, data)}
    report = Report("zero_order/", f"{setting.layers()}, {setting.network.num_params():,} parameters")
    ratios = {
        "batched_vs_replicated": ("replicated", "batched", "a pass of a copy a device over one of shared parameters"),
        "batched_vs_grouped": ("grouped", "batched", "the same, with JAX's own convolution for our layers"),
        "shared_vs_batched": ("shared", "batched", "a pass by vmap over devices that share parameters over one"),
        "round_over_forward": ("round", "forward", "a round over its two passes"),
    }
    report.compare(rows, setting.repeats, setting.rounds, ratios)
    num_params = large.network.num_params()
    text = f"{large.layers()}, {num_params:,} parameters"
    report.on(text).median("copies_100m", copies(large), "x", "memory of a round over that of the parameters")
    return report.measurements
