"""DZOFL's energies, as published and as they would be charged consistently."""

import numpy as np
from helpers import refusals

from jaxfl.channel import DZOFL_COUNTED, Counts, EnergyModel, backward_energy, count, forward_energy, total
from jaxfl.models import dzofl_cnn

DEVICE = EnergyModel()
COUNTS = total(count(dzofl_cnn(), (28, 28, 1), counted=DZOFL_COUNTED))
# What the paper charges for a batch of 10: its activations, but the operations and the input of one sample; all of it.
PUBLISHED = Counts(macs=10_560_000, other_operations=0, activations=250_420, parameters=45_362, inputs=784)
CONSISTENT = Counts(macs=105_600_000, other_operations=0, activations=250_420, parameters=45_362, inputs=7840)
NOTHING = Counts(macs=0, other_operations=0, activations=0, parameters=0, inputs=0)


def micro(joules):
    return 1e6 * joules


def test_what_is_charged_is_what_the_network_counts():
    """But for N_c, 10.56e6 in the paper, which the trace has as 10,514,640 products and 50,082 other operations."""
    assert (COUNTS.macs, COUNTS.operations) == (10_514_640, 10_564_722)
    assert (COUNTS.activations, COUNTS.parameters, COUNTS.inputs) == (25_042, 45_362, 784)
    for charged, samples in ((PUBLISHED, 1), (CONSISTENT, 10)):
        assert (charged.activations, charged.parameters, charged.inputs) == (250_420, 45_362, samples * 784)
        assert f"{charged.operations / samples:.3e}" == f"{COUNTS.operations:.3e}" == "1.056e+07"


def test_published_energies():
    np.testing.assert_allclose(micro(forward_energy(PUBLISHED, DEVICE)), 23.46685, rtol=1e-6)
    np.testing.assert_allclose(micro(backward_energy(PUBLISHED, DEVICE)), 89.93295, rtol=1e-6)


def test_every_term_of_a_forward_pass():
    """Equations (6) to (9): N_c at M bits and 3 O_c at M_max; 2 d and 2 O_c with the buffers; x_in from DRAM."""
    high, low, buffers = 3.7e-12, 3.7e-12 * 2**-1.25, (16 / (64 * 32)) ** 0.5
    computing = low * 10.56e6 + 3 * high * 250_420
    weights, activations = (low * (2 * number + buffers * 10.56e6) for number in (45_362, 250_420))
    parts = np.array([computing, weights, activations, 150 * high * 784])
    np.testing.assert_allclose(micro(parts), [19.20741, 1.593157, 2.231158, 0.435120], rtol=1e-6)
    np.testing.assert_allclose(forward_energy(PUBLISHED, DEVICE), parts.sum(), rtol=1e-12)
    of_one = {
        "macs": low * (1 + 2 * buffers),
        "other_operations": low * (1 + 2 * buffers),
        "activations": 3 * high + 2 * low,
        "parameters": 2 * low,
        "inputs": 150 * high,
    }
    energies = {name: forward_energy(NOTHING._replace(**{name: 1}), DEVICE) for name in of_one}
    np.testing.assert_allclose(list(energies.values()), list(of_one.values()), rtol=1e-12)


def test_what_does_not_fit_into_sram_is_fetched_from_dram():
    small = EnergyModel(sram_bits=8e6)
    np.testing.assert_allclose(micro(backward_energy(PUBLISHED, small)), 1716.11, rtol=1e-5)
    tiny = EnergyModel(sram_bits=1e6)
    spilled_bits = 16 * (PUBLISHED.parameters + PUBLISHED.activations) - 1e6
    extra = forward_energy(PUBLISHED, tiny) - forward_energy(PUBLISHED, DEVICE)
    np.testing.assert_allclose(extra, 2 * 150 * 3.7e-12 * 2**-1.25 * spilled_bits, rtol=1e-12)


test_bad_numbers_are_refused = refusals(
    [
        *(
            (lambda energy=energy, name=name: energy(PUBLISHED, DEVICE._replace(**{name: 0})), name)
            for energy in (forward_energy, backward_energy)
            for name in EnergyModel._fields
        ),
        *(
            (lambda energy=energy, name=name: energy(PUBLISHED._replace(**{name: -1}), DEVICE), name)
            for energy in (forward_energy, backward_energy)
            for name in Counts._fields
        ),
    ]
)
