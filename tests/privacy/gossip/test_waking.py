"""Nodes that wake at random: epsilon is the mean over how often they do, against enumerations of small runs."""

import functools
import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom

from jaxfl.privacy import dominating_pairs as pairs
from jaxfl.privacy.gossip import A_DP2_SGD, Release, account, proven, sensitivities
from jaxfl.privacy.gossip.proven import proven_bound


def delta_of(curve, dp_epsilon):
    """delta of a curve, which is linear in exp(epsilon) between its points."""
    return float(np.interp(math.exp(dp_epsilon), np.exp(curve.step * np.arange(len(curve.deltas))), curve.deltas))


@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_how_often_a_node_wakes_is_averaged_exactly(sampler, relation):
    """The mean of the curves of 0 ... 12 releases, each computed by itself."""
    nodes, rounds, dp_delta = 3, 4, 1e-4
    one = Release("mini_batch", sampler, 10, 40, 1.0, noise_std=0.1)
    bound = proven_bound(one, relation, nodes * rounds, dp_delta, 1 / nodes)
    assert "privacy loss distribution" in bound.accountant
    stated = account(A_DP2_SGD, one, dp_delta=dp_delta, num_nodes=nodes)
    assert stated.epsilon(rounds, "proven", relation) == bound.dp_epsilon
    if sampler == "fixed":
        zero_out = relation == "zero_out"
        pair, arguments = (pairs.zeroed, (0.25, 2.0, 1.0)) if zero_out else (pairs.replaced, (0.25, (2.0,), (1.0,)))
    else:
        pair, arguments = (pairs.sampled if relation == "zero_out" else pairs.exchanged), (0.25, 1.0)
    counts = np.arange(1, nodes * rounds + 1)
    curves = [pairs.composed_curves(pair, arguments, 1e-3, int(count), dp_delta) for count in counts]
    chances = binom.pmf(counts, nodes * rounds, 1 / nodes)

    def exact(dp_epsilon):
        each = [[delta_of(curve, dp_epsilon) for curve in ways] for ways in curves]
        return float(np.max(chances @ np.array(each)))

    assert exact(bound.dp_epsilon) <= dp_delta * 1.001
    assert exact(0.995 * bound.dp_epsilon) > dp_delta


@pytest.mark.parametrize(("sampler", "estimator"), [("fixed", "saga"), ("uniform", "saga"), ("poisson", "mini_batch")])
def test_how_often_a_waking_node_draws_a_sample(sampler, estimator):
    """The mean over wake-ups, and over how often a sample is in their batches, each enumerated."""
    nodes, rounds, dp_delta = 3, 4, 1e-4
    one = Release(estimator, sampler, 1, 4, 1.0, noise_std=2.0)
    bound = proven._counts_epsilon(one, "zero_out", nodes * rounds, dp_delta, 1 / nodes)
    absent, present = (change / one.noise_std for change in sensitivities(one, "zero_out"))

    def exact(dp_epsilon):
        total = 0.0
        for woken, drawn in itertools.product(range(nodes * rounds + 1), repeat=2):
            chance = binom.pmf(woken, nodes * rounds, 1 / nodes) * binom.pmf(drawn, woken, 0.25)
            mu = math.sqrt(drawn * present**2 + max(woken - drawn, 0) * absent**2)
            total += chance * float(pairs.gaussian_delta(dp_epsilon, mu))
        return total

    assert exact(bound) <= dp_delta * (1 + 1e-9)
    slack = 0.999 if estimator == "mini_batch" else 0.9  # a table counts as many releases as are likely
    assert exact(slack * bound) > dp_delta


def test_how_often_uniform_draws_hold_a_sample_at_a_waking_node():
    nodes, rounds, dp_delta = 3, 4, 1e-4
    one = Release("mini_batch", "uniform", 2, 4, 1.0, noise_std=1.0)
    bound = proven._counts_epsilon(one, "zero_out", nodes * rounds, dp_delta, 1 / nodes)
    once = np.array([1 - 1 / nodes, 0, 0, 0, 0.0])
    once[[0, 1, 4]] += binom.pmf(np.arange(3), 2, 1 / 4) / nodes  # the square of how often a batch holds the sample
    squares = functools.reduce(np.convolve, [once] * (nodes * rounds))
    mus = np.sqrt(np.arange(len(squares))) / 2
    assert squares @ pairs.gaussian_delta(bound, mus) <= dp_delta * (1 + 1e-9)
    assert squares @ pairs.gaussian_delta(0.999 * bound, mus) > dp_delta


def test_what_a_statement_on_waking_nodes_says():
    one = Release("mini_batch", "poisson", 64, 3125, 1.0, noise_std=2 / 64)
    text = " ".join(account(A_DP2_SGD, [one] * 16, dp_delta=1e-5).statements(3120)[1].assumptions)
    assert f"each of {16 * 3120} events wakes one of 16 nodes" in text
    actual = account(A_DP2_SGD, one, dp_delta=1e-5, num_nodes=16).epsilon(3120)
    assert proven_bound(one, "zero_out", 3120, 1e-5).dp_epsilon < actual
    assert actual < proven_bound(one, "zero_out", 3380, 9e-6).dp_epsilon, "the quantile 1e-6, out of delta"
