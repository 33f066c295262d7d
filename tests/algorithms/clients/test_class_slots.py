"""Slots for the clients of each class: how many suffice, who is in them, and what their functions give."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations

from jaxfl.algorithms.clients.class_slots import class_slots, place
from jaxfl.algorithms.clients.client_classes import client_classes
from jaxfl.algorithms.clients.server import over_slots
from jaxfl.core.platform import tracing_for


def tail(members, num_nodes, num_active, slots, independent):
    """The exact probability that more of a class's clients are active than it has slots."""
    if independent:
        rate = Fraction(num_active, num_nodes)
        ways = (math.comb(members, j) * rate**j * (1 - rate) ** (members - j) for j in range(slots + 1, members + 1))
        return sum(ways, start=Fraction(0))
    counts = range(slots + 1, min(members, num_active) + 1)
    others = num_nodes - members
    ways = sum(math.comb(members, j) * math.comb(others, num_active - j) for j in counts)
    return Fraction(ways, math.comb(num_nodes, num_active))


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize(("members", "num_active"), [((43, 43, 42), 32), ((5, 0, 195), 20), ((300, 200), 10)])
def test_the_tails_beyond_the_slots_add_up_to_at_most_the_failure_probability(members, num_active, independent):
    """Over 10^6 rounds, and with a slot less a class's tail is above its share."""
    n, slots = sum(members), class_slots(np.array(members), num_active, independent=independent)
    share = Fraction(1, 10**9) / (10**6 * int(np.count_nonzero(members)))
    tails = [tail(m, n, num_active, int(s), independent) for m, s in zip(members, slots, strict=True)]
    assert sum(tails) * 10**6 <= Fraction(1, 10**9)
    for m, s in zip(members, slots, strict=True):
        assert int(s) <= (m if independent else min(m, num_active))
        assert (s == 0) == (m == 0)
        if m:
            assert tail(m, n, num_active, int(s) - 1, independent) > share
    assert slots.sum() < 3 * num_active + 40, "slots grow with the active clients, not with all"


@pytest.mark.parametrize("some_empty", [False, True])
def test_every_active_client_is_in_a_slot_of_its_class_once_or_is_counted(some_empty):
    rng, slots, beyond = np.random.default_rng(0), {0: 2, 2: 4}, 0
    for _ in range(30):
        classes = rng.choice([0, 2], 6)
        is_active = rng.random(6) < 0.7 if some_empty else np.ones(6, bool)
        given = jnp.asarray(is_active) if some_empty else None
        placed = place(jnp.asarray(classes, jnp.int32), slots, given, all_fit=False)
        without = 0
        for number, rows in placed.rows.items():
            own = np.flatnonzero(is_active & (classes == number))
            expected = np.full(slots[number], 6)
            expected[: len(own)] = own[: slots[number]]
            np.testing.assert_array_equal(rows, expected)
            without += max(0, len(own) - slots[number])
        assert placed.overflow is not None
        assert int(placed.overflow) == without
        beyond += without
    assert beyond > 0


def test_what_an_empty_slot_computes_changes_nothing():
    """A slot of the first class that is empty divides by the zero of another's client."""
    classes = client_classes([0, 1, 1, 0, 1], num_active=3, num_classes=2)
    values = jnp.array([2.0, 0.0, 0.0])
    functions = (lambda x: {"own": 1 / x}, lambda x: {"own": x - 1})
    with tracing_for("gpu"):
        ran = classes.run(functions, lambda _, own: own, "vmap", jnp.array([0, 1, 4]), (values,))
    assert [group.results["own"].tolist() for group in ran.groups] == [[0.5, 0.0], [-1.0, -1.0, 0.0]]
    assert ran.in_order([group.results["own"] for group in ran.groups], 3).tolist() == [0.5, -1.0, -1.0]
    assert [group.take(jnp.array([3.0, 5.0, 7.0])).tolist() for group in ran.groups] == [[3.0, 0.0], [5.0, 7.0, 0.0]]
    assert ran.overflow is None, "no class has more clients than slots"


@pytest.mark.parametrize("node_loop", ["vmap", "map", "chunk:2", "devices:map"])
def test_an_empty_slot_gives_zeros_whatever_a_client_would_give_in_its_place(node_loop):
    inverse = over_slots(lambda x: {"a": 1 / x}, node_loop)
    found = inverse(jnp.array([True, False, True]), jnp.array([2.0, 0.0, 4.0]))
    assert found["a"].tolist() == [0.5, 0.0, 0.25]


def largest(jaxpr):
    """The most numbers in an array that a traced program computes, inside of loops and conditionals, too."""
    return max(variable.aval.size for equation in equations(jaxpr) for variable in equation.outvars)


def test_what_all_clients_share_is_not_copied_for_each_of_them():
    """Twenty clients take rows of one pool, step after step."""
    pool = jnp.ones((1000, 100))
    run = over_slots(lambda steps: jax.lax.scan(lambda total, row: (total + pool[row].sum(), None), 0.0, steps), "vmap")
    traced = jax.make_jaxpr(run)(jnp.ones(20, bool), jnp.zeros((20, 3), jnp.int32))
    assert largest(traced.jaxpr) <= pool.size
