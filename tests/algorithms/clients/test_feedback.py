"""Feedback: what clients keep of their updates, by the papers' lines, over 1,000 rounds, and what it becomes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import linear_task, run, start, statistics_task, uneven_data
from reference import servers
from reference.runs import assert_same, by_node, flat, one_by_one

import jaxfl
from jaxfl import ArgumentError
from jaxfl.algorithms import (
    centered_clipping,
    client_momentum,
    coordinate_median,
    ef21,
    error_feedback,
    sign_flip,
)
from jaxfl.channel import rand_k, top_k
from jaxfl.core.tree import num_bytes

KEY, CLIENTS, ACTIVE, DIM = jax.random.key(3), 16, 6, 7
SIZES = tuple(int(size) for size in np.random.default_rng(3).integers(3, 12, CLIENTS))
DATA = uneven_data(SIZES)
SHARE, KEPT = 0.3, 3  # 0.3 of 7 numbers, rounded up
KINDS = {
    "error feedback, top-k": error_feedback(top_k(SHARE)),
    "error feedback, rand-k": error_feedback(rand_k(SHARE)),
    "ef21, top-k": ef21(top_k(SHARE)),
    "ef21, rand-k": ef21(rand_k(SHARE)),
    "momentum": client_momentum(0.8),
}
COMPRESSED = [name for name in KINDS if name != "momentum"]


def learner(feedback=None, *, active=ACTIVE, build=jaxfl.fed_avg, task=None, weighting="uniform", **way: Any):
    clients = jaxfl.local_steps(2, batch_size=3, optimizer=optax.sgd(0.02), weighting=weighting)
    uplink = jaxfl.uplink(feedback=feedback, **way)
    return build(task or linear_task(), clients=clients, num_active=active, uplink=uplink)


PLAIN = learner()
FIRST, ALONE = start(PLAIN, KEY, DATA), jax.jit(PLAIN.update)


def changes_of(state, draws):
    """The changes of the active clients, (c, d), each by a round of its own without feedback."""

    def of(client):
        active, steps = jax.tree.map(lambda leaf: leaf[client : client + 1], (draws.active, draws.steps))
        plain = draws._replace(active=active, steps=steps, uplink=draws.uplink._replace(compressed=None))
        return flat(ALONE(state._replace(uplink=FIRST.uplink), DATA, plain)[0].params) - flat(state.params)

    return np.array([of(client) for client in range(len(draws.active))])


@pytest.mark.parametrize("name", KINDS)
def test_follows_the_papers_lines(name):
    """Thirty rounds in which six of sixteen take part: messages from the lines, in float64, on the engine's changes."""
    algorithm, kind = learner(KINDS[name]), name.split(",")[0]
    ours, memory = one_by_one(algorithm, KEY, DATA, 30), servers.Feedback(CLIENTS, DIM, kind, KEPT, momentum=0.8)
    for before, draws, after in zip(ours.states[:-1], ours.draws, ours.states[1:], strict=True):
        scores = draws.uplink.compressed
        scores = None if scores is None else np.asarray(scores)
        moved = memory.round(np.asarray(draws.active), changes_of(before, draws), scores)
        scale = 1e-5 * float(np.linalg.norm(flat(before.params)))
        np.testing.assert_allclose(flat(after.params) - flat(before.params), moved, atol=scale)
        np.testing.assert_allclose(by_node(after.uplink.clients), memory.kept, atol=scale)
    assert np.linalg.norm(flat(ours.states[-1].params) - flat(FIRST.params)) > 0.1, "it must move"


@pytest.mark.parametrize("make", [top_k, rand_k])
def test_the_servers_change_is_the_mean_of_what_clients_keep_over_1000_rounds(make):
    algorithm = learner(ef21(make(SHARE)))

    def body(state, _):
        state, _ = algorithm.round(KEY, state, DATA)
        kept = state.uplink
        errors = jax.tree.map(lambda of_all, mean: jnp.abs(mean - of_all.mean(axis=0)).max(), kept.clients, kept.server)
        sizes = jax.tree.map(lambda of_all: jnp.abs(of_all).max(), kept.clients)
        return state, tuple(jnp.stack(jax.tree.leaves(each)).max() for each in (errors, sizes))

    _, (errors, sizes) = jax.jit(lambda s: jax.lax.scan(body, s, length=1000))(start(algorithm, KEY, DATA))
    print(f"ef21, {make.__name__}: {(errors / sizes.max()).max():.1e}")
    assert (errors / sizes.max()).max() < 1e-5


