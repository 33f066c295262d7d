"""--node-loop: what it asks for, and what is saved of it."""

import dataclasses
import json

import jax
import pytest
from helpers import leave_untrained

from experiments import EXPERIMENTS
from jaxfl.core.node_loop import automatic
from jaxfl.frame import main, records


@pytest.mark.parametrize(("platform", "convolutions"), [("cpu", "map"), ("gpu", "vmap")])
def test_auto_goes_by_platform_and_model(platform, convolutions, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert (automatic(True), automatic(False)) == (convolutions, "vmap")
    for model, expected in (("cnn", convolutions), ("mlp", "vmap")):
        for query, used in (("auto", expected), ("chunk:3", "chunk:3")):
            records.Network.task.cache_clear()  # which does not know of another platform
            network = dataclasses.replace(records.Network(), **{"model": model, "node_loop": query})
            assert network.task(records.Data()).node_loop == used
    records.Network.task.cache_clear()


def test_what_is_saved_is_the_strategy_that_is_used(tmp_path, monkeypatch, capsys):
    """Not the word auto, which stands for something else on another platform."""
    options = "--nodes 3 --hidden 4 --batch-size 2 --noise-std 0 --method PrivSGP --iterations 1 --seed 0 --quiet"
    command = [*options.split(), "--node-loop", "auto", "--out", str(tmp_path / "run")]
    leave_untrained(monkeypatch)
    assert main(EXPERIMENTS["privsgp_vr"], command) == 130
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["node_loop"] == "vmap"
    assert "node loop vmap" in " ".join(capsys.readouterr().out.split())
