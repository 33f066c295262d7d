"""Classification tasks: the factors of MLPs and CNNs, and their networks against flax's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusals

from jaxfl.core import over_nodes
from jaxfl.models import classification, cnn, layers, mlp, sequential

RNG = np.random.default_rng(0)

MODELS = {
    "mlp": mlp((64, 7, 5, 10)),
    "cnn": cnn((8, 8, 1), channels=(4, 6), window=3, hidden=8),
}


def digits(*leading):
    images = jnp.asarray(RNG.integers(0, 256, size=(*leading, 8, 8)), jnp.uint8)
    return images, jnp.asarray(RNG.integers(0, 10, size=leading), jnp.int32)


@pytest.fixture(scope="module", params=MODELS, ids=list(MODELS))
def case(request):
    task = classification(MODELS[request.param])
    return task, jax.jit(task.init)(jax.random.key(3)), *digits(6)


def per_sample_gradients(task, params, inputs, labels):
    def one(image, label):
        return jax.grad(lambda p: task.loss(p, image[None], label[None])[0])(params)

    return jax.vmap(one)(inputs, labels)


def test_factors_agree_with_per_sample_gradients(case):
    task, params, inputs, labels = case
    weight = jnp.asarray(RNG.normal(size=6), jnp.float32)

    def everything(params, inputs, labels):
        losses, factors = task.factors(params, inputs, labels)
        of_layers = {
            layer.name: (
                layer.squared_norm(layer_input, error),
                layer.absolute_norm(layer_input, error),
                layer.weighted_sum(layer_input, error, weight),
                layer.per_sample(layer_input, error),
            )
            for layer, layer_input, error in zip(task.layers, factors.inputs, factors.errors, strict=True)
        }
        return losses, task.loss(params, inputs, labels), of_layers

    losses, expected_losses, of_layers = jax.jit(everything)(params, inputs, labels)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    expected = jax.jit(per_sample_gradients, static_argnums=0)(task, params, inputs, labels)
    assert [layer.name for layer in task.layers] == list(task.blocks)
    assert set(task.blocks) == set(params)
    for name, (squared_norm, absolute_norm, total, singles) in of_layers.items():
        kernel, bias = (np.asarray(expected[name][part]).reshape(6, -1) for part in ("kernel", "bias"))
        rows = np.concatenate([kernel, bias], axis=1)
        np.testing.assert_allclose(squared_norm, (rows**2).sum(1), rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(absolute_norm, np.abs(rows).sum(1), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(np.asarray(total["kernel"]).reshape(-1), np.asarray(weight) @ kernel, atol=1e-5)
        np.testing.assert_allclose(total["bias"], np.asarray(weight) @ bias, atol=1e-5)
        np.testing.assert_allclose(np.asarray(singles["kernel"]).reshape(6, -1), kernel, atol=1e-6)
        np.testing.assert_allclose(singles["bias"], bias, atol=1e-6)


def test_errors_belong_to_the_summed_loss(case):
    task, params, inputs, labels = case
    _, factors = jax.jit(task.factors)(params, inputs, labels)
    probabilities = jax.nn.softmax(sequential_logits(task, params, factors))
    expected = probabilities - jax.nn.one_hot(labels, 10)
    np.testing.assert_allclose(factors.errors[-1], expected, atol=1e-6)


def sequential_logits(task, params, factors):
    last = params[task.blocks[-1]]
    return factors.inputs[-1] @ last["kernel"] + last["bias"][None, :]


@pytest.mark.parametrize("node_loop", ["vmap", "map"])
@pytest.mark.quick_cases(1)
def test_factors_of_nodes_equal_those_of_each_node(case, node_loop):
    task, params, _, _ = case
    node_params = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, -leaf]), params)
    inputs, labels = digits(3, 4)
    losses, factors = jax.jit(over_nodes(task.factors, node_loop))(node_params, inputs, labels)
    factors_of_one = jax.jit(task.factors)
    for node in range(3):
        own = jax.tree.map(lambda leaf, node=node: leaf[node], node_params)
        own_losses, own_factors = factors_of_one(own, inputs[node], labels[node])
        np.testing.assert_allclose(losses[node], own_losses, rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(jax.tree.leaves(factors), jax.tree.leaves(own_factors), strict=True):
            np.testing.assert_allclose(ours[node], theirs, rtol=1e-5, atol=1e-5)


def test_only_the_first_layer_reads_the_sample():
    assert [layer.input_is_sample for layer in classification(mlp((64, 7, 5, 10))).layers] == [True, False, False]
    task = classification(mlp((64, 7, 10)))
    factors_of = task.factors
    assert factors_of is not None
    inputs, labels = digits(3)
    _, factors = jax.jit(lambda key: factors_of(task.init(key), inputs, labels))(jax.random.key(0))
    np.testing.assert_allclose(factors.inputs[0], np.asarray(inputs, np.float32).reshape(3, 64) / 255, rtol=1e-6)


def test_metrics_are_loss_and_accuracy():
    task = classification(mlp((64, 10)))
    inputs, labels = digits(20)
    params = task.init(jax.random.key(0))
    numbers = task.metrics(params, inputs, labels)
    logits = np.asarray(inputs, np.float32).reshape(20, 64) / 255 @ np.asarray(params["dense_1"]["kernel"])
    np.testing.assert_array_equal(numbers["accuracy"], logits.argmax(1) == np.asarray(labels))
    log_sum = np.log(np.exp(logits).sum(1))
    np.testing.assert_allclose(numbers["loss"], log_sum - logits[np.arange(20), np.asarray(labels)], rtol=1e-4)


def test_cnn_without_hidden_units_ends_in_the_dense_layer_that_follows_the_convolutions():
    params = jax.eval_shape(cnn(channels=(4, 8), hidden=None).init, jax.random.key(0))
    # By hand: 5x5 kernels 1 to 4 and 4 to 8 and their biases; 7 x 7 x 8 features to 10 classes.
    sizes = {name: sum(leaf.size for leaf in layer.values()) for name, layer in params.items()}
    assert sizes == {"conv_1": 25 * 4 + 4, "conv_2": 100 * 8 + 8, "dense_1": 392 * 10 + 10}
    names = [name for name, _ in cnn(channels=(4, 8), hidden=None).layers]
    assert names[-3:] == ["pool_2", "flatten", "dense_1"]


def test_node_loop_is_decided_when_the_task_is_built(monkeypatch):
    assert classification(MODELS["mlp"]).node_loop == "vmap"
    assert classification(MODELS["cnn"], node_loop="chunk:2").node_loop == "chunk:2"
    for platform, expected in (("cpu", "map"), ("gpu", "vmap")):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert classification(MODELS["cnn"]).node_loop == expected


def test_layers_start_from_keys_of_their_own():
    params = mlp((8, 8, 8)).init(jax.random.key(0))
    assert np.abs(params["dense_1"]["kernel"] - params["dense_2"]["kernel"]).max() > 0.01


def test_no_kernel_that_draws_parameters_makes_its_key_anew():
    """A hash has some 22 exclusive ors; LLVM takes seconds for kernels with those of a whole chain of keys."""
    text = jax.jit(MODELS["mlp"].init).lower(jax.random.key(0)).compile().as_text()
    assert text is not None
    assert max(part.count(" xor(") for part in text.split("\n\n")) < 30


test_bad_arguments_are_named = refusals(
    [
        (lambda: mlp((10,)), "widths"),
        (lambda: mlp((4, 0, 2)), "widths[1]"),
        (lambda: mlp((4, 2), activation="gelu"), "activation"),
        (lambda: cnn((28, 28)), "sample_shape"),  # pyright: ignore[reportArgumentType]
        (lambda: cnn((8, 8, 1), channels=(2, 2, 2, 2)), "channels"),
        (lambda: cnn(hidden=0), "hidden"),
        (lambda: cnn(activation="gelu"), "activation"),
        (lambda: sequential([("a", layers.dense(2, 2)), ("a", layers.dense(2, 2))]), "layers"),
        (lambda: sequential([("a", layers.relu())]), "layers"),
    ]
)
