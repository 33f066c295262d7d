"""`jaxfl epsilon` says what runs state, meets its targets, and does without JAX."""

import json
import re
import subprocess
import sys

import pytest

from experiments.ali_dpfl import options as of_clients
from experiments.ali_dpfl.spending import privacy_of as clients_privacy
from experiments.dp_gradient_tracking import options as of_tracking
from experiments.dp_gradient_tracking.budgets import privacy_of as tracking_privacy
from experiments.privsgp_vr import options as of_gossip
from experiments.privsgp_vr.spending import privacy_of as gossip_privacy
from jaxfl import command
from jaxfl.frame import override
from jaxfl.privacy.shared import effective_noise, key_graph

RUN = {"sites": 4, "samples": 120, "batch": 12, "rounds": 20}
GOSSIP = ("PrivSGP-VR", "PrivSGP", "DP2-SGD", "A(DP)2SGD", "QG-DSGDm", "ED")
TRACKING = "DP-GT"
PAIRS = {"trust": "pairs", "shared_ratio": 2.0}


def words(method, **more):
    given = {"sites": 4, "rounds": 20} if method == "DP-FedAvg" else RUN
    given = {**given, "graph": "star"} if method == TRACKING else given
    pairs = {"method": method, **given, **more}
    return ["epsilon", *(word for name, value in pairs.items() for word in (f"--{name.replace('_', '-')}", str(value)))]


