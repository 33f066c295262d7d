"""Parameters with which the lanes of a run end: final/<case>_seed_<s>.safetensors, a file a case and seed.

A file holds `Algorithm.node_params` of the last state, one array (n, *leaf) for each leaf: a row for each node
(for push-sum the de-biased parameters), or a single row where a server has one model for all. The header says in JSON
whose parameters they are, after which round, how the leaves make a tree, and names the classes where they have names.
It has the form and checksum of every array and a checksum of its own, as a checkpoint's record. A file is replaced
atomically, and a resumed run writes the same bytes.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxfl.core import ArgumentError, PyTree, Variables
from jaxfl.core.outputs import drop_link
from jaxfl.core.tree import leaf_names
from jaxfl.training.json_files import Damaged, checked, with_checksum, write_atomically
from jaxfl.training.processes import on_first
from jaxfl.training.run_directory import RunDirectory, slug

if TYPE_CHECKING:
    from jaxfl.core.lines import Label
    from jaxfl.training.lanes import Lane

FINAL = "final"
_AT_ONCE = 16  # files that wait for the disk together
_HEADER = "jaxfl"  # a single entry: safetensors writes several in no fixed order
_UNREADABLE = (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError)  # errors of other forms
_FORM = {"case": str, "seed": int, "is_variables": bool, "paths": dict, "arrays": dict}
_EARLIER = {"case", "seed", "round", "nodes", "classes", "is_variables", "paths"}  # all of a header without checksums


def final_path(run: Path, label: Label) -> Path:
    """The file of a lane in the folder of a run."""
    return run / FINAL / f"{slug(label[0])}_seed_{label[1]}.safetensors"


@on_first
def write_params(run: Path, round_index: int, lanes: Sequence[tuple[Lane, PyTree]]) -> None:
    """Write the parameters, leaves (n, *leaf), of lanes that end together after `round_index` rounds."""
    drop_link(run / FINAL)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(lambda one: write_atomically(final_path(run, one[0].label), _file(round_index, *one)), lanes):
            pass


def _file(round_index: int, lane: Lane, params: PyTree) -> bytes:
    """The content of a lane's file."""
    from safetensors.numpy import save  # imported on use: reading parameters does not need it

    (names_of_leaves, paths), names = _names(jax.tree.structure(params)), lane.node_names
    leaves = dict(zip(names_of_leaves, jax.tree.leaves(params), strict=True))
    rows = len(next(iter(leaves.values())))
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in leaves.items()}
    header = {
        **{"case": lane.name, "seed": lane.seed, "round": round_index},
        "nodes": list(names) if names is not None and len(names) == rows else None,
        **({"classes": list(lane.case.class_names)} if lane.case.class_names else {}),
        "is_variables": isinstance(params, Variables),
        "paths": dict(zip(leaves, paths, strict=True)),
        "arrays": {name: _form(array) for name, array in arrays.items()},
    }
    return save(arrays, {_HEADER: json.dumps(with_checksum(header))})


@lru_cache(maxsize=8)  # lanes share a structure
def _names(structure: Any) -> tuple[list[str], list[list[list[Any]]]]:
    """Names of the leaves of a tree, and the steps from the root to each."""
    tree = jax.tree.unflatten(structure, range(structure.num_leaves))
    return [*leaf_names(tree)], _paths(tree)


def load_params(
    run: RunDirectory | str | os.PathLike[str], case: str, seed: int, *, node: int | str | None = None
) -> PyTree:
    """The parameters with which a case and seed of a run ended, from the run's folder only.

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
        ArgumentError: there is no such file, it is damaged or of another case or seed, or it has no such node.

    Guarantees:
        - equals `node_params` of the last state, bit for bit.
        - an altered file is refused; of an earlier version's, which has no checksums, only its form is looked at.
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
            header = _checked_header(json.loads(file.metadata()[_HEADER]))
            arrays = {text: file.get_tensor(text) for text in file.keys()}
        tree, names, rows = _tree(header, arrays)
    except (safetensors.SafetensorError, Damaged, *_UNREADABLE) as error:
        found, remedy = f"it does not ({error or 'nothing'})", "Resume the run: one that had not ended writes it again."
        raise ArgumentError("run", f"{path} must hold what a run wrote", found, remedy) from None
    if (whose := (header["case"], header["seed"])) != (case, seed):
        found, remedy = f"{path} is of {whose[0]}, seed {whose[1]}", "Put back the file that belongs there."
        raise ArgumentError("case", f"must have its own file, {case}, seed {seed}", found, remedy)
    if node is None:
        return tree
    row = names.index(node) if node in names else node
    if isinstance(row, bool) or not isinstance(row, int | np.integer) or not 0 <= row < rows:
        remedy = f"Pass 0 to {rows - 1}" + (", or a name." if names else ".")
        raise ArgumentError("node", f"must be one of the {rows} of {path}", f"got {node!r}", remedy)
    return jax.tree.map(lambda leaf: leaf[row], tree)


def _checked_header(header: Any) -> dict[str, Any]:
    """The header, whose checksum fits; an earlier version wrote none, and such a header has no other entries."""
    if isinstance(header, dict) and header.keys() <= _EARLIER:
        header = with_checksum({**header, "arrays": {}})
    return checked(header, _FORM)


def _tree(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> tuple[PyTree, list[str], int]:
    """The tree of the arrays, the names of the nodes where they have any, and the number of rows.

    Raises:
        Damaged: the arrays or the tree are not what a run wrote; further kinds are in `_UNREADABLE`.
    """
    for name, form in header["arrays"].items():
        if name not in arrays or _form(arrays[name]) != form:
            raise Damaged(f"{name} is altered")
    paths, names = header["paths"], header["nodes"] or []
    tree = _nested([(steps, arrays[text]) for text, steps in paths.items()])
    rows = {len(array) for array in arrays.values()}
    if paths.keys() != arrays.keys() or sorted(map(str, _paths(tree))) != sorted(map(str, paths.values())):
        raise Damaged("its paths are not those of its arrays")
    if len(rows) != 1 or not all(isinstance(name, str) for name in names) or (names and len(names) not in rows):
        raise Damaged("its arrays have not a row for each node")
    if header["is_variables"]:
        tree = Variables(tree["params"], tree.get("model_state", {}))
    return tree, names, rows.pop()


def _form(array: np.ndarray) -> list[Any]:
    """Kind of numbers, shape and checksum of an array, as JSON gives them back."""
    return [array.dtype.name, list(array.shape), zlib.crc32(array.tobytes())]


def _paths(tree: PyTree) -> list[list[list[Any]]]:
    """The steps from the root to each leaf."""
    return [[_step(key) for key in path] for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


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
