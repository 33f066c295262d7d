"""Clients of a round by size and by loss: who comes, how often, what it costs, and what is refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import linear_task, run, start, statistics_task, uneven_data
from reference.runs import assert_same

import jaxfl
from jaxfl import ArgumentError
from jaxfl.algorithms import by_loss, by_size
from jaxfl.algorithms.clients.selection import Selection, own_loss
from jaxfl.core import Variables

KEY, SIZES = jax.random.key(3), (2, 9, 4, 7, 3, 12)
DATA, NODES = uneven_data(SIZES), len(SIZES)
ROUNDS = 4000


def learner(selection=None, *, num_active=2, build=jaxfl.fed_avg, task=None, weighting="uniform"):
    clients = jaxfl.local_steps(2, batch_size=3, optimizer=optax.sgd(0.05), weighting=weighting)
    way = jaxfl.uplink(selection=selection)
    return build(task or linear_task(), clients=clients, num_active=num_active, uplink=way)


def shares(selection, num_active):
    """How often each client is drawn, (n,)."""
    drawn = jax.vmap(lambda k: selection.draw(KEY, k, num_active, DATA))(jnp.arange(ROUNDS, dtype=jnp.int32))
    assert drawn.shape == (ROUNDS, num_active)
    assert (np.diff(drawn, axis=1) > 0).all()
    return np.bincount(np.ravel(drawn), minlength=NODES) / ROUNDS


def one_after_the_other(sizes, count):
    """Each client's probability, by all orders in which `count` clients may be drawn."""
    chances = np.zeros(len(sizes))
    for order in itertools.permutations(range(len(sizes)), count):
        left, chance = sum(sizes), 1.0
        for client in order:
            chance, left = chance * sizes[client] / left, left - sizes[client]
        chances[list(order)] += chance
    return chances


@pytest.mark.parametrize("num_active", [1, 3])
def test_clients_come_in_proportion_to_their_samples(num_active):
    expected, actual = one_after_the_other(SIZES, num_active), shares(by_size(), num_active)
    if num_active == 1:
        np.testing.assert_allclose(expected, np.array(SIZES) / sum(SIZES))
    errors = np.sqrt(expected * (1 - expected) / ROUNDS)
    assert (np.abs(actual - expected) < 4 * errors).all()
    uniform = shares(Selection(), num_active)
    assert (np.abs(uniform - num_active / NODES) < 4 * np.sqrt(num_active / NODES / ROUNDS)).all()
    assert (np.abs(uniform - expected) > 4 * errors).any()


def losses_of(params, data=DATA):
    """Each client's mean loss in float64."""
    w, b = np.asarray(params["w"], np.float64), float(params["b"])
    inputs, labels = (np.asarray(part, np.float64) for part in (data.inputs, data.labels))
    rows = [np.asarray(data.indices)[i, :size] for i, size in enumerate(np.asarray(data.sizes))]
    return np.array([np.mean((inputs[own] @ w + b - labels[own]) ** 2) for own in rows])


@pytest.mark.parametrize("candidates", ["uniform", "by_size"])
def test_the_largest_losses_of_the_candidates_take_part(candidates):
    algorithm = learner(by_loss(4, candidates=candidates))
    state, seen = start(algorithm, KEY, DATA), set()
    for _ in range(20):
        losses, drawn = losses_of(state.params), algorithm.draw(KEY, state, DATA).active
        assert len(drawn) == 4
        expected = sorted(sorted(drawn.tolist(), key=lambda one, by=losses: -by[one])[:2])
        state, info = algorithm.round(KEY, state, DATA)
        assert np.flatnonzero(info.active).tolist() == expected
        seen.add(tuple(expected))
    assert len(seen) > 2


