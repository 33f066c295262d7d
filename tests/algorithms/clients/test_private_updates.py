"""Private updates of whole clients: the papers' lines, who takes part, sensitivity, and noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusals, refused
from problems import small_task, start, statistics_task, uneven_data
from reference.dp_clients import dp_fed_avg
from reference.runs import assert_same, check_noise, client_batches, flat, node_samples, one_by_one, without_slot

import jaxfl
from jaxfl import privacy
from jaxfl.core.info import plain
from jaxfl.models import classification, layers, sequential

KEY = jax.random.key(7)
SIZES = (7, 9, 5, 12, 6, 8, 10)
BATCH, EXPECTED = 4, 3
CLIP_NORM, NOISE_STD = 0.5, 0.05


def private(**changes):
    """Clipped updates with noise."""
    return jaxfl.private_updates(**{"clip_norm": CLIP_NORM, "noise": jaxfl.gaussian(NOISE_STD), **changes})


def learner(task=None, num_active=EXPECTED, server_optimizer=None, **changes):
    """Three of seven clients expected, three plain steps."""
    updates = changes.pop("updates", private())
    options = {"batch_size": BATCH, "optimizer": optax.sgd(0.3), "weighting": "uniform", **changes}
    return jaxfl.fed_avg(
        small_task() if task is None else task,
        clients=jaxfl.local_steps(3, **options),
        num_active=num_active,
        uplink=None if updates is None else jaxfl.uplink(updates=updates),
        server_optimizer=server_optimizer,
    )


def as_float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


@functools.cache
def drawn(count=2000, num_active=EXPECTED):
    """(rounds, n): who takes part in many rounds; and the draws, stacked."""
    algorithm, data = learner(num_active=num_active), uneven_data(SIZES)
    state = start(algorithm, KEY, data)
    draw = jax.jit(jax.vmap(lambda r: algorithm.draw(KEY, state._replace(round_index=r), data)))
    draws = draw(jnp.arange(count, dtype=jnp.int32))
    takes_part = np.zeros((count, len(SIZES)), int)
    for r, (active, there) in enumerate(zip(np.asarray(draws.active), np.asarray(draws.uplink.is_active), strict=True)):
        np.add.at(takes_part[r], active[there], 1)
    return takes_part, draws


KINDS = {"plain steps": {}, "private steps": {"clip_norm": 1.5}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick_cases(1)
def test_follows_the_papers_lines(kind):
    """Twenty rounds: clients drawn one by one, clipped updates, noise, a fixed denominator; steps clipped or not."""
    algorithm, data = learner(**KINDS[kind]), uneven_data(SIZES)
    outcome = one_by_one(algorithm, KEY, data, 20)
    first, rounds = as_float64(outcome.states[0].params), []
    zero = jax.tree.map(np.zeros_like, first)
    for draws in outcome.draws:
        there = np.asarray(draws.uplink.is_active)
        batches = np.asarray(draws.steps.batch_indices)[there]
        active = client_batches(np.asarray(draws.active)[there], batches, SIZES)
        rounds.append(([(*one, [zero] * 3) for one in active], as_float64(draws.uplink.noise)))
    local = {"step_size": 0.3, "batch_size": BATCH, "clip_norm": KINDS[kind].get("clip_norm", np.inf)}
    x, losses, fractions, scaled = dp_fed_avg(first, node_samples(data), rounds, updates=(CLIP_NORM, EXPECTED), **local)
    actual = flat(outcome.states[-1].params)
    assert np.linalg.norm(actual - flat(x)) < 1e-5 * np.linalg.norm(flat(x))
    np.testing.assert_allclose([info.loss for info in outcome.infos], losses, rtol=1e-4)
    for info, of_client, own in zip(outcome.infos, fractions, scaled, strict=True):
        takes_part = np.isin(np.arange(len(SIZES)), list(of_client))
        np.testing.assert_array_equal(info.active, takes_part)
        np.testing.assert_array_equal(info.bits_sent, takes_part * 32 * (6 * 5 + 5 + 5 * 3 + 3))
        np.testing.assert_array_equal(info.bits_received, info.bits_sent)
        np.testing.assert_array_equal(info.gradient_evaluations, takes_part * 3 * BATCH)
        np.testing.assert_array_equal(np.flatnonzero(info.clipped_updates), own)
        assert not np.asarray(info.discarded_updates).any()
    numbers = [len(own) for own in scaled]
    assert 0 < sum(numbers) < sum(map(len, fractions)), "some are scaled, some not"
    assert len({len(of_client) for of_client in fractions}) > 2, "another number of clients each round"


def test_each_client_takes_part_independently_with_probability_num_active_over_n():
    """Each, and each pair, within 4 standard errors; there are slots enough."""
    takes_part, draws = drawn()
    assert takes_part.max() == 1
    assert not np.asarray(draws.uplink.overflow).any()
    rounds, rate = len(takes_part), EXPECTED / len(SIZES)
    together = takes_part.T @ takes_part / rounds
    expected = np.where(np.eye(len(SIZES), dtype=bool), rate, rate**2)
    assert np.all(np.abs(together - expected) <= 4 * np.sqrt(expected * (1 - expected) / rounds))
    spread = takes_part.sum(axis=1).var() / (len(SIZES) * rate * (1 - rate))
    assert abs(spread - 1) <= 4 * np.sqrt(2 / rounds), "a number of clients has the variance of independent draws"
    after = np.mean(takes_part[1:] * takes_part[:-1])
    assert abs(after - rate**2) <= 4 * np.sqrt(rate**2 / (rounds * len(SIZES))), "rounds are independent"


def test_all_clients_take_part_where_that_is_their_number():
    assert np.all(drawn(50, len(SIZES))[0] == 1)


def test_clients_without_a_slot_are_an_error():
    """Few of 40 clients have a slot; the overflow of one that found none shows at all of them."""
    data = uneven_data([1] * 40)
    algorithm = learner(num_active=2, batch_size=1)
    state = start(algorithm, KEY, data)
    draws = jax.jit(algorithm.draw)(KEY, state, data)
    assert draws.active.shape[0] < 40
    full = draws._replace(uplink=draws.uplink._replace(overflow=jnp.int32(1)))
    update = jax.jit(algorithm.update)
    assert int(update(state, data, draws)[1].batch_overflow.sum()) == 0
    assert np.all(np.asarray(update(state, data, full)[1].batch_overflow) == 1)


def first_round(algorithm, data):
    """The first state, and the draws of its round."""
    state = start(algorithm, KEY, data)
    return state, jax.jit(algorithm.draw)(KEY, state, data)


@pytest.mark.parametrize("node_loop", ["vmap", "map"])
@pytest.mark.quick_cases(1)
def test_one_client_moves_what_is_released_by_at_most_the_clip_norm(node_loop):
    """Check a whole round: the move of the server's model, times the clients expected. The bound is reached."""
    data, task = uneven_data(SIZES), small_task()._replace(node_loop=node_loop)
    algorithm = learner(task, num_active=len(SIZES), optimizer=optax.sgd(2.0))
    state, draws = first_round(algorithm, data)
    update = jax.jit(algorithm.update)
    whole, moved = flat(update(state, data, draws)[0].params), []
    for client in range(len(SIZES)):
        without, info = update(state, data, without_slot(draws, client))
        moved.append(len(SIZES) * np.linalg.norm(flat(without.params) - whole))
        assert int(info.active[client]) == int(info.gradient_evaluations[client]) == 0
    assert max(moved) <= CLIP_NORM * (1 + 1e-4)
    assert max(moved) > CLIP_NORM * 0.999


def test_an_update_that_is_not_finite_counts_as_zero():
    """And is counted: the round is that without the client, but for what is said of it."""
    data = uneven_data(SIZES)
    broken = data._replace(inputs=data.inputs.at[data.indices[2, : SIZES[2]]].set(np.nan))
    algorithm = learner(num_active=len(SIZES))
    state, draws = first_round(algorithm, data)
    update = jax.jit(algorithm.update)
    actual, info = update(state, broken, draws)
    expected, clean = update(state, data, without_slot(draws, 2))
    assert_same(actual.params, expected.params)
    np.testing.assert_array_equal(info.loss, clean.loss)
    np.testing.assert_array_equal(info.discarded_updates, np.arange(len(SIZES)) == 2)


def test_one_client_changes_the_sum_by_at_most_clip_norm():
    """Check updates of any size, and empty slots that hold anything; the sum is that of the clipped updates."""
    rng, updates = np.random.default_rng(0), private()
    sizes = np.array([0.0, 1e-30, 0.1, CLIP_NORM, 1.0, 1e15, np.nan, np.inf, 5.0], np.float32)
    directions = rng.normal(size=(9, 40)).astype(np.float32)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    changes = {"a": jnp.asarray(sizes[:, None] * directions), "b": jnp.zeros((9, 2, 3))}
    there = np.array([True] * 8 + [False])
    total = updates.sum(changes, jnp.asarray(there))
    kept = np.where(np.isfinite(sizes) & there, np.minimum(np.nan_to_num(sizes), CLIP_NORM), 0.0)
    np.testing.assert_allclose(total.total["a"], kept @ directions.astype(np.float64), rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(total.counts["clipped_updates"], [0, 0, 0, 0, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(plain(total.counts["discarded_updates"]), [0, 0, 0, 0, 0, 0, 1, 1, 0])
    for client in range(9):
        other = updates.sum(changes, jnp.asarray(there & (np.arange(9) != client)))
        assert np.linalg.norm(flat(total.total) - flat(other.total)) <= CLIP_NORM * (1 + 1e-6)


def test_noise_has_the_scale_of_the_mechanism_and_is_independent_over_rounds():
    algorithm, data = learner(small_task(hidden=200)), uneven_data(SIZES)
    state = start(algorithm, KEY, data)
    draw = jax.jit(jax.vmap(lambda r: algorithm.draw(KEY, state._replace(round_index=r), data).uplink.noise))
    noise = draw(jnp.arange(40, dtype=jnp.int32))
    rows = np.concatenate([np.asarray(leaf).reshape(40, 1, -1) for leaf in jax.tree.leaves(noise)], axis=2)
    assert rows.shape[2] == 6 * 200 + 200 + 200 * 3 + 3
    check_noise(rows, np.full((1, 40), NOISE_STD), "gaussian")


def in_pairs(num_clients=7):
    keys = privacy.key_graph("ring", num_clients)
    return private(noise=jaxfl.shared_gaussian(NOISE_STD, key_graph=keys, ratio=2.0, colluding=1))


def test_noise_of_pairs_is_the_sum_of_what_the_clients_draw():
    """A client that is told from the others by its effective noise; the sum, from which shared parts are gone."""
    updates, n = in_pairs(), len(SIZES)
    algorithm, data = learner(small_task(hidden=200), n, updates=updates), uneven_data(SIZES)
    state = start(algorithm, KEY, data)
    draw = jax.jit(jax.vmap(lambda r: algorithm.draw(KEY, state._replace(round_index=r), data).uplink.noise))
    noise = draw(jnp.arange(40, dtype=jnp.int32))
    rows = np.concatenate([np.asarray(leaf).reshape(40, 1, -1) for leaf in jax.tree.leaves(noise)], axis=2)
    of_clients = np.asarray(updates.noise.draw(KEY, jnp.zeros((n, 50_000))), np.float64)
    of_sum = of_clients.sum(axis=0).std()
    assert NOISE_STD < of_sum < 0.8 * np.sqrt(n) * NOISE_STD  # with noise of clients' own it would be sqrt(n)
    check_noise(rows, np.full((1, 40), of_sum), "gaussian")


def test_noise_of_pairs_holds_against_the_server_at_the_epsilon_of_a_trusted_one():
    data, everybody = uneven_data(SIZES), len(SIZES)
    (of_server,) = privacy.statements(learner(num_active=everybody), data, 20, dp_delta=1e-5)
    shared = learner(num_active=everybody, updates=in_pairs())
    (of_pairs,) = privacy.statements(shared, data, 20, dp_delta=1e-5)
    assert of_pairs.dp_epsilon == of_server.dp_epsilon
    assert of_server.observer == "all other clients, but not the server"
    assert of_pairs.observer == "the server and any one other node"
    state = start(shared, KEY, data)
    bits = [jax.jit(shared.round)(KEY, state._replace(round_index=jnp.int32(r)), data)[1].bits_sent for r in (0, 1)]
    np.testing.assert_array_equal(bits[0] - bits[1], 2 * 256)  # public keys, for two partners


def test_empty_slots_cost_nothing_where_clients_run_one_after_the_other():
    """As many batches are computed as clients that take part have steps."""
    data, computed = uneven_data(SIZES), []

    def loss(params, inputs, labels):
        jax.debug.callback(lambda _: computed.append(1), params["dense_2"]["bias"])
        return small_task().loss(params, inputs, labels)

    algorithm = learner(small_task()._replace(node_loop="map", loss=loss))
    state = start(algorithm, KEY, data)
    _, info = jax.block_until_ready(jax.jit(algorithm.round)(KEY, state, data))
    jax.effects_barrier()
    assert 0 < int(info.active.sum()) < len(SIZES)
    assert len(computed) == 3 * int(info.active.sum())


def test_dropout_alone_is_no_model_state_that_could_tell_of_a_client():
    """It is taken, and a round has keys of its own for it."""
    named = [("dense_1", layers.dense(6, 8)), ("dropout_1", layers.dropout(0.5)), ("dense_2", layers.dense(8, 3))]
    algorithm, data = learner(classification(sequential(named))), uneven_data(SIZES)
    state = jax.eval_shape(algorithm.init, KEY, data)
    draws = jax.eval_shape(algorithm.draw, KEY, state, data)
    assert draws.steps.dropout_keys.shape == (len(draws.active), 3)
    jax.eval_shape(algorithm.update, state, data, draws)


def test_batch_statistics_are_refused():
    refused(lambda: learner(statistics_task()), "task", "no model state", "Use group normalization.")


def part_of_a_model():
    steps = jaxfl.local_steps(3, batch_size=BATCH, optimizer=optax.sgd(0.3), weighting="uniform")
    options = {"clients": steps, "uplink": jaxfl.uplink(updates=in_pairs())}
    return jaxfl.partial_averaging(small_task(), synchronized=["dense_1"], **options)


test_what_it_refuses = refusals(
    [
        (lambda: learner(weighting="data"), "clients"),
        (lambda: private(clip_norm=0.0), "clip_norm"),
        (lambda: private(clip_norm=jnp.ones(2)), "clip_norm"),
        (lambda: private(noise=jaxfl.gaussian(jnp.ones(7))), "noise"),
        (lambda: private(num_rounds=0), "num_rounds"),
        (lambda: start(learner(num_active=8), KEY, uneven_data(SIZES)), "num_active"),
        (lambda: first_round(learner(updates=in_pairs()), uneven_data(SIZES)), "num_active"),
        (lambda: privacy.epsilon(learner(updates=in_pairs()), SIZES, 9, dp_delta=1e-5), "num_active"),
        (lambda: privacy.epsilon(learner(num_active=7, updates=in_pairs(6)), SIZES, 9, dp_delta=1e-5), "num_active"),
        (lambda: jaxfl.uplink(updates=in_pairs(), links=jaxfl.links(0.5)), "links"),
        (part_of_a_model, "noise"),
    ]
)
