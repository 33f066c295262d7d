"""Factored gradients of tasks and layers against per-sample ones, and norms where float32 sums cancel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, flat, normals, rows_of

from jaxfl.core import over_nodes
from jaxfl.core.platform import tracing_for
from jaxfl.gradients import per_example
from jaxfl.models import binary_classification, classification, layers, mlp, sequential
from jaxfl.models.kernels import position_sums
from jaxfl.models.lstm import bidirectional_lstm
from jaxfl.models.normalization import factored_scale_and_bias
from jaxfl.models.text import embedding

RNG = np.random.default_rng(0)
normal = normals(RNG)
BATCH = 5


def tokens(*shape, vocabulary=6):
    return jnp.asarray(RNG.integers(0, vocabulary, size=shape), jnp.int32)


def images(*leading):
    return jnp.asarray(RNG.integers(0, 256, size=(*leading, 8, 8)), jnp.uint8)


CONVOLUTIONS = [
    ("images", layers.reshape((8, 8, 1))),
    ("strided", layers.conv(1, 3, (3, 2), strides=(2, 1))),  # 4x8
    ("norm", layers.group_norm(3, 3)),
    ("tanh", layers.tanh()),
    ("valid", layers.conv(3, 8, (3, 3), padding="VALID")),  # 2x6
    ("gram", layers.conv(8, 16, (3, 3), strides=(2, 2))),  # 1x3, whose norm pairs of positions give
    ("flatten", layers.reshape((48,))),
    ("dense", layers.dense(48, 10)),
]
# Both ways to end an LSTM; 7 positions and 6 words, so that words repeat.
TEXT = [
    ("embedding", embedding(6, 3)),
    ("lstm_1", bidirectional_lstm(3, 2, whole_sequence=True)),
    ("lstm_2", bidirectional_lstm(4, 2)),
    ("dense", layers.dense(4, 1)),
]
TASKS = {
    "mlp": (classification(mlp((64, 7, 5, 10))), images),
    "convolutions": (classification(sequential(CONVOLUTIONS)), images),
    "text": (binary_classification(sequential(TEXT)), lambda *leading: tokens(*leading, 7)),
}
LABELS = jnp.array([0, 1, 1, 1, 0], jnp.int32)
WEIGHTS = normal(BATCH).at[3].set(0.0)


def forms_of(task, params, inputs):
    """Losses, factors, and what each layer gives from its factors."""
    assert task.factors is not None
    losses, factors = task.factors(params, inputs, LABELS)
    of_layers = {
        layer.name: {
            "squared_norm": layer.squared_norm(layer_input, error),
            "absolute_norm": layer.absolute_norm(layer_input, error),
            "weighted_sum": layer.weighted_sum(layer_input, error, WEIGHTS),
            "per_sample": layer.per_sample(layer_input, error),
        }
        for layer, layer_input, error in zip(task.layers, factors.inputs, factors.errors, strict=True)
    }
    return losses, factors, of_layers


@pytest.fixture(scope="module", params=TASKS)
def case(request):
    """(task, its parameters of standard deviation 0.5, inputs)."""
    task, make = TASKS[request.param]
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    return task, jax.tree.map(lambda leaf: 0.5 * normal(*leaf.shape), shapes), make(BATCH)


def test_factors_agree_with_per_sample_gradients_and_so_does_the_clipped_sum(case):
    task, params, inputs = case

    def one(sample, label):
        return jax.value_and_grad(lambda values: task.loss(values, sample[None], label[None])[0])(params)

    expected_losses, gradients = jax.jit(jax.vmap(one))(inputs, LABELS)
    losses, _, of_layers = jax.jit(functools.partial(forms_of, task))(params, inputs)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert [layer.name for layer in task.layers] == list(task.blocks)
    assert set(of_layers) == set(params)
    for name, actual in of_layers.items():
        rows = rows_of(gradients[name])
        size = max(1.0, np.abs(rows).max())
        np.testing.assert_allclose(actual["squared_norm"], (rows**2).sum(1), rtol=2e-5, atol=1e-8)
        np.testing.assert_allclose(actual["absolute_norm"], np.abs(rows).sum(1), rtol=2e-5, atol=1e-7)
        assert jax.tree.structure(actual["weighted_sum"]) == jax.tree.structure(gradients[name])
        np.testing.assert_allclose(flat(actual["weighted_sum"]), WEIGHTS @ rows, rtol=1e-5, atol=1e-5 * size)
        np.testing.assert_allclose(rows_of(actual["per_sample"]), rows, rtol=1e-5, atol=1e-6 * size)

    rows = rows_of(gradients)
    norms = np.linalg.norm(rows, axis=1)
    clip_norm = float(np.median(norms))
    assert per_example.route(task, clip_norm) == "factored"

    @jax.jit
    def clipped(inputs):
        return per_example.weighted_sum(task, params, inputs, LABELS, WEIGHTS, clip_norm=clip_norm).gradient

    actual = flat(clipped(inputs))
    np.testing.assert_allclose(actual, (WEIGHTS * np.minimum(1.0, clip_norm / norms)) @ rows, rtol=2e-5, atol=2e-5)
    # A sample of weight 0 contributes exactly zero.
    np.testing.assert_array_equal(actual, flat(clipped(inputs.at[3].set(0))))
    assert np.abs(actual - flat(clipped(inputs.at[1].set(0)))).max() > 1e-4


@pytest.mark.quick_cases(1)
def test_factors_of_nodes_equal_those_of_each_node(case):
    task, params, inputs = case
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf]), params)
    batches, labels = jnp.stack([inputs, inputs[::-1]]), jnp.stack([LABELS, LABELS])
    actual = jax.jit(over_nodes(task.factors, task.node_loop))(both, batches, labels)
    of_one = jax.jit(task.factors)
    for node in range(2):
        own = jax.tree.map(lambda leaf, node=node: leaf[node], (both, batches, labels))
        assert_close(jax.tree.map(lambda leaf, node=node: leaf[node], actual), of_one(*own))


def test_errors_belong_to_the_summed_loss_and_only_the_first_layer_reads_the_sample():
    task, make = TASKS["mlp"]
    inputs, params = make(BATCH), jax.jit(task.init)(jax.random.key(3))
    _, factors, _ = jax.jit(functools.partial(forms_of, task))(params, inputs)
    last = params["dense_3"]
    probabilities = jax.nn.softmax(factors.inputs[-1] @ last["kernel"] + last["bias"][None, :])
    np.testing.assert_allclose(factors.errors[-1], probabilities - jax.nn.one_hot(LABELS, 10), atol=1e-6)
    assert [layer.input_is_sample for layer in task.layers] == [True, False, False]
    np.testing.assert_allclose(factors.inputs[0], np.asarray(inputs, np.float32).reshape(BATCH, 64) / 255, rtol=1e-6)
    lstm = bidirectional_lstm(3, 2).factored
    assert lstm is not None
    assert not lstm("lstm", True).input_is_sample, "its hidden states are among the factors"


# --- norms -------------------------------------------------------------------------------------------------------


def factored_form(layer):
    assert layer.factored is not None
    return layer.factored("layer", False)


def norms_of(factored):
    """Squared and absolute norms, compiled."""
    return jax.jit(lambda *pair: (factored.squared_norm(*pair), factored.absolute_norm(*pair)))


compiled = functools.cache(norms_of)
POSITIONS, SAMPLES = 16, 20


def of_conv(inputs, errors):
    rows, columns = (np.asarray(x, np.float64).reshape(SAMPLES, POSITIONS, -1) for x in (inputs, errors))
    return {"kernel": np.einsum("bpk,bpo->bko", rows, columns), "bias": columns.sum(axis=1)}


def of_lstm(inputs, errors):
    words, states = np.asarray(inputs[..., :4], np.float64), np.asarray(inputs[..., 4:], np.float64)
    states = states.reshape(SAMPLES, POSITIONS, 2, 4)
    return {
        "kernel": np.einsum("btf,btdv->bdfv", words, errors),
        "recurrent_kernel": np.einsum("btdu,btdv->bduv", states, errors),
        "bias": errors.sum(axis=1),
    }


# The factored form, shapes of a sample's inputs and errors, gradients by hand.
CANCELLING = {
    "conv, gram form": (factored_form(layers.conv(64, 64, (1, 1))), (4, 4, 64), (4, 4, 64), of_conv),
    "conv, direct form": (factored_form(layers.conv(2, 2, (1, 1))), (4, 4, 2), (4, 4, 2), of_conv),
    "lstm": (factored_form(bidirectional_lstm(4, 4)), (POSITIONS, 12), (POSITIONS, 2, 16), of_lstm),
    "embedding": (factored_form(embedding(3, 32)), None, (POSITIONS, 32), lambda _, errors: {"table": errors.sum(1)}),
    "scale and bias": (
        factored_scale_and_bias(lambda values: values)("norm", False),
        (POSITIONS, 8),
        (POSITIONS, 8),
        lambda inputs, errors: {"scale": (np.float64(inputs) * errors).sum(axis=1), "bias": errors.sum(axis=1)},
    ),
}


@pytest.mark.parametrize("name", CANCELLING)
@pytest.mark.parametrize("far", [1e-7, 1e-5, 1e-3])
def test_no_norm_is_below_the_gradients_where_its_terms_cancel(far, name):
    """Errors that alternate in sign over positions with equal inputs, against float64."""
    factored, input_shape, error_shape, by_hand = CANCELLING[name]

    def alike(shape):
        """The same numbers at every position."""
        channels = shape[len(shape) - 1 :] if shape[0] != POSITIONS else shape[1:]
        flat = jnp.broadcast_to(normal(SAMPLES, 1, *channels), (SAMPLES, POSITIONS, *channels))
        return flat.reshape(SAMPLES, *shape)

    signs = jnp.where(jnp.arange(POSITIONS) % 2 == 0, 1.0, -1.0)
    signs = signs.reshape(1, *((4, 4, 1) if error_shape[0] == 4 else (POSITIONS, *[1] * (len(error_shape) - 1))))
    errors = signs * alike(error_shape) * (1 + far * normal(SAMPLES, *error_shape))
    inputs = jnp.zeros((SAMPLES, POSITIONS), jnp.int32) if input_shape is None else alike(input_shape)
    squared, absolute = map(np.asarray, compiled(factored)(inputs, errors))
    exact = by_hand(np.asarray(inputs), np.asarray(errors, np.float64))
    for gradients in (exact, jax.jit(factored.per_sample)(inputs, errors)):
        rows = rows_of(gradients)
        assert np.all(squared >= (1 - 1e-6) * (rows**2).sum(axis=1))
        assert np.all(absolute >= (1 - 1e-6) * np.abs(rows).sum(axis=1))


def test_norms_stay_within_1e_4_without_cancellation():
    """White noise at many positions, in both ways to a norm: where the allowance for rounding is largest."""
    assert position_sums.uses_gram(8, 40 + 16, 64)
    assert not position_sums.uses_gram(128, 40 + 16, 64)
    lstm = factored_form(bidirectional_lstm(40, 16))
    for factored, inputs, errors in (
        (factored_form(layers.conv(1, 8, (5, 5))), normal(2, 28, 28, 1), normal(2, 28, 28, 8)),
        (factored_form(layers.conv(32, 64, (5, 5))), normal(2, 7, 7, 32), normal(2, 7, 7, 64)),
        *((lstm, normal(2, length, 72), normal(2, length, 2, 64)) for length in (8, 128)),
        (factored_form(embedding(50, 16)), tokens(2, 128, vocabulary=50), normal(2, 128, 16)),
    ):
        exact = rows_of(jax.jit(factored.per_sample)(inputs, errors))
        squared, absolute = map(np.asarray, compiled(factored)(inputs, errors))
        np.testing.assert_allclose(np.sqrt(squared) / np.linalg.norm(exact, axis=1), 1, atol=1e-4)
        np.testing.assert_allclose(absolute, np.abs(exact).sum(axis=1), rtol=1e-4)


@pytest.mark.parametrize("group_bytes", [1, 6000, 10**9], ids=["one by one", "two and two and one", "all at once"])
def test_norms_agree_in_groups_of_samples(group_bytes, monkeypatch):
    """As on an accelerator, against a CPU."""
    batches = [
        (factored_form(layers.conv(2, 3, (3, 3))), normal(5, 6, 5, 2), normal(5, 6, 5, 3)),
        (factored_form(bidirectional_lstm(3, 2)), normal(3, 5, 7), normal(3, 5, 2, 8)),
        (factored_form(embedding(6, 3)), tokens(3, 5), normal(3, 5, 3)),
    ]
    expected = [compiled(factored)(*batch) for factored, *batch in batches]
    monkeypatch.setattr(position_sums, "ACCELERATOR_GROUP_BYTES", group_bytes)
    for (factored, *batch), one_way in zip(batches, expected, strict=True):
        with tracing_for("gpu"):
            np.testing.assert_allclose(norms_of(factored)(*batch), one_way, rtol=1e-5)


def test_norms_and_sums_form_no_per_sample_gradients():
    def clipped(factored):
        def run(inputs, errors):
            norm = factored.squared_norm(inputs, errors) + factored.absolute_norm(inputs, errors)
            return factored.weighted_sum(inputs, errors, 1.0 / norm)

        return run

    dense = jax.make_jaxpr(clipped(factored_form(layers.dense(300, 200))))(normal(64, 300), normal(64, 200))
    assert max(out.aval.size for equation in dense.eqns for out in equation.outvars) <= 300 * 200
    table = jax.jit(clipped(factored_form(embedding(1000, 8)))).lower(tokens(64, 5), normal(64, 5, 8)).compile()
    memory = table.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 64 * 1000 * 8 * 4 / 4
