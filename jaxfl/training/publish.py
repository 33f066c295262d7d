"""Reading a run directory again: states, its secret key, and the results that privacy statements cover."""

from __future__ import annotations

import contextlib
import operator
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import ArgumentError, Array, PyTree
from jaxfl.core.tree import leaf_names
from jaxfl.privacy.releases import account
from jaxfl.privacy.statements import SECRET
from jaxfl.privacy.totals import total_epsilons
from jaxfl.training.case import Case
from jaxfl.training.checkpoint import Checkpoints, Restored
from jaxfl.training.json_files import jsonable, read_json, write_json
from jaxfl.training.lanes import Lane, Uploads
from jaxfl.training.pass_directory import CHECKPOINTS, ENDED
from jaxfl.training.processes import on_all, on_first
from jaxfl.training.program import Program
from jaxfl.training.run_directory import PRIVACY, PRIVATE, RunDirectory, slug

_SAME = 1e-3  # relative: how far a learner's epsilon, of float32 numbers, may be from the stated one
_PUBLISHED = ("finished", "budget_spent")  # ways to end that do not depend on the data


def restore_state(run: RunDirectory, name: str, case: Case, seed: int) -> tuple[int, PyTree]:
    """The newest saved state of one case and seed; if it ended before others, the state at its end.

    Args:
        run: from `open_run` or `read_run`.
        name: of the case.
        case: as it was trained.
        seed: its seed.

    Returns:
        (round, state).

    Raises:
        ArgumentError: there is no readable checkpoint, or it is another run's, or holds a state of another form. A
            seed that diverged has no state at its end.
        OSError: it cannot be read.

    Guarantees:
        - reading a state changes nothing.
    """
    seeds = {seed, *(its for one in run.passes for its_name, its in one.lanes if its_name == name)}
    width = max(case.data(one).max_size for one in seeds)  # a sweep's tables are as wide as its largest node
    program = Program([Lane(name, case, seed, "", width=width)], Uploads())  # the digest is empty: no key is made here
    for one in run.passes:
        begun = one.begun() if (name, seed) in one.lanes else None
        if begun is not None:
            lane, slots = one.lanes.index((name, seed)), begun["slots"]
            restored = _restored(one.path / ENDED / str(lane), program.structure, one.owner)
            if restored is not None:
                return restored.round_index, restored.state
            restored = _restored(one.path / CHECKPOINTS, program.slots_structure(slots), one.owner)
            if restored is not None and restored.record["lanes"][lane]["ended"] is None:
                state = restored.state
                return restored.round_index, state if slots == 1 else program.map_lanes(
                    operator.itemgetter(lane), state
                )
    found, remedy = f"{name}, seed {seed}, has no checkpoint in {run.path}", "Name a case and seed of this run."
    raise ArgumentError("case", "must have a readable checkpoint", found, remedy)


def _restored(directory: Path, structure: PyTree, owner: str) -> Restored | None:
    if not directory.exists():
        return None
    with contextlib.closing(Checkpoints(directory, None, owner)) as checkpoints:
        return checkpoints.restore(structure)


def secret_key(run: RunDirectory) -> Array:
    """The secret key of this run: a new one of 64 bits, or the key of the run that is resumed.

    It lies in private/key, mode 0600, so that a resumed run goes on with the same noise. Never publish it: with it
    anyone can subtract the noise. Threefry keys hold 64 bits, so an attacker who can try 2^64 keys finds it.

    Args:
        run: from `jaxfl.training.open_run`.

    Returns:
        A typed key, shape (), for `train(key=)`.

    Raises:
        ArgumentError: the run is resumed, and its key is missing, invalid or readable by others; or private/ is a
            link.

    Guarantees:
        - the key is nowhere else in the run directory.
        - the file's mode lets nobody but its owner read it.
    """
    path = run.path / PRIVATE / "key"
    on_first(_draw)(run, path)
    words = on_all(_words)(path)
    data = jnp.array([int.from_bytes(words[:4]), int.from_bytes(words[4:])], jnp.uint32)
    return jax.random.wrap_key_data(data)


