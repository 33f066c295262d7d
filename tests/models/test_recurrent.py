"""Recurrent layers against flax's cells, their factored gradients against per-sample ones, and the text classifier."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import flat, normals, refusals, rows_of

from jaxfl.channel import count, total
from jaxfl.core import ArgumentError
from jaxfl.core.types import Variables
from jaxfl.gradients import per_example
from jaxfl.models import layers, sequential
from jaxfl.models.classification import binary_classification
from jaxfl.models.kernels import position_sums
from jaxfl.models.lstm import bidirectional_lstm
from jaxfl.models.text import bilstm_classifier, embedding

RNG = np.random.default_rng(0)
normal = normals(RNG)


def tokens(*shape, vocabulary=6):
    return jnp.asarray(RNG.integers(0, vocabulary, size=shape), jnp.int32)


# --- the LSTM against flax ---------------------------------------------------------------------------------------


def flax_lstm(params, inputs, whole_sequence, frozen_steps=0):
    """Both directions by flax's cells, step by step, from the parameters of one node; the first steps are constants."""
    in_features, units = params["kernel"].shape[1], params["recurrent_kernel"].shape[1]
    read = []
    for direction, steps in enumerate((range(inputs.shape[1]), reversed(range(inputs.shape[1])))):
        cell = nnx.OptimizedLSTMCell(in_features, units, rngs=nnx.Rngs(0))
        own = {name: leaf[direction] for name, leaf in params.items()}
        mapped = {
            "dense_i": {"kernel": own["kernel"]},
            "dense_h": {"kernel": own["recurrent_kernel"], "bias": own["bias"]},
        }
        zeros, outputs = jnp.zeros((inputs.shape[0], units)), {}
        carry = (zeros, zeros)
        with jax.numpy_rank_promotion("allow"):  # flax adds the bias so
            for number, step in enumerate(steps):
                here = (mapped, inputs[:, step])
                kernels, words = jax.lax.stop_gradient(here) if number < frozen_steps else here
                nnx.update(cell, nnx.State(kernels))
                carry, outputs[step] = cell(carry, words)
        at_positions = jnp.stack([outputs[step] for step in range(inputs.shape[1])], axis=1)
        read.append(at_positions if whole_sequence else carry[1])
    return jnp.concatenate(read, axis=-1)


@pytest.mark.parametrize("frozen_steps", [0, 2])
@pytest.mark.parametrize("whole_sequence", [False, True])
@pytest.mark.quick_cases(1)
def test_equals_flax_lstm_cells_in_value_and_in_every_gradient_over_nodes(whole_sequence, frozen_steps):
    layer = bidirectional_lstm(3, 4, whole_sequence=whole_sequence, frozen_steps=frozen_steps)
    params = {"kernel": normal(2, 2, 3, 16), "recurrent_kernel": normal(2, 2, 4, 16), "bias": normal(2, 2, 16)}
    inputs = normal(2, 3, 5, 3)  # (n, b, t, features)
    direction = normal(3, 5, 8) if whole_sequence else normal(3, 8)

    def of_nodes(apply):
        def value(params, inputs):
            outputs = apply(params, inputs)
            return jnp.sum(outputs * direction), outputs

        return jax.jit(jax.vmap(jax.grad(value, argnums=(0, 1), has_aux=True)))(params, inputs)

    found = of_nodes(layer.apply)
    expected = of_nodes(lambda params, inputs: flax_lstm(params, inputs, whole_sequence, frozen_steps))
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


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


# --- factored forms against automatic differentiation of one sample at a time ------------------------------------

# Both ways to end an LSTM; 7 positions and 6 words, so that words repeat.
TASK = binary_classification(
    sequential(
        [
            ("embedding", embedding(6, 3)),
            ("lstm_1", bidirectional_lstm(3, 2, whole_sequence=True)),
            ("lstm_2", bidirectional_lstm(4, 2)),
            ("dense", layers.dense(4, 1)),
        ]
    )
)
INPUTS, LABELS = tokens(5, 7), jnp.array([0, 1, 1, 1, 0], jnp.int32)
WEIGHTS = normal(5).at[3].set(0.0)


def some_params(task):
    """Parameters of standard deviation 0.7: errors stay of like size from layer to layer."""
    return jax.tree.map(lambda leaf: 0.7 * normal(*leaf.shape), jax.eval_shape(task.init, jax.random.key(0)))


@pytest.fixture(scope="module")
def params():
    return some_params(TASK)


