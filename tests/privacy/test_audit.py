"""The audit: what a canary is, that the bound holds, and that it tells a wrong mechanism from a right one."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from helpers import refusals
from problems import linear_task, small_task, uneven_data
from registry import REGISTRY

import jaxfl
from jaxfl import ArgumentError, gradients, graphs
from jaxfl.gradients import per_example
from jaxfl.privacy.audit import audit, canary_scores, epsilon_lower_bound, with_canaries
from jaxfl.privacy.audit_mechanism import Mechanism, check_mechanism
from jaxfl.privacy.gossip import PRIVSGP, PRIVSGP_VR, Release, account

pytest.importorskip("jax_privacy.auditing")
CLIP, STEP, DELTA = 0.5, 0.1, 1e-5
NODES, REAL, CANARIES, ROUNDS, RATE = 5, 10, 3000, 4, 0.9
SIZE = REAL + CANARIES // NODES
BATCH = round(RATE * SIZE)
NOISE = ["noise of one release", "noise of all releases", "noise of layers", "repeated noise", "shape of the noise"]
CHECKS = ["releases", *NOISE, "largest visit", "batches", "signal", "Gaussian epsilon"]
ESTIMATORS = {PRIVSGP: "mini_batch", PRIVSGP_VR: "saga"}


# What a canary is


def model_of(tree):
    """Parameters of the task's own model, with factored layers or without."""
    return tree["model"] if "model" in tree else {name: leaf for name, leaf in tree.items() if name != "canary"}


BASES = {"factored": small_task, "one sample": linear_task}


@functools.cache
def per_sample_gradients(base_of, strength=4.0):
    """(canaries, clip norm -> losses and gradients of the whole pool, the same of the task without canaries)."""
    base, data = base_of(), uneven_data()
    task, more, canaries = with_canaries(base, data, 12, strength=strength, seed=0)
    params = task.init(jax.random.key(0))

    @jax.jit
    def of_all(clip_norm):
        wrapped = per_example.per_sample(task, params, more.inputs, more.labels, clip_norm=clip_norm)
        plain = per_example.per_sample(base, model_of(params), data.inputs, data.labels, clip_norm=clip_norm)
        return wrapped, plain

    return canaries, of_all


@pytest.mark.parametrize("base_of", BASES.values(), ids=BASES)
@pytest.mark.parametrize(("clip_norm", "norm"), [(1e9, 4.0), (CLIP, CLIP), (4.0, 4.0)])
def test_an_included_canary_moves_its_own_coordinate_and_an_excluded_one_nothing(clip_norm, norm, base_of):
    canaries, of_all = per_sample_gradients(base_of)
    actual, _ = of_all(clip_norm)
    expected = np.zeros((12, 3))
    expected[np.arange(12), canaries.coordinates] = norm * canaries.included
    assert 0 < canaries.included.sum() < 12
    np.testing.assert_allclose(actual.gradient["canary"][-12:], expected, rtol=1e-6)
    for leaf in jax.tree.leaves(model_of(actual.gradient)):
        assert not np.any(leaf[-12:])


@pytest.mark.parametrize("base_of", BASES.values(), ids=BASES)
@pytest.mark.quick_cases(1)
def test_real_samples_keep_loss_metrics_and_gradient(base_of):
    _, of_all = per_sample_gradients(base_of)
    wrapped, plain = of_all(CLIP)
    count = len(plain.losses)
    np.testing.assert_allclose(wrapped.losses[:count], plain.losses, rtol=1e-5)
    assert not np.any(wrapped.gradient["canary"][:count])
    for mine, own in zip(*map(jax.tree.leaves, (model_of(wrapped.gradient), plain.gradient)), strict=True):
        np.testing.assert_allclose(mine[:count], own, rtol=1e-4, atol=1e-6)
    base, data = base_of(), uneven_data()
    task, more, canaries = with_canaries(base, data, 6, strength=2.0, seed=1)
    params = {**task.init(jax.random.key(0)), "canary": jnp.array([1.0, -3.0])}
    actual = task.metrics(params, more.inputs, more.labels)
    own = base.metrics(model_of(params), data.inputs, data.labels)
    for name, values in own.items():
        np.testing.assert_allclose(actual[name][:count], values, rtol=1e-5)
    np.testing.assert_allclose(actual["loss"], task.loss(params, more.inputs, more.labels), rtol=1e-5)
    values = 2.0 * canaries.included * np.array([1.0, -3.0])[canaries.coordinates]
    np.testing.assert_allclose(actual["loss"][count:], values)


