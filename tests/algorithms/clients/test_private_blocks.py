"""Partial training with private updates: blocks clipped together, public constants, sensitivity, noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusals, refused
from problems import small_task, start, statistics_task, uneven_data
from reference.dp_clients import dp_embracing
from reference.runs import assert_same, check_noise, flat, node_samples, one_by_one, without_slot

import jaxfl
from jaxfl.core.platform import tracing_for
from jaxfl.models import classification, layers, sequential

KEY = jax.random.key(11)
SIZES = (7, 4, 9, 4, 6, 5, 8)
BATCH, EXPECTED = 4, 3
CLIP_NORM, NOISE_STD = 0.8, 0.05
BLOCKS = ("dense_1", "dense_2")
# Strong, weak, first half, and one block drawn at random.
CLASSES = (BLOCKS, BLOCKS[1:], BLOCKS[:1], 1)
LOCAL = {"step_size": 0.2, "momentum": 0.5, "weight_decay": 0.1}
DECAYING = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.2, momentum=0.5))
CLIENT_CLASS = np.array([0, 3, 1, 1, 2, 3, 0])


def private(**changes):
    """Clipped updates with noise."""
    return jaxfl.private_updates(**{"clip_norm": CLIP_NORM, "noise": jaxfl.gaussian(NOISE_STD), **changes})


def steps(**changes):
    """Three steps with momentum and weight decay, which would move blocks that a client does not train."""
    return jaxfl.local_steps(3, **{"batch_size": BATCH, "optimizer": DECAYING, "weighting": "uniform", **changes})


def learner(task=None, **changes):
    """Three of seven clients of four classes expected."""
    options = {"trained_blocks": CLASSES, "client_class": CLIENT_CLASS, "num_active": EXPECTED, "clients": steps()}
    updates = changes.pop("updates", private())
    way = None if updates is None else jaxfl.uplink(updates=updates)
    return jaxfl.embracing(small_task() if task is None else task, **{**options, "uplink": way, **changes})


def as_float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def check_rounds(algorithm, of_client, expected, count=20):
    """Rounds against the plain loop; `of_client` is (client, blocks that were drawn for it) -> names of its blocks."""
    data = uneven_data(SIZES)
    outcome, rounds = one_by_one(algorithm, KEY, data, count), []
    first = as_float64(outcome.states[0].params)
    for draws in outcome.draws:
        there, active = np.asarray(draws.uplink.is_active), []
        drawn = np.zeros((len(there), 2), bool) if draws.trained is None else np.asarray(draws.trained)
        for c in np.flatnonzero(there):
            client = int(draws.active[c])
            active.append((client, of_client(client, drawn[c]), np.asarray(draws.steps.batch_indices[c])))
        rounds.append((active, as_float64(draws.uplink.noise)))
    x, losses = dp_embracing(first, node_samples(data), rounds, clip_norm=CLIP_NORM, expected=expected, **LOCAL)
    actual = flat(outcome.states[-1].params)
    assert np.linalg.norm(actual - flat(x)) < 1e-5 * np.linalg.norm(flat(x))
    np.testing.assert_allclose([EXPECTED * info.loss for info in outcome.infos], losses, rtol=1e-4, atol=1e-6)
    for info, (active, _) in zip(outcome.infos, rounds, strict=True):
        bits, takes_part = np.zeros(7), np.zeros(7, int)
        for client, blocks, _ in active:
            bits[client] = 32 * (("dense_1" in blocks) * (6 * 5 + 5) + ("dense_2" in blocks) * (5 * 3 + 3))
            takes_part[client] = 1
        np.testing.assert_array_equal(info.bits_sent, bits)
        np.testing.assert_array_equal(info.bits_received, takes_part * 32 * 53)
        np.testing.assert_array_equal(info.gradient_evaluations, takes_part * 3 * BATCH)
        trained = {block for _, blocks, _ in active for block in blocks}
        assert int(info.untrained_blocks) == 2 - len(trained)
        assert not np.asarray(info.discarded_updates).any()
    return outcome


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.quick_cases(1)
def test_follows_a_loop_over_clients_and_blocks(platform):
    """Twenty rounds of all kinds of classes, in the forms for a CPU and for an accelerator.

    Of dense_1 are two strong clients, one of the first half, and two that draw it half of the time; of dense_2 two
    strong, two weak and these.
    """

    def of_client(client, drawn):
        chosen = CLASSES[CLIENT_CLASS[client]]
        return [b for b, own in zip(BLOCKS, drawn, strict=True) if own] if isinstance(chosen, int) else chosen

    with tracing_for(platform):
        outcome = check_rounds(learner(), of_client, {"dense_1": 4 * 3 / 7, "dense_2": 5 * 3 / 7})
    clipped, active = (sum(int(getattr(i, f).sum()) for i in outcome.infos) for f in ("clipped_updates", "active"))
    assert 0 < clipped < active, "some are scaled, some not"
    # The noise moves a block that nobody trained in a round, too: who trained is not to be told from it.
    for before, after, info in zip(outcome.states, outcome.states[1:], outcome.infos, strict=False):
        if int(info.untrained_blocks):
            assert np.all(flat(before.params) != flat(after.params))
    assert any(int(info.untrained_blocks) for info in outcome.infos)


@pytest.mark.parametrize("present", [[1] * 7, [1, 1, 1, 0, 0, 0, 1]])
@pytest.mark.quick_cases(1)
def test_blocks_that_no_class_trains_stay(present):
    """Bit for bit, without noise: where all clients are of one class, and of two."""
    classes = {"client_class": np.array(present), "trained_blocks": (BLOCKS[1:], BLOCKS[1:], BLOCKS)}
    expected = {"dense_1": 0, "dense_2": EXPECTED}
    outcome = check_rounds(learner(**classes), lambda client, drawn: BLOCKS[1:], expected, count=8)
    assert_same(outcome.states[-1].params["dense_1"], outcome.states[0].params["dense_1"])


RUNS = {"several classes": CLIENT_CLASS, "drawn blocks": np.full(7, 3), "all blocks": np.zeros(7, int)}


@functools.cache
def everybody(case):
    """(the first state, draws in which all take part, the compiled update), at a large step size."""
    algorithm = learner(
        num_active=7,
        client_class=RUNS[case],
        clients=steps(optimizer=optax.sgd(2.0)),
    )
    state, data = start(algorithm, KEY, uneven_data(SIZES)), uneven_data(SIZES)
    return state, jax.jit(algorithm.draw)(KEY, state, data), jax.jit(algorithm.update)


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.quick_cases(1)
def test_one_client_moves_what_is_released_by_at_most_the_clip_norm(case):
    """Each client in turn: what blocks move by, times their constants, together. The bound is reached."""
    state, draws, update = everybody(case)
    data, moved = uneven_data(SIZES), []
    expected = {"several classes": (4, 5), "drawn blocks": (3.5, 3.5), "all blocks": (7, 7)}[case]
    whole = update(state, data, draws)[0].params
    for client in range(7):
        without, info = update(state, data, without_slot(draws, client))
        assert int(info.active[client]) == int(info.gradient_evaluations[client]) == 0
        parts = [
            count * (flat(without.params[block]) - flat(whole[block]))
            for block, count in zip(BLOCKS, expected, strict=True)
        ]
        moved.append(np.linalg.norm(np.concatenate(parts)))
        other = [part for part, own in zip(parts, own_blocks(case, draws, client), strict=True) if not own]
        assert not any(part.any() for part in other), "nothing in blocks of others"
    assert max(moved) <= CLIP_NORM * (1 + 1e-4)
    assert max(moved) > CLIP_NORM * 0.999


def own_blocks(case, draws, client):
    """True if a client trains each block."""
    chosen = CLASSES[RUNS[case][client]]
    return draws.trained[client] if isinstance(chosen, int) else [block in chosen for block in BLOCKS]


def test_noise_is_on_every_coordinate_and_independent_over_rounds():
    """Measure the server's move where all updates are zero: standard deviation over the constant of the block."""
    task, data = small_task(hidden=200), uneven_data(SIZES)
    algorithm = learner(task, clients=steps(optimizer=optax.sgd(0.0)))
    first = start(algorithm, KEY, data)
    one = jax.jit(jax.vmap(lambda r: algorithm.round(KEY, first._replace(round_index=r), data)[0].params))
    moved = jax.tree.map(lambda new, old: new - old[None], one(jnp.arange(12, dtype=jnp.int32)), first.params)
    for block, expected in (("dense_1", 4 * 3 / 7), ("dense_2", 5 * 3 / 7)):
        rows = np.concatenate([np.asarray(leaf).reshape(12, 1, -1) for leaf in jax.tree.leaves(moved[block])], axis=2)
        check_noise(rows, np.full((1, 12), NOISE_STD / expected), "gaussian")


def normalized(layer):
    """Two dense layers around another."""
    named = [("dense_1", layers.dense(6, 8)), ("middle", layer), ("dense_2", layers.dense(8, 3))]
    return classification(sequential(named))


def test_batch_statistics_are_refused():
    task = normalized(layers.batch_norm(8))
    blocks = (task.blocks, task.blocks[-1:], 1, 1)
    refused(lambda: learner(task, trained_blocks=blocks), "task", "no model state", "Use group normalization.")


test_what_it_refuses = refusals(
    [
        (lambda: learner(clients=steps(weighting="data")), "clients"),
        (lambda: learner(num_active=(1, 1, 0, 1)), "num_active"),
        (lambda: learner(clients=steps(clip_norm=1.0)), "clients"),
        (lambda: learner(statistics_task()), "task"),
        (lambda: learner(num_active=8), "num_active"),
    ]
)
