"""DZOFL's energies, as published and as they would be charged consistently."""

import numpy as np
import pytest

from jaxfl import ArgumentError
from jaxfl.channel import DZOFL_COUNTED, count, total
from jaxfl.channel.energy import (
    DZOFL_CONSISTENT,
    DZOFL_PUBLISHED,
    EnergyModel,
    Workload,
    backward_energy,
    forward_energy,
    mac_energy,
)
from jaxfl.models import dzofl_cnn

DEVICE = EnergyModel()
COUNTS = total(count(dzofl_cnn(), (28, 28, 1), counted=DZOFL_COUNTED))
PUBLISHED, CONSISTENT = DZOFL_PUBLISHED, DZOFL_CONSISTENT


def micro(joules):
    return 1e6 * joules


def test_workloads_are_what_the_network_counts():
    """But for N_c, 10.56e6 in the paper, which the trace has as 10,514,640 products and 50,082 other operations."""
    operations = COUNTS.macs + COUNTS.other_operations
    assert (COUNTS.macs, operations) == (10_514_640, 10_564_722)
    of_one = operations, COUNTS.activations, COUNTS.parameters, COUNTS.inputs
    assert of_one[1:] == (25_042, 45_362, 784)
    for workload, batches in ((PUBLISHED, (1, 10, 1, 1)), (CONSISTENT, (10, 10, 1, 10))):
        assert workload[1:] == tuple(batch * number for batch, number in zip(batches, of_one, strict=True))[1:]
        assert f"{workload.num_macs / batches[0]:.3e}" == f"{operations:.3e}" == "1.056e+07"


def test_energy_of_one_operation():
    np.testing.assert_allclose(mac_energy(16, DEVICE), 3.7e-12 * 2**-1.25, rtol=1e-12)
    np.testing.assert_allclose(mac_energy(32, DEVICE), 3.7e-12, rtol=1e-12)


def test_published_energies():
    parts = forward_energy(PUBLISHED, DEVICE)
    np.testing.assert_allclose(micro(np.array(parts)), [19.20741, 1.593157, 2.231158, 0.435120], rtol=1e-6)
    np.testing.assert_allclose(micro(sum(parts)), 23.46685, rtol=1e-6)
    np.testing.assert_allclose(micro(backward_energy(PUBLISHED, DEVICE)), 89.93295, rtol=1e-6)


def test_energies_of_a_whole_batch():
    np.testing.assert_allclose(micro(sum(forward_energy(CONSISTENT, DEVICE))), 201.369, rtol=1e-5)
    np.testing.assert_allclose(micro(backward_energy(CONSISTENT, DEVICE)), 881.141, rtol=1e-5)


def test_energies_with_our_own_count_of_operations():
    counted = Workload(
        num_macs=COUNTS.macs + COUNTS.other_operations,
        num_activations=PUBLISHED.num_activations,
        num_parameters=PUBLISHED.num_parameters,
        input_size=PUBLISHED.input_size,
    )
    np.testing.assert_allclose(micro(sum(forward_energy(counted, DEVICE))), 23.46685, rtol=5e-4)
    np.testing.assert_allclose(micro(backward_energy(counted, DEVICE)), 89.93295, rtol=5e-4)


def test_rounds_for_the_energy_of_one_round_of_federated_averaging():
    forward, backward = sum(forward_energy(PUBLISHED, DEVICE)), backward_energy(PUBLISHED, DEVICE)
    np.testing.assert_allclose((forward + backward) / forward, 4.83, atol=0.005)
    np.testing.assert_allclose((forward + backward) / (2 * forward), 2.42, atol=0.005)


def test_what_does_not_fit_into_sram_is_fetched_from_dram():
    small = EnergyModel(sram_bits=8e6)
    np.testing.assert_allclose(micro(backward_energy(PUBLISHED, small)), 1716.11, rtol=1e-5)
    tiny = EnergyModel(sram_bits=1e6)
    spilled_bits = 16 * (PUBLISHED.num_parameters + PUBLISHED.num_activations) - 1e6
    extra = forward_energy(PUBLISHED, tiny).dram - forward_energy(PUBLISHED, DEVICE).dram
    np.testing.assert_allclose(extra, 2 * 150 * mac_energy(16, DEVICE) * spilled_bits, rtol=1e-12)


def test_bad_numbers_are_refused():
    with pytest.raises(ArgumentError, match=r"^mac_units: "):
        backward_energy(PUBLISHED, EnergyModel(mac_units=0))
    negative = Workload(num_macs=-1, num_activations=1, num_parameters=1, input_size=1)
    with pytest.raises(ArgumentError, match=r"^num_macs: "):
        forward_energy(negative, DEVICE)
    with pytest.raises(ArgumentError, match=r"^bits: "):
        mac_energy(0, DEVICE)
    with pytest.raises(ArgumentError, match=r"^max_bits: "):
        mac_energy(16, EnergyModel(max_bits=0))
