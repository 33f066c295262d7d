"""Files of the parameters with which lanes end. tests/training/test_resume.py has them after kills."""

import json
import shutil

import chex
import jax
import numpy as np
import pytest
import safetensors.numpy
from helpers import refused
from problems import irregular_graph, small_task, uneven_data
from toy_problem import toy_case, train_toy

import jaxfl
from jaxfl.core import Variables
from jaxfl.training import Case, evaluation_set, load_params, open_run, read_run, restore_state, train
from jaxfl.training.final_params import final_path, write_params
from jaxfl.training.lanes import Lane

RNG = np.random.default_rng(0)


def rows(*shape, nodes=3, dtype: type = np.float32):
    return RNG.normal(size=(nodes, *shape)).astype(dtype)


def write(run, label, params, names, classes=()):
    lane = Lane(label[0], toy_case()._replace(class_names=classes), label[1], "", names)
    write_params(run, 20, [(lane, params)])


STATISTICS = {"norm": {"mean": rows(2)}}
TREES = {  # tree, as it comes back
    "dicts, with numbers as keys": (
        {"layers": {0: {"kernel": rows(2, 3)}, 10: {"kernel": rows()}}, "a": rows(0)},
        None,
    ),
    "tuples": (({"w": rows(2)}, (rows(), rows(1))), [{"w": 0}, [0, 0]]),
    "an array in float64": (rows(2, dtype=np.float64), None),
    "keys with a slash": ({"a/b": rows(1), "a": {"b": rows(2)}}, None),
    "statistics": (Variables({"w": rows(2)}, STATISTICS), None),
    "dropout": (Variables({"w": rows(2)}, {}), None),
}


@pytest.mark.parametrize("name", TREES)
def test_any_tree_comes_back_bit_for_bit_and_node_by_node(tmp_path, name):
    tree, form = TREES[name]
    write(tmp_path, ("A (b = 3)", 7), tree, ("Oslo", "Lund", "Bergen"))
    actual = load_params(tmp_path, "A (b = 3)", 7)
    expected = tree if form is None else jax.tree.unflatten(jax.tree.structure(form), jax.tree.leaves(tree))
    chex.assert_trees_all_equal(actual, expected, strict=True)
    for node in (1, "Lund"):
        chex.assert_trees_all_equal(
            load_params(tmp_path, "A (b = 3)", 7, node=node), jax.tree.map(lambda x: x[1], actual)
        )
    path = final_path(tmp_path, ("A (b = 3)", 7))
    before = path.read_bytes()
    write(tmp_path, ("A (b = 3)", 7), tree, ("Oslo", "Lund", "Bergen"))
    assert (path.name, path.read_bytes()) == ("a-b-3_seed_7.safetensors", before)


@pytest.mark.parametrize("node", [3, -1, 1.5, True, "Oslo", None])
def test_what_is_not_there_is_one_sentence(tmp_path, node):
    write(tmp_path, ("A", 0), {"w": rows(2)}, None)
    if node is None:
        refused(lambda: load_params(tmp_path, "A", 1), "case", "has a_seed_0.safetensors", "diverged")
    else:
        refused(lambda: load_params(tmp_path, "A", 0, node=node), "node", f"got {node!r}", "Pass 0 to 2.")


def test_every_flipped_bit_a_cut_file_and_a_file_of_another_lane_are_refused(tmp_path):
    write(tmp_path, ("A", 0), {"w": rows(2), "b": rows()}, ("Oslo", "Lund", "Bergen"), ("no", "yes"))
    path = final_path(tmp_path, ("A", 0))
    whole = path.read_bytes()
    damaged = [
        whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :] for place in range(len(whole))
    ]
    for content in (*damaged, whole[:-1], b""):
        path.write_bytes(content)
        refused(lambda: load_params(tmp_path, "A", 0), "run", "must hold what a run wrote")
    for label in (("A", 1), ("B", 0), ("a", 0)):
        final_path(tmp_path, label).write_bytes(whole)
        refused(lambda label=label: load_params(tmp_path, *label), "case", "is of A, seed 0")


