"""CIFAR-10: the binary and the pickled ("python") version, as its authors publish them.

A binary file holds 10,000 records of one label byte and 3,072 pixel bytes; a pickled file holds a dictionary with
`data` (10,000, 3,072) uint8 and `labels`. Either way a row of 3,072 is the red plane, then the green, then the blue.
A pickled file that differs from the published one is refused and not unpickled.

References:
    A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009,
    https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxfl.core.check import ArgumentError
from jaxfl.data.files import bad_file, check_folder, contents, find_file, read_bytes

NUM_CLASSES = 10
_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
_SAMPLES_PER_FILE = 10_000
_MAX_PICKLED = 1 << 25  # bytes; a published file has 31 MB
# MD5 sums of the pickled files, as torchvision lists them. No practical way to forge bytes for a given sum is known.
_PICKLED = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}


def _read_binary(path: Path, remedy: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows (10,000, 3,072) uint8 and labels (10,000,) of one binary file."""
    record = 1 + _PIXELS
    expected = _SAMPLES_PER_FILE * record
    requirement = f"hold {expected:,} bytes ({_SAMPLES_PER_FILE:,} records of {record:,})"
    content = read_bytes(path, remedy, expected, requirement)
    if len(content) != expected:
        raise bad_file(path, requirement, f"it holds {len(content):,}", remedy)
    table = np.frombuffer(content, np.uint8).reshape(_SAMPLES_PER_FILE, record)
    return table[:, 1:], table[:, 0]


def _read_pickled(path: Path, remedy: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the same from one pickled file. A pickle is a program, so only the published bytes are run."""
    content = read_bytes(path, remedy, _MAX_PICKLED)
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != _PICKLED[path.name]:
        found = "its MD5 sum differs, and unpickling unknown bytes could do anything"
        raise bad_file(path, "be the published file", found, remedy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns about names that an older version wrote
        batch = pickle.loads(content, encoding="bytes")
    return batch[b"data"], np.array(batch[b"labels"])


def _choose_version(folder: Path, remedy: str) -> tuple[Path, str, Callable[..., tuple[np.ndarray, np.ndarray]]]:
    """Find the folder of the files, their suffix and their reader. The binary version is taken if both are there."""
    versions = (("cifar-10-batches-bin", ".bin", _read_binary), ("cifar-10-batches-py", "", _read_pickled))
    for subfolder, suffix, reader in versions:
        for place in (folder, folder / subfolder):
            if any(os.path.isfile(place / (stem + suffix)) for stem in _PICKLED):
                return place, suffix, reader
    requirement = "must hold data_batch_1.bin to data_batch_5.bin and test_batch.bin, or the same without .bin"
    found = f"{folder} holds {contents(folder)}"
    raise ArgumentError("data_dir", requirement, found, remedy)


def load_cifar10(data_dir: str | os.PathLike[str] | None) -> tuple[np.ndarray, ...]:
    """The four arrays of CIFAR-10.

    Args:
        data_dir: folder with the six files of either version, or the folder above `cifar-10-batches-bin` or
            `cifar-10-batches-py`.

    Returns:
        (train images, train labels, test images, test labels): (N, 32, 32, 3) uint8 and (N,) int32.

    Raises:
        ArgumentError: a file is missing or unusable.
    """
    remedy = (
        "Download https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz (or cifar-10-python.tar.gz) "
        "and unpack it into this folder."
    )
    folder = check_folder(data_dir, "the folder with the files of cifar10", remedy)
    place, suffix, read = _choose_version(folder, remedy)
    images, labels = [], []
    for stem in _PICKLED:
        path = find_file(place, [stem + suffix], remedy)
        rows, classes = read(path, remedy)
        if classes.max() >= NUM_CLASSES:
            position = int(np.argmax(classes >= NUM_CLASSES))
            found = f"label {position} is {classes[position]}"
            raise bad_file(path, f"hold labels of 0 to {NUM_CLASSES - 1}", found, remedy)
        images.append(np.ascontiguousarray(rows.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)))
        labels.append(classes.astype(np.int32))
    return np.concatenate(images[:-1]), np.concatenate(labels[:-1]), images[-1], labels[-1]
