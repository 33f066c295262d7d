"""Lines of metrics.jsonl in columns: what goes in comes out, and a long file is never held line by line."""

import json
import tracemalloc
from collections import defaultdict

import numpy as np
import pytest

from jaxfl.analysis import plot_run
from jaxfl.analysis.final_plot import plot_final
from jaxfl.analysis.plots import seeds_curve
from jaxfl.core.lines import Lines
from jaxfl.training import read_run
from jaxfl.training.summary import summarize_run

RECORD = {"status": "finished", "until": 9, "reason": None}
RECORD |= {"seconds": {"compile": 0.0, "run": 1.0, "timed_rounds": 1, "rounds_a_call": 1}}


def mixed():
    """Lines of three lanes, out of step: nulls, integers beyond 64 bits, entries that come and go."""
    lanes = [("B", 1), ("A", 0), ("B", 0)]
    rng = np.random.default_rng(0)
    lines = []
    for k in range(12):
        for number, (case, seed) in enumerate(lanes):
            if k % (number + 1) == 0:
                line = {"case": case, "seed": seed, "round": k, "loss": None if k == 0 else float(rng.normal())}
                line |= {"count": None if k == 0 else k * 2**62, "total": 2**53 + k}
                lines.append(line | ({"extra": 1.0 / (k + 1)} if k % 4 == 2 else {}))
    return lines


def test_lines_come_out_as_they_went_in():
    lines = mixed()
    held = Lines(iter(lines))
    assert [*map(json.dumps, held)] == [*map(json.dumps, lines)]
    assert [held[index] for index in (0, 7, -1)] == [lines[index] for index in (0, 7, -1)]
    assert held.ends() == {(line["case"], line["seed"]): line for line in lines}
    assert [*held.ends()] == [*dict.fromkeys((line["case"], line["seed"]) for line in lines)]
    assert [*held.names()] == [*dict.fromkeys(name for line in lines for name in line)]
    assert {case: [*own] for case, own in held.by_case().items()} == {
        case: [line for line in lines if line["case"] == case] for case in ("B", "A")
    }
    assert [*held.after(3)] == [line for line in lines if line["round"] > 3]
    assert [*held.having("extra", "total")] == [line for line in lines if "extra" in line]
    totals = [line["total"] for line in lines if line["seed"] == 0]
    assert held.sums_of("total")[0] == sum(totals) > 2**53  # to the last digit
    assert not len(Lines())
    assert Lines().ends() == Lines().by_case() == Lines().names() == {}


def test_a_curve_of_seeds_that_stop_at_different_rounds():
    lines = [line for line in mixed() if line["loss"] is not None]
    of_round = defaultdict(list)
    for line in lines:
        of_round[line["round"]].append((line["loss"], line["total"]))
    curve = seeds_curve(Lines(lines), "loss", ("total", "round"))
    rounds = sorted(of_round)
    losses = [[loss for loss, _ in of_round[k]] for k in rounds]
    assert len({*map(len, losses)}) > 1
    np.testing.assert_array_equal(curve.x, [np.mean([total + k for _, total in of_round[k]]) for k in rounds])
    for actual, over in ((curve.mean, np.mean), (curve.low, np.min), (curve.high, np.max)):
        np.testing.assert_array_equal(actual, [over(values) for values in losses])
    assert curve.num_seeds == 3


@pytest.fixture
def long_run(tmp_path):
    """A run of 40 lanes with 600 lines each, as `train` writes them."""
    lanes = [[f"case {number}", seed] for number in range(20) for seed in (0, 1)]
    names = [f"metric_{number}" for number in range(16)]
    folder = tmp_path / "run"
    (folder / "passes" / "0").mkdir(parents=True)
    with open(folder / "passes" / "0" / "metrics.jsonl", "w") as file:
        for k in range(600):
            for number, (case, seed) in enumerate(lanes):
                line = {"case": case, "seed": seed, "round": k, "train_loss": None if k == 0 else 1 / (k + number / 7)}
                line |= {"test_accuracy": k / 601 + number / 1e5, "dropped": 4 * k if k else None}
                file.write(json.dumps(line | {name: k / 7 + number / 3 for name in names}) + "\n")
    config = {"experiment": "toy", "preset": None, "config": {}, "environment": {}, "training": {"passes": [lanes]}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_long_file_is_never_held_line_by_line(long_run):
    """Summary and pictures of a run take less than twice the memory of its lines on disk; dicts took six times."""
    run = read_run(long_run)
    labels = run.passes[0].lanes
    settings = {case: {"step_size": 0.1 * number} for number, case in enumerate(dict(labels))}
    plot_run(long_run)  # imports matplotlib
    tracemalloc.start()
    try:
        facts = {case: {"seeds": [0, 1], "settings": own} for case, own in settings.items()}
        records = dict.fromkeys(labels, RECORD)
        summary = summarize_run(run.read_metrics(), records, facts, config=run.config, status="finished")
        run.write_summary(summary)
        plot_run(long_run)
        assert plot_final(long_run, settings)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert summary["cases"]["case 3"]["dropped"]["per_seed"] == [4 * sum(range(600))] * 2
    assert peak < 2 * (long_run / "passes" / "0" / "metrics.jsonl").stat().st_size
