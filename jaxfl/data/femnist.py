"""FEMNIST: handwritten characters by writer, in the JSON files that LEAF's scripts make.

LEAF offers no files to download, but scripts that make them from NIST's data: `data/train/*.json` and
`data/test/*.json`, each with about a hundred writers,

    {"users": [name, ...], "num_samples": [count, ...], "user_data": {name: {"x": [[784 numbers], ...], "y": [...]}}}

An image is 28 by 28, row by row, with numbers in [0, 1]: 1 for paper, 0 for ink. Classes 0 to 61 are
the digits, the capital letters and the small letters.

References:
    S. Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018, arXiv:1812.01097,
    https://github.com/TalwalkarLab/leaf/tree/master/data/femnist.
"""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxfl.core.check import ArgumentError
from jaxfl.data.files import bad_file, check_folder, contents, read_bytes

NUM_CLASSES = 62
_SIDE = 28
_PIXELS = _SIDE * _SIDE
_NUMBERS = frozenset((float, int))
# Decompressed. A file of a hundred writers has 130 MB on average. Parsed, one byte can take 25 (a list for each "[],").
_MAX_BYTES = 1 << 29
_REMEDY = (
    "Make the files with ./preprocess.sh -s niid --sf 1.0 -k 0 -t sample in data/femnist of "
    "https://github.com/TalwalkarLab/leaf and pass its folder data."
)


def load_femnist(data_dir: str | os.PathLike[str] | None) -> tuple[np.ndarray, ...]:
    """The four arrays of FEMNIST and the writers of its training samples.

    Args:
        data_dir: the folder with LEAF's `train` and `test`, or the folder above `data` with these.

    Returns:
        (train images, train labels, test images, test labels, train writers): (N, 28, 28, 1) float32 in [0, 1], (N,)
        int32, and (N,) int32 numbers of writers, from 0 in the order of their names. A writer's samples keep their
        order and lie together.

    Raises:
        ArgumentError: a folder or file is missing or unusable.

    Guarantees:
        - the numbers come back as they are in the files, in float32.
    """
    folder = check_folder(data_dir, "the folder with LEAF's train and test of femnist", _REMEDY)
    place = folder / "data" if os.path.isdir(folder / "data" / "train") else folder
    (images, labels, writers), (test_images, test_labels, _) = (
        _read_split(place, split) for split in ("train", "test")
    )
    return images, labels, test_images, test_labels, writers


