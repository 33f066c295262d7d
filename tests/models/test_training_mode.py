"""Models that train otherwise than they evaluate, their tasks, calibration; models that compute in bfloat16."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, normals

from jaxfl.core import Variables, leaf_key
from jaxfl.core.platform import tracing_for
from jaxfl.core.tasks import calibrated_state
from jaxfl.models import classification, cnn, layers, mlp, resnet20, sequential
from jaxfl.models.composite import composite

RNG = np.random.default_rng(0)
normal = normals(RNG)
KEY = jax.random.key(5)
MODEL = sequential(
    [
        ("dense_1", layers.dense(6, 8)),
        ("norm", layers.batch_norm(8)),
        ("relu", layers.relu()),
        ("dropout_1", layers.dropout(0.25)),
        ("dropout_2", layers.dropout(0.5)),
        ("dense_2", layers.dense(8, 3)),
    ]
)
TASK = classification(MODEL)
ONLY_DROPOUT = sequential([("dropout", layers.dropout(0.5)), ("dense", layers.dense(6, 3))])


def training(trained) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(init_state, how it trains) of a layer or a task."""
    train = trained.train if isinstance(trained, layers.Layer) else trained.train_loss
    assert trained.init_state is not None
    assert train is not None
    return trained.init_state, train


def initial(trained):
    """(parameters, state), compiled as one program."""
    return jax.jit(lambda key: (trained.init(key), trained.init_state()))(KEY)


def samples(*leading):
    return normal(*leading, 6), jnp.asarray(RNG.integers(0, 3, leading), jnp.int32)


def drop(rate, inputs):
    """(outputs, state) of dropout in training."""
    return training(layers.dropout(rate))[1](None, {}, inputs, jnp.ones(inputs.shape[0]), KEY)


def test_dropout_keeps_numbers_independently_and_is_unbiased():
    outputs, state = drop(0.3, jnp.full((200, 500), 2.0))
    assert state == {}
    kept = np.asarray(outputs) > 0
    np.testing.assert_allclose(outputs[kept], 2 / 0.7, rtol=1e-6)
    # Standard errors of 100,000 draws; a rate that is off by 0.01 would be 7 of them away.
    error = np.sqrt(0.3 * 0.7 / kept.size)
    assert abs(kept.mean() - 0.7) < 4 * error
    for neighbors in (kept[1:] & kept[:-1], kept[:, 1:] & kept[:, :-1]):
        assert abs(neighbors.mean() - 0.49) < 4 * np.sqrt(3) * error
    assert np.abs(kept.mean(axis=0) - 0.7).max() < 5 * np.sqrt(0.21 / 200)


def test_dropout_changes_nothing_in_evaluation_or_at_rate_0():
    inputs = normal(4, 6)
    np.testing.assert_array_equal(layers.dropout(0.9).apply(Variables(None, {}), inputs), inputs)
    np.testing.assert_array_equal(drop(0.0, inputs)[0], inputs)


def test_training_is_the_layers_one_after_the_other_with_keys_by_position():
    (params, state), (inputs, _) = initial(MODEL), samples(5)
    weights = jnp.array([1.0, 1.0, 0.0, 1.0, 1.0])

    def by_hand(params, state):
        hidden = inputs @ params["dense_1"]["kernel"] + params["dense_1"]["bias"][None]
        hidden, of_norm = training(layers.batch_norm(8))[1](params["norm"], state["norm"], hidden, weights, KEY)
        hidden = jax.nn.relu(hidden)
        for position, rate in ((3, 0.25), (4, 0.5)):
            kept = jax.random.bernoulli(leaf_key(KEY, position), jnp.float32(1 - rate), hidden.shape)
            hidden = jnp.where(kept, hidden / (1 - rate), 0)
        return hidden @ params["dense_2"]["kernel"] + params["dense_2"]["bias"][None], {**state, "norm": of_norm}

    actual = jax.jit(lambda params, state: MODEL.apply_train(params, state, inputs, weights, KEY))(params, state)
    assert_close(actual, jax.jit(by_hand)(params, state))


def test_the_task_trains_and_evaluates_the_model():
    (params, state), (inputs, labels) = initial(TASK), samples(5)
    state["norm"]["mean"] = normal(8)
    assert TASK.blocks == ("dense_1", "norm", "dense_2")
    assert (TASK.layers, TASK.factors) == ((), None)

    @jax.jit
    def both(params, state):
        variables, ones = Variables(params, state), jnp.ones(5)
        losses, new_state = training(TASK)[1](params, state, inputs, labels, ones, KEY)
        metrics = TASK.metrics(variables, inputs, labels)
        actual = losses, new_state, metrics["loss"], TASK.loss(variables, inputs, labels), metrics["accuracy"]
        logits, new_state = MODEL.apply_train(params, state, inputs, ones, KEY)
        losses = -jax.nn.log_softmax(logits)[jnp.arange(5), labels]
        logits = MODEL.apply(variables, inputs)
        evaluated = -jax.nn.log_softmax(logits)[jnp.arange(5), labels]
        right = (logits.argmax(axis=1) == labels).astype(jnp.float32)
        return actual, (losses, new_state, evaluated, evaluated, right)

    actual, expected = both(params, state)
    assert_close(actual, expected)
    assert np.abs(actual[0] - actual[2]).max() > 0.01


