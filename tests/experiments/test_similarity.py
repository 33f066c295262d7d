"""experiments.similarity on a few digits: what is measured, what is averaged, what a run leaves."""

import contextlib
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import leave_undrawn
from run_files import run_lines

from experiments.embracing_fl.networks import Problem
from experiments.similarity import EXPERIMENT
from experiments.similarity.options import SCHEME, Configuration, blocks_of
from jaxfl.analysis.svcca import svcca
from jaxfl.core import Task
from jaxfl.frame import choose, flat, main
from jaxfl.frame.command_line import parse
from jaxfl.models.layer_outputs import layer_outputs

SIZES = (
    "--nodes 3 --hidden 7 6 5 --layers dense_4 dense_1 --rounds 2 --local-steps 2 --evaluate-every 1 --num-train 60 "
    "--num-test 40 --similarity-batch-size 16 --step-size 0.5"
)
LAYERS = ("dense_1", "dense_4")
IMAGES = Problem((32, 32, 3), 10)


def configs(arguments):
    """Name -> configuration."""
    return {name: line.config for name, line in parse(EXPERIMENT, arguments.split())[0].rows.items()}


def averaged(config, scheme, problem=IMAGES):
    """Part of the model that a scheme averages."""
    return choose(SCHEME, {**flat(config), "scheme": scheme})(config.network, problem)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run: its directory, its metrics and what it printed."""
    folder = tmp_path_factory.mktemp("similarity") / "run"
    arguments = [*SIZES.split(), "--grid", "scheme=nothing,input_side", "--quiet", "--out", str(folder)]
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        leave_undrawn(patch)
        assert main(EXPERIMENT, arguments) == 0
    return (
        folder,
        run_lines(folder),
        printed.getvalue(),
    )


def test_all_start_alike_and_what_is_averaged_stays_so(finished):
    _, lines, _ = finished
    assert {line["case"] for line in lines} == {"nothing", "input_side"}
    for line in lines:
        started, shares = line["round"] > 0, line["case"] == "input_side"
        for layer in LAYERS:
            largest, mean = (line[f"svcca_{statistic}_{layer}"] for statistic in ("maximum", "mean"))
            assert 0 < mean <= largest + 1e-6 <= 1 + 2e-6  # the mean of equal numbers is rounded
            assert (mean > 0.999) == ((shares and layer == "dense_1") or not started), (line["case"], layer)
        # Of three clients the parameters of the first two layers.
        assert line["total_bits_sent"] == 32 * 3 * line["round"] * (65 * 7 + 8 * 6) * shares


def test_what_a_run_leaves(finished):
    folder, lines, printed = finished
    row = json.loads((folder / "summary.json").read_text())["cases"]["nothing"]
    last = [line for line in lines if line["case"] == "nothing"][-1]
    assert row["svcca_maximum_dense_4"]["per_seed"] == [last["svcca_maximum_dense_4"]]
    assert {path.name for path in (folder / "plots").iterdir()} >= {"layers.png", "training.png"}
    assert "60 samples over 3 clients (dirichlet 0.1), mlp of 598 parameters; compared: dense_1 dense_4" in printed
    assert printed.count("svcca") == 2, "a column a layer"


def test_the_measure_is_svcca_of_each_pair_on_test_samples():
    """Pair by pair and batch by batch; the mean over batches comes before the maximum over pairs."""
    (config,) = configs(f"{SIZES} --scheme nothing").values()
    model, data = config.network.build(config.problem()), config.clients.data(config.data, 3, (0,))(0)
    clients = [model.init(jax.random.key(number)) for number in range(3)]
    measure, key = config.measures()["svcca"], jax.random.key(0)
    compared = measure.prepare(key, data)
    assert compared is measure.prepare(jax.random.key(1), data), "one array for all seeds"
    numbers = jax.jit(measure.compute)(jax.tree.map(lambda *leaves: jnp.stack(leaves), *clients), compared)
    assert set(numbers) == {f"svcca_{statistic}_{layer}" for statistic in ("maximum", "mean") for layer in LAYERS}
    for layer in LAYERS:
        pairs = np.zeros((2, 3))
        for batch in range(2):
            inputs = jnp.asarray(config.data.load().test_inputs[16 * batch : 16 * (batch + 1)])
            outputs = [layer_outputs(model, client, inputs, [layer])[layer] for client in clients]
            pairs[batch] = [svcca(outputs[i], outputs[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
        mean = pairs.mean(axis=0)
        np.testing.assert_allclose(numbers[f"svcca_maximum_{layer}"], mean.max(), atol=1e-4)
        np.testing.assert_allclose(numbers[f"svcca_mean_{layer}"], mean.mean(), atol=1e-4)
        assert pairs.max() - 0.001 > mean.max() > mean.mean() + 0.001, "batches and pairs must differ"


def test_the_papers_presets_compare_its_layers_and_share_halves(monkeypatch):
    monkeypatch.setattr(Configuration, "problem", lambda self: IMAGES)
    config = next(iter(configs("--preset fig3").values()))
    assert config.layers() == ("stem", "block_1_1", "block_1_3", "block_3_1", "block_3_3")
    assert averaged(config, "input_side") == ("stem", "block_1_1", "block_1_2", "block_1_3", "block_2_1")
    outputs = ("block_2_2", "block_2_3", "block_3_1", "block_3_2", "block_3_3", "dense")
    assert averaged(config, "output_side") == outputs
    assert (averaged(config, "nothing"), averaged(config, "everything")) == ((), "all")
    part = averaged(config, "channels")
    assert isinstance(part, Task)
    narrow = jax.eval_shape(part.init, jax.random.key(0))
    assert narrow["block_3_3"]["conv_2"]["kernel"].shape == (3, 3, 32, 32)


@pytest.mark.parametrize("model", ["mlp", "femnist_cnn", "bilstm", "resnet20", "resnet8 --resnet-blocks 2 1 1"])
def test_defaults_name_the_blocks_of_the_model(model, monkeypatch):
    problem = Problem((12,), 2) if model == "bilstm" else IMAGES
    monkeypatch.setattr(Configuration, "problem", lambda self: problem)
    (config,) = configs(f"--model {model} --scheme channels").values()
    blocks = config.network.task(problem).blocks
    assert blocks_of(flat(config)) == blocks
    assert config.sharing.first_shared == blocks[max(len(blocks) // 2, 1)]
    ends = tuple(f"block_{stage}_{count}" for stage, count in enumerate(config.network.resnet_blocks, start=1))
    assert config.layers() == (("stem", *ends) if model.startswith("resnet") else blocks)
    data = config.clients.data(config.data, 8, (0,))(0)
    inputs = np.zeros((len(data.labels), *problem.sample_shape), np.int32 if model == "bilstm" else np.float32)
    data = data._replace(inputs=jnp.asarray(inputs), labels=jnp.zeros_like(data.labels))  # as the model takes them
    jax.eval_shape(lambda key: config.algorithm().init(key, data), jax.random.key(0))  # its part is slices of the model