LANE = {"case": "A", "seed": 0, "round": 20, "nodes": None, "is_variables": False}
PATHS = {"w": [["dict", "w"]]}
FOREIGN = {  # headers of files that no run wrote
    "a list": [],
    "no paths": LANE,
    "paths of no array": {**LANE, "paths": {**PATHS, "b": [["dict", "b"]]}},
    "no path": {**LANE, "paths": {}},
    "paths are a list": {**LANE, "paths": ["w"]},
    "a path is text": {**LANE, "paths": {"w": "w"}},
    "an empty step": {**LANE, "paths": {"w": [[]]}},
    "another container": {**LANE, "paths": {"w": [["set", "w"]]}},
    "a list that begins at 3": {**LANE, "paths": {"w": [["list", 3]]}},
    "a deep path": {**LANE, "paths": {"w": [["dict", "w"]] * 20_000}},
    "no variables": {**LANE, "paths": PATHS, "is_variables": True},
    "variables of another kind": {**LANE, "paths": PATHS, "is_variables": 1},
    "nodes are a number": {**LANE, "paths": PATHS, "nodes": 3},
    "names of two nodes": {**LANE, "paths": PATHS, "nodes": ["Oslo", "Lund"]},
    "nodes without names": {**LANE, "paths": PATHS, "nodes": [1, 2, 3]},
    "no case": {name: value for name, value in LANE.items() if name != "case"} | {"paths": PATHS},
    "a seed in words": {**LANE, "paths": PATHS, "seed": "0"},
    "an entry that nobody writes": {**LANE, "paths": PATHS, "more": 1},
}


@pytest.mark.parametrize("name", [*FOREIGN, "no JSON", "JSON that is nested deep", "no header"])
def test_a_header_that_no_run_wrote_is_one_sentence(tmp_path, name):
    deep = {"no JSON": "{", "JSON that is nested deep": "[" * 100_000}
    path = final_path(tmp_path, ("A", 0))
    path.parent.mkdir()
    header = None if name == "no header" else {"jaxfl": deep.get(name) or json.dumps(FOREIGN[name])}
    safetensors.numpy.save_file({"w": rows(2)}, path, header)
    refused(lambda: load_params(tmp_path, "A", 0), "run", "must hold what a run wrote")


def test_files_of_earlier_versions_which_have_no_checksum_are_read(tmp_path):
    path, leaf = final_path(tmp_path, ("A", 0)), rows(2)
    path.parent.mkdir()
    safetensors.numpy.save_file({"w": leaf}, path, {"jaxfl": json.dumps({**LANE, "paths": PATHS, "classes": ["0"]})})
    chex.assert_trees_all_equal(load_params(tmp_path, "A", 0), {"w": leaf})
    refused(lambda: load_params(tmp_path, "a", 0), "case", "is of A, seed 0")


def test_of_push_sum_it_is_the_debiased_ones_and_the_folder_alone_is_read(tmp_path):
    data, task = uneven_data(), small_task()
    learner = jaxfl.push_sum(task, graph=irregular_graph(), gradient=jaxfl.saga(), step_size=0.1)
    test = evaluation_set(np.asarray(data.inputs), np.asarray(data.labels), 8)
    case = Case(lambda numbers: learner, task, test, lambda seed: data, (0, 3), num_rounds=5, evaluate_every=5)
    run = open_run(tmp_path / "run", {})
    train({"A": case}, run=run, quiet=True)
    shutil.copytree(tmp_path / "run" / "final", tmp_path / "copy" / "final")
    for seed in case.seeds:
        state = restore_state(run, "A", case, seed)[1]
        assert np.ptp(state.push_sum_weight) > 0.1
        chex.assert_trees_all_equal(load_params(tmp_path / "copy", "A", seed), learner.node_params(state))
    assert not np.array_equal(*(load_params(run, "A", seed)["dense_1"]["kernel"] for seed in case.seeds))


def test_none_are_written_where_none_are_wanted(tmp_path):
    train_toy(tmp_path, {"A": toy_case(seeds=(0,), num_rounds=3)}, keep_params=False)
    assert not (tmp_path / "final").exists()
    refused(lambda: load_params(read_run(tmp_path), "A", 0), "case", "has nothing")