def test_a_mean_loss_is_over_all_samples_of_a_client_and_no_padding():
    """More than a block of samples, and batch statistics from the state."""
    big = uneven_data((300, 5, 700))
    params = linear_task().init(KEY)
    actual = [own_loss(linear_task(), big, Variables(params, None), jnp.int32(client))[0] for client in (2, 0)]
    np.testing.assert_allclose(actual, losses_of(params, big)[[2, 0]], rtol=1e-5)
    state, info = run(learner(by_loss(NODES), task=statistics_task()), KEY, DATA, 5)
    assert np.isfinite(np.asarray(state.params["w"])).all()
    assert (info.active.sum(axis=1) == 2).all()


@pytest.mark.parametrize("num_active", [2, NODES])
def test_as_many_candidates_as_clients_change_no_bit(num_active):
    plain, chosen = (run(learner(one, num_active=num_active), KEY, DATA, 5)[0] for one in (None, by_loss(num_active)))
    assert_same(plain, chosen)


def test_candidates_are_counted():
    algorithm = learner(by_loss(4))
    state = start(algorithm, KEY, DATA)
    drawn = algorithm.draw(KEY, state, DATA).active
    info = algorithm.round(KEY, state, DATA)[1]
    asked = np.isin(np.arange(NODES), drawn)
    np.testing.assert_array_equal(info.forward_evaluations, asked * np.array(SIZES))
    np.testing.assert_array_equal(info.bits_received, asked * 32 * 7)
    np.testing.assert_array_equal(info.bits_sent, asked * 32 + np.asarray(info.active) * 32 * 7)


def test_the_servers_memory_stays_the_mean_of_the_clients():
    """SCAFFOLD's c, whoever takes part."""
    state = run(learner(by_loss(4), build=jaxfl.scaffold), KEY, DATA, 200)[0]
    own, of_server = (jax.tree.leaves(tree) for tree in (state.memory, state.optimizer))
    scale = max(float(jnp.abs(leaf).max()) for leaf in own)
    for mine, server in zip(own, of_server, strict=True):
        np.testing.assert_allclose(mine.mean(axis=0), server, atol=1e-5 * scale)


def test_refusals():
    private = jaxfl.private_updates(clip_norm=1.0, noise=jaxfl.gaussian(1.0))
    for selection in (by_size(), by_loss(4)):
        with pytest.raises(ArgumentError, match="selection: must be None where updates are private"):
            jaxfl.uplink(updates=private, selection=selection)
        with pytest.raises(ArgumentError, match="selection: must be None where clients hold parts"):
            jaxfl.partial_averaging(
                linear_task(),
                clients=jaxfl.local_steps(1, batch_size=2, optimizer=optax.sgd(0.1), weighting="uniform"),
                synchronized="all",
                uplink=jaxfl.uplink(selection=selection),
            )
    noisy = jaxfl.local_steps(
        1, batch_size=2, optimizer=optax.sgd(0.1), weighting="uniform", clip_norm=1.0, noise=jaxfl.gaussian(1.0)
    )
    options = {"clients": noisy, "num_active": 2}
    with pytest.raises(ArgumentError, match="selection: must not be by loss where steps are private"):
        jaxfl.fed_avg(linear_task(), uplink=jaxfl.uplink(selection=by_loss(4)), **options)
    by_sizes = jaxfl.fed_avg(linear_task(), uplink=jaxfl.uplink(selection=by_size()), **options)
    plain = jaxfl.fed_avg(linear_task(), **options)
    assert jaxfl.privacy.releases_of(by_sizes, DATA).each == jaxfl.privacy.releases_of(plain, DATA).each
    for selection in (by_size(), by_loss(4, candidates="by_size")):
        with pytest.raises(ArgumentError, match="clients: must weigh all clients equally where they are drawn by size"):
            learner(selection, weighting="data")
    with pytest.raises(ArgumentError, match="num_candidates: must be an integer of at least 3; got 2"):
        learner(by_loss(2), num_active=3)
    with pytest.raises(ArgumentError, match="num_candidates: must be at most the number of clients; got 7"):
        learner(by_loss(NODES + 1)).init(KEY, DATA)
