"""--node-loop: what it asks for, what is refused, and that a whole round does not depend on it."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from problems import start

from experiments import EXPERIMENTS
from jaxfl import graphs
from jaxfl.algorithms import push_sum
from jaxfl.core.node_loop import automatic
from jaxfl.data import Dataset, federate
from jaxfl.frame import main, records
from jaxfl.gradients import fixed, saga
from jaxfl.models import classification, cnn, mlp

MODELS = {
    "mlp": mlp((64, 4, 3), activation="tanh"),
    "cnn": cnn((8, 8, 1), channels=(2,), window=3, hidden=None, num_classes=3),
}
SIZES = [2, 3, 5, 4, 3]


@pytest.fixture(scope="module")
def dataset():
    """Small images of noise."""
    rng = np.random.default_rng(3)
    images = rng.integers(0, 17, (sum(SIZES), 8, 8), dtype=np.uint8)
    labels = rng.integers(0, 3, sum(SIZES)).astype(np.int32)
    return Dataset("noise", images, labels, images[:4], labels[:4], 3)


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.slow
def test_strategies_agree_to_rounding_in_a_whole_round(model, dataset):
    """Push-sum over uneven nodes with clipped gradients and a table of them; twice, so that the table matters."""
    parts = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    data, key = federate(dataset.train_inputs[..., None], dataset.train_labels, parts), jax.random.key(1)
    found, state = {}, None
    for node_loop in ("vmap", "map", "chunk:2"):  # of 5 nodes the last is alone
        learner = push_sum(
            classification(MODELS[model], node_loop=node_loop),
            graph=graphs.exponential(5),
            gradient=saga(sampler=fixed(2), clip_norm=0.5),
            step_size=0.5,
        )
        state = start(learner, key, data) if state is None else state
        one_round = jax.jit(learner.round)
        found[node_loop] = one_round(key, one_round(key, state, data)[0], data)
        assert float(found[node_loop][1].clipped_fraction.max()) > 0
    for node_loop in ("map", "chunk:2"):
        for mine, other in zip(*map(jax.tree.leaves, (found[node_loop], found["vmap"])), strict=True):
            np.testing.assert_allclose(np.float32(mine), np.float32(other), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("platform", "convolutions"), [("cpu", "map"), ("gpu", "vmap")])
def test_auto_goes_by_platform_and_model(platform, convolutions, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert (automatic(True), automatic(False)) == (convolutions, "vmap")
    for model, expected in (("cnn", convolutions), ("mlp", "vmap")):
        for asked, used in (("auto", expected), ("chunk:3", "chunk:3")):
            records.Network.task.cache_clear()  # which does not know of another platform
            network = dataclasses.replace(records.Network(), **{"model": model, "node_loop": asked})
            assert network.task(records.Data()).node_loop == used
    records.Network.task.cache_clear()


@pytest.mark.parametrize(("asked", "used"), [("auto", "vmap"), ("chunk:2", "chunk:2")])
@pytest.mark.quick_cases(1)
def test_what_is_saved_is_the_strategy_that_is_used(asked, used, tmp_path, capsys):
    """Not the word auto, which stands for something else on another platform."""
    options = "--nodes 3 --hidden 4 --batch-size 2 --noise-std 0 --method PrivSGP --iterations 1 --seed 0 --quiet"
    command = [*options.split(), "--node-loop", asked, "--out", str(tmp_path / "run")]
    assert main(EXPERIMENTS["privsgp_vr"], command) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["node_loop"] == used
    assert f"node loop {used}" in " ".join(capsys.readouterr().out.split())
