"""Clients of several classes in waves of slots: what their functions give, and how many slots are computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations

from jaxfl.algorithms.clients.client_classes import client_classes, in_order
from jaxfl.algorithms.clients.server import over_slots
from jaxfl.core.platform import tracing_for


@functools.cache
def all_classes():
    """Three of four classes, eight clients active."""
    return client_classes(np.repeat([0, 1, 3], [9, 2, 13]), num_active=8, num_classes=4)


FUNCTIONS = [lambda x, factor=factor: {"own": factor / x, "rows": factor * jnp.arange(3.0) + x} for factor in range(4)]


def run_for(platform, active, values, is_active=None, node_loop="vmap", **options):
    """Result and place of every active client, in order, and the sum of all rows; 0 for an empty slot."""
    classes = all_classes().of(active)

    @jax.jit
    def run(values):
        groups = all_classes().run(FUNCTIONS, lambda _, own: own, node_loop, active, (values,), is_active, **options)
        own = in_order(groups, [group.results["own"] for group in groups], len(active))
        for_each = [in_order(groups, [group.take(jnp.arange(1, 1 + len(active))) for group in groups], len(active))]
        return own, jnp.stack(for_each), [group.results["rows"].sum() for group in groups]

    with tracing_for(platform):
        own, places, sums = run(values)
    assert classes.shape == own.shape
    return own, places, sum(map(float, sums))


@pytest.mark.parametrize("some_empty", [False, True])
def test_waves_of_slots_give_what_clients_one_after_the_other_give(some_empty):
    """All eight of one class, too, for whom a wave has five slots; what an empty slot divides by is zero."""
    rng = np.random.default_rng(0)
    teams = [np.sort(rng.choice(24, 8, replace=False)) for _ in range(6)] + [np.arange(8), np.arange(16, 24)]
    for team in teams:
        is_active = rng.random(8) < 0.7 if some_empty else np.ones(8, bool)
        values = jnp.asarray(np.where(is_active, rng.uniform(1, 2, 8), 0.0), jnp.float32)
        given = jnp.asarray(is_active) if some_empty else None
        active = jnp.asarray(team, jnp.int32)
        expected = run_for("cpu", active, values, given)
        for differentiable, node_loop in ((False, "vmap"), (True, "vmap"), (False, "chunk:2")):
            actual = run_for("gpu", active, values, given, node_loop, differentiable=differentiable)
            np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
            np.testing.assert_allclose(actual[2], expected[2], rtol=1e-6)
            np.testing.assert_array_equal(actual[1][0][is_active], np.arange(1, 9)[is_active])


def test_a_class_computes_for_few_more_clients_than_come():
    """On average over rounds: at most 1.6 times the active clients, where slots for all that may come are 3 times."""
    of_client = np.arange(128) % 3
    classes, computed = client_classes(of_client, num_active=32, num_classes=3), []

    def counting(x):
        jax.debug.callback(lambda _: computed.append(1), x)
        return x

    with tracing_for("gpu"):
        run = jax.jit(
            lambda active: classes.run([counting] * 3, lambda _, own: own, "vmap", active, (active,))[0].results.sum()
        )
        for r in range(20):
            run(classes.draw_active(jax.random.key(0), jnp.int32(r)))
    jax.effects_barrier()
    assert 32 * 20 <= len(computed) < 1.6 * 32 * 20


def test_clients_of_several_classes_have_a_derivative_where_it_is_asked_for():
    active, values = jnp.arange(3, 11, dtype=jnp.int32), jnp.linspace(1.0, 2.0, 8)

    def total(values, **options):
        own = (FUNCTIONS, lambda _, own: own, "vmap", active, (values,))
        return sum(group.results["own"].sum() for group in all_classes().run(*own, **options))

    expected = jax.grad(total)(values)
    with tracing_for("gpu"):
        actual = jax.grad(functools.partial(total, differentiable=True))(values)
        with pytest.raises(ValueError, match="Reverse-mode differentiation"):
            jax.jit(jax.grad(total))(values)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("node_loop", ["vmap", "map", "chunk:2", "devices:map"])
def test_an_empty_slot_gives_zeros_whatever_a_client_would_give_in_its_place(node_loop):
    inverse = over_slots(lambda x: {"a": 1 / x}, node_loop)
    actual = inverse(jnp.array([True, False, True]), jnp.array([2.0, 0.0, 4.0]))
    assert actual["a"].tolist() == [0.5, 0.0, 0.25]


def largest(jaxpr):
    """The most numbers in an array that a traced program computes, inside of loops and conditionals, too."""
    return max(variable.aval.size for equation in equations(jaxpr) for variable in equation.outvars)


def test_what_all_clients_share_is_not_copied_for_each_of_them():
    """Twenty clients take rows of one pool, step after step."""
    pool = jnp.ones((1000, 100))
    run = over_slots(lambda steps: jax.lax.scan(lambda total, row: (total + pool[row].sum(), None), 0.0, steps), "vmap")
    traced = jax.make_jaxpr(run)(jnp.ones(20, bool), jnp.zeros((20, 3), jnp.int32))
    assert largest(traced.jaxpr) <= pool.size
