"""What runs of experiments.embracing_fl found, read from their directories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.embracing_fl.methods import CLASSES, counts_of, label_of
from jaxfl.core import ArgumentError
from jaxfl.training import read_run

METRIC = "test_accuracy"
COMPARED = (
    "method",
    "case",
    *CLASSES,
    "participation_rate",
    "num_active",
    "batch_norm",
    "target_accuracy",
    "nodes",
)  # options


class Result(NamedTuple):
    """One line of one run."""

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
    lines: tuple[dict[str, Any], ...]  # of metrics.jsonl

    @property
    def comparison(self) -> tuple[int, tuple[int, int, int], int]:
        """What methods have in common that are compared: case (11 for none), clients, and how many are active."""
        return self.case or 11, self.counts, self.num_active

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells results apart."""
        return self.dataset, self.method, self.comparison, self.batch_norm, self.nodes

    @property
    def label(self) -> str:
        """Its clients."""
        return label_of(self.case, self.counts, joint=", ")

    @property
    def seeds(self) -> list[int]:
        """Those that have been evaluated."""
        return sorted({line["seed"] for line in self.lines})

    @property
    def rounds(self) -> int:
        """Fewest of all seeds."""
        return min(max(line["round"] for line in self.lines if line["seed"] == seed) for seed in self.seeds)

    def last(self) -> np.ndarray:
        """(seeds,), accuracy in per cent at the last evaluation."""
        return np.array([100 * self._of(seed)[-1] for seed in self.seeds])

    def best(self) -> np.ndarray:
        """(seeds,), the highest at any evaluation."""
        return np.array([100 * max(self._of(seed)) for seed in self.seeds])

    def rounds_to_target(self) -> list[int | None]:
        """As `rounds_to_target`, for each seed."""
        return rounds_to_target(self.lines, self.seeds, self.target_accuracy or 0.0)

    def _of(self, seed: int) -> list[float]:
        return [line[METRIC] for line in self.lines if line["seed"] == seed]


def rounds_to_target(lines: Sequence[Mapping[str, Any]], seeds: Sequence[int], target: float) -> list[int | None]:
    """The first evaluated round of each seed at which the accuracy reaches a target; None where it never does.

    Example:
        >>> lines = [{"seed": 0, "round": r, "test_accuracy": r / 10} for r in (0, 5, 10)]
        >>> rounds_to_target(lines, [0, 1], 0.4)
        [5, None]
    """
    reached = [[line["round"] for line in lines if line["seed"] == seed and line[METRIC] >= target] for seed in seeds]
    return [min(rounds) if rounds else None for rounds in reached]


def read_results(directories: Sequence[str]) -> list[Result]:
    """The lines of run directories, in their order; of one that is in several, the last.

    Raises:
        ArgumentError: a directory holds no run, one of another experiment, one of lines that differ in what is not
            compared here, or one that has not been evaluated yet; or the runs are of different data sets.
    """
    results: dict[Any, Result] = {}
    for directory in directories:
        path = Path(directory).expanduser()
        try:
            run = read_run(path)
        except ArgumentError as error:
            raise ArgumentError("collect", error.requirement, error.found, error.remedy) from None
        if run.config["experiment"] != "embracing_fl":
            found = f"{path} is one of {run.config['experiment']}"
            raise ArgumentError("collect", "must be runs of embracing_fl", found, "Name other directories.")
        summary = run.read_summary()["variants"] if (path / "summary.json").exists() else {}
        metrics, config = run.read_metrics(), run.config["config"]
        of_run = {}
        if "lines" not in config:
            raise ArgumentError(
                "collect", "must be runs of this version", f"{path} is older", "Name other directories."
            )
        for name, changes in config["lines"].items():
            lines = tuple(line for line in metrics if line["variant"] == name)
            result = _result(name, {**config, **changes}, lines, summary.get(name, {}))
            if result.key in of_run:
                found = f"{path} compares {of_run[result.key].name} and {name}"
                raise ArgumentError("collect", "must be runs of cases and methods", found, "Name other directories.")
            of_run |= {result.key: result} if lines else {}
        results |= of_run
    if not results:
        raise ArgumentError("collect", "must hold evaluated runs", "got none", "Wait for their first evaluation.")
    datasets = sorted({result.dataset for result in results.values()})
    if len(datasets) > 1:
        found = f"got {', '.join(datasets)}"
        raise ArgumentError("collect", "must be runs of one data set", found, "Collect each data set by itself.")
    return list(results.values())


def _result(name: str, options: Mapping[str, Any], lines: tuple[dict[str, Any], ...], row: Mapping[str, Any]) -> Result:
    """A line by its options, its metrics and its row of the summary."""
    is_part = options["method"] == "fed_avg" and options["case"] != 1  # it has the strong clients of a case alone
    return Result(
        name=name,
        case=None if is_part else options["case"],
        counts=counts_of(options["method"], *(options[label] for label in CLASSES)),
        average_capacity=row.get("capacity", {}).get("average"),
        wanted_rounds=options["rounds"],
        lines=lines,
        **{key: options[key] for key in ("method", "num_active", "batch_norm", "target_accuracy", "dataset", "nodes")},
    )
