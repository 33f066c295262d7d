"""Convolution in the forms of a GPU against lax.conv, and which form is traced where. All of it runs on a CPU, too."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, crossed, normals
from jax import lax

from jaxfl.core import over_nodes
from jaxfl.core.platform import tracing_for
from jaxfl.core.tracing import canonical_form
from jaxfl.models import resnet20
from jaxfl.models.kernels import forms
from jaxfl.models.kernels.convolution import convolve, input_gradient, kernel_gradient
from jaxfl.models.kernels.forms import FORWARD, KERNEL_GRADIENT, form
from jaxfl.models.kernels.windows import Geometry, geometry
from jaxfl.models.resnet import conv_without_bias

RNG = np.random.default_rng(0)
normal = normals(RNG)
NODES, BATCH = 2, 3
ALWAYS, NEVER = 0.0, float("inf")


class Case(NamedTuple):
    """A convolution."""

    geom: Geometry
    channels: int
    features: int

    def plain(self, inputs, kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(inputs, kernel, self.geom.strides, self.geom.padding, dimension_numbers=layout)

    def ours(self, inputs, kernel):
        return convolve(inputs, kernel, self.geom)

    def arrays(self, *leading, dtype=jnp.float32):
        """Inputs, kernels and directions."""
        inputs = normal(*leading, BATCH, *self.geom.input_size, self.channels)
        kernel = normal(*leading, *self.geom.window, self.channels, self.features)
        direction = normal(*leading, BATCH, *self.geom.output_size, self.features)
        return tuple(array.astype(dtype) for array in (inputs, kernel, direction))


CASES = {
    "same": Case(geometry((7, 6), (3, 3)), 2, 3),
    "valid": Case(geometry((7, 6), (3, 2), padding="VALID"), 2, 3),
    "same, strided": Case(geometry((7, 8), (3, 3), (2, 3)), 3, 2),
    "valid, strided with a rest": Case(geometry((8, 9), (3, 2), (2, 2), "VALID"), 1, 4),
    "stride beyond the window": Case(geometry((9, 8), (1, 2), (3, 3), "VALID"), 2, 2),
    "pointwise": Case(geometry((4, 5), (1, 1)), 3, 4),
    "window as large as the image": Case(geometry((4, 3), (4, 3), padding="VALID"), 2, 3),
    "window beyond the image": Case(geometry((2, 2), (3, 3)), 2, 3),
    "padding on one side": Case(Geometry((5, 4), (2, 3), (1, 1), ((3, 0), (0, 4))), 2, 3),
}


@pytest.fixture
def thresholds(monkeypatch):
    """Sets where products are grouped."""

    def put(**products):
        monkeypatch.setattr(forms, "_GPU_THRESHOLDS", {FORWARD: NEVER, KERNEL_GRADIENT: NEVER, **products})

    return put


def with_gradients(fn):
    """(inputs, kernel, direction) -> value and both gradients of <value, direction>."""

    def all_three(inputs, kernel, direction):
        value, pull_back = jax.vjp(fn, inputs, kernel)
        return value, *pull_back(direction)

    return all_three


def of_gradients(fn):
    """(inputs, kernel, direction) -> the gradients of a function of value and gradients."""
    all_three = with_gradients(fn)

    def total(inputs, kernel, direction):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in all_three(inputs, kernel, direction))

    return jax.grad(total, argnums=(0, 1, 2))


DERIVATIVES = {with_gradients: 1e-5, of_gradients: 1e-4}  # and what rounding makes of them


def each_node(fn, stacked):
    """A Python loop over nodes, stacked again."""
    rows = [fn(*(array[node] for array in stacked)) for node in range(stacked[0].shape[0])]
    return tuple(np.stack(parts) for parts in zip(*rows, strict=True))


def on_gpu(fn, *args):
    """`fn` traced for a GPU and run here."""
    with tracing_for("gpu"):
        return jax.jit(fn)(*args)


@pytest.mark.parametrize("grouped", [ALWAYS, NEVER], ids=["grouped", "patches"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.quick_cases(5)
def test_equals_lax_conv_of_every_node_in_every_form(case, grouped, thresholds):
    thresholds(forward=grouped, kernel_gradient=grouped)
    args = case.arrays(NODES)
    for ours, tolerance in DERIVATIVES.items():
        measured, expected = on_gpu(jax.vmap(ours(case.ours)), *args), each_node(jax.jit(ours(case.plain)), args)
        assert_close(measured, expected, tolerance)


@pytest.mark.parametrize("grouped", [ALWAYS, NEVER], ids=["grouped", "patches"])
def test_bfloat16_is_near_float32_in_every_form(grouped, thresholds):
    thresholds(forward=grouped, kernel_gradient=grouped)
    case = CASES["same"]
    args = case.arrays(NODES, dtype=jnp.bfloat16)
    measured = on_gpu(jax.vmap(with_gradients(case.ours)), *args)
    assert {leaf.dtype for leaf in measured} == {jnp.dtype(jnp.bfloat16)}
    expected = each_node(with_gradients(case.plain), [array.astype(jnp.float32) for array in args])
    for actual, exact in zip(measured, expected, strict=True):
        np.testing.assert_allclose(actual.astype(jnp.float32), exact, rtol=0.02, atol=0.02 * np.abs(exact).max())


@pytest.mark.parametrize("name", ["same", "same, strided"])
@pytest.mark.parametrize("inner", ["vmap", "map"])
def test_equals_lax_conv_under_two_vmaps(name, inner):
    case = CASES[name]
    args = case.arrays(2, 3)
    measured = on_gpu(jax.vmap(over_nodes(with_gradients(case.ours), inner)), *args)
    expected = each_node(jax.jit(with_gradients(case.plain)), [leaf.reshape(6, *leaf.shape[2:]) for leaf in args])
    assert_close(tuple(leaf.reshape(6, *leaf.shape[2:]) for leaf in measured), expected)


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (None, None)], ids=["kernel", "inputs", "both"])
@pytest.mark.parametrize("name", ["same", "same, strided"])
def test_equals_lax_conv_where_nodes_share(name, mapped):
    case = CASES[name]
    *both, direction = case.arrays(NODES)
    shared = [array if axis == 0 else array[0] for array, axis in zip(both, mapped, strict=True)]
    run = jax.vmap(with_gradients(case.ours), in_axes=(*mapped, 0))
    full = [jnp.broadcast_to(array, stacked.shape) for array, stacked in zip(shared, both, strict=True)]
    expected = each_node(jax.jit(with_gradients(case.plain)), (*full, direction))
    assert_close(on_gpu(run, *shared, direction), expected)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.quick_cases(3)
def test_equals_lax_conv_at_a_single_node(case):
    args = case.arrays()
    for ours, tolerance in DERIVATIVES.items():
        assert_close(on_gpu(ours(case.ours), *args), jax.jit(ours(case.plain))(*args), tolerance)


@pytest.mark.parametrize(("window", "stride"), crossed((1, 3), (1, 2)))
def test_convolutions_of_residual_networks_are_those_of_a_cpu(window, stride):
    layer = conv_without_bias(2, 3, window, stride)
    assert layer.init is not None
    params, images = jax.vmap(layer.init)(jax.random.split(jax.random.key(0), NODES)), normal(NODES, BATCH, 6, 5, 2)

    def gradients(params, images):
        return jax.vmap(jax.grad(lambda *args: jnp.sum(jnp.sin(layer.apply(*args))), argnums=(0, 1)))(params, images)

    measured, expected = on_gpu(gradients, params, images), jax.jit(gradients)(params, images)
    assert_close(jax.tree.leaves(measured), jax.tree.leaves(expected))


def groups(fn, *args):
    """The sorted numbers of groups of all convolutions that `fn` lowers to."""
    text = jax.jit(fn).lower(*args).as_text()
    counts = re.findall(r"batch_group_count = (\d+) : i64, feature_group_count = (\d+)", text)
    assert len(counts) == len(re.findall(r"stablehlo\.convolution", text))
    return sorted(max(map(int, pair)) for pair in counts)


# Positions of a batch, BATCH * 4 * 4, against output channels, and for the gradient to the inputs against input ones.
SIZED = {
    "grouped": (Case(geometry((4, 4), (3, 3)), 48, 48), 3),
    "patches": (Case(geometry((4, 4), (3, 3)), 49, 49), 0),
    "grouped but for the gradient to the inputs": (Case(geometry((4, 4), (3, 3)), 49, 48), 2),
    "only the gradient to the inputs grouped": (Case(geometry((4, 4), (3, 3)), 48, 49), 1),
}


@pytest.mark.parametrize(("case", "number"), SIZED.values(), ids=SIZED.keys())
def test_mapped_over_nodes_a_gpu_groups_what_has_many_positions_for_its_channels(case, number):
    args = jax.eval_shape(lambda: case.arrays(5))
    run = jax.vmap(with_gradients(case.ours))
    for name in ("cpu", "tpu"):
        with tracing_for(name):
            assert groups(run, *args) == []
    with tracing_for("gpu"):
        assert groups(run, *args) == [5] * number
        with canonical_form():
            assert groups(run, *args) == []


def test_a_gpu_has_three_grouped_products_for_each_large_convolution_of_a_residual_network():
    model, images = resnet20((16, 16, 3), widths=(4, 8), blocks=(1, 1), norm="group", groups=2), (NODES, 1, 16, 16, 3)
    params = jax.eval_shape(lambda key: jax.vmap(model.init)(jax.random.split(key, NODES)), jax.random.key(0))
    slopes = jax.vmap(jax.grad(lambda params, images: model.apply(params, images).sum()))
    with tracing_for("gpu"):
        measured = groups(slopes, params, jax.ShapeDtypeStruct(images, jnp.float32))
    # The stem has no gradient to its inputs; one with strides is no convolution; a strided shortcut is matrix products.
    stem, same, shortcut, strided = 2, 3, 3, 2
    assert measured == [NODES] * (stem + 2 * same + shortcut + strided + same)


def test_a_single_node_of_a_gpu_leaves_the_gradient_to_its_kernel_to_the_library():
    case = Case(geometry((8, 8), (3, 3)), 2, 3)
    inputs, kernel, error = jax.eval_shape(case.arrays)

    def librarys(inputs, error):
        return jax.linear_transpose(lambda kernel: case.plain(inputs, kernel), kernel)(error)[0]

    def lines(fn):
        return re.findall(r"stablehlo\.convolution.*", jax.jit(fn).lower(inputs, error).as_text())

    def mine(inputs, error):
        return kernel_gradient(inputs, error, case.geom)

    with tracing_for("gpu"):
        assert len(lines(mine)) == 1
        assert lines(mine) == lines(librarys)
    assert lines(mine) != lines(librarys)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_elsewhere_products_are_patches(platform):
    with tracing_for(platform):
        assert {form(product, 10**6, 1) for product in (FORWARD, KERNEL_GRADIENT)} == {"patches"}


def test_a_strided_gradient_to_inputs_writes_no_zeros_on_a_gpu():
    geom = geometry((8, 8), (3, 3), (2, 2))
    args = jax.eval_shape(lambda: (jnp.zeros((2, 4, 4, 3)), jnp.zeros((3, 3, 2, 3))))

    def lowered(name):
        with tracing_for(name):
            return jax.jit(lambda error, kernel: input_gradient(error, kernel, geom)).lower(*args).as_text()

    assert "stablehlo.convolution" in lowered("cpu")
    assert "stablehlo.convolution" not in lowered("gpu")
