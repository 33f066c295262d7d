"""Audits of algorithms with a server: canaries that are clients, and messages that add up several releases."""

import functools

import jax
import numpy as np
import optax
import pytest
from problems import linear_task, small_task, start, uneven_data

import jaxfl
from jaxfl import ArgumentError
from jaxfl.algorithms.ali_dpfl import released_gradients
from jaxfl.algorithms.fed_avg import released_updates
from jaxfl.core import FederatedData
from jaxfl.privacy.audit import audit, canary_scores, with_canaries
from jaxfl.privacy.audit_mechanism import Mechanism, check_mechanism
from jaxfl.privacy.client_audit import with_client_canaries

pytest.importorskip("jax_privacy.auditing")
KEY = jax.random.key(3)
STEP_SIZE, STEPS, CLIP_NORM, DELTA = 0.1, 2, 0.5, 1e-5
CANARIES = 40
REAL = uneven_data()
CLIENTS = REAL.num_nodes + CANARIES


# Canaries that are clients


def client_canaries(strength=8.0, seed=0, task=None):
    return with_client_canaries(task or small_task(), REAL, CANARIES, strength=strength, seed=seed)


def averaging(task, num_active=CLIENTS, noise_std=0.0, clip_norm=CLIP_NORM, **changes):
    options = {"batch_size": 4, "optimizer": optax.sgd(STEP_SIZE), "weighting": "uniform", **changes}
    updates = jaxfl.private_updates(clip_norm=clip_norm, noise=jaxfl.gaussian(noise_std), num_rounds=50)
    return jaxfl.fed_avg(
        task, clients=jaxfl.local_steps(STEPS, **options), num_active=num_active, uplink=jaxfl.uplink(updates=updates)
    )


@functools.cache
def one_round(clip_norm=CLIP_NORM, noise_std=0.0, seed=0, base=small_task):
    """(canaries, draws, what the server releases in a round of all clients)."""
    task, data, canaries = client_canaries(seed=seed, task=base())
    algorithm = averaging(task, clip_norm=clip_norm, noise_std=noise_std)
    before = start(algorithm, KEY, data)
    draws = algorithm.draw(KEY, before, data)
    after, _ = jax.jit(algorithm.update)(before, data, draws)
    return canaries, draws, released_updates(before, after)


@pytest.mark.parametrize(
    ("base", "clip_norm", "norm"),
    [(small_task, CLIP_NORM, CLIP_NORM), (linear_task, 1e9, STEP_SIZE * STEPS * 8.0)],
)
@pytest.mark.slow
def test_an_included_canary_clients_update_lies_in_its_own_coordinate_an_excluded_ones_is_zero(clip_norm, norm, base):
    canaries, _, released = one_round(clip_norm, base=base)
    assert 10 < canaries.included.sum() < CANARIES - 10
    expected = norm / CLIENTS * canaries.included
    np.testing.assert_allclose(released["canary"][0], expected, rtol=1e-5, atol=1e-9)
    # What the clients with real samples release does not depend on any coin.
    _, _, others = one_round(clip_norm, seed=1, base=base)
    for own, other in zip(jax.tree.leaves(released), jax.tree.leaves(others), strict=True):
        if own.shape != (1, CANARIES):
            np.testing.assert_array_equal(own, other)
            assert np.any(own)


def test_real_clients_keep_their_samples_and_sizes_do_not_depend_on_coins():
    (_, data, canaries), (_, other, _) = client_canaries(), client_canaries(seed=1)
    np.testing.assert_array_equal(data.indices[: REAL.num_nodes], REAL.indices)
    np.testing.assert_array_equal(data.sizes, [*REAL.sizes.tolist(), *[1] * CANARIES])
    for name in ("labels", "indices", "sizes"):
        np.testing.assert_array_equal(getattr(data, name), getattr(other, name))
    own = np.asarray(data.inputs)[np.asarray(data.indices)[REAL.num_nodes :, 0]]
    np.testing.assert_array_equal(own[:, -2], canaries.coordinates + 1)
    np.testing.assert_array_equal(own[:, -1], canaries.included)
    assert set(canaries.coordinates.tolist()) == set(range(CANARIES))
    assert not canaries.nodes.any(), "the server's release has a single row"


