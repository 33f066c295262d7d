"""The text classifier, the start of its LSTM, tokens without a row, and the task of telling two classes apart."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import flat, normals

from jaxfl.core import Variables
from jaxfl.models import bilstm_classifier, binary_classification, layers, sequential
from jaxfl.models.lstm import bidirectional_lstm
from jaxfl.models.text import embedding

RNG = np.random.default_rng(0)
normal = normals(RNG)


def tokens(*shape, vocabulary=6):
    return jnp.asarray(RNG.integers(0, vocabulary, size=shape), jnp.int32)


def test_starts_as_in_keras():
    layer = bidirectional_lstm(60, 20)
    assert layer.init is not None
    params = jax.jit(layer.init)(jax.random.key(0))
    # Uniform in +-limit with limit^2 = 6 / (fan-in + fan-out); the largest of 9600 draws comes within 1 percent of it.
    limit = np.sqrt(6 / (60 + 80))
    assert 0.99 * limit < np.abs(params["kernel"]).max() <= limit
    assert np.abs(params["kernel"][0] - params["kernel"][1]).max() > 0.1
    for kernel in params["recurrent_kernel"]:
        np.testing.assert_allclose(kernel @ kernel.T, np.eye(20), atol=1e-5)
    for gate, expected in enumerate((0, 1, 0, 0)):
        np.testing.assert_array_equal(params["bias"].reshape(2, 4, 20)[:, gate], expected)
    zero = bidirectional_lstm(1, 1, unit_forget_bias=False).init
    assert zero is not None
    assert not jax.jit(zero)(jax.random.key(0))["bias"].any()


def test_dropout_follows_the_embedding_and_the_last_states():
    model, without = (bilstm_classifier(6, 7, embedding_features=3, units=2, dropout=rate) for rate in (0.5, 0.0))
    assert [name for name, _ in model.layers] == ["tokens", "embedding", "dropout_1", "lstm", "dropout_2", "dense"]
    task, plain = binary_classification(model), binary_classification(without)
    assert (task.factors is None, plain.factors is None) == (True, False)
    assert task.train_loss is not None
    train_loss, params, state = task.train_loss, plain.init(jax.random.key(1)), {"dropout_1": {}, "dropout_2": {}}
    words, labels = tokens(5, 7), jnp.array([0, 1, 1, 1, 0], jnp.int32)

    @jax.jit
    def losses(keys):
        trained = jax.vmap(lambda key: train_loss(params, state, words, labels, jnp.ones(5), key)[0])(keys)
        return trained, task.loss(Variables(params, state), words, labels), plain.loss(params, words, labels)

    trained, evaluated, expected = losses(jax.random.split(jax.random.key(0), 2))
    assert np.abs(trained[0] - trained[1]).max() > 0
    np.testing.assert_allclose(evaluated, expected, rtol=1e-6)


def test_losses_accuracies_and_gradients_equal_those_of_sigmoid_cross_entropy():
    model = sequential([("dense", layers.dense(2, 1))])
    task = binary_classification(model)
    params = {"dense": {"kernel": jnp.array([[3.0], [-1.0]]), "bias": jnp.array([0.5])}}
    inputs, labels = 4 * normal(8, 2), jnp.array([0, 1] * 4, jnp.int32)

    def ours(params):
        metrics = task.metrics(params, inputs, labels)
        return metrics["loss"].sum(), metrics

    def sigmoid(params):
        logits = model.apply(params, inputs)[:, 0]
        losses = optax.losses.sigmoid_binary_cross_entropy(logits, labels.astype(jnp.float32))
        return losses.sum(), {"loss": losses, "accuracy": (logits > 0) == (labels == 1)}

    actual, expected = jax.jit(lambda params: [jax.grad(fn, has_aux=True)(params) for fn in (ours, sigmoid)])(params)
    np.testing.assert_allclose(flat(actual[0]), flat(expected[0]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(actual[1]["loss"], expected[1]["loss"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(actual[1]["accuracy"], expected[1]["accuracy"])
    assert 0 < expected[1]["accuracy"].mean() < 1


def test_a_token_outside_of_the_vocabulary_becomes_nan():
    layer = embedding(3, 2)
    out = layer.apply({"table": jnp.ones((3, 2))}, jnp.array([[-1, 0, 2, 3]]))
    np.testing.assert_array_equal(np.isnan(out[0, :, 0]), [True, False, False, True])


@pytest.mark.slow
def test_in_bfloat16_sums_over_all_words_accumulate_in_float32():
    """Half of the words are padding, and all labels are alike: a sum that was rounded at each term was off by 0.14."""
    model = bilstm_classifier(50, 256, embedding_features=32, units=32, dropout=0.0)
    words, labels = tokens(32, 256, vocabulary=50).at[:, :128].set(0), jnp.ones(32, jnp.int32)
    full, low = (binary_classification(model, compute_dtype=dtype) for dtype in ("float32", "bfloat16"))
    params = jax.jit(full.init)(jax.random.key(0))
    expected, actual = (jax.jit(jax.grad(lambda p, t=t: t.loss(p, words, labels).mean()))(params) for t in (full, low))
    assert {leaf.dtype for leaf in jax.tree.leaves(actual)} == {jnp.dtype("float32")}
    for name, leaf in (("embedding", "table"), ("lstm", "bias"), ("lstm", "kernel"), ("lstm", "recurrent_kernel")):
        off = np.linalg.norm(actual[name][leaf] - expected[name][leaf]) / np.linalg.norm(expected[name][leaf])
        assert 0 < off < 0.03, (name, leaf, off)
