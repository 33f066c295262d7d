"""Consequences of a file of one's own: sites, batches that fit the smallest of them, assumptions of statements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxfl.data.columns import is_file
from jaxfl.data.pool import FROM_LABELS, writers_of
from jaxfl.data.sources import Dataset
from jaxfl.frame.options import flat, override

FITTED = ("iid", "sites")  # partitions that tell the smallest node's samples without dealing
_DEALT = ("iid", "quantity", "num_train")  # that deal by places in the whole table
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


def dataset_of(config: Any) -> Dataset | None:
    """The data set of a configuration, where it is a file of one's own."""
    return config.data.load() if is_file(flat(config).get("dataset", "")) else None


def of_own_file(config: Any, privacy: Callable[..., Sequence[Mapping[str, Any]]] | None) -> dict[str, Any]:
    """Fields of a case on a file of one's own: names of classes, and statements that name what looks at all samples."""
    dataset, values = dataset_of(config), flat(config)
    if dataset is None or dataset.reading is None:
        return {}
    notes = [f"which samples test is public ({dataset.reading.tests})"]
    if values.get("own_test"):
        notes.append("which samples a node holds out to test its own model is public")
    if values.get("validation"):
        notes.append("which samples validate is public: the choice of settings that looks at them is not accounted for")
    if values.get("classes") is not None:
        notes.append("which samples have one of the classes is public: the others are left out")
    else:
        notes.append(
            "the set of classes is public, though it is taken from the labels of all samples (--classes gives it)"
        )
    if values.get("partition") in FROM_LABELS:
        notes.append(
            f"the partition ({values['partition']}) is public, though it is made from the labels of all samples"
        )
    dealt = [name for name in (values.get("partition"), "num_train") if name in _DEALT and values.get(name, True)]
    if dealt:
        deal = "deal all" if dealt[1:] else "deals all"
        notes.append(f"the number of samples is public: {' and '.join(dealt)} {deal} samples anew for another number")

    def noted(*args: Any, **options: Any) -> list[dict[str, Any]]:
        assert privacy is not None
        return [{**row, "assumptions": (*row["assumptions"], *notes)} for row in privacy(*args, **options)]

    names = {"class_names": dataset.class_names or ()}
    # With the parameters of `privacy`, by which a private selection tells statements at every delta.
    return names if privacy is None else {**names, "privacy": functools.wraps(privacy)(noted)}


def fitted(config: Any, given: Collection[str]) -> Any:
    """The configuration with a default batch that the smallest node of a file can draw, where that is known."""
    values = flat(config)
    if "batch_size" in given or not is_file(values.get("dataset", "")) or not isinstance(values.get("batch_size"), int):
        return config
    least = _least_samples(config.data, values.get("partition"), values.get("nodes", 1))
    if least is None:
        return config
    most = int(_SHARE * least * (1 - values.get("own_test", 0.0)))
    return override(config, {"batch_size": max(1, min(values["batch_size"], most))})


@functools.lru_cache(maxsize=64)  # asked for once an option that follows from others
def _least_samples(data: Any, partition: str | None, nodes: int) -> int | None:
    """Samples of the smallest node, for `FITTED` partitions; else None."""
    if partition not in FITTED:
        return None
    dataset = data.load()
    if partition == "sites":
        return int(np.unique(writers_of(dataset), return_counts=True)[1].min())
    return len(dataset.train_labels) // max(1, nodes)
