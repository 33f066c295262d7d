"""Chunks that are sent off before the one before them is read: the same bytes as without, whatever happens then."""

import csv
import functools
import time
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import printed
from toy_problem import TASK, TOY_LEDGER, compiled_once, toy_algorithm, toy_that_counts, toy_variant, train_toy

from jaxfl import core
from jaxfl.core import tree
from jaxfl.training import Diverged, RunDirectory, Stop, Stopped, ahead, read_run, restore_state
from jaxfl.training.ahead import Ahead, DeviceQueue
from jaxfl.training.checkpoint import Checkpoints
from jaxfl.training.lanes import Point, Strategy, Uploads
from jaxfl.training.program import Program

NEVER = 1e6
GOOD = {"bad_loss": NEVER, "bad_score": NEVER, "bad_node": NEVER, "overflow": NEVER}
SETTINGS = {"num_rounds": 31, "evaluate_every": 5, "chunk_rounds": 3, "seeds": (0,)}  # chunks of 3 and 2 rounds


def spoiled(numbers):
    """The toy algorithm with one thing that goes wrong in a round, counted from 0, or after some rounds."""
    toy = toy_algorithm(TASK, bad_round=numbers["bad_loss"])

    def update(state, data, draws):
        now = state.round_index.astype(jnp.float32)
        new, info = toy.update(state, data, draws)
        broken = now == numbers["bad_node"]
        kernel = new.params["kernel"]
        at_node = jnp.where(broken & (jnp.arange(data.num_nodes) == 2), jnp.float32(np.nan), 0.0)
        params = {**new.params, "kernel": kernel + tree.along_nodes(at_node, kernel)}
        distance = jnp.where(broken, jnp.float32(np.nan), info.consensus_distance)
        overflow = info.batch_overflow + (now == numbers["overflow"]).astype(jnp.int32)
        return new._replace(params=params), info.plus(consensus_distance=distance, batch_overflow=overflow)

    def node_params(state):
        bad = jnp.where(state.round_index.astype(jnp.float32) >= numbers["bad_score"], jnp.float32(np.nan), 0.0)
        return jax.tree.map(lambda leaf: leaf + bad, state.params)

    return core.algorithm(toy.init, toy.draw, update, node_params)


def variant(**numbers):
    return toy_variant(spoiled, numbers={**GOOD, **numbers}, **SETTINGS)


LONE = {"Lone": variant()}
SWEEP = {
    "Good": variant(),
    "Between": variant(bad_loss=7.0),  # in the chunk of rounds 6 to 8, behind which nothing is evaluated
    "Before a line": variant(bad_loss=13.0),  # rounds 14 and 15
    "Overflow": variant(overflow=18.0),  # rounds 19 and 20
    "Scores": variant(bad_score=25.0),
    "Short": variant()._replace(max_rounds=23),  # where a chunk would not end else
}


@pytest.fixture(autouse=True, scope="module")
def _compile_once():
    with compiled_once():
        yield


@pytest.fixture(autouse=True)
def early(monkeypatch):
    """Rounds of the chunks that are sent off early, which they are wherever the times do not forbid it."""
    monkeypatch.setattr(ahead, "MOST_SECONDS", float("inf"))
    monkeypatch.setattr(ahead, "FEWEST_CHUNKS", 0)
    rounds, send = [], DeviceQueue._send_ahead

    def counting(self, chunk, what):
        rounds.append(what.num_rounds)
        return send(self, chunk, what)

    monkeypatch.setattr(DeviceQueue, "_send_ahead", counting)
    return rounds


def content(out, variants):
    """Lines, results without their seconds, rounds of all checkpoints, and the states in which lanes ended."""
    with open(Path(out) / "results.csv", newline="") as file:
        results = [row[:-1] for row in csv.reader(file)]
    paths = Path(out).glob("checkpoints/**/[0-9]*")
    checkpoints = sorted(str(path.relative_to(out)) for path in paths if path.name.isdigit())
    ends = [restore_state(read_run(out), name, variant, 0) for name, variant in variants.items()]
    return (Path(out) / "metrics.jsonl").read_bytes(), results, checkpoints, ends


