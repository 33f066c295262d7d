"""Parameters and activations of the real models against published tables."""

import jax
import jax.numpy as jnp
import pytest

from jaxfl.channel import count, total
from jaxfl.models import bilstm_classifier, lenet, resnet18, resnet20, sequential
from jaxfl.models.layers import Layer, dense, elementwise

IMAGE = (32, 32, 3)


def totals(model, first=None):
    """(parameters, activations for one image) of the layers from `first` on."""
    return total(count(model, IMAGE), trained_from=first)[:2]


def params(model, shape):
    """Parameters of each layer that has some."""
    return [counts.parameters for counts in count(model, shape).values() if counts.parameters]


def test_a_width_is_rounded_down_as_a_decimal():
    """0.29 * 100 is 28.999999999999996."""
    assert totals(resnet20(widths=(100,), blocks=(1,), width=0.29), "dense")[0] == 29 * 10 + 10


@pytest.mark.parametrize(("shortcut", "parameters"), [("projection", 272_474), ("padding", 269_722)])
def test_resnet20_with_the_shortcuts_of_he_and_others(shortcut, parameters):
    assert totals(resnet20(shortcut=shortcut))[0] == parameters


@pytest.mark.parametrize(
    ("shape", "padding", "sizes"),
    [
        # 5 * 5 * 6 + 6, 5 * 5 * 6 * 16 + 16, 400 * 120 + 120, 120 * 84 + 84, 84 * 10 + 10
        ((28, 28, 1), "SAME", [156, 2416, 48_120, 10_164, 850]),
        ((32, 32, 3), "VALID", [456, 2416, 48_120, 10_164, 850]),
    ],
)
def test_lenet_has_the_sizes_of_lenet_5(shape, padding, sizes):
    assert params(lenet(shape, padding=padding), shape) == sizes


def test_resnet18_and_the_text_classifier_have_their_published_sizes():
    """Table 1 of EmbracingFL leaves the logit out of the activations; weak clients run half of the 256 steps back."""
    assert [total(count(resnet18(shape), shape)).parameters for shape in (IMAGE, (28, 28, 1))] == [
        11_173_962,
        11_173_962 - 2 * 9 * 64,  # one image channel instead of three
    ]
    sizes = count(bilstm_classifier(), (256,), dtype=jnp.int32)
    assert total(sizes).parameters == 3_611_137
    assert total(sizes, trained_from="lstm").parameters == 1_051_137
    assert (sizes["embedding"].activations, sizes["lstm"].activations) == (0, 1_310_720)


def test_activations_in_functions_that_a_layer_calls_count_too():
    inner = dense(3, 3)

    def repeated(params, inputs):
        step = jax.jit(lambda values, _: (inner.apply(params, values), None))
        return jax.lax.scan(step, inputs, length=4)[0]

    counts = count(sequential([("repeated", Layer(init=inner.init, apply=repeated))]), (3,))["repeated"]
    assert counts[:3] == (12, 4 * 3, 4 * 3 * 3)


def test_integer_samples():
    words = elementwise(lambda tokens: jax.nn.one_hot(tokens[:, 0], 4, dtype=jnp.float32))
    counts = count(sequential([("words", words), ("dense", dense(4, 2))]), (3,), dtype=jnp.int32)
    assert (counts["words"][:2], counts["dense"][:2]) == ((0, 0), (10, 2))
