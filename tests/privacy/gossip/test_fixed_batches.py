"""Batches of fixed size under zero_out: small data sets by quadrature, and two rounds with any second gradients."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from jaxfl.privacy import dominating_pairs as pairs
from jaxfl.privacy.gossip.proven import Release, proven_bound

STEPS = (-1.0, -0.5, 0.0, 0.5, 1.0)  # gradients, in units of the clip norm
Y = np.linspace(-14.0, 14.0, 4001)
EPSILONS = np.array([0.0, 0.1, 0.4, 1.0, 1.8])


def data_sets(num_entries):
    """Gradients of the others, in any order, and the sample's."""
    return itertools.product(itertools.combinations_with_replacement(STEPS, num_entries - 1), STEPS)


def densities(others, gradient, batch_size, z):
    """Of a released sum, with the sample's gradient and with 0 in its place, at `Y`."""

    def density(own):
        sums = [sum(batch) for batch in itertools.combinations((*others, own), batch_size)]
        return np.mean([norm.pdf(Y, total / z) for total in sums], axis=0)

    return density(gradient), density(0.0)


def hockey_sticks(p, q, thresholds):
    """The integral of max(p - exp(t) q, 0) for each threshold t."""
    return np.array([np.maximum(p - math.exp(t) * q, 0.0).sum() for t in thresholds]) * (Y[1] - Y[0])


def deltas(sampling_rate, z, num_rounds):
    """delta of both directions at `EPSILONS`, which the grid holds."""
    curves = pairs.composed_curves(pairs.zeroed, (sampling_rate, 2 / z, 1 / z), 1e-3, num_rounds, 1e-3)
    assert all(curve.step == 1e-3 for curve in curves)
    return [curve.deltas[np.rint(EPSILONS / 1e-3).astype(int)] for curve in curves]


@pytest.mark.parametrize(("num_entries", "batch_size"), [(3, 1), (3, 2), (4, 1), (4, 2), (4, 3)])
@pytest.mark.parametrize("z", [0.8, 2.0])
def test_every_data_set_stays_below_and_one_reaches_it(num_entries, batch_size, z):
    bounds = deltas(batch_size / num_entries, z, 1)
    worst = np.zeros((2, len(EPSILONS)))
    for others, gradient in data_sets(num_entries):
        p, q = densities(others, gradient, batch_size, z)
        worst = np.maximum(worst, [hockey_sticks(p, q, EPSILONS), hockey_sticks(q, p, EPSILONS)])
    assert (worst <= np.array(bounds) * (1 + 3e-5) + 1e-9).all()  # of the quadrature
    np.testing.assert_allclose(worst, bounds, rtol=2e-4, atol=1e-9)


@pytest.mark.parametrize(("num_entries", "z"), [(3, 1.0), (3, 2.5)])
def test_two_rounds_stay_below_whatever_the_second_gradients_are(num_entries, z):
    """For every first release the worst of all data sets is taken in the second round."""
    rate, sets = 1 / num_entries, [densities(*one, 1, z) for one in data_sets(num_entries)]
    thresholds = np.linspace(-6.0, 6.0, 1201)
    bounds = deltas(rate, z, 2)
    for way, bound in enumerate(bounds):
        second = np.max([hockey_sticks(pair[way], pair[1 - way], thresholds) for pair in sets], axis=0)
        worst = np.zeros(len(EPSILONS))
        for pair in sets:
            p, q = pair[way], pair[1 - way]
            shifted = EPSILONS[:, None] + np.log(q / p)
            of_past = np.interp(shifted, thresholds, second)
            of_past = np.where(shifted < -6.0, 1.0, of_past)  # at most that
            worst = np.maximum(worst, (p * np.minimum(of_past, 1.0)).sum(axis=1) * (Y[1] - Y[0]))
        assert (worst <= bound * (1 + 1e-3) + 1e-7).all()
        assert (worst > 0.9 * bound)[:3].all()


def test_gradients_that_adapt_exceed_one_pair_in_every_round():
    """No pair of constant gradients, composed, is a bound: the larger profile of both is needed."""
    z, dp_epsilon = 1.0, EPSILONS[3]
    constant = [densities((-1.0, -1.0), gradient, 1, z) for gradient in (1.0, -1.0)]  # worst for a >= 1 and for a < 1

    def of_two(first, seconds):
        p, q = first
        thresholds = dp_epsilon + np.log(q / p)
        return float(
            (p * np.max([hockey_sticks(one[0], one[1], thresholds) for one in seconds], axis=0)).sum() * (Y[1] - Y[0])
        )

    adaptive = of_two(constant[0], constant)
    assert adaptive > 1.02 * max(of_two(one, [one]) for one in constant)
    assert adaptive <= deltas(1 / 3, z, 2)[0][3] * (1 + 1e-5)


@pytest.mark.parametrize(
    ("entries", "batch", "rounds", "z", "expected"),
    [(3125, 64, 3120, 1.764, 6.452), (1200, 64, 300, 1.1, 16.20), (60, 30, 50, 4.0, 4.494)],
)
def test_it_costs_more_than_poisson_batches_and_less_than_replacing(entries, batch, rounds, z, expected):
    one = Release("mini_batch", "fixed", batch, entries, 1.0, noise_std=z / batch)
    actual = proven_bound(one, "zero_out", rounds, 1e-5).dp_epsilon
    assert actual == pytest.approx(expected, rel=1e-3)
    assert actual < 0.6 * proven_bound(one, "replace_one", rounds, 1e-5).dp_epsilon
    assert actual > proven_bound(one._replace(sampler="poisson"), "zero_out", rounds, 1e-5).dp_epsilon


@pytest.mark.parametrize(("q", "low", "high"), [(0.3, 0.5, 1.0), (1e-4, 1.0, 2.0), (0.9, 2.0, 4.1), (0.1, 100, 200.0)])
def test_losses_are_found_again(q, low, high):
    top = float(pairs.mixture_loss(high + 9.0, q, 0.0, high) - pairs.mixture_loss(high + 9.0, q, 0.0, low))
    losses = np.linspace(0.0, top, 5000)
    x = pairs._inverse_between(losses, q, low, high)
    actual = pairs.mixture_loss(x, q, 0.0, high) - pairs.mixture_loss(x, q, 0.0, low)
    np.testing.assert_allclose(actual, losses, rtol=1e-9, atol=1e-12 * top + 1e-15)
