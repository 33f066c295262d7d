"""Baselines: rows that every experiment's own table makes of rows; their names, statements and numbers."""

import contextlib
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import leave_undrawn, refused
from problems import small_task, uneven_data
from test_every_experiment import EXPERIMENTS, TRAINED, quick, run, small, words

import jaxfl
from jaxfl import graphs
from jaxfl.core.tree import replicate
from jaxfl.frame import flat
from jaxfl.frame.command_line import parse
from jaxfl.training.run_directory import slug


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("privsgp_vr", "--method PrivSGP --baselines alone pooled", ["alone", "pooled"]),
        (
            "privsgp_vr",
            "--baselines alone without_noise",
            [f"{method}, {label}" for label in ("alone", "without_noise") for method in ("PrivSGP-VR", "PrivSGP")],
        ),
        # one row of all budgets, for none of them counts there; each site by itself pays its own
        ("privsgp_vr", "--method PrivSGP --grid target_epsilon=1,8 --baselines pooled", ["pooled"]),
        (
            "privsgp_vr",
            "--method PrivSGP --grid target_epsilon=1,8 --baselines alone",
            ["PrivSGP, ε = 1, alone", "PrivSGP, ε = 8, alone"],
        ),
        ("dp_gradient_tracking", "--baselines alone", ["DP-GT, S1, alone", "DP-GT, S2, alone"]),
        ("dp_gradient_tracking", "--scheme S1 --grid method=noisy-states,DP-GT --baselines alone", ["alone"]),
        ("ali_dpfl", "--grid local_steps=1,5 --baselines alone", ["DPFL, τ = 1, alone", "DPFL, τ = 5, alone"]),
        # without a budget there is no epsilon to have; rows of one budget share it, whatever they mix
        (
            "privsgp_vr",
            "--grid target_epsilon=1,8 --grid mixings=1,4 --baselines curator",
            ["ε = 1, curator", "ε = 8, curator"],
        ),
        ("dp_gradient_tracking", "--scheme S2 --grid method=DP-GT,noisy-states --baselines curator", ["curator"]),
        (
            "ali_dpfl",
            "--grid method=ALI-DPFL,DPFL --local-steps 2 --constants private --baselines curator",
            ["DPFL, curator"],
        ),
        ("dzofl", "--baselines alone pooled", ["FedAvg, alone", "FedAvg, pooled"]),
        ("embracing_fl", "--baselines alone pooled", ["alone", "pooled"]),
        ("embracing_fl", "--grid case=7,9 --baselines alone", ["case 7, alone", "case 9, alone"]),
        ("similarity", "--scheme output_side --baselines alone", ["alone"]),
    ],
)
def test_rows_and_names(name, arguments, expected):
    query = parse(EXPERIMENTS[name], arguments.split())[0]
    assert [row for row, made in query.rows.items() if made.baseline] == expected
    plain = parse(EXPERIMENTS[name], arguments.partition("--baselines")[0].split())[0]
    assert {row: made for row, made in query.rows.items() if not made.baseline} == plain.rows


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("privsgp_vr", "--noise-std 0 --baselines without_noise", ("no noise", "Pass --target-epsilon")),
        ("dp_gradient_tracking", "--noise-gain 0 --baselines without_noise", ("no noise", "Pass --target-epsilon")),
        ("ali_dpfl", "--method ALI-DPFL --baselines without_noise", ("exists for none", ". Leave it out")),
        ("privsgp_vr", "--noise-std 0.1 --baselines curator", ("exists for none",)),
    ],
)
def test_rows_that_would_be_the_compared_ones_are_refused(name, arguments, words):
    refused(lambda: parse(EXPERIMENTS[name], arguments.split()), "baselines", *words)


def test_pooled_takes_as_many_samples_as_all_nodes():
    query = parse(EXPERIMENTS["privsgp_vr"], ["--method", "PrivSGP", "--baselines", "pooled"])[0]
    before, pooled = (flat(row.config) for row in query.rows.values())
    assert (pooled["nodes"], pooled["batch_size"]) == (1, before["nodes"] * before["batch_size"])
    changed = {name for name in before if before[name] != pooled[name]}
    assert changed == {"nodes", "batch_size", "graph", "noise_std", "target_epsilon"}


