"""Convolution against lax.conv in the forms of a CPU and of a GPU, and which form is traced where; runs on a CPU."""

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
from jaxfl.models.kernels import error_windows, forms
from jaxfl.models.kernels.convolution import convolve, input_gradient, kernel_gradient
from jaxfl.models.kernels.forms import FORWARD, KERNEL_GRADIENT
from jaxfl.models.kernels.windows import Geometry, geometry
from jaxfl.models.resnet import conv_without_bias

RNG = np.random.default_rng(0)
normal = normals(RNG)
NODES, BATCH = 2, 3


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


# Odd sizes, even windows, strides that leave a rest; how many columns a CPU takes at a time goes by the channels.
CASES = {
    "same, strided": Case(geometry((7, 8), (3, 3), (2, 3)), 3, 2),
    "valid": Case(geometry((7, 6), (3, 2), padding="VALID"), 2, 3),
    "same": Case(geometry((7, 6), (3, 3)), 2, 3),
    "stride beyond the window": Case(geometry((9, 8), (1, 2), (3, 3), "VALID"), 2, 2),
    "window beyond the image": Case(geometry((2, 2), (3, 3)), 2, 3),
    "padding on one side": Case(Geometry((5, 4), (2, 3), (1, 1), ((3, 0), (0, 4))), 2, 3),
    "two columns at a time, one left over": Case(geometry((3, 5), (2, 3)), 6, 16),
    "odd channels": Case(geometry((3, 5), (2, 3)), 5, 7),
    "odd channels out, one column": Case(geometry((4, 5), (3, 3), padding="VALID"), 6, 33),
    "many channels, strided with a rest": Case(geometry((8, 9), (3, 2), (2, 2), "VALID"), 1, 18),
    "many channels, pointwise, strided": Case(geometry((5, 6), (1, 1), (2, 2)), 3, 20),
}
WAYS = {"cpu": None, "gpu, grouped": 0.0, "gpu, patches": float("inf")}  # positions for a channel, to be grouped


@pytest.fixture(params=WAYS)
def traced(request, monkeypatch):
    """(fn, *args) -> its value as traced for a CPU, or for a GPU by one form only."""
    threshold = WAYS[request.param]
    monkeypatch.setattr(forms, "_GPU_THRESHOLDS", dict.fromkeys((FORWARD, KERNEL_GRADIENT), threshold))

    def run(fn, *args):
        with tracing_for(request.param[:3]):
            return jax.jit(fn)(*args)

    return run


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


def each_node(fn, stacked):
    """A Python loop over nodes, stacked again."""
    rows = [fn(*(array[node] for array in stacked)) for node in range(stacked[0].shape[0])]
    return tuple(np.stack(parts) for parts in zip(*rows, strict=True))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.quick_cases(6)
def test_equals_lax_conv_in_every_form_and_node_loop_with_second_derivatives(case, traced):
    args = case.arrays(NODES)
    expected = each_node(jax.jit(with_gradients(case.plain)), args)
    for node_loop in ("map", "vmap"):
        assert_close(traced(over_nodes(with_gradients(case.ours), node_loop), *args), expected)
    expected = each_node(jax.jit(of_gradients(case.plain)), args)
    assert_close(traced(jax.vmap(of_gradients(case.ours)), *args), expected, 1e-4)


@pytest.mark.parametrize("mapped", [(0, None), (None, 0)], ids=["kernel", "inputs"])
def test_equals_lax_conv_where_nodes_share(mapped, traced):
    case = CASES["same, strided"]
    *both, direction = case.arrays(NODES)
    shared = [array if axis == 0 else array[0] for array, axis in zip(both, mapped, strict=True)]
    full = [jnp.broadcast_to(array, stacked.shape) for array, stacked in zip(shared, both, strict=True)]
    expected = each_node(jax.jit(with_gradients(case.plain)), (*full, direction))
    assert_close(traced(jax.vmap(with_gradients(case.ours), in_axes=(*mapped, 0)), *shared, direction), expected)


def test_equals_lax_conv_under_grad_of_vmap_of_seeds_sharing_data(traced):
    case = CASES["same"]
    (inputs, *_), (_, kernel, _) = case.arrays(3), case.arrays(2, 3)  # of nodes; of seeds and nodes

    def gradient(fn):
        of_nodes = jax.vmap(lambda x, k: jnp.sum(fn(x, k) ** 2))
        return jax.grad(lambda kernel: jax.vmap(of_nodes, in_axes=(None, 0))(inputs, kernel).sum())

    assert_close(traced(gradient(case.ours), kernel), jax.jit(gradient(case.plain))(kernel), 1e-4)


def test_bfloat16_is_near_float32_in_every_form(traced):
    case = CASES["same"]
    args = case.arrays(NODES, dtype=jnp.bfloat16)
    measured = traced(jax.vmap(with_gradients(case.ours)), *args)
    assert {leaf.dtype for leaf in measured} == {jnp.dtype(jnp.bfloat16)}
    expected = each_node(with_gradients(case.plain), [array.astype(jnp.float32) for array in args])
    for actual, exact in zip(measured, expected, strict=True):
        np.testing.assert_allclose(actual.astype(jnp.float32), exact, rtol=0.02, atol=0.02 * np.abs(exact).max())


