"""ClippedGossip, robust means among neighbors and nodes that attack, in the rounds of d_psgd."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refused
from problems import linear_task, run, uneven_data
from reference.runs import assert_same, by_node, one_by_one

import jaxfl
from jaxfl import graphs, privacy
from jaxfl.algorithms import alie, clipped_gossip, coordinate_median, krum, random_updates, sign_flip, trimmed_mean
from jaxfl.channel import uniform_quantizer

KEY, NODES, STEP_SIZE, ROUNDS = jax.random.key(5), 16, 0.05, 20
DATA = uneven_data(sizes=tuple(4 + i % 5 for i in range(NODES)), classes=5)
RING = graphs.from_matrix(0.4 * np.eye(NODES) + 0.6 * graphs.ring(NODES).mixing_matrix(0))
COMPLETE = graphs.complete(NODES)
RADII = 0.05 * (1 + np.arange(NODES))  # some differences are clipped, and some are not
HOSTILE = [0, 5]


def learner(graph=RING, **options: Any):
    arguments: dict[str, Any] = {"step_size": STEP_SIZE, "gradient": jaxfl.mini_batch(2), **options}
    return jaxfl.d_psgd(linear_task(), graph=graph, **arguments)


def clipped(values, weights, radii):
    """Lines of arXiv:2202.01545: what each node makes of its own value and of what it gets, {sender: value}."""
    mixed = {}
    for i, (own, others) in enumerate(values):
        total = own.copy()
        for j, value in others.items():
            apart = value - own
            total += weights[i, j] * min(1, radii[i] / max(np.linalg.norm(apart), 1e-300)) * apart
        mixed[i] = total
    return np.stack([mixed[i] for i in range(len(values))])


def joined(combine, least):
    """A mean of rows, which weigh alike; with too few a node keeps its own."""

    def of_nodes(values, weights):
        rows = [np.stack([own, *others.values()]) for own, others in values]
        return np.stack([combine(some) if len(some) >= least else some[0] for some in rows])

    return of_nodes


LINES = {
    "clipped": (clipped_gossip(RADII.astype(np.float32)), functools.partial(clipped, radii=RADII)),
    "median": (coordinate_median(), joined(lambda rows: np.median(rows, axis=0), 1)),
    "trimmed": (trimmed_mean(1), joined(lambda rows: np.sort(rows, axis=0)[1:-1].mean(axis=0), 3)),
}


@pytest.mark.parametrize("name", LINES)
def test_follows_the_lines_with_attackers_and_losses(name):
    """Float64, node by node, to 1e-5 of x after 20 rounds: the first attacker flips, and messages are lost."""
    aggregate, loop = LINES[name]
    ours = learner(aggregate=aggregate, attack=sign_flip(HOSTILE, scale=2.0), links=jaxfl.links(0.7))
    rounds, weights = one_by_one(ours, KEY, DATA, ROUNDS), RING.mixing_matrix(0)
    x = by_node(rounds.states[0].params)
    for before, draws, after, info in zip(
        rounds.states[:-1], rounds.draws, rounds.states[1:], rounds.infos, strict=True
    ):
        arrived = np.asarray(draws.links.links.arrived)
        sent = np.where(np.isin(np.arange(NODES), HOSTILE)[:, None], -2 * x, x)
        edges = (weights > 0) & ~np.eye(NODES, dtype=bool) & arrived
        values = [(x[i], {j: sent[j] for j in np.flatnonzero(edges[i])}) for i in range(NODES)]
        # The step is the round's own: what d_psgd adds to the mixture, from the same state and batches.
        plain, _ = jax.jit(learner(links=jaxfl.links(0.7)).update)(
            before, DATA, draws._replace(links=draws.links.links)
        )
        unmixed, _ = jax.jit(learner(links=jaxfl.links(0.7), step_size=1e-30).update)(
            before, DATA, draws._replace(links=draws.links.links)
        )
        x = loop(values, weights) + by_node(plain.params) - by_node(unmixed.params)
        expected_void = [len(others) + 1 < getattr(aggregate, "least", 0) for _, others in values]
        np.testing.assert_array_equal(info.void_rounds, expected_void)
        assert np.abs(by_node(after.params) - x).max() < 1e-5 * np.abs(x).max()


@pytest.mark.parametrize("links", [None, jaxfl.links(0.7, uniform_quantizer(2.0**-10), symmetric=True)])
def test_equal_radii_keep_the_mean_over_1000_rounds(links):
    """It moves by minus the step size times the mean gradient: 1e-5 of the largest x, in float32."""
    estimator = jaxfl.mini_batch(2)
    ours = learner(aggregate=clipped_gossip(0.02), links=links, step_size=0.02)

    @jax.jit
    def states(key):
        def step(state, _):
            draws = ours.draw(key, state, DATA)
            g, *_ = estimator.estimate(linear_task(), state.params, None, DATA, draws.gradient, state.round_index)
            after, _ = ours.update(state, DATA, draws)
            return after, (after.params, g)

        first = ours.init(key, DATA)
        return first.params, jax.lax.scan(step, first, length=1000)[1]

    first, (after, gradients) = states(KEY)
    leaves = [jax.tree.leaves(tree) for tree in (after, gradients)]
    x, g = (np.concatenate([np.float64(leaf).reshape(1000, NODES, -1) for leaf in one], axis=2) for one in leaves)
    error = (x - by_node(first)).mean(1) + 0.02 * np.cumsum(g.mean(1), axis=0)
    print(f"error of the mean {np.abs(error).max() / np.abs(x).max():.1e}")
    assert np.abs(error).max() < 1e-5 * np.abs(x).max()
    apart = np.linalg.norm(x[-1] - np.roll(x[-1], 1, axis=0), axis=1)
    assert (apart > 0.02).any(), "some differences are clipped"


def test_off():
    """A wide radius is the mixing step to 1e-6; nobody attacks: the same bits, of the same program."""
    plain, wide = learner(), learner(aggregate=clipped_gossip(1e9))
    assert_same(run(wide, KEY, DATA, 20)[0].params, run(plain, KEY, DATA, 20)[0].params, rtol=1e-5, atol=1e-6)
    first = jax.eval_shape(lambda: plain.init(KEY, DATA))
    texts = [str(jax.make_jaxpr(one.round)(KEY, first, DATA)) for one in (plain, learner(attack=sign_flip([])))]
    assert texts[0] == texts[1]


def test_what_attackers_can_and_cannot_do():
    """Without a robust rule noise of two nodes carries the honest ones away; with one they stay; what is not finite
    counts as lost; a node moves by at most its weights times the radius."""
    honest = np.setdiff1d(np.arange(NODES), HOSTILE)
    graph, noise = COMPLETE, random_updates(HOSTILE, std=100.0)
    ends = {}
    for name, aggregate in {"mean": None, "median": coordinate_median(), "krum": krum(2)}.items():
        (state, info) = run(learner(graph, aggregate=aggregate, attack=noise), KEY, DATA, 20)
        ends[name] = np.abs(by_node(state.params)[honest]).max()
        assert not info.void_rounds.any()
    assert ends["mean"] > 10 * max(ends["median"], ends["krum"])
    broken = learner(graph, aggregate=clipped_gossip(0.1), attack=random_updates(HOSTILE, std=np.inf))
    state, info = run(broken, KEY, DATA, 5)
    assert np.isfinite(by_node(state.params)).all()
    np.testing.assert_array_equal(info.discarded_messages, np.tile(np.isin(np.arange(NODES), HOSTILE), (5, 1)))
    still = learner(graph, aggregate=clipped_gossip(0.1), attack=noise, step_size=1e-30)
    before, after = (by_node(run(still, KEY, DATA, count)[0].params) for count in (0, 1))
    assert np.linalg.norm(after - before, axis=1).max() <= 0.1 * (1 + 1e-5)


def test_alie_counts_honest_nodes():
    attack = alie(HOSTILE, num_std=1.5)
    ours = learner(COMPLETE, attack=attack, step_size=1e-30)
    start = ours.init(KEY, DATA)
    spread = jax.tree.map(lambda leaf: leaf + jax.random.normal(KEY, leaf.shape, leaf.dtype), start.params)
    state = start._replace(params=spread)
    after, _ = jax.jit(ours.round)(KEY, state, DATA)
    x = by_node(state.params)
    honest = x[np.setdiff1d(np.arange(NODES), HOSTILE)]
    sent = x.copy()
    sent[HOSTILE] = honest.mean(axis=0) - 1.5 * honest.std(axis=0)
    expected = (sent.sum(axis=0) - sent + x) / NODES
    np.testing.assert_allclose(by_node(after.params), expected, rtol=1e-4, atol=1e-5)


def test_the_statement_stays():
    """All of it is a function of noisy gradients, and of draws without data."""
    gradient = jaxfl.mini_batch(sampler=jaxfl.gradients.poisson(2), clip_norm=1.0)
    private: dict[str, Any] = {"gradient": gradient, "noise": jaxfl.gaussian(2.0), "step_size": 0.1, "graph": RING}
    robust: dict[str, Any] = {"aggregate": trimmed_mean(1), "attack": sign_flip([0])}
    ours, theirs = (
        privacy.statements(jaxfl.d_psgd(linear_task(), **private, **options), [90] * NODES, 50, dp_delta=1e-5)
        for options in (robust, {})
    )
    assert ours == theirs


def test_refusals():
    refused(lambda: clipped_gossip(-1.0), "radius")
    refused(lambda: learner(aggregate=clipped_gossip(jnp.ones(3))), "radius")
    refused(lambda: learner(aggregate=krum(1)), "aggregate", "must take 3 messages", "needs 5")
    refused(lambda: learner(attack=sign_flip([NODES])), "attackers")
    refused(lambda: learner(aggregate=trimmed_mean(1), num_mixings=2), "num_mixings")
    refused(lambda: learner(aggregate=trimmed_mean(1), num_final_mixings=1), "num_mixings")
    shared = jaxfl.shared_gaussian(1.0, key_graph=privacy.key_graph("complete", NODES), ratio=10.0)
    refused(lambda: learner(aggregate=trimmed_mean(1), noise=shared), "noise", "a robust mean does not cancel it")


def test_momentum_of_senders():
    """An optimizer is each node's own: with it the paper's momentum, and the mean that stays."""
    ours = learner(aggregate=clipped_gossip(1e9), step_size=None, optimizer=optax.sgd(0.05, momentum=0.9))
    plain = learner(step_size=None, optimizer=optax.sgd(0.05, momentum=0.9))
    assert_same(run(ours, KEY, DATA, 9)[0].params, run(plain, KEY, DATA, 9)[0].params, rtol=1e-5, atol=1e-6)