@pytest.mark.parametrize("make", [top_k, rand_k])
def test_what_was_sent_and_what_is_kept_sum_to_the_changes_over_1000_rounds(make):
    """With one gradient for ever, a client's changes are known: -gamma tau times it in each round it takes part in."""
    slope = jaxfl.from_functions(lambda key: jnp.zeros(6), lambda w, x, y: x @ w)
    clients = jaxfl.local_steps(2, batch_size=99, optimizer=optax.sgd(0.02), weighting="uniform")
    way = jaxfl.uplink(feedback=error_feedback(make(SHARE)))
    algorithm = jaxfl.fed_avg(slope, clients=clients, num_active=ACTIVE, uplink=way)
    state, infos = run(algorithm, KEY, DATA, 1000)
    inputs, indices = np.asarray(DATA.inputs, np.float64), np.asarray(DATA.indices)
    slopes = np.array([inputs[row[:size]].mean(axis=0) for row, size in zip(indices, SIZES, strict=True)])
    total: Any = -0.04 * np.asarray(infos.active).sum(axis=0) @ slopes
    arrived, kept = ACTIVE * np.float64(state.params), by_node(state.uplink.clients).sum(axis=0)
    error = np.abs(arrived + kept - total).max() / np.abs(total).max()
    print(f"error feedback, {make.__name__}: {error:.1e}")
    assert error < 1000 * 2**-25  # x rounds alike where moves are equal
    assert np.abs(kept).max() > 10 * error * np.abs(total).max()
    assert set(np.unique(infos.bits_sent)) == {0.0, top_k(SHARE).bits(6) if make is top_k else rand_k(SHARE).bits(6)}


def test_switched_off_it_is_fed_avg():
    plain = run(learner(active=CLIENTS), KEY, DATA, 20)[0].params
    for kind in (error_feedback(top_k(1.0)), ef21(rand_k(1.0)), client_momentum(0.0)):
        other = run(learner(kind, active=CLIENTS), KEY, DATA, 20)[0].params
        assert_same(plain, other, rtol=1e-5, atol=1e-6)
    robust = [learner(kind, aggregate=coordinate_median()) for kind in (None, client_momentum(0.0))]
    assert_same(*(run(each, KEY, DATA, 10)[0].params for each in robust))


def test_feedback_reaches_the_optimum_that_top_k_without_it_misses():
    """All active, full batches, one number of seven a round."""
    clients = jaxfl.local_steps(1, batch_size=99, optimizer=optax.sgd(0.02), weighting="uniform")
    ends = {}
    for name, kind in {"plain": None, "ef": error_feedback(top_k(0.1)), "ef21": ef21(top_k(0.1))}.items():
        way = jaxfl.uplink(feedback=kind)
        ends[name] = jaxfl.fed_avg(linear_task(), clients=clients, num_active=CLIENTS, uplink=way)
    plain, ef, other = (flat(run(each, KEY, DATA, 3000)[0].params) for each in ends.values())
    assert np.abs(other - plain).max() < 1e-3
    assert np.abs(ef - plain).max() < 0.05


def test_only_rows_of_active_clients_are_read_and_written():
    for name in ("ef21, top-k", "momentum"):
        algorithm = learner(KINDS[name])
        first = start(algorithm, KEY, DATA)
        draws = jax.jit(algorithm.draw)(KEY, first, DATA)
        idle = np.setdiff1d(np.arange(CLIENTS), draws.active)
        broken = jax.tree.map(lambda leaf, idle=idle: leaf.at[idle].set(jnp.nan), first.uplink.clients)
        update = jax.jit(algorithm.update)
        clean = update(first, DATA, draws)[0]
        other = update(first._replace(uplink=first.uplink._replace(clients=broken)), DATA, draws)[0]
        assert_same(clean.params, other.params)
        assert np.isnan(by_node(other.uplink.clients)[idle]).all()
        assert not by_node(clean.uplink.clients)[idle].any()
        assert by_node(clean.uplink.clients)[np.asarray(draws.active)].any(axis=1).all()


