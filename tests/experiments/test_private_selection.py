"""A search with --private-selection: what is drawn, what it states of its winner, and what leaves the run."""

import json

import numpy as np
import pytest
from helpers import refused

from experiments import EXPERIMENTS
from jaxfl.frame import main
from jaxfl.frame.experiment import request
from jaxfl.frame.options import options
from jaxfl.frame.selecting import Search
from jaxfl.privacy.selection import selected_epsilon, selection

BASE = "--method PrivSGP --target-epsilon 3 --nodes 4 --num-train 128 --num-test 64 --iterations 2 --batch-size 8"
SHORT = f"{BASE} --compilation-cache off --quiet --seeds 1 --sample step-size=log:0.05:5 --num-samples 4"


def command(words):
    return main(EXPERIMENTS["privsgp_vr"], words.split())


def summary_of(path):
    return json.loads((path / "summary.json").read_text())


def test_the_winner_has_a_statement_of_its_own(tmp_path, capsys):
    run, published = tmp_path / "run", tmp_path / "out"
    words = f"{SHORT} --private-selection geometric --seed-from-os --out {run} --publish {published}"
    assert command(words) == 0
    text, summary = capsys.readouterr().out, summary_of(run)
    winner = summary["selected"]
    accuracy = {name: row["test_accuracy"]["mean"] for name, row in summary["cases"].items()}
    assert accuracy[winner["case"]] == max(accuracy.values())
    (alone,) = [one for one in summary["cases"][winner["case"]]["privacy"] if one.get("asked")]
    (paid,) = [one for one in winner["privacy"] if one["neighboring_relation"] == alone["neighboring_relation"]]
    assert alone["dp_epsilon"] <= 3 < paid["dp_epsilon"]
    assert "The choice is paid for" in text
    assert "No ε covers the choice" not in text
    assert "config.json, metrics, pictures and checkpoints stay behind" in " ".join(text.split())
    content = json.loads((published / "privacy.json").read_text())
    assert list(content["cases"]) == ["selected"]  # a name of its own would tell of the number of runs
    assert [path.name for path in (published / "parameters").iterdir()] == ["selected"]
    assert [one["dp_epsilon"] for one in content["total"]] == [one["dp_epsilon"] for one in winner["privacy"]]
    assert content["cases"]["selected"]["settings"] == winner["settings"]
    texts = [path.read_text() for path in published.rglob("*.json")]
    assert not any(winner["case"] in text for text in texts)
    files = {path: path.read_bytes() for path in run.rglob("metrics.jsonl")}
    assert command(f"{words.partition(' --publish')[0]} --resume") == 0  # its draws are the run's, and no new ones
    assert files == {path: path.read_bytes() for path in run.rglob("metrics.jsonl")}
    assert summary_of(run)["selected"] == winner


def test_draws_are_fresh_where_they_are_secret_and_of_the_seed_elsewhere():
    from jaxfl.frame.command_line import parse

    def draws(words):
        query, _ = parse(EXPERIMENTS["privsgp_vr"], f"{SHORT} --private-selection geometric {words}".split())
        return [row.config.learning.step_size for row in query.rows.values()]

    assert draws("") == draws("")
    assert len({tuple(draws("--seed-from-os")) for _ in range(8)}) == 8
    assert len({len(draws("--seed-from-os")) for _ in range(30)}) > 2
    assert all(float(f"{value:.6g}") != value for value in draws("--seed-from-os"))  # whole numbers: no two are alike


def test_the_number_of_runs_is_no_part_of_the_options():
    """Runs of many seeds: the first option that is drawn says nothing about how many are drawn."""
    table = options(type(EXPERIMENTS["privsgp_vr"].base))
    pairs = []
    for seed in range(400):
        drawn = Search(selection("geometric", 20), seed, None).draw(["step_size=0:1"], table)["step_size"]
        pairs.append((len(drawn), drawn[0]))
    assert abs(np.corrcoef(np.array(pairs).T)[0, 1]) < 5 / 400**0.5


