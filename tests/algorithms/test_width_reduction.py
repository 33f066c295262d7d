"""HeteroFL and FjORD: the papers' lines, who holds what, model state, and what a narrow client costs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusals
from problems import small_task, start, statistics_task, uneven_data, with_clients
from reference.network import as_float64
from reference.runs import check_counts, flat, node_samples
from reference.width_reduction import width_reduction as reference_width_reduction

import jaxfl
from jaxfl.algorithms.clients.steps import StepDraws
from jaxfl.algorithms.clients.uplink import UplinkDraws
from jaxfl.algorithms.width_reduction import Draws, State, width_reduction
from jaxfl.core import Variables
from jaxfl.core.platform import tracing_for
from jaxfl.core.tree import size

KEY = jax.random.key(11)
SIZES = (7, 3, 9, 1, 6)
CLASSES = (2, 0, 1, 2, 1)
WIDTHS = (5, 3, 2)  # hidden units of each class
BATCH = 4  # more than two of the clients hold
ROUNDS = 15
STRATIFIED = (1, 1, 1)


def learner(tasks=None, **changes):
    """Three of five clients, three steps."""
    options = {"num_active": 3, "num_local_steps": 3, "batch_size": BATCH, "step_size": 0.2, **changes}
    return width_reduction(
        [small_task(hidden=width) for width in WIDTHS] if tasks is None else tasks,
        **with_clients(**{"client_class": CLASSES, **options}),
    )


def run_keeping_draws(algorithm, data, num_rounds):
    """(first state, last state, draws and infos stacked), compiled as one program."""

    def one_round(state, _):
        draws = algorithm.draw(KEY, state, data)
        state, info = algorithm.update(state, data, draws)
        return state, (draws, info)

    @jax.jit
    def rounds():
        first = start(algorithm, KEY, data)
        last, (draws, infos) = jax.lax.scan(one_round, first, length=num_rounds)
        return first, last, draws, infos

    return rounds()


def step_draws(batch_indices, dropout_keys=None):
    """Draws of steps without noise."""
    none = jnp.zeros(len(batch_indices), jnp.int32)
    return StepDraws(batch_indices=batch_indices, batch_overflow=none, dropout_keys=dropout_keys, noise=None)


def chosen(active, *, widths=None, keys=False, seed=0):
    """Draws made here: batches of the clients' own samples, which cost no compilation."""
    rng = np.random.default_rng(seed)
    batches = np.full((len(active), 3, BATCH), max(SIZES), np.int32)
    for row, client in enumerate(active):
        for step in range(3):
            own = rng.permutation(SIZES[client])[:BATCH]
            batches[row, step, : len(own)] = own
    return Draws(
        active=jnp.asarray(active, jnp.int32),
        steps=step_draws(jnp.asarray(batches), jax.random.split(KEY, (len(active), 3)) if keys else None),
        widths=None if widths is None else jnp.asarray(widths, jnp.int32),
        uplink=UplinkDraws(),
    )


@pytest.mark.parametrize(
    ("num_active", "ordered_dropout", "platform"),
    [
        pytest.param(3, False, "cpu", id="uniform-heterofl"),
        pytest.param(3, False, "gpu", id="uniform-heterofl-gpu"),
        pytest.param(3, True, "cpu", id="uniform-fjord"),
        pytest.param(3, True, "gpu", id="uniform-fjord-gpu", marks=pytest.mark.slow),
        pytest.param(STRATIFIED, False, "cpu", id="stratified-heterofl"),
        pytest.param(STRATIFIED, True, "cpu", id="stratified-fjord", marks=pytest.mark.slow),
    ],
)
@pytest.mark.quick_cases(1)
def test_follows_the_papers_lines(num_active, ordered_dropout, platform):
    """In the forms for a CPU and for an accelerator, where these differ."""
    options = {"momentum": 0.9, "weight_decay": 0.05} if ordered_dropout else {"weighting": "uniform"}
    step_size = optax.exponential_decay(0.2, 5, 0.5)
    algorithm = learner(num_active=num_active, ordered_dropout=ordered_dropout, step_size=step_size, **options)
    data = uneven_data(SIZES)
    with tracing_for(platform):
        first, state, draws, infos = run_keeping_draws(algorithm, data, ROUNDS)
    draws = jax.tree.map(np.asarray, draws)
    samples = node_samples(data)
    rounds = []
    for number, active in enumerate(draws.active):
        rounds.append([])
        for row, client in enumerate(active):
            own = [[s for s in batch if s < SIZES[client]] for batch in draws.steps.batch_indices[number, row]]
            classes = draws.widths[number, row] if ordered_dropout else [CLASSES[client]] * 3
            rounds[-1].append((client, [(b, WIDTHS[c]) for b, c in zip(own, classes, strict=True)]))
    x0 = as_float64(algorithm.node_params(first), 0)
    x, losses = reference_width_reduction(
        x0,
        samples,
        [WIDTHS[c] for c in CLASSES],
        rounds,
        step_size=lambda r: 0.2 * 0.5 ** (r / 5),
        **{"momentum": 0.0, "weight_decay": 0.0, **options},
    )
    actual = flat(as_float64(algorithm.node_params(state), 0))
    assert np.linalg.norm(actual - flat(x)) < 1e-5 * np.linalg.norm(flat(x))
    np.testing.assert_allclose(infos.loss, losses, rtol=1e-4)
    used = np.zeros((ROUNDS, len(SIZES)), int)
    for number, active in enumerate(rounds):
        for client, steps in active:
            used[number, client] = sum(len(batch) for batch, _ in steps)
    bits = (used > 0) * np.array([32 * (6 * w + w + w * 3 + 3) for w in (WIDTHS[c] for c in CLASSES)])
    check_counts(infos, used, bits, bits)
    assert (infos.update_norm > 0).all()


