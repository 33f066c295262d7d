"""Every command takes the words of all others, or names its own."""

import dataclasses
import re
import typing
from typing import Any

import pytest

from experiments import EXPERIMENTS
from experiments.plan.request import PLAN
from jaxfl import command
from jaxfl.__main__ import main
from jaxfl.core import ArgumentError
from jaxfl.core.check import one_of
from jaxfl.core.vocabulary import SAME, chosen, flag, letters
from jaxfl.data.describe import main as describe
from jaxfl.frame import command_line
from jaxfl.frame.options import options
from jaxfl.planned_runs import METHODS

OF_FRAME = {**EXPERIMENTS, "plan": PLAN}
VALUES = {
    "target_epsilon": "3", "dp_delta": "0.0001", "neighboring_relation": "replace_one", "nodes": "8", "batch_size": "4",
    "iterations": "30", "num_active": "2",
}  # fmt: skip
NOISE = ("noise_multiplier", "noise_std", "noise_gain", "sigma")


def known(name):
    if name == "epsilon":
        return {one.removeprefix("--").replace("-", "_") for one in command.flags()["epsilon"]}
    return {*options(type(OF_FRAME[name].base))}


def outcome(name, words) -> Any:
    """What a command makes of its words, or the sentence by which it refuses them."""
    if name == "epsilon":
        return vars(command._epsilon_parser().parse_args(words))
    try:
        return command_line.parse(OF_FRAME[name], words)[0].config
    except ArgumentError as error:
        return str(error)


def refusal(name, words, capsys):
    """The sentence by which a command refuses words; empty where it takes them."""
    if name in OF_FRAME:
        said = outcome(name, words)
        return said if isinstance(said, str) else ""
    try:
        code = describe(words) if name == "data" else command.main([name, *words])
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr().err
    return said if code else ""


@pytest.mark.parametrize("name", [*OF_FRAME, "epsilon"])
@pytest.mark.parametrize("group", SAME, ids=lambda group: group[0])
def test_every_name_of_an_option_is_taken_wherever_the_option_is(group, name, capsys):
    results = {word: outcome_or_refusal(name, word, VALUES[group[0]], capsys) for word in group}
    if {*group} & known(name):
        first = results[group[0]]
        assert all(result == first for result in results.values()), results
        assert "must be an option" not in str(first)
    else:
        for word, said in results.items():
            assert "must be an option" in said
            pointed = re.findall(r"Did you mean (\S+)\?", said)
            assert pointed in ([], ["--sampling-rate"]), f"{word} has no twin in {name}, and is sent to {pointed}"


def outcome_or_refusal(name, word, value, capsys) -> Any:
    try:
        return outcome(name, [flag(word), value])
    except SystemExit:
        return capsys.readouterr().err


@pytest.mark.parametrize("name", [*OF_FRAME, "epsilon"])
@pytest.mark.parametrize("word", NOISE)
def test_a_word_for_noise_is_taken_or_leads_to_the_commands_own(word, name, capsys):
    result, own = outcome_or_refusal(name, word, "0.5", capsys), known(name)
    if word in own:
        assert "must be an option" not in str(result)
        return
    (pointed,) = re.findall(r"Did you mean --(\S+)\?", result) or [None]
    of_noise = own & {*NOISE, "target_epsilon"}
    assert (pointed is not None and pointed.replace("-", "_") in of_noise) if of_noise else pointed is None
    is_other_noise = word != "sigma" and pointed not in (None, "target-epsilon")
    assert ("another unit" in result) == is_other_noise, "a multiplier is no standard deviation"


def methods_of(experiment):
    """The names that an experiment has for methods."""
    for field in dataclasses.fields(experiment.base):
        kinds = typing.get_type_hints(type(getattr(experiment.base, field.name)))
        if "method" in kinds:
            return typing.get_args(kinds["method"])
    return ()


@pytest.mark.parametrize("name", OF_FRAME)
def test_methods_have_one_name_which_all_take_in_any_case(name):
    """And `jaxfl epsilon` has every method of the audit and the comparison that it accounts for."""
    for method in methods_of(OF_FRAME[name]):
        plain = method.lower().replace("_", "-")
        assert outcome(name, ["--method", plain]) == outcome(name, ["--method", method])
        alike = [one for one in METHODS if letters(one) == letters(method)]
        assert alike in ([], [method])
        if alike:
            for word in (method, plain):
                assert outcome("epsilon", ["--method", word])["method"] == method
    if name == "audit":
        assert {*methods_of(OF_FRAME[name])} <= {*METHODS}
    if name == "comparison":
        assert {*METHODS} <= {*methods_of(OF_FRAME[name])}


@pytest.mark.parametrize(("word", "method"), [("fedavg", "DPFL"), ("DP-SGD", "DPFL"), ("gradient-tracking", "DP-GT")])
def test_a_usual_name_of_a_method_is_taken(word, method):
    assert outcome("epsilon", ["--method", word])["method"] == method


