"""Lanes that share a program: the same numbers as alone, one compile, no copies, and nobody stopped by another."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import small_task, uneven_data
from processes import interrupted
from run_files import begun, run_bytes
from toy_problem import lasting, toy_algorithm, toy_case, toy_data, toy_with_numbers, train_toy

from jaxfl import gradients, graphs
from jaxfl.algorithms import push_sum
from jaxfl.core import ArgumentError, tree
from jaxfl.training import Measure, evaluation_set, own_scores, read_results, read_run, restore_state
from jaxfl.training.lanes import Lane, Strategy, Uploads
from jaxfl.training.program import Program

STEP_SIZES = (0.05, 0.1, 0.2)
NEVER = 1e6


def cases_of(step_sizes=STEP_SIZES, bad_rounds=None, **fields):
    """A case a step size, all of one program."""
    return {
        f"step {step_size:g}": toy_case(
            toy_with_numbers,
            numbers={"step_size": step_size, "bad_round": (bad_rounds or {}).get(step_size, NEVER)},
            settings={"step_size": step_size},
            identity={"step_size": step_size},
            **fields,
        )
        for step_size in step_sizes
    }


def lines_of(out, name, seed):
    """Raw lines of one lane."""
    lines = run_bytes(out).splitlines()
    return [line for line in lines if line.startswith(b'{"case": "%s", "seed": %d,' % (name.encode(), seed))]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """At once -> directory of the sweep computed so."""

    @functools.cache
    def run(at_once):
        out = tmp_path_factory.mktemp(f"at_once_{at_once}")
        train_toy(out, cases_of(), lanes_at_once=at_once)
        return out

    return run


def test_a_point_alone_and_in_a_sweep_has_the_same_bits_one_after_the_other(swept, tmp_path):
    alone = cases_of((0.1,), seeds=(1,))
    train_toy(tmp_path, alone)
    assert begun(swept(1))["strategy"] == "one after the other"
    assert lines_of(swept(1), "step 0.1", 1) == lines_of(tmp_path, "step 0.1", 1)
    states = [restore_state(read_run(out), "step 0.1", alone["step 0.1"], 1) for out in (swept(1), tmp_path)]
    chex.assert_trees_all_equal(*states)


@pytest.mark.parametrize(("at_once", "text"), [(3, "in groups of 3"), (6, "side by side")])
@pytest.mark.quick_cases(1)
def test_strategies_agree_to_1e_6(swept, at_once, text):
    runs = [read_run(swept(size)) for size in (1, at_once)]
    assert begun(runs[1].path)["strategy"] == text
    for line, other in zip(*(run.read_metrics() for run in runs), strict=True):
        assert list(line) == list(other)
        for name, value in line.items():
            assert other[name] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), name
    case = cases_of()["step 0.2"]
    states = [restore_state(run, "step 0.2", case, 0)[1] for run in runs]
    chex.assert_trees_all_close(*(state.params for state in states), rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal(*(state._replace(params=None) for state in states))


def test_an_option_named_like_a_column_has_a_column_of_its_own(tmp_path):
    train_toy(tmp_path, {"A": toy_case(num_rounds=5, seeds=(0,), settings={"case": 7, "rounds": 9, "width": 2})})
    (row,) = read_results(tmp_path)
    assert (row["case"], row["option_case"], row["rounds"], row["option_rounds"], row["width"]) == ("A", 7, 5, 9, 2)


def test_six_step_sizes_and_two_seeds_are_one_compile(tmp_path):
    compiled = []

    def listener(event: str, duration_secs: float, **facts: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(str(facts.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        train_toy(tmp_path, cases_of((0.01, 0.02, 0.03, 0.04, 0.05, 0.06), num_rounds=12), compiled=True)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert sum("rounds" in name for name in compiled) == 1
    assert len(read_run(tmp_path).passes) == 1


@pytest.mark.parametrize("at_once", [1, 3])
def test_seeds_whose_largest_nodes_differ_share_a_program(tmp_path, at_once):
    """Partitions by Dirichlet shares: each seed has other sizes. Padding of the index table changes no number."""
    sizes = ((6, 3, 4), (3, 7, 3), (4, 4, 5))

    def algorithm(numbers):
        table = gradients.saga(sampler=gradients.poisson(2, num_draws=1000), clip_norm=0.5)
        return push_sum(task, graph=graphs.ring(3), gradient=table, step_size=numbers["step_size"])

    task = small_task()
    test = evaluation_set(np.zeros((4, 6), np.float32), np.zeros(4, np.int32))
    case = toy_case(
        algorithm, task=task, test=test, data=lambda seed: uneven_data(sizes[seed], seed=seed), seeds=(0, 1, 2),
        numbers={"step_size": 0.1}, num_rounds=6,
        measures={"own": own_scores(task, lambda seed: uneven_data(sizes[-seed], seed=seed))},
    )  # fmt: skip
    train_toy(tmp_path / "together", {"A": case}, lanes_at_once=at_once)
    run = read_run(tmp_path / "together")
    assert len(run.passes) == 1
    for seed in case.seeds:
        alone = case._replace(seeds=(seed,))
        train_toy(tmp_path / str(seed), {"A": alone})
        ours, own = (restore_state(one, "A", alone, seed)[1] for one in (run, read_run(tmp_path / str(seed))))
        assert (lines_of(run.path, "A", seed) == lines_of(tmp_path / str(seed), "A", seed)) or at_once > 1
        chex.assert_trees_all_close(ours.params, own.params, rtol=0 if at_once == 1 else 1e-6)
        kept = jax.tree.map(lambda leaf, like: leaf[:, : like.shape[1]] if like.ndim > 1 else leaf, ours, own)
        chex.assert_trees_all_close(kept, own, rtol=0 if at_once == 1 else 1e-6)


@pytest.mark.parametrize("at_once", [1, 3, 6])
@pytest.mark.quick_cases(1)
def test_no_copy_of_a_table_in_a_round(at_once):
    """A group's tables are taken out once a call; a copy a round would be a second one beside them."""
    algorithm = toy_algorithm(toy_case().task, table_width=3000)
    case = toy_case(algorithm, data=lambda seed: toy_data(num_samples=400)[0], seeds=tuple(range(6)))
    program = Program([Lane("A", case, seed, "") for seed in case.seeds], Uploads())
    compiled = program.compile(Strategy(6, at_once))
    table = tree.num_bytes(program.structure.table)
    assert table > 2_000_000
    memory = compiled.rounds.memory_analysis()
    assert memory is not None
    taken_out = 0 if at_once == 6 else at_once * table
    assert memory.temp_size_in_bytes < taken_out + 0.3 * table
    assert memory.alias_size_in_bytes >= 6 * table  # donated


