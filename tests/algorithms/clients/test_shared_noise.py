"""Noise that pairs of active clients share in each local step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfl
from jaxfl import privacy
from jaxfl.algorithms.clients.shared_noise import own_part
from jaxfl.core import ArgumentError
from jaxfl.gradients import poisson
from jaxfl.privacy.shared import effective_noise, key_graph

CLIENTS, ACTIVE, STEPS, RATIO, NOISE, WIDTH, RATE = 7, 5, 3, 2.0, 0.5, 4_000, 0.1
KEY = jax.random.key(3)
INPUTS, PARTS = np.ones((8 * CLIENTS, 1), "float32"), [*np.arange(8 * CLIENTS).reshape(CLIENTS, 8)]
DATA = jaxfl.federate(INPUTS, np.zeros(len(INPUTS), "float32"), PARTS)
# No gradient anywhere: what moves is noise.
TASK = jaxfl.from_functions(lambda key: jnp.zeros(WIDTH), lambda w, x, y: 0.0 * (x @ w[:1]))


def noise_of(which="exponential", ratio=RATIO, **options):
    return jaxfl.shared_gaussian(NOISE, key_graph=key_graph(which, ACTIVE), ratio=ratio, **options)


def clients_of(noise, **options):
    rule = {"optimizer": optax.sgd(RATE), "sampler": poisson, "clip_norm": 1.0, "weighting": "uniform"}
    return jaxfl.local_steps(STEPS, batch_size=4, noise=noise, **{**rule, **options})


def drawn(noise, round_index):
    """Noise of all local steps of a round, (k, tau, d)."""
    clients, active = clients_of(noise), jnp.array([0, 2, 3, 5, 6])
    steps = clients.steps(DATA, active, clients.draw(KEY, round_index, active, DATA, TASK))
    own = own_part(noise)
    return jax.vmap(jax.vmap(lambda keys: keys.draw(own, jnp.zeros(WIDTH))))(steps.noise)


@pytest.mark.parametrize("which", ["ring", "exponential", "complete"])
def test_steps_have_the_covariance_that_is_calibrated_and_are_independent(which):
    noise = noise_of(which)
    weights = RATIO**2 * key_graph(which, ACTIVE).weights ** 2
    factor = 1 / effective_noise(key_graph(which, ACTIVE), ratio=RATIO).noise.min()
    expected = (NOISE * factor) ** 2 * (np.eye(ACTIVE) + np.diag(weights.sum(axis=1)) - weights)
    first, second = (np.asarray(drawn(noise, k), np.float64) for k in (0, 1))
    every = np.concatenate([first, second], axis=1)  # (k, steps, d)
    flat = every.reshape(ACTIVE, -1)
    spread = np.sqrt((np.outer(*2 * [np.diag(expected)]) + expected**2) / flat.shape[1])
    assert (abs(flat @ flat.T / flat.shape[1] - expected) < 4.5 * spread).all()
    apart = np.einsum("kad,lbd->abkl", every, every) / WIDTH
    apart = apart[~np.eye(2 * STEPS, dtype=bool)]
    assert abs(apart).max() < 6 * expected.max() / np.sqrt(WIDTH)


@pytest.mark.parametrize("node_loop", ["map", "vmap"])
def test_the_server_gets_noise_of_ones_own_only(node_loop):
    noise = noise_of()
    learner = jaxfl.fed_avg(TASK._replace(node_loop=node_loop), clients=clients_of(noise), num_active=ACTIVE)
    state, _ = jax.jit(learner.round)(KEY, learner.init(KEY, DATA), DATA)
    own = NOISE / effective_noise(key_graph("exponential", ACTIVE), ratio=RATIO).noise.min()
    expected = RATE * own * np.sqrt(STEPS / ACTIVE)
    assert abs(float(state.params.std()) / expected - 1) < 5 / np.sqrt(2 * WIDTH)


def test_epsilon_is_that_of_the_effective_noise_and_names_the_observer():
    pairs, own = (
        privacy.statements(jaxfl.fed_avg(TASK, clients=clients_of(noise), num_active=ACTIVE), DATA, 20, dp_delta=1e-5)
        for noise in (noise_of(), jaxfl.gaussian(NOISE))
    )
    assert [one.dp_epsilon for one in pairs] == [one.dp_epsilon for one in own]
    assert {one.observer for one in own} == {"the server and all other clients"}
    assert {one.observer for one in pairs} == {"the server and any one other node"}
    outside = clients_of(noise_of(colluding=0))
    (stated, *_) = privacy.statements(jaxfl.fed_avg(TASK, clients=outside, num_active=ACTIVE), DATA, 20, dp_delta=1e-5)
    assert "outside observer" in stated.observer


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: clients_of(noise_of(), weighting="data"), "weighting"),
        (lambda: clients_of(noise_of(), optimizer=optax.adam(0.1)), "optimizer"),
        (lambda: clients_of(jaxfl.shared_gaussian(jnp.ones(5), key_graph=key_graph("ring", 5), ratio=1.0)), "noise"),
        (lambda: started(clients_of(noise_of()), CLIENTS), "num_active"),
        (lambda: ali_dpfl(clients_of(noise_of(), num_steps=None)), "clients"),
    ],
)
def test_what_would_not_cancel_is_refused(make, argument):
    with pytest.raises(ArgumentError, match=f"^{argument}: "):
        make()


def test_a_linear_optimizer_passes():
    clients_of(noise_of(), optimizer=optax.sgd(0.1, momentum=0.9))


def started(clients, num_active):
    learner = jaxfl.fed_avg(TASK, clients=clients, num_active=num_active)
    return jax.eval_shape(learner.round, KEY, learner.init(KEY, DATA), DATA)


def ali_dpfl(clients):
    constants = jaxfl.private_constants(10, clip_norm=1.0, loss_bound=0.5, noise_multiplier=20.0)
    return jaxfl.ali_dpfl(TASK, clients=clients, constants=constants, max_rounds=5, max_iterations=20, step_size=RATE)


def test_keys_of_pairs_count_in_the_first_round_only():
    """Each client sends a key of 256 bits to each partner: to all others, where any may be active with it."""
    bits = {}
    for name, noise in (("pairs", noise_of("ring")), ("own", jaxfl.gaussian(NOISE))):
        learner = jaxfl.fed_avg(TASK, clients=clients_of(noise), num_active=ACTIVE)
        state, first = learner.round(KEY, learner.init(KEY, DATA), DATA)
        bits[name] = [np.asarray(info.bits_sent) for info in (first, learner.round(KEY, state, DATA)[1])]
    first, second = (pairs - own for pairs, own in zip(bits["pairs"], bits["own"], strict=True))
    np.testing.assert_array_equal(first, 256.0 * (CLIENTS - 1))
    np.testing.assert_array_equal(second, 0)
    task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: 0.0 * (x @ w[:1]))
    data = jaxfl.federate(INPUTS[:40], np.zeros(40, "float32"), [*np.arange(40).reshape(ACTIVE, 8)])
    graph, gradient = jaxfl.graphs.ring(ACTIVE), jaxfl.mini_batch(4, clip_norm=1.0)
    for build in (jaxfl.push_sum, jaxfl.d_psgd):
        of_graph = []
        for noise in (noise_of("ring"), jaxfl.gaussian(NOISE)):
            learner = build(task, graph=graph, gradient=gradient, noise=noise, step_size=0.1)
            of_graph.append(learner.round(KEY, learner.init(KEY, data), data)[1].bits_received)
        np.testing.assert_array_equal(of_graph[0] - of_graph[1], 512.0)


def of_sum(colluding=1, max_steps=1, **options):
    noise = jaxfl.summed_gaussian(NOISE, num_clients=ACTIVE, colluding=colluding)
    rule = {"optimizer": optax.sgd(RATE), "sampler": poisson, "clip_norm": 1.0, "weighting": "uniform"}
    return jaxfl.local_steps(max_steps, batch_size=4, **{"noise": noise, **rule, **options})


@pytest.mark.parametrize("colluding", [0, 1, 3])
def test_what_other_clients_add_to_a_sum_is_the_effective_noise(colluding):
    """The mean of all: of the m - A whose noise a server of sums does not know, the sum has the effective noise."""
    learner = jaxfl.fed_avg(TASK, clients=of_sum(colluding), num_active=ACTIVE)
    state, info = jax.jit(learner.round)(KEY, learner.init(KEY, DATA), DATA)
    expected = RATE * NOISE * np.sqrt(ACTIVE / (ACTIVE - colluding)) / ACTIVE
    assert abs(float(state.params.std()) / expected - 1) < 5 / np.sqrt(2 * WIDTH)
    (stated, *_) = privacy.statements(learner, DATA, 20, dp_delta=1e-5)
    own = jaxfl.fed_avg(TASK, clients=of_sum(noise=jaxfl.gaussian(NOISE)), num_active=ACTIVE)
    assert stated.dp_epsilon == privacy.statements(own, DATA, 20, dp_delta=1e-5)[0].dp_epsilon
    assert stated.observer.startswith("a server that sees sums only and")
    assert any("secure aggregation" in one for one in stated.assumptions)
    assert float(info.bits_sent.max()) > float(info.bits_received.max()) - 1 > 256 * (CLIENTS - 1)  # keys of masks


def test_a_whole_update_counts_by_its_sum_after_any_number_of_local_steps():
    noise = jaxfl.summed_gaussian(NOISE, num_clients=CLIENTS)
    steps = jaxfl.local_steps(STEPS, batch_size=4, optimizer=optax.sgd(RATE), weighting="uniform")
    updates = jaxfl.uplink(updates=jaxfl.private_updates(clip_norm=1.0, noise=noise))
    learner = jaxfl.fed_avg(TASK, clients=steps, num_active=CLIENTS, uplink=updates)
    state, _ = jax.jit(learner.round)(KEY, learner.init(KEY, DATA), DATA)
    expected = NOISE * np.sqrt(CLIENTS / (CLIENTS - 1)) / CLIENTS
    assert abs(float(state.params.std()) / expected - 1) < 5 / np.sqrt(2 * WIDTH)
    (stated,) = privacy.statements(learner, DATA, 20, dp_delta=1e-5)
    assert stated.observer == "a server that sees sums only and any one other node"


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: of_sum(max_steps=2), "max_steps"),
        (lambda: of_sum(weighting="data"), "weighting"),
        (lambda: of_sum(optimizer=optax.adam(0.1)), "optimizer"),
        (lambda: jaxfl.summed_gaussian(NOISE, num_clients=1), "num_clients"),
        (lambda: jaxfl.summed_gaussian(NOISE, num_clients=5, colluding=5), "colluding"),
        (lambda: jaxfl.summed_gaussian(jnp.ones(5), num_clients=5), "noise_std"),
        (lambda: jaxfl.summed_gaussian(-1.0, num_clients=5), "noise_std"),
        (
            lambda: jaxfl.fed_avg(
                TASK, clients=of_sum(), num_active=ACTIVE, uplink=jaxfl.uplink(links=jaxfl.links(0.5))
            ),
            "noise",
        ),
        (lambda: jaxfl.partial_averaging(TASK, clients=of_sum(), synchronized=()), "noise"),
        (lambda: started(of_sum(), CLIENTS), "num_active"),
        (
            lambda: jaxfl.push_sum(
                TASK, graph=jaxfl.graphs.ring(5), step_size=0.1, noise=jaxfl.summed_gaussian(NOISE, num_clients=5)
            ),
            "noise",
        ),
    ],
)
def test_what_is_no_sum_of_one_noisy_vector_is_refused(make, argument):
    with pytest.raises(ArgumentError) as problem:
        make()
    assert problem.value.argument == argument
