"""Residual networks against the same network of flax layers, over nodes, clipped, and in training."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_resnet import ResNet
from helpers import assert_close, refusals

import jaxfl
from jaxfl import gradients
from jaxfl.core import over_nodes
from jaxfl.core.tree import size
from jaxfl.gradients import per_example
from jaxfl.models import classification, resnet18

RNG = np.random.default_rng(0)

# An odd height: strides of 2 then leave a rest. One block that keeps the shape and one that does not.
SHAPE = (7, 6, 3)
TINY = resnet18(SHAPE, 5, widths=(4, 6), blocks=(1, 1), groups=2)
TASK = classification(TINY)


def flax_network():
    """The network of `TINY` made of flax's own layers."""
    rngs = nnx.Rngs(0)
    norm = functools.partial(nnx.GroupNorm, num_groups=2, rngs=rngs)
    return ResNet((4, 6), ("identity", "projection"), norm, rngs)


def samples(*leading):
    inputs = jnp.asarray(RNG.integers(0, 256, size=(*leading, *SHAPE)), jnp.uint8)
    return inputs, jnp.asarray(RNG.integers(0, 5, size=leading), jnp.int32)


def random_params():
    """Weights away from where training starts: scales that are not one, biases that are not zero."""
    shapes = jax.eval_shape(TINY.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: jnp.asarray(RNG.normal(size=leaf.shape) * 0.5, jnp.float32), shapes)


def summed_gradient(params, inputs, labels):
    return jax.grad(lambda values: TASK.loss(values, inputs, labels).sum())(params)


def per_sample_gradients(params, inputs, labels):
    return jax.vmap(lambda image, label: summed_gradient(params, image[None], label[None]))(inputs, labels)


@pytest.fixture(scope="module")
def case():
    """Parameters, one batch, and the gradient of each of its samples, leaves (b, *leaf)."""
    params, (inputs, labels) = random_params(), samples(4)
    return params, inputs, labels, jax.jit(per_sample_gradients)(params, inputs, labels)


def test_equals_the_same_network_of_flax_layers_in_value_and_in_gradient():
    params = random_params()
    inputs, _ = samples(5)
    images, direction = inputs.astype(jnp.float32) / 255.0, jnp.asarray(RNG.normal(size=(5, 5)), jnp.float32)
    structure, _ = nnx.split(nnx.eval_shape(flax_network))

    def both(network):
        def total(params, images):
            logits = network(params, images)
            return jnp.sum(logits * direction), logits

        gradients, logits = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(params, images)
        return {"logits": logits, "params": gradients[0], "images": gradients[1]}

    assert_close(both(TINY.apply), both(lambda params, x: nnx.merge(structure, nnx.State(params))(x)))


@pytest.mark.parametrize(
    ("sample_shape", "expected"),
    # One image channel instead of three: 2 * 9 * 64 numbers less.
    [
        ((32, 32, 3), 11_173_962),
        pytest.param((28, 28, 1), 11_173_962 - 2 * 9 * 64, marks=pytest.mark.slow),
    ],
)
def test_number_of_parameters_by_default(sample_shape, expected):
    model = resnet18(sample_shape)
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert size(params) == expected
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    images = jax.ShapeDtypeStruct((2, *sample_shape), jnp.float32)
    assert jax.eval_shape(model.apply, params, images).shape == (2, 10)


def test_kernels_start_he_normal_from_keys_of_their_own_and_norms_as_identity():
    model = resnet18((4, 4, 3), widths=(96, 96), blocks=(1, 1))
    params = jax.jit(model.init)(jax.random.key(0))
    assert params["block_2_1"].keys() - params["block_1_1"].keys() == {"conv_shortcut", "norm_shortcut"}
    kernels = [params[block][conv]["kernel"] for block in ("block_1_1", "block_2_1") for conv in ("conv_1", "conv_2")]
    for kernel in kernels:  # 82,944 draws: the relative standard error of their variance is about half a percent
        np.testing.assert_allclose(np.var(kernel), 2 / (9 * 96), rtol=0.03)
    assert all(np.abs(a - b).max() > 0.01 for i, a in enumerate(kernels) for b in kernels[:i])
    for norm in (params["stem"]["norm"], params["block_2_1"]["norm_shortcut"]):
        assert norm["scale"].tolist() == [1.0] * 96
        assert not norm["bias"].any()


def test_blocks_are_in_order_and_there_is_no_factored_form():
    assert TASK.blocks == ("stem", "block_1_1", "block_2_1", "dense")
    assert set(TASK.blocks) == set(jax.eval_shape(TASK.init, jax.random.key(0)))
    assert TASK.factors is None
    assert TASK.layers == ()


def test_node_loop_is_decided_when_the_task_is_built(monkeypatch):
    for platform, expected in (("cpu", "map"), ("gpu", "vmap")):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert classification(TINY).node_loop == expected


