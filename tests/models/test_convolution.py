"""Convolution against lax.conv: value, both gradients, every way of mapping it over nodes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, normals, refused
from jax import lax

from jaxfl.core import over_nodes
from jaxfl.models.kernels import error_windows
from jaxfl.models.kernels.convolution import convolve, kernel_gradient
from jaxfl.models.kernels.windows import geometry, patches

RNG = np.random.default_rng(0)
normal = normals(RNG)

# (height, width), window, strides, padding, channels in and out: odd sizes, even windows, strides that leave a rest.
CASES = {
    "same": ((7, 6), (3, 3), (1, 1), "SAME", 2, 3),
    "valid": ((7, 6), (3, 2), (1, 1), "VALID", 2, 3),
    "same, strided": ((7, 8), (3, 3), (2, 3), "SAME", 3, 2),
    "valid, strided with a rest": ((8, 9), (3, 2), (2, 2), "VALID", 1, 4),
    "stride beyond the window": ((9, 8), (1, 2), (3, 3), "VALID", 2, 2),
    "pointwise": ((4, 5), (1, 1), (1, 1), "SAME", 3, 4),
    "window as large as the image": ((4, 3), (4, 3), (1, 1), "VALID", 2, 3),
    "one column at a time": ((3, 5), (2, 3), (1, 1), "SAME", 2, 40),
    "two columns at a time, one left over": ((3, 5), (2, 3), (1, 1), "SAME", 6, 16),
    "odd channels": ((3, 5), (2, 3), (1, 1), "SAME", 5, 7),
    "odd channels in": ((4, 5), (3, 3), (1, 1), "VALID", 7, 8),
    "odd channels out, one column": ((4, 5), (3, 3), (1, 1), "VALID", 6, 33),
    "many channels, strided": ((7, 8), (3, 3), (2, 3), "SAME", 3, 20),
    "many channels, strided, even": ((8, 6), (3, 3), (2, 2), "SAME", 2, 16),
    "many channels, strided with a rest": ((8, 9), (3, 2), (2, 2), "VALID", 1, 18),
    "many channels, stride beyond the window": ((9, 8), (1, 2), (3, 3), "VALID", 2, 24),
    "many channels, pointwise, strided": ((5, 6), (1, 1), (2, 2), "SAME", 3, 20),
}
BATCH = 3


def plain(inputs, kernel, strides, padding):
    return lax.conv_general_dilated(inputs, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def arrays(case, *leading):
    size, window, _, _, in_channels, out_channels = case
    return normal(*leading, BATCH, *size, in_channels), normal(*leading, *window, in_channels, out_channels)


def with_gradients(fn):
    """(inputs, kernel, direction) -> value and both gradients of <value, direction>."""

    def all_three(inputs, kernel, direction):
        value, pull_back = jax.vjp(fn, inputs, kernel)
        return value, *pull_back(direction)

    return all_three


def both_ways(case):
    size, window, strides, padding, *_ = case
    geom = geometry(size, window, strides, padding)
    ours = with_gradients(lambda inputs, kernel: convolve(inputs, kernel, geom))
    theirs = with_gradients(lambda inputs, kernel: plain(inputs, kernel, strides, padding))
    return ours, theirs, geom


def each_node(fn, *stacked):
    """A Python loop over nodes, stacked again."""
    rows = [fn(*(array[node] for array in stacked)) for node in range(stacked[0].shape[0])]
    return tuple(np.stack(parts) for parts in zip(*rows, strict=True))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.quick_cases(5)
def test_equals_lax_conv_for_every_stride_and_padding_and_node_loop(case):
    ours, theirs, geom = both_ways(case)
    inputs, kernel = arrays(case, 2)
    direction = normal(2, BATCH, *geom.output_size, case[-1])
    expected = each_node(jax.jit(theirs), inputs, kernel, direction)
    for node_loop in ("map", "vmap"):
        assert_close(jax.jit(over_nodes(ours, node_loop))(inputs, kernel, direction), expected)


@pytest.mark.parametrize("mapped", [(0, None), (None, 0)], ids=["shared kernel", "shared inputs"])
def test_equals_lax_conv_where_one_argument_is_shared(mapped):
    case = CASES["same, strided"]
    ours, theirs, geom = both_ways(case)
    inputs, kernel = arrays(case, 4)
    inputs, kernel = (array if axis == 0 else array[0] for array, axis in zip((inputs, kernel), mapped, strict=True))
    direction = normal(4, BATCH, *geom.output_size, case[-1])
    actual = jax.jit(jax.vmap(ours, in_axes=(*mapped, 0)))(inputs, kernel, direction)
    assert_close(actual, jax.jit(jax.vmap(theirs, in_axes=(*mapped, 0)))(inputs, kernel, direction))


@pytest.mark.parametrize("inner", ["map", "vmap"])
def test_equals_lax_conv_under_two_vmaps(inner):
    case = CASES["same"]
    ours, theirs, geom = both_ways(case)
    inputs, kernel = arrays(case, 2, 3)
    direction = normal(2, 3, BATCH, *geom.output_size, case[-1])
    actual = jax.jit(jax.vmap(over_nodes(ours, inner)))(inputs, kernel, direction)
    flat = [array.reshape(6, *array.shape[2:]) for array in (inputs, kernel, direction)]
    expected = each_node(jax.jit(theirs), *flat)
    assert_close(tuple(leaf.reshape(6, *leaf.shape[2:]) for leaf in actual), expected)


def test_equals_lax_conv_under_grad_of_vmap_of_seeds_sharing_data():
    case = CASES["same"]
    geom = geometry(*case[:4])
    inputs, _ = arrays(case, 3)  # nodes
    _, kernel = arrays(case, 2, 3)  # seeds, nodes

    def total(fn):
        per_node = jax.vmap(lambda x, k: jnp.sum(fn(x, k) ** 2))
        return jax.jit(jax.grad(lambda k: jax.vmap(per_node, in_axes=(None, 0))(inputs, k).sum()))

    expected = total(lambda x, k: plain(x, k, *case[2:4]))(kernel)
    np.testing.assert_allclose(total(lambda x, k: convolve(x, k, geom))(kernel), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["same", "valid, strided with a rest"])
def test_second_derivatives_equal_those_of_lax_conv(name):
    case = CASES[name]
    ours, theirs, geom = both_ways(case)
    inputs, kernel = arrays(case)
    direction = normal(BATCH, *geom.output_size, case[-1])

    def of_gradients(all_three):
        def size(inputs, kernel):
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in all_three(inputs, kernel, direction))

        return jax.jit(jax.grad(size, argnums=(0, 1)))

    assert_close(of_gradients(ours)(inputs, kernel), of_gradients(theirs)(inputs, kernel))


@pytest.mark.parametrize("name", ["valid", "two columns at a time, one left over"])
@pytest.mark.parametrize("cached_bytes", [1, 1500, 2500])
def test_kernel_gradient_in_groups_of_samples(cached_bytes, name, monkeypatch):
    monkeypatch.setattr(error_windows, "_CACHED_BYTES", cached_bytes)
    monkeypatch.setattr(error_windows, "_MIN_GROUP_CHANNELS", 1)
    case = CASES[name]
    geom = geometry(*case[:4])
    inputs, _ = arrays(case)
    error = normal(BATCH, *geom.output_size, case[-1])
    _, pull_back = jax.vjp(lambda kernel: plain(inputs, kernel, *case[2:4]), normal(*case[1], *case[4:]))
    np.testing.assert_allclose(kernel_gradient(inputs, error, geom), pull_back(error)[0], rtol=1e-5, atol=1e-5)


def convolutions(fn, *args):
    """The StableHLO lines of all convolutions that `fn` lowers to."""
    return re.findall(r"stablehlo\.convolution.*", jax.jit(fn).lower(*args).as_text())


@pytest.mark.parametrize("node_loop", ["map", "vmap"])
def test_mapped_over_nodes_it_makes_no_grouped_convolution_on_a_cpu(node_loop):
    case = CASES["same, strided"]
    ours, theirs, geom = both_ways(case)
    args = (*arrays(case, 2), normal(2, BATCH, *geom.output_size, case[-1]))
    ungrouped = "batch_group_count = 1 : i64, feature_group_count = 1 : i64"
    mine = convolutions(over_nodes(ours, node_loop), *args)
    assert all(ungrouped in line for line in mine)
    assert len(mine) == (4 if node_loop == "map" else 0)  # rows of the inputs a stride of 2 apart are two
    assert not all(ungrouped in line for line in convolutions(jax.vmap(theirs), *args))  # what this test guards against


def test_its_gradients_are_convolutions_in_the_canonical_layout():
    canonical = "dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"
    case = CASES["same, strided"]
    ours, theirs, geom = both_ways(case)
    args = (*arrays(case), normal(BATCH, *geom.output_size, case[-1]))
    assert all(canonical in line for line in convolutions(ours, *args))
    assert not all(canonical in line for line in convolutions(theirs, *args))


def test_patches_times_kernel_is_the_convolution():
    case = CASES["same, strided"]
    inputs, kernel = arrays(case)
    rows = patches(inputs, geometry(*case[:4]))
    expected = plain(inputs, kernel, *case[2:4])
    np.testing.assert_allclose(rows @ kernel.reshape(-1, case[-1]), expected.reshape(BATCH, -1, case[-1]), atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (((4, 4), (5, 3), (1, 1), "VALID"), "window"),
        (((4, 4), (0, 3), (1, 1), "SAME"), "window"),
        (((4, 4), (3, 3), (0, 1), "SAME"), "strides"),
        (((4, 4), (3, 3), (1, 1), "CIRCULAR"), "padding"),
    ],
)
def test_bad_geometry_is_named(arguments, name):
    refused(lambda: geometry(*arguments), name)
