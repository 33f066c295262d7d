"""Lanes in a checkpoint between two evaluations, and the time at which it is due."""

import contextlib
import json

import numpy as np
import pytest
from run_files import run_bytes
from toy_problem import NUM_NODES, TOY_LEDGER, toy_case, toy_that_counts, train_toy

from jaxfl.training import Diverged, FatalCount, Stop, Stopped
from jaxfl.training.chunks import refuse_bad, rounds_at_once, summarize, summarize_lanes
from jaxfl.training.lane_record import LaneRecord, add_chunk
from jaxfl.training.lanes import Lane
from jaxfl.training.lockstep import Lockstep

FIELDS = ("loss", "bits_sent", "bits_received", "gradient_evaluations", "forward_evaluations")


def _lanes():
    plain = toy_case(toy_that_counts)
    cases = [plain, plain._replace(ledger=TOY_LEDGER), plain]
    return [LaneRecord(index, Lane("A", case, index, ""), {}) for index, case in enumerate(cases)]


def _infos(rng, length):
    """Random infos of the three lanes."""
    shape = (3, length, NUM_NODES)
    counts = {name: rng.integers(9, size=shape, dtype=np.int32) for name in FIELDS[3:]}
    return {name: rng.random(shape, np.float32) for name in FIELDS[:3]} | counts


def test_stretches_come_back_bit_for_bit_as_if_of_one_chunk():
    """Check the lanes that run, those with a ledger and those without."""
    rng, lanes = np.random.default_rng(0), _lanes()
    for length in (3, 3, 1):
        assert add_chunk(lanes[1:], _infos(rng, length)) == []
    saved, again = [lane.saved() for lane in lanes], _lanes()
    arrays = {name: values for _, own in saved for name, values in own.items()}
    for lane, (record, _) in zip(again, saved, strict=True):
        lane.restore(json.loads(json.dumps(record)), arrays)
    for lane, other in zip(lanes, again, strict=True):
        assert len(other.stretch) == bool(lane.stretch)
        for others in other.stretch:
            assert set(others) == set(lane.stretch[0])
            assert ("joules" in others) == (lane.index == 1)
            for name, values in others.items():
                expected = np.concatenate([infos[name] for infos in lane.stretch])
                np.testing.assert_array_equal(values, expected, strict=True)
                assert np.asarray(values).flags.c_contiguous


def test_many_lanes_at_once_give_what_each_gives_alone():
    """Check infos, costs, sums and the lanes that are refused, at lengths at which NumPy sums in blocks."""
    rng, together, alone = np.random.default_rng(1), _lanes(), _lanes()
    for length, bad in ((3, None), (2100, ("loss", np.nan)), (3, ("gradient_evaluations", 1))):
        infos = _infos(rng, length)
        infos["gradient_evaluations"][...] = 0
        if bad is not None:
            infos[bad[0]][2, -1, 1] = bad[1]
        refused = add_chunk(together, infos, ("gradient_evaluations",))
        assert [record.index for record in refused] == ([2] if bad else [])
        for record in alone:
            is_bad = bad is not None and record.index == 2
            assert bool(add_chunk([record], infos, ("gradient_evaluations",))) == is_bad
            own = record.stretch[-1]
            with contextlib.ExitStack() as stack:
                if is_bad:
                    stack.enter_context(pytest.raises((Diverged, FatalCount)))
                refuse_bad(own, "A", 0, 1, fatal=("gradient_evaluations",))
            expected = {name: infos[name][record.index] for name in FIELDS}
            expected |= TOY_LEDGER.of_round(expected)._asdict() if record.index == 1 else {}
            for name, values in expected.items():
                np.testing.assert_array_equal(own[name], values, strict=True)
                np.testing.assert_array_equal(together[record.index].stretch[-1][name], values, strict=True)
    stretches = [record.stretch for record in together[::2]]
    np.testing.assert_equal(summarize_lanes(stretches), [summarize(stretch) for stretch in stretches])


def test_behind_a_line_there_is_nothing_to_keep():
    assert _lanes()[0].saved() == ({"totals": {}, "last_line": None, "ended": None}, {})


@pytest.mark.parametrize(("minutes", "rounds"), [(0.0, [4, 8, 10, 14, 18, 20, 24, 25]), (2.0, [8, 14, 20, 25])])
def test_a_checkpoint_is_due_after_so_many_minutes(tmp_path, monkeypatch, minutes, rounds):
    """Each chunk takes a minute."""
    now, dispatch = [0.0], Lockstep._dispatch
    monkeypatch.setattr("jaxfl.training.lockstep.time.perf_counter", lambda: now[0])

    def slow(self):
        chunk = dispatch(self)
        now[0] += 60.0
        return chunk

    monkeypatch.setattr(Lockstep, "_dispatch", slow)
    cases = {"A": toy_case(seeds=(0,), chunk_rounds=4)}
    options = {"checkpoint_every": 100, "keep_checkpoints": 100, "checkpoint_minutes": minutes}
    train_toy(tmp_path, cases, **options)
    assert sorted(int(path.name) for path in tmp_path.glob("passes/0/checkpoints/*")) == rounds


