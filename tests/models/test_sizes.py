"""Parameters and activations of the real models against published tables and against descriptions of the same."""

import jax
import jax.numpy as jnp
import pytest

from jaxfl.channel import cost
from jaxfl.models import cnn, dzofl_cnn, layer_sizes, layers, lenet, resnet18, resnet20, sequential
from jaxfl.models.layers import Layer

IMAGE = (32, 32, 3)


def totals(model, sample_shape, first=None):
    """(parameters, activations for one sample) of the layers from `first` on."""
    sizes = layer_sizes(model, sample_shape)
    kept = list(sizes.values())[0 if first is None else list(sizes).index(first) :]
    return sum(size.params for size in kept), sum(size.activations for size in kept)


@pytest.mark.parametrize(
    ("first", "params", "activations"),  # EmbracingFL, Table 1, for batches of 32
    [(None, 272_762, 6_947_136), ("block_2_1", 257_994, 2_752_832), ("block_3_1", 206_346, 917_824)],
)
def test_resnet20_has_the_sizes_of_table_1(first, params, activations):
    found = totals(resnet20(), IMAGE, first)
    assert found == (params, activations / 32)
    number = {None: None, "block_2_1": "block_4", "block_3_1": "block_7"}[first]
    described = cost.count(cost.resnet20(), trained_from=number)
    assert found == (described.parameters, described.activations)


@pytest.mark.parametrize(
    ("width", "widths", "params", "activations"),  # Table 10: floor(0.45 w) and floor(0.2 w), for batches of 32
    [(0.45, (7, 14, 28), 52_874, 3_039_552), (0.2, (3, 6, 12), 10_006, 1_302_848)],
)
def test_narrow_resnet20_has_the_sizes_of_table_10(width, widths, params, activations):
    assert totals(resnet20(width=width), IMAGE) == (params, activations / 32)
    assert totals(resnet20(widths=widths), IMAGE) == (params, activations / 32)
    assert totals(resnet20(width=width, norm="static", scaler=True), IMAGE) == (params, activations / 32)


def test_a_width_is_rounded_down_as_a_decimal():
    """0.29 * 100 is 28.999999999999996."""
    sizes = layer_sizes(resnet20(widths=(100,), blocks=(1,), width=0.29), IMAGE)
    assert sizes["dense"].params == 29 * 10 + 10


@pytest.mark.parametrize(("shortcut", "params"), [("projection", 272_474), ("padding", 269_722)])
def test_resnet20_with_the_shortcuts_of_he_and_others(shortcut, params):
    assert totals(resnet20(shortcut=shortcut), IMAGE)[0] == params


def test_normalization_does_not_change_the_sizes():
    assert totals(resnet20(norm="group"), IMAGE) == totals(resnet20(norm="static"), IMAGE) == totals(resnet20(), IMAGE)
    assert totals(resnet18(norm="batch"), IMAGE) == totals(resnet18(), IMAGE)


def test_the_network_for_femnist_has_the_sizes_of_table_1():
    model = cnn((28, 28, 1), channels=(32, 64), window=5, hidden=2048, num_classes=62)
    sizes = layer_sizes(model, (28, 28, 1))
    assert [size.params for size in sizes.values()] == [832, 51_264, 6_424_576, 127_038]
    assert totals(model, (28, 28, 1)) == (6_603_710, 39_742)


def test_the_network_of_dzofl_has_its_published_sizes():
    sizes = layer_sizes(dzofl_cnn(), (28, 28, 1))
    assert [size.params for size in sizes.values()] == [1000, 39_240, 5_122]
    # The paper also counts the outputs of pooling and of flattening, 2560 each: 25,042.
    assert sum(size.activations for size in sizes.values()) + 2 * 2560 == 25_042


@pytest.mark.parametrize(
    ("shape", "padding", "sizes"),
    [
        # 5 * 5 * 6 + 6, 5 * 5 * 6 * 16 + 16, 400 * 120 + 120, 120 * 84 + 84, 84 * 10 + 10
        ((28, 28, 1), "SAME", [156, 2416, 48_120, 10_164, 850]),
        ((32, 32, 3), "VALID", [456, 2416, 48_120, 10_164, 850]),
    ],
)
def test_lenet_has_the_sizes_of_lenet_5(shape, padding, sizes):
    assert [size.params for size in layer_sizes(lenet(shape, padding=padding), shape).values()] == sizes


def test_activations_in_functions_that_a_layer_calls_count_too():
    inner = layers.dense(3, 3)

    def repeated(params, inputs):
        step = jax.jit(lambda values, _: (inner.apply(params, values), None))
        return jax.lax.scan(step, inputs, length=4)[0]

    sizes = layer_sizes(sequential([("repeated", Layer(init=inner.init, apply=repeated))]), (3,))
    assert sizes["repeated"] == (12, 4 * 3)


def test_integer_samples():
    words = layers.elementwise(lambda tokens: jax.nn.one_hot(tokens[:, 0], 4))
    sizes = layer_sizes(sequential([("words", words), ("dense", layers.dense(4, 2))]), (3,), jnp.int32)
    assert sizes == {"dense": (10, 2)}