def assert_same(mine, other):
    assert mine[:3] == other[:3]
    chex.assert_trees_all_equal(mine[3], other[3])


@pytest.fixture(scope="module", params=["one lane", "a sweep"])
def whole(request, tmp_path_factory):
    """(variants, content) of a run that sends nothing off early."""
    variants = LONE if request.param == "one lane" else SWEEP
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "MOST_SECONDS", 0.0)
        train_toy(out, variants, checkpoint_every=100)
    return variants, content(out, variants)


def test_a_chunk_that_was_sent_off_early_has_the_same_bits(whole, tmp_path, monkeypatch, early):
    """And so have lines, results, checkpoints and lanes that diverged while the next chunk was on its way."""
    variants, expected = whole
    taken_back, take_back = [], DeviceQueue._take_back
    monkeypatch.setattr(DeviceQueue, "_take_back", lambda self: (taken_back.append(1), take_back(self)))
    train_toy(tmp_path, variants, checkpoint_every=100)
    # Chunks end at 3, 5, 8, 10, ..., 30, 31. The first is not timed yet, and the last has none behind it.
    assert len(early) >= (11 if len(variants) == 1 else 7)
    assert len(taken_back) == (0 if len(variants) == 1 else 4)  # once a lane that diverges
    assert_same(content(tmp_path, variants), expected)
    if len(variants) > 1:
        rounds = dict(zip(variants, (rounds for rounds, _ in expected[3]), strict=True))
        assert rounds == {
            "Good": 31,
            "Between": 8,
            "Before a line": 15,
            "Overflow": 20,
            "Scores": 25,
            "Short": 23,
        }


@pytest.mark.parametrize(
    ("numbers", "last"), [({"bad_loss": 12.0}, 13), ({"bad_node": 14.0}, 15), ({"bad_score": 20.0}, 20)]
)
@pytest.mark.quick_cases(1)
def test_a_single_run_raises_the_same_error(tmp_path, monkeypatch, early, numbers, last):
    """The node of the parameters, too: a round later their numbers would be bad at its neighbors."""
    texts = []
    for seconds in (float("inf"), 0.0):
        early.clear()
        monkeypatch.setattr(ahead, "MOST_SECONDS", seconds)
        with pytest.raises(Diverged) as caught:
            train_toy(tmp_path / str(seconds), {"Bad": variant(**numbers)}, checkpoint_every=100)
        assert bool(early) == (seconds > 0)
        assert caught.value.rounds[1] == last
        texts.append((str(caught.value), (tmp_path / str(seconds) / "metrics.jsonl").read_bytes()))
    assert texts[0] == texts[1]
    assert ("left node 2" in texts[0][0]) == ("bad_node" in numbers)


def test_where_the_device_is_too_careful_nothing_changes(whole, tmp_path, monkeypatch, early):
    """Chunks that the device holds back though no number is bad are sent off again."""
    variants, expected = whole
    monkeypatch.setattr(ahead, "_decide", lambda sharding: lambda infos, measured, runs, rounds: jnp.int32(0))
    train_toy(tmp_path, variants, checkpoint_every=100)
    assert len(early) >= 7
    assert_same(content(tmp_path, variants), expected)


@pytest.mark.parametrize("alone", [True, False])
def test_a_state_that_is_no_longer_there_is_refused(tmp_path, monkeypatch, alone):
    """The run does not go on with another state where the device goes on behind a bad number."""
    monkeypatch.setattr(ahead, "_decide", lambda sharding: lambda infos, measured, runs, rounds: jnp.int32(rounds))
    variants = {"Bad": variant(bad_loss=7.0)} | ({} if alone else LONE)
    with pytest.raises(RuntimeError, match="the device took all numbers for good, and went on: loss: must stay finite"):
        train_toy(tmp_path, variants, checkpoint_every=100)


