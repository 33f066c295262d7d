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
from jaxfl.training.json_files import jsonable, write_json
from jaxfl.training.processes import on_first
from jaxfl.training.records import RunDirectory, slug
from jaxfl.training.restore import restore_state
from jaxfl.training.variant import Variant

_PUBLISHED = ("finished", "budget_spent")  # ends that depend on no data


@on_first
def publish(run: RunDirectory, variants: Mapping[str, Variant], out: str | os.PathLike[str]) -> None:
    """Write what the proven statements of a run cover.

    privacy.json holds of every variant its options that vary, its rounds and its statements, and the total that all of
    them cost a sample together.
    parameters/<variant>/seed_<s>.npz holds the nodes' parameters at the end, an array (n, *leaf) a leaf. Metrics,
    pictures, times and checkpoints stay behind: they are measured, or kept, without noise.

    Args:
        run: that has ended, trained with a secret key.
        variants: as they were trained.
        out: a folder that does not exist, or is empty.

    Raises:
        ArgumentError: a variant whose seed is public, without a proven epsilon, whose parameters no statement covers,
            or that diverged; or a folder with files in it. Nothing is written then.

    Guarantees:
        - nothing but parameters, statements and options that vary is written.
        - a run that is not covered is refused.
    """
    path, rows = Path(out), run.read_summary()["variants"]
    check_folder(out)
    for name, variant in variants.items():
        problem = _uncovered(variant, rows[name])
        if problem is not None:
            requirement = "needs a run that its statements cover"
            raise ArgumentError("publish", requirement, f"{name} {problem}", "Leave this variant out.")
    stated = ("settings", "rounds_per_seed", "privacy")
    content = {name: {key: rows[name][key] for key in stated if key in rows[name]} for name in variants}
    path.mkdir(parents=True, exist_ok=True)
    for name, variant in variants.items():
        folder = path / "parameters" / slug(name)
        folder.mkdir(parents=True)
        algorithm = variant.algorithm({key: jnp.float32(number) for key, number in variant.numbers.items()})
        for seed in variant.seeds:
            leaves = tree.flatten_with_path(algorithm.node_params(restore_state(run, name, variant, seed)[1]))
            arrays = {"/".join(map(str, keys)) or "params": np.asarray(leaf) for keys, leaf in leaves}
            np.savez(folder / f"seed_{seed}.npz", allow_pickle=False, **arrays)
    note = "each statement holds for one variant and one seed; the total holds for all that are published here"
    content = {"note": note, "total": _total(variants, rows), "variants": content}
    write_json(path / "privacy.json", jsonable(content, "privacy"))


def check_folder(out: str | os.PathLike[str]) -> None:
    """Refuse a folder with something in it, or a file."""
    path = Path(out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ArgumentError("publish", "must be a new or an empty folder", f"{path} is not", "Name another one.")


def _total(variants: Mapping[str, Variant], rows: Mapping[str, Mapping]) -> list[dict[str, Any]]:
    """What all seeds of all variants cost a sample (or client) together, in each relation that all have a bound for.

    By basic composition: epsilons and deltas add up. A sample may lie at another node in each seed, so that the largest
    epsilon of a node is taken of each.
    """
    proven = {
        name: {one["neighboring_relation"]: one for one in rows[name]["privacy"] if one["bound"] == "proven"}
        for name in variants
    }
    totals = []
    for relation in next(iter(proven.values())):
        each = [proven[name].get(relation, {"dp_epsilon": None}) for name, of in variants.items() for _ in of.seeds]
        if all(one["dp_epsilon"] is not None for one in each):
            sums = {key: sum(one[key] for one in each) for key in ("dp_epsilon", "dp_delta")}
            totals.append({"neighboring_relation": relation, **sums, "holds_for": "every node", "runs": len(each)})
    return totals


def _uncovered(variant: Variant, row: Mapping) -> str | None:
    """Why nothing of a variant may be published, or None."""
    proven = [stated for stated in row["privacy"] if stated["bound"] == "proven"]
    if not any(SECRET in stated["assumptions"] for stated in row["privacy"]):
        return "has a public seed"
    if not any(stated["dp_epsilon"] is not None for stated in proven):
        return "has no proven epsilon"
    if not variant.covered:
        return "ends with parameters that no statement covers"
    if any(status not in _PUBLISHED for status in row["status"]):
        return "has diverged, which is measured without noise"
    return None
