"""Products on which a clipped norm depends: of the highest precision, and in float32, in the accelerators' form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, equations, normals

from jaxfl.core import from_functions
from jaxfl.core.platform import tracing_for
from jaxfl.gradients import per_example
from jaxfl.models import classification, layers, sequential
from jaxfl.models.kernels import norms
from jaxfl.models.kernels.windows import geometry
from jaxfl.models.lstm import bidirectional_lstm
from jaxfl.models.text import embedding

HIGHEST = jax.lax.Precision.HIGHEST
normal = normals(np.random.default_rng(0))
BATCH, NODES = 5, 3
IMAGES = (BATCH, 5, 5, 8)


def with_head(first, outputs):
    """A layer, and a dense one that makes classes of its outputs."""
    return sequential([("layer", first), ("flat", layers.reshape((outputs,))), ("out", layers.dense(outputs, 3))])


MODELS = {  # model, its inputs
    "dense": (with_head(layers.dense(7, 4), 4), normal(BATCH, 7)),
    "conv": (with_head(layers.conv(8, 4, (3, 3)), 100), normal(*IMAGES)),
    "conv, gram form": (with_head(layers.conv(8, 16, (3, 3), strides=(2, 2)), 144), normal(*IMAGES)),
    "group norm": (with_head(layers.group_norm(8, 2), 200), normal(*IMAGES)),
    "embedding": (with_head(embedding(6, 4), 28), jnp.ones((BATCH, 7), jnp.int32)),
    "lstm": (with_head(bidirectional_lstm(3, 4), 8), normal(BATCH, 7, 3)),
    "lstm, gram form": (with_head(bidirectional_lstm(30, 4), 8), normal(BATCH, 3, 30)),
}


def products(program):
    """Every product of a program, inside of others, too."""
    return (each for each in equations(program) if each.primitive.name in ("dot_general", "conv_general_dilated"))


def of_given_factors(task, factors):
    """The task with these factors, so that no product of a forward or backward pass is left."""
    return task._replace(factors=lambda params, inputs, labels: (jnp.ones(len(inputs)), factors))


def clipped(task, kind, clip_order):
    """(params, inputs, labels, factors, weights) -> clipped gradients, or their sum."""

    def run(params, inputs, labels, factors, weights):
        arguments = (of_given_factors(task, factors), params, inputs, labels)
        if kind == "sum":
            return per_example.weighted_sum(*arguments, weights, clip_norm=0.5, clip_order=clip_order)
        return per_example.per_sample(*arguments, clip_norm=0.5, clip_order=clip_order)

    return run


def alone(run, arguments):
    return jax.make_jaxpr(run)(*arguments)


def over_nodes(run, arguments):
    """Mapped, and in a loop that is traced before it is mapped."""
    looped = lambda *one: jax.lax.map(lambda number: run(*one), jnp.arange(2))  # noqa: E731
    return jax.make_jaxpr(jax.vmap(looped))(*jax.tree.map(lambda leaf: jnp.stack([leaf] * NODES), arguments))


@pytest.mark.parametrize(("clip_order", "dtype"), [(1, "float32"), (2, "bfloat16")])
@pytest.mark.parametrize("kind", ["sum", "samples"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.quick_cases(3)
def test_every_product_of_norms_and_clipped_sums_is_of_the_highest_precision(name, kind, clip_order, dtype):
    model, inputs = MODELS[name]
    with tracing_for("gpu"):
        task = classification(model, preprocess=lambda inputs: inputs, compute_dtype=dtype)
        params, labels = task.init(jax.random.key(0)), jnp.zeros(BATCH, jnp.int32)
        assert task.factors is not None
        arguments = params, inputs, labels, task.factors(params, inputs, labels)[1], jnp.ones(BATCH)
        for traced in (alone, over_nodes):
            measured = list(products(traced(clipped(task, kind, clip_order), arguments).jaxpr))
            assert measured or (kind == "samples" and name in ("dense", "group norm"))
            for equation in measured:
                assert equation.params["precision"] == (HIGHEST, HIGHEST), equation
                types = {variable.aval.dtype for variable in (*equation.invars, *equation.outvars)}
                assert types == {jnp.dtype("float32")}


@pytest.mark.parametrize("strides", [(1, 1), (2, 1)])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.quick_cases(1)
def test_the_sum_over_a_convolutions_samples_is_the_same_on_every_platform(strides, padding):
    geom = geometry((6, 5), (3, 2), strides, padding)
    inputs, errors = normal(4, 6, 5, 3), normal(4, *geom.output_size, 7)
    measured = {}
    for platform in ("cpu", "gpu"):
        with tracing_for(platform):
            measured[platform] = jax.jit(lambda x, e: norms.summed(x, e, geom))(inputs, errors)
    assert_close(measured["gpu"], measured["cpu"])
    assert_close(measured["cpu"], norms.per_sample(inputs, errors, geom).sum(axis=0))


def test_so_is_the_sum_of_gradients_without_factors():
    task = from_functions(lambda key: jnp.zeros((4, 2)), lambda w, x, y: jnp.sum(w[None] * x, axis=(1, 2)) - y)
    arguments = (jnp.zeros((4, 2)), normal(BATCH, 4, 2), jnp.zeros(BATCH), jnp.ones(BATCH))
    with tracing_for("gpu"):
        run = jax.make_jaxpr(lambda *arguments: per_example.weighted_sum(task, *arguments, clip_norm=0.5))
        for equation in (measured := list(products(run(*arguments).jaxpr))):
            assert equation.params["precision"] == (HIGHEST, HIGHEST)
    assert measured
