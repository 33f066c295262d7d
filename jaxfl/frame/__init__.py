"""Common parts of all experiments: records of options, choices by name, presets, grids, one command line."""

from __future__ import annotations

from jaxfl.frame.choose import Choice, choose, where
from jaxfl.frame.command_line import main
from jaxfl.frame.experiment import (
    Experiment,
    Finished,
    Layer,
    Line,
    Prepared,
    Preset,
    Request,
    few,
    identity,
    programs,
    variants_of,
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
    "Layer",
    "Line",
    "Network",
    "Prepared",
    "Preset",
    "Publication",
    "Request",
    "Run",
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
    "variants_of",
    "where",
]
