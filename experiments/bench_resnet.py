"""ResNet-20 with parameters of its own at every node: a round against flax under vmap, and each stage against GEMM.

    python -m experiments.bench resnet --json bench.json

n = 10 nodes, batch 32, images 32x32x3, batch normalization in training mode, shortcuts without parameters ("padding");
one SGD step a round. Rounds run in a `lax.scan`, as experiments run them; both rows train the same network on the same
batches in the same process and take turns. Each stage is then timed by itself, forward and backward, from inputs of the
shape that it has in the network; its share is that of the rate of a large float32 matrix product in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.timing import Measurement, compile_times, gemm_call, gemm_flops, in_turns, ratio, runner
from jaxfl.core import Array, PyTree, cross_entropy, node_keys, update_over_nodes
from jaxfl.core.node_loop import automatic
from jaxfl.models import Model, resnet20

SHORTCUT = "padding"


class Setting(NamedTuple):
    """Shapes and repeats of the suite."""

    num_nodes: int = 10
    batch_size: int = 32
    sample_shape: tuple[int, int, int] = (32, 32, 3)
    widths: tuple[int, ...] = (16, 32, 64)
    blocks: tuple[int, ...] = (3, 3, 3)
    num_classes: int = 10
    rounds: int = 2  # in one call
    repeats: int = 6
    flax_repeats: int = 3
    stage_nodes: int = 2
    stage_rounds: int = 4
    gemm_size: int = 2048


class FlaxBlock(nnx.Module):
    """A basic block of flax's own layers."""

    def __init__(self, channels: int, features: int, stride: int, rngs: nnx.Rngs):
        strides = (stride, stride)
        self.conv_1 = nnx.Conv(channels, features, (3, 3), strides=strides, use_bias=False, rngs=rngs)
        self.conv_2 = nnx.Conv(features, features, (3, 3), use_bias=False, rngs=rngs)
        self.norm_1, self.norm_2 = nnx.BatchNorm(features, rngs=rngs), nnx.BatchNorm(features, rngs=rngs)
        self.stride, self.new = stride, features - channels

    def __call__(self, images: Array) -> Array:
        hidden = self.norm_2(self.conv_2(nnx.relu(self.norm_1(self.conv_1(images)))))
        images = images[:, :: self.stride, :: self.stride]
        return nnx.relu(hidden + jnp.pad(images, [(0, 0), (0, 0), (0, 0), (0, self.new)]))


