"""DZOFL's arithmetic of bits, seconds and joules, and where it does not follow from its own numbers."""

import numpy as np
import pytest
from helpers import refusals

from jaxfl.channel import EnergyModel, Radio
from jaxfl.channel.dzofl_claims import bits_and_seconds, joules


def by_quantity(claims):
    return {claim.quantity: claim for claim in claims}


def test_bits_of_section_3():
    claims = by_quantity(bits_and_seconds())
    assert claims["bits, gradients"].consistent == claims["bits, gradients"].paper == 64e7
    assert (claims["times fewer bits"].paper, claims["times fewer bits"].consistent) == (40_000, 4_000)
    of_1000 = by_quantity(bits_and_seconds(num_rounds=1000))
    for name in ("bits, one number a round", "times fewer bits"):
        assert of_1000[name].consistent == claims[name].paper


def test_seconds_of_section_3():
    claims = by_quantity(bits_and_seconds())
    for name in ("upload, gradients", "upload, one number a round"):
        np.testing.assert_allclose(claims[name].consistent, claims[name].paper, rtol=1e-6)
    whole = claims["upload and computing, one number a round"]
    np.testing.assert_allclose([whole.paper, whole.consistent], [1.25 + 10_000 * 4e-3, 81.25], rtol=1e-6)
    assert whole.paper < claims["upload, gradients"].consistent < whole.consistent, "the comparison turns round"


def test_another_setting():
    """By hand: twice the rate, slots of a millisecond."""
    claims = bits_and_seconds(
        num_parameters=5000,
        num_rounds=30,
        gradient_rounds=7,
        bits=8,
        pass_seconds=0.5,
        radio=Radio(20e6, slot_seconds=1e-3),
    )
    bits = [7 * 5000 * 8, 30 * 8]
    found = [claim.consistent for claim in claims]
    np.testing.assert_allclose(found, [*bits, bits[0] / bits[1], bits[0] / 20e6, 0.03, 30.03], rtol=1e-6)


def test_joules_of_section_5():
    claims = by_quantity(joules())
    forward, backward = claims["forward pass"], claims["backward pass"]
    np.testing.assert_allclose([1e6 * forward.paper, 1e6 * forward.consistent], [23.46685, 201.369], rtol=5e-6)
    np.testing.assert_allclose([1e6 * backward.paper, 1e6 * backward.consistent], [89.93295, 881.141], rtol=5e-6)
    rounds = claims["rounds for one with gradients"]
    np.testing.assert_allclose([rounds.paper, rounds.paper / 2], [4.83, 2.42], atol=5e-3)
    np.testing.assert_allclose(rounds.consistent, (201.369 + 881.141) / (2 * 201.369), rtol=1e-5)
    cheaper = by_quantity(joules(EnergyModel(mac_joules=1.85e-12)))
    np.testing.assert_allclose(cheaper["forward pass"].paper, forward.paper / 2)


@pytest.mark.parametrize("claims", [bits_and_seconds(), joules()])
def test_a_reason_is_given_where_numbers_differ(claims):
    for claim in claims:
        assert bool(claim.reason) != bool(np.isclose(claim.paper, claim.consistent, rtol=1e-6, atol=0))


test_refuses = refusals(
    [
        (lambda: bits_and_seconds(num_parameters=0), "num_parameters"),
        (lambda: bits_and_seconds(num_rounds=0), "num_rounds"),
        (lambda: bits_and_seconds(gradient_rounds=0), "gradient_rounds"),
        (lambda: bits_and_seconds(bits=0), "bits"),
        (lambda: bits_and_seconds(pass_seconds=0.0), "pass_seconds"),
        (lambda: joules(EnergyModel(mac_units=0)), "mac_units"),
    ]
)
