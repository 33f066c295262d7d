"""Federated averaging: the papers' lines, who trains on what, how models are averaged, model state and dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import linear_task, run, small_task, start, statistics_task, uneven_data, with_clients
from reference.fed_avg import Adam, descend
from reference.fed_avg import fed_avg as reference_fed_avg
from reference.network import as_float64
from reference.runs import (
    check_counts,
    check_own_samples_alone_train,
    check_uniform_pairs,
    client_batches,
    flat,
    node_samples,
    with_batches,
)

import jaxfl
from jaxfl.core import FederatedData, Variables
from jaxfl.core.tree import num_bytes
from jaxfl.training.measures import evaluation_set, flatten_scores, test_scores

KEY = jax.random.key(11)
SIZES = (7, 3, 9, 1, 6)
BATCH = 4  # more than two of the clients hold
ROUNDS = 20


def learner(task=None, **changes):
    """Three of five clients, three steps."""
    options = {"num_active": 3, "num_local_steps": 3, "batch_size": BATCH, "step_size": 0.2, **changes}
    return jaxfl.fed_avg(small_task() if task is None else task, **with_clients(**options))


@functools.cache
def drawn(count=400, num_active=3):
    """The draws of many rounds, stacked, as NumPy arrays."""
    algorithm, data = learner(num_active=num_active), uneven_data(SIZES)
    state = start(algorithm, KEY, data)
    rounds = jnp.arange(count, dtype=jnp.int32)
    draw = jax.jit(jax.vmap(lambda r: algorithm.draw(KEY, state._replace(round_index=r), data)))
    return jax.tree.map(np.asarray, draw(rounds))


CASES = {
    "momentum, weight decay, decaying steps": (
        {"momentum": 0.9, "weight_decay": 0.05, "step_size": optax.exponential_decay(0.2, 5, 0.5)},
        lambda: descend,
        {},
    ),
    "plain, uniform weights, adam": (
        {"weighting": "uniform", "server_optimizer": optax.adam(0.03)},
        lambda: Adam(0.03),
        {"weighting": "uniform"},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick_cases(1)
def test_follows_the_papers_lines(case):
    options, server, reference_options = CASES[case]
    algorithm, data = learner(**options), uneven_data(SIZES)
    with jax.numpy_dtype_promotion("standard"):  # optax.adam raises a Python number to an int32 power
        state, infos = run(algorithm, KEY, data, ROUNDS)
    samples = node_samples(data)
    draws = drawn()
    rounds = [
        client_batches(active, batches, SIZES)
        for active, batches in zip(draws.active[:ROUNDS], draws.steps.batch_indices[:ROUNDS], strict=True)
    ]
    step_size = options.get("step_size", 0.2)
    local = {
        "momentum": options.get("momentum", 0.0),
        "weight_decay": options.get("weight_decay", 0.0),
        "step_size": (lambda r: 0.2 * 0.5 ** (r / 5)) if callable(step_size) else (lambda r: step_size),
    }
    x0 = as_float64(algorithm.node_params(start(algorithm, KEY, data)), 0)
    x, losses = reference_fed_avg(x0, samples, rounds, server(), **reference_options, **local)
    actual = flat(as_float64(algorithm.node_params(state), 0))
    assert np.linalg.norm(actual - flat(x)) < 1e-5 * np.linalg.norm(flat(x))
    np.testing.assert_allclose(infos.loss, losses, rtol=1e-4)
    used = np.zeros((ROUNDS, len(SIZES)), int)
    for number, active in enumerate(rounds):
        for client, batches in active:
            used[number, client] = sum(map(len, batches))
    bits = (used > 0) * 32 * (6 * 5 + 5 + 5 * 3 + 3)
    check_counts(infos, used, bits, bits)
    if not reference_options:
        np.testing.assert_array_equal(infos.pseudo_gradient_norm, infos.update_norm)
        moved = flat(run(algorithm, KEY, data, 1)[0].params) - flat(start(algorithm, KEY, data).params)
        np.testing.assert_allclose(infos.update_norm[0], np.linalg.norm(moved), rtol=1e-4)


def test_padding_never_contributes():
    """Each client in turn trains alone, then on a pool in which all other samples are NaN: the same bits, and all of
    its own samples matter."""
    data, algorithm = uneven_data(SIZES), learner(linear_task(), num_active=1, batch_size=12)  # more than any client's
    state = start(algorithm, KEY, data)
    update, draws = jax.jit(algorithm.update), jax.jit(algorithm.draw)(KEY, state, data)
    batches = np.broadcast_to(
        np.arange(12, dtype=np.int32), draws.steps.batch_indices.shape
    )  # everything; then padding
    for client in range(len(SIZES)):
        own = with_batches(draws, batches)._replace(active=np.array([client], np.int32))
        check_own_samples_alone_train(lambda data, own=own: update(state, data, own), data, client, 3, 1e-3)


def test_participation_is_uniform_without_repeats():
    check_uniform_pairs(drawn().active, 5)
    assert np.all(drawn(num_active=5).active == np.arange(5))


def test_no_kernel_of_a_round_makes_the_keys_of_round_client_and_step():
    """A hash has 22 exclusive ors; kernels with all that lead to a step's key take LLVM seconds."""
    algorithm, data = learner(num_active=5), uneven_data(SIZES)
    state = start(algorithm, KEY, data)
    text = jax.jit(algorithm.round).lower(KEY, state, data).compile().as_text()
    assert text is not None
    assert max(part.count(" xor(") for part in text.split("\n\n")) < 60