def _draw(run: RunDirectory, path: Path) -> None:
    """Write the key of a new run."""
    if path.parent.is_symlink() or path.is_symlink():
        found = "it, or its folder, is a link"
        raise ArgumentError("seed_from_os", f"{path} must lie in the run directory", found, "Remove the link.")
    if not run.resumed:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(8) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _words(path: Path) -> bytes:
    """The eight bytes of the key."""
    try:
        words = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError):
        words = b""
    if words and os.name == "posix" and path.stat().st_mode & 0o077:
        found = f"it has mode {path.stat().st_mode & 0o777:04o}"
        remedy = f"chmod 600 {path}, if nobody else has read it; else start again with another out."
        raise ArgumentError("seed_from_os", f"{path} must be readable by its owner only", found, remedy)
    if len(words) != 8:
        remedy = "Restore the file, or start again with another out."
        raise ArgumentError("seed_from_os", f"needs the run's key in {path}", "there is none", remedy)
    return words


@on_first
def publish(run: RunDirectory, cases: Mapping[str, Case], out: str | os.PathLike[str]) -> None:
    """Write what the proven statements of a run cover.

    privacy.json holds for every case the options that vary, the rounds, the statements and, like the run's own
    privacy.json, the epsilons and names of the nodes. It also holds the total privacy cost of all cases for a sample.
    parameters/<case>/seed_<s>.npz holds the nodes' parameters at the end, one array (n, *leaf) for each leaf.
    Of a private selection ("selected" of summary.json) it holds the winner alone, with the winner's own statements.
    Metrics, pictures, times and checkpoints are not copied: they are measured, or kept, without noise.

    Args:
        run: one that has ended and was trained with a secret key.
        cases: as they were trained.
        out: a folder that does not exist, or is empty.

    Raises:
        ArgumentError: a case has a public seed, no proven epsilon, or parameters that no statement covers; it diverged,
            or a hook ended it; or the folder has files in it. Nothing is written then.

    Guarantees:
        - nothing but parameters, statements and options that vary is written.
        - a run that is not covered is refused.
    """
    path, summary = Path(out), run.read_summary()
    rows = summary["cases"]
    of_nodes = read_json(run.path / PRIVACY) if (run.path / PRIVACY).exists() else {}
    check_folder(out)
    called = {name: name for name in cases}
    if "selected" in summary:
        if summary["selected"] is None:
            found, remedy = "no run of the search has a result", "Search among other values."
            raise ArgumentError("publish", "needs a winner", found, remedy)
        winner = summary["selected"]["case"]
        chosen = {key: summary["selected"][key] for key in ("settings", "privacy")}
        cases, rows, of_nodes = {winner: cases[winner]}, {winner: rows[winner] | chosen}, {}
        called = {winner: "selected"}  # its own name tells of the number of runs
    for name, case in cases.items():
        problem = _uncovered(case, rows[name])
        if problem is not None:
            requirement = "needs a run that its privacy statements cover"
            raise ArgumentError("publish", requirement, f"{name} {problem}", "Leave this case out.")
    stated = ("settings", "rounds_per_seed", "privacy")
    content = {called[name]: {key: rows[name][key] for key in stated if key in rows[name]} for name in cases}
    for name in of_nodes.keys() & content:
        content[called[name]]["node_epsilons"] = of_nodes[name]
    path.mkdir(parents=True, exist_ok=True)
    for name, case in cases.items():
        folder = path / "parameters" / slug(called[name])
        folder.mkdir(parents=True)
        algorithm = case.algorithm({key: jnp.float32(number) for key, number in case.numbers.items()})
        for seed in case.seeds:
            leaves = leaf_names(algorithm.node_params(restore_state(run, name, case, seed)[1]))
            arrays = {name_of_leaf: np.asarray(leaf) for name_of_leaf, leaf in leaves.items()}
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
    run: RunDirectory, cases: Mapping[str, Case], rows: Mapping[str, Mapping], of_nodes: Mapping[str, list[Mapping]]
) -> list[dict[str, Any]]:
    """Compute the joint privacy cost of all seeds of all cases for a sample (or client).

    The result has an entry for each neighboring relation for which all have a bound.

    Deltas add up. Where the learners say what they release, and that has the stated epsilons, all releases compose
    (`jaxfl.privacy.totals`). Elsewhere epsilons add up. Both go node by node where all runs have the same data.
    Otherwise a sample may be at another node in each run, so that the largest epsilon of any node counts for each run.
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
            stated = {name: proven[name][relation] for name in cases}
            composed = None
            if len(each) > 1:
                composed = _composed(cases, rows, stated, sums["dp_delta"], relation, nodes_agree=same_data)
            how = "epsilons and deltas of all runs, added up"
            if composed is not None and max(composed) < sums["dp_epsilon"]:
                how = "releases of all runs, composed at the sum of their deltas"
                per_node = {"node_epsilons": composed} if "node_epsilons" in sums else {}
                sums |= {"dp_epsilon": max(composed), **per_node}
            observers = [*dict.fromkeys(one.get("observer", "") for one in each)]
            observer = observers[0] if len(observers) == 1 else f"who is in all of: {'; '.join(observers)}"
            sums |= {"accountant": how, "observer": observer, "holds_for": "every node", "runs": len(each)}
            totals.append({"neighboring_relation": relation, **sums})
    return totals


def _composed(
    cases: Mapping[str, Case],
    rows: Mapping[str, Mapping],
    stated: Mapping[str, Mapping],
    dp_delta: float,
    relation: str,
    *,
    nodes_agree: bool,
) -> list[float] | None:
    """epsilon of each node for all runs together, by the learners' accounts; None where they do not state it."""
    runs = []
    try:
        for name, case in cases.items():
            learner = case.algorithm({key: jnp.float32(number) for key, number in case.numbers.items()})
            own, epsilon = [], stated[name]["dp_epsilon"]
            for seed, num_rounds in zip(case.seeds, rows[name]["rounds_per_seed"], strict=True):
                sizes = np.asarray(case.data(seed).sizes)
                single = account(learner, sizes, dp_delta=stated[name]["dp_delta"])
                own.append(single.epsilon(num_rounds, "proven", relation))
                runs.append((account(learner, sizes, dp_delta=dp_delta), num_rounds))
            if abs(max(own) - epsilon) > _SAME * epsilon:
                return None
    except ArgumentError:  # a learner that does not say what it releases, or a delta of 1 and more
        return None
    return total_epsilons(runs, relation, nodes_agree=nodes_agree)