def _read_split(place: Path, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, labels and writers of "train" or "test"."""
    paths = sorted((place / split).glob("*.json")) if os.path.isdir(place / split) else []
    if not paths:
        within = place / split if os.path.isdir(place / split) else place
        requirement = f"must hold {split} with JSON files"
        raise ArgumentError("data_dir", requirement, f"{within} holds {contents(within)}", _REMEDY)
    by_writer: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for path in paths:
        for writer, images, labels in _read_file(path):
            if writer in by_writer:
                raise bad_file(path, "hold writers of no other file", f"it holds {writer} again", _REMEDY)
            by_writer[writer] = images, labels
    if not by_writer:
        raise bad_file(paths[0], "hold at least one writer", "it holds none", _REMEDY)
    names = sorted(by_writer)
    sizes = [len(by_writer[name][1]) for name in names]
    images = np.concatenate([by_writer[name][0] for name in names]).reshape(-1, _SIDE, _SIDE, 1)
    labels = np.concatenate([by_writer[name][1] for name in names])
    return images, labels, np.repeat(np.arange(len(names), dtype=np.int32), sizes)


def _read_file(path: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(name, images (samples, 784) float32, labels (samples,) int32) of each writer of one file."""
    try:
        content = json.loads(read_bytes(path, _REMEDY, _MAX_BYTES), object_pairs_hook=_without_repeats)
    except ArgumentError:
        raise
    except (ValueError, RecursionError) as error:  # JSON that is cut off or nested too deeply, or not UTF-8 text
        raise bad_file(path, "be a complete JSON file", f"reading it failed ({error})", _REMEDY) from None
    if not isinstance(content, dict) or not {"users", "num_samples", "user_data"} <= content.keys():
        found = f"it holds {', '.join(list(content)[:4]) or 'nothing'}" if isinstance(content, dict) else "it is none"
        raise bad_file(path, "be a dictionary with users, num_samples and user_data", found, _REMEDY)
    users, sizes, samples = content["users"], content["num_samples"], content["user_data"]
    lists = isinstance(users, list) and isinstance(sizes, list) and all(isinstance(user, str) for user in users)
    if not lists or not isinstance(samples, dict) or not all(type(size) is int for size in sizes):
        requirement = "hold lists of names and of whole num_samples, and a dictionary of user_data"
        raise bad_file(path, requirement, "it holds something else", _REMEDY)
    if len(users) != len(sizes) or set(users) != samples.keys() or len(users) != len(samples):
        found = f"it holds {len(users):,}, {len(sizes):,} and {len(samples):,}"
        raise bad_file(path, "hold the same writers in users, num_samples and user_data, each once", found, _REMEDY)
    for user, size in zip(users, sizes, strict=True):
        images, labels = _of_writer(path, user, samples.pop(user))  # the lists are a hundred times as large
        if not len(images) == len(labels) == size:
            found = f"it holds {len(images):,} images, {len(labels):,} labels and the number {size}"
            raise bad_file(path, f"hold as many samples of {user} as num_samples says, at least 1", found, _REMEDY)
        yield user, images, labels


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dictionary of JSON. Refuse a repeated name, of which Python would silently keep the last value."""
    content = dict(pairs)
    if len(content) != len(pairs):
        name = next(name for name, count in collections.Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"it names {name} twice in a dictionary")
    return content


def _of_writer(path: Path, user: str, data: Any) -> tuple[np.ndarray, np.ndarray]:
    """Images (samples, 784) float32 in [0, 1] and labels (samples,) int32 of one writer."""
    images, labels = (data.get("x"), data.get("y")) if isinstance(data, dict) else (None, None)
    # Types are checked first: NumPy would take true for 1, the text "0.5" for a half, and 2.0 for a whole number.
    if not isinstance(images, list) or not isinstance(labels, list) or not images:
        found = f"{user} has {_description(images)} for x and {_description(labels)} for y"
        raise bad_file(path, f"hold x of {_PIXELS} numbers and a whole number y for each sample", found, _REMEDY)
    for position, image in enumerate(images):
        if not isinstance(image, list) or len(image) != _PIXELS or not _NUMBERS.issuperset(map(type, image)):
            found = f"sample {position} of {user} has {_description(image)}"
            raise bad_file(path, f"hold x of {_PIXELS} numbers for each sample", found, _REMEDY)
    try:
        pixels = np.asarray(images, np.float64)
    except OverflowError:
        raise bad_file(path, "hold images in [0, 1]", f"{user} has an integer beyond float range", _REMEDY) from None
    bad = ~((pixels >= 0) & (pixels <= 1))
    if bad.any():
        position, pixel = np.argwhere(bad)[0]
        found = f"sample {position} of {user} has {pixels[position, pixel]}"
        raise bad_file(path, "hold images in [0, 1]", found, _REMEDY)
    for position, label in enumerate(labels):
        if type(label) is not int:
            found = f"label {position} of {user} is of type {type(label).__name__}"
            raise bad_file(path, "hold a whole number y for each sample", found, _REMEDY)
        if not 0 <= label < NUM_CLASSES:
            found = f"label {position} of {user} is {label}"
            raise bad_file(path, f"hold labels of 0 to {NUM_CLASSES - 1}", found, _REMEDY)
    return pixels.astype(np.float32), np.asarray(labels, np.int32)


def _description(value: Any) -> str:
    """Describe a value found in place of the expected list, for an error sentence: the types in a list, or the type."""
    if not isinstance(value, list):
        return "nothing" if value is None else f"a {type(value).__name__}"
    kinds = ", ".join(sorted({type(entry).__name__ for entry in value}))
    return f"{len(value):,} of type {kinds}" if value else "an empty list"
