"""Common parts of all experiments: records of options, choices by name, presets, grids, one command line."""

from __future__ import annotations

from jaxfl.frame.choose import Choice, choose, where
from jaxfl.frame.command_line import main
from jaxfl.frame.experiment import (
    Experiment,
    Finished,
    Overlay,
    Prepared,
    Preset,
    Request,
    Row,
    cases_of,
    few,
    identity,
    programs,
)
from jaxfl.frame.options import flat, lay, stated, traced, unsaved
from jaxfl.frame.records import Clients, Costs, Data, Network, Publication, Run

__all__ = [
    "Choice",
    "Clients",
    "Costs",
    "Data",
    "Experiment",
    "Finished",
    "Network",
    "Overlay",
    "Prepared",
    "Preset",
    "Publication",
    "Request",
    "Row",
    "Run",
    "cases_of",
    "choose",
    "few",
    "flat",
    "identity",
    "lay",
    "main",
    "programs",
    "stated",
    "traced",
    "unsaved",
    "where",
]