def test_what_the_server_releases_equals_the_pseudo_gradient_of_the_round():
    """Minus the sum of clipped updates with its noise, over the clients expected."""
    canaries, draws, released = one_round(noise_std=0.3)
    expected = (CLIP_NORM * canaries.included - draws.uplink.noise["canary"]) / CLIENTS
    np.testing.assert_allclose(released["canary"][0], expected, rtol=1e-4, atol=1e-7)
    _, _, plain = one_round()
    for name, leaf in plain.items():
        noise = jax.tree.map(lambda drawn: -drawn / CLIENTS, draws.uplink.noise[name])
        jax.tree.map(
            lambda mine, own, added: np.testing.assert_allclose(mine[0], own[0] + added, atol=1e-6),
            released[name],
            leaf,
            noise,
        )


def test_an_audit_of_whole_clients_sees_who_is_in():
    """With next to no noise all guesses are right, and what an included client adds is what is claimed."""
    task, data, canaries = client_canaries()
    algorithm = averaging(task, num_active=30, noise_std=1e-4)
    claimed = Mechanism(noise_std=1e-4 / 30, signal=12 * CLIP_NORM / CLIENTS, num_releases=12)
    claim = {"dp_epsilon": 1.0, "claimed": claimed, "significance": 0.05}
    relation = "zero_out_client"
    silent, claim["neighboring_relation"] = averaging(task, num_active=30), relation
    result = audit(algorithm, silent, released_updates, data, canaries, KEY, 12, DELTA, **claim)
    assert result.neighboring_relation == relation
    assert result.num_guesses == result.num_correct
    checks = {check.name: check for check in result.checks}
    assert checks["releases"].measured == 12
    assert not any(checks[name].refuted for name in ("noise of one release", "noise of all releases", "signal"))
    assert checks["signal"].measured == pytest.approx(claimed.signal, rel=0.1), "a client takes part in some rounds"
    assert result.scores[canaries.included].min() > 100 * np.abs(result.scores[~canaries.included]).max()


@pytest.mark.parametrize(("count", "strength"), [(0, 1.0), (10, 0.0)])
def test_bad_client_canaries_are_refused(count, strength):
    with pytest.raises(ArgumentError, match="num_canaries" if count == 0 else "strength"):
        with_client_canaries(small_task(), REAL, count, strength=strength, seed=0)


# Messages that add up several releases


NUM_CANARIES, BATCH, NOISE_STD, ITERATIONS, ROUNDS = 600, 300, 0.01, 9, 6


@functools.cache
def adaptive(noise_std=NOISE_STD):
    """(algorithm, data, canaries) of ALI-DPFL with one client, whose budget is spent before the rounds are."""
    real = FederatedData(REAL.inputs, REAL.labels, REAL.indices[2:3], REAL.sizes[2:3])
    task, data, canaries = with_canaries(small_task(), real, NUM_CANARIES, strength=4 * CLIP_NORM, seed=0)
    steps = jaxfl.local_steps(
        ITERATIONS,
        batch_size=BATCH,
        optimizer=optax.sgd(STEP_SIZE),
        sampler=jaxfl.gradients.poisson,
        clip_norm=CLIP_NORM,
        noise=jaxfl.gaussian(noise_std),
    )
    budget = {"max_rounds": 4, "max_iterations": ITERATIONS, "kappa": 1e3, "step_size": STEP_SIZE}
    constants = jaxfl.private_constants(5, clip_norm=CLIP_NORM, loss_bound=1.0, noise_multiplier=20.0)
    algorithm = jaxfl.ali_dpfl(task, clients=steps, constants=constants, **budget)
    return algorithm, data, canaries


