"""Robust means and attacks: values by hand, what attackers cannot do, and rounds that are void."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import linear_task, run, start, statistics_task, uneven_data
from reference.runs import assert_same, flat

import jaxfl
from jaxfl import ArgumentError
from jaxfl.algorithms import (
    alie,
    centered_clipping,
    client_momentum,
    coordinate_median,
    geometric_median,
    krum,
    multi_krum,
    random_updates,
    sign_flip,
    trimmed_mean,
)

KEY, NODES = jax.random.key(2), 11
SIZES = tuple(range(3, 3 + NODES))
RNG = np.random.default_rng(4)
UPDATES, ALL = RNG.normal(size=(NODES, 6)).astype(np.float32), np.ones(NODES, bool)
SOME = np.arange(NODES) % 4 > 0  # eight of eleven arrive
MEANS = {
    "median": coordinate_median(),
    "trimmed": trimmed_mean(2),
    "krum": krum(2),
    "multi_krum": multi_krum(2, num_kept=3),
    "geometric": geometric_median(),
    "centered": centered_clipping(1.5, num_iterations=3),
}
LAST = np.linspace(-1, 1, 6, dtype=np.float32)  # of the round before


def combined(mean, updates, arrived=ALL, last=LAST):
    """Rows that do not arrive are 0, as the uplink gives them."""
    rows, last = jnp.where(arrived[:, None], jnp.asarray(updates), 0), jnp.asarray(last) if mean.keeps else None
    return np.asarray(mean.combine(rows, jnp.asarray(arrived), last))


def by_the_papers(name, rows):
    """Float64, from the lines, on those that arrived."""
    count = len(rows)
    if name == "median":
        return np.median(rows, axis=0)
    if name == "trimmed":
        return np.sort(rows, axis=0)[2 : count - 2].mean(axis=0)
    if name == "geometric":
        center = rows.mean(axis=0)
        for _ in range(8):
            weights = 1 / np.maximum(1e-6, np.linalg.norm(rows - center, axis=1))
            center = weights @ rows / weights.sum()
        return center
    if name == "centered":
        center = np.float64(LAST)
        for _ in range(3):
            factors = np.minimum(1, 1.5 / np.linalg.norm(rows - center, axis=1))
            center = center + factors @ (rows - center) / count
        return center
    scores = []
    for i in range(count):
        squares = sorted(float(np.sum((rows[i] - rows[j]) ** 2)) for j in range(count) if j != i)
        scores.append(sum(squares[: count - 4]))
    return rows[np.argsort(scores, kind="stable")[: 3 if name == "multi_krum" else 1]].mean(axis=0)


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("arrived", [ALL, SOME], ids=["all", "some"])
def test_follows_the_papers_lines(name, arrived):
    expected = by_the_papers(name, UPDATES.astype(np.float64)[arrived])
    np.testing.assert_allclose(combined(MEANS[name], UPDATES, arrived), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in MEANS if name != "centered"])
def test_order_translation_and_scale(name):
    mean, order, shift = MEANS[name], RNG.permutation(NODES), np.float32(3.0)
    plain = combined(mean, UPDATES)
    exact = name in ("median", "trimmed", "krum")  # which sort, or choose
    np.testing.assert_allclose(
        combined(mean, UPDATES[order]), plain, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6
    )
    np.testing.assert_allclose(combined(mean, UPDATES + shift), plain + shift, rtol=1e-5)
    np.testing.assert_allclose(combined(mean, 2 * UPDATES), 2 * plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MEANS)
def test_two_arbitrary_updates_do_not_carry_the_result_away(name):
    """The plain mean they do; medians and trimmed means stay within the range of honest values."""
    honest = UPDATES[2:]
    for size in (1e2, 1e6):
        attacked = np.concatenate([RNG.choice([-size, size], (2, 6)).astype(np.float32), honest])
        result = combined(MEANS[name], attacked)
        assert np.abs(attacked.mean(axis=0)).max() > 10
        slack = {"geometric": 1.0, "centered": 1.5 * 3 * 2 / 11}.get(name, 0.0)  # two of eleven move it by tau / 11
        assert (result >= honest.min(axis=0) - slack).all()
        assert (result <= honest.max(axis=0) + slack).all()


def test_krum_is_one_of_the_updates_and_sees_small_differences_of_large_updates():
    assert (combined(MEANS["krum"], UPDATES) == UPDATES).all(axis=1).any()
    # Near consensus: squares of whole updates in float32 would be 1e6 +- 0.06, and differences 1e-4.
    close = np.float32(1000.0) + np.float32(2.0**-10) * np.round(UPDATES * 8)
    expected = by_the_papers("krum", np.float64(close))
    np.testing.assert_array_equal(combined(MEANS["krum"], close), expected)


def test_the_smoothed_objective_never_grows():
    guard, rows = 0.3, np.float64(UPDATES)

    def objective(center):
        distances = np.linalg.norm(rows - center, axis=1)
        return np.where(distances < guard, distances**2 / (2 * guard) + guard / 2, distances).sum()

    values = [objective(combined(geometric_median(count, guard=guard), UPDATES)) for count in range(1, 8)]
    values = [objective(rows.mean(axis=0)), *values]
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(values))
    assert values[-1] < values[0] - 1e-3


def test_an_iteration_of_centered_clipping_moves_by_at_most_the_norm():
    steps = [combined(centered_clipping(0.2, num_iterations=count), 50 * UPDATES) for count in range(1, 6)]
    moves = np.linalg.norm(np.diff([LAST, *steps], axis=0), axis=1)
    assert (moves <= 0.2 * (1 + 1e-6)).all()
    assert moves.min() > 0


def test_switched_off_each_is_the_mean():
    plain = UPDATES.mean(axis=0)
    clipping = centered_clipping(1e9)
    for mean in (trimmed_mean(0), multi_krum(0, num_kept=NODES), geometric_median(guard=1e9), clipping):
        np.testing.assert_allclose(combined(mean, UPDATES), plain, rtol=1e-6, atol=1e-6)


def learner(**way):
    clients = jaxfl.local_steps(2, batch_size=3, optimizer=optax.sgd(0.05), weighting="uniform")
    return jaxfl.fed_avg(linear_task(), clients=clients, num_active=NODES, uplink=jaxfl.uplink(**way))


DATA = uneven_data(SIZES)


def test_an_attack_of_nobody_changes_no_bit():
    plain, other = (run(learner(**way), KEY, DATA, 5)[0] for way in ({}, {"attack": sign_flip([])}))
    assert_same(plain, other)


def test_attackers_send_what_they_say():
    algorithm = learner()
    first = start(algorithm, KEY, DATA)
    honest = [
        flat(run(learner(attack=attack), KEY, DATA, 1, first)[0].params) - flat(first.params)
        for attack in (sign_flip([]), sign_flip([4]), sign_flip([4], scale=3.0), sign_flip(range(NODES)))
    ]
    own = (honest[0] - honest[1]) / 2  # the share of client 4
    assert np.linalg.norm(own) > 1e-3
    np.testing.assert_allclose(honest[2], honest[0] - 4 * own, atol=1e-5)
    np.testing.assert_allclose(honest[3], -honest[0], atol=1e-5)
    steps = [
        run(learner(attack=random_updates(range(NODES), std=20.0)), KEY, DATA, count)[0].params for count in (1, 2)
    ]
    moves = np.concatenate([flat(steps[0]) - flat(first.params), flat(steps[1]) - flat(steps[0])])
    assert 0.5 * 20 < np.std(moves) * np.sqrt(NODES) < 1.6 * 20


def test_attackers_that_are_drawn_are_the_same_in_all_runs_of_a_base_key():
    attack = sign_flip(3)
    keys = [jaxfl.run_key(KEY, {"step_size": size}, DATA) for size in (0.1, 0.3)]
    drawn = [sorted(attack.draw(key, jnp.int32(k), NODES).attackers.tolist()) for key in keys for k in (0, 7)]
    assert drawn == drawn[:1] * 4
    assert len(set(drawn[0])) == 3
    others = [sorted(attack.draw(jax.random.key(seed), jnp.int32(0), NODES).attackers.tolist()) for seed in range(5)]
    assert len(set(map(tuple, others))) > 1
    by_count, by_number = (run(learner(attack=one), keys[0], DATA, 3)[0] for one in (attack, sign_flip(drawn[0])))
    assert_same(by_count, by_number)


CLIPPED_MOMENTUM = {"aggregate": centered_clipping(0.1), "feedback": client_momentum(0.5)}
ROBUST = [{"aggregate": each} for each in (coordinate_median(), trimmed_mean(3), krum(3), geometric_median())]


@pytest.mark.parametrize("way", [*ROBUST, CLIPPED_MOMENTUM])
def test_attackers_stop_the_mean_and_not_a_robust_mean(way):
    attack = sign_flip([0, 1, 2], scale=20.0)
    losses = [run(learner(attack=attack, **each), KEY, DATA, 40)[1].loss for each in ({}, way)]
    ends = [float(loss[-5:].mean()) for loss in losses]
    assert not ends[0] < float(losses[0][0])
    assert ends[1] < 0.8 * float(losses[1][0])


def test_a_round_with_too_few_updates_is_void():
    algorithm = learner(aggregate=krum(4), links=jaxfl.links(0.0))
    state, infos = run(algorithm, KEY, DATA, 3)
    assert_same(state.params, start(algorithm, KEY, DATA).params)
    assert infos.void_rounds.tolist() == [1, 1, 1]
    lossy = run(learner(aggregate=krum(3), links=jaxfl.links(0.75)), KEY, DATA, 30)[1]
    arrived = NODES - np.asarray(lossy.lost_messages).sum(axis=1)
    np.testing.assert_array_equal(lossy.void_rounds, arrived < 9)
    assert 0 < lossy.void_rounds.sum() < 30


def test_an_update_that_is_not_finite_counts_as_lost():
    poisoned = DATA._replace(inputs=DATA.inputs.at[DATA.indices[5, 0]].set(jnp.nan))
    state, infos = run(learner(aggregate=coordinate_median()), KEY, poisoned, 4)
    assert np.isfinite(flat(state.params)).all()
    assert np.asarray(infos.discarded_updates)[:, 5].sum() > 0
    assert not np.delete(np.asarray(infos.discarded_updates), 5, axis=1).any()


def test_the_published_deviation_of_alie():
    """c = 50, f = 24: z = Phi^-1(25 / 26 - ...) as the paper's formula gives it."""
    attack = alie(range(24), num_active=50)
    rows = np.concatenate([np.zeros((24, 1)), np.array([[-1.0], [1.0]] * 13)]).astype(np.float32)
    sent = attack.act(jnp.asarray(rows), jnp.arange(50) >= 24, None)
    np.testing.assert_allclose(sent, -1.426, atol=1e-3)


