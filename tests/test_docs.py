"""Every code block of the documents runs as printed, those of a document one after the other."""

import functools
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxfl

DOCS = Path(__file__).parent.parent / "docs"
TEXTS = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md"))}


# Their learners, each of a program of its own, have quick tests in tests/algorithms and tests/privacy.
DEAR = ("clients.md", "finite_precision.md")
RUN = [pytest.param(name, marks=pytest.mark.slow if name in DEAR else ()) for name in TEXTS]


# Neither jaxfl nor its tests need these: a block that imports one runs where it is installed.
OTHERS = ("equinox", "haiku")


@functools.cache
def names_of(document):
    """Names that the code blocks of a document define."""
    defined: dict[str, Any] = {"__name__": "docs"}
    for block in re.findall(r"```python\n(.*?)```", TEXTS[document], flags=re.S):
        if not any(f"import {name}" in block and find_spec(name) is None for name in OTHERS):
            exec(compile(block, document, "exec"), defined)
    return defined


@pytest.mark.parametrize("document", RUN)
def test_every_code_block_runs(document):
    assert names_of(document)


def test_the_skeleton_learns():
    loss = names_of("new_algorithm.md")["info"].loss
    assert loss[-10:].mean() < 0.1 * loss[:10].mean()


def test_the_row_of_the_skeleton_makes_its_example():
    names = names_of("new_algorithm.md")
    assert names["row"].example(lambda hidden: names["task"]).arguments


def test_the_experiment_of_the_skeleton_takes_grids():
    from jaxfl.frame.command_line import parse

    experiment = names_of("new_algorithm.md")["EXPERIMENT"]
    query, _ = parse(experiment, ["--grid", "step_size=0.1,0.2", "--seeds", "0", "1", "--num-train", "200"])
    prepared = experiment.prepare(query.rows)
    assert [dict(case.numbers) for case in prepared.cases.values()] == [{"step_size": 0.1}, {"step_size": 0.2}]
    assert len({case.algorithm for case in prepared.cases.values()}) == 1


def test_the_trained_module_of_the_document_is_that_of_the_run():
    names = names_of("own_model.md")
    np.testing.assert_allclose(names["logits"], names["task"].logits(names["variables"], names["inputs"]), rtol=1e-6)


def test_models_of_every_library_learn_under_a_clip_norm():
    learned = names_of("own_model.md")["learned"]
    assert set(learned) >= {"attention", "LoRA", "linen"} | {name for name in OTHERS if find_spec(name)}
    for library, (first, last) in learned.items():
        assert last < 0.95 * first, library


def test_fine_tuning_beats_the_pretrained_network_and_training_from_scratch():
    names = names_of("fine_tuning.md")
    after = {name: float(accuracies.mean()) for name, accuracies in names["after"].items()}
    assert min(after["LoRA"], after["whole"]) > 0.1 + max(names["before"], after["scratch"])
    (proven,) = [one for one in names["statements"] if (one.bound, one.neighboring_relation) == ("proven", "zero_out")]
    assert proven.dp_epsilon <= 2.0
    assert proven.observer in TEXTS["fine_tuning.md"].replace("\n", " ")


def test_the_sweep_in_python_leaves_a_row_a_point_and_seed():
    assert len(names_of("training.md")["rows"]) == 6
    assert {row["status"] for row in names_of("training.md")["rows"]} == {"finished"}


@pytest.mark.slow
def test_clients_of_every_kind_learn():
    """By half with noise, by much more without; what hides whole clients hides them."""
    names = names_of("clients.md")
    for kind, share in {
        "plain": 0.1,
        "decayed": 0.1,
        "growing": 0.5,
        "private": 0.5,
        "embraced": 0.2,
        "shared": 0.2,
    }.items():
        loss = names[kind].loss
        assert loss[-5:].mean() < share * loss[:1].mean(), kind


@pytest.mark.slow
def test_clients_of_the_document_are_private():
    """Their epsilon counts the steps that ran. Clients whose updates are hidden take part by chance."""
    names = names_of("clients.md")
    assert names["private"].local_iterations.tolist() == [5] * 20
    assert 1 < names["statement"].dp_epsilon < 20
    assert len(set(names["hidden"].active.sum(axis=1).tolist())) > 2
    assert names["hidden"].clipped_updates.sum() > 0


