"""ResNet-20 with batch normalization against the same network of flax layers, its shortcuts, and cut in two."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_resnet import ResNet
from helpers import assert_close, refusals

from jaxfl.core import Variables, over_nodes
from jaxfl.models import Model, classification, resnet18, resnet20

RNG = np.random.default_rng(0)
KEY = jax.random.key(1)
SHAPE = (5, 4, 3)  # an odd height: strides of 2 then leave a rest


def tiny(**options):
    return resnet20(SHAPE, 5, widths=(3, 4), blocks=(1, 1), **options)


SHORTCUTS = {
    "projection_all": ("projection", "projection"),
    "projection": ("identity", "projection"),
    "padding": ("identity", "padding"),
}


def flax_network(shortcut):
    """The network of `tiny` made of flax's own layers."""
    rngs = nnx.Rngs(0)
    return ResNet((3, 4), SHORTCUTS[shortcut], functools.partial(nnx.BatchNorm, momentum=0.9, rngs=rngs), rngs)


def randomized(tree, low):
    """Numbers away from where training starts."""
    return jax.tree.map(lambda leaf: jnp.asarray(RNG.uniform(low, 1.0, leaf.shape), jnp.float32), tree)


def samples(count):
    return jnp.asarray(RNG.uniform(size=(count, *SHAPE)), jnp.float32), jnp.asarray(
        RNG.normal(size=(count, 5)), jnp.float32
    )


@pytest.mark.parametrize("shortcut", ["projection_all", "padding", pytest.param("projection", marks=pytest.mark.slow)])
@pytest.mark.quick_cases(1)
def test_equals_the_same_network_of_flax_layers_in_value_and_in_gradient(shortcut):
    model = tiny(shortcut=shortcut)
    params = randomized(jax.eval_shape(model.init, KEY), -1.0)
    state = randomized(jax.eval_shape(model.init_state), 0.5)
    images, direction = samples(6)
    structure = nnx.graphdef(nnx.eval_shape(lambda: flax_network(shortcut)))

    def ours(params, images):
        logits, new_state = model.apply_train(params, state, images, jnp.ones(6), KEY)
        evaluated = model.apply(Variables(params, state), images)
        return jnp.sum(logits * direction), (logits, new_state, evaluated)

    def theirs(params, images):
        module = nnx.merge(structure, nnx.State(params), nnx.State(state))
        if hasattr(nnx, "view"):
            evaluated = nnx.view(module, use_running_average=True)(images)
        else:  # an older flax
            module.eval()
            evaluated = module(images)
            module.train()
        logits = module(images)
        new_state = nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))
        return jnp.sum(logits * direction), (logits, new_state, evaluated)

    found, expected = (
        jax.jit(jax.value_and_grad(fn, argnums=(0, 1), has_aux=True))(params, images) for fn in (ours, theirs)
    )
    assert_close(found, expected)
    # Statistics that are not tracked stay as they are; the network is the same.
    logits, kept = jax.jit(tiny(shortcut=shortcut, norm="static").apply_train)(params, state, images, jnp.ones(6), KEY)
    assert_close((logits, kept), (expected[0][1][0], state))


def initial(model):
    """(parameters, state), compiled as one program."""
    return jax.jit(lambda key: (model.init(key), model.init_state()))(KEY)


MODEL = tiny()
TRAIN = jax.jit(MODEL.apply_train)


def test_layers_in_a_row_are_a_model_and_the_parts_of_a_cut_are_the_whole():
    (params, state), (images, _) = initial(MODEL), samples(4)
    names = [name for name, _ in MODEL.layers]
    assert names == ["images", "stem", "block_1_1", "block_2_1", "mean", "dense"]
    before, after = Model(MODEL.layers[:3]), Model(MODEL.layers[3:])

    @jax.jit
    def in_two(params, state):
        between, new_state = before.apply_train(params, state, images, jnp.ones(4), KEY)
        outputs, rest = after.apply_train(params, state, between, jnp.ones(4), KEY)
        evaluated = after.apply(Variables(params, state), before.apply(Variables(params, state), images))
        return outputs, {**new_state, **rest}, evaluated

    whole = TRAIN(params, state, images, jnp.ones(4), KEY)
    assert_close(in_two(params, state), (*whole, jax.jit(MODEL.apply)(Variables(params, state), images)))
    assert set(jax.eval_shape(before.init, KEY)) == {"stem", "block_1_1"}


@pytest.mark.parametrize("node_loop", ["vmap", "map"])
@pytest.mark.quick_cases(1)
def test_padding_never_counts_at_any_node(node_loop):
    (params, state), (images, _) = initial(MODEL), samples(4)
    weights = jnp.array([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]])
    other = images.at[2:].set(1.0)
    run = jax.jit(over_nodes(lambda x, w: MODEL.apply_train(params, state, x, w, KEY), node_loop))
    outputs, new_state = run(jnp.stack([images, other]), weights)
    assert_close(
        (outputs[0], jax.tree.map(lambda leaf: leaf[0], new_state)), TRAIN(params, state, images, jnp.ones(4), KEY)
    )
    alone = TRAIN(params, state, images[jnp.array([0, 1, 0, 1])], jnp.ones(4), KEY)  # the same statistics
    assert_close((outputs[1, :2], jax.tree.map(lambda leaf: leaf[1], new_state)), (alone[0][:2], alone[1]))


def test_the_task_has_its_blocks_in_order_and_no_factored_form():
    task = classification(resnet20())
    assert task.blocks == ("stem", *(f"block_{i}_{j}" for i in (1, 2, 3) for j in (1, 2, 3)), "dense")
    assert (task.layers, task.factors) == ((), None)
    assert task.train_loss is not None
    assert classification(resnet20(norm="group")).train_loss is None


def test_resnet18_takes_batch_normalization_too():
    model = resnet18(SHAPE, 5, widths=(3, 4), blocks=(1, 1), norm="batch")
    (params, state), (images, _) = initial(MODEL), samples(4)
    for name in ("conv_shortcut", "norm_shortcut"):  # its first stage keeps the shape, and has the identity
        params["block_1_1"].pop(name)
        state["block_1_1"].pop(name, None)
    found = jax.jit(model.apply_train)(params, state, images, jnp.ones(4), KEY)
    expected = jax.jit(tiny(shortcut="projection").apply_train)(params, state, images, jnp.ones(4), KEY)
    assert_close(found, expected)


test_bad_arguments_are_named = refusals(
    [
        (lambda: resnet20(norm="layer"), "norm"),
        (lambda: resnet18(norm="layer"), "norm"),
        (lambda: resnet20(shortcut="none"), "shortcut"),
        (lambda: resnet20(widths=(8, 16)), "blocks"),
        (lambda: resnet20(widths=(8, 4, 16), shortcut="padding"), "widths"),
        (lambda: resnet20(norm="group", groups=7), "widths[0]"),
        (lambda: resnet20((0, 32, 3)), "height"),
    ]
)