@pytest.mark.parametrize(
    ("owner", "method", "calls", "after"),
    [
        (RunDirectory, "append_metrics", (2, 5), False),  # a chunk is on its way
        (RunDirectory, "append_metrics", (2, 4), True),
        (RunDirectory, "mark_finished", (1, 3), False),  # the end of a lane comes again
        (RunDirectory, "mark_finished", (1, 2, 4), True),
        (Checkpoints, "save", (1, 2, 3), False),
    ],
)
@pytest.mark.quick_cases(2)
def test_resumed_equals_uninterrupted(whole, tmp_path, monkeypatch, owner, method, calls, after):
    """Killed while a chunk is on its way, or where a lane has ended behind which one was."""
    variants, expected = whole
    for number, call in enumerate(calls):
        out, original, counts = tmp_path / str(call), getattr(owner, method), iter(range(1, 1000))

        def dying(*args, original=original, counts=counts, call=call, **kwargs):
            now = next(counts) == call
            if now and not after:
                raise KeyboardInterrupt
            result = original(*args, **kwargs)
            if now:
                raise KeyboardInterrupt
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, method, dying)
            try:
                train_toy(out, variants, checkpoint_every=3)
            except KeyboardInterrupt:
                train_toy(out, variants, checkpoint_every=100, resume=True)
            else:
                assert number > 0, "it must die somewhere"
                break
        mine = content(out, variants)
        assert mine[:2] == expected[:2]
        chex.assert_trees_all_equal(mine[3], expected[3])


def test_a_stop_that_is_asked_for_while_a_chunk_is_on_its_way_waits_for_that(whole, tmp_path, monkeypatch):
    variants, expected = whole
    stop, run, ends = Stop(), DeviceQueue.run, []

    def asking(self, num_rounds, what=None):
        result = run(self, num_rounds, what)
        ends.append(sum(ends[-1:]) + num_rounds)
        if len(ends) == 4:  # behind round 10, which is evaluated
            assert self.is_ahead
            stop.request()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(DeviceQueue, "run", asking)
        with pytest.raises(Stopped) as caught:
            train_toy(tmp_path, variants, checkpoint_every=100, stop=stop)
    assert (ends, caught.value.round_index) == ([3, 5, 8, 10, 13], 13)
    train_toy(tmp_path, variants, checkpoint_every=100, resume=True)
    mine = content(tmp_path, variants)
    assert mine[:2] == expected[:2]
    chex.assert_trees_all_equal(mine[3], expected[3])


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        ({}, {"checkpoint_minutes": 0}),
        ({"budgets": {"gradient_evaluations": 1e9}}, {}),
        ({"algorithm": toy_that_counts, "numbers": {}, "ledger": TOY_LEDGER._replace(transmit_watts=1e280)}, {}),
    ],
)
def test_what_the_host_alone_can_tell_is_looked_at_first(tmp_path, early, change, settings):
    """A checkpoint that is due, a budget that may be spent, costs that may be infinite."""
    lone = variant()._replace(**change)
    train_toy(tmp_path, {"A": lone}, **{"checkpoint_every": 100, **settings})
    assert early == []


def test_before_a_checkpoint_nothing_is_sent_off(tmp_path, early):
    train_toy(tmp_path, LONE, checkpoint_every=2)
    # Behind the chunks that end at 5, 8, 13, 15, ..., none behind 10, 20 and 30.
    assert early == [3, 2, 2, 3, 2, 2, 3, 2]


@pytest.fixture(scope="module")
def compiled():
    """(compiled program, lanes, tables) of one lane."""
    point = Point("Lone", LONE["Lone"], 0, "")
    program = Program([point], Uploads())
    strategy = Strategy(1, 1)
    return program.compile(strategy), program.lanes([point], strategy), program.tables([point], strategy)


