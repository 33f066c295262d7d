"""Bad inputs of every experiment: exit code 2 and one sentence with the option and the remedy, before any work."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
import toy_experiment

from experiments import EXPERIMENTS
from experiments.plan.request import PLAN
from jaxfl.data import load, partition_dataset
from jaxfl.frame import main
from jaxfl.gradients import memory

RING = np.array([[0.5, 0.0, 0.0, 0.5], [0.5, 0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.5, 0.5]])
CHAIN = np.eye(4, k=-1)  # agent i hears i - 1: agent 0 reaches all
GRAPHS = {
    "ring": RING,
    "narrow": RING[:, :3],
    "scaled": RING * 1.1,
    "negative": RING * [1, 1, 1, -1],
    "parts": np.kron(np.eye(2), np.full((2, 2), 0.5)),
    "one": CHAIN[None],
    "text": np.full((1, 4, 4), "a"),
    "minus": np.stack([CHAIN, -CHAIN.T]),
    "same": np.stack([CHAIN, CHAIN]),
    "pair": np.stack([CHAIN, CHAIN.T]),
}


GRIDS = {
    "empty.csv": "",
    "color.csv": "rounds,color\n1,red\n",
    "ragged.csv": "rounds,radius\n1\n",
    "ragged.jsonl": '{"rounds": 1}\n{"radius": 1}\n',
    "words.jsonl": "rounds\n",
    "lists.jsonl": "[1, 2]\n",
    "many.jsonl": '{"rounds": "many"}\n',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Graphs, grids and data sets that cannot be used, and a file where a run could go."""
    path = tmp_path_factory.mktemp("files")
    for name, matrices in GRAPHS.items():
        np.save(path / f"{name}.npy", matrices)
    for name, text in GRIDS.items():
        (path / name).write_text(text)
    (path / "hollow").mkdir()
    for name in ("taken", "empty.npy"):
        (path / name).touch()
    return path


def rows():
    """(experiment, arguments, option) of every line of bad_inputs.txt."""
    section = ""
    for line in (Path(__file__).parent / "bad_inputs.txt").read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif section and " => " in line:
            yield (section, *line.split(" => "))


def refused(name, arguments, option, capsys, says=""):
    """Run the command line in this process; the one sentence names the option, and says what a pattern asks for."""
    before = sorted(Path().rglob("*"))
    assert main({**EXPERIMENTS, "plan": PLAN, "toy": toy_experiment.EXPERIMENT}[name], arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error: {option}: ")
    assert re.search(says, output.err), output.err
    assert re.fullmatch(r"error: [^:]+: .+; .+[.?] .+\.\n", output.err), output.err
    assert sorted(Path().rglob("*")) == before  # no run directory is left behind


@pytest.mark.parametrize(("name", "arguments", "option"), list(rows()))
def test_refused_in_one_sentence(name, arguments, option, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    refused(name, arguments.split(), option, capsys)


@pytest.mark.parametrize(
    ("name", "options", "spare"),
    [
        ("privsgp_vr", "--method PrivSGP", 1),  # a Poisson batch has less than all
        ("dp_gradient_tracking", "--graph ring --smoothness 2", 0),
    ],
)
def test_later_seed_is_checked_before_the_first_runs(name, options, spare, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    digits = load("digits")
    smallest = [min(map(len, partition_dataset(digits, "dirichlet", 4, seed, alpha=2.0))) for seed in (0, 1)]
    assert smallest[1] < smallest[0] - spare
    options += f" --nodes 4 --partition dirichlet --alpha 2 --seeds 0 1 --batch-size {smallest[0] - spare}"
    refused(name, options.split(), "--batch-size", capsys, rf"has {smallest[1]}\. Pass")


def test_empty_output_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    refused("privsgp_vr", ["--out", ""], "--out", capsys)


def test_table_that_cannot_fit_is_refused_before_anything_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "available_bytes", lambda: 8 * 10**9)
    arrays = {id(array) for array in jax.live_arrays()}
    # 7,500,010 parameters, as many numbers for each of 16 nodes' 90 samples and of the batch that is read ahead.
    says = r"needs 5\d\.\d GB and 8\.0 GB are free\. Alternatives: table=\"factored\" takes 1\.2 GB; .*per_batch"
    refused("privsgp_vr", "--hidden 100000 --table dense --batch-size 1".split(), "--table", capsys, says)
    made = [array for array in jax.live_arrays() if id(array) not in arrays]
    assert sum(array.nbytes for array in made) < 10**6


def test_model_that_cannot_fit_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    refused("privsgp_vr", ["--hidden", "1000000000", "--method", "PrivSGP"], "--hidden", capsys)