def test_a_branch_on_the_round_number_stays_a_branch():
    """SAGA's exact mean, in every thousandth round: under vmap with a stacked round number it would be a select."""
    task, data = small_task(), uneven_data()
    test = evaluation_set(np.zeros((4, 6), np.float32), np.zeros(4, np.int32))

    def algorithm(numbers):
        table = gradients.saga(sampler=gradients.fixed(2), clip_norm=0.5)
        return push_sum(task, graph=graphs.exponential(5), gradient=table, step_size=numbers["step_size"])

    case = toy_case(algorithm, task=task, test=test, data=lambda seed: data, numbers={"step_size": 0.1})
    program = Program([Lane("A", case, seed, "") for seed in (0, 1)], Uploads())
    strategy = Strategy(2, at_once=2)
    arguments = program.lane_values(program.lanes, strategy), program.slots_structure(2)
    _, rounds, _ = program._functions(strategy)
    data = program.tables(program.lanes, strategy).data
    assert "cond[" in str(jax.make_jaxpr(rounds)(*arguments, data, np.int32(0)))


@pytest.mark.parametrize("at_once", [1, 6])
@pytest.mark.quick_cases(1)
def test_a_lane_that_diverges_leaves_the_others_bytes_as_they_are(swept, tmp_path, at_once):
    cases = cases_of(bad_rounds={0.1: 13.0})
    summary = train_toy(tmp_path, cases, lanes_at_once=at_once)
    assert summary["status"] == "finished"
    bad = summary["cases"]["step 0.1"]
    assert (bad["status"], bad["rounds_per_seed"]) == (["diverged"] * 2, [10, 10])
    where = "got nan at node 2 in round 14 (rounds 11 to 20 of step 0.1, seed 1)"
    assert f"loss: must stay finite; {where}" in bad["reason"][1]
    assert bad["test_accuracy"]["per_seed"] == [None, None]
    for name, case in cases.items():
        for seed in (0, 1):
            mine, others = lines_of(tmp_path, name, seed), lines_of(swept(at_once), name, seed)
            assert mine == (others[:2] if name == "step 0.1" else others)
            if name == "step 0.1":
                with pytest.raises(ArgumentError, match="must have a readable checkpoint"):
                    restore_state(read_run(tmp_path), name, case, seed)
                continue
            rounds, state = restore_state(read_run(tmp_path), name, case, seed)
            assert rounds == 25
            chex.assert_trees_all_equal(state, restore_state(read_run(swept(at_once)), name, case, seed)[1])
    rows = {(row["case"], row["seed"]): row for row in read_results(tmp_path)}
    assert (rows["step 0.1", 0]["status"], rows["step 0.1", 0]["rounds"]) == ("diverged", 20)
    assert rows["step 0.1", 0]["reason"] == bad["reason"][0]