@pytest.mark.parametrize("name", ["valid", "two columns at a time, one left over"])
@pytest.mark.parametrize("cached_bytes", [1, 1500, 2500])
def test_kernel_gradient_in_groups_of_samples(cached_bytes, name, monkeypatch):
    monkeypatch.setattr(error_windows, "_CACHED_BYTES", cached_bytes)
    monkeypatch.setattr(error_windows, "_MIN_GROUP_CHANNELS", 1)
    case = CASES[name]
    inputs, kernel, error = case.arrays()
    expected = with_gradients(case.plain)(inputs, kernel, error)[2]
    np.testing.assert_allclose(kernel_gradient(inputs, error, case.geom), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("window", "stride"), crossed((1, 3), (1, 2)))
def test_convolutions_of_residual_networks_are_those_of_a_cpu(window, stride):
    layer = conv_without_bias(2, 3, window, stride)
    assert layer.init is not None
    params, images = jax.vmap(layer.init)(jax.random.split(jax.random.key(0), NODES)), normal(NODES, BATCH, 6, 5, 2)

    def gradients(params, images):
        return jax.vmap(jax.grad(lambda *args: jnp.sum(jnp.sin(layer.apply(*args))), argnums=(0, 1)))(params, images)

    with tracing_for("gpu"):
        measured = jax.jit(lambda *args: gradients(*args))(params, images)
    assert_close(measured, jax.jit(gradients)(params, images))


# --- which form is traced where ----------------------------------------------------------------------------------


def convolutions(fn, *args):
    """The StableHLO lines of all convolutions that `fn` lowers to."""
    return re.findall(r"stablehlo\.convolution.*", jax.jit(fn).lower(*args).as_text())


def groups(fn, *args):
    """The sorted numbers of groups of all convolutions that `fn` lowers to."""
    pattern = r"batch_group_count = (\d+) : i64, feature_group_count = (\d+)"
    return sorted(max(map(int, re.findall(pattern, line)[0])) for line in convolutions(fn, *args))


def is_canonical(line):
    return "dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]" in line


def test_on_a_cpu_no_convolution_is_grouped_and_all_are_in_the_canonical_layout():
    with tracing_for("cpu"):
        case = CASES["same, strided"]
        args = jax.eval_shape(lambda: case.arrays(2))
        one_by_one = convolutions(over_nodes(with_gradients(case.ours), "map"), *args)
        assert len(one_by_one) == 4  # rows of the inputs a stride of 2 apart are two
        assert all(map(is_canonical, one_by_one))
        assert groups(over_nodes(with_gradients(case.ours), "map"), *args) == [1] * 4
        assert groups(jax.vmap(with_gradients(case.ours)), *args) == []
        # JAX's own would be grouped, and its gradients in other layouts.
        assert max(groups(jax.vmap(with_gradients(case.plain)), *args)) > 1
        assert not all(map(is_canonical, convolutions(over_nodes(with_gradients(case.plain), "map"), *args)))


# 48 positions of a batch, BATCH * 4 * 4. Grouped are at least 4 of them for each output channel (or input channel, for
# the gradient to the inputs), and at least 16 for the gradient to the kernel.
SIZED = {
    "grouped": (Case(geometry((4, 4), (3, 3)), 12, 3), 3),
    "patches": (Case(geometry((4, 4), (3, 3)), 13, 13), 0),
    "grouped but for the gradient to the inputs": (Case(geometry((4, 4), (3, 3)), 13, 3), 2),
    "grouped but for the gradient to the kernel": (Case(geometry((4, 4), (3, 3)), 12, 4), 2),
    "only the gradient to the inputs grouped": (Case(geometry((4, 4), (3, 3)), 12, 13), 1),
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


def test_a_single_node_of_a_gpu_leaves_the_gradient_to_its_kernel_to_the_library():
    case = Case(geometry((8, 8), (3, 3)), 2, 3)
    inputs, kernel, error = jax.eval_shape(case.arrays)

    def librarys(inputs, error):
        return jax.linear_transpose(lambda kernel: case.plain(inputs, kernel), kernel)(error)[0]

    def lines(fn):
        return convolutions(fn, inputs, error)

    def mine(inputs, error):
        return kernel_gradient(inputs, error, case.geom)

    with tracing_for("gpu"):
        assert len(lines(mine)) == 1
        assert lines(mine) == lines(librarys)
    assert lines(mine) != lines(librarys)


def test_a_strided_gradient_to_inputs_writes_no_zeros_on_a_gpu():
    geom = geometry((8, 8), (3, 3), (2, 2))
    args = jax.eval_shape(lambda: (jnp.zeros((2, 4, 4, 3)), jnp.zeros((3, 3, 2, 3))))

    def lowered(name):
        with tracing_for(name):
            return jax.jit(lambda error, kernel: input_gradient(error, kernel, geom)).lower(*args).as_text()

    assert "stablehlo.convolution" in lowered("cpu")
