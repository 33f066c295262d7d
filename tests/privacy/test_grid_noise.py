"""Gaussian noise on a grid: its distribution, what is released, and what float32 noise gives away."""

import bisect
import decimal
import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from helpers import refused

import jaxfl
from jaxfl.privacy import Grid, grid_noise

KEY = jax.random.key(3)
D, SIZES = 40_000, {8: 400_000, 12: 1_000_000}  # numbers, and by the bits of a grid
PI = decimal.Decimal(
    "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798"
)


@functools.partial(jax.jit, static_argnames=("bits", "size", "nodes"))
def _drawn(key, scale, bits, size, nodes):
    return jaxfl.grid_gaussian(scale, bits).draw(key, jnp.zeros((nodes, size)))


@functools.cache
def integers(bits, size=D, seed=3, nodes=1):
    """Noise, (n, d), int64, in steps."""
    drawn = _drawn(jax.random.key(seed), jnp.float32(1.0), bits, size, nodes)
    assert drawn.dtype == jnp.int32
    return np.asarray(drawn, np.int64)


def exact_tail(j, bits):
    """P(|k| >= j) in float64."""
    return 2 * scipy.stats.norm.sf((j - 0.5) * 2.0**-bits)


class TestThresholds:
    @pytest.mark.parametrize("bits", [8, 12])
    def test_are_the_tails_of_the_normal_distribution(self, bits):
        numbers = grid_noise._thresholds(bits)
        places = np.arange(1, len(numbers) + 1)
        actual = np.array([number / 2**127 for number in numbers])
        inside = exact_tail(places, bits) > 1e-24  # below, the last units of 2^-127 show
        np.testing.assert_allclose(actual[inside], exact_tail(places, bits)[inside], rtol=1e-12)
        assert (places[inside][-1] - 0.5) * 2.0**-bits > 10
        assert exact_tail(len(numbers) + 1, bits) < 1.5 * 2.0**-127

    def test_are_exact_to_half_a_unit(self):
        """Against the series of the error function around 0, in decimal arithmetic."""
        bits = 9
        ours = grid_noise._thresholds(bits)
        with decimal.localcontext(prec=130):
            for j in (1, 2, 37, 512, 2000, 4000, len(ours)):
                x = decimal.Decimal(2 * j - 1) / 2 ** (bits + 1)
                total = term = x
                order = 0
                while abs(term) > decimal.Decimal(10) ** -80:
                    order += 1
                    term = -term * x * x / (2 * order)
                    total += term / (2 * order + 1)
                tail = 1 - total * (2 / PI).sqrt()
                assert abs(ours[j - 1] - tail * 2**127) <= decimal.Decimal("0.500000001")

    @pytest.mark.parametrize("bits", [8, 12, 13])
    def test_distance_is_within_what_grid_states(self, bits):
        """Every threshold is off by half a unit of 2^-127 at most, those of less than 1.5 units, which are dropped, by
        as much as they are; the rest sums to less than a unit more."""
        thresholds = len(grid_noise._thresholds(bits))
        dropped = exact_tail(np.arange(thresholds + 1, 14 << bits), bits).sum()
        assert thresholds * 2.0**-128 + dropped <= Grid(bits, 1).distance


