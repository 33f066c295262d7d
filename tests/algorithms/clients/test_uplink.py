"""The way of updates to a server, in every algorithm that takes one: against a float64 loop, E, and what stays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import crossed
from problems import problem, start
from reference import uplink as reference
from reference.perturbed_gossip import round_uniform
from reference.runs import assert_same, flat

import jaxfl
from jaxfl import ArgumentError
from jaxfl.channel import uniform_quantizer
from jaxfl.channel.links import RoundingKeys
from jaxfl.core.platform import tracing_for

KEY = jax.random.key(3)
NAMES = ("fed_avg", "embracing", "width_reduction", "partial_averaging", "ali_dpfl")
STEP, LEVELS, CLIP_NORM = 2.0**-7, 64, 0.05
QUANTIZER = uniform_quantizer(STEP, levels=LEVELS)
UPDATES = jaxfl.private_updates(clip_norm=CLIP_NORM, noise=jaxfl.gaussian(0.02))
WAYS = {
    "lossy and rounded": {"links": jaxfl.links(0.7, QUANTIZER)},
    "private": {"updates": UPDATES},
    "private, lossy and rounded": {"links": jaxfl.links(0.7, QUANTIZER), "updates": UPDATES},
}


def algorithm_over(name, uplink, **changes):
    """The registry's example; private updates need clients that weigh alike."""
    if uplink.is_private:
        steps = {"batch_size": 2, "optimizer": optax.sgd(0.2), "weighting": "uniform"}
        changes["clients"] = jaxfl.local_steps(3, **steps)
    return problem(name).algorithm(uplink=uplink, **changes)


def sent_in_a_round(name, way, round_index=0, **changes):
    """(state before, draws, what `send` gets of every algorithm, what it gives, state after), computed eagerly."""
    seen = []

    def send(*arguments):
        seen.append((arguments, way.send(*arguments)))
        return seen[-1][1]

    data, algorithm = problem(name).data, algorithm_over(name, way._replace(send=send), **changes)
    state = algorithm.init(KEY, data)._replace(round_index=jnp.int32(round_index))
    draws = algorithm.draw(KEY, state, data)
    after, _ = algorithm.update(state, data, draws)
    ((arguments, received),) = seen
    return state, draws, arguments[:6], received, after


def rows(tree):
    """Leaves (c, *leaf) as (c, d), float64."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def like(tree, params):
    """Numbers for every leaf, (d,), where a tree may hold one for each of them."""
    return flat(jax.tree.map(lambda number, leaf: np.broadcast_to(number, leaf.shape), tree, params))


def held_by(clients, count, params):
    """(c, d), bool."""
    each = [clients.holders(jnp.eye(count, dtype=jnp.float32)[i]).params for i in range(count)]
    return np.stack([like(one, params) for one in each]) > 0


CASES = [case for case in crossed(NAMES, WAYS) if not (case.values[0] == "ali_dpfl" and "private" in case.values[1])]


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.quick_cases(5)
def test_what_a_server_receives_follows_the_loop(name, kind):
    way = jaxfl.uplink(**WAYS[kind])
    for number in range(2):
        _, draws, (of_way, active, weights, _, before, clients), received, _ = sent_in_a_round(name, way, number)
        changes, count = clients.changes().params, len(active)
        held = held_by(clients, count, before.params)
        assert not rows(changes)[~held].any(), "nothing changes that a client does not hold"
        arrives = np.ones(count, bool) if of_way.is_active is None else np.asarray(of_way.is_active)
        options = {}
        if of_way.links.arrived is not None:
            arrives = arrives & np.asarray(of_way.links.arrived)[np.asarray(active)]
        if of_way.links.rounding is not None:
            numbers = RoundingKeys(of_way.links.rounding.keys[active]).draw(changes)
            quantize = functools.partial(round_uniform, step=STEP, levels=LEVELS)
            options = {"quantize": quantize, "numbers": rows(numbers)}
        if way.is_private:
            options |= {"clip_norm": CLIP_NORM, "noise": flat(of_way.noise)}
            options["expected"] = like(clients.expected, before.params)
        added = reference.received(rows(changes), held, np.asarray(weights, np.float64), arrives, **options)
        np.testing.assert_allclose(flat(received.change), added, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(flat(received.model.params), flat(before.params) + added, rtol=1e-5, atol=1e-6)
        assert draws.uplink is of_way


@pytest.mark.parametrize("name", ["fed_avg", "embracing", "width_reduction", "partial_averaging"])
@pytest.mark.quick_cases(2)
def test_the_public_constant_is_how_many_hold_an_element_on_average(name):
    """All clients take part: E is their number. With fewer it is smaller in proportion."""
    way, everybody = jaxfl.uplink(updates=UPDATES), {} if name == "partial_averaging" else {"num_active": 5}
    _, _, (_, active, _, _, before, clients), _, _ = sent_in_a_round(name, way, **everybody)
    count = len(active)
    np.testing.assert_allclose(
        like(clients.expected, before.params), held_by(clients, count, before.params).sum(axis=0), rtol=1e-6
    )
    if everybody:
        fewer = sent_in_a_round(name, way, num_active=2)[2][5].expected
        np.testing.assert_allclose(like(fewer, before.params), 0.4 * like(clients.expected, before.params), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick_cases(2)
def test_where_nobody_is_heard_the_servers_model_stays(name):
    state, _, (*_, before, _), received, after = sent_in_a_round(name, jaxfl.uplink(links=jaxfl.links(0.0)))
    assert not received.any_arrived
    assert_same(received.model, before)
    if name != "partial_averaging":  # whose nodes keep the rest of their models
        assert_same(after.params, state.params)


@pytest.mark.parametrize("name", ["embracing", "width_reduction"])
@pytest.mark.quick_cases(1)
def test_clients_in_waves_send_what_clients_one_after_the_other_send(name):
    """Rounding, too, though a wave of weak clients holds its part only."""
    way, data = jaxfl.uplink(links=jaxfl.links(0.7, QUANTIZER), updates=UPDATES), problem(name).data
    algorithm = algorithm_over(name, way)
    state = start(algorithm, KEY, data)
    draws, actual = jax.jit(algorithm.draw)(KEY, state, data), []
    for platform in ("cpu", "gpu"):
        with tracing_for(platform):
            actual.append(jax.jit(lambda draws: algorithm.update(state, data, draws))(draws))
    assert int(actual[0][1].clipped_updates.sum()) > 0
    assert_same(*actual, rtol=1e-4, atol=1e-6)


def test_an_adaptive_number_of_steps_refuses_private_updates():
    with pytest.raises(ArgumentError, match=r"^uplink: must leave updates as they are"):
        problem("ali_dpfl").algorithm(uplink=jaxfl.uplink(updates=UPDATES))