def lengths_of_calls(out, case, monkeypatch, seconds, **options):
    """Number of rounds of each call, where a round takes so many seconds."""
    lengths, dispatch = [], Lockstep._dispatch

    def noted(self):
        chunk = dispatch(self)
        lengths.append(chunk.num_rounds)
        return chunk

    with monkeypatch.context() as patch:
        patch.setattr(Lockstep, "_dispatch", noted)
        patch.setattr("jaxfl.training.lockstep.rounds_at_once", lambda _, most: rounds_at_once(seconds, most))
        train_toy(out, {"A": case}, **options)
    return lengths


def test_a_call_makes_rounds_for_half_a_minute_and_how_many_shows_in_no_byte(tmp_path, monkeypatch):
    """The first call of a run of 25 rounds, with a line after every ten, sets the number once; costs are floats."""
    case = toy_case(toy_that_counts, ledger=TOY_LEDGER, seeds=(0,))
    for seconds, lengths in ((0.1, [1, 9, 10, 5]), (8.0, [1, 3, 3, 3, 3, 3, 3, 1, 3, 2]), (1e4, [1] * 25)):
        assert lengths_of_calls(tmp_path / str(seconds), case, monkeypatch, seconds) == lengths
    lines = [run_bytes(tmp_path / str(seconds)) for seconds in (0.1, 8.0, 1e4)]
    assert lines[0] == lines[1] == lines[2]
    query = lengths_of_calls(tmp_path / "asked", case._replace(chunk_rounds=4), monkeypatch, 1e4)
    assert query == [4, 4, 2, 4, 4, 2, 4, 1]
    for name, length in ((str(seconds), chosen) for seconds, chosen in ((0.1, 10), (8.0, 3), (1e4, 1))):
        kept = json.loads((tmp_path / name / "summary.json").read_text())["seconds"]
        assert kept["rounds_a_call"] == [length, length]


def test_a_call_ends_where_budgets_are_looked_at(tmp_path, monkeypatch):
    """Every 75 rounds of 150 between two lines, whatever a call takes."""
    case = toy_case(toy_that_counts, seeds=(0,), num_rounds=150, evaluate_every=150)
    lengths = lengths_of_calls(tmp_path, case, monkeypatch, 10.0)
    assert max(lengths) == 3
    assert {75, 150} <= set(np.cumsum(lengths).tolist())


@pytest.mark.parametrize("killed_at", [None, 3, 9, 13])
def test_where_a_budget_ends_a_lane_never_hangs_on_what_a_call_takes(tmp_path, monkeypatch, killed_at):
    """It is checked at every tenth round, an evaluation, whatever was saved before; one is spent at round 4."""
    total = json.loads(lines_with_budgets(tmp_path / "free", monkeypatch, 0.1, {})[1])["total_joules"]
    budgets = {"joules": 0.35 * total}
    expected = lines_with_budgets(tmp_path / "fast", monkeypatch, 0.1, budgets)
    assert json.loads(expected[-1])["round"] == 10
    slow = tmp_path / "slow"
    if killed_at is not None:
        save, stop = Lockstep._save, Stop()

        def save_and_stop(self):
            save(self)
            if self._round >= killed_at:
                stop.request()

        with monkeypatch.context() as patch, contextlib.suppress(Stopped):
            patch.setattr(Lockstep, "_save", save_and_stop)
            lines_with_budgets(slow, monkeypatch, 1e4, budgets, checkpoint_minutes=0.0, stop=stop)
    resume = {} if killed_at is None else {"resume": True}
    assert lines_with_budgets(slow, monkeypatch, 1e4, budgets, **resume) == expected


def lines_with_budgets(out, monkeypatch, seconds, budgets, **options):
    """The lines of a run whose calls take so long."""
    case = toy_case(toy_that_counts, ledger=TOY_LEDGER, seeds=(0,), budgets=budgets)
    lengths_of_calls(out, case, monkeypatch, seconds, **options)
    return run_bytes(out).decode().splitlines()


def test_a_resumed_run_keeps_how_many_rounds_a_call_makes(tmp_path, monkeypatch):
    case = toy_case(toy_that_counts, ledger=TOY_LEDGER, seeds=(0,))
    stop, save = Stop(), Lockstep._save

    def save_and_stop(self):
        save(self)
        if self._round >= 12:
            stop.request()

    monkeypatch.setattr(Lockstep, "_save", save_and_stop)
    with pytest.raises(Stopped):
        lengths_of_calls(tmp_path, case, monkeypatch, 8.0, checkpoint_minutes=0.0, stop=stop)
    monkeypatch.undo()
    assert lengths_of_calls(tmp_path, case, monkeypatch, 0.1, resume=True)[0] == 3