def test_cost_grows_with_the_active_clients():
    """Two of 200: no model is made for an idle client, and nothing of the data is copied."""
    algorithm = learner(small_task(hidden=2000), num_active=2)
    data = FederatedData(
        inputs=jnp.zeros((10**6, 6), jnp.float32),
        labels=jnp.zeros(10**6, jnp.int32),
        indices=jnp.zeros((200, 5000), jnp.int32),
        sizes=jnp.full(200, 5000, jnp.int32),
    )
    state = jax.eval_shape(algorithm.init, KEY, data)
    memory = jax.jit(algorithm.round).lower(KEY, state, data).compile().memory_analysis()
    assert memory is not None
    temp = memory.temp_size_in_bytes
    model = num_bytes(state.params)
    smallest = min(200 * model, num_bytes(data.labels), num_bytes(data.indices))
    assert 2 * model < temp < 12 * model < 0.3 * smallest


def test_batch_statistics_are_averaged_like_parameters():
    """And each step has a key of its own, from which the same step of the same client always draws the same."""
    data, task = uneven_data(SIZES), statistics_task()
    algorithm = learner(task)
    state = start(algorithm, KEY, data)
    draws = jax.jit(algorithm.draw)(KEY, state, data)
    keys = np.asarray(jax.random.key_data(draws.steps.dropout_keys)).reshape(9, -1)
    assert len({tuple(key) for key in keys}) == 9
    new, info = jax.jit(algorithm.update)(state, data, draws)

    inputs, labels = np.asarray(data.inputs, np.float64), np.asarray(data.labels, np.float64)
    total = sum(SIZES[i] for i in np.asarray(draws.active))
    mean_w, mean_mean = np.zeros(6), np.zeros(6)
    for position, i in enumerate(np.asarray(draws.active)):
        w, mean = np.asarray(state.params["w"], np.float64), np.zeros(6)
        for t in range(3):
            own = [int(data.indices[i, s]) for s in draws.steps.batch_indices[position, t] if s < SIZES[i]]
            centre = inputs[own].mean(axis=0)
            mean = 0.5 * mean + 0.5 * centre
            shift = int(jax.random.randint(draws.steps.dropout_keys[position, t], (), 0, 3))
            errors = (inputs[own] - centre) @ w - labels[own] + shift
            w = w - 0.2 * 2 * errors @ (inputs[own] - centre) / len(own)
        mean_w, mean_mean = mean_w + SIZES[i] / total * w, mean_mean + SIZES[i] / total * mean
    np.testing.assert_allclose(new.params["w"], mean_w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(new.model_state["mean"], mean_mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(info.bits_sent, np.asarray(info.active) * 32 * 12)

    node = algorithm.node_params(new)
    assert isinstance(node, Variables)
    test = evaluation_set(inputs.astype("float32"), data.labels)
    line = flatten_scores(jax.jit(test_scores(task, test).compute)(node, test))
    expected = np.mean(((inputs - mean_mean) @ mean_w - labels) ** 2)
    for name in ("test_loss", "test_loss_worst_node", "test_loss_average_model"):
        np.testing.assert_allclose(line[name], expected, rtol=1e-5)
