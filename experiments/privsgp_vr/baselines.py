"""Rows to compare with: each node by itself, all samples in one place with and without noise, no noise."""

from __future__ import annotations

from typing import Any

from jaxfl.frame import Row

from .options import INFINITY

_SILENT = {"noise_std": 0.0, "target_epsilon": INFINITY, "node_noise": (), "node_epsilons": (), "trust": "everyone"}
_ALONE = {"graph": "isolated", "mixings": 1, "final_mixings": 0, "trust": "everyone"}


def _pooled(row: Row) -> dict[str, Any]:
    """One node with all samples, and batches of as many as all nodes take together."""
    nodes = row.config.clients.nodes
    batch_size = nodes * row.config.learning.batch_size
    return {**_SILENT, **_ALONE, "nodes": 1, "partition": "iid", "batch_size": batch_size}


def _curator(row: Row) -> dict[str, Any] | None:
    """DP-SGD on all samples in one place, at the least budget of a node; None where no number is one."""
    budget = row.config.budget
    if isinstance(budget.node_epsilons, str) or not budget.limits:
        return None
    noise = {"noise_std": "calibrated", "target_epsilon": min(budget.limits)}
    return {**_pooled(row), "method": "PrivSGP", **noise}


BASELINES = {
    "alone": lambda row: _ALONE,
    "pooled": _pooled,
    "curator": _curator,
    "without_noise": lambda row: _SILENT,
}
