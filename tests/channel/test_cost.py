"""Counts: EmbracingFL's Tables 1 and 10, DZOFL's network, LSTMs, and XLA's own count of operations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusals

from jaxfl.algorithms import capacity
from jaxfl.channel import BILSTM_COUNTED, DZOFL_COUNTED, count, total
from jaxfl.models import bilstm_classifier, cnn, dzofl_cnn, layers, resnet20, sequential
from jaxfl.models.layers import Layer
from jaxfl.models.lstm import bidirectional_lstm


def one_layer(layer, input_shape):
    """Counts of a layer alone."""
    return count(sequential([("layer", layer)]), input_shape)["layer"]


# Networks by name, counted when a test first needs them: every process collects this file.
NETWORKS = {
    "RESNET": lambda: count(resnet20(), (32, 32, 3)),
    "NARROW": lambda: count(resnet20(width=0.45), (32, 32, 3)),
    "NARROWEST": lambda: count(resnet20(width=0.2), (32, 32, 3)),
    "FEMNIST": lambda: count(cnn(hidden=2048, num_classes=62), (28, 28, 1)),
    "LSTM": lambda: counted_lstm(256),
    "SHORT": lambda: counted_lstm(128),
}


def counted_lstm(num_words):
    return count(bilstm_classifier(length=num_words), (num_words,), dtype=jnp.int32, counted=BILSTM_COUNTED)


@functools.cache
def counted(name):
    return NETWORKS[name]()


# counts, counts of the full model, first trained layer, batch, then the row of the table: parameters, activations,
# capacity (of five digits, from the spec's exact arithmetic; the papers print two)
TABLE_1 = {
    "ResNet-20, strong": ("RESNET", "RESNET", None, 32, 272_762, 6_947_136, 1),
    "ResNet-20, moderate": ("RESNET", "RESNET", "block_2_1", 32, 257_994, 2_752_832, 0.41702),
    "ResNet-20, weak": ("RESNET", "RESNET", "block_3_1", 32, 206_346, 917_824, 0.15570),
    "FEMNIST, strong": ("FEMNIST", "FEMNIST", None, 1, 6_603_710, 39_742, 1),
    "FEMNIST, moderate": ("FEMNIST", "FEMNIST", "dense_1", 1, 6_551_614, 2_110, 0.98649),
    "FEMNIST, weak": ("FEMNIST", "FEMNIST", "dense_2", 1, 127_038, 62, 0.01913),
    "LSTM, strong": ("LSTM", "LSTM", None, 1, 3_611_137, 1_310_720, 1),
    "LSTM, moderate": ("LSTM", "LSTM", "lstm", 1, 1_051_137, 1_310_720, 0.47987),
    "LSTM, weak": ("SHORT", "LSTM", "lstm", 1, 1_051_137, 655_360, 0.34672),
}
TABLE_10 = {
    "width 0.45": ("NARROW", "RESNET", None, 32, 52_874, 3_039_552, 0.42832),
    "width 0.2": ("NARROWEST", "RESNET", None, 32, 10_006, 1_302_848, 0.18184),
}
ROWS = {**TABLE_1, **TABLE_10}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_embracing_fl_tables_1_and_10(row):
    model, whole, trained_from, batch_size, parameters, activations, share = row
    part = total(counted(model), trained_from=trained_from)
    assert (part.parameters, batch_size * part.activations) == (parameters, activations)
    np.testing.assert_allclose(capacity(part, total(counted(whole)), batch_size=batch_size), share, atol=5e-6)


@pytest.mark.parametrize(("trained_from", "share"), [("dense_1", 0.84048), ("dense_2", 0.01638)])
def test_capacity_on_femnist_with_the_batch_of_the_runs(trained_from, share):
    part = total(counted("FEMNIST"), trained_from=trained_from)
    np.testing.assert_allclose(capacity(part, total(counted("FEMNIST")), batch_size=32), share, atol=5e-6)


@pytest.mark.parametrize(
    # By hand: biases, normalizations, ReLUs, residual sums and what poolings read; 13 for an LSTM's unit and word.
    ("model", "macs", "other_operations"),
    [("RESNET", 41_075_328, 495_626), ("FEMNIST", 17_211_904, 117_054), ("LSTM", 268_435_968, 256 * 512 * 13 + 1)],
)
def test_operations(model, macs, other_operations):
    assert total(counted(model))[2:4] == (macs, other_operations)


def test_dzofl_network():
    layers = count(dzofl_cnn(), (28, 28, 1), counted=DZOFL_COUNTED)
    assert [layers[name].activations for name in DZOFL_COUNTED] == [9680, 10_240, 2560, 2560, 2]
    counts = total(layers)
    assert counts.parameters == 45_362
    assert counts.activations == 25_042
    assert counts.macs == 10_514_640
    assert counts.macs + counts.other_operations == 10_564_722  # the paper's 10.56e6


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_macs_are_xlas_count_of_operations(stride):
    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(
            image, kernel, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 11, 10, 3), (3, 3, 3, 4))]
    analysis = jax.jit(convolve).lower(*shapes).cost_analysis()
    assert analysis is not None
    counts = one_layer(layers.conv(3, 4, (3, 3), strides=(stride, stride), padding="VALID"), (11, 10, 3))
    assert 2 * counts.macs == analysis["flops"]
    assert counts.activations == counts.other_operations == np.prod(jax.eval_shape(convolve, *shapes).shape)


def test_lstm_macs_are_one_matrix_product_for_each_gate_word_and_direction():
    counts = one_layer(bidirectional_lstm(3, 5), (7, 3))
    assert counts.macs == 7 * 2 * 4 * (3 * 5 + 5 * 5)
    assert counts.activations == 7 * 2 * 5 * 10
    in_two_loops = one_layer(bidirectional_lstm(3, 5, frozen_steps=2), (7, 3))
    assert in_two_loops.macs == counts.macs


def handed_on(images):
    """A loop whose third array depends on the sample from its third step on."""
    start = images, jnp.zeros_like(images), jnp.zeros_like(images)
    return jax.lax.scan(lambda c, _: ((c[0], c[0], c[1]), jnp.sin(c[2])), start, length=5)[1][-1]


def weighted_sums(images):
    """A loop that reads numbers which no sample changes."""
    rows, weights = images.swapaxes(0, 1), jnp.exp(jnp.arange(6, dtype=jnp.float32))[None]
    return jax.lax.scan(lambda c, x: (c + x, jnp.sin(c) * weights), jnp.zeros_like(rows[0]), rows)[1].swapaxes(0, 1)


@pytest.mark.parametrize(
    ("fn", "operations"),
    [
        (lambda images: images, 0),
        (lambda images: jnp.transpose(images[:, ::2], (0, 2, 1)), 0),
        (lambda images: (images - 2.0) * 3.0 / 4.0 + 5.0, 24),  # in a row, one
        (lambda images: 1.0 / images, 24),
        (lambda images: jax.nn.relu(images * 2.0), 48),
        (lambda images: images * images, 24),
        (lambda images: images.mean(axis=1), 24),  # reads all, and the division belongs to it
        (lambda images: images.max(axis=1) * 2.0, 24 + 6),
        (lambda images: jax.lax.reduce_window(images, 0.0, jax.lax.add, (1, 2, 2), (1, 2, 2), "VALID") / 4.0, 24),
        (lambda images: jax.lax.scan(lambda c, x: (c + x, None), images[:, 0], images.swapaxes(0, 1))[0], 24),
        (lambda images: jax.lax.fori_loop(0, 5, lambda i, x: jnp.sin(x.at[:, i % 2, 0].set(0.0)), images), 5 * 24),
        (
            lambda images: images + jnp.exp(jnp.arange(6, dtype=jnp.float32))[None, None],
            24,
        ),  # what no sample changes is free
        (lambda images: jax.checkpoint(jnp.tanh)(images), 24),
        (handed_on, 5 * 24),
        (weighted_sums, 3 * 24),
    ],
)
def test_other_operations(fn, operations):
    model = sequential([("fn", layers.elementwise(fn)), ("flatten", layers.elementwise(flat)), ("last", nothing())])
    assert total(count(model, (4, 6)))[2:4] == (0, operations)


def flat(values):
    return values.reshape(values.shape[0], -1)


def nothing():
    """A layer with a parameter that it does not use."""
    return Layer(init=lambda key: jnp.zeros(1, jnp.float32), apply=lambda params, inputs: inputs)


@pytest.mark.parametrize("groups", [1, 3])
def test_channels_in_groups_multiply_among_themselves(groups):
    def apply(kernel, images):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            images, kernel, (1, 1), "VALID", dimension_numbers=numbers, feature_group_count=groups
        )

    layer = Layer(init=lambda key: jnp.zeros((2, 2, 6 // groups, 9), jnp.float32), apply=apply)
    assert one_layer(layer, (5, 5, 6)).macs == 4 * 4 * 9 * (2 * 2 * 6 // groups)


def test_the_canonical_form_is_counted_whatever_was_traced_before():
    """On a CPU 7 channels run as 8, and four columns as one."""
    layer, params = layers.conv(7, 7, (3, 3)), {"kernel": jnp.zeros((3, 3, 7, 7)), "bias": jnp.zeros(7)}
    apply = jax.jit(layer.apply)
    apply(params, jnp.zeros((1, 8, 8, 7)))
    assert one_layer(layer._replace(apply=apply), (8, 8, 7)).macs == 8 * 8 * 7 * 9 * 7


def test_counts_are_the_same_on_every_platform(monkeypatch):
    model = resnet20((8, 8, 3), widths=(5, 7), blocks=(1, 1))
    counts = count(model, (8, 8, 3))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert count(model, (8, 8, 3)) == counts


def of_sample(fn):
    """Counts of a layer that does something with a sample."""
    return one_layer(nothing()._replace(apply=lambda params, inputs: fn(inputs)), (3,))


test_refusals = refusals(
    [
        (lambda: of_sample(lambda x: jax.lax.cond(x.sum() > 0, jnp.tanh, lambda y: y, x)), "model"),
        (lambda: of_sample(lambda x: jax.lax.while_loop(lambda y: y.sum() > 1, lambda y: y / 2.0, x)), "model"),
        (lambda: total(counted("RESNET"), trained_from="block_4_1"), "trained_from"),
        (lambda: capacity(total(counted("LSTM")), total(counted("LSTM")), batch_size=0), "batch_size"),
        (lambda: count(bilstm_classifier(), (256,), dtype=jnp.int32, counted=("gru",)), "counted"),
        (lambda: count(resnet20(), (28, 28, 3)), "inputs"),
    ]
)
