"""Data on the host: named data sets, partitions over nodes, and the pool of samples that algorithms take."""

from jaxfl.data.held_out import hold_out
from jaxfl.data.partition import by_owner, dirichlet, few_classes, iid, label_counts, label_shards, whole_writers
from jaxfl.data.pool import federate, partition_dataset
from jaxfl.data.sources import Dataset, from_arrays, load
from jaxfl.data.subset import only_classes, shrunk, subset
from jaxfl.data.tables import load_file

__all__ = [
    "Dataset",
    "by_owner",
    "dirichlet",
    "federate",
    "few_classes",
    "from_arrays",
    "hold_out",
    "iid",
    "label_counts",
    "label_shards",
    "load",
    "load_file",
    "only_classes",
    "partition_dataset",
    "shrunk",
    "subset",
    "whole_writers",
]
