"""`bench card` runs through on a CPU, so that its first run on a card meets no typing error."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import EXPERIMENTS
from experiments.bench import card
from jaxfl.analysis.page_tables import Directive, read_lines, table
from jaxfl.frame import flat
from jaxfl.frame.command_line import parse


@pytest.mark.slow
def test_every_box_gives_its_numbers(tmp_path):
    numbers = card.run_call("numbers", tmp_path, small=True)
    assert json.loads((tmp_path / "card_numbers.json").read_text()) == numbers
    assert {one["box"] for one in numbers} == {box.name for box in card.CALLS["numbers"]}
    for one in numbers:
        assert "error" not in one, one
        assert one["value"] is not None
        assert "card" in one
        assert {"python", "jax", "jaxlib", "flax"} <= {name for name, message in one["versions"].items() if message}


@pytest.mark.slow
def test_results_are_files_of_a_page_and_nothing_is_trained_twice(tmp_path, monkeypatch):
    """A run that lost its table goes on from its last checkpoint, with the same lines."""
    monkeypatch.chdir(tmp_path)
    numbers = card.run_call("results", Path("out"), small=True)
    assert [(one["name"], one["trained"], one.get("error")) for one in numbers] == [
        (f"results/{name}", True, None) for name in card.RUNS
    ]
    for experiment, names in {
        "embracing_fl": ("table7_c7_embracing", "table7_c7_width_reduction"),
        "privsgp_vr": ("fig4_privsgp_vr", "fig4_privsgp"),
    }.items():
        directive = Directive.parse(f"<!-- table {'+'.join(names)} rows=method columns=rounds,test_accuracy -->")
        assert directive is not None
        heading, _, *rows = table(directive, Path("out", experiment))
        assert heading.startswith("| method |")
        assert len(rows) == 2
        assert all([line["round"] for line in read_lines(name, Path("out", experiment))] == [0, 2, 4] for name in names)

    def content(folder):
        return {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}

    runs, files, again = content("runs"), content("out"), Path("runs/card_small/table7_c7_embracing/results.csv")
    shutil.rmtree("out")
    again.unlink()
    numbers = card.run_call("results", Path("out"), small=True)
    assert [one["trained"] for one in numbers] == [True, False, False, False]
    unchanged = [path for path in runs if path.name in ("metrics.jsonl", "end.json", "results.csv")]
    assert {path: content("runs")[path] for path in unchanged} == {path: runs[path] for path in unchanged}
    pages = {path: text for path, text in files.items() if len(path.parts) == 3}
    assert {path: text for path, text in content("out").items() if len(path.parts) == 3} == pages


@pytest.mark.slow
def test_a_box_that_fails_or_hangs_costs_itself_alone(tmp_path):
    numbers = card.run_call("harness", tmp_path, small=True)
    assert [one.get("error", one["name"]).split(",")[0] for one in numbers[:4]] == [
        "hangs",
        "stopped after 20 s",
        "fails",
        "exit code 1",
    ]
    assert numbers[-1]["name"] == "noise/hardware"
    assert all(one["versions"] == numbers[0]["versions"] for one in numbers)
    assert "on purpose" in (tmp_path / "log_harness.txt").read_text()


def test_all_calls_have_fifteen_minutes_and_every_box_a_name():
    assert sum(box.seconds for call in ("results", "numbers") for box in card.CALLS[call]) <= 900
    assert all(sum(box.seconds for box in boxes) <= 540 for boxes in card.CALLS.values())
    from experiments.bench.card_boxes import BOXES

    assert {*card.NAMES} == {*BOXES, *card.RUNS}


@pytest.mark.parametrize("name", card.RUNS)
def test_results_are_at_full_size(name):
    """The paper's numbers, in one run."""
    one = card.RUNS[name]
    query, _ = parse(EXPERIMENTS[one.experiment], shlex.split(f"{one.options} {one.full} --seeds 0"))
    (row,) = query.rows.values()
    options = flat(row.config)
    assert row.seeds == (0,)
    assert options["dataset"] == "cifar10"
    if one.experiment == "embracing_fl":
        assert [options[name] for name in ("nodes", "num_active", "strong", "weak", "rounds")] == [
            128,
            32,
            16,
            112,
            1000,
        ]
        assert (options["model"], options["decay_rounds"], options["sampling"]) == ("resnet20", (800, 900), "uniform")
    else:
        assert [options[name] for name in ("nodes", "iterations", "entry_size")] == [16, 3000, 32]
        assert (options["model"], options["noise_std"]) == ("resnet18", pytest.approx(0.03**0.5))