def linear(features):
    """Least squares on the first features."""
    return jaxfl.from_functions(
        lambda key: {"w": 0.1 * jax.random.normal(key, (features,), jnp.float32)},
        lambda params, x, y: (x[:, :features] @ params["w"] - y.astype(jnp.float32)) ** 2,
    )


LINEAR = [linear(6), linear(4)]


def test_a_clients_batches_and_widths_do_not_depend_on_who_else_is_active():
    """And widths are uniform among the client's own and the narrower ones."""
    data, count = uneven_data(SIZES), 400

    def drawn(num_active):
        algorithm = learner(num_active=num_active, ordered_dropout=True)
        rounds = jnp.arange(count, dtype=jnp.int32)
        draw = jax.vmap(lambda r: algorithm.draw(KEY, State(params=None, model_state=None, round_index=r), data))
        return jax.tree.map(np.asarray, jax.jit(draw)(rounds))

    some, everybody = drawn(STRATIFIED), drawn(5)
    np.testing.assert_array_equal(np.array(CLASSES)[some.active], np.broadcast_to([0, 1, 2], (count, 3)))
    for of_some, of_all in ((some.steps.batch_indices, everybody.steps.batch_indices), (some.widths, everybody.widths)):
        for active, ours, all_of_them in zip(some.active, of_some, of_all, strict=True):
            np.testing.assert_array_equal(ours, all_of_them[active])
    for client, number in enumerate(CLASSES):
        counts = np.bincount(everybody.widths[:, client].reshape(-1), minlength=3)
        draws, share = 3 * count, 1 / (3 - number)
        assert counts[:number].sum() == 0
        assert np.all(np.abs(counts[number:] - share * draws) <= 4 * np.sqrt(share * (1 - share) * draws))


def step_with_statistics(w, mean, data, draws, client, step, width):
    """A step of `statistics_task` of this width, on w and mean in place, float64."""
    inputs, labels = np.asarray(data.inputs, np.float64), np.asarray(data.labels, np.float64)
    own = [int(data.indices[client, s]) for s in draws.steps.batch_indices[client, step] if s < SIZES[client]]
    centre = inputs[own, :width].mean(axis=0)
    mean[:width] = 0.5 * mean[:width] + 0.5 * centre
    shift = int(jax.random.randint(draws.steps.dropout_keys[client, step], (), 0, 3))
    errors = (inputs[own, :width] - centre) @ w[:width] - labels[own] + shift
    w[:width] -= 0.05 * 2 * errors @ (inputs[own, :width] - centre) / len(own)


HELD = (6, 4, 3)
OF_CLIENTS = [1, 1, 2, 1, 2]  # nobody has the full model