def queue(compiled, num_chunks=100):
    made, lanes, tables = compiled
    device = DeviceQueue(*compiled)
    device.begin(made.init(lanes, tables.data), num_chunks)
    return device


def next_chunk(num_rounds=3, *, evaluates=False):
    return Ahead(num_rounds, evaluates, np.bool_(True))


def test_behind_a_bad_number_no_round_runs_and_the_state_is_that_behind_the_chunk_with_it(compiled):
    made, lanes, tables = compiled
    bad = lanes._replace(numbers={**lanes.numbers, "bad_loss": jnp.float32(4.0)})
    states = []
    for what in (next_chunk(2), None):
        with queue((made, bad, tables)) as device:
            device.run(3, next_chunk())
            assert device.is_ahead
            with pytest.raises(RuntimeError, match="the state behind the last chunk is gone"):
                _ = device.state
            infos, _ = device.run(3, what)
            assert not device.is_ahead
            assert np.isnan(infos["loss"]).any()
            states.append(jax.device_get(device.state))
    chex.assert_trees_all_equal(*states)
    assert states[0].round_index == 6


def test_only_what_takes_little_time_and_pays_is_sent_off_early(compiled, monkeypatch):
    monkeypatch.setattr(ahead, "MOST_SECONDS", 1.0)
    monkeypatch.setattr(ahead, "FEWEST_CHUNKS", 50)
    with queue(compiled) as device:
        assert not device.may_go_ahead(next_chunk())  # it knows no times yet
        device._seconds_a_round, device._evaluation_seconds = 0.1, 0.8
        assert device.may_go_ahead(next_chunk(9))
        assert not device.may_go_ahead(next_chunk(10))
        assert device.may_go_ahead(next_chunk(1, evaluates=True))
        assert not device.may_go_ahead(next_chunk(2, evaluates=True))
        with monkeypatch.context() as patch:
            patch.setattr(ahead, "several", lambda: True)
            assert not device.may_go_ahead(next_chunk(1))
        device.begin(device.state, 49)
        assert not device.may_go_ahead(next_chunk(1))


def test_seconds_of_chunks_do_not_overlap(compiled):
    """Nor do they hold what the host does while they run, or an evaluation, or what the next chunk waits for."""
    made, lanes, tables = compiled

    def after(seconds, call, *arguments):
        jax.block_until_ready(arguments)
        time.sleep(seconds)
        return jax.block_until_ready(call(*arguments))

    slow = made._replace(rounds=_Slow(functools.partial(after, 0.2), made.rounds))
    with queue((slow, lanes, tables)) as device:
        began = time.perf_counter()
        seconds = [device.run(3, next_chunk())[1]]
        time.sleep(3.0)  # the next chunk ends meanwhile
        seconds.append(device.run(3, next_chunk(evaluates=True))[1])
        seconds.append(device.run(3)[1])
        wall = time.perf_counter() - began
    assert min(seconds) >= 0.15
    assert max(seconds) < 2.5  # a machine may take its core away meanwhile
    assert sum(seconds) <= wall - 2.7


class _Slow:
    """Compiled rounds on whose end, as on an accelerator, who calls them waits."""

    def __init__(self, how, rounds):
        self.input_shardings, self._how, self._rounds = rounds.input_shardings, how, rounds

    def __call__(self, *arguments):
        return self._how(self._rounds, *arguments)


@pytest.mark.slow
def test_lanes_and_nodes_over_several_devices_have_the_same_bytes(tmp_path):
    measured = printed("training/ahead_over_devices.py", tmp_path, num_devices=8)
    assert set(measured) == {"nodes", "lanes over nodes", "lanes over points", "devices of a CPU"}
    for name, compared in measured.items():
        assert compared["sent off early"] > 3, name
        assert compared["same"], name
        assert compared["rounds"] == ([22] if name == "nodes" else [22] * (len(compared["rounds"]) - 1) + [8]), name
