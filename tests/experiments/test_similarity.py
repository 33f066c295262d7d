"""experiments.partial.similarity end to end on a few digits: what is measured, what is averaged, what a run leaves."""

import contextlib
import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.partial import similarity as experiment
from experiments.partial.similarity_config import PRESETS, SCHEMES, Config, resolve
from experiments.problem import subset
from jaxfl.analysis.svcca import svcca
from jaxfl.core import Task
from jaxfl.data import from_arrays, load
from jaxfl.models.layer_outputs import layer_outputs

RUN = ("nothing", "input_side")
SIZES = {
    "clients": 3,
    "hidden": (7, 6, 5),
    "layers": ("dense_4", "dense_1"),
    "rounds": 2,
    "local_steps": 2,
    "evaluate_every": 1,
    "num_train": 60,
    "num_test": 40,
    "similarity_batch_size": 16,
    "step_size": 0.5,
}
LAYERS = ("dense_1", "dense_4")


def arguments(**options):
    """The options as a command line."""
    flat = []
    for name, value in {**SIZES, "schemes": RUN, **options}.items():
        flat += [f"--{name.replace('_', '-')}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return flat


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, what it printed, and the clients' models at each measurement."""
    folder, printed, measured = tmp_path_factory.mktemp("similarity") / "run", io.StringIO(), []
    make_measures = experiment.make_measures

    def recording(*given):
        measures = make_measures(*given)

        def similarity(nodes):
            measured.append(jax.device_get(nodes))
            return measures.similarity(nodes)

        return measures._replace(similarity=similarity)

    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "make_measures", recording)
        assert experiment.main([*arguments(out=folder), "--quiet"]) == 0
    return folder, printed.getvalue(), measured


def test_all_start_alike_and_what_is_averaged_stays_so(finished):
    lines = lines_of(finished[0])
    places = [(line["variant"], line["seed"], line["round"]) for line in lines]
    assert places == [(scheme, 0, k) for scheme in RUN for k in (0, 1, 2)]
    for line in lines:
        started, shares = line["round"] > 0, line["variant"] == "input_side"
        assert [name for name in line if name.startswith("svcca")] == [
            f"svcca_{statistic}_{layer}" for layer in LAYERS for statistic in ("maximum", "mean")
        ]
        for layer, averaged in zip(LAYERS, (shares, False), strict=True):
            largest, mean = (line[f"svcca_{name}_{layer}"] for name in ("maximum", "mean"))
            assert 0 < mean <= largest <= 1
            assert (mean > 0.999) == (averaged or not started), (line["variant"], layer)
        assert (line["train_loss"] is not None) == started
        assert 0 <= line["test_accuracy"] <= 1
        # Of three clients the parameters of the first two layers.
        assert line["total_bits_sent"] == 32 * 3 * line["round"] * (65 * 7 + 8 * 6) * shares


