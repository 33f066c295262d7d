"""Outputs of named layers: those of the model itself, also with batch statistics, and nothing behind them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl.core import Variables
from jaxfl.models import Model, resnet20, sequential
from jaxfl.models.layer_outputs import layer_outputs
from jaxfl.models.layers import batch_norm, dense, dropout, elementwise, relu

INPUTS = jnp.linspace(-1.0, 1.0, 12, dtype=jnp.float32).reshape(3, 4)
PLAIN = sequential([("hidden", dense(4, 5)), ("relu", relu()), ("output", dense(5, 2))])
WITH_STATE = sequential(
    [("hidden", dense(4, 5)), ("norm", batch_norm(5)), ("drop", dropout(0.5)), ("output", dense(5, 2))]
)


def with_statistics():
    params = WITH_STATE.init(jax.random.key(1))
    mean = jnp.linspace(0.0, 1.0, 5, dtype=jnp.float32)
    statistics = {"mean": mean, "var": 1.0 + 2.0 * mean}
    return Variables(params=params, model_state={"norm": statistics, "drop": {}})


def test_the_outputs_of_the_last_layer_are_those_of_the_model():
    params = PLAIN.init(jax.random.key(0))
    actual = layer_outputs(PLAIN, params, INPUTS, ["output", "hidden"])
    assert set(actual) == {"output", "hidden"}
    np.testing.assert_array_equal(actual["output"], PLAIN.apply(params, INPUTS))
    np.testing.assert_array_equal(actual["hidden"], INPUTS @ params["hidden"]["kernel"])  # its bias is zero


def test_every_layer_is_that_of_the_model_cut_there():
    variables = with_statistics()
    names = [name for name, _ in WITH_STATE.layers]
    actual = layer_outputs(WITH_STATE, variables, INPUTS, names)
    assert jnp.abs(actual["norm"] - actual["hidden"]).max() > 0.1
    np.testing.assert_array_equal(actual["drop"], actual["norm"])
    np.testing.assert_array_equal(actual["output"], WITH_STATE.apply(variables, INPUTS))
    cut = Model(WITH_STATE.layers[:2])
    part = Variables(variables.params, {"norm": variables.model_state["norm"]})
    np.testing.assert_array_equal(actual["norm"], cut.apply(part, INPUTS))


def test_layers_behind_the_last_named_one_do_not_run():
    def fail(inputs):
        raise AssertionError("it ran")

    model = Model((*PLAIN.layers[:2], ("fails", elementwise(fail)), PLAIN.layers[2]))
    params = PLAIN.init(jax.random.key(0))
    assert layer_outputs(model, params, INPUTS, ["relu"])["relu"].min() >= 0
    with pytest.raises(AssertionError, match="it ran"):
        layer_outputs(model, params, INPUTS, ["output"])


def test_the_blocks_of_resnet20():
    model = resnet20()
    variables = jax.eval_shape(lambda key: Variables(model.init(key), model.init_state()), jax.random.key(0))
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    names = ["stem", "block_1_1", "block_1_3", "block_3_1", "block_3_3"]
    actual = jax.eval_shape(lambda v, x: layer_outputs(model, v, x, names), variables, images)
    shapes = [(32, 32, 16)] * 3 + [(8, 8, 64)] * 2
    assert [actual[name].shape for name in names] == [(2, *shape) for shape in shapes]