@pytest.mark.parametrize(
    ("name", "words", "wrong", "meant"),
    [
        *((name, ["--itertions", "3"], "--itertions", "--iterations") for name in ("plan", "privsgp_vr", "epsilon")),
        *((name, ["--label", "y"], "--label", "--label-column") for name in ("plan", "privsgp_vr", "dzofl")),
        ("plan", ["--labels", "y"], "--labels", "--label-column"),
        ("epsilon", ["--participation-rate", "0.1"], "--participation-rate", "--num-active"),
        ("data", ["a.csv", "--label", "y"], "--label", "--label-column"),
        *((name, ["--epsilons", "3"], "--epsilons", "--epsilon") for name in ("plan", "privsgp_vr", "epsilon")),
        ("epsilon", ["--epochs", "1"], "--epochs", "--local-steps"),
        ("epsilon", ["--local-iterations", "1"], "--local-iterations", "--local-steps"),
        ("epsilon", ["--target-delta", "1"], "--target-delta", "--dp-delta"),
        ("epsilon", ["--clients-per-round", "5"], "--clients-per-round", "--num-active"),
        ("epsilon", ["--l2-norm-clip", "1"], "--l2-norm-clip", "--clip-norm"),
        ("privsgp_vr", ["--output-dir", "a"], "--output-dir", "--out"),
        ("epsilon", ["--sigma", "1"], "--sigma", "--noise-multiplier"),
        ("epsilon", ["--batchsize=8"], "--batchsize", "--batch-size"),
        ("epsilon", ["--method", "PrivSPG"], "--method", "PrivSGP"),
        ("report", ["run", "--figure", "pdf"], "--figure", "--figures"),
        ("privsgp_vr", ["--grid", "itertions=3,4"], "itertions", "--iterations"),
        ("privsgp_vr", ["--set", "itertions=3"], "--set", "iterations"),
        ("privsgp_vr", ["--method", "PrivSPG"], "method", "PrivSGP"),
        ("ali_dpfl", ["--noise-std", "1"], "--noise-std", "--noise-multiplier"),
        ("comparison", ["--noise-std", "1"], "--noise-std", "--target-epsilon"),
    ],
)
def test_a_wrong_word_leads_to_the_right_one(name, words, wrong, meant, capsys):
    said = refusal(name, words, capsys)
    assert re.match(rf"(error: )?{re.escape(wrong)}: ", said), said
    assert f"Did you mean {meant}?" in said, said


@pytest.mark.parametrize("name", OF_FRAME)
def test_a_method_of_another_experiment_leads_there(name):
    """In any case, by every way to give it; a word that is no method anywhere leads nowhere."""
    own, commands = methods_of(OF_FRAME[name]), {one: methods_of(other) for one, other in EXPERIMENTS.items()}
    for method in ("fedprox", "DPFL", "DP-GT", "PrivSGP"):
        having = [one for one, known in commands.items() if chosen(method, known)]
        assert having
        for words in (["--method", method], ["--grid", f"method={method}"]):
            if own and not chosen(method, own):
                said = sentence(name, words)
                assert all(f"python -m experiments.{one}" in said for one in having), said
                assert "python -m" not in sentence(name, [word.replace(method, "FedNothing") for word in words])


def sentence(name, words):
    """The error that the command line prints."""
    with pytest.raises(ArgumentError) as caught:
        command_line.parse(OF_FRAME[name], words)
    return command_line._sentence(OF_FRAME[name], caught.value, words)


@pytest.mark.parametrize(
    ("name", "words", "apart"),
    [
        ("plan", ["--epsilon", "1,3,8"], "1 3 8"),
        ("privsgp_vr", ["--hidden", "32,64"], "32 64"),
        ("privsgp_vr", ["--seeds", "0,1"], "0 1"),
        ("privsgp_vr", ["--baselines", "alone,pooled"], "alone pooled"),
        ("privsgp_vr", ["--method", "PrivSGP,ED"], "PrivSGP ED"),
        ("epsilon", ["--samples", "30,40"], "30 40"),
    ],
)
def test_values_with_commas_lead_to_spaces(name, words, apart, capsys):
    assert refusal(name, words, capsys).rstrip("\n").endswith(f"Separate values by spaces: {apart}.")


@pytest.mark.parametrize("words", [["--sites", "9", "--clients", "8"], ["--rounds", "3", "--rounds=5"]])
def test_an_option_is_taken_once_by_whichever_names(words, capsys):
    said = refusal("epsilon", words, capsys)
    assert re.match(rf"error: {words[2].partition('=')[0]}: must be given once; got {words[0]} as well", said), said


def test_a_misspelt_option_is_named_before_a_missing_one(capsys):
    said = refusal("epsilon", ["--samples", "9", "--bacth", "3"], capsys)
    assert said.startswith("error: --bacth: must be an option")
    assert "--sites, --batch, --rounds: must be given" in refusal("epsilon", ["--samples", "9"], capsys)


def test_a_grid_and_a_file_take_the_same_words(tmp_path):
    (tmp_path / "grid.csv").write_text("sites,rounds\n8,3\n9,4\n")
    axis = [{"nodes": (8, 9), "iterations": (3, 4)}]
    for words in (["--grid", "sites=8,9", "rounds=3,4"], ["--grid-file", str(tmp_path / "grid.csv")]):
        assert command_line.parse(EXPERIMENTS["privsgp_vr"], words)[0].grid[0] == axis[0]
    ((drawn,),) = [command_line.parse(EXPERIMENTS["privsgp_vr"], ["--sample", "epsilon=1:3"])[0].grid[:1]]
    assert [*drawn] == ["target_epsilon"]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("version", "--version"),
        ("help", "--help"),
        ("PrivSGP-VR", "privsgp_vr"),
        ("reports", "report"),
        ("plans", "plan"),
    ],
)
def test_a_command_that_is_none_leads_to_one(written, meant, capsys):
    assert main([written]) == 2
    assert f"Did you mean {meant}? " in capsys.readouterr().err


def test_a_choice_that_is_none_leads_to_one():
    with pytest.raises(ArgumentError, match="Did you mean gaussian"):
        one_of(("laplace", "gaussian"), distribution="guassian")
