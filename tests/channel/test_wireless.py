"""Wireless links: the figures of DZOFL's setting, and fadings and places drawn and counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusals
from scipy import stats

from jaxfl.channel.wireless import (
    RADIUS_M,
    Radio,
    airtime_seconds,
    disc_positions,
    mean_snr,
    mean_success,
    noise_dbm,
    success_probability,
    transmit_joules,
)
from jaxfl.core.keys import run_key

KEY = jax.random.key(0)
RATES = (10e6, 4e6, 1e6, 128e3)
D = 45_362  # parameters of DZOFL's network


def distances(num_nodes):
    return jnp.linalg.norm(disc_positions(KEY, num_nodes), axis=1)


def test_noise_and_snr_at_the_rim():
    np.testing.assert_allclose(noise_dbm(Radio()), -109.990, atol=5e-4)
    np.testing.assert_allclose(mean_snr(RADIUS_M, Radio()), 41.768, atol=5e-4)


def test_success_at_the_rim_and_in_the_mean_of_the_disc():
    found = [success_probability(RADIUS_M, Radio(rate)) for rate in RATES]
    np.testing.assert_allclose(found, [0.47607, 0.93069, 0.99013, 0.99891], atol=5e-6)
    found = [mean_success(Radio(rate)) for rate in RATES]
    np.testing.assert_allclose(found[:3], [0.791, 0.976, 0.997], atol=5e-4)
    np.testing.assert_allclose(found[3], 0.9996, atol=5e-5)


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


def test_mean_success_is_the_mean_over_the_disc():
    radio = Radio(RATES[1], path_loss_exponent=3.1)
    shares = (jnp.arange(20_000, dtype=jnp.float32) + 0.5) / 20_000  # of the area within a distance
    by_area = np.asarray(success_probability(RADIUS_M * jnp.sqrt(shares), radio), np.float64)
    np.testing.assert_allclose(mean_success(radio), by_area.mean(), rtol=1e-5)
    of_devices = np.asarray(success_probability(distances(20_000), radio), np.float64)
    error = of_devices.std() / np.sqrt(20_000)
    np.testing.assert_allclose(of_devices.mean(), mean_success(radio), atol=5 * error)


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


def test_airtime_and_energy_of_a_model_and_of_one_number():
    radio = Radio()
    model, number = (airtime_seconds(bits, 1.0, radio) for bits in (16 * D, 16))
    np.testing.assert_allclose([model, number], [16 * D / 10e6, 0.125e-3], rtol=1e-6)
    np.testing.assert_allclose(1e3 * transmit_joules(model, radio), 14.48, atol=5e-3)
    np.testing.assert_allclose(1e6 * transmit_joules(number, radio), 24.9, atol=5e-2)
    np.testing.assert_allclose(transmit_joules(2.0, radio._replace(power_dbm=30.0)), 2.0, rtol=1e-6)


def test_what_is_lost_is_sent_again():
    found = airtime_seconds(16 * D, jnp.array([1.0, 0.5, 0.0]), Radio())
    np.testing.assert_allclose(found, 16 * D / 10e6 * np.array([1, 2, np.inf]), rtol=1e-6)
    # Drawn: packets of a message, each sent until it arrives.
    tries = np.random.default_rng(0).geometric(0.4, size=(20_000, 8)).mean(axis=1)
    np.testing.assert_allclose(tries.mean(), airtime_seconds(8e6, 0.4, Radio(8e6)), rtol=0.01)
    np.testing.assert_array_equal(airtime_seconds(0.0, jnp.array([1.0, 0.5]), Radio()), 0)


def test_numbers_may_be_swept():
    """Under jit and vmap, in float32 even where float64 is there."""

    def costs(rate, power):
        radio, distance = Radio(rate, power_dbm=power), jnp.array([100.0, 400.0], jnp.float32)
        success = success_probability(distance, radio)
        return success, transmit_joules(airtime_seconds(1e6, success, radio), radio), mean_success(radio)

    rates, powers = jnp.array([1e6, 10e6], jnp.float32), jnp.array([20.0, 23.0], jnp.float32)
    found = jax.jit(jax.vmap(costs))(rates, powers)
    assert [(array.shape, array.dtype) for array in found] == [((2, 2), jnp.float32)] * 2 + [((2,), jnp.float32)]
    for array, alone in zip(found, costs(10e6, 23.0), strict=True):
        np.testing.assert_allclose(array[1], alone, rtol=1e-5)


test_refuses = refusals(
    [
        (lambda: disc_positions(KEY, 0), "num_nodes"),
        (lambda: disc_positions(KEY, 3, 0.0), "radius_m"),
        (lambda: mean_snr(-1.0, Radio()), "distance_m"),
        (lambda: mean_snr(1.0, Radio(bits_per_second=0.0)), "bits_per_second"),
        (lambda: mean_snr(1.0, Radio(bandwidth_hz=-1.0)), "bandwidth_hz"),
        (lambda: success_probability(1.0, Radio(path_loss_exponent=0.0)), "path_loss_exponent"),
        (lambda: mean_success(Radio(), 0.0), "radius_m"),
        (lambda: airtime_seconds(-1, 1.0, Radio()), "bits"),
        (lambda: airtime_seconds(1, 1.1, Radio()), "success"),
        (lambda: airtime_seconds(1, 1.0, Radio(slot_seconds=0.0)), "slot_seconds"),
        (lambda: transmit_joules(-1.0, Radio()), "seconds"),
        (lambda: transmit_joules(1.0, Radio(power_dbm=jnp.ones(2))), "power_dbm"),
    ]
)