@functools.cache
def adaptive_rounds():
    """For each round: (tau, what is released, noise of its steps, visits of each canary)."""
    algorithm, data, _ = adaptive()
    draw, update = jax.jit(lambda state: algorithm.draw(KEY, state, data)), jax.jit(algorithm.update)
    noise_of = jax.jit(lambda keys: keys.draw(jaxfl.gaussian(NOISE_STD), state.params))
    state, rounds, first = start(algorithm, KEY, data), [], int(data.sizes[0]) - NUM_CANARIES
    for _ in range(ROUNDS):
        draws = draw(state)
        after, _ = update(state, data, draws)
        tau = int(state.num_steps)
        keys = [jax.tree.map(lambda leaf, t=t: leaf[0, t], draws.steps.noise) for t in range(tau)]
        noise = sum((np.asarray(noise_of(key)["canary"], np.float64) for key in keys), np.zeros(NUM_CANARIES))
        drawn = np.asarray(draws.steps.batch_indices)[0, :tau].ravel() - first
        visits = np.bincount(drawn[(drawn >= 0) & (drawn < NUM_CANARIES)], minlength=NUM_CANARIES)
        rounds.append((tau, released_gradients(STEP_SIZE, state, after)["canary"][0], noise, visits))
        state = after
    return rounds


@pytest.mark.slow
def test_what_a_round_releases_equals_the_sum_of_its_noisy_gradients():
    _, _, canaries = adaptive()
    taus = [tau for tau, *_ in adaptive_rounds()]
    assert sum(taus) == ITERATIONS
    assert len({tau for tau in taus if tau}) > 1, "tau changes"
    assert taus[-1] == 0, "and the budget is spent before the last round"
    for tau, released, noise, visits in adaptive_rounds():
        expected = noise + CLIP_NORM / BATCH * visits * canaries.included
        np.testing.assert_allclose(released, expected, atol=1e-6)
        assert np.any(released) == (tau > 0), "zero for a round without iterations"


@pytest.mark.slow
def test_a_message_of_several_releases_counts_with_the_variance_of_one():
    (algorithm, data, canaries), (silent, *_) = adaptive(), adaptive(0.0)
    released = functools.partial(released_gradients, STEP_SIZE)
    sizes = data.sizes

    @functools.partial(jax.jit, static_argnums=1)
    def scores(data, counted):
        def num_releases(before, after):
            return after.iterations - before.iterations

        data = data._replace(sizes=sizes)
        number = num_releases if counted else None
        return canary_scores(algorithm, silent, released, data, canaries, KEY, ROUNDS, number)

    result, rounds = scores(data, True), adaptive_rounds()
    taus = np.array([tau for tau, *_ in rounds])
    np.testing.assert_array_equal(result.counts, taus)
    messages = np.stack([values for _, values, *_ in rounds])
    np.testing.assert_allclose(result.releases, messages, rtol=1e-4, atol=1e-6)
    visits = np.stack([visits for *_, visits in rounds])
    np.testing.assert_allclose(result.added, CLIP_NORM / BATCH * visits, atol=1e-6, err_msg="without noise, of all")

    def noise_of_one(counts):
        claimed = Mechanism(NOISE_STD, 1.0, ITERATIONS)
        actual = check_mechanism(
            messages, canaries.included, claimed, dp_epsilon=1.0, dp_delta=DELTA, significance=0.05, counts=counts
        )
        return actual[1].measured

    out = messages[:, ~canaries.included]
    mean = (np.square(out) / np.maximum(taus, 1)[:, None]).sum() / out[taus > 0].size
    assert noise_of_one(taus) == pytest.approx(np.sqrt(mean))
    assert noise_of_one(taus) == pytest.approx(NOISE_STD, rel=0.08)  # 3.9 standard errors of about 1,200 numbers
    alike = scores(data, False)
    np.testing.assert_array_equal(alike.counts, np.ones(ROUNDS))
    assert noise_of_one(np.asarray(alike.counts)) == pytest.approx(np.sqrt(np.square(out).mean()))