def test_costs_of_the_document_are_the_same_traced_and_on_the_host():
    """2410 parameters and a weight go to one neighbor in each of 20 rounds; the phone is slower."""
    names = names_of("costs.md")
    for traced, on_host in zip(names["costs"], names["totals"], strict=True):
        np.testing.assert_allclose(traced, on_host, rtol=1e-5)
    operations = 64 * 32 + 32 + 32 + 32 * 10 + 10
    np.testing.assert_allclose(names["totals"].operations, 8 * 16 * 3 * operations)
    airtime = 32 * 2411 / 2e6 + 32 * 2411 / 10e6
    np.testing.assert_allclose(names["totals"].simulated_seconds, 16 * 3 * operations / 4e9 + airtime)
    assert names["of_clients"].forward.operations.tolist() == [operations, *[64 * 32 + 32 + 32] * 2]
    assert names["on_phone"].gradient.simulated_seconds > names["ledger"].gradient.simulated_seconds


def test_push_sum_over_links_of_the_document_converges_where_mass_is_kept():
    curves = names_of("links.md")["curves"]
    means = {
        name: [float(actual[part].mean()) for part in (slice(90, 100), slice(900, 1000))]
        for name, (actual, _) in curves.items()
    }
    assert means["nothing lost"][1] < 0.01
    assert means["30 % lost, mass kept"][1] < min(0.03, 0.25 * means["30 % lost, mass kept"][0])
    assert not means["30 % lost, naive"][0] < 1
    masses = {name: float(mass[99]) for name, (_, mass) in curves.items()}
    assert masses["30 % lost, naive"] < 1e-5 < 7.999 < masses["30 % lost, mass kept"] < 8.001


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_document_links_to_exists(name):
    paths = re.findall(r"\]\(([^)#:]+)\)", TEXTS[name])
    paths += re.findall(r"`((?:jaxfl|experiments|tests)/[\w/]+\.py)`", TEXTS[name])
    of_the_reader = "momentum_gossip"
    for path in paths:
        assert of_the_reader in path or (DOCS / path).exists() or (DOCS.parent / path).exists(), path


@pytest.mark.parametrize("path", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_on_the_site_with_its_outputs(path):
    """The gate executes it where it builds the site; readers of the repository see what was stored."""
    assert f"docs/notebooks/{path.name}" in (DOCS.parent / ".ci/mkdocs.yml").read_text()
    assert path.stat().st_size < 60_000
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert "%pip install" in "".join(cells[0]["source"])
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        shown = {kind for output in cell["outputs"] for kind in output.get("data", {"text": output.get("text")})}
        for call, kind in {"print(": "text", "plt.show()": "image/png"}.items():
            lines = [line for line in cell["source"] if line.startswith((call, f"    {call}"))]
            assert kind in shown or not lines, lines
        assert not {"stderr", "error"} & {output.get("name", output["output_type"]) for output in cell["outputs"]}


def test_the_newest_version_of_the_changelog_is_that_of_the_package():
    versions = re.findall(r"^## (\d+\.\d+\.\d+), 20\d\d-\d\d-\d\d$", TEXTS["CHANGELOG.md"], re.MULTILINE)
    assert versions[0] == jaxfl.__version__
    assert versions == sorted(versions, reverse=True)
    assert f"\nversion: {versions[0]}\n" in (DOCS / "CITATION.cff").read_text()


def test_what_guards_a_fixed_fault_is_there():
    tests = {path.name: path.read_text() for path in (DOCS.parent / "tests").rglob("*.py")}
    defined = {name for text in tests.values() for name in re.findall(r"(?:def|class) (\w+)", text)}
    rows = [
        line.split(" | ")[-1] for line in TEXTS["CHANGELOG.md"].partition("## Faults")[2].splitlines() if " | " in line
    ]
    for guard in [name for row in rows for name in re.findall(r"`((?:\w+/)*[tT]est\w+(?:\.py)?)`", row)]:
        assert guard in defined or Path(guard).name in tests or (DOCS.parent / guard).exists(), guard


def test_a_round_over_devices_runs():
    """On as many as there are."""
    names = names_of("devices.md")
    assert int(names["state"].round_index) == 1
    assert names["state"].params.sharding.spec[0] == "nodes"