def answered(capsys, method, **more):
    assert command.main([*words(method, **more), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def of_run(method):
    """The statements of a run of 4 sites, 20 rounds, noise multiplier 1.5 and clip norm 0.5."""
    if method in GOSSIP:
        options = {"method": method, "iterations": 20, "nodes": 4, "batch_size": 12, "clip_norm": 0.5}
        options |= {"target_epsilon": float("inf"), "graph": "ring"}
        config = override(of_gossip.Configuration(), {**options, "noise_std": 1.5 * 0.5 / 12})
        return gossip_privacy(config, [120] * 4)(20)
    if method == TRACKING:
        options = {"iterations": 20, "nodes": 4, "batch_size": 12, "clip_norm": 0.5, "graph": "star"}
        options |= {
            name: getattr(of_tracking.scheme_steps("S1", 20), name) for name in ("state_mixing", "tracker_mixing")
        }
        config = override(of_tracking.Configuration(), {**options, "step_size": 0.3, "noise_gain": 1.5 * 0.5})
        return tracking_privacy(config, [120] * 4)(20)
    options = {"method": method, "rounds": 20, "nodes": 4, "batch_size": 12, "clip_norm": 0.5}
    options |= {"noise_multiplier": 1.5, "local_steps": 3, "max_iterations": 60, "num_active": 2}
    options |= {"update_noise_multiplier": 1.5, "update_clip_norm": 0.5}
    ran = {} if method == "DP-FedAvg" else {"local_iterations": 60}
    ran |= {"estimate_releases": 20} if method == "ALI-DPFL" else {}
    stated = clients_privacy(override(of_clients.Configuration(), options), [120] * 4)
    assert stated is not None
    return stated(20, **ran)


@pytest.mark.parametrize("method", command.METHODS)
def test_it_is_what_a_run_states(capsys, method):
    more = {"DP-FedAvg": {"active": 2}} | {one: {"local_steps": 3} for one in ("DPFL", "ALI-DPFL", "SCAFFOLD")}
    own = more.get(method, {"step_size": 0.3} if method == TRACKING else {})
    actual = answered(capsys, method, noise_multiplier=1.5, clip_norm=0.5, **own)
    assert actual["statements"] == json.loads(json.dumps(of_run(method)))
    divisor = 12 if method in GOSSIP else 1
    assert actual["noise_gain" if method == TRACKING else "noise_std"] == pytest.approx(1.5 * 0.5 / divisor)


@pytest.mark.parametrize("method", command.METHODS)
def test_the_least_noise_meets_the_target_and_less_does_not(capsys, method):
    def proven(actual):
        of_proofs = [one["dp_epsilon"] for one in actual["statements"] if one["bound"] == "proven"]
        return of_proofs[-1 if method == TRACKING else 0]  # at delta; of the main relation

    actual = answered(capsys, method, target=2.5)
    assert 2.49 < proven(actual) <= 2.5
    less = answered(capsys, method, noise_multiplier=0.997 * actual["noise_multiplier"])
    assert proven(less) > 2.5


@pytest.mark.parametrize("method", ["DPFL", "DP-FedAvg", "PrivSGP"])
def test_a_printed_multiplier_given_back_keeps_the_epsilon(capsys, method):
    assert command.main(words(method, target=2.5)) == 0
    (multiplier,) = {*re.findall(r"noise multiplier (\S+?),? ", capsys.readouterr().out)}
    again = answered(capsys, method, noise_multiplier=multiplier)["statements"]
    assert 2.49 < next(one["dp_epsilon"] for one in again if one["bound"] == "proven") <= 2.5


@pytest.mark.parametrize("method", command.METHODS)
def test_the_noise_itself_may_stand_in_place_of_its_multiplier(capsys, method):
    by_multiplier = answered(capsys, method, noise_multiplier=1.5, clip_norm=0.5)
    name = "noise_gain" if method == TRACKING else "noise_std"
    by_noise = answered(capsys, method, clip_norm=0.5, **{name: by_multiplier[name]})
    assert by_noise["noise_multiplier"] == pytest.approx(1.5, rel=1e-12)
    epsilons = [[one["dp_epsilon"] or 0 for one in found["statements"]] for found in (by_noise, by_multiplier)]
    assert epsilons[0] == pytest.approx(epsilons[1], rel=1e-9)


def test_noise_in_pairs_states_what_a_run_states(capsys):
    actual = answered(capsys, "PrivSGP", noise_multiplier=1.5, clip_norm=0.5, key_graph="ring", **PAIRS)
    options = {"method": "PrivSGP", "iterations": 20, "nodes": 4, "batch_size": 12, "clip_norm": 0.5, "graph": "ring"}
    options |= {"target_epsilon": float("inf"), "noise_std": 1.5 * 0.5 / 12, "key_graph": "ring", **PAIRS}
    config = override(of_gossip.Configuration(), options)
    assert actual["statements"] == json.loads(json.dumps(gossip_privacy(config, [120] * 4)(20)))
    assert actual["statements"][1]["observer"] == "any one other node"
    effective = effective_noise(key_graph("ring", 4), ratio=2.0).noise[0]
    assert actual["own_noise_std"] == pytest.approx(actual["noise_std"] / effective)
    assert actual["shared_noise_std"] == pytest.approx(2 * actual["own_noise_std"])
    assert command.main(words("PrivSGP", noise_multiplier=1.5, **PAIRS)) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "of a site's own" in text
    assert "proven against any one other node" in text


def test_bound_and_relation_choose_what_the_target_is_for(capsys):
    actual = answered(capsys, "PrivSGP-VR", target=2.5, bound="published")
    assert 2.4999 < actual["statements"][0]["dp_epsilon"] <= 2.5
    actual = answered(capsys, "DPFL", target=2.5, relation="replace_one")
    (stated,) = actual["statements"]
    assert stated["neighboring_relation"] == "replace_one"
    assert 2.49 < stated["dp_epsilon"] <= 2.5


def test_samples_of_each_site_are_counted_by_themselves(capsys):
    given = words("DPFL", noise_multiplier=1.5)
    at = given.index("--samples") + 1
    command.main([*given[:at], "60", "120", "240", "480", *given[at + 1 :], "--json"])
    smallest_first = json.loads(capsys.readouterr().out)["statements"][1]["node_epsilons"]
    assert smallest_first == sorted(smallest_first, reverse=True)
    assert len(set(smallest_first)) == 4


def test_the_text_has_the_noise_every_epsilon_and_what_it_rests_on(capsys):
    assert command.main(words("DP-FedAvg", noise_multiplier=2, clip_norm=0.5)) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "noise multiplier 2 at clip norm 0.5: standard deviation 1 on the server's sum of updates" in text
    assert "proven against all other clients, but not the server (zero out one client, δ = 1e-05; " in text
    assert "every client's whole update is clipped to the L2 norm 0.5" in text


@pytest.mark.parametrize("method", command.METHODS)
def test_what_has_no_epsilon_rests_on_nothing(capsys, method):
    """Without noise no statement has an epsilon, and none is said to rest on assumptions."""
    assert command.main(words(method, noise_multiplier=0)) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "no proven ε" in text
    assert "rests on" not in text
    assert "clipped to" not in text


@pytest.mark.parametrize(
    ("method", "more", "sentence"),
    [
        ("DPFL", {"clip_norm": 1e-21, "target": 1}, "--clip-norm: must lie between 1e-12 and 1.8e+19"),
        ("DPFL", {"batch": 121, "target": 1}, "--batch: must be at most the client's samples"),
        ("PrivSGP", {"batch": 121, "target": 1}, "--batch: must be at most the node's entries"),
        ("DPFL", {"noise_multiplier": -1}, "--noise-multiplier: must be non-negative"),
        ("PrivSGP", {"noise_multiplier": "nan"}, "--noise-multiplier: must be non-negative and finite"),
        ("PrivSGP-VR", {"noise_multiplier": 1e300}, "--noise-multiplier: must lie between"),
        ("DPFL", {"target": 0}, "--target: must be positive"),
        ("DPFL", {"target": 1, "delta": 1}, "--delta: must lie strictly between 0 and 1"),
        ("DPFL", {}, "--noise-multiplier: or --epsilon must be given"),
        ("DPFL", {"noise_gain": 1}, "--noise-gain: must be the noise that DPFL has"),
        ("PrivSGP", {"noise_std": -1, "clip_norm": 2}, "--noise-std: must be non-negative"),
        ("PrivSGP", {"noise_std": 0.1}, "--clip-norm: must be given with --noise-std; got none"),
        (TRACKING, {"noise_gain": 1}, "--clip-norm: must be given with --noise-gain; got none"),
        ("DPFL", {"target": 1, "sites": 0}, "--sites: must be an integer of at least 1"),
        ("DPFL", {"target": 1, "sampler": "fixed"}, "--sampler: must be 'poisson'"),
        ("PrivSGP", {"target": 1, "bound": "published"}, "--bound: must exist"),
        ("PrivSGP", {"target": 1, "relation": "zero_out_client"}, "--relation: must be replace_one or zero_out"),
        ("ALI-DPFL", {"target": 0.1}, "--constants-noise: must leave 20 estimates"),
        ("DP-FedAvg", {"target": 1, "samples": 120}, "--samples: does not count"),
        ("DP-FedAvg", {"target": 1, "active": 5}, "--active: must be at most --sites"),
        (
            "DP-FedAvg",
            {"target": 1, "active": 2, "sampler": "fixed"},
            "--bound: must exist to be proven for these releases; A fixed number of clients",
        ),
        (
            "DP-FedAvg",
            {"target": 1, "bound": "published"},
            "--bound: must be stated for these releases",
        ),
        ("DPFL", {"target": 1, "graph": "ring"}, "--graph: belongs to DP-GT"),
        ("PrivSGP", {"target": 1, "local_steps": 5}, "--local-steps: belongs to DPFL and ALI-DPFL"),
        ("A(DP)2SGD", {"target": 1, "trust": "pairs"}, "--trust: belongs to PrivSGP and PrivSGP-VR and DP2-SGD"),
        ("PrivSGP", {"target": 1, "colluding": 1}, "--colluding: belongs to --trust pairs"),
        ("PrivSGP", {"target": 1, "trust": "pairs"}, "--shared-ratio: must be given with --trust pairs"),
        ("PrivSGP", {"target": 1, "trust": "pairs", "shared_ratio": -1}, "--shared-ratio: must be a number from 0"),
        ("PrivSGP", {"target": 1, **PAIRS, "colluding": 4}, "--colluding: must leave one of 4 nodes honest"),
        (
            "PrivSGP",
            {"target": 1, **PAIRS, "key_graph": "chain"},
            "--key-graph: must be one of ring, exponential, complete; got 'chain'",
        ),
        (TRACKING, {"target": 1, "graph": "rings"}, "--graph: must be one of five_agents"),
        (TRACKING, {"target": 1, "graph": "five_agents"}, "--sites: must be 5 for five_agents"),
        (TRACKING, {"target": 1, "batch": 121}, "--samples: must be an integer of at least 121"),
        (TRACKING, {"target": 1, "rounds": 20000}, "--rounds: must be at most 10,000"),
        (TRACKING, {"target": 1, "sampler": "poisson"}, "--sampler: must be fixed"),
        (TRACKING, {"target": 1, "step_size": 0}, "--step-size: must be positive"),
        (TRACKING, {"target": 1, "distribution": "gaussian", "bound": "published"}, "--bound: must exist"),
        ("DPFL", {"target": "x"}, "--epsilon/--target-epsilon/--target: invalid float value"),
        ("DPFL", {"target": 1, "noise_multiplier": 1}, "--noise-multiplier: not allowed with"),
        ("DPFL", {"target": 1, "epochs": 1}, "--epochs: must be an option of jaxfl epsilon"),
    ],
)
def test_a_wrong_value_ends_with_one_sentence(capsys, method, more, sentence):
    try:
        code = command.main(words(method, **more))
    except SystemExit as left:
        code = left.code
    message = capsys.readouterr()
    assert (code, message.out, message.err.count("\n")) == (2, "", 1)
    assert message.err.startswith(f"error: {sentence}")


@pytest.mark.parametrize(("rows", "is_terminal"), [(10, True), (500, True), (10, False)])
def test_an_answer_out_of_sight_of_a_terminal_stands_last_too(rows, is_terminal, capsys, monkeypatch):
    monkeypatch.setenv("LINES", str(rows))
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    assert command.main(words("PrivSGP", noise_multiplier=2.0)) == 0
    printed = capsys.readouterr().out.splitlines()
    claims = [line for line in printed if line.startswith("ε = ")]
    assert len(claims) > 1
    is_repeated = printed[-len(claims) // 2 :] == claims[: len(claims) // 2]
    assert is_repeated == (rows < len(printed) and is_terminal)


@pytest.mark.parametrize("method", ["DPFL", "DP-FedAvg", "PrivSGP-VR", TRACKING])
def test_neither_jax_nor_anything_slow_is_imported(method):
    code = f"import sys; from jaxfl import command; assert command.main({words(method, target=2.5)!r}) == 0;"
    code += " slow = {'jax', 'scipy.stats', 'scipy.signal', 'dp_accounting', 'tyro', 'rich'} & set(sys.modules);"
    code += " assert not slow, slow"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)


def test_several_values_of_one_option_are_named_with_it(capsys):
    with pytest.raises(SystemExit):
        command.main([*words("PrivSGP"), "--epsilon", "1", "3"])
    assert capsys.readouterr().err.startswith("error: --epsilon: must have one value; got 1 3. Pass one")