@pytest.fixture(scope="module")
def factored_way():
    """(params, inputs) -> what the factored form gives, compiled once."""

    @jax.jit
    def everything(params, inputs):
        assert TASK.factors is not None
        losses, factors = TASK.factors(params, inputs, LABELS)
        of_layers = {
            layer.name: {
                "squared_norm": layer.squared_norm(layer_input, error),
                "absolute_norm": layer.absolute_norm(layer_input, error),
                "weighted_sum": layer.weighted_sum(layer_input, error, WEIGHTS),
                "per_sample": layer.per_sample(layer_input, error),
            }
            for layer, layer_input, error in zip(TASK.layers, factors.inputs, factors.errors, strict=True)
        }
        clipped = per_example.weighted_sum(TASK, params, inputs, LABELS, WEIGHTS, clip_norm=0.2).gradient
        return losses, of_layers, clipped

    return everything


@pytest.fixture(scope="module")
def one_by_one(params):
    """Losses and gradients of one sample at a time, by automatic differentiation."""

    def one(words, label):
        return jax.value_and_grad(lambda values: TASK.loss(values, words[None], label[None])[0])(params)

    return jax.jit(jax.vmap(one))(INPUTS, LABELS)


def test_factored_forms_agree_with_per_sample_gradients(params, factored_way, one_by_one):
    losses, of_layers, _ = factored_way(params, INPUTS)
    expected_losses, gradients = one_by_one
    assert [layer.name for layer in TASK.layers] == list(TASK.blocks)
    assert set(of_layers) == set(params)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for name, found in of_layers.items():
        rows = rows_of(gradients[name])
        np.testing.assert_allclose(found["squared_norm"], (rows**2).sum(1), rtol=1e-5, atol=1e-10)
        np.testing.assert_allclose(found["absolute_norm"], np.abs(rows).sum(1), rtol=1e-5, atol=1e-8)
        assert jax.tree.structure(found["weighted_sum"]) == jax.tree.structure(gradients[name])
        np.testing.assert_allclose(flat(found["weighted_sum"]), WEIGHTS @ rows, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(rows_of(found["per_sample"]), rows, rtol=1e-5, atol=1e-6)


def test_clipped_sum_goes_the_factored_way_and_equals_clipped_gradients(params, factored_way, one_by_one):
    assert per_example.route(TASK, 0.2) == "factored"
    rows = rows_of(one_by_one[1])
    scale = np.minimum(1.0, 0.2 / np.linalg.norm(rows, axis=1))
    assert scale.min() < 1
    clipped = factored_way(params, INPUTS)[2]
    np.testing.assert_allclose(flat(clipped), (WEIGHTS * scale) @ rows, rtol=2e-5, atol=1e-6)


def test_a_sample_of_weight_0_contributes_exactly_zero(params, factored_way):
    clipped = flat(factored_way(params, INPUTS)[2])
    np.testing.assert_array_equal(clipped, flat(factored_way(params, INPUTS.at[3].set(0))[2]))
    assert np.abs(clipped - flat(factored_way(params, INPUTS.at[1].set(0))[2])).max() > 1e-4


def test_an_lstm_that_reads_the_sample_keeps_its_hidden_states_among_the_factors():
    factored = bidirectional_lstm(3, 2).factored
    assert factored is not None
    assert not factored("lstm", True).input_is_sample


# --- norms where float32 sums cancel -----------------------------------------------------------------------------


def factored_form(layer):
    assert layer.factored is not None
    return layer.factored("layer", False)


def norms_of(factored):
    """Squared and absolute norms, compiled."""
    return jax.jit(lambda *pair: (factored.squared_norm(*pair), factored.absolute_norm(*pair)))


compiled = functools.cache(norms_of)
WORDS, LSTM = factored_form(embedding(3, 32)), factored_form(bidirectional_lstm(4, 4))


@pytest.mark.parametrize("far", [1e-7, 1e-5, 1e-3])
def test_no_norm_is_below_the_gradients_where_its_terms_cancel(far):
    """Errors that alternate in sign over positions with nearly equal inputs, against float64."""
    length, num_samples = 16, 20
    signs = jnp.where(jnp.arange(length) % 2 == 0, 1.0, -1.0).reshape(1, length, 1)
    errors = signs * normal(num_samples, 1, 32) * (1 + far * normal(num_samples, length, 32))
    wide = np.asarray(errors, np.float64)

    words = jnp.zeros((num_samples, length), jnp.int32)
    of_embedding = {"table": wide.sum(axis=1)}
    inputs = jnp.tile(normal(num_samples, 1, 12), (1, length, 1))  # 4 features, 2 * 4 units
    directions = np.asarray(inputs[..., 4:], np.float64).reshape(num_samples, length, 2, 4)
    split = wide.reshape(num_samples, length, 2, 16)
    of_lstm = {
        "kernel": np.einsum("bti,btdv->bdiv", np.asarray(inputs[..., :4], np.float64), split),
        "recurrent_kernel": np.einsum("btdu,btdv->bduv", directions, split),
        "bias": split.sum(axis=1),
    }
    cases = [
        (WORDS, words, errors, of_embedding),
        (LSTM, inputs, errors.reshape(num_samples, length, 2, 16), of_lstm),
    ]
    for factored, factor_input, error, exact in cases:
        squared, absolute = map(np.asarray, compiled(factored)(factor_input, error))
        rows = np.concatenate([leaf.reshape(num_samples, -1) for leaf in exact.values()], axis=1)
        assert np.all(squared >= (1 - 1e-6) * (rows**2).sum(axis=1))
        assert np.all(absolute >= (1 - 1e-6) * np.abs(rows).sum(axis=1))


def test_norms_stay_within_1e_4_without_cancellation():
    """White noise at many positions, in both ways to the norm of an LSTM."""
    assert position_sums.uses_gram(8, 40 + 16, 64)
    assert not position_sums.uses_gram(128, 40 + 16, 64)
    lstm, text = factored_form(bidirectional_lstm(40, 16)), factored_form(embedding(50, 16))
    batches = [(lstm, normal(2, length, 72), normal(2, length, 2, 64)) for length in (8, 128)]
    for factored, factor_input, errors in [*batches, (text, tokens(2, 128, vocabulary=50), normal(2, 128, 16))]:
        exact = rows_of(jax.jit(factored.per_sample)(factor_input, errors))
        squared, absolute = map(np.asarray, compiled(factored)(factor_input, errors))
        np.testing.assert_allclose(np.sqrt(squared) / np.linalg.norm(exact, axis=1), 1, atol=1e-4)
        np.testing.assert_allclose(absolute, np.abs(exact).sum(axis=1), rtol=1e-4)


def test_norms_agree_in_groups_of_samples(monkeypatch):
    lstm, text = factored_form(bidirectional_lstm(3, 2)), factored_form(embedding(6, 3))
    batches = [(lstm, normal(3, 5, 7), normal(3, 5, 2, 8)), (text, tokens(3, 5), normal(3, 5, 3))]
    expected = [compiled(factored)(*batch) for factored, *batch in batches]
    monkeypatch.setattr(position_sums, "GROUP_BYTES", 1)
    for (factored, *batch), one_by_one in zip(batches, expected, strict=True):
        np.testing.assert_allclose(norms_of(factored)(*batch), one_by_one, rtol=1e-5)


def test_norms_and_sums_hold_no_array_of_b_times_the_table():
    factored = factored_form(embedding(1000, 8))

    def clipped(words, errors):
        norm = factored.squared_norm(words, errors) + factored.absolute_norm(words, errors)
        return factored.weighted_sum(words, errors, 1.0 / norm)

    memory = jax.jit(clipped).lower(tokens(64, 5), normal(64, 5, 8)).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 64 * 1000 * 8 * 4 / 4


# --- the text classifier -----------------------------------------------------------------------------------------


def test_sizes_are_those_of_embracing_fl():
    """Table 1. The paper leaves the logit out of the activations; weak clients run half of the 256 steps backward."""
    sizes = count(bilstm_classifier(), (256,), dtype=jnp.int32)
    assert total(sizes).parameters == 3_611_137
    assert total(sizes, trained_from="lstm").parameters == 1_051_137
    assert sizes["embedding"].activations == 0
    assert sizes["lstm"].activations == 1_310_720


def test_nodes_run_one_after_the_other_on_a_cpu(monkeypatch):
    for platform, expected in (("cpu", "map"), ("gpu", "vmap")):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert binary_classification(bilstm_classifier()).node_loop == expected


def test_dropout_follows_the_embedding_and_the_last_states():
    model = bilstm_classifier(6, 7, embedding_features=3, units=2, dropout=0.5)
    assert [name for name, _ in model.layers] == ["tokens", "embedding", "dropout_1", "lstm", "dropout_2", "dense"]
    task, plain = (
        binary_classification(m) for m in (model, bilstm_classifier(6, 7, embedding_features=3, units=2, dropout=0.0))
    )
    assert task.factors is None
    assert plain.factors is not None
    assert task.train_loss is not None
    train_loss, params, state = task.train_loss, some_params(task), {"dropout_1": {}, "dropout_2": {}}

    @jax.jit
    def losses(keys):
        trained = jax.vmap(lambda key: train_loss(params, state, INPUTS, LABELS, jnp.ones(5), key)[0])(keys)
        return trained, task.loss(Variables(params, state), INPUTS, LABELS), plain.loss(params, INPUTS, LABELS)

    trained, evaluated, without = losses(jax.random.split(jax.random.key(0), 2))
    assert np.abs(trained[0] - trained[1]).max() > 0
    np.testing.assert_allclose(evaluated, without, rtol=1e-6)


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

    found, expected = jax.jit(lambda params: [jax.grad(fn, has_aux=True)(params) for fn in (ours, sigmoid)])(params)
    np.testing.assert_allclose(flat(found[0]), flat(expected[0]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1]["loss"], expected[1]["loss"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[1]["accuracy"], expected[1]["accuracy"])
    assert 0 < expected[1]["accuracy"].mean() < 1


# --- bad inputs --------------------------------------------------------------------------------------------------


def test_a_token_outside_of_the_vocabulary_becomes_nan():
    layer = embedding(3, 2)
    out = layer.apply({"table": jnp.ones((3, 2))}, jnp.array([[-1, 0, 2, 3]]))
    np.testing.assert_array_equal(np.isnan(out[0, :, 0]), [True, False, False, True])


def test_wrong_inputs_are_named():
    with pytest.raises(ArgumentError, match=r"inputs: must be integer tokens \(b, t\); got float32 of shape \(2, 3\)"):
        embedding(3, 2).apply({"table": jnp.ones((3, 2))}, jnp.zeros((2, 3)))
    with pytest.raises(ArgumentError, match=r"inputs: must be sequences \(b, t, 3\); got shape \(2, 4, 5\)"):
        bidirectional_lstm(3, 2).apply({}, jnp.zeros((2, 4, 5)))
    task = binary_classification(sequential([("dense", layers.dense(2, 3))]))
    params = {"dense": {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}}
    with pytest.raises(ArgumentError, match=r"model: must output logits \(b, 1\); got shape \(2, 3\)"):
        task.loss(params, jnp.zeros((2, 2)), jnp.zeros(2, jnp.int32))


test_bad_arguments_are_named = refusals(
    [
        (lambda: embedding(0, 3), "vocabulary"),
        (lambda: embedding(3, 0), "features"),
        (lambda: bidirectional_lstm(0, 3), "in_features"),
        (lambda: bidirectional_lstm(3, 0), "units"),
        (lambda: bilstm_classifier(length=0), "length"),
        (lambda: bilstm_classifier(num_outputs=0), "num_outputs"),
        (lambda: bilstm_classifier(dropout=1.0), "rate"),
        (lambda: bilstm_classifier(length=4, frozen_words=4), "frozen_words"),
        (lambda: bidirectional_lstm(3, 3, frozen_steps=-1), "frozen_steps"),
        (lambda: bidirectional_lstm(3, 3, frozen_steps=2).apply({}, jnp.zeros((1, 2, 3))), "inputs"),
    ]
)


@pytest.mark.slow
def test_in_bfloat16_sums_over_all_words_accumulate_in_float32():
    """Half of the words are padding, and all labels are alike: a sum that was rounded at each term was off by 0.14."""
    model = bilstm_classifier(50, 256, embedding_features=32, units=32, dropout=0.0)
    words, labels = tokens(32, 256, vocabulary=50).at[:, :128].set(0), jnp.ones(32, jnp.int32)
    full, low = (binary_classification(model, compute_dtype=dtype) for dtype in ("float32", "bfloat16"))
    params = jax.jit(full.init)(jax.random.key(0))
    expected, found = (jax.jit(jax.grad(lambda p, t=t: t.loss(p, words, labels).mean()))(params) for t in (full, low))
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    for name, leaf in (("embedding", "table"), ("lstm", "bias"), ("lstm", "kernel"), ("lstm", "recurrent_kernel")):
        off = np.linalg.norm(found[name][leaf] - expected[name][leaf]) / np.linalg.norm(expected[name][leaf])
        assert 0 < off < 0.03, (name, leaf, off)