@pytest.mark.parametrize("name", quick([name for name in TRAINED if EXPERIMENTS[name].baselines], "privsgp_vr"))
def test_each_runs_with_its_statements(name, tmp_path, monkeypatch):
    """Each site by itself has the epsilon of the row that it is of; without noise there is none."""
    leave_undrawn(monkeypatch)
    labels = list(EXPERIMENTS[name].baselines)
    changes = small(EXPERIMENTS[name])
    changes |= {"ali_dpfl": {"method": "DPFL", "local_steps": 2}, "dzofl": {"method": "FedAvg"}}.get(name, {})
    changes |= {"similarity": {"scheme": "output_side"}}.get(name, {})
    changes |= {"comparison": {"method": "PrivSGP", "step_size": 0.1}}.get(name, {})
    for option in ("noise_std", "constants"):  # calibrated, and of ALI-DPFL alone
        changes.pop(option, None)
    arguments = [*words(changes), "--seeds", "0", "--baselines", *labels, "--out", str(tmp_path / "run")]
    is_watched = name == "privsgp_vr"  # the frame does that for all
    arguments += ["--track", "tensorboard", "--profile"] if is_watched else []
    with contextlib.redirect_stdout(io.StringIO()):
        assert run(name, *arguments) == 0
    cases = json.loads((tmp_path / "run" / "summary.json").read_text())["cases"]
    (source,) = (row for case, row in cases.items() if case not in labels)
    assert {*cases} >= {*labels}
    if is_watched:
        tracked = {path.name for path in (tmp_path / "run" / "tensorboard").iterdir()}
        assert tracked == {f"{slug(case)}-seed-0" for case in cases}
        assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    for label in labels:
        epsilons = [each["dp_epsilon"] for each in cases[label]["privacy"]]
        if label == "alone" and name != "dp_gradient_tracking":  # without trackers less is sent
            assert epsilons == [each["dp_epsilon"] for each in source["privacy"]]
        elif label == "curator":
            asked, budget = cases[label]["privacy"][0], source["privacy"][0]
            assert asked["asked"]
            assert 0.97 * budget["dp_epsilon"] < asked["dp_epsilon"] < 1.03 * budget["dp_epsilon"]
        elif label != "alone":
            assert not any(epsilons)
        assert 0 <= cases[label]["test_accuracy"]["mean"] <= 1
        assert label != "alone" or not cases[label]["costs"]["bits_sent"]["mean"]


@pytest.mark.parametrize("name", ["privsgp_vr", "comparison"])
def test_a_curator_is_better_than_a_network_that_trusts_nobody(name, tmp_path):
    """At the same epsilon of 8 on digits: its noise is on batches of all nodes together."""
    more = ["--iterations", "60", "--target-epsilon", "8"] if name == "privsgp_vr" else ["--target-epsilon", "8"]
    more += ["--method", "PrivSGP", "--neighboring-relation", "replace_one", "--batch-size", "32", "--clip-norm", "1"]
    more += ["--step-size", "1", "--seeds", "0", "--baselines", "curator", "--evaluate-every", "60"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert run(name, *more, "--out", str(tmp_path / "run")) == 0
    cases = json.loads((tmp_path / "run" / "summary.json").read_text())["cases"]
    curator, network = cases.pop("curator"), *cases.values()
    for case in (curator, network):
        assert 0.99 * 8 < case["privacy"][0]["dp_epsilon"] <= 8
    assert curator["test_accuracy"]["mean"] > network["test_accuracy"]["mean"] + 0.05
    assert not curator["costs"]["bits_sent"]["mean"]


@pytest.mark.parametrize(
    "learner",
    [
        lambda graph: jaxfl.push_sum(small_task(), graph=graph, step_size=0.3, noise=jaxfl.gaussian(0.1)),
        lambda graph: jaxfl.dp2_sgd(small_task(), graph=graph, step_size=0.3, noise=jaxfl.gaussian(0.1)),
    ],
)
def test_on_the_isolated_graph_a_node_learns_as_if_there_were_no_other(learner):
    data, key = uneven_data((7, 3, 9)), jax.random.key(3)
    first = data._replace(indices=data.indices[:1], sizes=data.sizes[:1])
    params = []
    for part in (data, first):
        algorithm = learner(graphs.isolated(part.num_nodes))
        state = algorithm.init(key, part)
        for _ in range(3):
            state, info = jax.jit(algorithm.round)(key, state, part)
            assert not info.bits_sent.any()
        params.append(jax.tree.map(lambda leaf: leaf[0], algorithm.node_params(state)))
    for alone, among in zip(*map(jax.tree.leaves, params), strict=True):
        np.testing.assert_allclose(alone, among, rtol=1e-5, atol=1e-6)


def test_private_clients_by_themselves_are_those_that_a_server_averages():
    """In the first round their mean is the server's model; where a part is averaged they are refused."""
    data, key = uneven_data((7, 5, 9)), jax.random.key(4)
    settings = {"batch_size": 4, "optimizer": optax.sgd(0.2), "clip_norm": 1.0, "noise": jaxfl.gaussian(0.1)}
    clients = jaxfl.local_steps(3, **settings, sampler=jaxfl.gradients.poisson, weighting="uniform")
    alone = jaxfl.partial_averaging(small_task(), clients=clients, synchronized=())
    server = jaxfl.fed_avg(small_task(), clients=clients, num_active=3)
    (apart, message), (together, _) = (jax.jit(one.round)(key, one.init(key, data), data) for one in (alone, server))
    assert int(message.local_iterations) == 3
    for nodes, mean in zip(jax.tree.leaves(apart.params), jax.tree.leaves(together.params), strict=True):
        np.testing.assert_allclose(nodes.mean(axis=0), mean, rtol=1e-5, atol=1e-6)
        assert (np.abs(nodes - replicate(mean, 3)) > 1e-3).any()
        assert jnp.isfinite(nodes).all()
    with pytest.raises(jaxfl.ArgumentError, match="clients: must neither clip"):
        jaxfl.partial_averaging(small_task(), clients=clients, synchronized=("dense_2",))