def _node_by_node(cases: Mapping[str, Case], of_nodes: Mapping[str, list[Mapping]], relation: str) -> dict[str, Any]:
    """Sum of each node's epsilons over all runs, their maximum and the nodes' names; empty if a run has none."""
    each = []
    for name, of in cases.items():
        proven = [one for one in of_nodes.get(name, ()) if one["bound"] == "proven"]
        each += [[one for one in proven if one["neighboring_relation"] == relation]] * len(of.seeds)
    names = {tuple(one.get("nodes", ())) for stated in each for one in stated}
    if any(len(stated) != 1 for stated in each) or len(names) != 1:
        return {}
    # A statement with several lists has one for each seed: the largest value holds for all of them.
    epsilons = np.sum([np.max(stated[0]["node_epsilons"], axis=0) for stated in each], axis=0).tolist()
    called = next(iter(names))
    return {"dp_epsilon": max(epsilons), **({"nodes": list(called)} if called else {}), "node_epsilons": epsilons}


def _uncovered(case: Case, row: Mapping) -> str | None:
    """The reason why a case may not be published, or None."""
    proven = [stated for stated in row["privacy"] if stated["bound"] == "proven"]
    if not any(SECRET in stated["assumptions"] for stated in row["privacy"]):
        return "has a public seed"
    if not any(stated["dp_epsilon"] is not None for stated in proven):
        return "has no proven epsilon"
    if not case.final_params_are_private:
        return "ends with parameters that no statement covers"
    ended = next((status for status in row["status"] if status not in _PUBLISHED), None)
    if ended is not None:
        return f"has {ended.replace('_', ' ')}, which is measured without noise"
    return None
