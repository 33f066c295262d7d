"""Bad options of experiments.dp_gradient_tracking: exit code 2, one sentence that names the option and the remedy."""

import re

import numpy as np
import pytest

from experiments import dp_gradient_tracking as experiment
from jaxfl.data import load, partition_dataset

CHAIN = np.eye(4, k=-1)  # agent i hears i - 1: agent 0 reaches all


def save(*weights):
    """Weights in the file pair.npy."""
    np.save("pair.npy", np.stack(weights))


def unchanged():
    """Nothing to set up."""


FILE = "--nodes 4 --graph pair.npy"
# Arguments, the option that must be named, what the sentence must say (found and remedy), and what is set up before.
BAD = [
    # numbers out of range
    ("--iterations 0", "--iterations", r"got 0\. Pass 1 or more", unchanged),
    ("--nodes 1 --graph ring", "--nodes", r"got 1\. Pass 2 or more", unchanged),
    ("--nodes 2000 --graph ring", "--nodes", r"1,437 samples.* Take fewer nodes", unchanged),
    ("--num-samples 300", "--num-samples", r"draws 300 and agent \d has 287\. Pass --num-samples 287 or", unchanged),
    ("--train-samples 0", "--train-samples", r"got 0\. Pass 1 or more", unchanged),
    ("--checkpoint-every 0", "--checkpoint-every", r"got 0\. Pass 1 or more", unchanged),
    ("--step-size 0", "--step-size", r"got 0\.0\. Pass a number above 0", unchanged),
    ("--smoothness -1", "--smoothness", r"got -1\.0\. Pass a number above 0", unchanged),
    ("--clip-norm 0", "--clip-norm", r"got 0\.0\. Pass a number above 0", unchanged),
    ("--dp-delta 1", "--dp-delta", r"strictly between 0 and 1; got 1\.0\. Pass", unchanged),
    ("--noise-gain -1", "--noise-gain", r"got -1\.0.*Pass 0 or a number above it", unchanged),
    ("--noise-base 0", "--noise-base", r"got 0\.0.*Pass a number above 0", unchanged),
    ("--noise-exponent nan", "--noise-exponent", r"finite.*got \[nan\]\. Pass", unchanged),
    ("--noise-exponent 0.1 0.10000001", "--noise-exponent", r"six digits.*Pass numbers further apart", unchanged),
    ("--seeds 1 1", "--seeds", r"got \[1, 1\]\. List each once", unchanged),
    ("--seeds -1", "--seeds", r"got -1\. Pass e\.g\. 0 1 2", unchanged),
    ("--scheme S1 S1", "--scheme", r"got \['S1', 'S1'\]\. List each once", unchanged),
    ("--methods", "--methods", r"got \[\]\. List each once", unchanged),
    ("--channels 0 --model cnn", "--channels", r"got 0\. Pass 1 or more", unchanged),
    ("--model resnet18 --resnet-widths 40", "--resnet-widths", r"multiple of 32; got 40\. Pass for", unchanged),
    # words that are none of the choices
    ("--scheme S3", "--scheme", r"S1 or S2.*got 'S3'\. Write for example --scheme S1 S2", unchanged),
    ("--partition writers", "--partition", r"iid, dirichlet, shards; got 'writers'\. Choose one", unchanged),
    ("--methods SGD", "--methods", r"DP-GT or noisy-states.*got 'SGD'\. Write for example --methods DP-GT", unchanged),
    ("--graph triangle --nodes 4", "--graph", r"got 'triangle'\. Choose one.*\.npy", unchanged),
    ("--preset figure_2", "--preset", r"got 'figure_2'\. This experiment has: fig2, ", unchanged),
    # options that do not go together
    ("--nodes 8", "--nodes", r"must be 5 for five_agents; got 8\. Leave it out", unchanged),
    ("--graph directed_ring", "--nodes", r"got none\. Pass --nodes 8", unchanged),
    ("--model cnn --hidden 8", "--hidden", r"belongs to mlp; got 8 without it\. Leave it out", unchanged),
    ("--window 5", "--window", r"belongs to cnn; got 5 without it\. Leave it out, or pass --model cnn", unchanged),
    ("--alpha 0.5", "--alpha", r"iid partition; got 0\.5\. Leave it out", unchanged),
    ("--partition shards", "--shards-per-node", r"got None\. Pass a number", unchanged),
    ("--data-dir .", "--data-dir", r"digits.*Leave it out", unchanged),
    ("--dataset mnist", "--data-dir", r"got None\. Download the four files", unchanged),
    ("--scheme S2 --noise-exponent 0.2", "--noise-exponent", r"belongs to S1; got 0\.2 without it\. Leave", unchanged),
    ("--scheme S1 --noise-base 0.9", "--noise-base", r"belongs to S2; got 0\.9 without it\. Leave it out", unchanged),
    ("--scheme S1 --gradient-dominance 1", "--gradient-dominance", r"belongs to S2; got 1\.0 without it", unchanged),
    ("--baseline-graph star", "--baseline-graph", r"belongs to noisy-states, .*; got star without it", unchanged),
    ("--methods noisy-states --graph ring", "--graph", r"belongs to DP-GT; got ring without it\. Leave", unchanged),
    ("--methods noisy-states --strict", "--strict", r"belongs to DP-GT; got True without it\. Leave", unchanged),
    ("--methods noisy-states --dp-delta 0.1", "--dp-delta", r"belongs to DP-GT; got 0\.1 without it", unchanged),
    ("--methods noisy-outputs --state-mixing 1", "--state-mixing", r"got 1\.0 without it\. Leave it out", unchanged),
    ("--methods noisy-outputs --gradient-at state", "--gradient-at", r"got state without it\. Leave", unchanged),
    ("--methods ternary-states --noise-gain 1", "--noise-gain", r"got 1\.0 without it\. Leave it out", unchanged),
    ("--quantization-step 1", "--quantization-step", r"belongs to noisy-quantized-states, quantized-st", unchanged),
    ("--ternary-threshold 2", "--ternary-threshold", r"belongs to ternary-states; got 2\.0 without it", unchanged),
    ("--methods ternary-states --distribution gaussian", "--distribution", r"must be laplace.*Leave these", unchanged),
    (
        "--methods noisy-states --baseline-graph directed_ring",
        "--baseline-graph",
        r"must be undirected.*Pass ring, for instance",
        unchanged,
    ),
    (
        "--methods noisy-states --baseline-graph exponential",
        "--baseline-graph",
        r"3 mixing matrices in turn\. Pass ring, for instance",
        unchanged,
    ),
    # files of graphs
    (FILE, "--graph", r"no such file.*numpy\.save", unchanged),
    (FILE, "--graph", r"shape \(1, 4, 4\)\. .*numpy\.save", lambda: save(CHAIN)),
    (FILE, "--graph", r"entries of type <U1\. .*numpy\.save", lambda: save(np.full((4, 4), "a"))),
    (FILE, "--graph", r"non-negative.*got -1\.0.*Pass", lambda: save(CHAIN, -CHAIN.T)),
    (FILE, "--graph", r"\[0\] and the second of nodes \[3\]\. Add edges", lambda: save(CHAIN, CHAIN)),
    ("--nodes 5 --graph pair.npy", "--graph", r"shape \(2, 4, 4\)\. .*numpy\.save", lambda: save(CHAIN, CHAIN.T)),
    # where the run goes
    ("--resume --smoothness 2", "--resume", r"no runs/dp_gradient_tracking/digits\. Name the run by --out", unchanged),
]