def test_dropout_alone_has_a_state_without_arrays():
    task, (inputs, labels) = classification(ONLY_DROPOUT), samples(4)
    params, state = initial(task)
    assert jax.tree.leaves(state) == []
    train_loss = jax.jit(lambda key: training(task)[1](params, state, inputs, labels, jnp.ones(4), key))
    (first, state_after), (other, _) = train_loss(KEY), train_loss(jax.random.key(6))
    assert jax.tree.structure(state_after) == jax.tree.structure(state)
    assert np.abs(first - other).max() > 0.01
    without = classification(sequential([("dense", layers.dense(6, 3))]))
    assert_close(task.loss(Variables(params, state), inputs, labels), without.loss(params, inputs, labels))


def test_a_model_without_training_mode_has_none_in_its_task():
    task = classification(mlp((6, 3)))
    assert (task.init_state, task.train_loss) == (None, None)
    model, (inputs, _) = mlp((6, 3)), samples(2)
    params, state = initial(model)
    outputs, new_state = model.apply_train(params, state, inputs, jnp.ones(2), KEY)
    assert new_state == state == {}
    np.testing.assert_array_equal(outputs, model.apply(params, inputs))


def test_state_weights_and_a_key_of_its_own_reach_every_part():
    parts = {"drop_1": layers.dropout(0.5), "drop_2": layers.dropout(0.5), "norm": layers.batch_norm(6)}

    def forward(run, inputs):
        return jnp.stack([run("drop_1", inputs), run("drop_2", inputs), run("norm", inputs)])

    block, (inputs, _), weights = composite(parts, forward), samples(8), jnp.arange(8.0)
    params, state = initial(block)
    (first, second, normalized), new_state = training(block)[1](params, state, inputs, weights, KEY)
    assert ((first != 0) != (second != 0)).any()
    expected = training(parts["norm"])[1](params["norm"], state["norm"], inputs, weights, KEY)
    assert_close((normalized, new_state["norm"]), expected)
    first, second, normalized = block.apply(Variables(params, new_state), inputs)
    np.testing.assert_array_equal(first, inputs)
    np.testing.assert_array_equal(second, inputs)
    assert_close(normalized, parts["norm"].apply(Variables(params["norm"], new_state["norm"]), inputs))


STATIC = classification(
    sequential(
        [
            ("dense_1", layers.dense(6, 4)),
            ("norm_1", layers.batch_norm(4, tracked=False)),
            ("dense_2", layers.dense(4, 3)),
            ("norm_2", layers.batch_norm(3, tracked=False)),
        ]
    )
)
CALIBRATE = jax.jit(functools.partial(calibrated_state, STATIC))


def test_calibration_on_one_batch_is_the_statistics_with_which_the_task_trains_on_it():
    (params, initial_state), (inputs, labels) = initial(STATIC), samples(5)
    state = CALIBRATE(params, inputs[None], labels[None], jnp.ones((1, 5)), KEY)
    trained, kept = training(STATIC)[1](params, initial_state, inputs, labels, jnp.ones(5), KEY)
    assert_close(STATIC.loss(Variables(params, state), inputs, labels), trained)
    assert_close(kept, initial_state)


def test_calibration_is_a_mean_over_batches_in_which_padding_never_counts():
    (params, _), (inputs, labels) = initial(STATIC), samples(3, 5)
    weights = jnp.array([[1.0] * 5, [1, 1, 0, 0, 0], [0] * 5])
    state = CALIBRATE(params, inputs, labels, weights, KEY)
    shares = {0: (5, 5 / 7), 1: (2, 2 / 7)}  # batch -> samples that count, share
    for name in ("mean", "var"):
        expected = sum(
            share * np.asarray(statistics)
            for batch, (count, share) in shares.items()
            for statistics in [_statistic(name, inputs[batch, :count] @ params["dense_1"]["kernel"])]
        )
        np.testing.assert_allclose(state["norm_1"][name], expected, rtol=1e-5, atol=1e-6)
    noise = inputs.at[1, 2:].add(10.0).at[2].add(10.0)
    assert_close(CALIBRATE(params, noise, labels, weights, KEY), state, 0)


def _statistic(name, rows):
    return rows.mean(axis=0) if name == "mean" else rows.var(axis=0)


