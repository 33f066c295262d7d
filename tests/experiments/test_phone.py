"""Seconds of a round: the structure of EmbracingFL's Table 8, and what every term is proportional to."""

import numpy as np
import pytest
from helpers import refusals, refused

from experiments.embracing_fl.phone import ONEPLUS_9_PRO, ClientWork, DeviceProfile, partial_work, round_seconds
from jaxfl.algorithms import training_bytes
from jaxfl.channel import Counts, count
from jaxfl.models import resnet20

IMAGE = (32, 32, 3)
RESNET = count(resnet20(), IMAGE)
CUTS = {"strong": (), "moderate": ("block_2_1",), "weak": ("block_2_1", "block_3_1")}
WIDTHS = {"strong": 1.0, "moderate": 0.45, "weak": 0.2}
PARTIAL = {name: partial_work(RESNET, cuts) for name, cuts in CUTS.items()}
REDUCED = {name: partial_work(count(resnet20(width=width), IMAGE)) for name, width in WIDTHS.items()}
EMBRACING, WIDTH = (
    {name: round_seconds(work, ONEPLUS_9_PRO, batch_size=32, num_local_steps=1) for name, work in works.items()}
    for works in (PARTIAL, REDUCED)
)
# Every rate another prime, so that no two terms can be confused.
PROFILE = DeviceProfile(
    forward_flops_per_second=2.0,
    backward_flops_per_second=3.0,
    backward_bytes_per_second=5.0,
    io_bytes_per_second=7.0,
    io_seconds=11.0,
    downlink_bits_per_second=13.0,
    uplink_bits_per_second=17.0,
    latency_seconds=19.0,
    memory_bytes=1e6,
)
WORK = ClientWork(
    whole=Counts(parameters=40, activations=50, macs=100, other_operations=30),
    trained=Counts(parameters=10, activations=20, macs=60, other_operations=5),
    cuts=(8, 4),
)


def test_the_rows_that_the_profile_is_fitted_to():
    # Table 8, in milliseconds.
    np.testing.assert_allclose(1e3 * EMBRACING["strong"].forward, 2095.4, rtol=1e-7)
    np.testing.assert_allclose(1e3 * EMBRACING["strong"].backward, 419_643.8, rtol=1e-7)
    np.testing.assert_allclose([1e3 * EMBRACING[name].io for name in CUTS], [0, 678.4, 1316.8], rtol=1e-12)


def test_backward_and_io_are_those_of_the_trained_part_and_of_the_cuts():
    for rows in (EMBRACING, WIDTH):
        assert rows["strong"].backward > 2 * rows["moderate"].backward > 4 * rows["weak"].backward
    # "The I/O time is almost double": the second cut is half as large.
    assert 1.9 < EMBRACING["weak"].io / EMBRACING["moderate"].io < 2
    # Measured backward passes of the other classes, which the fit has not seen, to within a quarter.
    np.testing.assert_allclose(EMBRACING["moderate"].backward, 197.265, rtol=0.25)
    np.testing.assert_allclose(EMBRACING["weak"].backward, 85.4483, rtol=0.25)


@pytest.mark.parametrize("name", ["moderate", "weak"])
def test_table_8_embracing_is_slower_forward_and_faster_backward_than_width_reduction(name):
    partial, reduced = EMBRACING[name], WIDTH[name]
    assert partial.forward + partial.io > reduced.forward + reduced.io
    assert partial.backward < reduced.backward
    assert sum(partial[:3]) < sum(reduced[:3])  # the backward pass dominates


def test_every_term_by_hand():
    actual = round_seconds(WORK, PROFILE, batch_size=6, num_local_steps=10)
    # A forward pass has 230 operations, of which 125 are trained; 60 samples are used.
    np.testing.assert_allclose(actual.forward, 230 * 60 / 2)
    held = 4 * (2 * 10 + 2 * 20 * 6)
    np.testing.assert_allclose(actual.backward, 2 * 125 * 60 / 3 + 10 * held / 5)
    np.testing.assert_allclose(actual.io, 2 * 11 + 2 * 4 * (8 + 4) * 60 / 7)
    np.testing.assert_allclose(actual.communication, 32 * 40 / 13 + 32 * 10 / 17 + 4 * 19)


def test_a_model_that_does_not_fit_is_refused():
    exact = PROFILE._replace(memory_bytes=training_bytes(WORK.trained, 6))
    round_seconds(WORK, exact, batch_size=6, num_local_steps=1)
    refused(lambda: round_seconds(WORK, exact, batch_size=7, num_local_steps=1), "memory_bytes", "1.2 kB", "1.0 kB")
    # A phone of 20 MB trains what the weak clients train, and not the whole model.
    small = ONEPLUS_9_PRO._replace(memory_bytes=20e6)
    round_seconds(PARTIAL["weak"], small, batch_size=32, num_local_steps=10)
    refused(lambda: round_seconds(PARTIAL["strong"], small, batch_size=32, num_local_steps=10), "memory_bytes")


test_refusals = refusals(
    [
        (lambda: round_seconds(WORK, PROFILE, batch_size=0, num_local_steps=1), "batch_size"),
        (lambda: round_seconds(WORK, PROFILE, batch_size=1, num_local_steps=0), "num_local_steps"),
        (lambda: round_seconds(WORK, PROFILE._replace(io_seconds=0.0), batch_size=1, num_local_steps=1), "io_seconds"),
        (lambda: training_bytes(WORK.trained, 0), "batch_size"),
        *(
            (lambda cuts=cuts: partial_work(RESNET, cuts), "cuts")
            for cuts in (("block_99",), ("block_99", "block_2_1"), ("block_3_1", "block_2_1"), ("stem",))
        ),
    ]
)
