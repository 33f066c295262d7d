"""ResNet-20 with parameters of its own at every node: a round against flax under vmap, and each stage against GEMM.

n = 10 nodes, batch 32, images 32x32x3, batch normalization in training mode, shortcuts without parameters ("padding");
one SGD step a round. Rounds run in a `lax.scan`, as experiments run them; both rows train the same network on the same
batches in the same process and take turns. Each stage is then timed by itself, forward and backward, from inputs of the
shape that it has in the network; its share is that of the rate of a large float32 matrix product in the same run.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.bench.flax_rows import compiled, rows
from experiments.bench.setting import KEY, Network, Setting, descend, layer_flops, node_params, node_rounds
from experiments.bench.timing import Measurement, Report, gemm_call, in_turns, runner
from jaxfl.core.node_loop import automatic
from jaxfl.models import Model, resnet20

NETWORK = Network(resnet20(shortcut="padding"), "ResNet-20", (32, 32, 3))
SETTINGS = {
    "whole": Setting(NETWORK, 10, repeats=6),  # flax's row is the slow one
    "stages": Setting(NETWORK, 2, rounds=4, repeats=6),
}


class Stage(NamedTuple):
    """Some layers of the network in a row."""

    name: str
    model: Model
    input_shape: tuple[int, ...]  # of one sample
    flops: int  # as of `layer_flops`


def stages(network: Network) -> list[Stage]:
    """Stem and stages."""
    sizes, layers = layer_flops(network), {}
    for label, layer in network.model.layers:
        if label.startswith(("stem", "block")):
            name = label if label == "stem" else f"stage_{label.split('_')[1]}"
            layers.setdefault(name, []).append((label, layer))
    return [
        Stage(name, Model(tuple(pairs)), sizes[pairs[0][0]][0], sum(sizes[label][1] for label, _ in pairs))
        for name, pairs in layers.items()
    ]


def stage_rounds(setting: Setting, stage: Stage):
    """(runner's function, state, inputs) that trains one stage to make its outputs small."""
    has_gradient = stage.name != "stem"

    def step(state, inputs):
        (params, statistics), pulled = state
        weights = jnp.ones(inputs.shape[0], jnp.float32)

        def size_of_outputs(params, inputs):
            outputs, new = stage.model.apply_train(params, statistics, inputs, weights, KEY)
            return jnp.sum(outputs**2), new

        # The gradient to the inputs is pulled along in the state, so that it must be computed; the stem has none.
        arguments = (0, 1) if has_gradient else (0,)
        slopes, new = jax.grad(size_of_outputs, argnums=arguments, has_aux=True)(params, inputs + pulled)
        return (descend(params, slopes[0], 1e-9), new), (1e-9 * slopes[1] if has_gradient else pulled)

    inputs = jax.random.normal(KEY, (setting.num_nodes, setting.batch_size, *stage.input_shape), jnp.float32)
    variables = node_params(lambda key: (stage.model.init(key), stage.model.init_state()), setting.num_nodes)
    rounds = node_rounds(step, automatic(fills_caches=True), setting.rounds)
    return rounds, (variables, jnp.zeros_like(inputs)), inputs


def suite(settings: dict[str, Setting] = SETTINGS) -> dict[str, Measurement]:
    """Measure; see the module's text. Some minutes on two cores, most of them flax's row."""
    whole, staged = settings["whole"], settings["stages"]
    both = rows(whole.network.model)
    runners = {name: compiled(row, whole, whole.rounds) for name, row in both.items()}
    seconds = in_turns(runners, {"jaxfl": whole.repeats, "flax": whole.slow_repeats}, whole.rounds)
    parts = stages(staged.network)
    timed: dict[str, Callable[[], float]] = {part.name: runner(*stage_rounds(staged, part)) for part in parts}
    timed["gemm"] = gemm_call(staged.gemm_size)
    alone = in_turns(timed, staged.repeats, {name: 1 if name == "gemm" else staged.rounds for name in timed})

    network = "the same network of flax nnx layers under vmap on one device, its gradients by a naive kernel there"
    report, ours = Report("resnet/", f"{whole.images()}; node_loop {both['jaxfl'].node_loop}"), seconds["jaxfl"]
    report.ratio("speedup_vs_flax_vmap_in_scan", seconds["flax"], ours, f"{network}; both in a scan")
    report.median("rounds_per_second", 1 / ours, "rounds/s")
    report.median("temp_memory", runners["jaxfl"].temp_bytes / 1e6, "MB")
    for part in parts:
        text = f"of a float32 matrix product of size {staged.gemm_size}; inputs {'x'.join(map(str, part.input_shape))}"
        ideal = part.flops * staged.batch_size * staged.num_nodes * alone["gemm"]
        report.on(text).ratio(f"{part.name}_share_of_gemm", ideal, alone[part.name], unit="fraction")
    report.compile_times(runners)
    return report.measurements
