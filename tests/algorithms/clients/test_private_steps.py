"""Private local steps: DP-SGD against a plain loop, its noise and its sensitivity."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import linear_task, small_task, start, uneven_data
from reference.dp_clients import dp_fed_avg
from reference.runs import assert_same, check_noise, client_batches, flat, node_samples, one_by_one

import jaxfl
from jaxfl.algorithms.clients.steps import NoiseKeys, NoiseValues, Step
from jaxfl.gradients import poisson

KEY = jax.random.key(5)
SIZES = (7, 9, 5, 12, 6)
BATCH = 4
CLIP_NORM, NOISE_STD = 1.5, 0.05
OWN = (0.05, 0.0, 0.2, 0.1, 0.4)  # scales of the clients


def steps(max_steps=3, **changes):
    """DP-SGD."""
    options = {"batch_size": BATCH, "optimizer": optax.sgd(0.3), "sampler": poisson, "clip_norm": CLIP_NORM}
    return jaxfl.local_steps(max_steps, **{**options, "noise": jaxfl.gaussian(NOISE_STD), **changes})


def learner(task=None, **changes):
    """Three of five clients."""
    return jaxfl.fed_avg(small_task() if task is None else task, clients=steps(**changes), num_active=3)


def noise_values(keys, mechanism, like):
    """Draw the noise of `NoiseKeys` of any shape, leaves (*shape, *leaf)."""
    one = jax.vmap(lambda key: NoiseKeys(key).draw(mechanism, like))
    flat_values = jax.jit(one)(keys.reshape(-1))
    return jax.tree.map(lambda leaf: leaf.reshape(*keys.shape, *leaf.shape[1:]), flat_values)


def as_float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


@pytest.mark.parametrize("scales", [np.float32(NOISE_STD), np.array(OWN, "float32")], ids=["one scale", "own scales"])
def test_private_clients_follow_dp_sgd(scales):
    """Twenty rounds of Poisson batches, clipping and noise at uneven clients, on the same draws."""
    algorithm, data = learner(noise=jaxfl.gaussian(scales)), uneven_data(SIZES)
    outcome = one_by_one(algorithm, KEY, data, 20)
    first, rounds = outcome.states[0].params, []
    for draws in outcome.draws:
        noise = as_float64(noise_values(draws.steps.noise.keys, jaxfl.gaussian(1.0), first))
        own_scales = np.broadcast_to(scales, 5)[np.asarray(draws.active)].astype(float)
        noise = jax.tree.map(lambda leaf, by=own_scales: np.einsum("k...,k->k...", leaf, by), noise)
        active = client_batches(np.asarray(draws.active), np.asarray(draws.steps.batch_indices), SIZES)
        own = [[jax.tree.map(lambda leaf, c=c, t=t: leaf[c, t], noise) for t in range(3)] for c in range(3)]
        rounds.append(([(*one, noises) for one, noises in zip(active, own, strict=True)], None))
    local = {"step_size": 0.3, "batch_size": BATCH, "clip_norm": CLIP_NORM}
    x, losses, fractions, _ = dp_fed_avg(as_float64(first), node_samples(data), rounds, weighting="data", **local)
    actual = flat(outcome.states[-1].params)
    assert np.linalg.norm(actual - flat(x)) < 1e-5 * np.linalg.norm(flat(x))
    np.testing.assert_allclose([info.loss for info in outcome.infos], losses, rtol=1e-4)
    for info, of_client, (active, _) in zip(outcome.infos, fractions, rounds, strict=True):
        expected, used = np.zeros(5), np.zeros(5)
        for client, batches, _ in active:
            expected[client], used[client] = of_client[client], sum(map(len, batches))
        np.testing.assert_allclose(info.clipped_fraction, expected, rtol=1e-6)
        np.testing.assert_array_equal(info.gradient_evaluations, used)
        assert int(info.local_iterations) == 3
    assert 0.2 < np.mean([list(of_client.values()) for of_client in fractions]) < 0.8, "some are scaled, some not"


@pytest.mark.parametrize(("mechanism", "node_loop"), [(jaxfl.gaussian, "vmap"), (jaxfl.laplace, "map")])
def test_each_client_has_noise_of_its_own_scale(mechanism, node_loop):
    """Steps without samples leave the noise; scales are traced, and swept in one program.

    What a client of a scale moves by is that scale times what a scale of 1 moves it by.
    """
    task, data = small_task()._replace(node_loop=node_loop), uneven_data(SIZES)
    silent = data._replace(inputs=0 * data.inputs)

    def moves(scales):
        clients = steps(1, clip_norm=1e-12, noise=mechanism(scales))
        algorithm = jaxfl.partial_averaging(task, clients=clients, synchronized=())
        state = start(algorithm, KEY, silent)
        after = algorithm.round(KEY, state, silent)[0]
        return jax.tree.map(jnp.subtract, after.params, state.params)

    own = jnp.array([OWN, OWN[::-1]], jnp.float32)
    actual = jax.jit(jax.vmap(moves))(own)
    unit = jax.jit(moves)(jnp.float32(1.0))
    expected = jax.tree.map(lambda leaf: jnp.einsum("sn,n...->sn...", own, leaf), unit)
    assert_same(actual, expected, rtol=1e-4, atol=1e-6)
    same = jax.jit(moves)(jnp.ones(5))
    assert_same(same, unit)


def test_data_of_more_clients_than_scales_is_refused_in_any_round():
    algorithm, data = learner(noise=jaxfl.gaussian(jnp.array(OWN[:4]))), uneven_data(SIZES)
    state = start(algorithm, KEY, uneven_data(SIZES[:4]))
    with pytest.raises(jaxfl.ArgumentError, match=r"^noise: must be a scalar or hold one number per node"):
        algorithm.round(KEY, state, data)


def test_the_scale_is_the_clients_own_where_few_take_part():
    """Three of five clients: noise has the standard deviation of the client in the slot."""
    clients, data = steps(noise=jaxfl.gaussian(jnp.array(OWN))), uneven_data(SIZES)
    active = jnp.array([4, 0, 2], jnp.int32)
    one_round = jax.jit(lambda r: clients.steps(data, active, clients.draw(KEY, r, active, data, small_task())).noise)
    like = {"w": jnp.zeros(1500), "b": jnp.zeros((5, 100))}
    draw = jax.jit(jax.vmap(jax.vmap(lambda keys: keys.draw(jaxfl.gaussian(jnp.array(OWN)), like))))
    rounds = [draw(one_round(jnp.int32(r))) for r in range(12)]
    rows = np.stack([np.concatenate([one["w"], np.reshape(one["b"], (3, 3, -1))], axis=-1) for one in rounds])
    rows = rows.transpose(0, 2, 1, 3).reshape(36, 3, 2000)
    check_noise(rows, np.repeat(np.array(OWN)[[4, 0, 2], None], 36, axis=1), "gaussian")


def test_noise_may_come_from_another_source():
    """Its values in place of the keys give the same round."""
    algorithm, data = learner(), uneven_data(SIZES)
    state = start(algorithm, KEY, data)
    draws = jax.jit(algorithm.draw)(KEY, state, data)
    values = NoiseValues(noise_values(draws.steps.noise.keys, jaxfl.gaussian(NOISE_STD), state.params))
    other = draws._replace(steps=draws.steps._replace(noise=values))
    actual, expected = (jax.jit(algorithm.update)(state, data, d) for d in (other, draws))
    assert_same(actual, expected, rtol=1e-6, atol=1e-7)
    doubled = other._replace(steps=other.steps._replace(noise=jax.tree.map(lambda leaf: 2 * leaf, values)))
    moved = flat(jax.jit(algorithm.update)(state, data, doubled)[0].params) - flat(expected[0].params)
    assert np.abs(moved).max() > 0.01


def gradient_of(data, task, **changes):
    """(samples, mask) -> what a step says of given parameters."""
    params = jax.tree.map(lambda leaf: 3 * leaf, task.init(jax.random.key(1)))
    one_step = steps(**changes).gradient_of(task, data)
    return jax.jit(lambda samples, mask: one_step(params, None, Step(samples, mask, None, None)))


@pytest.mark.parametrize("task", [small_task(), linear_task()], ids=["layers", "one by one"])
def test_a_sample_moves_a_steps_gradient_by_at_most_clip_norm_over_b(task):
    """Each sample in turn is left out; the bound is reached."""
    data, batch = uneven_data(SIZES), jnp.arange(8, dtype=jnp.int32)
    step = gradient_of(data._replace(inputs=10 * data.inputs), task)
    whole, everything = flat(step(batch, jnp.ones(8, bool)).gradient), np.arange(8)
    moved = [np.linalg.norm(flat(step(batch, everything != j).gradient) - whole) for j in everything]
    assert max(moved) <= CLIP_NORM / BATCH * (1 + 1e-5)
    assert max(moved) > CLIP_NORM / BATCH * 0.999
    unclipped = gradient_of(data._replace(inputs=10 * data.inputs), task, clip_norm=None)
    whole = flat(unclipped(batch, jnp.ones(8, bool)).gradient)
    moved = [np.linalg.norm(flat(unclipped(batch, everything != j).gradient) - whole) for j in everything]
    assert max(moved) > 2 * CLIP_NORM / BATCH


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_sample_whose_gradient_is_not_finite_counts_as_zero_and_is_counted(bad):
    data, task, batch = uneven_data(SIZES), linear_task(), jnp.arange(8, dtype=jnp.int32)
    clean = gradient_of(data, task)(batch, np.arange(8) != 3)
    broken = gradient_of(data._replace(inputs=data.inputs.at[3].set(bad)), task)(batch, jnp.ones(8, bool))
    assert_same(broken.gradient, clean.gradient)
    np.testing.assert_array_equal(broken.info.loss, clean.info.loss)
    assert (int(broken.info.discarded_gradients), int(clean.info.discarded_gradients)) == (1, 0)


def test_an_empty_slot_contributes_nothing():
    """A batch without any sample has gradient zero, and its step adds the noise alone."""
    data, task = uneven_data(SIZES), small_task()
    nothing = gradient_of(data, task)(jnp.arange(8, dtype=jnp.int32), jnp.zeros(8, bool))
    assert not flat(nothing.gradient).any()
    assert float(nothing.info.loss) == 0
