"""Bad options of experiments.embracing_fl: exit code 2, one sentence that names the option and the remedy."""

import re

import pytest

from experiments import embracing_fl as experiment

# Arguments, the option that must be named, and what the sentence must say (found and remedy).
BAD = [
    ("--rounds 0", "--rounds", r"got 0\. Pass 1 or more"),
    ("--local-steps 0", "--local-steps", r"got 0\. Pass 1 or more"),
    ("--batch-size 0", "--batch-size", r"got 0\. Pass 1 or more"),
    ("--step-size 0", "--step-size", r"got 0\.0\. Pass a number above 0"),
    ("--momentum -1", "--momentum", r"got -1\.0\. Pass 0 or"),
    ("--participation-rate 1.5", "--participation-rate", r"got 1\.5\. Pass a share"),
    ("--width-weak 0.01", "--width-weak", r"got 0\.01 of 32\. Pass more"),
    ("--width-weak 0.9", "--width-weak", r"got 0\.9 beside 0\.45\. Exchange"),
    ("--target-accuracy 80", "--target-accuracy", r"got 80\.0\. Pass a share"),
    ("--cases 7 --target-accuracy 0.5 0.6", "--target-accuracy", r"got 2 for 1\. Pass as many"),
    ("--cases 11", "--cases", r"got 11"),
    ("--cases 7 7", "--cases", r"got \[7, 7\]\. List each once"),
    ("--cases 7 --strong 2", "--cases", r"got --strong beside them\. Leave one"),
    ("--cases 7 --nodes 12", "--nodes", r"case 7's 16/128, 0/128, 112/128; got 12\. Pass 16"),
    ("--strong 2 3 --weak 1 2 3", "--strong", r"got 2, 3\. Pass as many"),
    ("--strong 20", "--nodes", r"got 16 for 20 \+ 0 \+ 0 clients\. Pass more"),
    ("--weak 4", "--method", r"4 weak has none\. Leave fed_avg out"),
    ("--num-active 3", "--num-active", r"got 3, and 2 strong fed_avg has 2\. Pass fewer"),
    ("--num-active 3 --participation-rate 0.5", "--participation-rate", r"beside --num-active 3\. Leave one"),
    ("--nodes 2000 --strong 1", "--nodes", r"1,437 samples.* Take fewer nodes"),
    ("--seeds -1", "--seeds", r"got -1\. Pass e\.g\. 0 1 2"),
    ("--decay-rounds 200", "--decay-rounds", r"below the 150 rounds; got \[200\]\. Leave it out"),
    ("--cut-weak block_9", "--cut-weak", r"dense_1.*got 'block_9'"),
    ("--method sgd", "--method", r"got 'sgd'\. Write for example --method embracing"),
    ("--sampling all", "--sampling", r"uniform or stratified; got 'all'"),
    ("--partition shards", "--partition", r"got 'shards'\. Choose one"),
    ("--partition writers", "--partition", r"digits has none\. Choose dirichlet or iid"),
    ("--partition iid --alpha 1", "--alpha", r"belongs to dirichlet; got 1\.0 without it\. Leave it out"),
    ("--model bilstm --frozen-words -1", "--frozen-words", "must be an integer of at least 0; got -1"),
    ("--model bilstm --frozen-words 64 --cut-weak dense", "--frozen-words", "belongs to clients that train the LSTM"),
    ("--model bilstm --frozen-words 64 --cases 2", "--frozen-words", "belongs to weak clients; got 64, and none takes"),
    ("--cut-moderate dense_2 --strong 2 --weak 4", "--cut-moderate", "belongs to moderate clients; got dense_2, and"),
    ("--frozen-words 64", "--frozen-words", "belongs to bilstm; got 64 without it"),
    ("--model bilstm", "--model", r"got bilstm for digits\. Choose another"),
    ("--resnet-widths 4 8 16", "--resnet-widths", r"belongs to resnet20, resnet8; got 4 8 16 without it"),
    ("--channels 4", "--channels", r"belongs to femnist_cnn; got 4 without it"),
    ("--batch-norm static", "--batch-norm", r"belongs to resnet20, resnet8; got static without it"),
    ("--model resnet8 --batch-norm static --frozen-batch-norm running", "--frozen-batch-norm", r"Pass batch"),
    ("--model resnet8 --method first_half --batch-norm static", "--batch-norm", r"Pass global"),
    ("--model resnet8 --method embracing --calibration-samples 9", "--calibration-samples", r"got 9 without it"),
    ("--method fed_avg --cut-weak dense_3", "--cut-weak", r"belongs to embracing, first_half, .*Leave it out"),
    ("--method embracing --without-scaler", "--without-scaler", r"got True without it\. Leave it out"),
    ("--model femnist_cnn --hidden 4 4", "--hidden", r"got 2\. Pass 2048"),
    ("--node-loop all", "--node-loop", r"got 'all'\. Choose one"),
    ("--dataset cifar10", "--data-dir", r"got None"),
    ("--collect nowhere", "--collect", r"nowhere has none\. Name a run directory"),
    ("--resume", "--resume", r"there is no runs/embracing_fl/digits\. Name the run by --out"),
]


@pytest.mark.parametrize(("arguments", "option", "says"), BAD, ids=[row[0] for row in BAD])
def test_refused_in_one_sentence(arguments, option, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert experiment.main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {option}: ")
    assert re.search(says, error), error
    assert re.fullmatch(r"error: [^:]+: .+; .+[.?] .+\.\n", error), error
    assert list(tmp_path.iterdir()) == []  # no run directory is left behind