def test_the_measure_is_svcca_of_each_pair_on_test_samples(finished):
    """Pair by pair and batch by batch; the mean over batches comes before the maximum over pairs."""
    folder, _, measured = finished
    line, nodes = lines_of(folder)[2], measured[2]
    assert (line["variant"], line["round"]) == ("nothing", 2)
    dataset = subset(load("digits"), 60, 40)
    model = experiment.make_problem(resolve(Config(**SIZES)), dataset).model
    for layer in LAYERS:
        found = np.zeros((2, 3))
        for batch in range(2):
            inputs = jnp.asarray(dataset.test_inputs[16 * batch : 16 * (batch + 1)])
            clients = [jax.tree.map(lambda leaf, i=i: leaf[i], nodes) for i in range(3)]
            outputs = [layer_outputs(model, client, inputs, [layer])[layer] for client in clients]
            found[batch] = [svcca(outputs[i], outputs[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
        pairs = found.mean(axis=0)
        np.testing.assert_allclose(line[f"svcca_maximum_{layer}"], pairs.max(), atol=1e-4)
        np.testing.assert_allclose(line[f"svcca_mean_{layer}"], pairs.mean(), atol=1e-4)
        assert found.max() - 0.001 > pairs.max() > pairs.mean() + 0.001, "batches and pairs must differ"


def test_what_a_run_leaves(finished):
    folder, printed, _ = finished
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["experiment"], summary["status"], summary["seeds"]) == ("similarity", "finished", [0])
    last = {line["variant"]: line for line in lines_of(folder)}
    for scheme in RUN:
        row = summary["variants"][scheme]
        assert (row["rounds"], row["privacy"]) == (2, [])
        assert row["svcca_maximum_dense_4"]["per_seed"] == [last[scheme]["svcca_maximum_dense_4"]]
    config = json.loads((folder / "config.json").read_text())["config"]
    assert (config["layers"], config["model"], config["node_loop"]) == (list(LAYERS), "mlp", "vmap")
    assert "out" not in config
    for name in ("layers", "schemes", "training"):
        assert (folder / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "60 samples over 3 clients" in printed


def test_resuming_goes_on_behind_the_finished_schemes(finished, monkeypatch):
    """With the last scheme cut off in its second round: that one alone is trained, and nothing is left of before."""
    folder, trained = finished[0], []
    whole = (folder / "metrics.jsonl").read_bytes()
    done = folder / "checkpoints" / "input-side" / "seed_0" / "finished.json"
    record = json.loads(done.read_text())
    (folder / "metrics.jsonl").write_bytes(whole[: whole[:-1].rindex(b"\n") + 1])
    done.unlink()

    def train(config, scheme, *rest):
        trained.append((scheme, lines_of(folder)))
        (folder / "metrics.jsonl").write_bytes(whole)
        return record

    monkeypatch.setattr(experiment, "_train", train)
    assert experiment.main([*arguments(out=folder), "--quiet", "--resume"]) == 0
    ((scheme, before),) = trained
    assert (scheme, [line["variant"] for line in before]) == ("input_side", ["nothing"] * 3)
    assert (folder / "metrics.jsonl").read_bytes() == whole
    assert json.loads((folder / "summary.json").read_text())["variants"]["input_side"]["rounds"] == 2


@pytest.fixture(scope="module")
def images():
    """Noise in the shape of CIFAR-10."""
    rng = np.random.default_rng(0)
    inputs, labels = rng.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8), np.arange(20) % 10
    return from_arrays(inputs, labels, inputs, labels, num_classes=10)


def test_the_papers_presets_compare_its_layers_and_share_halves(images):
    for preset in PRESETS.values():
        resolve(Config(**preset.options))
    config = resolve(Config(**PRESETS["fig3"].options))
    problem = experiment.make_problem(config, images)
    assert problem.layers == ("stem", "block_1_1", "block_1_3", "block_3_1", "block_3_3")
    parts = {scheme: experiment.synchronized_part(config, scheme, problem) for scheme in SCHEMES}
    assert parts["input_side"] == ("stem", "block_1_1", "block_1_2", "block_1_3", "block_2_1")
    assert parts["output_side"] == ("block_2_2", "block_2_3", "block_3_1", "block_3_2", "block_3_3", "dense")
    assert (parts["nothing"], parts["everything"]) == ((), "all")
    assert isinstance(parts["channels"], Task)
    narrow = jax.eval_shape(parts["channels"].init, jax.random.key(0))
    assert narrow["block_3_3"]["conv_2"]["kernel"].shape == (3, 3, 32, 32)


def test_a_residual_network_compares_the_ends_of_its_stages(images):
    config = resolve(Config(model="resnet", resnet_widths=(2, 3), resnet_blocks=(2, 1), first_shared="block_2_1"))
    problem = experiment.make_problem(config, images)
    assert problem.layers == ("stem", "block_1_2", "block_2_1")
    assert experiment.synchronized_part(config, "input_side", problem) == ("stem", "block_1_1", "block_1_2")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rounds": 0}, r"error: --rounds: must be an integer of at least 1; got 0\..*"),
        ({"clients": 1}, r"error: --clients: must be an integer of at least 2; got 1\..*"),
        ({"schemes": ("nothing", "nothing")}, r"error: --schemes: must be distinct and at least one; .*"),
        ({"layers": ("dense_9",)}, r"error: --layers: must be one of .*dense_4.*; got 'dense_9'\..*"),
        ({"first_shared": "dense_9"}, r"error: --first-shared: must be one of dense_1, .*"),
        ({"first_shared": "dense_1"}, r"error: --first-shared: must leave the input side a block; got 'dense_1'\..*"),
        (
            {"schemes": "nothing", "first_shared": "dense_2"},
            r"error: --first-shared: belongs to the scheme output_side.*",
        ),
        ({"schemes": "channels", "channel_share": 1}, r"error: --channel-share: must lie in \(0, 1\); got 1.*"),
        ({"resnet_widths": (2, 2, 2)}, r"error: --resnet-widths: belongs to resnet; got it for mlp\..*"),
        ({"similarity_batches": 9}, r"error: --similarity-batches: times .*; got 9 of 16, and there are 40\..*"),
        ({"num_directions": 15}, r"error: --num-directions: must be below .* 15; got 15\..*"),
        ({"step_size": -1}, r"error: --step-size: must be positive .*"),
        ({"alpha": 0}, r"error: --alpha: must be positive .*"),
    ],
)
def test_bad_options_give_one_sentence_and_leave_nothing(options, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert experiment.main(arguments(**options)) == 2
    assert re.fullmatch(says + "\n", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []
