"""Bad inputs on the command line: each exits with code 2 and one sentence that names the option and the remedy."""

import gzip
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import privsgp_vr
from jaxfl.data import load, partition_dataset
from jaxfl.gradients import memory

RING = np.array([[0.5, 0.0, 0.0, 0.5], [0.5, 0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.5, 0.5]])
PAIRS = np.kron(np.eye(2), np.full((2, 2), 0.5))
MNIST = "--dataset mnist --data-dir mnist"


def idx(array):
    """An array of bytes as the content of an IDX file."""
    array = np.asarray(array, np.uint8)
    return struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(**changed):
    """The four files of a tiny MNIST in the folder mnist, some with another content."""
    Path("mnist").mkdir()
    files = {
        "train_images": idx(np.zeros((8, 28, 28))),
        "train_labels": idx(np.arange(8)),
        "t10k_images": idx(np.zeros((2, 28, 28))),
        "t10k_labels": idx([0, 1]),
    }
    for name, content in {**files, **changed}.items():
        split, kind = name.split("_")
        axes = 3 if kind == "images" else 1
        if content is not None:
            Path(f"mnist/{split}-{kind}-idx{axes}-ubyte").write_bytes(content)


def save(matrix):
    """A mixing matrix in the file graph.npy."""
    np.save("graph.npy", matrix)


def unchanged():
    """Nothing to set up."""


# Arguments, the option that must be named, what the sentence must say (found and remedy), and what is set up before.
BAD = [
    # numbers out of range
    ("--nodes 0", "--nodes", r"got 0\. Pass 1 or more", unchanged),
    ("--nodes 2000", "--nodes", r"1,437 samples.* Take fewer nodes", unchanged),
    ("--iterations 0", "--iterations", r"got 0\. Pass 1 or more", unchanged),
    ("--evaluate-every 0", "--evaluate-every", r"got 0\. Pass 1 or more", unchanged),
    ("--checkpoint-every 0", "--checkpoint-every", r"got 0\. Pass 1 or more", unchanged),
    ("--hidden 8 0", "--hidden", r"got 0\. Pass 1 or more", unchanged),
    ("--step-size -0.1", "--step-size", r"got -0\.1\. Pass a number above 0", unchanged),
    ("--step-size nan", "--step-size", r"got nan\. Pass a number above 0", unchanged),
    ("--step-size 0.1 0.2", "--step-size", r"got 2 for 1 batch sizes\. Pass as many", unchanged),
    ("--batch-size 0", "--batch-size", r"got 0\. Pass 1 or more", unchanged),
    ("--nodes 4 --sampler fixed --batch-size 1 500", "--batch-size", r"500.* has 359\. Pass 359 or less", unchanged),
    ("--nodes 4 --batch-size 500", "--batch-size", r"500.* has 359\. Pass 359 or less", unchanged),
    ("--clip-norm 0", "--clip-norm", r"got 0\.0\. Pass a number above 0", unchanged),
    ("--noise-std 0.1 -1", "--noise-std", r"got -1\.0.*Pass 0 or a number above it", unchanged),
    ("--noise-std inf", "--noise-std", r"got inf.*Pass 0 or a number above it", unchanged),
    ("--noise-std 0.1 0.1000001", "--noise-std", r"got 0\.1 0\.1000001\. Compare values further apart", unchanged),
    ("--methods PrivSGP --refresh-every 0", "--refresh-every", r"got 0\. Pass 1 or more", unchanged),
    ("--refresh-every 0", "--refresh-every", r"got 0\. Pass 1 or more", unchanged),
    ("--seeds 0 -1", "--seeds", r"got -1\. Pass e\.g\. 0 1 2", unchanged),
    ("--seeds 4294967296", "--seeds", r"got 4294967296\. Pass e\.g\. 0 1 2", unchanged),
    ("--seeds 1 1", "--seeds", r"got \[1, 1\]\. List each once", unchanged),
    ("--seeds", "--seeds", r"got \[\]\. List each once", unchanged),
    # words that are none of the choices
    ("--dataset mnst", "--dataset", r"digits, mnist.*got 'mnst'\. Choose one", unchanged),
    ("--sampler bernoulli", "--sampler", r"poisson, fixed, uniform; got 'bernoulli'\. Choose one", unchanged),
    ("--partition writers", "--partition", r"iid, dirichlet, shards; got 'writers'\. Choose one", unchanged),
    ("--table sparse", "--table", r"dense, factored, per_batch; got 'sparse'\. Choose one", unchanged),
    ("--storage float16", "--storage", r"float32, bfloat16; got 'float16'\. Choose one", unchanged),
    ("--graph triangle", "--graph", r"got 'triangle'\. Choose one.*\.npy", unchanged),
    (
        "--activation gelu",
        "--activation",
        r"relu or tanh or None; got 'gelu'\. Write for example --activation relu",
        unchanged,
    ),
    ("--methods SGD", "--methods", r"PrivSGP-VR or PrivSGP.*got 'SGD'\. Write for example --methods", unchanged),
    # budgets
    ("--target-epsilon 0", "--target-epsilon", r"got 0\.0\. Pass a number above 0", unchanged),
    ("--dp-delta 1", "--dp-delta", r"strictly between 0 and 1; got 1\.0\. Pass", unchanged),
    ("--c2 0", "--c2", r"got 0\.0\. Pass a number above 0", unchanged),
    ("--clip-norm None", "--bound", r"not clipped.*\. Clip, or choose another", unchanged),
    ("--bound published", "--bound", r"no privacy theorem for PrivSGP.*\. Take the proven bound", unchanged),
    ("--iterations auto --noise-std 1", "--iterations", r"no target_epsilon\. Pass --target-epsilon", unchanged),
    (
        "--noise-std 0.01 --target-epsilon 0.1",
        "--target-epsilon",
        r"pay for one round of PrivSGP-VR \(proven bound\); one round costs \d+.*\. Pass more, or add more noise",
        unchanged,
    ),
    ("--noise-std 0 --target-epsilon 1", "--target-epsilon", r"one round has no such bound\. Pass more", unchanged),
    ("--gradient-bound 1", "--gradient-bound", r"got clip_norm 2\.0\. Leave it out", unchanged),
    ("--pair nodes seeds", "--pair", r"got 'seeds'\. Name two of them or more", unchanged),
    ("--pair nodes", "--pair", r"at least two options; got nodes\. Name two", unchanged),
    ("--nodes 4 4 --iterations 9 9 --pair nodes iterations", "--nodes", r"got 4 4\. Compare values further", unchanged),
    (
        "--nodes 4 --batch-size 2 2 --noise-std 1 2 --pair batch_size noise_std --step-size 0.1 0.2",
        "--step-size",
        r"got 0\.1 0\.2 for batch sizes 2 2\. Pass one number",
        unchanged,
    ),
    ("--shared-noise --noise-std 0.1", "--shared-noise", r"got noise_std\. Leave it out", unchanged),
    ("--bound proven published --noise-std 0.1", "--bound", r"got no target_epsilon\. Name one", unchanged),
    ("--pair nodes iterations --nodes 4 8", "--pair", r"iterations has 1.*\. Give each as many", unchanged),
    # other models and fewer samples
    ("--model cnn --hidden 8", "--hidden", r"belongs to mlp; got \(8,\) without it\. Leave it out", unchanged),
    ("--resnet-widths 8 16", "--resnet-widths", r"belongs to resnet18.*--model resnet18", unchanged),
    ("--model resnet18 --resnet-widths 40", "--resnet-widths", r"multiple of 32; got 40\. Pass for example", unchanged),
    ("--max-delay 3", "--max-delay", r"belongs to A\(DP\)2SGD; got 3 without it\. Leave it out", unchanged),
    ("--model vgg", "--model", r"mlp or cnn or resnet18; got 'vgg'\. Write for example --model mlp", unchanged),
    ("--num-train 2000", "--num-train", r"got 2,000 of 1,437\. Pass fewer", unchanged),
    ("--num-test 0", "--num-test", r"got 0\. Pass 1 or more", unchanged),
    # the baselines
    ("--methods DP2-SGD", "--graph", r"undirected|symmetric|fixed", unchanged),
    ("--methods A(DP)2SGD --graph ring --max-delay -1", "--max-delay", r"got -1\. Pass 0 or more", unchanged),
    # options that do not go together
    ("--partition dirichlet", "--alpha", r"got None\. Pass a number", unchanged),
    ("--partition shards", "--shards-per-node", r"got None\. Pass a number", unchanged),
    ("--alpha 0.5", "--alpha", r"iid partition; got 0\.5\. Leave it out", unchanged),
    ("--table per_batch", "--entry-size", r"got None.* Pass entry_size", unchanged),
    ("--entry-size 4", "--entry-size", r"got 4 with 'factored'\. Pass entry_size", unchanged),
    ("--edge-probability 0.3", "--edge-probability", r"got --graph exponential\. Leave it out", unchanged),
    ("--graph random --edge-probability 0", "--edge-probability", r"strongly connected.*Try 0\.\d+ or more", unchanged),
    ("--data-dir .", "--data-dir", r"digits.*Leave it out", unchanged),
    # the command line itself
    ("--nodes abc", "--nodes", r"an integer \(or several\) or None; got 'abc'\. Write for example", unchanged),
    ("--nodes", "--nodes", r"got \[\]\. List each once", unchanged),
    ("--nodes 3 3", "--nodes", r"got \[3, 3\]\. List each once", unchanged),
    ("--nodes 3 --nodes=4", "--nodes", r"given once; got '--nodes 3' and '--nodes=4'\. Remove one", unchanged),
    ("--iterations 1e3", "--iterations", r"an integer \(or several\) or auto or None; got '1e3'\.", unchanged),
    ("--step-size fast", "--step-size", r"a number .*or theory.*; got 'fast'\. Write for example --step-", unchanged),
    ("--seeds 0 one", "--seeds", r"an integer \(or several\) or None; got '0 one'\.", unchanged),
    ("--resume yes", "--resume", r"takes no value; got 'yes'\. Write --resume alone", unchanged),
    ("--node 3", "--node", r"Did you mean --nodes\?", unchanged),
    ("digits", "digits", r"--help", unchanged),
    ("--set nodes", "--set", r"got 'nodes'\. Keys: dataset, ", unchanged),
    ("--set color=red", "--set", r"got 'color=red'\. Keys: dataset, ", unchanged),
    ("--set nodes=many", "--nodes", r"got 'many'\. Write for example --nodes 1", unchanged),
    ("--preset figure_7", "--preset", r"got 'figure_7'\. This experiment has: fig1, fig2", unchanged),
    ("--preset", "--preset", r"got ''\. This experiment has: fig1, fig2", unchanged),
    # files of data
    ("--dataset mnist", "--data-dir", r"got None\. Download the four files", unchanged),
    ("--dataset mnist --data-dir none", "--data-dir", r"no folder none\. Download the four files", unchanged),
    (MNIST, "--data-dir", r"train-labels.* or .*; mnist holds .*\. Download", lambda: write_mnist(train_labels=None)),
    (
        MNIST,
        "--data-dir",
        r"holds 4,716\. Download",
        lambda: write_mnist(train_images=idx(np.zeros((8, 28, 28)))[:4716]),
    ),
    (MNIST, "--data-dir", r"label 1 is 11\. Download", lambda: write_mnist(t10k_labels=idx([0, 11]))),
    (
        MNIST,
        "--data-dir",
        r"cut off after 20 bytes\. Download",
        lambda: write_mnist(train_labels=gzip.compress(idx(np.arange(8)), mtime=0)[:20]),
    ),
    ("--dataset cifar10 --data-dir .", "--data-dir", r"\. holds nothing\. .*ownload", unchanged),
    # files of graphs
    ("--graph none.npy --nodes 4", "--graph", r"no such file.*numpy\.save", unchanged),
    ("--graph graph.npy --nodes 4", "--graph", r"array of numbers\. .*numpy\.save", lambda: Path("graph.npy").touch()),
    ("--graph graph.npy --nodes 5", "--graph", r"is for 4\. Pass --nodes 4", lambda: save(RING)),
    ("--graph graph.npy --nodes 4", "--graph", r"shape \(4, 3\)\..*\(n, n\)", lambda: save(RING[:, :3])),
    ("--graph graph.npy --nodes 4", "--graph", r"column 0 sums to 1\.1 .*Divide", lambda: save(RING * 1.1)),
    ("--graph graph.npy --nodes 4", "--graph", r"entry \(0, 3\) is -0\.5\. Use", lambda: save(RING * [1, 1, 1, -1])),
    (
        "--graph graph.npy --nodes 2",
        "--graph",
        r"column 0 of graph\.npy sums to 0\.5\. Divide every column by its sum",
        lambda: save([[0.5, 0.5], [0.0, 1.0]]),
    ),
    ("--graph graph.npy --nodes 4", "--graph", r"no path.*node 0 to node 2.*Add edges", lambda: save(PAIRS)),
    # where the run goes
    ("--out taken", "--out", r"taken: file exists\. Name a directory", lambda: Path("taken").touch()),
    ("--out taken/run", "--out", r"taken/run: not a directory\. Name a directory", lambda: Path("taken").touch()),
    ("--resume", "--resume", r"no runs/privsgp_vr/digits\. Name the run by --out", unchanged),
]


def files():
    """Everything below the working directory, with the content of files."""
    return {path: path.read_bytes() if path.is_file() else None for path in Path().rglob("*")}


def refused(arguments, option, says, capsys):
    """Run the command line in this process and compare the error with what it should be."""
    before = files()
    code = privsgp_vr.main(arguments)
    output = capsys.readouterr()
    assert code == 2
    assert output.out == ""
    assert output.err.startswith(f"error: {option}: ")
    assert output.err.count("\n") == 1
    assert re.search(says, output.err), output.err
    assert re.fullmatch(r"error: [^:]+: .+; .+[.?] .+\.\n", output.err), output.err
    assert files() == before  # no run directory is left behind


@pytest.mark.parametrize(("arguments", "option", "says", "set_up"), BAD, ids=[f"{row[0]}|{row[2]}" for row in BAD])
def test_refused_in_one_sentence(arguments, option, says, set_up, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    set_up()
    refused(arguments.split(), option, says, capsys)


def test_later_seed_is_checked_before_the_first_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    digits = load("digits")
    smallest = [min(map(len, partition_dataset(digits, "dirichlet", 4, seed, alpha=2.0))) for seed in (0, 1)]
    assert smallest[1] < smallest[0] - 1
    arguments = ["--nodes", "4", "--partition", "dirichlet", "--alpha", "2", "--methods", "PrivSGP"]
    arguments += ["--batch-size", str(smallest[0] - 1), "--seeds", "0", "1"]
    refused(arguments, "--batch-size", rf"has {smallest[1]}\. Pass", capsys)


def test_empty_output_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    refused(["--out", ""], "--out", r"got ''\. Name one", capsys)


def test_table_that_cannot_fit_is_refused_before_anything_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "available_bytes", lambda: 8 * 10**9)
    arrays = {id(array) for array in jax.live_arrays()}
    # 7,500,010 parameters, as many numbers for each of 16 nodes' 90 samples and of the batch that is read ahead.
    says = r"needs 5\d\.\d GB and 8\.0 GB are free\. Alternatives: table=\"factored\" takes 1\.2 GB; .*per_batch"
    refused(["--hidden", "100000", "--table", "dense", "--batch-size", "1"], "--table", says, capsys)
    made = [array for array in jax.live_arrays() if id(array) not in arrays]
    assert sum(array.nbytes for array in made) < 10**6


def test_model_that_cannot_fit_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    says = r"needs \d+\.\d TB and .* are free\. Take a smaller model"
    refused(["--hidden", "1000000000", "--methods", "PrivSGP"], "--hidden", says, capsys)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Two bad commands as a user types them, at the same time; (exit code, stdout, stderr) of each."""
    root = Path(privsgp_vr.__file__).parents[1]
    folder = tmp_path_factory.mktemp("processes")
    commands = {
        "--nodes": ["--nodes", "abc"],
        "--data-dir": ["--dataset", "mnist", "--data-dir", "none"],
    }
    environment = {**os.environ, "PYTHONPATH": str(root)}
    started = {
        option: subprocess.Popen(
            [sys.executable, "-m", "experiments.privsgp_vr", *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for option, arguments in commands.items()
    }
    ended = {}
    for option, process in started.items():
        out, err = process.communicate(timeout=120)
        ended[option] = (process.returncode, out, err)
    return ended, folder


@pytest.mark.parametrize("option", ["--nodes", "--data-dir"])
def test_exit_code_of_the_process(option, processes):
    ended, folder = processes
    code, out, err = ended[option]
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    assert [line for line in err.splitlines() if line.startswith("error:")] == err.splitlines()
    assert err.startswith(f"error: {option}: ")
    assert list(folder.iterdir()) == []