def test_each_call_of_a_timed_loop_needs_the_one_before():
    """So the compiler can leave out none; with a zero that is 0 the arguments stay. The loop copies no argument."""
    from experiments.bench.card_boxes import repeated_calls

    factors = np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5), np.ones((5, 3), np.float32)
    run = jax.jit(lambda held, zero: repeated_calls(jnp.matmul, 3, held, zero))
    compiled = run.lower((factors, jnp.zeros((4, 3))), jnp.float32(0)).compile()
    bodies = [part for part in str(compiled.as_text()).split("\n\n") if "dot(" in part and "ENTRY" not in part]
    assert bodies
    assert not any("copy(" in part for part in bodies)
    for zero in (0.0, 0.5):
        (left, right), product = [one.copy() for one in factors], np.zeros((4, 3))
        for _ in range(3):
            product = left @ right
            left[0, 0] += zero * product[0, 0]
            right[0, 0] += zero * product[0, 0]
        arguments, result = compiled((factors, jnp.zeros((4, 3))), jnp.float32(zero))
        for mine, wanted in zip((*arguments, result), (left, right, product), strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-6)


def test_forms_of_the_first_kernel_agree():
    from experiments.bench.card_boxes import first_kernel_forms

    keys = jax.random.split(jax.random.key(0), 2)
    inputs, error = (jax.random.normal(key, (2, 3, 6, 6, c), jnp.float32) for key, c in zip(keys, (3, 4), strict=True))
    results = {name: fn(inputs, error) for name, fn in first_kernel_forms(5).items()}

    def kernel_gradient(inputs, error):
        def forward(kernel):
            layout = ("NHWC", "HWIO", "NHWC")
            return jax.lax.conv_general_dilated(inputs, kernel, (1, 1), "SAME", dimension_numbers=layout)

        kernel = jax.ShapeDtypeStruct((5, 5, 3, 4), jnp.float32)
        return jax.linear_transpose(forward, kernel)(error)[0]

    wanted = jax.vmap(kernel_gradient)(inputs, error)
    assert set(results) == {"grouped", "patches", "patches_of_images", "filled"}
    for result in results.values():
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


def test_the_process_of_a_call_leaves_the_card_to_its_boxes(tmp_path):
    program = f"""
import jax, tyro
from jax._src.xla_bridge import _backends
from experiments import EXPERIMENTS
from experiments.bench import card
try:
    tyro.cli(card.card, args=["--help"])
except SystemExit:
    pass
card.CALLS["numbers"] = (card.Box("rounds", 0),)
tyro.cli(card.card, args=["numbers", "--out", {str(tmp_path)!r}])
assert not _backends, _backends
assert jax.config.jax_platforms == "cpu"
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    (one,) = json.loads((tmp_path / "card_numbers.json").read_text())
    assert one["error"].startswith(("stopped after", "exit code"))
    assert one["versions"]["jax"] == card.version("jax")


def test_a_word_that_is_no_box_is_refused():
    with pytest.raises(card.ArgumentError, match=r"^call: must be results, numbers, .*; got 'ceiling'"):
        card.card("ceiling")
    with pytest.raises(card.ArgumentError, match=r"^--out: must be given"):
        card.card("numbers")
