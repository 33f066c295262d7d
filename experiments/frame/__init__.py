"""Common parts of all experiments: records of options, choices by name, presets, grids, one command line."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping

import experiments
from experiments.frame.choose import Choice, Owned, choose
from experiments.frame.command_line import main
from experiments.frame.experiment import (
    Experiment,
    Finished,
    Layer,
    Line,
    Prepared,
    Preset,
    Request,
    identity,
    programs,
)
from experiments.frame.options import flat, lay, stated, traced, unsaved
from experiments.frame.records import Clients, Costs, Data, Network, Publication, Run

__all__ = [
    "EXPERIMENTS",
    "Choice",
    "Clients",
    "Costs",
    "Data",
    "Experiment",
    "Finished",
    "Layer",
    "Line",
    "Network",
    "Owned",
    "Prepared",
    "Preset",
    "Publication",
    "Request",
    "Run",
    "choose",
    "flat",
    "identity",
    "lay",
    "main",
    "programs",
    "stated",
    "traced",
    "unsaved",
]


class _Experiments(Mapping[str, Experiment]):
    """Name -> experiment: every package beside this one whose front holds an EXPERIMENT, imported when asked for."""

    def __iter__(self) -> Iterator[str]:
        names = [module.name for module in pkgutil.iter_modules(experiments.__path__) if module.ispkg]
        return iter([name for name in names if hasattr(_front(name), "EXPERIMENT")])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, name: str) -> Experiment:
        if name not in iter(self):
            raise KeyError(name)
        return _front(name).EXPERIMENT


def _front(name: str):
    return importlib.import_module(f"experiments.{name}")


EXPERIMENTS: Mapping[str, Experiment] = _Experiments()
