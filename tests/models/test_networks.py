"""Networks and their tasks: where they start, names and numbers of layers, metrics, node loops, parts in a row."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_close, normals

from jaxfl.core import Variables
from jaxfl.core.tree import size
from jaxfl.models import (
    Model,
    bilstm_classifier,
    binary_classification,
    classification,
    cnn,
    mlp,
    resnet18,
    resnet20,
)

RNG = np.random.default_rng(0)
normal = normals(RNG)
KEY = jax.random.key(1)
SHAPE = (7, 6, 3)  # an odd height: strides of 2 then leave a rest
SMALL: dict[str, Any] = {"widths": (4, 6), "blocks": (1, 1)}
ONE_BLOCK: dict[str, Any] = {"widths": (4,), "blocks": (1,)}
PLAIN, TRAINED = resnet18(SHAPE, 5, **SMALL, groups=2), resnet20(SHAPE, 5, **ONE_BLOCK)
TASK = classification(PLAIN)


def test_kernels_start_from_keys_of_their_own_and_biases_and_norms_as_identity():
    params = jax.jit(resnet18((4, 4, 3), widths=(96, 96), blocks=(1, 1)).init)(KEY)
    assert params["block_2_1"].keys() - params["block_1_1"].keys() == {"conv_shortcut", "norm_shortcut"}
    kernels = [params[block][conv]["kernel"] for block in ("block_1_1", "block_2_1") for conv in ("conv_1", "conv_2")]
    for kernel in kernels:  # 82,944 draws: the relative standard error of their variance is about half a percent
        np.testing.assert_allclose(np.var(kernel), 2 / (9 * 96), rtol=0.03)  # He
    dense = jax.jit(mlp((96, 96, 96)).init)(KEY)
    kernels += [layer["kernel"] for layer in dense.values()]
    np.testing.assert_allclose(np.var(kernels[-1]), 1 / 96, rtol=0.06)  # LeCun
    flattened = [np.ravel(kernel)[:1000] for kernel in kernels]
    assert all(np.abs(a - b).max() > 0.01 for i, a in enumerate(flattened) for b in flattened[:i])
    for norm in (params["stem"]["norm"], params["block_2_1"]["norm_shortcut"]):
        assert norm["scale"].tolist() == [1.0] * 96
        assert not norm["bias"].any()
    assert not dense["dense_1"]["bias"].any()


def test_no_kernel_that_draws_parameters_makes_its_key_anew():
    """A hash has some 22 exclusive ors; LLVM takes seconds for kernels with those of a whole chain of keys."""
    text = jax.jit(mlp((64, 7, 5, 10)).init).lower(KEY).compile().as_text()
    assert text is not None
    assert max(part.count(" xor(") for part in text.split("\n\n")) < 30


def test_blocks_are_in_order():
    assert classification(mlp((4, 3, 2))).blocks == ("dense_1", "dense_2")
    model = cnn(channels=(4, 8), hidden=None)
    assert [name for name, _ in model.layers][-3:] == ["pool_2", "flatten", "dense_1"]
    # By hand: 5x5 kernels 1 to 4 and 4 to 8 and their biases; 7 x 7 x 8 features to 10 classes.
    sizes = {name: size(layer) for name, layer in jax.eval_shape(model.init, KEY).items()}
    assert sizes == {"conv_1": 25 * 4 + 4, "conv_2": 100 * 8 + 8, "dense_1": 392 * 10 + 10}
    trained = classification(resnet20())
    assert trained.blocks == ("stem", *(f"block_{i}_{j}" for i in (1, 2, 3) for j in (1, 2, 3)), "dense")
    assert trained.train_loss is not None
    for task in (trained, TASK):
        assert (task.layers, task.factors) == ((), None)
        assert set(task.blocks) == set(jax.eval_shape(task.init, KEY))
    assert TASK.train_loss is None


def test_metrics_are_loss_and_accuracy():
    task = classification(mlp((18, 10)))
    inputs, labels = RNG.integers(0, 256, (20, 18), np.uint8), jnp.asarray(RNG.integers(0, 10, 20), jnp.int32)
    params = jax.jit(task.init)(KEY)
    numbers = jax.jit(task.metrics)(params, jnp.asarray(inputs), labels)
    logits = np.asarray(inputs, np.float32) / 255 @ np.asarray(params["dense_1"]["kernel"])
    np.testing.assert_array_equal(numbers["accuracy"], logits.argmax(1) == np.asarray(labels))
    of_int64 = task.metrics(params, inputs, np.asarray(labels, np.int64))  # pyright: ignore[reportArgumentType]; no warning
    np.testing.assert_array_equal(of_int64["accuracy"], numbers["accuracy"])
    log_sum = np.log(np.exp(logits).sum(1))
    np.testing.assert_allclose(numbers["loss"], log_sum - logits[np.arange(20), np.asarray(labels)], rtol=1e-4)


def test_node_loop_is_decided_when_the_task_is_built(monkeypatch):
    assert classification(mlp((4, 2))).node_loop == "vmap"
    assert classification(cnn(), node_loop="chunk:2").node_loop == "chunk:2"
    for platform, expected in (("cpu", "map"), ("gpu", "vmap")):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        for task in (classification(cnn()), classification(PLAIN), binary_classification(bilstm_classifier())):
            assert task.node_loop == expected


def initial(model):
    """(parameters, state), compiled as one program."""
    return jax.jit(lambda key: (model.init(key), model.init_state()))(KEY)


TRAIN = jax.jit(TRAINED.apply_train)


def test_layers_in_a_row_are_a_model_and_the_parts_of_a_cut_are_the_whole():
    (params, state), images, ones = initial(TRAINED), normal(4, *SHAPE), jnp.ones(4)
    assert [name for name, _ in TRAINED.layers] == ["images", "stem", "block_1_1", "mean", "dense"]
    before, after = Model(TRAINED.layers[:2]), Model(TRAINED.layers[2:])

    @jax.jit
    def in_two(params, state):
        between, new_state = before.apply_train(params, state, images, ones, KEY)
        outputs, rest = after.apply_train(params, state, between, ones, KEY)
        evaluated = after.apply(Variables(params, state), before.apply(Variables(params, state), images))
        return outputs, {**new_state, **rest}, evaluated

    whole = TRAIN(params, state, images, ones, KEY)
    assert_close(in_two(params, state), (*whole, jax.jit(TRAINED.apply)(Variables(params, state), images)))
    assert set(jax.eval_shape(before.init, KEY)) == {"stem"}
    static = jax.jit(resnet20(SHAPE, 5, **ONE_BLOCK, norm="static").apply_train)(params, state, images, ones, KEY)
    assert_close(static, (whole[0], state))
