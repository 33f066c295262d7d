"""`bench card` runs through on a CPU, so that its first run on a card meets no typing error."""

import json
import subprocess
import sys

import pytest

from experiments.bench import card


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 2, 3])
def test_every_box_of_a_call_gives_its_numbers(call, tmp_path):
    numbers = card.run_call(call, tmp_path, small=True)
    assert json.loads((tmp_path / f"card_{call}.json").read_text()) == numbers
    assert {one["box"] for one in numbers} == {box.name for box in card.CALLS[call]}
    for one in numbers:
        assert "error" not in one, one
        assert one["value"] is not None or one["missing"] == "PyTorch is not installed"
        assert "card" in one
        assert {"python", "jax", "jaxlib", "flax"} <= {name for name, message in one["versions"].items() if message}
    flags = [one["xla_flags"] for one in numbers]
    assert all(any(part.endswith(box.xla_flags) for part in flags) for box in card.CALLS[call])
    assert all(one["value"] is True for one in numbers if one["box"] == "resume")


@pytest.mark.slow
def test_a_box_that_fails_or_hangs_costs_itself_alone(tmp_path, monkeypatch):
    fails, hangs, third = card.CALLS[0]
    monkeypatch.setitem(card.CALLS, 0, (fails, hangs, third._replace(name="noise")))
    numbers = card.run_call(0, tmp_path, small=True)
    assert [one.get("error", one["name"]).split(",")[0] for one in numbers] == [
        "fails",
        "exit code 1",
        "hangs",
        "stopped after 20 s",
        "noise/shipped/again",
        "noise/hardware/again",
        "noise/copy/again",
    ]
    assert all(one["versions"] == numbers[0]["versions"] for one in numbers)
    assert "on purpose" in (tmp_path / "log_0.txt").read_text()


def test_a_call_has_nine_minutes_and_every_box_a_name():
    for call, boxes in card.CALLS.items():
        assert sum(box.seconds for box in boxes) <= card.SECONDS_A_CALL, call
    from experiments.bench.card_boxes import BOXES

    assert set(card.NAMES) == set(BOXES)


def test_the_process_of_a_call_leaves_the_card_to_its_boxes(tmp_path):
    program = f"""
import jax, tyro
from jax._src.xla_bridge import _backends
from experiments.bench import card
try:
    tyro.cli(card.card, args=["--help"])
except SystemExit:
    pass
card.CALLS[1] = (card.Box("push_sum", 0),)
tyro.cli(card.card, args=["1", "--out", {str(tmp_path)!r}])
assert not _backends, _backends
assert jax.config.jax_platforms == "cpu"
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    (one,) = json.loads((tmp_path / "card_1.json").read_text())
    assert one["error"] == "no time was left"
    assert one["versions"]["jax"] == card.version("jax")


def test_a_word_that_is_no_box_is_refused():
    with pytest.raises(card.ArgumentError, match=r"^call: must be 0, 1, 2, 3 or the name of a box; got 'ceiling'"):
        card.card("ceiling")
    with pytest.raises(card.ArgumentError, match=r"^--out: must be given"):
        card.card("1")