@pytest.mark.parametrize(
    "model",
    [cnn((6, 6, 1), channels=(3,), window=3, hidden=8), resnet20((6, 6, 1), widths=(4,), blocks=(1,))],
    ids=["cnn", "resnet20"],
)
@pytest.mark.quick_cases(1)
def test_in_bfloat16_losses_and_gradients_are_float32_and_near_those_of_float32(model):
    pixels = np.random.default_rng(1).integers(0, 256, (16, 6, 6, 1))
    images, labels = jnp.asarray(pixels, jnp.uint8), jnp.arange(16) % 10
    full, low = classification(model), classification(model, compute_dtype="bfloat16")
    params = jax.jit(full.init)(KEY)

    def of(task):
        def total(params):
            if task.train_loss is None:
                return task.loss(params, images, labels).mean(), None
            init_state, train_loss = training(task)
            losses, state = train_loss(params, init_state(), images, labels, jnp.ones(16), KEY)
            return losses.mean(), (state, task.loss(Variables(params, state), images, labels))

        return jax.jit(jax.value_and_grad(total, has_aux=True))(params)

    actual, expected = of(low), of(full)
    assert {leaf.dtype for leaf in jax.tree.leaves(actual)} == {jnp.dtype("float32")}
    (loss, others), gradients = actual
    np.testing.assert_allclose(loss, expected[0][0], rtol=0.02)
    assert loss != expected[0][0]
    assert_close(others, expected[0][1], 0.05)
    # A few samples on the other side of a kink of a ReLU: rounding the parameters alone does as much.
    mine, other = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(g)]) for g in (gradients, expected[1]))
    assert np.linalg.norm(mine - other) < 0.05 * np.linalg.norm(other)


def test_bfloat16_kernel_gradients_round_the_factors_of_one_product():
    """All else is float32's, to the bit: losses, and gradients of biases and of the dense layers."""
    model = cnn((6, 6, 1), channels=(3, 4), window=3, hidden=8)
    images = jnp.asarray(np.random.default_rng(1).integers(0, 256, (16, 6, 6, 1)), jnp.uint8)
    full, narrow = classification(model), classification(model, compute_dtype="bfloat16_kernel_gradients")
    params = jax.jit(full.init)(KEY)
    kernels = [("conv_1", "kernel"), ("conv_2", "kernel")]

    def gradients(task):
        loss = lambda params: task.loss(params, images, jnp.arange(16) % 10).mean()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(params)

    (loss, actual), (expected_loss, expected) = gradients(narrow), gradients(full)
    np.testing.assert_array_equal(loss, expected_loss)
    for layer, leaves in expected.items():
        for name, leaf in leaves.items():
            if (layer, name) not in kernels:
                np.testing.assert_array_equal(actual[layer][name], leaf)
    for layer, name in kernels:
        off = np.linalg.norm(actual[layer][name] - expected[layer][name]) / np.linalg.norm(expected[layer][name])
        assert 1e-5 < off < 2**-8  # numbers are off by at most 2^-9 of themselves, in both factors

    with tracing_for("gpu"):
        each = jax.vmap(jax.grad(lambda params: narrow.loss(params, images, jnp.arange(16) % 10).mean()))
        text = jax.jit(each).lower(jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), params)).as_text()
    products = re.findall(r"stablehlo\.(?:convolution|dot_general).*", text)
    assert sum("bf16" in product for product in products) == len(kernels) < len(products)


def test_factors_in_bfloat16_are_float32_and_give_its_gradient():
    task = classification(mlp((6, 8, 3)), compute_dtype="bfloat16")
    inputs, labels = samples(5)

    @jax.jit
    def both(params):
        assert task.factors is not None
        losses, factors = task.factors(params, inputs, labels)
        assert {leaf.dtype for leaf in jax.tree.leaves((losses, factors))} == {jnp.dtype("float32")}
        actual = {
            layer.name: layer.weighted_sum(layer_inputs, errors, jnp.ones(5))
            for layer, layer_inputs, errors in zip(task.layers, factors.inputs, factors.errors, strict=True)
        }
        return actual, jax.grad(lambda values: task.loss(values, inputs, labels).sum())(params)

    actual, expected = both(jax.jit(task.init)(KEY))
    assert_close(actual, expected, 0.02)


@pytest.mark.parametrize(
    ("layer", "shape", "terms"),
    [(layers.dense(1024, 1), (768, 1024), 768), (layers.conv(1024, 1, (1, 1)), (12, 8, 8, 1024), 768)],
)
def test_products_of_bfloat16_accumulate_in_float32(layer, shape, terms):
    # A sum of ones that is rounded to bfloat16 after each addition stays at 256.
    kernel = jax.eval_shape(layer.init, KEY)["kernel"]

    @jax.jit
    def value_and_gradients(params):
        outputs, pull_back = jax.vjp(lambda values: layer.apply(values, jnp.ones(shape, jnp.bfloat16)), params)
        return outputs, pull_back(jnp.ones_like(outputs))[0]

    ones = {"kernel": jnp.ones(kernel.shape, jnp.bfloat16), "bias": jnp.zeros(1, jnp.bfloat16)}
    outputs, gradients = value_and_gradients(ones)
    np.testing.assert_array_equal(outputs.astype(jnp.float32), 1024.0)
    for leaf in gradients.values():
        np.testing.assert_array_equal(leaf.astype(jnp.float32), terms)
