"""Counts: EmbracingFL's Tables 1 and 10, DZOFL's network, and XLA's own count of operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl import ArgumentError
from jaxfl.channel import cost
from jaxfl.channel.cost import Architecture, Convolution, Dense, Flatten, Lstm, Pooling, Relu, Residual
from jaxfl.models.cnn import cnn


def one_layer(layer, input_shape):
    architecture = Architecture(input_shape=input_shape, layers=(("layer", layer),), counted=(type(layer),))
    return cost.count(architecture)


# architecture, full architecture, first trained layer, batch, then the row of the table: parameters, activations,
# capacity (of five digits, from the spec's exact arithmetic; the papers print two)
RESNET, FEMNIST, LSTM = cost.resnet20(), cost.femnist_cnn(), cost.bilstm()
TABLE_1 = {
    "ResNet-20, strong": (RESNET, RESNET, None, 32, 272_762, 6_947_136, 1),
    "ResNet-20, moderate": (RESNET, RESNET, "block_4", 32, 257_994, 2_752_832, 0.41702),
    "ResNet-20, weak": (RESNET, RESNET, "block_7", 32, 206_346, 917_824, 0.15570),
    "FEMNIST, strong": (FEMNIST, FEMNIST, None, 1, 6_603_710, 39_742, 1),
    "FEMNIST, moderate": (FEMNIST, FEMNIST, "dense_1", 1, 6_551_614, 2_110, 0.98649),
    "FEMNIST, weak": (FEMNIST, FEMNIST, "dense_2", 1, 127_038, 62, 0.01913),
    "LSTM, strong": (LSTM, LSTM, None, 1, 3_611_137, 1_310_720, 1),
    "LSTM, moderate": (LSTM, LSTM, "lstm", 1, 1_051_137, 1_310_720, 0.47987),
    "LSTM, weak": (cost.bilstm(num_words=128), LSTM, "lstm", 1, 1_051_137, 655_360, 0.34672),
}
TABLE_10 = {
    "width 0.45": (cost.resnet20(width=0.45), RESNET, None, 32, 52_874, 3_039_552, 0.42832),
    "width 0.2": (cost.resnet20(width=0.2), RESNET, None, 32, 10_006, 1_302_848, 0.18184),
}
ROWS = {**TABLE_1, **TABLE_10}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_embracing_fl_tables_1_and_10(row):
    architecture, whole, trained_from, batch_size, parameters, activations, capacity = row
    part = cost.count(architecture, trained_from=trained_from)
    assert (part.parameters, batch_size * part.activations) == (parameters, activations)
    found = cost.capacity(part, cost.count(whole), batch_size=batch_size)
    np.testing.assert_allclose(found, capacity, atol=5e-6)


@pytest.mark.parametrize(("trained_from", "capacity"), [("dense_1", 0.84048), ("dense_2", 0.01638)])
def test_capacity_on_femnist_with_the_batch_of_the_runs(trained_from, capacity):
    part = cost.count(FEMNIST, trained_from=trained_from)
    np.testing.assert_allclose(cost.capacity(part, cost.count(FEMNIST), batch_size=32), capacity, atol=5e-6)


def test_a_second_bias_of_the_lstm_would_show():
    layers = (LSTM.layers[0], ("lstm", Lstm(256, bias_vectors=2)), LSTM.layers[2])
    changed = Architecture(input_shape=LSTM.input_shape, layers=layers, counted=LSTM.counted)
    assert cost.count(changed).parameters == 3_613_185


def test_dzofl_network():
    counts = cost.count(cost.dzofl_cnn())
    assert counts.parameters == 45_362
    assert counts.activations == 25_042
    assert counts.macs == 10_514_640
    assert counts.macs + counts.other_operations == 10_564_722  # the paper's 10.56e6


def test_padding_decides_the_size_of_dzofls_network():
    layers = tuple(
        (name, Convolution(layer.features, layer.window) if isinstance(layer, Convolution) else layer)
        for name, layer in cost.dzofl_cnn().layers
    )
    assert cost.count(Architecture(input_shape=(28, 28, 1), layers=layers, counted=())).parameters == 55_922


def test_parameters_are_those_of_a_real_model():
    layers = (
        ("conv_1", Convolution(32, 5)),
        ("pool_1", Pooling(2)),
        ("conv_2", Convolution(64, 5)),
        ("pool_2", Pooling(2)),
        ("flatten", Flatten()),
        ("dense_1", Dense(512)),
        ("dense_2", Dense(10)),
    )
    params = jax.eval_shape(cnn().init, jax.random.key(0))
    counts = cost.count(Architecture(input_shape=(28, 28, 1), layers=layers, counted=()))
    assert counts.parameters == sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_macs_are_xlas_count_of_operations(stride):
    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(
            image, kernel, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 11, 10, 3), (3, 3, 3, 4))]
    analysis = jax.jit(convolve).lower(*shapes).cost_analysis()
    layer = Convolution(4, 3, stride, "valid")
    assert analysis is not None
    assert 2 * one_layer(layer, (11, 10, 3)).macs == analysis["flops"]
    assert one_layer(layer, (11, 10, 3)).activations == np.prod(jax.eval_shape(convolve, *shapes).shape)


@pytest.mark.parametrize(("size", "stride"), [(7, 2), (8, 2), (9, 3), (5, 1)])
def test_same_padding_gives_jaxs_shape(size, stride):
    image, kernel = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 1, size, size), (1, 1, 3, 3)))
    output = jax.eval_shape(lambda x, k: jax.lax.conv(x, k, (stride, stride), "SAME"), image, kernel)
    assert one_layer(Convolution(1, 3, stride), (size, size, 1)).activations == np.prod(output.shape)


def test_lstm_macs_are_one_matrix_product_for_each_gate_word_and_direction():
    counts = one_layer(Lstm(units=5, directions=2), (7, 3))
    assert counts.macs == 7 * 2 * 4 * (3 * 5 + 5 * 5)


@pytest.mark.parametrize(
    ("layer", "input_shape", "message"),
    [
        (Convolution(4, 3), (28,), "needs an input of 3 axes"),
        (Convolution(4, 7, padding="valid"), (5, 5, 1), "must leave at least one number"),
        (Convolution(4, 3, padding="full"), (5, 5, 1), "must be one of same, valid"),
        (Convolution(4, 3, stride=0), (5, 5, 1), "must be an integer of at least 1"),
        (Residual(branch=(("dense", Dense(3)),)), (5,), "branch and shortcut must give one shape"),
        (Residual(branch=(("relu", Relu()), ("pool", Pooling(9)))), (5, 5, 1), "must leave at least one number"),
    ],
)
def test_layers_that_do_not_fit_are_refused(layer, input_shape, message):
    with pytest.raises(ArgumentError, match=message):
        one_layer(layer, input_shape)


def test_bad_arguments_are_refused():
    with pytest.raises(ArgumentError, match=r"^trained_from: .*block_9"):
        cost.count(RESNET, trained_from="block_10")
    with pytest.raises(ArgumentError, match=r"^batch_size: "):
        cost.capacity(cost.count(LSTM), cost.count(LSTM), batch_size=0)
    with pytest.raises(ArgumentError, match=r"^width: "):
        cost.resnet20(width=0.0)
    with pytest.raises(ArgumentError, match=r"^width: must leave at least one of 16 channels; got 0\.05"):
        cost.resnet20(width=0.05)
    with pytest.raises(ArgumentError, match=r"^num_words: "):
        cost.bilstm(num_words=0)
