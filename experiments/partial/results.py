"""What runs of experiments.embracing_fl found, read from their directories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxfl.core import ArgumentError
from jaxfl.training import read_run

METRIC = "test_accuracy"


class Result(NamedTuple):
    """One variant of one run."""

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
    def label(self) -> str:
        """Its clients."""
        if self.case is not None:
            return f"case {self.case}"
        names = ("strong", "moderate", "weak")
        return ", ".join(f"{count} {name}" for count, name in zip(self.counts, names, strict=True) if count)

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
        assert self.target_accuracy is not None
        return rounds_to_target(self.lines, self.seeds, self.target_accuracy)

    def _of(self, seed: int) -> list[float]:
        return [line[METRIC] for line in self.lines if line["seed"] == seed]


def rounds_to_target(lines: Sequence[Mapping[str, Any]], seeds: Sequence[int], target: float) -> list[int | None]:
    """The first evaluated round of each seed at which the accuracy reaches a target; None where it never does.

    Args:
        lines: of metrics.jsonl, of one variant.
        seeds: in the order of the result.
        target: in [0, 1].

    Example:
        >>> lines = [{"seed": 0, "round": r, "test_accuracy": r / 10} for r in (0, 5, 10)]
        >>> rounds_to_target(lines, [0, 1], 0.4)
        [5, None]
    """
    reached = [[line["round"] for line in lines if line["seed"] == seed and line[METRIC] >= target] for seed in seeds]
    return [min(rounds) if rounds else None for rounds in reached]


def read_results(directories: Sequence[str]) -> list[Result]:
    """The variants of run directories, in their order; of one that is in several, the last.

    Raises:
        ArgumentError: a directory holds no run, one of another experiment, or one that has not been evaluated yet; or
            the runs are of different data sets.
    """
    found: dict[Any, Result] = {}
    for directory in directories:
        path = Path(directory).expanduser()
        try:
            run = read_run(path)
        except ArgumentError as error:
            raise ArgumentError("collect", error.requirement, error.found, error.remedy) from None
        if run.config["experiment"] != "embracing_fl":
            seen = f"{path} is one of {run.config['experiment']}"
            raise ArgumentError("collect", "must be runs of embracing_fl", seen, "Name other directories.")
        config, lines = run.config["config"], run.read_metrics()
        summary = run.read_summary()["variants"] if (path / "summary.json").exists() else {}
        for name, variant in config["variants"].items():
            own = tuple(line for line in lines if line["variant"] == name)
            if not own:
                continue
            active = variant["num_active"]
            result = Result(
                name=name,
                method=variant["method"],
                case=variant["case"],
                counts=tuple(variant["counts"]),
                num_active=active if isinstance(active, int) else sum(active),
                batch_norm=variant["batch_norm"],
                target_accuracy=variant["target_accuracy"],
                average_capacity=summary.get(name, {}).get("capacity", {}).get("average"),
                dataset=config["dataset"],
                nodes=config["nodes"],
                wanted_rounds=config["rounds"],
                lines=own,
            )
            found[result.dataset, result.method, result.comparison, result.batch_norm, result.nodes] = result
    results = list(found.values())
    if not results:
        raise ArgumentError("collect", "must hold evaluated runs", "got none", "Wait for their first evaluation.")
    if len({result.dataset for result in results}) > 1:
        seen = f"got {', '.join(sorted({result.dataset for result in results}))}"
        raise ArgumentError("collect", "must be runs of one data set", seen, "Collect each data set by itself.")
    return results
