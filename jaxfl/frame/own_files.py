"""Options that follow from a file of one's own: its sites, and batches that fit the smallest of them."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import numpy as np

from jaxfl.data.pool import writers_of
from jaxfl.data.tables import is_file
from jaxfl.frame.options import flat, lay

FITTED = ("iid", "sites")  # partitions that tell the smallest node's samples without dealing
_SHARE = 0.45  # of the smallest node's samples, the largest default batch: what digits have


def of_sites(config: Any, given: Collection[str]) -> dict[str, Any]:
    """Options that follow from a column of sites unless they are given: each site is a node."""
    values, changes = flat(config), {}
    if not is_file(values.get("dataset", "")):
        return changes
    if values.get("site_column") and "partition" in values and "partition" not in given:
        changes["partition"] = "sites"
    if {**values, **changes}.get("partition") == "sites" and "nodes" not in given:
        changes["nodes"] = len(np.unique(writers_of(config.data.load())))
    return changes


def fitted(config: Any, given: Collection[str]) -> Any:
    """The configuration with a default batch that the smallest node of a file can draw, where that is known."""
    values = flat(config)
    if "batch_size" in given or not is_file(values.get("dataset", "")) or not isinstance(values.get("batch_size"), int):
        return config
    least = _least_samples(config.data, values.get("partition"), values.get("nodes", 1))
    if least is None:
        return config
    most = int(_SHARE * least * (1 - values.get("own_test", 0.0)))
    return lay(config, {"batch_size": max(1, min(values["batch_size"], most))})


@functools.lru_cache(maxsize=64)  # asked for once an option that follows from others
def _least_samples(data: Any, partition: str | None, nodes: int) -> int | None:
    """Samples of the smallest node, for `FITTED` partitions; else None."""
    if partition not in FITTED:
        return None
    dataset = data.load()
    if partition == "sites":
        return int(np.unique(writers_of(dataset), return_counts=True)[1].min())
    return len(dataset.train_labels) // max(1, nodes)