def test_runs_that_read_alike_have_names_of_their_own():
    axes = ({"step_size": (0.12345678, 0.12345679)},)
    changes = {"method": "PrivSGP", "seed": 0}
    refused(lambda: request(EXPERIMENTS["privsgp_vr"], changes, axes), "step_size", "six digits")
    actual = request(EXPERIMENTS["privsgp_vr"], changes, axes, numbered=True)
    assert [name.rpartition(", ")[2] for name in actual.rows] == ["run 1", "run 2"]


def test_the_epsilon_is_of_the_curve_of_the_runs(tmp_path):
    """The statement's epsilon is that of the accountant at other deltas: recomputed from the release of a run."""
    from jaxfl import privacy
    from jaxfl.privacy import gossip

    run = tmp_path / "run"
    assert command(f"{SHORT} --private-selection logarithmic --out {run}") == 0
    winner = summary_of(run)["selected"]
    multiplier = float(winner["privacy"][0]["mechanism"].split("noise multiplier ")[1].split(",")[0])
    release = privacy.Release("mini_batch", "poisson", 8, 32, clip_norm=1.0, noise_std=multiplier / 8)
    for stated in winner["privacy"]:
        relation = stated["neighboring_relation"]

        def epsilon_at(dp_delta, relation=relation):
            return gossip.account(privacy.PRIVSGP, release, dp_delta=dp_delta).epsilon(2, "proven", relation)

        expected = selected_epsilon(epsilon_at, selection("logarithmic", 4), 1e-5)
        assert stated["dp_epsilon"] == pytest.approx(expected, rel=2e-3)  # the multiplier is rounded


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--seeds 0 1", "the seed varies"),
        ("--grid clip_norm=1,2", "clip_norm varies"),
        ("--sample noise-std=0.1:0.2", "epsilon depends on noise_std"),
        ("--sample nodes=2:5", "nodes takes integers"),
        ("--noise-std 0", "needs runs with a proven epsilon"),
        ("--num-samples 1", "--num-samples"),
        ("--num-samples 501", "--num-samples"),
        ("--private-selection logarithmic --num-samples 101", "--num-samples"),
        ("--sampler fixed --dp-delta 1e-20", "--dp-delta"),
        ("--private-selection poisson", "--private-selection"),
        ("--resume", "Name it by --out"),
        ("--rank-by train_loss", "measured on test samples"),
        ("--baselines alone", "baseline varies"),
    ],
)
def test_refusals(words, said, tmp_path, capsys):
    given = {word for word in words.split() if word.startswith("--")}
    usual = [f"--{part}" for part in f"{SHORT} --private-selection geometric".split("--")[1:]]
    kept = [part for part in usual if part.split()[0] not in given]
    if "noise" in words:
        kept = [part for part in kept if "target" not in part]
    out = [] if "--resume" in given else ["--out", str(tmp_path / "run")]
    assert command(" ".join([*kept, words, *out])) == 2
    actual = capsys.readouterr().err
    assert any(part in actual for part in said.split("|")), actual
    assert not (tmp_path / "run").exists()


def test_runs_whose_parameters_no_statement_covers_are_refused():
    from jaxfl.frame.command_line import parse
    from jaxfl.frame.run import prepare
    from jaxfl.frame.selecting import checked_search

    words = f"{SHORT} --private-selection geometric".split()
    query, _ = parse(EXPERIMENTS["privsgp_vr"], words)
    search = query.search
    assert search is not None
    _, cases, _ = prepare(query)
    assert checked_search(search, query.rows, cases, {})
    uncovered = {name: case._replace(final_params_are_private=False) for name, case in cases.items()}
    refused(lambda: checked_search(search, query.rows, uncovered, {}), "private_selection", "covered")


def test_a_search_without_a_result_selects_nothing():
    from jaxfl.frame.selecting import winner_of

    summary = {"cases": {"a": {"status": ["diverged"], "test_accuracy": {"mean": None}}}}
    assert winner_of(Search(selection("geometric", 4), 0, None), summary, {}, {}, ["test_accuracy"]) is None
