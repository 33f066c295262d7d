"""Arguments that layers, models and tasks refuse, each by its name."""

import functools

import jax
import jax.numpy as jnp
from helpers import refusals

from jaxfl.core.tasks import calibrated_state
from jaxfl.models import (
    bilstm_classifier,
    binary_classification,
    classification,
    cnn,
    dzofl_cnn,
    layers,
    lenet,
    mlp,
    resnet18,
    resnet20,
    sequential,
)
from jaxfl.models.composite import scaled
from jaxfl.models.kernels import geometry
from jaxfl.models.layer_outputs import layer_outputs
from jaxfl.models.lstm import bidirectional_lstm
from jaxfl.models.normalization import group_norm
from jaxfl.models.text import embedding

FLAT: tuple = (28, 28)
IMAGES = jnp.zeros((2, 4, 1, 3))
DENSE = mlp((6, 3))
NORM = sequential([("dense", layers.dense(2, 3)), ("norm", layers.batch_norm(3))])


@functools.cache
def params(model):
    return model.init(jax.random.key(0))


def part_of(*trained):
    part = classification(DENSE).part
    assert part is not None
    return part(trained)


test_bad_arguments_are_named = refusals(
    [
        (lambda: layers.dense(0, 3), "in_features"),
        (lambda: layers.conv(1, 0, (3, 3)), "out_channels"),
        (lambda: layers.conv(1, 1, (0, 3)), "window"),
        (lambda: layers.conv(1, 1, (3, 3), strides=(1, 0)), "strides"),
        (lambda: layers.conv(1, 1, (3, 3), padding="REFLECT"), "padding"),
        (lambda: layers.conv(1, 4, (3, 3)).apply({}, IMAGES), "inputs"),
        (lambda: layers.reshape((3, 3)).apply(None, IMAGES), "inputs"),
        (lambda: layers.max_pool().apply(None, IMAGES), "window"),
        (lambda: layers.activation("softplus"), "activation"),
        (lambda: layers.batch_norm(0), "channels"),
        (lambda: layers.batch_norm(5, momentum=1.5), "momentum"),
        (lambda: group_norm(IMAGES, jnp.ones(3), jnp.zeros(3), 0), "num_groups"),
        (lambda: group_norm(IMAGES, jnp.ones(3), jnp.zeros(3), 2), "num_groups"),
        *((lambda rate=rate: layers.dropout(rate), "rate") for rate in (-0.1, 1.0, float("nan"))),
        (lambda: scaled(layers.relu(), 0.0), "ratio"),
        (lambda: geometry((4, 4), (5, 3), (1, 1), "VALID"), "window"),
        (lambda: geometry((4, 4), (0, 3)), "window"),
        (lambda: geometry((4, 4), (3, 3), (0, 1)), "strides"),
        (lambda: geometry((4, 4), (3, 3), (1, 1), "CIRCULAR"), "padding"),
        (lambda: embedding(0, 3), "vocabulary"),
        (lambda: embedding(3, 0), "features"),
        (lambda: embedding(3, 2).apply({"table": jnp.ones((3, 2))}, jnp.zeros((2, 3))), "inputs"),
        (lambda: bidirectional_lstm(0, 3), "in_features"),
        (lambda: bidirectional_lstm(3, 0), "units"),
        (lambda: bidirectional_lstm(3, 2).apply({}, jnp.zeros((2, 4, 5))), "inputs"),
        (lambda: bidirectional_lstm(3, 3, frozen_steps=-1), "frozen_steps"),
        (lambda: bidirectional_lstm(3, 3, frozen_steps=2).apply({}, jnp.zeros((1, 2, 3))), "inputs"),
        (lambda: bilstm_classifier(length=0), "length"),
        (lambda: bilstm_classifier(num_outputs=0), "num_outputs"),
        (lambda: bilstm_classifier(dropout=1.0), "rate"),
        (lambda: bilstm_classifier(length=4, frozen_words=4), "frozen_words"),
        (lambda: mlp((10,)), "widths"),
        (lambda: mlp((4, 0, 2)), "widths[1]"),
        (lambda: mlp((4, 2), activation="gelu"), "activation"),
        (lambda: cnn(FLAT), "sample_shape"),
        (lambda: cnn((8, 8, 1), channels=(2, 2, 2, 2)), "channels"),
        (lambda: cnn(hidden=0), "hidden"),
        (lambda: cnn(activation="gelu"), "activation"),
        (lambda: lenet((11, 28, 1)), "sample_shape"),
        (lambda: lenet((28, 15, 1), padding="VALID"), "sample_shape"),
        (lambda: lenet(FLAT), "sample_shape"),
        (lambda: lenet(padding="FULL"), "padding"),
        (lambda: lenet(num_classes=0), "num_classes"),
        (lambda: dzofl_cnn((28, 13, 1)), "sample_shape"),
        (lambda: dzofl_cnn(window=0), "window"),
        (lambda: dzofl_cnn(channels=(20, 0)), "out_channels"),
        (lambda: resnet18(FLAT), "sample_shape"),
        (lambda: resnet18(num_classes=0), "num_classes"),
        (lambda: resnet18((0, 32, 3)), "height"),
        (lambda: resnet18(norm="layer"), "norm"),
        (lambda: resnet18(widths=(8, 16)), "blocks"),
        (lambda: resnet18(widths=(), blocks=()), "blocks"),
        (lambda: resnet18(widths=(8, 0), blocks=(1, 1)), "widths[1]"),
        (lambda: resnet18(widths=(8, 16), blocks=(1, 0)), "blocks[1]"),
        (lambda: resnet18(widths=(8, 48), blocks=(1, 1)), "widths[1]"),  # 32 groups do not divide 48 channels
        (lambda: resnet18((8, 8, 1), widths=(8, 8, 8, 8)), "groups"),  # 1x1 images, groups of one channel
        (lambda: resnet18(groups=0), "groups"),
        (lambda: resnet20(norm="layer"), "norm"),
        (lambda: resnet20(shortcut="none"), "shortcut"),
        (lambda: resnet20(widths=(8, 4, 16), shortcut="padding"), "widths"),
        (lambda: resnet20(norm="group", groups=7), "widths[0]"),
        *((lambda width=width: resnet20(width=width), "width") for width in (0.0, 1.5, 0.05)),
        (lambda: sequential([("a", layers.dense(2, 2)), ("a", layers.dense(2, 2))]), "layers"),
        (lambda: sequential([("a", layers.relu())]), "layers"),
        (lambda: classification(DENSE, compute_dtype="float16"), "compute_dtype"),
        (lambda: binary_classification(DENSE).loss(params(DENSE), jnp.zeros((2, 6)), jnp.zeros(2, int)), "model"),
        (lambda: part_of(), "trained"),
        (lambda: part_of("dense_1", "relu_1"), "trained"),
        (lambda: layer_outputs(DENSE, params(DENSE), jnp.zeros((2, 6)), ["dense_1", "conv"]), "names"),
        (lambda: layer_outputs(DENSE, params(DENSE), jnp.zeros((2, 6)), []), "names"),
        (lambda: layer_outputs(NORM, params(NORM), jnp.zeros((2, 2)), ["norm"]), "params"),
        (lambda: calibrated_state(classification(DENSE), {}, IMAGES, IMAGES, IMAGES, jax.random.key(0)), "task"),
    ]
)
