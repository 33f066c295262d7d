# pyright: reportArgumentType=false
"""Flax modules of which a part trains: what is frozen is neither clipped, perturbed, counted nor sent."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import equations, refused
from problems import Problem, uneven_data
from registry import REGISTRY

import jaxfl
from jaxfl import gradients, graphs, models, training

KEY, RNG = jax.random.key(0), np.random.default_rng(0)
INPUTS, LABELS = RNG.normal(size=(40, 4)).astype("float32"), RNG.integers(0, 2, 40).astype("int32")
DATA = jaxfl.federate(INPUTS, LABELS, np.arange(40).reshape(2, 20))
HEAD = 8 * 2 + 2


class Network(nnx.Module):
    """A body of 40 numbers, whose gradients are larger than those of the head's 18."""

    def __init__(self, rngs, norm=False):
        self.body, self.head = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs) if norm else None

    def __call__(self, inputs):
        hidden = jnp.sin(self.body(10 * inputs))
        return self.head(hidden if self.norm is None else self.norm(hidden))


def is_head(path, value):
    return "head" in path


TASK = jaxfl.from_flax(Network, trainable=is_head)


def with_head(params):
    """The whole module of constants and a trained head."""
    module = Network(nnx.Rngs(0))
    nnx.update(module, nnx.State(params))
    return module


def length(tree):
    """L2 norm of all numbers."""
    return float(np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in jax.tree.leaves(tree))))


def one_round(learner, task=TASK):
    state, info = jax.jit(learner.round)(KEY, learner.init(KEY, DATA), DATA)
    jaxfl.check_info(info)
    return learner.node_params(state), info


def test_a_clipped_head_moves_as_in_a_plain_loop_and_only_its_numbers_are_sent():
    clients = jaxfl.local_steps(1, batch_size=20, optimizer=optax.sgd(1.0), clip_norm=1.0)
    actual, info = one_round(jaxfl.fed_avg(TASK, clients=clients, num_active=2))
    start = TASK.init(jaxfl.core.purpose_key(KEY, jaxfl.core.Purpose.INIT))

    def loss(head, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(with_head(head)(x[None])[0], y)

    slopes = [jax.grad(loss)(start, x, y) for x, y in zip(INPUTS, LABELS, strict=True)]
    clipped = [jax.tree.map(partial(jnp.multiply, 1 / max(length(slope), 1.0)), slope) for slope in slopes]
    moved = jax.tree.map(lambda w, *g: w - sum(g) / 40, start, *clipped)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, rtol=2e-4, atol=1e-5), actual, moved)
    distance = length(jax.tree.map(lambda a, b: a[0] - b, actual, start))

    frozen = {"body": True, "head": False}
    idiom = optax.chain(optax.sgd(1.0), optax.masked(optax.set_to_zero(), frozen))
    whole = jaxfl.from_flax(Network)
    clients = jaxfl.local_steps(1, batch_size=20, optimizer=idiom, clip_norm=1.0)
    masked, of_all = one_round(jaxfl.fed_avg(whole, clients=clients, num_active=2))
    first = whole.init(jaxfl.core.purpose_key(KEY, jaxfl.core.Purpose.INIT))["head"]
    short = length(jax.tree.map(lambda a, b: a[0] - b, masked["head"], first))
    assert short < 0.3 * distance  # what docs/sharp_edges.md warns of
    assert info.bits_sent.tolist() == [32.0 * HEAD] * 2
    assert of_all.bits_sent.tolist() == [32.0 * 58] * 2


PRIVATE = {"clip_norm": 1.0, "noise": jaxfl.gaussian(0.05)}


def layered(*widths):
    return models.classification(models.mlp(widths, activation="tanh"))


WIDE = layered(17, 11, 5, 3).init(KEY)


def behind_the_first(hidden):
    return jaxfl.train_only(layered(17, 11, hidden, 3), ("dense_2", "dense_3"), constants=WIDE)


def without_the_first(hidden):
    def init(key):
        return {f"dense_{k - 1}": behind_the_first(hidden).init(key)[f"dense_{k}"] for k in (2, 3)}

    return layered(11, hidden, 3)._replace(init=init)


def products(jaxpr, shape):
    """How many arrays of this shape, or of its transpose, behind any axes, a program multiplies out."""
    made = [v.aval.shape for e in equations(jaxpr) if e.primitive.name == "dot_general" for v in e.outvars]
    return sum(one[-2:] in (shape, shape[::-1]) for one in made)


@pytest.mark.parametrize("name", REGISTRY)
def test_a_part_trains_as_the_smaller_network_on_the_outputs_of_the_frozen_layer(name):
    """In every algorithm: the same numbers, norms, noise, bits and counts, and no gradient of the frozen layer."""
    data, row, ends = uneven_data(features=17), REGISTRY[name], []
    outputs = jnp.tanh(data.inputs @ WIDE["dense_1"]["kernel"] + WIDE["dense_1"]["bias"][None])
    for make_task, own in ((behind_the_first, data), (without_the_first, data._replace(inputs=outputs))):
        problem = Problem(row, row.example(make_task), own)
        learner = problem.algorithm(**({"clip_norm": 0.5} if row.noise_draws else {}))
        state = jax.jit(lambda key, learner=learner, own=own: learner.init(key, own))(KEY)
        traced = jax.make_jaxpr(learner.round)(KEY, state, own)
        assert products(traced, (17, 11)) == 0
        assert products(traced, (11, 5)) > 0 or not row.noise_draws
        step = jax.jit(learner.round)
        infos = []
        for _ in range(2):
            state, info = step(KEY, state, own)
            infos.append({k: v for k, v in info.named().items() if k != "forward_evaluations"})
        ends.append((jax.tree.leaves(state), infos))
    for part, smaller in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(part, smaller, rtol=2e-4, atol=2e-5)