def test_noise_of_local_steps_keeps_its_statement_and_shared_noise_is_refused():
    options: Any = {"batch_size": 3, "optimizer": optax.sgd(0.05), "weighting": "uniform", "clip_norm": 1.0}
    ways = [None, jaxfl.uplink(aggregate=coordinate_median())]

    def learners(noise):
        clients = jaxfl.local_steps(2, noise=noise, **options)
        return [jaxfl.fed_avg(linear_task(), clients=clients, num_active=NODES, uplink=way) for way in ways]

    plain, robust = (jaxfl.privacy.releases_of(each, DATA).each for each in learners(jaxfl.gaussian(0.3)))
    assert plain == robust
    with pytest.raises(ArgumentError, match="noise: must be noise of a node's own here: a robust mean"):
        learners(jaxfl.shared_gaussian(0.3, key_graph=jaxfl.privacy.key_graph("ring", NODES), ratio=1.0))


def test_refusals():
    aggregate, private = trimmed_mean(1), jaxfl.private_updates(clip_norm=1.0, noise=jaxfl.gaussian(1.0))
    by_data = jaxfl.local_steps(2, batch_size=3, optimizer=optax.sgd(0.05))
    uniform = jaxfl.local_steps(2, batch_size=3, optimizer=optax.sgd(0.05), weighting="uniform")
    way = jaxfl.uplink(aggregate=aggregate)
    with pytest.raises(ArgumentError, match="updates: must be None with a robust mean"):
        jaxfl.uplink(aggregate=aggregate, updates=private)
    for task, clients, build in (
        (linear_task(), by_data, jaxfl.fed_avg),
        (statistics_task(), uniform, jaxfl.fed_avg),
        (linear_task(), uniform, jaxfl.scaffold),
    ):
        with pytest.raises(ArgumentError, match="aggregate: must be None unless"):
            build(task, clients=clients, num_active=3, uplink=way)
    with pytest.raises(ArgumentError, match="attackers: must be few enough"):
        alie([0], num_active=50)
    with pytest.raises(ArgumentError, match="attackers: must"):
        learner(attack=sign_flip([NODES])).init(KEY, DATA)
    with pytest.raises(ArgumentError, match="attackers: must be at most the number of clients; got 12"):
        learner(attack=sign_flip(NODES + 1)).init(KEY, DATA)
    for count in (-1, 1.5, None):
        with pytest.raises(ArgumentError, match="attackers: must be an integer of at least 0"):
            sign_flip(count)  # pyright: ignore[reportArgumentType]


def test_an_argument_that_is_missing_is_named():
    with pytest.raises(ArgumentError, match=r"std: must be given as in random_updates\(attackers, std=\)"):
        random_updates([0, 3])  # pyright: ignore[reportCallIssue]
    with pytest.raises(ArgumentError, match="num_active: must be the clients of a round where no num_std is given"):
        alie([0, 3])


@pytest.mark.parametrize("aggregate", [jaxfl.algorithms.krum(2), jaxfl.algorithms.trimmed_mean(2)])
def test_too_few_clients_for_a_rule_are_refused(aggregate):
    """Each round would be void, and nothing would train."""
    clients = jaxfl.local_steps(1, batch_size=2, optimizer=optax.sgd(0.1), weighting="uniform")
    task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
    way = jaxfl.uplink(aggregate=aggregate)
    with pytest.raises(ArgumentError, match=f"num_active: must be at least {aggregate.least} "):
        jaxfl.fed_avg(task, clients=clients, num_active=4, uplink=way)
    jaxfl.fed_avg(task, clients=clients, num_active=aggregate.least, uplink=way)
