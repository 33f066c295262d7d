"""--node-loop: what it asks for, what is refused, and that a whole round does not depend on it."""

import json

import jax
import numpy as np
import pytest
from problems import start

from experiments import dp_gradient_tracking, privsgp_vr
from experiments.privsgp import build as privsgp
from experiments.privsgp import config as privsgp_config
from experiments.tracking import build as tracking
from experiments.tracking import config as tracking_config
from jaxfl import graphs
from jaxfl.algorithms import push_sum
from jaxfl.core.node_loop import automatic
from jaxfl.data import Dataset, federate
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
def test_auto_goes_by_platform_and_model(platform, convolutions, dataset, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert (automatic(True), automatic(False)) == (convolutions, "vmap")
    for model, expected in (("cnn", convolutions), ("mlp", "vmap")):
        for config, build in ((privsgp_config, privsgp), (tracking_config, tracking)):
            for asked, used in (("auto", expected), ("chunk:3", "chunk:3")):
                options = config.resolve(config.Config(model=model, node_loop=asked))
                assert build.make_task(options, dataset).node_loop == used


@pytest.mark.parametrize("experiment", [privsgp_vr, dp_gradient_tracking])
@pytest.mark.parametrize("bad", ["pmap", "chunk:0", "chunk:", "chunk:two", "chunk:²", "Vmap", "devices:"])
def test_other_values_are_refused_in_one_sentence(experiment, bad, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert experiment.main(["--node-loop", bad]) == 2
    assert capsys.readouterr().err == (
        f"error: --node-loop: must be auto, vmap, map or chunk:k with k at least 1, the last three also "
        f"behind devices:; got {bad!r}. Choose one of these.\n"
    )
    assert not list(tmp_path.iterdir())


def test_config_json_records_the_strategy_that_was_used(tmp_path, monkeypatch, capsys):
    """Not the word auto, which stands for something else on another platform."""
    options = "--nodes 3 --iterations 2 --evaluate-every 2 --seeds 0 --quiet --hidden 4 --batch-size 2 --noise-std 0"
    command = [*options.split(), "--methods", "PrivSGP", "--out", str(tmp_path / "run")]
    assert privsgp_vr.main([*command, "--node-loop", "chunk:2"]) == 0
    assert "node loop chunk:2" in " ".join(capsys.readouterr().out.split())
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["config"]["node_loop"] == written["training"]["node_loop"] == "chunk:2"
    assert privsgp_vr.main([*command, "--resume"]) == 2
    assert 'has "chunk:2", this call has "vmap". Pass "chunk:2"' in capsys.readouterr().err
