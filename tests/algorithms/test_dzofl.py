"""Zero-order federated learning: the paper's lines, its expected step, links that lose, and what a round holds."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusals
from problems import linear_task, small_task, start, statistics_task, uneven_data
from reference.dzofl import dzofl as reference_dzofl
from reference.dzofl import round_to_small_float
from reference.network import as_float64
from reference.runs import assert_same, flat, node_samples, one_by_one

import jaxfl
from jaxfl import gradients
from jaxfl.channel import float_quantizer
from jaxfl.core.platform import tracing_for
from jaxfl.core.tree import num_bytes, size
from jaxfl.models import classification, mlp
from jaxfl.training.sharding import cut_by_owner

KEY = jax.random.key(5)
NODES, BATCH, ROUNDS = 5, 3, 20
UPLINK, DOWNLINK = {"exponent_bits": 4, "mantissa_bits": 3}, {"exponent_bits": 5, "mantissa_bits": 2}


def learner(task=None, **changes):
    """Five devices, three samples each in a round."""
    options = {"batch_size": BATCH, "step_size": 0.5, "smoothing": 0.7, **changes}
    return jaxfl.dzofl(small_task() if task is None else task, **options)


def each_direction(draws, params, num_directions):
    """The directions of a round, leaves (*leaf)."""
    leaves, structure = jax.tree.flatten(params)
    return [
        structure.unflatten(
            [draws.directions.numbers(r, i, leaf) / math.sqrt(size(params)) for i, leaf in enumerate(leaves)]
        )
        for r in range(num_directions)
    ]


def as_reference(tree):
    return as_float64(jax.tree.map(lambda leaf: leaf[None], tree), 0)


@pytest.mark.parametrize(
    ("direction", "num_directions", "sampler", "platform", "is_lossy", "num_active"),
    [
        ("rademacher", 1, gradients.fixed, "cpu", True, None),
        ("gaussian", 3, gradients.poisson, "cpu", False, None),
        ("gaussian", 3, gradients.poisson, "gpu", True, None),
        ("rademacher", 2, gradients.poisson, "cpu", True, 2),
        ("rademacher", 1, gradients.fixed, "cpu", False, 3),
    ],
)
@pytest.mark.quick_cases(1)
def test_follows_the_papers_lines(direction, num_directions, sampler, platform, is_lossy, num_active):
    """Messages of a byte that may be lost, one of the server's, step sizes that decay; compiled once for all rounds.
    Without links all arrives in 32 bits, as it is. An idle device costs what the server sends, and no more."""
    links = {"uplink": jaxfl.links(0.4, float_quantizer(**UPLINK)), "downlink": float_quantizer(**DOWNLINK)}
    step_size, smoothing = jaxfl.algorithms.decaying_schedules(0.8, 0.7, step_exponent=0.3, smoothing_exponent=0.25)
    algorithm, data = (
        learner(
            step_size=step_size,
            smoothing=smoothing,
            num_directions=num_directions,
            direction=direction,
            sampler=sampler,
            num_active=num_active,
            **(links if is_lossy else {}),
        ),
        uneven_data(),
    )
    with tracing_for(platform):
        result = one_by_one(algorithm, KEY, data, ROUNDS)
    rounds, first = [], result.states[0].params
    for k, draws in enumerate(result.draws):
        active = np.arange(NODES) if num_active is None else np.asarray(draws.active)
        used = zip(active.tolist(), np.asarray(draws.batch.indices), np.asarray(draws.batch.mask), strict=True)
        rounds.append(
            {
                "step_size": 0.8 * (1 + k) ** -0.3,
                "smoothing": 0.7 * (1 + k) ** -0.25,
                "directions": [as_reference(one) for one in each_direction(draws, first, num_directions)],
                "batches": {device: own[mask] for device, own, mask in used},
                "arrived": np.ones(NODES, bool),
                "uplink": np.zeros((NODES, num_directions)),
                "downlink": np.zeros(num_directions),
            }
        )
        if is_lossy:
            rounds[-1]["arrived"][active] = draws.uplink.arrived
            numbers = draws.uplink.rounding.draw(jnp.zeros((len(active), num_directions)))
            rounds[-1]["uplink"][active] = numbers
            rounds[-1]["downlink"] = np.asarray(draws.downlink)
    models, losses, broadcasts = reference_dzofl(
        as_reference(first),
        node_samples(data),
        rounds,
        batch_size=BATCH,
        uplink=functools.partial(round_to_small_float, **UPLINK) if is_lossy else lambda number, _: number,
        downlink=functools.partial(round_to_small_float, **DOWNLINK) if is_lossy else lambda number, _: number,
    )
    arrived, bits = np.array([one["arrived"] for one in rounds]), (8 if is_lossy else 32) * num_directions
    assert (0 < arrived.sum() < arrived.size) == is_lossy
    heard = [one["arrived"][list(one["batches"])].any() for one in rounds]
    assert is_lossy <= (not all(heard)), "in some round nothing arrives: the model stays as it is"
    assert len({tuple(one["batches"]) for one in rounds}) > (1 if num_active else 0)
    for state, info, one, model, loss, broadcast in zip(
        result.states[1:], result.infos, rounds, models, losses, broadcasts, strict=True
    ):
        assert np.linalg.norm(flat(state.params) - flat(model)) < 1e-5 * np.linalg.norm(flat(model))
        np.testing.assert_allclose(info.loss, loss, rtol=1e-5)
        np.testing.assert_allclose(info.broadcast, np.sqrt(np.mean(broadcast**2)), rtol=1e-5, atol=1e-6)
        sends = np.array([device in one["batches"] for device in range(NODES)])
        np.testing.assert_array_equal(info.lost_messages, ~one["arrived"])
        counts = [2 * num_directions * len(one["batches"].get(device, ())) for device in range(NODES)]
        np.testing.assert_array_equal(info.forward_evaluations, counts)
        np.testing.assert_array_equal(info.gradient_evaluations, np.zeros(NODES))
        np.testing.assert_array_equal(info.bits_sent, bits * sends)
        np.testing.assert_array_equal(info.bits_received, np.full(NODES, bits))
    for before, after, info in zip(result.states, result.states[1:], result.infos, strict=False):
        moved = np.linalg.norm(flat(after.params) - flat(before.params))
        np.testing.assert_allclose(info.update_norm, moved, rtol=1e-4, atol=1e-7)
    assert any(np.any(b) for b in broadcasts)


@pytest.mark.slow
def test_a_pool_that_is_cut_by_owner_gives_the_same_where_some_devices_send():
    data, algorithm = uneven_data(sizes=(4, 5, 6, 7)), learner(num_active=2)
    state = start(algorithm, KEY, data)
    cut = jax.tree.map(jnp.asarray, cut_by_owner(data, 2))
    assert_same(*(jax.jit(algorithm.round)(KEY, state, pool)[0].params for pool in (data, cut)))


@pytest.mark.slow
def test_all_devices_by_number_are_all_by_default():
    data = jax.tree.map(jnp.asarray, cut_by_owner(uneven_data(sizes=(4, 5, 6, 7)), 2))
    by_number, by_default = learner(num_active=4), learner()
    state = start(by_number, KEY, data)
    assert by_number.draw(KEY, state, data).active is None, "the pool stays cut by owner"
    assert_same(*(jax.jit(one.round)(KEY, state, data) for one in (by_number, by_default)))


BYTE = {"uplink": jaxfl.links(0.5, float_quantizer(4, 3)), "downlink": float_quantizer(4, 3)}
LINKS = {
    "perfect": ({}, 1.0),
    "a byte, half of them lost": (BYTE, 1 - 0.5**NODES),
    "the same, two devices send": ({**BYTE, "num_active": 2}, 1 - 0.5**2),
}


@pytest.mark.statistical
@pytest.mark.parametrize(("links", "num_directions"), [*zip(LINKS, [1, 2, 1], strict=True)])
@pytest.mark.slow  # the formula and the directions have quick tests
def test_the_expected_step_on_a_quadratic_is_a_gradients(links, num_directions):
    """2 n alpha gamma / d times the gradient of the mean loss, within 3 standard errors; 1.1 times that is not."""
    direction = {1: "rademacher", 2: "gaussian"}[num_directions]
    task, data, alpha, gamma, count = linear_task(), uneven_data(), 0.5, 0.7, 100_000
    options, heard = LINKS[links]
    options = {"direction": direction, "num_directions": num_directions, **options}
    algorithm = learner(task, step_size=alpha, smoothing=gamma, **options)
    first = start(algorithm, KEY, data)

    @jax.jit
    def moved(rounds):
        def one(k):
            return algorithm.round(KEY, first._replace(round_index=k), data)[0].params

        after = jax.lax.map(one, rounds, batch_size=1000)
        return jax.tree.map(lambda new, old: new - old[None], after, first.params)

    @jax.jit
    @jax.grad
    def slope(params):
        sums = [task.loss(params, data.inputs[own[:s]], data.labels[own[:s]]).mean() for own, s in nodes]
        return sum(sums) / NODES

    nodes = [(data.indices[i], int(data.sizes[i])) for i in range(NODES)]
    gradient = flat(slope(first.params))
    steps = jax.tree.map(np.asarray, moved(jnp.arange(count)))
    steps = np.concatenate([leaf.reshape(count, -1) for leaf in jax.tree.leaves(steps)], axis=1).astype(np.float64)
    expected = -heard * 2 * NODES * alpha * gamma / len(gradient) * gradient
    errors = steps.std(axis=0) / math.sqrt(count)
    assert np.abs(steps.mean(axis=0) - expected).max(initial=0) > 0
    assert np.all(np.abs(steps.mean(axis=0) - expected) < 3 * errors)
    assert np.any(np.abs(steps.mean(axis=0) - 1.1 * expected) > 3 * errors)


def test_padding_never_contributes():
    """Samples in slots that hold none may be NaN."""
    data, algorithm = uneven_data(), learner(sampler=gradients.poisson)
    state = start(algorithm, KEY, data)
    draws = jax.jit(algorithm.draw)(KEY, state, data)
    indices = np.broadcast_to(np.arange(draws.batch.mask.shape[1]) % 4, draws.batch.mask.shape).astype(np.int32)
    mask = np.broadcast_to(indices[0] < 3, indices.shape)
    draws = draws._replace(batch=draws.batch._replace(indices=indices, mask=mask))
    update = jax.jit(algorithm.update)
    clean, inputs = update(state, data, draws), np.array(data.inputs)
    for own in np.asarray(data.indices):
        inputs[own[3]] = np.nan
    broken = update(state, data._replace(inputs=inputs), draws)
    assert_same(clean, broken)
    assert np.isfinite(flat(clean[0].params)).all()
    used = update(state, data._replace(inputs=inputs), draws._replace(batch=draws.batch._replace(mask=~mask)))
    assert np.isnan(flat(used[0].params)).all()


@pytest.mark.slow
def test_batches_run_forward_as_the_node_loop_says():
    shapes, task, data = [], small_task(), uneven_data()

    def loss(params, inputs, labels):
        shapes.append((inputs.shape, params["dense_1"]["kernel"].shape))
        return task.loss(params, inputs, labels)

    states, first = [], start(learner(num_directions=2), KEY, data)
    for node_loop in ("vmap", "map"):
        algorithm = learner(task._replace(loss=loss, node_loop=node_loop), num_directions=2)
        states.append(jax.jit(algorithm.round)(KEY, first, data))
    assert set(shapes) == {((BATCH, 6), (6, 5))}
    assert_same(*states, rtol=1e-5, atol=1e-6)


EXPONENTS = "step_exponent, smoothing_exponent"


def decaying(**exponents):
    return lambda: jaxfl.algorithms.decaying_schedules(1.0, 0.1, **exponents)


test_refusals = refusals(
    [
        (decaying(step_exponent=0.7, smoothing_exponent=0.4), EXPONENTS),  # of a sum above 1
        (decaying(step_exponent=0.25, smoothing_exponent=0.25), EXPONENTS),  # 3 times the second and the first: 1
        (decaying(step_exponent=0.1, smoothing_exponent=0.4), EXPONENTS),
        (decaying(step_exponent=0.0, smoothing_exponent=0.9), "step_exponent"),
        (decaying(smoothing_exponent=-0.1), "smoothing_exponent"),
        (lambda: learner(statistics_task()), "task"),
        (lambda: learner(uplink=jaxfl.links(jnp.full(3, 0.5))).init(KEY, uneven_data()), "success"),
        (lambda: learner(num_active=0), "num_active"),
        (lambda: learner(num_active=NODES + 1).init(KEY, uneven_data()), "num_active"),
    ]
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "num_directions", "copies"), [("rademacher", 1, 1), ("rademacher", 3, 2), ("gaussian", 1, 2)]
)
def test_no_direction_is_held(direction, num_directions, copies):
    """Beside the state that is donated: the moved copy, in its place later the new parameters; and with several or
    Gaussian directions what they are measured by."""
    task, nodes = classification(mlp((64, 2048, 2048, 10))), 3
    data = uneven_data(sizes=(2,) * nodes, features=64, classes=10)
    algorithm = learner(
        task,
        batch_size=2,
        direction=direction,
        num_directions=num_directions,
        uplink=jaxfl.links(0.5, float_quantizer(4, 3)),
    )
    state = jax.eval_shape(lambda: algorithm.init(KEY, data))
    held = jax.jit(algorithm.round, donate_argnums=1).lower(KEY, state, data).compile().memory_analysis()
    assert held is not None
    peak = held.temp_size_in_bytes + held.output_size_in_bytes - held.alias_size_in_bytes
    assert copies <= peak / num_bytes(state.params) < copies + 0.1