def test_blocks_filters_and_their_mistakes():
    whole = layered(17, 11, 5, 3)
    biases = jaxfl.train_only(whole, lambda path, leaf: path.endswith("bias") and leaf.ndim == 1)
    assert sum(leaf.size for leaf in jax.tree.leaves(biases.init(KEY))) == 11 + 5 + 3
    assert (biases.blocks, biases.layers, biases.part) == ((), (), None)
    head = jaxfl.train_only(whole, "dense_3")
    assert head.blocks == ("dense_3",) == tuple(layer.name for layer in head.layers)
    zeros = jaxfl.train_only(whole, "dense_3", constants=jax.tree.map(np.zeros_like, WIDE))
    assert zeros.logits is not None
    np.testing.assert_array_equal(zeros.logits({"dense_3": WIDE["dense_3"]}, np.ones((2, 17), "float32")), 0.0)
    front, data = jaxfl.train_only(whole, "dense_1"), uneven_data(features=17)
    learner = jaxfl.d_psgd(front, graph=graphs.ring(5), gradient=jaxfl.mini_batch(2, clip_norm=1.0), step_size=0.1)
    traced = jax.make_jaxpr(learner.round)(KEY, jax.eval_shape(lambda key: learner.init(key, data), KEY), data)
    assert products(traced, (17, 11)) > 0 == products(traced, (11, 5))  # through the layers behind, and not by them
    refused(lambda: jaxfl.train_only(whole, "dense_4"), "trained", "dense_1, dense_2, dense_3")
    refused(lambda: jaxfl.train_only(whole, lambda path, leaf: False), "trained", "got none")
    refused(lambda: jaxfl.train_only(whole, "dense_3", constants=head.init(KEY)), "constants", "dense_1/bias")
    refused(lambda: jaxfl.train_only(jaxfl.from_flax(partial(Network, norm=True)), "head"), "task", "norm")


def test_what_is_frozen_is_the_same_for_all_seeds_and_comes_from_make_module():
    pretrained = Network(nnx.Rngs(7))

    def make_module(rngs):
        module = Network(rngs)
        module.body = pretrained.body
        return module

    task = jaxfl.from_flax(make_module, trainable=is_head)
    first, other = task.init(KEY), task.init(jax.random.key(1))
    assert not np.array_equal(first["head"]["kernel"], other["head"]["kernel"])
    nnx.update(pretrained, nnx.State(first))
    expected = jaxfl.core.cross_entropy(pretrained(INPUTS), LABELS)
    np.testing.assert_allclose(jax.jit(task.loss)(first, INPUTS, LABELS), expected, rtol=1e-5)
    within = jax.jit(lambda params: jaxfl.from_flax(make_module, trainable=is_head).loss(params, INPUTS, LABELS))
    np.testing.assert_allclose(within(first), expected, rtol=1e-5)


def test_a_frozen_normalization_keeps_its_statistics_and_trains_under_a_clip_norm():
    make_module = partial(Network, norm=True)
    task = jaxfl.from_flax(make_module, trainable=is_head)
    assert task.train_loss is None
    module = make_module(nnx.Rngs(0))
    module.eval()
    params = task.init(KEY)
    nnx.update(module, nnx.State(params))
    np.testing.assert_allclose(
        task.loss(params, INPUTS, LABELS), jaxfl.core.cross_entropy(module(INPUTS), LABELS), rtol=1e-6
    )
    clients = jaxfl.local_steps(1, batch_size=4, optimizer=optax.sgd(0.1), **PRIVATE)
    one_round(jaxfl.fed_avg(task, clients=clients, num_active=2))
    trains_body = jaxfl.from_flax(make_module, trainable=lambda path, value: "norm" in path)
    assert trains_body.train_loss is not None


def test_filters_of_nnx_pick_what_trains():
    class Adapted(nnx.Module):
        def __init__(self, rngs):
            self.first, self.head = nnx.LoRALinear(4, 8, lora_rank=2, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

        def __call__(self, inputs):
            return self.head(self.first(inputs))

    task = jaxfl.from_flax(Adapted, trainable=nnx.LoRAParam)
    assert jax.tree.map(jnp.shape, task.init(KEY)) == {"first": {"lora": {"lora_a": (4, 2), "lora_b": (2, 8)}}}
    both = jaxfl.from_flax(Adapted, trainable=nnx.Any(nnx.LoRAParam, nnx.PathContains("head")))
    assert sorted(both.init(KEY)) == ["first", "head"]
    refused(lambda: jaxfl.from_flax(Adapted, trainable=nnx.BatchStat), "trainable", "LoRAParam")
    bare = nnx.bridge.ToNNX
    refused(lambda: jaxfl.from_flax(lambda rngs: bare(_linen(), rngs=rngs)), "make_module", "lazy_init")


def _linen():
    from flax import linen

    return linen.Dense(2)


def test_a_run_leaves_the_trained_part(tmp_path):
    learner = jaxfl.d_psgd(TASK, graph=graphs.ring(2), gradient=gradients.mini_batch(4, clip_norm=1.0), step_size=0.1)
    case = training.Case(
        algorithm=lambda numbers: learner,
        task=TASK,
        test=training.evaluation_set(INPUTS, LABELS, 20),
        data=lambda seed: DATA,
        seeds=(0,),
        num_rounds=2,
        evaluate_every=2,
    )
    training.train({"head": case}, run=training.open_run(tmp_path / "run", {}), quiet=True)
    params = training.load_params(tmp_path / "run", "head", seed=0, node=0)
    assert jax.tree.map(np.shape, params) == {"head": {"bias": (2,), "kernel": (8, 2)}}
    assert with_head(params)(INPUTS).shape == (40, 2)
