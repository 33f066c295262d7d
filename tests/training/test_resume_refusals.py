"""An error that stops a resumed run changes nothing: once it is mended, the same command ends with the same bytes."""

import shutil
import warnings

import numpy as np
import pytest
from processes import interrupted
from run_files import content, run_bytes
from toy_problem import toy_case, train_toy

from jaxfl.core import ArgumentError
from jaxfl.training import read_run, restore_state
from jaxfl.training.checkpoint import DamagedCheckpoint

LONE = {"A": toy_case(seeds=(0,))}


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """(lines of an uninterrupted run, directory of one that died with checkpoints of rounds 10 and 20)."""
    out = tmp_path_factory.mktemp("runs")
    train_toy(out / "whole", LONE)
    with interrupted(4), pytest.raises(KeyboardInterrupt):
        train_toy(out / "half", LONE)
    return run_bytes(out / "whole"), out / "half"


@pytest.fixture
def run(half, tmp_path):
    """(lines of an uninterrupted run, a copy of the other one)."""
    shutil.copytree(half[1], tmp_path / "run")
    return half[0], tmp_path / "run"


def test_a_checkpoint_or_a_pass_of_another_seed_or_run_is_refused(run, tmp_path):
    expected, out = run
    own = out / "passes" / "0"
    for other, cases, config in [
        ("seed", {"A": toy_case(seeds=(3,))}, {"step_size": 0.2}),
        ("config", LONE, {"step_size": 0.3}),
    ]:
        train_toy(tmp_path / other, cases, config=config, keep_checkpoints=3)
        foreign, moved = tmp_path / other / "passes" / "0", tmp_path / f"before {other}"
        own.rename(moved)
        shutil.copytree(moved, own)
        shutil.rmtree(own / "checkpoints" / "20")
        shutil.copytree(foreign / "checkpoints" / "20", own / "checkpoints" / "20")
        _assert_refused(out, "checkpoints of its own lanes only")
        shutil.rmtree(own)
        shutil.copytree(foreign, own)
        _assert_refused(out, "passes of its own lanes only")
        shutil.rmtree(own)
        moved.rename(own)
    train_toy(out, LONE, resume=True)
    assert run_bytes(out) == expected


def _assert_refused(out, what):
    before = content(out)
    with pytest.raises(ArgumentError, match=f"^out: must hold {what}; "):
        train_toy(out, LONE, resume=True, config={"step_size": 0.2})
    assert content(out) == before


def test_a_checkpoint_of_another_lane_of_the_run_is_refused(tmp_path):
    """Two programs of one run, whose states have the same form."""
    cases = {"A": toy_case(seeds=(0,)), "B": toy_case(seeds=(0,))}
    train_toy(tmp_path, cases)
    first, other = (tmp_path / "passes" / number / "checkpoints" / "25" for number in "01")
    shutil.rmtree(other)
    shutil.copytree(first, other)
    with pytest.raises(ArgumentError, match="25 is of other lanes"):
        restore_state(read_run(tmp_path), "B", cases["B"], 0)


@pytest.mark.parametrize("cut", [10, 400])
def test_metrics_that_are_not_those_of_the_checkpoint_are_refused_before_anything_changes(run, cut):
    expected, out = run
    path = out / "passes" / "0" / "metrics.jsonl"
    lines = path.read_bytes()
    path.write_bytes(lines[:cut].replace(b"1", b"2", 1) + lines[cut:] if cut == 400 else lines[: len(lines) // 2])
    before = content(out)
    with pytest.raises(ArgumentError, match=r"^out: "):
        train_toy(out, LONE, resume=True)
    assert content(out) == before
    path.write_bytes(lines)
    train_toy(out, LONE, resume=True)
    assert path.read_bytes() == expected


def test_a_damaged_record_is_no_other_owner(run):
    """The checkpoint before is taken, with the same end."""
    expected, out = run
    newest = out / "passes" / "0" / "checkpoints" / "20" / "record" / "metadata"
    held = bytearray(newest.read_bytes())
    rng = np.random.default_rng(2)
    for position in rng.choice(len(held), 3, replace=False):
        held[position] ^= 0x15
    newest.write_bytes(bytes(held))
    with pytest.warns(DamagedCheckpoint, match=r"round 20 .* is damaged"):
        train_toy(out, LONE, resume=True)
    assert run_bytes(out) == expected


@pytest.mark.slow
def test_no_bit_that_flips_in_a_run_is_accepted_in_silence(half, tmp_path):
    """One bit of any file of a run that is resumed: it is refused, warned of, or changes no number."""
    expected, rng, caught_or_refused = half[0], np.random.default_rng(11), 0
    for number in range(200):
        out = tmp_path / str(number)
        shutil.copytree(half[1], out)
        files = [path for path in content(out) if "checkpoints" in path.parts or path.suffix in (".jsonl", ".json")]
        path = files[int(rng.integers(len(files)))]
        held = bytearray(path.read_bytes())
        if not held:
            continue
        held[int(rng.integers(len(held)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(held))
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                train_toy(out, LONE, resume=True)
            caught_or_refused += bool(caught)
        except ArgumentError:
            caught_or_refused += 1
        else:
            assert run_bytes(out) == expected, path
        shutil.rmtree(out)
    assert caught_or_refused > 24