@pytest.mark.parametrize(("arguments", "option", "says", "set_up"), BAD, ids=[f"{row[0]}|{row[2]}" for row in BAD])
def test_refused_in_one_sentence(arguments, option, says, set_up, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    set_up()
    before = sorted(tmp_path.rglob("*"))
    assert experiment.main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {option}: ")
    assert re.search(says, error), error
    assert re.fullmatch(r"error: [^:]+: .+; .+[.?] .+\.\n", error), error
    assert sorted(tmp_path.rglob("*")) == before  # no run directory is left behind


def test_later_seed_is_checked_before_the_first_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    digits = load("digits")
    fewest = [min(map(len, partition_dataset(digits, "dirichlet", 4, seed, alpha=2.0))) for seed in (0, 1)]
    assert fewest[1] < fewest[0]
    arguments = "--nodes 4 --graph ring --partition dirichlet --alpha 2 --smoothness 2 --seeds 0 1 --num-samples"
    assert experiment.main([*arguments.split(), str(fewest[0])]) == 2
    assert f"draws {fewest[0]} and agent" in (error := capsys.readouterr().err)
    assert f"has {fewest[1]}. Pass --num-samples {fewest[1]} or less" in error
    assert list(tmp_path.iterdir()) == []


def test_another_file_by_the_same_name_is_not_resumed(tmp_path, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiment, "train", interrupt)
    np.save("pair.npy", np.stack([CHAIN, CHAIN.T]))
    arguments = ["--smoothness", "2", "--quiet", "--nodes", "4", "--graph", "pair.npy", "--out", "run"]
    assert experiment.main(arguments) == 130
    np.save("pair.npy", np.stack([CHAIN, CHAIN.T]) / 2)
    assert experiment.main([*arguments, "--resume"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: graph_crc32: must be as in the run that is resumed; ")