class FlaxResNet(nnx.Module):
    """The network of `jaxfl.models.resnet20` made of flax's own layers."""

    def __init__(self, setting: Setting, rngs: nnx.Rngs):
        channels = setting.widths[0]
        self.stem = nnx.Conv(setting.sample_shape[2], channels, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(channels, rngs=rngs)
        made = []
        for stage, (features, count) in enumerate(zip(setting.widths, setting.blocks, strict=True)):
            for position in range(count):
                made.append(FlaxBlock(channels, features, 2 if stage and not position else 1, rngs))
                channels = features
        self.blocks = nnx.List(made)
        self.dense = nnx.Linear(channels, setting.num_classes, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        images = nnx.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            images = block(images)
        return self.dense(images.mean(axis=(1, 2)))


def network(setting: Setting) -> Model:
    """The network of jaxfl."""
    return resnet20(
        setting.sample_shape,
        setting.num_classes,
        shortcut=SHORTCUT,
        widths=setting.widths,
        blocks=setting.blocks,
    )


class Row(NamedTuple):
    """One library's network: how it starts, and the loss of a batch in training mode."""

    init: Callable[[Array], tuple[PyTree, PyTree]]  # key -> (params, batch statistics)
    loss: Callable[[PyTree, PyTree, Array, Array], tuple[Array, PyTree]]  # -> (mean loss, new statistics)
    node_loop: str


def rows(setting: Setting) -> dict[str, Row]:
    """The same network twice."""
    model = network(setting)
    structure, _, _ = nnx.split(FlaxResNet(setting, nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def our_loss(params, statistics, inputs, labels):
        weights = jnp.ones(labels.shape[0], jnp.float32)
        logits, statistics = model.apply_train(params, statistics, inputs, weights, jax.random.key(0))
        return cross_entropy(logits, labels).mean(), statistics

    def flax_init(key):
        _, params, statistics = nnx.split(FlaxResNet(setting, nnx.Rngs(key)), nnx.Param, nnx.BatchStat)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(statistics)

    def flax_loss(params, statistics, inputs, labels):
        module = nnx.merge(structure, nnx.State(params), nnx.State(statistics))
        loss = cross_entropy(module(inputs), labels).mean()
        return loss, nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))

    ours = Row(lambda key: (model.init(key), model.init_state()), our_loss, automatic(fills_caches=True))
    return {"jaxfl": ours, "flax": Row(flax_init, flax_loss, "vmap")}


def sgd_rounds(row: Row, rounds: int, step_size: float = 0.01):
    """((params, statistics), inputs, labels) -> the first after `rounds` steps at every node."""

    def step(variables, inputs, labels):
        params, statistics = variables
        gradient, statistics = jax.grad(row.loss, has_aux=True)(params, statistics, inputs, labels)
        return jax.tree.map(lambda leaf, slope: leaf - step_size * slope, params, gradient), statistics

    one_round = update_over_nodes(step, row.node_loop)
    return lambda variables, inputs, labels: jax.lax.scan(
        lambda held, _: (one_round(held, inputs, labels), None), variables, length=rounds
    )[0]


def node_batches(setting: Setting, num_nodes: int) -> tuple[Array, Array]:
    """Images and labels of every node."""
    image_key, label_key = node_keys(jax.random.key(1), 2)
    shape = (num_nodes, setting.batch_size)
    inputs = jax.random.uniform(image_key, (*shape, *setting.sample_shape), jnp.float32)
    return inputs, jax.random.randint(label_key, shape, 0, setting.num_classes, jnp.int32)


class Stage(NamedTuple):
    """Some layers of the network in a row."""

    name: str
    model: Model
    input_shape: tuple[int, ...]  # of one sample
    flops: int  # of the products for one sample, forward and backward


def stages(setting: Setting) -> list[Stage]:
    """Stem and stages. Counted are the forward product and the gradients to weights and inputs; the stem has none."""
    model, key = network(setting), jax.random.key(0)
    params = jax.eval_shape(model.init, key)
    shape, found = setting.sample_shape, []
    for name in ("stem", *(f"block_{stage}_" for stage in range(1, len(setting.widths) + 1))):
        part = Model(tuple(pair for pair in model.layers if pair[0].startswith(name)))
        batch = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
        outputs = jax.eval_shape(
            lambda p, s, x, m=part: m.apply_train(p, s, x, jnp.ones(1), key)[0],
            part.init(key),
            part.init_state(),
            batch,
        )
        kernels = [leaf for label, _ in part.layers for leaf in jax.tree.leaves(params[label]) if leaf.ndim == 4]
        products = sum(leaf.size for leaf in kernels) * outputs.shape[1] * outputs.shape[2]
        label = "stem" if name == "stem" else f"stage_{name[6]}"
        found.append(Stage(label, part, shape, 2 * products * (2 if name == "stem" else 3)))
        shape = outputs.shape[1:]
    return found


def stage_rounds(setting: Setting, stage: Stage, num_nodes: int):
    """(runner's function, state, inputs) that trains one stage to make its outputs small."""
    key = jax.random.key(0)

    def step(state, inputs):
        (params, statistics), pulled = state
        weights = jnp.ones(inputs.shape[0], jnp.float32)

        def size_of_outputs(params, inputs):
            outputs, new = stage.model.apply_train(params, statistics, inputs, weights, key)
            return jnp.sum(outputs**2), new

        # The gradient to the inputs is pulled along in the state, so that it must be computed; the stem has none.
        arguments = (0,) if stage.name == "stem" else (0, 1)
        found, new = jax.grad(size_of_outputs, argnums=arguments, has_aux=True)(params, inputs + pulled)
        params = jax.tree.map(lambda leaf, slope: leaf - 1e-9 * slope, params, found[0])
        return (params, new), (pulled if stage.name == "stem" else 1e-9 * found[1])

    one_round = update_over_nodes(step, automatic(fills_caches=True))

    def train(state, inputs):
        return jax.lax.scan(lambda held, _: (one_round(held, inputs), None), state, length=setting.stage_rounds)[0]

    inputs = jax.random.normal(key, (num_nodes, setting.batch_size, *stage.input_shape), jnp.float32)
    params = jax.jit(jax.vmap(stage.model.init))(node_keys(key, num_nodes))
    statistics = jax.tree.map(lambda leaf: jnp.stack([leaf] * num_nodes), stage.model.init_state())
    return train, ((params, statistics), jnp.zeros_like(inputs)), inputs


def suite(setting: Setting | None = None) -> dict[str, Measurement]:
    """Measure; see the module's text. Some minutes on two cores, most of them flax's row."""
    setting = Setting() if setting is None else setting
    both, batches = rows(setting), node_batches(setting, setting.num_nodes)
    start: dict[str, PyTree] = {
        name: jax.jit(jax.vmap(row.init))(node_keys(jax.random.key(0), setting.num_nodes)) for name, row in both.items()
    }
    runners = {name: runner(sgd_rounds(row, setting.rounds), start[name], *batches) for name, row in both.items()}
    repeats = {"jaxfl": setting.repeats, "flax": setting.flax_repeats}
    seconds = in_turns({name: one.call for name, one in runners.items()}, repeats)
    speedup, speedup_spread = ratio(seconds["flax"], seconds["jaxfl"])

    parts = stages(setting)
    timed = {part.name: runner(*stage_rounds(setting, part, setting.stage_nodes)).call for part in parts}
    timed["gemm"] = gemm_call(setting.gemm_size)
    part_seconds = in_turns(timed, dict.fromkeys(timed, setting.repeats))

    nodes = f"n = {setting.num_nodes}, batch {setting.batch_size}, {'x'.join(map(str, setting.sample_shape))}"
    megabytes = runners["jaxfl"].temp_bytes / 1e6
    rate = [setting.rounds / call for call in seconds["jaxfl"]]
    report = {
        "resnet/speedup_vs_flax_vmap_in_scan": Measurement(
            speedup,
            "x",
            speedup_spread,
            f"the same network of flax nnx layers under vmap on one device, its gradients by a naive kernel there; "
            f"both in a scan; {nodes}, node_loop {both['jaxfl'].node_loop}",
        ),
        "resnet/rounds_per_second": Measurement(
            statistics.median(rate), "rounds/s", (min(rate), max(rate)), f"{nodes}; node_loop {both['jaxfl'].node_loop}"
        ),
        "resnet/temp_memory": Measurement(megabytes, "MB", (megabytes, megabytes), nodes),
    }
    for part in parts:
        flops = part.flops * setting.batch_size * setting.stage_nodes * setting.stage_rounds
        ideal = [call * flops / gemm_flops(setting.gemm_size) for call in part_seconds["gemm"]]
        share, spread = ratio(ideal, part_seconds[part.name])
        text = f"of a float32 matrix product of size {setting.gemm_size}; inputs {'x'.join(map(str, part.input_shape))}"
        report[f"resnet/{part.name}_share_of_gemm"] = Measurement(share, "fraction", spread, text)
    return {**report, **compile_times("resnet", runners, nodes)}