@pytest.mark.parametrize("node_loop", ["map", "vmap"])
@pytest.mark.quick_cases(1)
def test_gradients_of_nodes_equal_those_of_each_node(node_loop, case):
    params, inputs, labels, expected = case
    each_its_own = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf]), params)
    both = jax.tree.map(lambda part: jnp.stack([part, part]), (inputs, labels))
    found = jax.jit(over_nodes(summed_gradient, node_loop))(each_its_own, *both)
    assert_close(jax.tree.map(lambda leaf: leaf[0], found), jax.tree.map(lambda leaf: leaf.sum(axis=0), expected))
    assert np.abs(found["stem"]["conv"]["kernel"][0] - found["stem"]["conv"]["kernel"][1]).max() > 1e-3


@pytest.mark.parametrize("node_loop", ["map", "vmap"])
@pytest.mark.quick_cases(1)
def test_mapped_over_nodes_it_makes_no_grouped_convolution_on_a_cpu(node_loop):
    params = jax.eval_shape(lambda key: jax.vmap(TINY.init)(jax.random.split(key, 2)), jax.random.key(0))
    batch = (jax.ShapeDtypeStruct((2, 3, *SHAPE), jnp.uint8), jax.ShapeDtypeStruct((2, 3), jnp.int32))
    text = jax.jit(over_nodes(summed_gradient, node_loop)).lower(params, *batch).as_text()
    found = re.findall(r"stablehlo\.convolution.*", text)
    assert bool(found) == (node_loop == "map")
    for line in found:
        assert "batch_group_count = 1 : i64, feature_group_count = 1 : i64" in line
        assert "dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]" in line


def test_clipped_gradients_agree_with_explicit_ones(case):
    params, inputs, labels, singles = case
    norms = np.sqrt(sum((np.asarray(leaf) ** 2).reshape(4, -1).sum(axis=1) for leaf in jax.tree.leaves(singles)))
    clip_norm = float(np.median(norms))
    weights = np.asarray([0.5, 1.0, 2.0, 0.0], np.float32)
    expected = weights * np.minimum(1.0, clip_norm / norms)

    @jax.jit
    def clipped(params, inputs, labels, weights):
        return per_example.weighted_sum(TASK, params, inputs, labels, weights, clip_norm=clip_norm)

    found = clipped(params, inputs, labels, weights)
    np.testing.assert_array_equal(found.clipped, norms > clip_norm)
    assert found.clipped.sum() == 2
    assert_close(found.gradient, jax.tree.map(lambda leaf: np.tensordot(expected, leaf, axes=1), singles))


@pytest.mark.slow
def test_stochastic_gradient_push_with_a_table_of_clipped_batches_lowers_the_loss():
    task = classification(resnet18(SHAPE, 5, widths=(4,), blocks=(1,), groups=2))  # small, for it compiles faster
    noise, labels = samples(24)
    inputs = noise.at[jnp.arange(24), :, :, labels % 3].set(255)  # something to learn: the color
    data = jaxfl.federate(inputs, labels, np.split(np.arange(24), 2))
    learner = jaxfl.push_sum(
        task,
        graph=jaxfl.graphs.exponential(2),
        gradient=gradients.saga(table="per_batch", entry_size=4, clip_norm=2.0, storage="bfloat16"),
        step_size=0.3,
    )

    @jax.jit
    def losses_and_table(key, data):
        data = data._replace(sizes=np.full(2, 12, np.int32))
        first = learner.init(key, data)
        last = jax.lax.fori_loop(0, 60, lambda _, state: learner.round(key, state, data)[0], first)
        of_node_0 = [jax.tree.map(lambda leaf: leaf[0], learner.node_params(state)) for state in (first, last)]
        ends = jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_node_0)
        losses = jax.lax.map(lambda params: task.metrics(params, inputs, labels)["loss"].mean(), ends)
        return losses, last.gradient.table

    (before, after), table = losses_and_table(jax.random.key(0), data)
    assert after < 0.7 * before
    assert table.shape == (2, 3, size(jax.eval_shape(task.init, jax.random.key(0))))
    assert table.any(axis=2).all()


test_bad_arguments_are_named = refusals(
    [
        (lambda: resnet18((28, 28)), "sample_shape"),  # pyright: ignore[reportArgumentType]
        (lambda: resnet18(num_classes=0), "num_classes"),
        (lambda: resnet18((0, 32, 3)), "height"),
        (lambda: resnet18(widths=(8, 16)), "blocks"),
        (lambda: resnet18(widths=(), blocks=()), "blocks"),
        (lambda: resnet18(widths=(8, 0), blocks=(1, 1)), "widths[1]"),
        (lambda: resnet18(widths=(8, 16), blocks=(1, 0)), "blocks[1]"),
        (lambda: resnet18(widths=(8, 48), blocks=(1, 1)), "widths[1]"),  # 32 groups do not divide 48 channels
        (lambda: resnet18((8, 8, 1), widths=(8, 8, 8, 8)), "groups"),  # 1x1 images, groups of one channel
        (lambda: resnet18(groups=0), "groups"),
    ]
)