def test_where_all_diverge_the_program_ends_early(tmp_path):
    cases = cases_of((0.1, 0.2), bad_rounds={0.1: 3.0, 0.2: 12.0}, num_rounds=1000)
    summary = train_toy(tmp_path, cases)
    assert [row["rounds"] for row in summary["cases"].values()] == [0, 10]
    assert all(row["status"] == ["diverged"] * 2 for row in summary["cases"].values())
    assert lasting(train_toy(tmp_path, cases, resume=True)) == lasting(summary)


def test_lanes_at_once_are_recorded_and_kept(tmp_path):
    """A resumed run computes its lanes as it began, whatever is asked for then."""
    cases = cases_of(num_rounds=30)
    with interrupted(3), pytest.raises(KeyboardInterrupt):
        train_toy(tmp_path, cases, lanes_at_once=3)
    recorded = begun(tmp_path)
    assert (recorded["strategy"], recorded["at_once"]) == ("in groups of 3", 3)
    train_toy(tmp_path, cases, resume=True, lanes_at_once=1)
    assert begun(tmp_path) == recorded
    with pytest.raises(ArgumentError, match="lanes_at_once: must be an integer of at least 1"):
        train_toy(tmp_path / "none", cases, lanes_at_once=0)


@pytest.mark.slow
def test_lanes_on_two_devices_have_the_same_bytes_as_on_one(tmp_path):
    """Five lanes, which two devices cannot share evenly; interrupted and resumed."""
    script = (
        "import sys; from test_sweep import cases_of; from toy_problem import train_toy\n"
        "cases = cases_of((0.05, 0.1), seeds=(0, 1)) | cases_of((0.2,), seeds=(0,))\n"
        "train_toy(sys.argv[1], cases, resume=True)"
    )
    folder = Path(__file__).parent
    lines, texts = [], []
    for devices in ("1", "2"):
        paths = [str(Path.cwd()), str(folder), str(folder.parent)]
        environment = {**os.environ, "JAX_NUM_CPU_DEVICES": devices, "PYTHONPATH": os.pathsep.join(paths)}
        out = tmp_path / devices
        command = [sys.executable, "-c", script, str(out)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        if devices == "2":  # as if it had died before the last lines
            whole = run_bytes(out)
            for finished in out.glob("passes/*/end.json"):
                finished.unlink()
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            assert run_bytes(out) == whole
        lines.append(run_bytes(out))
        texts.append(begun(out)["strategy"])
    assert texts == ["one after the other", "one after the other on each of 2 devices"]
    assert lines[0] == lines[1]


def test_tables_that_were_made_for_compiling_serve_the_rounds(tmp_path):
    keys = []
    own = Measure(lambda params, number: {"number": number}, lambda key, data: keys.append(key) or jnp.float32(1))
    train_toy(tmp_path, cases_of(STEP_SIZES[:2], seeds=(0, 1), measures={"own": own}))
    assert [int(jax.random.key_data(key)[-1]) for key in keys] == [0, 1]
