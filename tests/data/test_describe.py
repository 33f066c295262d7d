# pyright: reportArgumentType=false
"""`jaxfl data` and the first lines of a run: what was read from a file of one's own."""

import json

import numpy as np
import pytest

from experiments import EXPERIMENTS
from jaxfl.__main__ import main as jaxfl_command
from jaxfl.data import load_file
from jaxfl.data.describe import reading_lines, warnings_of
from jaxfl.frame import main

HEADING = "patient;age;dose;hospital;ill"
ROWS = [
    f"{1000 + k};{k % 9 / 9:.3f};{k % 7},5;{['Lund', 'Oslo', 'Riga'][k % 3]};{['no', 'yes'][k % 5 // 3]}"
    for k in range(90)
]
WORDS = "--label-column ill --site-column hospital --id-column patient"


@pytest.fixture
def table(tmp_path):
    (tmp_path / "patients.csv").write_text("\n".join([HEADING, *ROWS]) + "\n")
    (tmp_path / "roads.csv").write_text("Lund;Oslo\nOslo;Lund\nOslo;Riga\nRiga;Oslo\n")
    return str(tmp_path / "patients.csv")


def test_the_command_says_what_is_read(table, tmp_path, capsys):
    assert jaxfl_command(["data", table, *WORDS.split(), "--graph", str(tmp_path / "roads.csv")]) == 0
    printed = capsys.readouterr().out
    data = load_file(table, label_column="ill", site_column="hospital", id_column="patient")
    for line in (*reading_lines(data), *warnings_of(data, given_classes=False)):
        assert line in printed
    for words in (
        "semicolon",
        "id patient",
        "classes no, yes",
        "inputs: age, dose",
        "whole numbers",
        "0.5 to 6.5",
        "4 edges",
    ):
        assert words in printed
    sizes = np.bincount(data.train_writers)
    by_site = ", ".join(f"{name} {size}" for name, size in zip(("Lund", "Oslo", "Riga"), sizes, strict=True))
    assert f"by site: {by_site}\n" in printed
    assert f"{len(data.train_labels)} samples train at 3 sites ({sizes.min()} to {sizes.max()} each)" in printed


def test_missing_values_are_counted_before_the_file_is_refused(table, tmp_path, capsys):
    path = tmp_path / "gaps.csv"
    path.write_text("\n".join([HEADING, *ROWS, "2000;NA;?;Lund;no", "2001;;1;Lund;yes"]) + "\n")
    assert jaxfl_command(["data", str(path), *WORDS.split()]) == 2
    printed = capsys.readouterr()
    assert [line.split("│")[3].strip() for line in printed.out.splitlines() if "│ age" in line or "│ dose" in line] == [
        "2",
        "1",
    ]
    assert "row 92" in printed.err
    assert jaxfl_command(["data", str(tmp_path / "a.xlsx")]) == 2
    assert ".csv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "options", "word"),
    [
        (ROWS, {}, "--classes"),
        (ROWS, {"id_column": None, "drop_columns": ("patient",)}, "--id-column"),
        ([row.replace(",5;", "00;") for row in ROWS], {}, "dose reaches 600"),
        ([*ROWS, "3000;0,1;0,1;Riga;rare"], {"id_column": None, "drop_columns": ("patient",)}, "rare"),
        ([*ROWS, "3000;0,1;0,1;Tiny;no"], {"id_column": None, "drop_columns": ("patient",)}, "Tiny"),
    ],
)
def test_what_may_mislead_is_said(rows, options, word, tmp_path):
    (tmp_path / "a.csv").write_text("\n".join([HEADING, *rows]) + "\n")
    given = {"label_column": "ill", "site_column": "hospital", "id_column": "patient", **options}
    assert word in " ".join(warnings_of(load_file(str(tmp_path / "a.csv"), **given), given_classes=False))


def test_a_run_warns_of_large_inputs_and_keeps_nothing_of_it(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("\n".join([HEADING, *(row.replace(",5;", "00;") for row in ROWS)]) + "\n")
    words = f"--dataset {tmp_path / 'a.csv'} {WORDS} --method PrivSGP --iterations 2 --noise-std 0.1 --quiet"
    assert main(EXPERIMENTS["privsgp_vr"], [*words.split(), "--out", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.count("warning: dose reaches 600") == 1
    assert not any(b"reaches" in path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())


def test_a_run_says_and_keeps_what_it_reads(table, tmp_path, capsys):
    words = (
        f"--dataset {table} {WORDS} --method PrivSGP --iterations 2 --noise-std 0.1 --quiet --out {tmp_path / 'run'}"
    )
    assert main(EXPERIMENTS["privsgp_vr"], words.split()) == 0
    data = load_file(table, label_column="ill", site_column="hospital", id_column="patient")
    assert capsys.readouterr().out.splitlines()[:3] == reading_lines(data)
    kept = json.loads((tmp_path / "run" / "config.json").read_text())["config"]["read"]
    assert kept["inputs"] == ["age", "dose"]
    assert kept["classes"] == ["no", "yes"]
    assert kept["roles"] == {"label": "ill", "site": "hospital", "id": "patient"}
    (file,) = (tmp_path / "run" / "final").glob("*.safetensors")
    assert b'\\"classes\\": [\\"no\\", \\"yes\\"]' in file.read_bytes()
