"""Presets give the lines, and for a few rounds the numbers, that they gave before all experiments shared a frame.

What is pinned, and how it was made: pinned/README.md.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import leave_undrawn
from pinned.data import write

from experiments import EXPERIMENTS
from experiments.privsgp_vr.spending import settled
from jaxfl.core import RunKey
from jaxfl.frame import Line, flat, main
from jaxfl.frame.experiment import request
from jaxfl.training import lanes
from jaxfl.training.json_files import jsonable

PINNED = Path(__file__).parent / "pinned"
VARIANTS, NUMBERS = (json.loads((PINNED / name).read_text()) for name in ("variants.json", "numbers.json"))
DIGITS = 1e-8  # pinned numbers have nine significant digits
ROUNDING = 2e-5  # lanes of a program and devices add float32 numbers up in another order
DECOMPOSED = 1e-3  # singular values of few samples enlarge that rounding
SMALL_SUMS = 1e-7  # what rounding leaves of sums that are nearly zero

# What statements call things since then. A formula that nobody published is "reconstructed" now; assumptions are worded
# anew, and are not compared; there may be more statements.
RENAMED_RELATIONS = {"add_or_remove_one": "zero_out"}  # where J and b stay they are the same


def asked(experiment: str, label: str):
    """The request of a preset or a data set."""
    kind, value = label.split()
    changes = {"dataset": value} if kind == "--dataset" else {}
    return request(EXPERIMENTS[experiment], changes, (), value if kind == "--preset" else None)


def close(value: Any, pinned: Any, rtol: float = DIGITS) -> bool:
    """Whether a value is the pinned one."""
    value = jsonable(value, "value")
    if isinstance(pinned, list) and isinstance(value, list):
        return len(value) == len(pinned) and all(map(close, value, pinned))
    if isinstance(pinned, float) and isinstance(value, int | float):
        return bool(np.isclose(value, pinned, rtol=rtol, atol=0))
    return value == pinned


def settings_of(experiment: str, lines: Mapping[str, Line]) -> dict[str, dict[str, Any]]:
    """Options of each line, and what follows from them."""
    ready = lines
    if experiment == "privsgp_vr":
        totals = {"digits": 1437, "mnist": 60_000, "fashion_mnist": 60_000, "cifar10": 50_000}
        sizes = {
            name: list(map(len, np.array_split(np.empty(totals[line.point.data.dataset]), line.point.clients.nodes)))
            for name, line in lines.items()
        }
        ready = settled(lines, sizes, lambda point: pytest.fail("no preset probes"))
    settings = {}
    for name, line in lines.items():
        settings[name] = values = flat(line.point)
        if experiment == "privsgp_vr":
            values |= {f"settled_{key}": flat(ready[name].point)[key] for key in ("step_size", "noise_std")}
            values |= {"refresh_every": 1000} if values["refresh_every"] == "auto" else {}  # what auto is on a CPU
        elif experiment == "dp_gradient_tracking":
            last = line.point.schedule().state_noise_scale[:, -1].tolist()
            values |= {"agent_noise": line.point.agent_noise().tolist(), "last_noise_scale": last}
            values["num_rounds"] = line.point.num_rounds
        elif experiment == "embracing_fl":
            values["counts"] = list(line.point.counts)
    return settings


@pytest.mark.parametrize(
    ("experiment", "label"), [(experiment, label) for experiment in VARIANTS for label in VARIANTS[experiment]]
)
def test_lines(experiment, label):
    """Names in their order, seeds, and the options that count at each line."""
    lines, pinned = asked(experiment, label).lines, VARIANTS[experiment][label]
    assert list(lines) == list(pinned["lines"])
    settings = settings_of(experiment, lines)
    for name, own in pinned["lines"].items():
        wrong = {key: value for key, value in {**pinned["all"], **own}.items() if not close(settings[name][key], value)}
        assert not wrong, (name, {key: (settings[name][key], value) for key, value in wrong.items()})
    assert sorted({seed for line in lines.values() for seed in line.seeds}) == sorted(pinned["seeds"])


# The normal suite trains a line of one of these, here with its own name and what asks for it alone; the slow one all.
QUICK = ("privsgp_vr", "--preset fig9", ("PrivSGP-VR", "--method PrivSGP-VR"))
TRAINED = [pytest.param(*QUICK, id=f"{QUICK[0]} {QUICK[2][0]} alone")] + [
    pytest.param(experiment, label, None, marks=pytest.mark.slow, id=f"{experiment} {label}")
    for experiment in VARIANTS
    for label in NUMBERS.get(experiment, ())
    if "lines" in NUMBERS[experiment][label]
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder for data sets and compiled programs."""
    return tmp_path_factory.mktemp("pinned")


@pytest.mark.parametrize(("experiment", "label", "alone"), TRAINED)
def test_numbers(experiment, label, alone, data, tmp_path, monkeypatch):
    """Metrics of the first rounds, and statements of what they cost."""
    # Now every point has batches and noise of its own: with those of the seed the numbers are as they were.
    monkeypatch.setattr(lanes, "run_key", lambda key, settings, data: RunKey(key, key))
    leave_undrawn(monkeypatch)
    pinned = NUMBERS[experiment][label]
    folder = (
        [] if pinned["dataset"] == "digits" else ["--data-dir", str(write(data, pinned["dataset"])[pinned["dataset"]])]
    )
    command = [
        *pinned["command"],
        *(alone[1].split() if alone else ()),
        *folder,
        "--quiet",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main(EXPERIMENTS[experiment], command) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    before = {alone[0]: next(iter(summary["variants"]))} if alone else {name: name for name in summary["variants"]}
    found = {(line["variant"], line["seed"], line["round"]): line for line in lines}
    expected = [line for line in pinned["lines"] if line["variant"] in before or not alone]
    assert {(before[line["variant"]], line["seed"], line["round"]) for line in expected} == set(found)
    wrong = []
    for line in expected:
        now = found[before[line["variant"]], line["seed"], line["round"]]
        for name, value in line.items():
            rounding = DECOMPOSED if name.startswith("svcca") else ROUNDING
            if name == "variant" or np.isclose(now[name], value, rtol=rounding, atol=SMALL_SUMS):
                continue
            wrong.append((line["variant"], line["seed"], line["round"], name, value, now[name]))
    assert not wrong
    assert summary["status"] == pinned["status"]
    for old, name in before.items():
        for option, value in pinned.get("settings", {}).get(old, {}).items():
            assert close(config["variants"][name][option], value)
        statements = summary["variants"][name].get("privacy", [])
        for then in pinned["privacy"].get(old, []):
            relation = RENAMED_RELATIONS.get(then["neighboring_relation"], then["neighboring_relation"])
            words = {then["bound"], "reconstructed"} if then["bound"] == "published" else {then["bound"]}
            matching = [s for s in statements if s["bound"] in words and s["neighboring_relation"] == relation]
            now = next(s for s in matching if s["dp_delta"] == then["dp_delta"])
            for field in ("nodes", "reason"):
                assert now[field] == then[field]
            if now["accountant"] == then["accountant"]:
                assert close(now["dp_epsilon"], then["dp_epsilon"])
            else:  # a tighter bound came into use
                assert now["bound"] == "proven"
                assert now["dp_epsilon"] <= then["dp_epsilon"] * (1 + DIGITS)
