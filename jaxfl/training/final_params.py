"""Parameters with which the lanes of a run end: final/<case>_seed_<s>.safetensors, a file a case and seed.

A file holds `Algorithm.node_params` of the last state, one array (n, *leaf) for each leaf: a row for each node
(for push-sum the de-biased parameters), or a single row where a server has one model for all. The header says in JSON
how the leaves make a tree, and names the classes where they have names. A file is replaced atomically, and a resumed
run writes the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxfl.core import ArgumentError, PyTree, Variables
from jaxfl.core.outputs import drop_link
from jaxfl.core.tree import leaf_names
from jaxfl.training.json_files import write_atomically
from jaxfl.training.processes import on_first
from jaxfl.training.run_directory import RunDirectory, slug

if TYPE_CHECKING:
    from jaxfl.core.lines import Label

FINAL = "final"
_HEADER = "jaxfl"  # a single entry: safetensors writes several in no fixed order


def final_path(run: Path, label: Label) -> Path:
    """The file of a lane in the folder of a run."""
    return run / FINAL / f"{slug(label[0])}_seed_{label[1]}.safetensors"


@on_first
def write_params(
    run: Path,
    label: Label,
    round_index: int,
    params: PyTree,
    names: Sequence[str] | None,
    classes: Sequence[str] = (),
) -> None:
    """Write a lane's parameters, leaves (n, *leaf), after `round_index` rounds; `names` are of the nodes, or None."""
    from safetensors.numpy import save  # imported on use: reading parameters does not need it

    leaves, paths = leaf_names(params), [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    rows = len(next(iter(leaves.values())))
    header = {
        **{"case": label[0], "seed": label[1], "round": round_index},
        "nodes": list(names) if names is not None and len(names) == rows else None,
        **({"classes": list(classes)} if classes else {}),
        "is_variables": isinstance(params, Variables),
        "paths": {name: [_step(key) for key in path] for name, path in zip(leaves, paths, strict=True)},
    }
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in leaves.items()}
    drop_link(run / FINAL)
    write_atomically(final_path(run, label), save(arrays, {_HEADER: json.dumps(header)}))


def load_params(
    run: RunDirectory | str | os.PathLike[str], case: str, seed: int, *, node: int | str | None = None
) -> PyTree:
    """The parameters with which a case and seed of a run ended, from the run's folder alone.

    Args:
        run: the folder, or what `open_run` and `read_run` give.
        case: its name.
        seed: its seed.
        node: number or name of the node whose parameters are returned, leaves (*leaf); 0 with a server. Default: all
            nodes.

    Returns:
        NumPy arrays in dicts, and in lists where the task has tuples or lists: leaves (n, *leaf), n = 1 with a server,
        float32 or as the task has them. `Variables` of such trees where the task has batch statistics or dropout.

    Raises:
        ArgumentError: there is no such file, it is damaged, or it has no such node.

    Guarantees:
        - equals `node_params` of the last state, bit for bit.
    """
    import safetensors

    folder = Path(run.path if isinstance(run, RunDirectory) else run)
    path = final_path(folder, (case, seed))
    if not path.exists():
        there = ", ".join(sorted(one.name for one in (folder / FINAL).glob("*.safetensors"))[:5]) or "nothing"
        remedy = "Name a case and seed that ended; one that diverged, or still runs, has no file."
        raise ArgumentError("case", f"must have a file {path}", f"{folder / FINAL} has {there}", remedy)
    try:
        with safetensors.safe_open(path, "np") as file:
            header = json.loads(file.metadata()[_HEADER])
            leaves = [(steps, file.get_tensor(text)) for text, steps in header["paths"].items()]
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        found, remedy = f"it does not ({error})", "Resume the run: one that had not ended writes the file again."
        raise ArgumentError("run", f"{path} must hold what a run wrote", found, remedy) from None
    if node is not None:
        row, rows = _row(node, header["nodes"]), len(leaves[0][1])
        if row is None or not 0 <= row < rows:
            remedy = f"Pass 0 to {rows - 1}" + (", or a name." if header["nodes"] else ".")
            raise ArgumentError("node", f"must be one of the {rows} of {path}", f"got {node!r}", remedy)
        leaves = [(steps, leaf[row]) for steps, leaf in leaves]
    tree = _nested(leaves)
    return Variables(tree["params"], tree.get("model_state", {})) if header["is_variables"] else tree


def _row(node: int | str, names: Sequence[str] | None) -> int | None:
    """The row of a node; None for an unknown node."""
    if not isinstance(node, str):
        return node
    return names.index(node) if names and node in names else None


def _step(key: Any) -> list[Any]:
    """A step of a path, for JSON: the kind of container, and the key or index in it."""
    if isinstance(key, jax.tree_util.SequenceKey):
        return ["list", key.idx]
    return ["dict", key.name if isinstance(key, jax.tree_util.GetAttrKey) else key.key]  # pyright: ignore


def _nested(leaves: Sequence[tuple[Sequence[Any], np.ndarray]]) -> PyTree:
    """The tree of leaves with their paths."""
    if not leaves[0][0]:
        return leaves[0][1]
    inside: dict[Any, list] = {}
    for (first, *others), leaf in leaves:
        inside.setdefault(first[1], []).append((others, leaf))
    children = {where: _nested(parts) for where, parts in inside.items()}
    return list(children.values()) if leaves[0][0][0][0] == "list" else children
