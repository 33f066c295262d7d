"""Statistics of noise and batches: right ones pass as often as they should, and each kind of fault is refused."""

import math

import numpy as np
import pytest
import scipy.stats

from jaxfl.privacy.audit_noise import batch_checks, noise_check, noise_checks

ROUNDS, NODES, STD, RATE, VISIT, EACH = 12, 5, 3.0, 0.9, 0.01, 400
LAYERS = {"canary": (EACH,), "dense/bias": (10,), "dense/kernel": (20, 10)}
ONES = np.ones(ROUNDS, int)


def noise_of(seed):
    """Right noise of every layer, in deviations."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(ROUNDS, NODES, *leaf)) for name, leaf in LAYERS.items()}


def drawn(seed, rate=RATE, rounds=ROUNDS, nodes=NODES):
    """Which canaries Poisson batches have, (K, n, c)."""
    return np.random.default_rng(seed).random((rounds, nodes, EACH)) < rate


def verdicts(makers, significance):
    return {check.name: check.refuted for check in (make(significance / len(makers)) for make in makers)}


def of_noise(noise, significance=0.02, counts=ONES):
    """Name -> refuted."""
    return verdicts(noise_checks({name: STD * leaf for name, leaf in noise.items()}, STD, counts), significance)


def of_batches(batches, significance=0.02, counts=ONES):
    """Name -> refuted."""
    return verdicts(batch_checks(VISIT * np.asarray(batches, float), VISIT, RATE, counts), significance)


@pytest.mark.statistical
def test_right_noise_and_batches_are_refused_as_rarely_as_asked_for():
    noise = [any(of_noise(noise_of(seed), 0.2).values()) for seed in range(200)]
    batches = [any(of_batches(drawn(seed), 0.2).values()) for seed in range(400)]
    for actual in (noise, batches):
        assert np.mean(actual) < 0.2 + 3 * math.sqrt(0.2 * 0.8 / len(actual))
        assert np.mean(actual) > 0.05, "the share is used"


@pytest.mark.statistical
def test_correlations_of_right_vectors_have_the_law_that_is_claimed():
    """Mean and variance of the sum over pairs, of normal numbers and of skewed ones."""
    from jaxfl.privacy.audit_noise import _pairs

    rng = np.random.default_rng(0)
    normal = [_pairs("", rng.normal(size=(6, 30)))[0].chances.item() for _ in range(1000)]
    binary = [
        _pairs("", ((rng.random((6, 400)) < 0.9) - 0.9) / 0.3, 1 / 0.09 - 6)[0].chances.item() for _ in range(1000)
    ]
    for chances in (normal, binary):
        assert scipy.stats.kstest(chances, "uniform").pvalue > 1e-3


def changed(name, change):
    return lambda noise: {**noise, name: change(noise[name])}


def every(change):
    return lambda noise: {name: change(leaf) for name, leaf in noise.items()}


def first_half(leaf):
    leaf, half = leaf.copy().reshape(ROUNDS, NODES, -1), math.prod(leaf.shape[2:]) // 2
    leaf[..., half : 2 * half] = leaf[..., :half]
    return leaf


def in_random_order(leaf):
    leaf = leaf.copy().reshape(ROUNDS, NODES, -1)
    order = np.random.default_rng(9).permutation(leaf.shape[2])
    half = len(order) // 2
    leaf[..., order[half : 2 * half]] = leaf[..., order[:half]]
    return leaf


def far_apart(leaf):
    leaf = leaf.copy().reshape(ROUNDS, NODES, -1)
    half = leaf.shape[2] // 2
    leaf[..., half : 2 * half] = 0.3 * leaf[..., :half] + math.sqrt(1 - 0.3**2) * leaf[..., half : 2 * half]
    return leaf


def node_pairs(leaf):
    leaf = leaf.copy()
    leaf[:, 1], leaf[:, 3] = leaf[:, 0], -leaf[:, 2]
    return leaf


def by_node(*factors):
    return lambda leaf: leaf * np.array(factors).reshape(-1, *[1] * (leaf.ndim - 2))


def five_per_cent(leaf):
    leaf = leaf.copy().reshape(ROUNDS, NODES, -1)
    leaf[..., ::20] = 0
    return leaf / math.sqrt(0.95)


def later_rounds(leaf):
    return leaf * (np.arange(ROUNDS) == 0).reshape(-1, *[1] * (leaf.ndim - 1))


def shared(noise):
    return {**noise, "dense/bias": noise["dense/kernel"].reshape(ROUNDS, NODES, -1)[..., 50:60]}


def at_the_next_node(leaf):
    """Noise of node i and round k is that of node i - 1 and round k + 1."""
    long = np.concatenate([leaf[:, 0], leaf[: NODES - 1, 1]])
    return np.stack([long[node : node + ROUNDS] for node in range(NODES)], axis=1)


NOISE_FAULTS = {
    "no noise at one site, twice the variance at another": (every(by_node(1, 0, 1, 2**0.5, 1)), "noise of layers"),
    "a layer without noise at one site": (changed("dense/bias", by_node(1, 1, 0, 1, 1)), "noise of layers"),
    "a layer without noise after round 0": (changed("dense/bias", later_rounds), "noise of layers"),
    "less noise in one round": (
        every(lambda leaf: leaf * np.where(np.arange(ROUNDS) == 5, 0.8, 1).reshape(-1, *[1] * (leaf.ndim - 1))),
        "noise of layers",
    ),
    "a layer without noise": (changed("dense/bias", lambda leaf: 0 * leaf), "noise of layers"),
    "the same noise in every round": (every(lambda leaf: np.broadcast_to(leaf[:1], leaf.shape)), "repeated noise"),
    "a layer with the same noise in every round": (
        changed("dense/bias", lambda leaf: np.broadcast_to(leaf[:1], leaf.shape)),
        "repeated noise",
    ),
    "opposite noise in each two rounds": (
        every(lambda leaf: np.stack([leaf[k - k % 2] * (1 - 2 * (k % 2)) for k in range(ROUNDS)])),
        "repeated noise",
    ),
    "second half of every layer as the first": (every(first_half), "repeated noise"),
    "the same in random order": (every(in_random_order), "repeated noise"),
    "two layers share noise": (shared, "repeated noise"),
    "far coordinates correlated 0.3": (every(far_apart), "repeated noise"),
    "the same at two nodes and opposite at two": (every(node_pairs), "repeated noise"),
    "a round later at the next node": (every(at_the_next_node), "repeated noise"),
    "coin flips": (every(np.sign), "shape of the noise"),
    "uniform": (every(lambda leaf: math.sqrt(12) * (scipy.stats.norm.cdf(leaf) - 0.5)), "shape of the noise"),
    "rounded to whole deviations": (every(lambda leaf: np.round(leaf) / math.sqrt(13 / 12)), "shape of the noise"),
    "5 % of coordinates without": (every(five_per_cent), "noise of layers"),
    "one coordinate without": (
        changed("dense/kernel", lambda leaf: leaf * (np.arange(200).reshape(20, 10) != 77)),
        "noise of layers",
    ),
}


@pytest.mark.statistical
@pytest.mark.parametrize(("change", "name"), NOISE_FAULTS.values(), ids=NOISE_FAULTS)
def test_noise_with_a_fault_is_refused(change, name):
    for seed in range(3):
        refused = {check for check, refuted in of_noise(change(noise_of(seed))).items() if refuted}
        assert any(check.startswith(name) for check in refused)


def test_the_place_of_a_fault_is_named():
    (layers, *_) = of_noise(NOISE_FAULTS["a layer without noise at one site"][0](noise_of(0)))
    assert layers == "noise of layers (dense/bias, node 2)"


def fixed_size(seed):
    """EACH canaries and a fifth as many other samples."""
    rng, count = np.random.default_rng(seed), EACH * 6 // 5
    order = rng.permuted(np.broadcast_to(np.arange(count), (ROUNDS, NODES, count)), axis=2)
    return order[..., :EACH] < RATE * count


def on_a_schedule(seed):
    rounds = np.arange(ROUNDS)[:, None, None]
    return np.broadcast_to((np.arange(EACH) + rounds) % 10 != 0, (ROUNDS, NODES, EACH))


BATCH_FAULTS = {
    "fixed where Poisson is claimed": (fixed_size, "batches"),
    "the same in every round": (lambda seed: np.broadcast_to(drawn(seed, rounds=1), (ROUNDS, NODES, EACH)), "batches"),
    "the same at all nodes": (lambda seed: np.broadcast_to(drawn(seed, nodes=1), (ROUNDS, NODES, EACH)), "batches"),
    "on a schedule": (on_a_schedule, "batches"),
    "canaries in every batch": (lambda seed: np.ones((ROUNDS, NODES, EACH)), "batches"),
    "in every batch of one node": (lambda seed: drawn(seed) | (np.arange(NODES) == 2)[:, None], "batches"),
    "a share of every sample in place of a chance": (lambda seed: np.full((ROUNDS, NODES, EACH), RATE), "batches"),
    "twice the rate": (lambda seed: drawn(seed, rate=0.45), "batches"),
    "clip norm 1.1 times too large": (lambda seed: 1.1 * drawn(seed), "largest visit"),
}


@pytest.mark.statistical
@pytest.mark.parametrize(("batches", "name"), BATCH_FAULTS.values(), ids=BATCH_FAULTS)
def test_batches_with_a_fault_are_refused(batches, name):
    for seed in range(3):
        refused = {check for check, refuted in of_batches(batches(seed)).items() if refuted}
        assert any(check.startswith(name) for check in refused)


@pytest.mark.statistical
def test_messages_of_several_releases_and_tables_that_hide_batches():
    counts = np.tile([1, 3, 0], ROUNDS // 3)
    for seed in range(4):
        several = sum(drawn(10 * seed + i) * (counts > i)[:, None, None] for i in range(3))
        assert not any(of_batches(several, counts=counts).values())
        assert any(of_batches(drawn(seed) * counts[:, None, None], counts=counts).values()), "one batch for all three"
        scaled = {
            name: leaf * np.sqrt(counts).reshape(-1, *[1] * (leaf.ndim - 1)) for name, leaf in noise_of(seed).items()
        }
        assert not any(of_noise(scaled, counts=counts).values())
        hidden = np.random.default_rng(100 + seed).random((NODES, EACH)) < 0.5
        right, wrong = drawn(seed), np.broadcast_to(drawn(seed, rounds=1), (ROUNDS, NODES, EACH))
        assert not any(of_batches(np.where(hidden, np.nan, right)).values())
        assert any(of_batches(np.where(hidden, np.nan, wrong)).values())


def test_noise_of_no_size_is_a_check_that_refuses():
    actual = noise_check("noise", 0.0, 100, 1.0, 0.05)
    assert (actual.measured, actual.refuted) == (0.0, True)
