"""Copy what statements of privacy cover out of a run directory, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tree

from jaxfl.core import ArgumentError
from jaxfl.privacy.statements import SECRET
from jaxfl.training.case import Case
from jaxfl.training.json_files import jsonable, read_json, write_json
from jaxfl.training.processes import on_first
from jaxfl.training.restore import restore_state
from jaxfl.training.run_directory import PRIVACY, RunDirectory, slug

_PUBLISHED = ("finished", "budget_spent")  # ends that depend on no data


@on_first
def publish(run: RunDirectory, cases: Mapping[str, Case], out: str | os.PathLike[str]) -> None:
    """Write what the proven statements of a run cover.

    privacy.json holds of every case its options that vary, its rounds, its statements and, as the run's own does,
    the epsilons and names of its nodes; and the total that all of them cost a sample together.
    parameters/<case>/seed_<s>.npz holds the nodes' parameters at the end, an array (n, *leaf) a leaf. Metrics,
    pictures, times and checkpoints stay behind: they are measured, or kept, without noise.

    Args:
        run: that has ended, trained with a secret key.
        cases: as they were trained.
        out: a folder that does not exist, or is empty.

    Raises:
        ArgumentError: a case whose seed is public, without a proven epsilon, whose parameters no statement covers,
            or that diverged; or a folder with files in it. Nothing is written then.

    Guarantees:
        - nothing but parameters, statements and options that vary is written.
        - a run that is not covered is refused.
    """
    path, rows = Path(out), run.read_summary()["cases"]
    of_nodes = read_json(run.path / PRIVACY) if (run.path / PRIVACY).exists() else {}
    check_folder(out)
    for name, case in cases.items():
        problem = _uncovered(case, rows[name])
        if problem is not None:
            requirement = "needs a run that its statements cover"
            raise ArgumentError("publish", requirement, f"{name} {problem}", "Leave this case out.")
    stated = ("settings", "rounds_per_seed", "privacy")
    content = {name: {key: rows[name][key] for key in stated if key in rows[name]} for name in cases}
    for name in of_nodes.keys() & content:
        content[name]["node_epsilons"] = of_nodes[name]
    path.mkdir(parents=True, exist_ok=True)
    for name, case in cases.items():
        folder = path / "parameters" / slug(name)
        folder.mkdir(parents=True)
        algorithm = case.algorithm({key: jnp.float32(number) for key, number in case.numbers.items()})
        for seed in case.seeds:
            leaves = tree.flatten_with_path(algorithm.node_params(restore_state(run, name, case, seed)[1]))
            arrays = {"/".join(map(str, keys)) or "params": np.asarray(leaf) for keys, leaf in leaves}
            np.savez(folder / f"seed_{seed}.npz", allow_pickle=False, **arrays)
    note = "each statement holds for one case and one seed; the total holds for all that are published here"
    content = {"note": note, "total": _total(run, cases, rows, of_nodes), "cases": content}
    write_json(path / "privacy.json", jsonable(content, "privacy"))


def check_folder(out: str | os.PathLike[str]) -> None:
    """Refuse a folder with something in it, or a file."""
    path = Path(out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ArgumentError("publish", "must be a new or an empty folder", f"{path} is not", "Name another one.")


def _total(
    run: RunDirectory,
    cases: Mapping[str, Case],
    rows: Mapping[str, Mapping],
    of_nodes: Mapping[str, list[Mapping]],
) -> list[dict[str, Any]]:
    """Compute the joint privacy cost of all seeds of all cases for a sample (or client).

    The result has an entry for each relation that all have a bound for.

    By basic composition: epsilons and deltas add up, node by node where all runs have the same data. Elsewhere a sample
    may lie at another node in each run, so that the largest epsilon of a node is taken of each.
    """
    digests = {name: run.config["training"]["cases"][name]["data"] for name in cases}
    same_data = len({digests[name][str(seed)] for name, of in cases.items() for seed in of.seeds}) == 1
    proven = {
        name: {one["neighboring_relation"]: one for one in rows[name]["privacy"] if one["bound"] == "proven"}
        for name in cases
    }
    totals = []
    for relation in next(iter(proven.values())):
        each = [proven[name].get(relation, {"dp_epsilon": None}) for name, of in cases.items() for _ in of.seeds]
        if all(one["dp_epsilon"] is not None for one in each):
            sums = {key: sum(one[key] for one in each) for key in ("dp_epsilon", "dp_delta")}
            if same_data:
                sums |= _node_by_node(cases, of_nodes, relation)
            totals.append({"neighboring_relation": relation, **sums, "holds_for": "every node", "runs": len(each)})
    return totals


def _node_by_node(cases: Mapping[str, Case], of_nodes: Mapping[str, list[Mapping]], relation: str) -> dict[str, Any]:
    """Sum of each node's epsilons over all runs, their maximum and the nodes' names; empty where a run lacks them."""
    each = []
    for name, of in cases.items():
        proven = [one for one in of_nodes.get(name, ()) if one["bound"] == "proven"]
        each += [[one for one in proven if one["neighboring_relation"] == relation]] * len(of.seeds)
    names = {tuple(one.get("nodes", ())) for stated in each for one in stated}
    if any(len(stated) != 1 for stated in each) or len(names) != 1:
        return {}
    # A statement with several lists has one for each seed: the larger one is right for any of them.
    epsilons = np.sum([np.max(stated[0]["node_epsilons"], axis=0) for stated in each], axis=0).tolist()
    called = next(iter(names))
    return {"dp_epsilon": max(epsilons), **({"nodes": list(called)} if called else {}), "node_epsilons": epsilons}


def _uncovered(case: Case, row: Mapping) -> str | None:
    """Why nothing of a case may be published, or None."""
    proven = [stated for stated in row["privacy"] if stated["bound"] == "proven"]
    if not any(SECRET in stated["assumptions"] for stated in row["privacy"]):
        return "has a public seed"
    if not any(stated["dp_epsilon"] is not None for stated in proven):
        return "has no proven epsilon"
    if not case.covered:
        return "ends with parameters that no statement covers"
    if any(status not in _PUBLISHED for status in row["status"]):
        return "has diverged, which is measured without noise"
    return None