def test_batch_statistics_are_averaged_like_parameters():
    """By HeteroFL, over those that hold them. Each step has a key of its own."""
    data, tasks = uneven_data(SIZES), [statistics_task(width) for width in HELD]
    algorithm = learner(tasks, client_class=OF_CLIENTS, num_active=5, step_size=0.05)
    state = start(algorithm, KEY, data)
    state = state._replace(model_state={"mean": jnp.linspace(0.5, 1.0, 6, dtype=jnp.float32)})
    draws: Any = chosen(range(5), keys=True)
    new, info = jax.jit(algorithm.update)(state, data, draws)
    np.testing.assert_array_equal(info.bits_sent, [32 * 2 * HELD[number] for number in OF_CLIENTS])
    np.testing.assert_array_equal(info.bits_received, info.bits_sent)

    sums, weights = {"w": np.zeros(6), "mean": np.zeros(6)}, np.zeros(6)
    for i, number in enumerate(OF_CLIENTS):
        held = HELD[number]
        w = np.asarray(state.params["w"], np.float64)[:held]
        mean = np.asarray(state.model_state["mean"], np.float64)[:held]
        for t in range(3):
            step_with_statistics(w, mean, data, draws, i, t, held)
        sums["w"][:held] += SIZES[i] * w
        sums["mean"][:held] += SIZES[i] * mean
        weights[:held] += SIZES[i]
    np.testing.assert_allclose(new.params["w"][:4], (sums["w"] / np.maximum(weights, 1))[:4], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(new.model_state["mean"][:4], (sums["mean"] / np.maximum(weights, 1))[:4], rtol=1e-5)
    np.testing.assert_array_equal(new.params["w"][4:], state.params["w"][4:])
    np.testing.assert_array_equal(new.model_state["mean"][4:], state.model_state["mean"][4:])
    node = algorithm.node_params(new)
    assert isinstance(node, Variables)
    np.testing.assert_array_equal(node.model_state["mean"], new.model_state["mean"][None])


def test_with_ordered_dropout_each_width_has_batch_statistics_of_its_own():
    """A step moves those of its width only; each width's become the mean over the active clients that hold it."""
    data, tasks = uneven_data(SIZES), [statistics_task(width) for width in HELD]
    options = {"client_class": OF_CLIENTS, "num_active": 5, "step_size": 0.05, "ordered_dropout": True}
    algorithm = learner(tasks, **options)
    starts = tuple({"mean": jnp.linspace(0.5 + k, 1.0, width, dtype=jnp.float32)} for k, width in enumerate(HELD))
    first = start(algorithm, KEY, data)
    assert jax.tree.map(jnp.shape, first.model_state) == jax.tree.map(jnp.shape, starts)
    state = first._replace(model_state=starts)
    draws: Any = chosen(range(5), widths=np.array([[1, 2, 1], [2, 1, 1], [2, 2, 2], [1, 1, 2], [2, 2, 2]]), keys=True)
    new, info = jax.jit(algorithm.update)(state, data, draws)

    sums, weights = np.zeros(6), np.zeros(6)
    statistics, of_width = [np.zeros(width) for width in HELD], np.zeros(3)
    for i, number in enumerate(OF_CLIENTS):
        w = np.asarray(state.params["w"], np.float64)[: HELD[number]]
        means = [np.asarray(one["mean"], np.float64).copy() for one in starts]
        for t in range(3):
            width = int(draws.widths[i, t])
            step_with_statistics(w, means[width], data, draws, i, t, HELD[width])
        sums[: HELD[number]] += SIZES[i] * w
        weights[: HELD[number]] += SIZES[i]
        for width in range(number, 3):
            statistics[width] += SIZES[i] * means[width]
            of_width[width] += SIZES[i]
    np.testing.assert_allclose(new.params["w"][:4], (sums / np.maximum(weights, 1))[:4], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(new.params["w"][4:], state.params["w"][4:])
    np.testing.assert_array_equal(new.model_state[0]["mean"], starts[0]["mean"])
    for width in (1, 2):
        expected = statistics[width] / of_width[width]
        np.testing.assert_allclose(new.model_state[width]["mean"], expected, rtol=1e-5)
    # Of class 1 four parameters, and the statistics of widths 4 and 3; of class 2 three and three.
    np.testing.assert_array_equal(info.bits_sent, [32 * (11 if number == 1 else 6) for number in OF_CLIENTS])
    node = algorithm.node_params(new)
    np.testing.assert_array_equal(node.model_state["mean"], new.model_state[0]["mean"][None])


def test_a_narrow_client_costs_less():
    """Counted by the compiler: 20 of 200 hidden units, by HeteroFL."""
    tasks, data = [small_task(hidden=width) for width in (200, 20)], uneven_data(SIZES)

    def flops(num_active):
        options = {"num_active": num_active, "num_local_steps": 1, "batch_size": 64}
        algorithm = learner(tasks, client_class=[0, 0, 1, 1, 1], **options)
        state = jax.eval_shape(algorithm.init, KEY, data)
        update = jax.jit(algorithm.update).lower(state, data, jax.eval_shape(algorithm.draw, KEY, state, data))
        cost: Any = update.cost_analysis()
        return cost["flops"]

    assert flops((0, 2)) < 0.2 * flops((2, 0))
    assert size(jax.eval_shape(tasks[1].init, KEY)) < 0.11 * size(jax.eval_shape(tasks[0].init, KEY))


def slices(*tasks):
    return lambda: learner(list(tasks), client_class=[0] * 5)


test_refusals = refusals(
    [
        (lambda: learner(LINEAR), "client_class"),
        (lambda: learner(axis_groups={"dense_1/weight": {0: 2}}), "axis_groups"),
        (lambda: learner(axis_groups={"dense_2/kernel": {0: 2}}), "axis_groups"),
        (lambda: learner(axis_groups={"dense_2/kernel": {2: 1}}), "axis_groups"),
        (lambda: learner(axis_groups={"dense_2/kernel": {0: 0}}), "axis_groups['dense_2/kernel']"),
        (lambda: learner(num_active=(1, 1)), "num_active"),
        (slices(), "tasks"),
        (slices(small_task(), linear(3)), "tasks"),
        (slices(linear(4), statistics_task(4)), "tasks"),
        (slices(small_task(hidden=3), small_task(hidden=4)), "tasks"),
    ]
)