def test_rounds_copy_no_rows_of_idle_clients():
    """Two of 200 are active: five rounds take the room of a few models beside the state, which they are given."""
    many = uneven_data((5,) * 200, features=3000)
    algorithm = learner(ef21(top_k(0.01)), active=2, task=linear_task(3000))
    state = jax.eval_shape(algorithm.init, KEY, many)
    rounds = jax.jit(lambda s, d: jax.lax.scan(lambda s, _: (algorithm.round(KEY, s, d)[0], None), s, length=5)[0])
    memory = jax.jit(rounds, donate_argnums=0).lower(state, many).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 20 * num_bytes(state.params) < 0.15 * num_bytes(state)


def test_a_lost_momentum_stays_at_its_client():
    kept = run(learner(client_momentum(0.5), links=jaxfl.links(0.0)), KEY, DATA, 3)[0]
    assert_same(kept.params, FIRST.params)
    assert by_node(kept.uplink.clients).any()


def test_noise_of_local_steps_keeps_its_statement():
    options: Any = {"batch_size": 3, "optimizer": optax.sgd(0.05), "weighting": "uniform", "clip_norm": 1.0}
    clients = jaxfl.local_steps(2, noise=jaxfl.gaussian(0.3), **options)
    ways = [None, *(jaxfl.uplink(feedback=kind) for kind in KINDS.values())]
    learners = [jaxfl.fed_avg(linear_task(), clients=clients, num_active=ACTIVE, uplink=way) for way in ways]
    plain, *others = (jaxfl.privacy.releases_of(each, DATA).each for each in learners)
    assert others == [plain] * len(others)
    shared = jaxfl.shared_gaussian(0.3, key_graph=jaxfl.privacy.key_graph("ring", ACTIVE), ratio=1.0)
    with pytest.raises(ArgumentError, match="noise: must be noise of a node's own here: feedback does not cancel it"):
        jaxfl.fed_avg(
            linear_task(), clients=jaxfl.local_steps(2, noise=shared, **options), num_active=ACTIVE, uplink=ways[1]
        )


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_compressor_stands_alone(name):
    others: Any = ({"links": jaxfl.links(0.5)}, {"aggregate": coordinate_median()}, {"attack": sign_flip([0])})
    for other in others:
        with pytest.raises(ArgumentError, match=f"feedback: must come without links, .*got {next(iter(other))}"):
            jaxfl.uplink(feedback=KINDS[name], **other)


def test_refusals():
    updates = jaxfl.private_updates(clip_norm=1.0, noise=jaxfl.gaussian(1.0))
    for kind in KINDS.values():
        with pytest.raises(ArgumentError, match="updates: must be None with feedback: what a client sends depends on"):
            jaxfl.uplink(feedback=kind, updates=updates)
        with pytest.raises(ArgumentError, match="feedback: must be None unless clients send whole updates"):
            learner(kind, build=jaxfl.scaffold)
    with pytest.raises(ArgumentError, match=r"feedback: must be None unless.*got weighting 'data'"):
        learner(KINDS["ef21, top-k"], weighting="data")
    learner(KINDS["error feedback, top-k"], weighting="data", task=statistics_task())
    with pytest.raises(ArgumentError, match="momentum: must"):
        client_momentum(1.0)


def test_centered_clipping_keeps_its_last_result():
    """The server's vector is what x moved by; a void round keeps it; an iteration moves it by at most the clip norm."""
    algorithm = learner(aggregate=centered_clipping(0.05), active=CLIENTS)
    ours, last = one_by_one(algorithm, KEY, DATA, 5), np.zeros(DIM)
    for before, after in zip(ours.states[:-1], ours.states[1:], strict=True):
        center = flat(after.uplink.server)
        np.testing.assert_allclose(flat(after.params) - flat(before.params), center, atol=1e-6)
        assert 0 < np.linalg.norm(center - last) <= 0.05 * (1 + 1e-6)
        last = center
    silent = learner(aggregate=centered_clipping(0.05), active=CLIENTS, links=jaxfl.links(0.0))
    assert_same(run(silent, KEY, DATA, 2, ours.states[-1])[0].uplink, ours.states[-1].uplink)
