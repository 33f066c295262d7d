"""Presets give the lines, and for a few rounds the numbers, that they gave before all experiments shared a frame.

What is pinned, and how it was made: pinned/README.md. Differences that are meant are named here, each with its reason.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pinned.data import write

from experiments.frame import EXPERIMENTS, Line, flat, main
from experiments.frame.choose import idle_options
from experiments.frame.experiment import request
from experiments.frame.options import flag, options
from experiments.privsgp_vr.spending import settled
from jaxfl.training.json_files import jsonable

PINNED = Path(__file__).parent / "pinned"
VARIANTS, NUMBERS = (json.loads((PINNED / name).read_text()) for name in ("variants.json", "numbers.json"))
DIGITS = 1e-8  # pinned numbers have nine significant digits
ROUNDING = 2e-5  # lanes of a program and devices add float32 numbers up in another order
DECOMPOSED = 1e-3  # singular values of few samples enlarge that rounding
SMALL_SUMS = 1e-7  # what rounding leaves of sums that are nearly zero

# Gradient tracking's statement at a delta now takes the smallest of several bounds, and names it.
TIGHTENED = "sums of impulse responses, given everything broadcast"

# The option that took an old one's place.
RENAMED = {
    "methods": "method",
    "schemes": "scheme",
    "cases": "case",
    "clients": "nodes",
    "num_samples": "batch_size",  # of a gradient, as in the other experiments
}
# Options whose value was None where it stood for something else, and now is what it stood for.
STOOD_FOR = {
    "target_epsilon": "no budget is infinity",
    "noise_std": "calibrated is a word",
    "evaluate_every": "a share of the rounds",
    "state_mixing": "the scheme's",
    "tracker_mixing": "the scheme's",
    "step_size": "the scheme's",
    "batch_size": "the scheme's",
    "smoothness": "estimated is a word",
    "case": "that of the data set",
    "strong": "counted from the case",
    "moderate": "counted from the case",
    "weak": "counted from the case",
    "num_active": "counted from the rate",
    "batch_norm": "static for narrow clients",
    "frozen_batch_norm": "running, but with static ones",
    "first_shared": "the middle of the model",
    "layers": "of the model",
    "writers_per_node": "of the model",
}
# (experiment, what was asked for, option) -> reason.
INTENDED = {
    ("similarity", "model"): "resnet is resnet20 or resnet8, by the names that embracing_fl has",
}
NO_LINES = ("--preset table8", "--preset sizes")  # print a table and train nothing


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
    """What a pinned variant says, of each line."""
    settings = {}
    ready = lines
    if experiment == "privsgp_vr":
        totals = {"digits": 1437, "mnist": 60_000, "fashion_mnist": 60_000, "cifar10": 50_000}
        sizes = {
            name: list(map(len, np.array_split(np.empty(totals[line.point.data.dataset]), line.point.clients.nodes)))
            for name, line in lines.items()
        }
        ready = settled(lines, sizes, lambda point: pytest.fail("no preset probes"))
    for name, line in lines.items():
        values = flat(line.point)
        if experiment == "privsgp_vr":
            known = flat(ready[name].point)
            values |= {"step_size": known["step_size"], "settled_noise_std": known["noise_std"]}
        elif experiment == "dp_gradient_tracking":
            point = line.point
            last = point.schedule().state_noise_scale[:, -1].tolist()
            graph = values["graph" if values["method"] == "DP-GT" else "baseline_graph"]
            level = values["noise_exponent" if values["scheme"] == "S1" else "noise_base"]
            gain = values["noise_gain"] if point.is_noisy else 0.0
            values |= {"agent_noise": point.agent_noise().tolist(), "last_noise_scale": last, "K": values["iterations"]}
            values |= {"num_rounds": point.num_rounds, "graph": graph, "noise": level, "noise_gain": gain}
            values["num_samples"] = values["batch_size"]
        elif experiment == "embracing_fl":
            values["counts"] = list(line.point.counts)
        settings[name] = values
    return settings


ASKED = [(experiment, label) for experiment in VARIANTS for label in VARIANTS[experiment]]


@pytest.mark.parametrize(("experiment", "label"), ASKED)
def test_lines(experiment, label):
    """Names in their order, and what each line stands for."""
    lines, pinned = asked(experiment, label).lines, VARIANTS[experiment][label]["variants"]
    if label in NO_LINES:
        assert not pinned
        return
    assert list(lines) == list(pinned)
    settings = settings_of(experiment, lines)
    for name, before in pinned.items():
        idle = idle_options(lines[name].point, flat(lines[name].point))
        for key, value in before.items():
            now = settings[name][key]
            if (value is None and RENAMED.get(key, key) in STOOD_FOR) or key in idle:
                continue
            assert close(now, value), (name, key, now, value)


@pytest.mark.parametrize(("experiment", "label"), ASKED)
def test_options(experiment, label):
    """Every option that counts has the value that it had, or is one of several that were compared."""
    lines, config = asked(experiment, label).lines, VARIANTS[experiment][label]["config"]
    known = options(type(EXPERIMENTS[experiment].base))
    seeds = sorted({seed for line in lines.values() for seed in line.seeds})
    assert seeds == sorted(config["seeds"])
    points = [(flat(line.point), idle_options(line.point, flat(line.point))) for line in lines.values()]
    for old, before in config.items():
        name = RENAMED.get(old, old)
        if old in ("seeds", "pair") or (experiment, old) in INTENDED or (before is None and name in STOOD_FOR):
            continue
        assert name in known, f"{old} is gone"
        for values, idle in points:
            several = isinstance(before, list) and not isinstance(values[name], tuple)
            allowed = list(before or ()) if several else [before]
            assert name in idle or any(close(values[name], value) for value in allowed), (name, values[name], before)


def command_of(experiment: str, arguments: list[str]) -> list[str]:
    """An old command line in today's words: several values of an option are an axis, paired ones one axis."""
    known = options(type(EXPERIMENTS[experiment].base))
    given: dict[str, list[str]] = {}
    for word in arguments:
        if word.startswith("--"):
            given[word[2:].replace("-", "_")] = []
        else:
            given[list(given)[-1]].append(word)
    label = " ".join(arguments[:2])
    config = VARIANTS[experiment][label]["config"]
    command, axes = [], {}
    for old, words in given.items():
        name = RENAMED.get(old, old)
        several = len(words) > 1 and name in known and "tuple" not in str(known[name].kind)
        if several:
            axes[old] = words
        else:
            command += [flag(name), *words]
    always = ("cases", "target_accuracy") if experiment == "embracing_fl" and len(axes) > 1 else ()
    paired = [name for name in config.get("pair") or always if {*(config.get("pair") or always)} & {*axes}]
    paired = paired if config.get("pair") else [name for name in paired if name in axes]
    groups = [paired] if paired else []
    groups += [[name] for name in axes if name not in paired]
    for group in groups:
        values = {name: axes[name] if name in axes else list(map(str, config[name])) for name in group}
        command += ["--grid", *(f"{RENAMED.get(name, name)}={','.join(words)}" for name, words in values.items())]
    return command


