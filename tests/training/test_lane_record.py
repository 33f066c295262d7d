"""What a checkpoint between two evaluations holds of lanes, and when it is due."""

import numpy as np
import pytest
from toy_problem import NUM_NODES, TOY_LEDGER, toy_that_counts, toy_variant

from jaxfl.core import ArgumentError
from jaxfl.training import Stop, open_run, train
from jaxfl.training.lane_record import LaneRecord, packed, rounds_since_line, unpack
from jaxfl.training.lanes import Point
from jaxfl.training.save_times import SaveTimes

FIELDS = ("loss", "bits_sent", "bits_received", "gradient_evaluations", "forward_evaluations")


def _lanes():
    plain = toy_variant(toy_that_counts)
    variants = [plain, plain._replace(ledger=TOY_LEDGER), plain]
    return [LaneRecord(index, Point("A", variant, index, ""), {}) for index, variant in enumerate(variants)]


def test_stretches_come_back_chunk_by_chunk_bit_for_bit():
    """Of the lanes that run, those with a ledger and those without."""
    rng, lanes = np.random.default_rng(0), _lanes()
    for length in (3, 3, 1):
        for lane in lanes[1:]:
            numbers = {name: rng.random((length, NUM_NODES), np.float32) for name in FIELDS[:3]}
            lane.add(numbers | {name: rng.integers(9, size=(length, NUM_NODES), dtype=np.int32) for name in FIELDS[3:]})
    arrays = packed(lanes[1:], FIELDS)
    assert arrays["lanes"].tolist() == [1, 2]
    again = _lanes()
    unpack(again, arrays)
    assert [rounds_since_line(lane) for lane in again] == [0, 7, 7]
    for lane, other in zip(lanes, again, strict=True):
        assert len(lane.stretch) == len(other.stretch)
        for infos, others in zip(lane.stretch, other.stretch, strict=True):
            assert set(infos) == set(others)
            assert ("joules" in infos) == (lane.index == 1)
            for name, values in infos.items():
                np.testing.assert_array_equal(others[name], values, strict=True)
                assert np.asarray(others[name]).flags.c_contiguous


def test_behind_a_line_there_is_nothing_to_keep():
    assert packed(_lanes(), FIELDS) == {}
    assert packed([], FIELDS) == {}


def test_a_checkpoint_is_due_after_so_many_minutes_and_where_a_stop_is_asked_for(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("jaxfl.training.save_times.time.monotonic", lambda: now[0])
    stop = Stop()
    often, seldom, never = (SaveTimes(minutes, stop) for minutes in (0, 2.0, None))
    assert (often.due(), seldom.due(), never.due()) == (True, False, False)
    now[0] += 119.0
    assert not seldom.due()
    now[0] += 1.0
    assert (seldom.due(), never.due()) == (True, False)
    seldom.saved()
    assert not seldom.due()
    now[0] += 1e9
    assert (seldom.due(), never.due()) == (True, False)
    seldom.saved()
    assert not seldom.stops()
    stop.request()
    assert seldom.stops()
    assert never.stops()


@pytest.mark.parametrize("minutes", [-1.0, float("nan"), float("inf")])
def test_minutes_below_0_are_refused(tmp_path, minutes):
    with pytest.raises(ArgumentError, match=r"^checkpoint_minutes: must be non-negative"):
        train({"A": toy_variant()}, run=open_run(tmp_path, {}), checkpoint_minutes=minutes)
