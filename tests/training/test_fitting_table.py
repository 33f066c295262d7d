"""Tables of a terminal keep their cells whole, and name the columns that they leave out."""

import io
import re

import pytest
import rich.console

from jaxfl.training import summary_table
from jaxfl.training.fitting_table import FittingTable
from jaxfl.training.sites import site_table

METRICS = ["test_accuracy", "test_accuracy_worst_node", "test_balanced_accuracy", "train_loss"]


def printed(table, width):
    console = rich.console.Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().replace("\xa0", " ")


def summary(numbers):
    spreads = {name: {"mean": number, "std": 0.0123} for name, number in zip(METRICS, numbers, strict=True)}
    costs = {name: {"mean": 12345.6} for name in ("bits_sent", "simulated_seconds", "joules")}
    settings = {"method": "PrivSGP-VR", "step_size": 0.03, "target_epsilon": 8}
    row = {**spreads, "costs": costs, "rounds": 400, "status": ["finished"], "privacy": []}
    cases = {f"case {k}": {**row, "settings": {**settings, "step_size": k}} for k in range(3)}
    return {"experiment": "privsgp_vr", "status": "finished", "seeds": [0, 1], "cases": cases}


def sites():
    ground = {"dp_delta": 1e-5, "bound": "proven", "neighboring_relation": "zero_out", "observer": "all other nodes"}
    scores = {f"{name}{end}": 0.9123 for name in METRICS[:3] for end in ("", "_alone")}
    return [
        {"case": "A", "seed": seed, "site": f"hospital {k}", "samples": 100, "dp_epsilon": 3.0, **ground}
        | {"noise_std": 0.2126 + k, **{name: score + seed / 99 for name, score in scores.items()}}
        for seed in (0, 1)
        for k in range(4)
    ]


TABLES = {"cases": lambda: summary_table(summary([0.8123] * 4), METRICS), "sites": lambda: site_table(sites(), "A")}


@pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("width", [72, 80, 100, 140, 200])
def test_numbers_are_whole_and_columns_that_are_left_out_are_named(make, width):
    table = make()
    assert isinstance(table, FittingTable)
    text = printed(table, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    note = " ".join(text.partition("left out here: ")[2].partition(";")[0].split())
    left_out = note.split(", ") if note else []
    headings = [str(column.header) for column in table.columns if "±" in str(next(iter(column.cells)))]
    assert headings[len(headings) - len(left_out) :] == left_out
    rows = [line.split("│")[1:] for line in text.splitlines() if line.startswith("│")]
    cells = [cell.strip() for row in rows for cell in row if "±" in cell]
    assert len(cells) == table.row_count * (len(headings) - len(left_out))
    assert all(re.fullmatch(r"[\d.]+ ± [\d.]+", cell) for cell in cells), cells


def test_a_wide_terminal_has_all_columns():
    for table in (make() for make in TABLES.values()):
        assert "left out" not in printed(table, 200)
        assert "left out" in printed(table, 60)
        assert "left out" not in printed(table, 200), "a narrow print must not change the table"