# What the normal suite trains of these, and what that line was called; the slow one trains all lines of all.
QUICK = {
    ("privsgp_vr", "--preset fig9"): ("PrivSGP-VR", "--method PrivSGP-VR"),
    ("dp_gradient_tracking", "--dataset digits"): ("DP-GT, S1", "--scheme S1"),
    ("embracing_fl", "--dataset digits"): ("case 9 embracing", "--method embracing"),
    ("similarity", "--dataset digits"): ("output_side", "--scheme output_side"),
}
TRAINED = [pytest.param(*key, alone, id=f"{key[0]} {alone[1]}") for key, alone in QUICK.items()] + [
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
def test_numbers(experiment, label, alone, data, tmp_path):
    """Metrics of the first rounds, and statements of what they cost."""
    pinned = NUMBERS[experiment][label]
    folder = (
        [] if pinned["dataset"] == "digits" else ["--data-dir", str(write(data, pinned["dataset"])[pinned["dataset"]])]
    )
    command = [
        *command_of(experiment, pinned["arguments"]),
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
        for now, then in zip(statements, pinned["privacy"].get(old, []), strict=True):
            if TIGHTENED in then["accountant"] and then["dp_delta"] > 0:
                assert now["bound"] == then["bound"]
                assert now["dp_delta"] == then["dp_delta"]
                assert now["dp_epsilon"] <= then["dp_epsilon"] * (1 + DIGITS)
                continue
            texts = [NUMBERS["assumptions"][number] for number in then["assumptions"]]
            assert {**now, "dp_epsilon": None} == {**then, "dp_epsilon": None, "assumptions": texts}
            assert close(now["dp_epsilon"], then["dp_epsilon"])