@pytest.mark.parametrize("clip_order", [1, 2])
@pytest.mark.quick_cases(1)
def test_ghost_clipping_sums_canaries_as_one_sample_at_a_time_does(clip_order):
    """The factored layers are those that clip: the same sum without them."""
    task, data, _ = with_canaries(small_task(), uneven_data(), 12, strength=4.0, seed=0)
    assert [layer.name for layer in task.layers][-1] == "canary"
    assert per_example.route(task, CLIP) == "factored"
    params = task.init(jax.random.key(0))
    weights = jnp.linspace(0.0, 1.0, len(data.inputs))
    summed = functools.partial(per_example.weighted_sum, clip_norm=CLIP, clip_order=clip_order)
    by_factors, by_samples = (
        jax.jit(functools.partial(summed, t))(params, data.inputs, data.labels, weights)
        for t in (task, task._replace(layers=(), factors=None))
    )
    for one, other in zip(*(jax.tree.leaves(actual) for actual in (by_factors, by_samples)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert by_factors.gradient["canary"].any()


def test_images_of_bytes_reach_the_task_as_bytes():
    images = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 14
    data = jaxfl.federate(images, np.array([0, 1]), [[0], [1]])
    seen = []
    base = jaxfl.from_functions(
        lambda key: jnp.zeros(()), lambda w, x, y: seen.append(x.dtype) or x.astype(jnp.float32).sum((1, 2)) + w
    )
    task, more, _ = with_canaries(base, data, 2, strength=1.0, seed=0)
    losses = task.loss(task.init(jax.random.key(0)), more.inputs, more.labels)
    assert seen == [jnp.uint8]
    np.testing.assert_array_equal(losses, [*images.sum((1, 2), dtype=np.float32), 0, 0])


@pytest.mark.parametrize("shared", [True, False])
def test_a_coin_changes_one_switch_of_the_data_and_nothing_else(shared):
    def made(seed):
        return with_canaries(small_task(), uneven_data(), 503, strength=1.0, seed=seed, shared_coordinates=shared)[1:]

    (data, canaries), (other, others) = made(0), made(1)
    assert abs(canaries.included.mean() - 0.5) < 0.1
    assert abs((canaries.included == others.included).mean() - 0.5) < 0.1
    for name in ("labels", "indices", "sizes"):
        np.testing.assert_array_equal(getattr(data, name), getattr(other, name))
    differs = np.asarray(data.inputs != other.inputs)
    assert not differs[:, :-1].any()
    np.testing.assert_array_equal(differs[-503:, -1], canaries.included != others.included)
    assert not differs[:-503].any()
    # Every canary is held once, by its node, which tells it apart from the others of the same coordinate.
    held = [set(np.asarray(data.indices)[i, : data.sizes[i]].tolist()) for i in range(NODES)]
    assert sum(map(len, held)) == len(data.inputs) == int(data.sizes.sum())
    assert all(31 + c in held[node] for c, node in enumerate(canaries.nodes))
    marks = np.asarray(data.inputs)[31:, -2]
    np.testing.assert_array_equal(marks, canaries.coordinates + 1)
    assert len(set(zip(canaries.nodes.tolist(), canaries.coordinates.tolist(), strict=True))) == 503
    assert len(set(canaries.coordinates.tolist())) == (101 if shared else 503)
    assert np.ptp(np.bincount(canaries.nodes)) <= 1


# The bound from scores


def gaussian_epsilon(mu):
    """Epsilon at DELTA of a Gaussian mechanism with a sensitivity of mu standard deviations (Balle and Wang 2018)."""

    def excess(epsilon):
        below = scipy.stats.norm.cdf
        return below(mu / 2 - epsilon / mu) - np.exp(epsilon) * below(-mu / 2 - epsilon / mu) - DELTA

    return float(scipy.optimize.brentq(excess, 0, 100))  # pyright: ignore[reportArgumentType]


def simulated(mechanism, seed, count=CANARIES):
    rng = np.random.default_rng(seed)
    included = rng.integers(0, 2, count).astype(bool)
    return mechanism(rng, included), included


@pytest.mark.statistical
@pytest.mark.parametrize("mu", [0.25, 1.0])
def test_bound_stays_below_the_epsilon_of_a_gaussian_mechanism(mu):
    bounds = [
        epsilon_lower_bound(
            *simulated(lambda rng, included: mu * included + rng.normal(size=CANARIES), seed), dp_delta=DELTA
        )[0]
        for seed in range(40)
    ]
    true = gaussian_epsilon(mu)
    assert np.mean(np.array(bounds) > true) <= 0.05
    assert np.median(bounds) > 0.3 * true, "and it is not far below"
    # A claim of the epsilon that a quarter of the signal would have (noise four times larger than it is) is refuted.
    if mu == 1.0:
        assert min(bounds) > 1.4 * gaussian_epsilon(mu / 4)


def test_bound_counts_right_guesses():
    included = np.tile([True, False], 500)
    bound, num_guesses, num_correct, threshold = epsilon_lower_bound(
        2.0 * included + np.arange(1000) / 1e4, included, dp_delta=1e-5
    )
    assert (num_guesses, num_correct) == (100, 100)
    assert bound > 3
    assert threshold == pytest.approx(2.09 - 1.04995)  # 2.0900 to 2.0998, fifty scores, and as many below
    nothing = epsilon_lower_bound(np.arange(1000.0), included, dp_delta=DELTA)
    assert nothing[0] == 0
    assert nothing[2] == 50


# Whole runs


@functools.cache
def scorer(method):
    """(seed -> task, data, canaries; (noise_std, clip_norm, key, data) -> scores (m,), compiled once)."""
    row, graph = REGISTRY["push_sum"], graphs.directed_ring(NODES)
    assert row.released
    released = functools.partial(row.released, graph, STEP)
    base = uneven_data(sizes=(REAL,) * NODES)

    def made(seed):
        return with_canaries(small_task(), base, CANARIES, strength=4 * CLIP, seed=seed)

    task, _, where = made(0)
    sampler = gradients.poisson(BATCH, num_draws=NODES * ROUNDS)

    @jax.jit
    def scores(noise_std, clip_norm, key, data):
        table = {"table": "factored"} if method == PRIVSGP_VR else {}
        gradient = getattr(gradients, ESTIMATORS[method])(sampler=sampler, clip_norm=clip_norm, **table)
        learner, silent = (
            row.constructor(task, graph=graph, step_size=STEP, gradient=gradient, noise=jaxfl.gaussian(std))
            for std in (noise_std, 0.0)
        )
        return canary_scores(learner, silent, released, data, where, key, ROUNDS)

    return made, scores


@functools.cache
def claimed_noise(method):
    """The noise that is proven to give epsilon 1."""
    release = Release(ESTIMATORS[method], "poisson", BATCH, SIZE, CLIP, 1.0)
    return account(method, release, dp_delta=DELTA).calibrate(ROUNDS, 1.0)


def bounds(method, noise_std, seeds=(0, 1), clip_norm: float | None = CLIP):
    made, scores = scorer(method)
    actual = []
    for seed in seeds:
        _, data, canaries = made(seed)
        values = np.asarray(scores(noise_std, clip_norm, jax.random.key(seed), data).releases).sum(axis=0)
        actual.append(epsilon_lower_bound(values, canaries.included, dp_delta=DELTA)[0])
    return np.array(actual)


@pytest.mark.parametrize("method", ESTIMATORS)
@pytest.mark.quick_cases(1)
def test_an_observer_sees_a_canary_as_privacy_theory_says(method):
    """Without noise a canary counts clip_norm / b a visit in a mini-batch, and clip_norm / J in every round of SAGA."""
    made, scores = scorer(method)
    _, data, canaries = made(0)
    actual = np.asarray(scores(0.0, CLIP, jax.random.key(0), data).releases).sum(axis=0)
    np.testing.assert_allclose(actual[~canaries.included], 0, atol=1e-5 * CLIP / BATCH * ROUNDS)
    visits = actual[canaries.included] * (SIZE if method == PRIVSGP_VR else BATCH) / CLIP
    np.testing.assert_allclose(visits, np.round(visits), atol=1e-3)
    if method == PRIVSGP_VR:
        assert set(np.round(visits)) == {ROUNDS}, "in every round, sampled or not"
    else:
        np.testing.assert_allclose(np.mean(visits) / ROUNDS, RATE, atol=0.02)
        assert np.ptp(visits) > 1


def refused(method, noise_std, seed, clip_norm: float | None = CLIP):
    """The checks that refuse a run, given the noise that it claims."""
    made, scores = scorer(method)
    _, data, canaries = made(seed)
    actual = scores(noise_std, clip_norm, jax.random.key(seed), data)
    checks = check_mechanism(
        np.asarray(actual.releases),
        canaries.included,
        Mechanism(noise_std=claimed_noise(method), signal=ROUNDS * CLIP / SIZE, num_releases=ROUNDS),
        dp_epsilon=1.0,
        dp_delta=DELTA,
        significance=0.01,
    )
    return {check.name for check in checks if check.refuted}


@pytest.mark.statistical
@pytest.mark.parametrize("method", ESTIMATORS)
def test_checks_pass_right_runs_and_refuse_a_little_less_noise_and_missing_clipping(method):
    noise_std, noise = claimed_noise(method), {"noise of one release", "noise of all releases"}
    for seed in range(4):
        assert not refused(method, noise_std, seed)
    for factor in (1.25, 1.5, 2, 4):
        for seed in range(2):
            assert noise <= refused(method, noise_std / factor, seed)
    for seed in range(2):
        assert "signal" in refused(method, noise_std, seed, clip_norm=1e9)
    assert not bounds(method, noise_std / 1.25).max() > 1, "which the guesses do not see"


@pytest.mark.parametrize("name", [name for name, row in REGISTRY.items() if row.released and not row.special_case_of])
@pytest.mark.quick_cases(1)
def test_every_private_algorithm_can_be_audited(name):
    row = REGISTRY[name]
    base = uneven_data(sizes=(6,) * NODES)
    task, data, canaries = with_canaries(
        small_task(), base, 100, strength=2.0, seed=0, shared_coordinates=not row.releases_total
    )
    graph = graphs.ring(NODES)
    gradient = gradients.mini_batch(sampler=gradients.fixed(24), clip_norm=CLIP)
    learner = row.constructor(task, graph=graph, step_size=STEP, gradient=gradient, noise=jaxfl.gaussian(1e-6))
    assert row.released
    released = functools.partial(row.released, graph, STEP)
    claimed = Mechanism(noise_std=1e-6, signal=8 * CLIP / 26, num_releases=8, visit=CLIP / 24, rate=24 / 26)
    claim = {"dp_epsilon": 1.0, "claimed": claimed, "significance": 0.1, "releases_total": row.releases_total}
    silent = row.constructor(task, graph=graph, step_size=STEP, gradient=gradient, noise=jaxfl.gaussian(0.0))
    claim["in_sequence"] = row.releases_total
    actual, without = (
        audit(learner, other, released, data, canaries, jax.random.key(0), 8, DELTA, **claim)
        for other in (silent, learner)
    )
    assert [check.name.partition(" (")[0] for check in actual.checks] == CHECKS
    (missing,) = [check for check in without.checks if check.name.startswith("noise of layers")]
    assert missing.refuted, "a learner that is its twin without noise adds none"
    assert actual.smallest_error == 1.0, "any error is seen where there is next to no noise"
    assert actual.neighboring_relation == "zero_out"
    assert actual.num_guesses == actual.num_correct == 10, "next to no noise"
    assert actual.dp_epsilon_lower_bound > 1
    surest = np.abs(actual.scores - np.median(actual.scores)) >= actual.guess_threshold
    assert surest.sum() == actual.num_guesses
    assert actual.scores[canaries.included].min() > 100 * np.abs(actual.scores[~canaries.included]).max()


def test_a_run_that_diverges_is_no_audit():
    with pytest.raises(ArgumentError, match=r"scores: must be finite; 1 of 3 are not"):
        epsilon_lower_bound(np.array([0.0, np.nan, 1.0]), np.array([True, False, True]), dp_delta=DELTA)


def bound_of(**options):
    return lambda: epsilon_lower_bound(np.arange(9.0), np.arange(9) > 4, **{"dp_delta": 1e-5, **options})


def canaries_of(count, strength):
    return lambda: with_canaries(small_task(), uneven_data(), count, strength=strength, seed=0)


test_refusals = refusals(
    [
        (bound_of(dp_delta=0.0), "dp_delta"),
        (bound_of(significance=1.0), "significance"),
        (bound_of(dp_delta=2.0), "dp_delta"),
        (canaries_of(0, 1.0), "num_canaries"),
        (canaries_of(10, 0.0), "strength"),
        (canaries_of(10, float("nan")), "strength"),
    ]
)


def test_without_jax_privacy_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_privacy.auditing", None)
    with pytest.raises(ArgumentError, match=r"needs jax-privacy; it is not installed\. Run pip install jax-privacy"):
        epsilon_lower_bound(np.arange(9.0), np.arange(9) > 4, dp_delta=DELTA)
