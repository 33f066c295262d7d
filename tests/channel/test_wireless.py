"""Wireless links: the figures of DZOFL's setting, and fadings and places drawn and counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusals
from scipy import stats

from jaxfl.channel.wireless import RADIUS_M, Radio, disc_positions, mean_snr, noise_dbm, success_probability
from jaxfl.core.keys import run_key

KEY = jax.random.key(0)
RATES = (10e6, 4e6, 1e6, 128e3)


def test_noise_and_snr_at_the_rim():
    np.testing.assert_allclose(noise_dbm(Radio()), -109.990, atol=5e-4)
    np.testing.assert_allclose(mean_snr(RADIUS_M, Radio()), 41.768, atol=5e-4)


def test_success_at_the_rim_and_in_the_mean_of_the_disc():
    actual = [success_probability(RADIUS_M, Radio(rate)) for rate in RATES]
    np.testing.assert_allclose(actual, [0.47607, 0.93069, 0.99013, 0.99891], atol=5e-6)
    shares = (jnp.arange(20_000, dtype=jnp.float32) + 0.5) / 20_000  # of the area within a distance
    actual = [success_probability(RADIUS_M * jnp.sqrt(shares), Radio(rate)).mean() for rate in RATES]
    np.testing.assert_allclose(actual, [0.791, 0.976, 0.997, 0.9996], atol=5e-4)


@pytest.mark.statistical
def test_success_is_the_share_of_drawn_fadings_under_which_the_channel_carries_the_rate():
    radio, distance = Radio(), jnp.array([100.0, 300.0, 500.0], jnp.float32)
    # In decibels, as the definition has it, and not by the code's formulas.
    snr = 10 ** ((23 - (128.1 + 37.6 * np.log10(np.asarray(distance) / 1000)) - (-173 + 10 * np.log10(2e6))) / 10)
    gain = np.random.default_rng(0).exponential(size=(40_000, 1))
    arrived = 2e6 * np.log2(1 + snr * gain) >= 10e6

    def standard_errors(success):
        success = np.asarray(success, np.float64)
        return np.abs(arrived.mean(axis=0) - success) / np.sqrt(success * (1 - success) / len(gain))

    assert standard_errors(success_probability(distance, radio)).max() < 5
    assert standard_errors(success_probability(distance, radio._replace(power_dbm=22.5)))[-1] > 5


def test_success_is_1_at_no_distance_and_falls_with_distance_and_rate():
    assert success_probability(0.0, Radio()) == 1
    assert np.isinf(mean_snr(0.0, Radio()))
    near, far = (success_probability(distance, Radio()) for distance in (200.0, 400.0))
    assert success_probability(400.0, Radio(11e6)) < far < near
    assert success_probability(400.0, Radio(power_dbm=24.0)) > far


@pytest.mark.statistical
def test_places_are_uniform_in_the_disc():
    positions = np.asarray(disc_positions(KEY, 5000, 80.0), np.float64)
    assert positions.dtype == np.float64
    assert disc_positions(KEY, 2).dtype == jnp.float32
    squares = (positions**2).sum(axis=1) / 80**2
    angles = np.arctan2(positions[:, 1], positions[:, 0]) / (2 * np.pi) + 0.5
    for numbers in (squares, angles, (squares + angles) % 1):
        assert stats.kstest(numbers, "uniform").pvalue > 0.01
    assert stats.kstest(np.sqrt(squares), "uniform").pvalue < 1e-6, "distances themselves are not uniform"


def test_a_place_does_not_depend_on_the_number_of_nodes():
    np.testing.assert_array_equal(disc_positions(KEY, 3), disc_positions(KEY, 50)[:3])


def test_runs_of_one_base_key_share_places():
    runs = [run_key(KEY, {"step_size": step}, "") for step in (0.1, 0.2)]
    np.testing.assert_array_equal(disc_positions(runs[0], 5), disc_positions(runs[1], 5))
    assert (disc_positions(jax.random.key(1), 5) != disc_positions(KEY, 5)).all()


def test_numbers_may_be_swept():
    """Under jit and vmap, in float32 even where float64 is there."""

    def success(rate, power):
        return success_probability(jnp.array([100.0, 400.0], jnp.float32), Radio(rate, power_dbm=power))

    rates, powers = jnp.array([1e6, 10e6], jnp.float32), jnp.array([20.0, 23.0], jnp.float32)
    actual = jax.jit(jax.vmap(success))(rates, powers)
    assert (actual.shape, actual.dtype) == ((2, 2), jnp.float32)
    np.testing.assert_allclose(actual[1], success(10e6, 23.0), rtol=1e-5)


test_refuses = refusals(
    [
        (lambda: disc_positions(KEY, 0), "num_nodes"),
        (lambda: disc_positions(KEY, 3, 0.0), "radius_m"),
        (lambda: mean_snr(-1.0, Radio()), "distance_m"),
        (lambda: mean_snr(1.0, Radio(bits_per_second=0.0)), "bits_per_second"),
        (lambda: mean_snr(1.0, Radio(bandwidth_hz=-1.0)), "bandwidth_hz"),
        (lambda: mean_snr(1.0, Radio(power_dbm=jnp.ones(2))), "power_dbm"),
        (lambda: success_probability(1.0, Radio(path_loss_exponent=0.0)), "path_loss_exponent"),
    ]
)
