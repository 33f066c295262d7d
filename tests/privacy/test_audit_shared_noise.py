"""The audit on noise that pairs of nodes share: it looks at what an outside observer finds of each node."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.audit import attack, options
from jaxfl.core.tree import scale
from jaxfl.frame import Row, override
from jaxfl.privacy.mechanisms import add, gaussian
from jaxfl.privacy.shared import effective_noise, key_graph
from jaxfl.privacy.shared_noise import covariance, shared_gaussian, views

pytest.importorskip("jax_privacy.auditing")
NODES = 5
OPTIONS = {"method": "PrivSGP", "shared_ratio": 2.0, "samples": 20, "canaries": 1500, "iterations": 4}
RIGHT = options.Learning.noise
# Pairs in the order in which they are drawn, and the part of both ends: (number of the draw, sign at each end).
FAULTS = {
    "none": {},
    "a pair without its half": {0: [(0, 1, 0)]},
    "a seed of two pairs": {1: [(0, 1, -1)]},
    "a wrong sign": {0: [(0, 1, 1)]},
    "a pair drawn twice": {0: [(0, 1, -1), (99, 1, -1)]},
}


def faulty(fault, self, num_nodes, noise_std):
    """Noise of the same parts, drawn pair by pair, with a fault."""
    noise = RIGHT(self, num_nodes, noise_std)
    assert noise.parts is not None
    own, shared = noise.parts
    first, second = np.nonzero(np.triu(shared))

    def draw(key, params):
        def unit(number):
            return gaussian(1.0).draw(jax.random.fold_in(key, number), params)

        total = scale(jnp.asarray(own, jnp.float32), unit(1000))
        for pair, (i, v) in enumerate(zip(first, second, strict=True)):
            for number, at_first, at_second in FAULTS[fault].get(pair, [(pair, 1, -1)]):
                ends = np.zeros(num_nodes)
                ends[[i, v]] = shared[i, v] * at_first, shared[i, v] * at_second
                drawn = unit(number)
                same = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), drawn)
                total = add(total, scale(jnp.asarray(ends, jnp.float32), same))
        return scale(jnp.float32(noise_std), total)

    return noise._replace(draw=draw)


def refused(monkeypatch, fault, seed):
    """Names of the checks that refuse a run with this fault."""
    config = override(options.Configuration(), {**OPTIONS, "seed": seed})
    lane = attack.ready(Row(config, (seed,), {}))
    with monkeypatch.context() as patch:
        patch.setattr(options.Learning, "noise", functools.partialmethod(lambda *a: faulty(fault, *a)))
        return {check.name.split(" (")[0] for check in attack.measured(lane, 1).result.checks if check.refuted}


@pytest.mark.statistical
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_pair_is_refused_and_a_right_run_passes(fault, monkeypatch):
    names = refused(monkeypatch, fault, seed=0)
    assert bool(names) == (fault != "none"), names


def test_an_outside_observer_finds_the_gradient_of_one_node_under_its_effective_noise():
    keys = key_graph("ring", NODES)
    noise = shared_gaussian(0.5, key_graph=keys, ratio=3.0, colluding=0)
    over_nodes = covariance(noise)
    assert over_nodes is not None and noise.parts is not None
    seen, whitened = views(over_nodes)
    gradient = jnp.zeros((NODES, 40_000)).at[2].set(7.0)
    drawn = noise.draw(jax.random.key(0), gradient)
    actual = np.asarray(seen(gradient + drawn), np.float64)
    np.testing.assert_allclose(seen(gradient)[2], 7.0, rtol=1e-5)
    assert abs((actual[2] - 7.0).std() / 0.5 - 1) < 5 / np.sqrt(80_000)
    apart = np.cov(np.asarray(whitened(drawn), np.float64)) / 0.25
    assert abs(apart - np.eye(NODES)).max() < 5 * np.sqrt(2 / 40_000)
    assert effective_noise(keys, ratio=3.0, colluding=0).noise[0] > 1
    np.testing.assert_allclose(over_nodes.sum() / NODES, noise.parts[0][0] ** 2 / 4, rtol=1e-6)  # the sum's own noise
