"""Rounds of an algorithm, one at a time, and how they compare with the float64 loops."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from problems import start
from reference.gradients import PlainGradient, batch_entries
from reference.network import as_float64


class Run(NamedTuple):
    """All rounds."""

    states: list  # one more than rounds
    draws: list
    infos: list


def one_by_one(algorithm, key, data, num_rounds):
    """Runs the rounds in one program and keeps everything."""

    @jax.jit
    def step(key, state, data):
        draws = algorithm.draw(key, state, data)
        return draws, *algorithm.update(state, data, draws)

    states, kept, infos = [start(algorithm, key, data)], [], []
    for _ in range(num_rounds):
        draws, state, info = step(key, states[-1], data)
        states.append(state)
        kept.append(draws)
        infos.append(info)
        assert not any(np.any(info.named()[name]) for name in info.fatal())
    return Run(states, kept, infos)


def flat(tree):
    """All numbers of a tree, (d,), float64."""
    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in jax.tree.leaves(tree)])


def by_node(tree):
    """All numbers of a tree whose leaves have the node axis first, (n, d), float64."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def stacked(nodes):
    """The nodes' trees as (n, d)."""
    return by_node(jax.tree.map(lambda *leaves: np.stack(leaves), *nodes))


def each(tree):
    """Every node's part of a tree {"dense_1", "dense_2"}, float64."""
    return [as_float64(tree, node) for node in range(len(jax.tree.leaves(tree)[0]))]


def entries(gradient_draws):
    """The entries of every node's batch."""
    batch = getattr(gradient_draws, "batch", gradient_draws)
    return [batch_entries(batch, node) for node in range(len(batch.indices))]


def node_samples(data):
    """Each node's samples, in its own order."""
    inputs, labels = np.asarray(data.inputs), np.asarray(data.labels)
    rows = zip(np.asarray(data.indices), np.asarray(data.sizes), strict=True)
    return [[(inputs[j], int(labels[j])) for j in row[:size]] for row, size in rows]


def plain_gradients(data, batch_size, clip_norm, clip_order):
    """The reference's gradients of every node."""
    return [PlainGradient(samples, batch_size, clip_norm, clip_order) for samples in node_samples(data)]


def relative_error(tree, nodes):
    """Largest over nodes of |engine - reference| / |reference|, all parameters together."""
    expected = stacked(nodes)
    return (np.linalg.norm(by_node(tree) - expected, axis=1) / np.linalg.norm(expected, axis=1)).max()


def check_info(info, gradients):
    """A round's measurements against the reference's gradients."""
    np.testing.assert_allclose(info.loss, [g.loss for g in gradients], rtol=1e-4)
    np.testing.assert_allclose(info.gradient_norm, [g.norm for g in gradients], rtol=1e-4)


def check_noise(noise, scales, distribution):
    """Noise (rounds, n, d) has scales (n, rounds), within 5 standard errors; no two rows of it go together."""
    # E|z| and the standard deviation of |z| at scale 1.
    mean, std = {"laplace": (1.0, 1.0), "gaussian": (math.sqrt(2 / math.pi), math.sqrt(1 - 2 / math.pi))}[distribution]
    size = noise.shape[-1]
    assert (np.abs(np.abs(noise).mean(axis=-1).T - mean * scales) <= 5 * std * scales / math.sqrt(size)).all()
    rows = noise[np.std(noise, axis=-1) > 0]
    assert np.abs(np.corrcoef(rows) - np.eye(len(rows))).max() < 5 / math.sqrt(size), "noise is used once"


def client_batches(active, batches, sizes):
    """(client, its batches without empty slots) of the active clients of one round."""
    return [
        (i, [[s for s in step if s < sizes[i]] for step in steps]) for i, steps in zip(active, batches, strict=True)
    ]


def assert_same(a, b, **tolerance: Any):
    """Trees of one structure with the same numbers."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if tolerance and np.issubdtype(np.asarray(x).dtype, np.floating):
            np.testing.assert_allclose(x, y, **tolerance)
        else:
            np.testing.assert_array_equal(x, y)


def with_batches(draws, batch_indices):
    """Draws with other batches of local steps."""
    return draws._replace(steps=draws.steps._replace(batch_indices=batch_indices))


def without_slot(draws, slot):
    """Draws in which nobody is in this slot."""
    is_active = draws.uplink.is_active.at[slot].set(False)
    return draws._replace(uplink=draws.uplink._replace(is_active=is_active))


def check_own_samples_alone_train(update, data, client, num_steps, least):
    """A round (data -> state, info) in which this client alone trains, on all that it holds: with NaN in all samples of
    others the same bits, and each of its own moves a parameter by more than `least`."""
    own = np.asarray(data.indices)[client, : int(data.sizes[client])]
    clean, broken = update(data), data._replace(inputs=np.array(data.inputs))
    broken.inputs[np.setdiff1d(np.arange(len(broken.inputs)), own)] = np.nan
    assert_same(clean, update(broken))
    assert np.isfinite(flat(clean)).all()
    assert int(clean[1].gradient_evaluations[client]) == num_steps * len(own)
    labels = np.asarray(data.labels)
    for sample in own:
        moved = data._replace(labels=(labels + (np.arange(len(labels)) == sample).astype(np.int32)) % 3)
        assert np.abs(flat(update(moved)[0].params) - flat(clean[0].params)).max() > least


def check_uniform_pairs(active, num_clients):
    """Each client (rounds, active), and each pair of clients, takes part equally often, within 4 standard errors."""
    assert np.all(np.diff(active, axis=1) > 0), "ascending, and so without repeats"
    (rounds, count), pairs = active.shape, np.zeros((num_clients, num_clients))
    for one in active:
        pairs[np.ix_(one, one)] += 1
    alone = count / num_clients
    together = alone * (count - 1) / (num_clients - 1)
    for actual, rate in ((np.diag(pairs), alone), (pairs[np.triu_indices(num_clients, 1)], together)):
        assert np.all(np.abs(actual - rate * rounds) <= 4 * np.sqrt(rate * (1 - rate) * rounds))


def check_counts(infos, used, sent, received):
    """Check what clients computed, sent and received in every round, (rounds, n)."""
    np.testing.assert_array_equal(infos.gradient_evaluations, used)
    np.testing.assert_array_equal(infos.active, used > 0)
    np.testing.assert_array_equal(infos.bits_sent, sent)
    np.testing.assert_array_equal(infos.bits_received, received)
