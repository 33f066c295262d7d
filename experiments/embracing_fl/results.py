"""Results of runs of experiments.embracing_fl, read from their directories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxfl.core import ArgumentError
from jaxfl.training import read_run

from .methods import CLASSES, NARROW, counts_of, label_of

METRIC = "test_accuracy"
# Options in which compared cases may differ.
COMPARED = ("method", "case", *CLASSES, "participation_rate", "num_active", "batch_norm", "target_accuracy", "nodes")


class Result(NamedTuple):
    """One evaluated case of one run."""

    name: str
    method: str
    case: int | None
    counts: tuple[int, int, int]  # strong, moderate, weak clients
    num_active: int  # of them in a round
    batch_norm: str
    target_accuracy: float | None
    average_capacity: float | None  # None of a run that has not ended
    dataset: str
    nodes: int
    wanted_rounds: int
    rounds: int  # evaluated so far, fewest of all seeds
    seeds: list[int]  # that have been evaluated
    last: np.ndarray  # (seeds,), accuracy in per cent at the last evaluation
    best: np.ndarray  # (seeds,), the highest at any evaluation
    lines: tuple[dict[str, Any], ...]  # of metrics.jsonl

    @property
    def comparison(self) -> tuple[int, tuple[int, int, int], int]:
        """Key that compared methods have in common: case (11 for none), clients, and how many are active."""
        return self.case or 11, self.counts, self.num_active

    @property
    def label(self) -> str:
        """Its clients."""
        return label_of(self.case, self.counts, joint=", ")

    @property
    def has_all(self) -> bool:
        """True where all clients that hold data take part."""
        return sum(self.counts) == self.nodes


def usual(results: Iterable[Result]) -> list[Result]:
    """One result for each method and comparison: of two kinds of batch normalization the one that suits it."""
    by_case: dict[object, Result] = {}
    for result in results:
        key = result.method, result.comparison, result.nodes
        if key not in by_case or result.batch_norm == ("static" if result.method in NARROW else "global"):
            by_case[key] = result
    return list(by_case.values())


def grouped(results: Iterable[Result]) -> dict[Any, dict[str, Result]]:
    """Comparison -> method -> result, comparisons in order."""
    rows: dict[Any, dict[str, Result]] = {}
    for result in sorted(results, key=lambda result: result.comparison):
        rows.setdefault(result.comparison, {})[result.method] = result
    return rows


def gaps(first: Result, second: Result) -> np.ndarray:
    """(seeds,), accuracy of the first less the second's, in points, seed by seed where both have the same."""
    if first.seeds == second.seeds:
        return first.last - second.last
    return np.array([first.last.mean() - second.last.mean()])


def read_results(directories: Sequence[str]) -> list[Result]:
    """The cases of run directories, in their order; of one that is in several, the last.

    Raises:
        ArgumentError: a directory without an evaluated run of this comparison, or runs of different data sets.
    """

    def refuse(requirement: str, found: str, remedy: str = "Name other directories.") -> ArgumentError:
        return ArgumentError("collect", requirement, found, remedy)

    results: dict[Any, Result] = {}
    for directory in directories:
        path = Path(directory).expanduser()
        try:
            run = read_run(path)
        except ArgumentError as error:
            raise refuse(error.requirement, error.found, error.remedy) from None
        except OSError as error:  # a name that is too long, a folder that may not be read
            raise refuse("must be readable", f"{path}: {(error.strerror or str(error)).lower()}") from None
        if run.config["experiment"] != "embracing_fl":
            raise refuse("must be runs of embracing_fl", f"{path} is one of {run.config['experiment']}")
        summary = run.read_summary()["cases"] if (path / "summary.json").exists() else {}
        metrics, config = run.read_metrics(), run.config["config"]
        of_run = {}
        if "cases" not in config:
            raise refuse("must be runs of this version", f"{path} is older")
        for name, changes in config["cases"].items():
            lines = tuple(line for line in metrics if line["case"] == name)
            if not lines:
                continue
            result = result_of(name, {**config, **changes}, lines, summary.get(name, {}))
            key = result.dataset, result.method, result.comparison, result.batch_norm, result.nodes
            if key in of_run:
                raise refuse("must be runs of cases and methods", f"{path} compares {of_run[key].name} and {name}")
            of_run[key] = result
        results |= of_run
    if not results:
        raise refuse("must hold evaluated runs", "got none", "Wait for their first evaluation.")
    datasets = sorted({result.dataset for result in results.values()})
    if len(datasets) > 1:
        raise refuse("must be runs of one data set", f"got {', '.join(datasets)}", "Collect each data set by itself.")
    return list(results.values())


def result_of(name: str, options: Mapping[str, Any], lines: Sequence[dict[str, Any]], row: Mapping[str, Any]) -> Result:
    """A case by its options, its metrics (at least one) and its row of the summary."""
    is_part = options["method"] == "fed_avg" and options["case"] != 1  # it has the strong clients of a case alone
    seeds = sorted({line["seed"] for line in lines})
    of_seeds = [[line for line in lines if line["seed"] == seed] for seed in seeds]
    return Result(
        name=name,
        case=None if is_part else options["case"],
        counts=counts_of(options["method"], *(options[label] for label in CLASSES)),
        average_capacity=row.get("capacity", {}).get("average"),
        wanted_rounds=options["rounds"],
        rounds=min(part[-1]["round"] for part in of_seeds),
        seeds=seeds,
        last=np.array([100 * part[-1][METRIC] for part in of_seeds]),
        best=np.array([100 * max(line[METRIC] for line in part) for part in of_seeds]),
        lines=tuple(lines),
        **{key: options[key] for key in ("method", "num_active", "batch_norm", "target_accuracy", "dataset", "nodes")},
    )