class TestSearch:
    @pytest.mark.parametrize("bits", [8, 12])
    @pytest.mark.quick_cases(1)
    def test_counts_the_thresholds_above_any_number(self, bits, monkeypatch):
        """Numbers at, just below and just above thresholds, in the far tail, and 0."""
        numbers = grid_noise._thresholds(bits)
        some = [*numbers[:20], *numbers[:: len(numbers) // 400], *numbers[-30:]]
        tried = {0, 1, 2, 2**127 - 1, *(min(2**127 - 1, n + shift) for n in some for shift in (-1, 0, 1))}
        tried |= {1 << power for power in range(127)} | {(1 << power) - 1 for power in range(128)}
        tried = sorted(tried)
        for sign in (0, 1):
            whole = [number | sign << 127 for number in tried]
            words = np.array([[n >> shift & 0xFFFFFFFF for shift in (96, 64, 32, 0)] for n in whole], np.uint32)
            given = jnp.stack([words[:, :2], words[:, 2:]])
            monkeypatch.setattr(jax.lax, "map", lambda function, keys, given=given: given)
            actual = np.asarray(grid_noise.integers(KEY, len(tried), bits))
            expected = [bisect.bisect_left(numbers, -number, key=operator.neg) for number in tried]
            np.testing.assert_array_equal(actual, np.array(expected) * (-1 if sign else 1))


@pytest.mark.statistical
class TestDistribution:
    @pytest.mark.parametrize("bits", [8, 12])
    def test_is_the_rounded_gaussian(self, bits):
        actual = integers(bits, SIZES[bits])[0]
        edges = np.concatenate([[-math.inf], (np.arange(-20, 20) * 2 ** (bits - 3) + 2) - 0.5, [math.inf]])
        counts = np.histogram(actual, edges)[0]

        def expected(scale):
            return len(actual) * np.diff(scipy.stats.norm.cdf(edges * 2.0**-bits / scale))

        def unlikely(scale):
            statistic = np.sum((counts - expected(scale)) ** 2 / expected(scale))
            return scipy.stats.chi2.sf(statistic, len(counts) - 1)

        assert unlikely(1.0) > 1e-4
        assert unlikely(1.01) < 1e-4, "1 % off is seen"

    def test_single_integers_of_a_coarse_grid_have_their_probabilities(self):
        actual = integers(8, SIZES[8])[0]
        places = np.arange(-40, 41)
        counts = np.array([(actual == place).sum() for place in places])
        edges = (np.arange(-40, 42) - 0.5) * 2.0**-8

        def unlikely(scale):
            mass = np.diff(scipy.stats.norm.cdf(edges / scale)) * len(actual)
            others = len(actual) - counts.sum()
            return scipy.stats.chisquare([*counts, others], [*mass, len(actual) - mass.sum()]).pvalue

        assert unlikely(1.0) > 1e-4
        assert unlikely(1.05) < 1e-4

    def test_beyond_four_deviations(self):
        actual = np.abs(integers(12, SIZES[12])[0])
        for deviations in (3.5, 4.0, 4.4):
            mean = SIZES[12] * exact_tail(round(deviations * 4096), 12)
            assert abs((actual >= round(deviations * 4096)).sum() - mean) < 4.5 * math.sqrt(mean)

    def test_bits_of_the_grid_do_not_change_the_scale(self):
        """One key, two grids: nearly the same numbers, for both invert the same distribution."""
        np.testing.assert_allclose(integers(8) / 256, integers(13) / 8192, atol=1.01 / 256)

    def test_nodes_and_keys_are_independent_and_signs_are_fair(self):
        actual = [*integers(12, nodes=3), *integers(12, nodes=3, seed=4)]
        correlation = np.corrcoef(np.stack(actual)) - np.eye(len(actual))
        assert np.abs(correlation).max() < 5 / math.sqrt(D)
        squares = np.corrcoef(np.stack(actual) ** 2) - np.eye(len(actual))
        assert np.abs(squares).max() < 5 / math.sqrt(D)
        assert abs(np.sign(actual[0]).mean()) < 5 / math.sqrt(D)

    def test_scale_of_every_node(self):
        scales = np.array([0.5, 1.0, 3.0], np.float32)
        noise, values = jaxfl.grid_gaussian(jnp.asarray(scales)), jnp.zeros((3, D))
        noisy = np.asarray(noise.release(values, noise.draw(KEY, values)), np.float64)
        for node, scale in enumerate(scales):
            assert scipy.stats.kstest(noisy[node], scipy.stats.norm(scale=scale).cdf).pvalue > 1e-4
            assert scipy.stats.kstest(noisy[node], scipy.stats.norm(scale=1.08 * scale).cdf).pvalue < 1e-4


def test_noise_of_a_node_does_not_depend_on_the_number_of_nodes():
    np.testing.assert_array_equal(integers(12, 100, nodes=2), integers(12, 100, nodes=5)[:2])


def reference(values, drawn, scale, bits):
    """h (round(v / h) + k) in float64, of steps in float32."""
    step = np.float64(np.float32(scale)) * 2.0**-bits
    return step * (np.rint((values.astype(np.float32) / np.float32(step)).astype(np.float64)) + drawn)


class TestRelease:
    def test_is_the_integers_times_the_step(self):
        rng = np.random.default_rng(0)
        values = rng.normal(size=(2, 500)).astype(np.float32)
        scales = np.array([0.3, 1.7], np.float32)
        noise = jaxfl.grid_gaussian(jnp.asarray(scales), 10)
        tree = {"a": jnp.asarray(values[:, :200]), "b": jnp.asarray(values[:, 200:].reshape(2, 30, 10))}
        drawn = noise.draw(KEY, tree)
        released = noise.release(tree, drawn)
        for name in tree:
            for node in range(2):
                expected = reference(np.asarray(tree[name])[node], np.asarray(drawn[name])[node], scales[node], 10)
                np.testing.assert_allclose(released[name][node], expected, rtol=1.2e-7)
                step = np.float32(scales[node] * 2.0**-10)
                steps = np.rint(np.asarray(released[name][node]) / step)
                np.testing.assert_array_equal(released[name][node], steps * step)

    def test_no_noise_releases_the_values_and_what_is_not_finite_stays_visible(self):
        values = jnp.array([[0.1, -3.0], [math.nan, math.inf]])
        noise = jaxfl.grid_gaussian(jnp.array([0.0, 1.0]))
        np.testing.assert_array_equal(noise.release(values, noise.draw(KEY, values)), values)

    def test_large_values_saturate_and_do_not_wrap(self):
        values = jnp.array([[1e30, -1e30, 2.0**19]])
        released = np.asarray(jaxfl.grid_gaussian(1.0).release(values, jnp.full((1, 3), 60_000, jnp.int32)))[0]
        np.testing.assert_allclose(released, np.array([2.0**18, -(2.0**18), 2.0**18]) + 60_000 / 4096, rtol=1e-6)

    def test_rounding_adds_at_most_a_step_a_coordinate(self):
        """The L2 change of the rounded values, and no change of what did not change."""
        rng = np.random.default_rng(1)
        noise, silent = jaxfl.grid_gaussian(1.0, 8), jnp.zeros((1, 5000), jnp.int32)
        largest = 0.0
        for size in (0.0, 1e-4, 1e-3, 0.1):
            first = rng.normal(size=(1, 5000)).astype(np.float32)
            second = first + (size * np.sign(rng.normal(size=(1, 5000)))).astype(np.float32)
            moved = np.asarray(noise.release(jnp.asarray(second), silent) - noise.release(jnp.asarray(first), silent))
            bound = np.linalg.norm(second - first) + (size > 0) * Grid(8, 5000).rounding
            assert np.linalg.norm(moved) <= bound
            largest = max(largest, np.linalg.norm(moved) - np.linalg.norm(second - first))
        worst = np.full((1, 5000), 0.5 / 256, np.float32)  # between two steps
        above, below = (noise.release(jnp.asarray(worst * factor), silent) for factor in (1 + 1e-6, 1 - 1e-6))
        assert np.linalg.norm(above - below) > 0.99 * Grid(8, 5000).rounding, "and no less in the worst case"

    @pytest.mark.parametrize("bits", [7, 17, 12.0, True])
    def test_bits_out_of_range_are_refused(self, bits):
        refused(lambda: jaxfl.grid_gaussian(1.0, bits), "bits", "must be")

    @pytest.mark.parametrize("bad", [-1.0, math.nan])
    def test_bad_scales_are_refused(self, bad):
        refused(lambda: jaxfl.grid_gaussian(bad), "noise_std", "must be non-negative and finite")
