"""Presets and data sets ask for the lines, seeds and options that published results are of.

`tests/pins/presets.json` has a checksum of each option of an experiment, over all lines of its presets and of its
defaults for each data set. JAXFL_TESTS_PIN=1 writes it anew.
"""

import json
import os
import zlib
from pathlib import Path

import pytest

from experiments import EXPERIMENTS
from jaxfl.data.sources import NAMES
from jaxfl.frame import flat
from jaxfl.frame.experiment import request
from jaxfl.frame.options import options
from jaxfl.training.json_files import jsonable

PINS = Path(__file__).parents[1] / "pins" / "presets.json"
KEPT = json.loads(PINS.read_text()) if PINS.exists() else {}


def checksums(name: str) -> dict[str, str]:
    """Checksum of each option over all lines; "name of a line" and "seeds" stand beside the options."""
    experiment, values = EXPERIMENTS[name], {}
    has_data = "dataset" in options(type(experiment.base))
    wanted = [({}, preset) for preset in experiment.presets] + [({}, None)]
    wanted += [({"dataset": dataset}, None) for dataset in NAMES if has_data]
    for changes, preset in wanted:
        try:
            lines = request(experiment, changes, (), preset).rows
        except ValueError:  # a data set that the experiment does not take
            continue
        for line_name, line in lines.items():
            row = {"name of a line": line_name, "seeds": list(line.seeds), **flat(line.config)}
            for option, value in row.items():
                values.setdefault(option, []).append([preset, changes, jsonable(value, option)])
    return {option: f"{zlib.crc32(json.dumps(each).encode()):08x}" for option, each in values.items()}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_no_preset_and_no_default_moves(name):
    """An option that is new is not compared."""
    actual = checksums(name)
    if os.environ.get("JAXFL_TESTS_PIN") == "1":
        KEPT[name] = actual
        PINS.write_text(json.dumps(KEPT, indent=1) + "\n")
    assert {option: actual.get(option) for option in KEPT[name]} == KEPT[name]
