"""Local steps: any optimizer of optax, the number of steps, derivatives and cost."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import equations, refusals
from problems import run, small_task, start, statistics_task, uneven_data
from reference.runs import assert_same, client_batches, flat

import jaxfl
from jaxfl.core.platform import tracing_for
from jaxfl.gradients import poisson

KEY = jax.random.key(5)
SIZES = (7, 9, 5, 12, 6)
BATCH = 4
CLIP_NORM, NOISE_STD = 0.6, 0.05


def learner(max_steps=3, task=None, num_active=3, **changes):
    """Three of five clients, plain steps."""
    options = {"batch_size": BATCH, "optimizer": optax.sgd(0.3, momentum=0.9), **changes}
    clients = jaxfl.local_steps(max_steps, **options)
    return jaxfl.fed_avg(small_task() if task is None else task, clients=clients, num_active=num_active)


def private(**changes):
    """The same with DP-SGD."""
    options = {"sampler": poisson, "clip_norm": CLIP_NORM, "noise": jaxfl.gaussian(NOISE_STD)}
    return learner(**{**options, "optimizer": optax.sgd(0.3), **changes})


@functools.cache
def first_state():
    """The one of all learners of the small task: neither steps nor their number nor noise are part of it."""
    return start(learner(), KEY, uneven_data(SIZES))


def rounds_of(algorithm, count):
    """The draws of many rounds, stacked."""
    data, state = uneven_data(SIZES), first_state()
    draw = jax.jit(jax.vmap(lambda r: algorithm.draw(KEY, state._replace(round_index=r), data)))
    return draw(jnp.arange(count, dtype=jnp.int32))


OPTIMIZERS = {
    "adam": optax.adam(0.02),
    "schedule-free": optax.contrib.schedule_free_sgd(0.2),  # its state holds parameters
    "of the round": lambda r: optax.sgd(0.4 * 0.5 ** r.astype(jnp.float32)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.quick_cases(1)
def test_without_noise_and_clipping_it_is_the_plain_optimizer(name):
    """Against a loop that calls optax step by step, in the third round."""
    optimizer, data, task = OPTIMIZERS[name], uneven_data(SIZES), small_task()
    algorithm = learner(optimizer=optimizer)
    state = start(algorithm, KEY, data)._replace(round_index=jnp.int32(2))
    rule = optimizer if isinstance(optimizer, optax.GradientTransformation) else optimizer(jnp.int32(2))
    gradient_of = jax.jit(jax.grad(lambda x, samples: task.loss(x, data.inputs[samples], data.labels[samples]).mean()))
    with jax.numpy_dtype_promotion("standard"):  # optax.adam raises a Python number to an int32 power
        draws = jax.jit(algorithm.draw)(KEY, state, data)
        actual, _ = jax.jit(algorithm.update)(state, data, draws)
        clients, step = [], jax.jit(rule.update)
        for client, batches in client_batches(np.asarray(draws.active), draws.steps.batch_indices, SIZES):
            x, memory = state.params, rule.init(state.params)
            for batch in batches:
                moves, memory = step(gradient_of(x, data.indices[client, np.array(batch)]), memory, x)
                x = optax.apply_updates(x, moves)
            clients.append((SIZES[client], flat(x)))
    weights = np.array([weight for weight, _ in clients])
    expected = weights @ np.stack([x for _, x in clients]) / weights.sum()
    np.testing.assert_allclose(flat(actual.params), expected, rtol=1e-5, atol=1e-6)
    assert np.abs(expected - flat(state.params)).max() > 0.01


FEWER = {
    "a number": {"num_steps": 2},
    "of the round": {"num_steps": lambda r: r + 2},
    "under a mask": {"num_steps": 2, "differentiable": True},
}


@pytest.mark.parametrize(("case", "kind"), [*zip(FEWER, [private, learner, private], strict=True)])
@pytest.mark.quick_cases(1)
def test_a_number_of_steps_equals_that_many_steps(case, kind):
    """Two of six, against local steps that are two: parameters, losses and counts."""
    data, fewer, fresh = uneven_data(SIZES), kind(max_steps=6, **FEWER[case]), kind(max_steps=2)
    actual, expected = (run(algorithm, KEY, data, 1, first_state()) for algorithm in (fewer, fresh))
    assert_same(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), [("adam", private), ("schedule-free", learner)])
@pytest.mark.quick_cases(1)
def test_under_a_mask_and_as_a_loop_steps_give_the_same_parameters(name, kind):
    """Over three rounds of 0, 2 and 4 steps of five."""
    data, options = uneven_data(SIZES), {"max_steps": 5, "num_steps": lambda r: 2 * r, "optimizer": OPTIMIZERS[name]}
    both = [kind(differentiable=chosen, **options) for chosen in (False, True)]
    with jax.numpy_dtype_promotion("standard"):  # optax.adam raises a Python number to an int32 power
        loop, masked = (run(algorithm, KEY, data, 3, first_state()) for algorithm in both)
    assert_same(loop, masked, rtol=1e-6, atol=1e-7)
    assert float(loop[1].update_norm[0]) < 1e-6 < 0.01 < float(loop[1].update_norm[1])


def test_a_traced_number_is_no_reason_to_compile_anew():
    data, state = uneven_data(SIZES), first_state()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def after(num_steps):
        return learner(max_steps=4, num_steps=num_steps).round(KEY, state, data)[0].params

    actual = [flat(after(jnp.int32(count))) for count in (1, 4)]
    expected = [flat(run(learner(max_steps=count), KEY, data, 1, state)[0].params) for count in (1, 4)]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(flat(after(jnp.int32(9))), expected[-1], rtol=1e-5, atol=1e-6)  # at most max_steps


def test_a_clients_draws_do_not_depend_on_who_else_is_active_nor_on_the_number_of_steps():
    options = {"task": small_task(), "max_steps": 5}
    two, five = (rounds_of(private(**options, **more), 30).steps for more in ({"num_steps": 2}, {}))
    assert_same(two.batch_indices[:, :, :2], five.batch_indices[:, :, :2])
    assert np.all(np.asarray(two.batch_indices[:, :, 2:]) >= 5), "slots of steps that do not run are empty"
    with tracing_for("gpu"):
        at_once = rounds_of(private(**options, num_steps=2), 30).steps
    assert_same(two.batch_overflow, at_once.batch_overflow)
    width = at_once.batch_indices.shape[-1]  # an accelerator's batches have fewer empty slots
    assert_same(two.batch_indices[..., :width], at_once.batch_indices)
    some, everybody = rounds_of(private(), 30), rounds_of(private(num_active=5), 30)
    for r, active in enumerate(np.asarray(some.active)):
        for own, of_all in zip(jax.tree.leaves(some.steps), jax.tree.leaves(everybody.steps), strict=True):
            is_key = jnp.issubdtype(own.dtype, jax.dtypes.prng_key)
            own, of_all = (jax.random.key_data(x) for x in (own, of_all)) if is_key else (own, of_all)
            np.testing.assert_array_equal(own[r], of_all[r, active])


def objective(step_size, optimizer, rounds, **options):
    """The loss in the last of some rounds, the first of them from the first parameters."""
    data = uneven_data(SIZES)
    algorithm = learner(optimizer=optimizer(step_size), **options)
    state, info = algorithm.init(KEY, data), None
    for r in rounds:
        state, info = algorithm.round(KEY, state._replace(round_index=jnp.int32(r)), data)
    assert info is not None
    return info.loss


@pytest.mark.slow  # steps under a mask are run by the tests above
def test_a_round_under_a_mask_has_a_derivative():
    """Also by a step that is not taken, where adam divides by the root of what is then 0: that of as many steps, and a
    quotient of differences; where steps are a loop JAX refuses it."""
    optimizer, x = functools.partial(optax.adam, eps=0.1), 0.1
    options = {"optimizer": optimizer, "max_steps": 5, "num_steps": lambda r: jnp.where(r == 1, 0, 2)}
    loop = functools.partial(objective, rounds=range(3), **options)
    with jax.numpy_dtype_promotion("standard"):  # optax.adam raises a Python number to an int32 power
        both = jax.jit(jax.value_and_grad(functools.partial(loop, differentiable=True)))
        actual = both(x)[1]
        fresh = functools.partial(objective, optimizer=optimizer, rounds=(0, 2), max_steps=2)
        np.testing.assert_allclose(actual, jax.jit(jax.grad(fresh))(x), rtol=1e-5)
        np.testing.assert_allclose(actual, (both(x + 0.002)[0] - both(x - 0.002)[0]) / 0.004, rtol=1e-2)
        assert abs(float(actual)) > 0.1
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            jax.jit(jax.grad(functools.partial(loop, num_steps=lambda r: r + 1)))(x)


def float_axes(jaxpr):
    """Axes of all floating-point arrays that a program makes, its inner programs included."""
    arrays = [out.aval for equation in equations(jaxpr) for out in equation.outvars]
    return {axis for array in arrays if jnp.issubdtype(array.dtype, jnp.floating) for axis in array.shape}


@pytest.mark.parametrize("kind", [learner, private])
@pytest.mark.quick_cases(1)
def test_a_smaller_number_costs_less(kind):
    """Two steps of 101: two batches are drawn and two gradients taken, and nothing but keys and slots has 101 parts."""
    computed, drawn, data, task = [], [], uneven_data(SIZES), small_task()._replace(node_loop="map")
    at_once = 1 if kind is learner else poisson(BATCH).capacity  # a task without layers: one sample after the other

    def loss(params, inputs, labels):
        jax.debug.callback(lambda _: computed.append(1), params["dense_2"]["bias"])
        return small_task().loss(params, inputs, labels)

    def counting(batch_size):
        sampler = poisson(batch_size) if kind is private else jaxfl.gradients.fixed(batch_size)

        def draw_node(key, count):
            jax.debug.callback(lambda _: drawn.append(1), count)
            return sampler.draw_node(key, count)

        return sampler._replace(draw_node=draw_node)

    counted = task._replace(loss=loss, layers=(), factors=None)
    algorithm = kind(max_steps=101, num_steps=jnp.int32(2), task=counted, sampler=counting)
    state = start(algorithm, KEY, data)
    jax.block_until_ready(jax.jit(algorithm.round)(KEY, state, data))
    jax.effects_barrier()
    assert len(drawn) == 3 * 2
    assert 3 * 2 <= len(computed) <= 3 * 2 * at_once

    def axes(**options):
        algorithm = kind(max_steps=101, **options)
        return float_axes(jax.make_jaxpr(algorithm.round)(KEY, start(algorithm, KEY, data), data).jaxpr)

    assert 101 not in axes(num_steps=jnp.int32(2))
    assert 101 in axes(), "all steps in one scan have 101 losses"


test_what_it_refuses = refusals(
    [
        (lambda: learner(max_steps=0), "max_steps"),
        (lambda: learner(batch_size=0), "batch_size"),
        (lambda: learner(num_steps=4), "num_steps"),
        (lambda: learner(num_steps=-1), "num_steps"),
        (lambda: learner(num_steps=1.5), "num_steps"),
        (lambda: learner(num_steps=jnp.ones(2, jnp.int32)), "num_steps"),
        (lambda: learner(clip_norm=0.0), "clip_norm"),
        (lambda: start(private(noise=jaxfl.gaussian(jnp.ones(4))), KEY, uneven_data(SIZES)), "noise"),
        (lambda: start(private(noise=jaxfl.laplace(jnp.ones((5, 1)))), KEY, uneven_data(SIZES)), "noise"),
        (lambda: private(noise=jaxfl.gaussian(jnp.ones(5))._replace(rescaled=None)), "noise"),
        (lambda: learner(weighting="size"), "weighting"),
        (lambda: start(private(batch_size=5), KEY, uneven_data(SIZES)), "batch_size"),
        (lambda: start(learner(batch_size=6, clip_norm=1.0), KEY, uneven_data(SIZES)), "batch_size"),
        (lambda: start(private(task=statistics_task()), KEY, uneven_data(SIZES)), "task"),
    ]
)


@pytest.mark.slow
def test_empty_slots_of_poisson_batches_are_left_out_where_nodes_run_one_by_one():
    """The same numbers, and the work of the slots that hold samples: none where the batch is empty."""
    data, task = uneven_data((70, 90, 60, 80, 75)), small_task()
    results = []
    for node_loop in ("vmap", "map"):
        algorithm = private(task=task._replace(node_loop=node_loop), batch_size=40, noise=None)
        results.append(run(algorithm, KEY, data, 4))
    assert int(results[0][1].gradient_evaluations.max()) > 3 * 32, "batches of more than one group"
    for ours, theirs in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)
    state = start(algorithm, KEY, data)
    draws = jax.jit(algorithm.draw)(KEY, state, data)
    empty = draws.steps._replace(batch_indices=jnp.full_like(draws.steps.batch_indices, 1000))
    after, info = jax.jit(algorithm.update)(
        state, data._replace(inputs=data.inputs * jnp.nan), draws._replace(steps=empty)
    )
    assert_same(after.params, state.params, rtol=1e-6)
    assert not np.any(info.discarded_gradients), "no sample was looked at"
