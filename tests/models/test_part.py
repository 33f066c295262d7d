"""Training some blocks of a task: `Task.part`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_close

from jaxfl.core import Variables
from jaxfl.models import bilstm_classifier, binary_classification, classification, cnn, layers, sequential

KEY = jax.random.key(3)
MODEL = sequential(
    [
        ("dense_1", layers.dense(6, 8)),
        ("norm_1", layers.batch_norm(8)),
        ("relu_1", layers.relu()),
        ("dropout_1", layers.dropout(0.25)),
        ("relu_2", layers.relu()),
        ("dense_2", layers.dense(8, 7)),
        ("norm_2", layers.batch_norm(7)),
        ("dropout_2", layers.dropout(0.5)),
        ("dense_3", layers.dense(7, 3)),
    ]
)
TASK = classification(MODEL)
WEIGHTS = jnp.array([1.0, 1.0, 0.0, 1.0, 1.0])


@functools.cache
def problem():
    """Parameters and statistics, all different from the first ones, inputs and labels."""
    params, state = jax.jit(lambda key: (MODEL.init(key), MODEL.init_state()))(KEY)
    rng = np.random.default_rng(0)
    params, state = jax.tree.map(
        lambda leaf: jnp.asarray(np.abs(leaf + 0.3 * rng.normal(size=leaf.shape)), jnp.float32), (params, state)
    )
    return params, state, jnp.asarray(rng.normal(size=(5, 6)), jnp.float32), jnp.array([0, 2, 1, 1, 0], jnp.int32)


def part_of(trained, task=TASK) -> Any:
    assert task.part is not None
    return task.part(trained)


def split(params, part):
    own = {name: params[name] for name in part.trained}
    return own, {name: values for name, values in params.items() if name not in own}


def test_a_part_of_all_blocks_is_the_task():
    params, state, inputs, labels = problem()
    part = part_of(TASK.blocks)
    assert (part.features, part.features_train) == (None, None)
    actual = jax.jit(lambda p: part.train_loss(p, {}, state, inputs, labels, WEIGHTS, KEY))(params)
    whole = TASK.train_loss
    assert whole is not None
    assert_close(actual, jax.jit(lambda p: whole(p, state, inputs, labels, WEIGHTS, KEY))(params))


def test_any_part_has_the_tasks_losses_and_its_gradients_by_what_it_trains():
    """Behind features in training mode, where nothing behind a trained block is frozen."""
    params, state, inputs, labels = problem()
    part = part_of(("dense_3", "dense_2", "norm_2"))
    assert part.trained == ("dense_2", "norm_2", "dense_3")

    @jax.jit
    def both(params):
        own, frozen = split(params, part)
        features = part.features_train(params, state, inputs, WEIGHTS, KEY)

        def of_part(own):
            losses, new = part.train_loss(own, frozen, state, features, labels, WEIGHTS, KEY)
            return losses @ WEIGHTS, (losses, new["norm_2"])

        def of_task(params):
            assert TASK.train_loss is not None
            losses, new = TASK.train_loss(params, state, inputs, labels, WEIGHTS, KEY)
            return losses @ WEIGHTS, (losses, new["norm_2"])

        slopes, rest = jax.grad(of_part, has_aux=True)(own)
        task_slopes, task_rest = jax.grad(of_task, has_aux=True)(params)
        return (slopes, rest), ({name: task_slopes[name] for name in own}, task_rest)

    assert_close(*both(params))


def test_frozen_blocks_evaluate_and_keep_their_statistics():
    """In front of the trained block and behind it; dropout behind the cut still draws, by the layers' own numbers."""
    params, state, inputs, labels = problem()
    part = part_of(("dense_2",))

    @jax.jit
    def both(params):
        own, frozen = split(params, part)
        features = part.features(params, state, inputs)
        actual = part.train_loss(own, frozen, state, features, labels, WEIGHTS, KEY)

        def run(name, values):
            layer = dict(MODEL.layers)[name]
            if layer.init is None and layer.train is not None:
                key = jax.random.fold_in(KEY, [name for name, _ in MODEL.layers].index(name))
                return layer.train(None, {}, values, WEIGHTS, key)[0]
            own = params.get(name)
            return layer.apply(own if layer.train is None else Variables(own, state[name]), values)

        hidden = run("relu_1", run("norm_1", run("dense_1", inputs)))
        logits = functools.reduce(lambda values, name: run(name, values), [n for n, _ in MODEL.layers[3:]], hidden)
        losses = -jax.nn.log_softmax(logits)[jnp.arange(5), labels]
        return (features, *actual), (hidden, losses, state)

    assert_close(*both(params))


def test_features_end_in_front_of_dropout_and_behind_pooling():
    """Layers with neither parameters nor random draws run once; random draws are made in each step."""
    task = classification(cnn((8, 8, 1), channels=(2, 3), window=3, hidden=5, num_classes=4))
    part = part_of(("dense_1", "dense_2"), task)
    params, images = jax.eval_shape(task.init, KEY), jax.ShapeDtypeStruct((5, 8, 8, 1), jnp.uint8)
    features = jax.eval_shape(lambda p, x: part.features(p, None, x), params, images)
    assert features.shape == (5, 2 * 2 * 3)
    text = binary_classification(bilstm_classifier(11, 4, embedding_features=6, units=2))
    part, words = part_of(("lstm", "dense"), text), jnp.array([[1, 2, 3, 4]])

    @jax.jit
    def embedded(key):
        params = text.init(key)
        actual = part.features(params, {}, words), part.features_train(params, {}, words, jnp.ones(1), key)
        return actual, params["embedding"]["table"][words]

    actual, expected = embedded(KEY)
    for features in actual:
        np.testing.assert_array_equal(features, expected)


def test_a_part_computes_in_the_tasks_type():
    params, state, inputs, labels = problem()
    part = part_of(("dense_2", "norm_2", "dense_3"), classification(MODEL, compute_dtype="bfloat16"))

    def run(params):
        own, frozen = split(params, part)
        features = part.features(params, state, inputs)
        return features, *part.train_loss(own, frozen, state, features, labels, WEIGHTS, KEY)

    features, losses, new = jax.eval_shape(run, params)
    assert (features.dtype, losses.dtype, new["norm_2"]["var"].dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
