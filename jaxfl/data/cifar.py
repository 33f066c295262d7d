"""CIFAR-10: the binary and the pickled ("python") version, as its authors publish them.

A binary file holds 10,000 records of one label byte and 3,072 pixel bytes; a pickled file holds a dictionary with
`data` (10,000, 3,072) uint8 and `labels`. Either way a row of 3,072 is the red plane, then the green, then the blue.

References:
    A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009,
    https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxfl.core.check import ArgumentError
from jaxfl.data.files import bad_file, check_folder, contents, find_file, read_bytes
from jaxfl.data.pickled import unpickle_arrays

NUM_CLASSES = 10
_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
_SAMPLES_PER_FILE = 10_000
_PICKLED_SIZE = 5  # times the pixels: the oldest protocol writes a byte as up to four characters, and there are names
_STEMS = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


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
    """The same of one pickled file."""
    try:
        batch = unpickle_arrays(read_bytes(path, remedy, _PICKLED_SIZE * _SAMPLES_PER_FILE * _PIXELS))
    except pickle.UnpicklingError as error:
        found = f"unpickling it failed ({error})"
        raise bad_file(path, "be a pickled dictionary with data and labels", found, remedy) from None
    rows, labels = (batch.get(key, batch.get(key.decode())) for key in (b"data", b"labels"))
    shape = (_SAMPLES_PER_FILE, _PIXELS)
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape != shape:
        found = f"{rows.dtype} {rows.shape}" if isinstance(rows, np.ndarray) else "none"
        raise bad_file(path, f"hold data of shape {shape}, uint8", f"it holds {found}", remedy)
    return rows, _as_vector(path, labels, remedy)


def _as_vector(path: Path, labels: Any, remedy: str) -> np.ndarray:
    """The labels of a pickled file, (10,000,), any integer dtype."""
    size = len(labels) if isinstance(labels, list) else labels.size if isinstance(labels, np.ndarray) else None
    if size != _SAMPLES_PER_FILE:
        found = "none" if size is None else f"{size:,}"
        raise bad_file(path, f"hold {_SAMPLES_PER_FILE:,} labels", f"it holds {found}", remedy)
    if isinstance(labels, list):
        # Looked at before NumPy does: it would unfold lists of lists that the file holds once and names many times.
        position = next((place for place, label in enumerate(labels) if type(label) is not int), None)
        if position is not None:
            found = f"label {position} is of type {type(labels[position]).__name__}"
            raise bad_file(path, "hold integer labels", found, remedy)
        try:
            return np.asarray(labels, np.int64)
        except OverflowError:
            raise bad_file(path, f"hold labels of 0 to {NUM_CLASSES - 1}", "it holds huge ones", remedy) from None
    if labels.ndim != 1:
        raise bad_file(path, "hold integer labels", f"it holds shape {labels.shape}", remedy)
    return labels


def _choose_version(folder: Path, remedy: str) -> tuple[Path, str, Callable[..., tuple[np.ndarray, np.ndarray]]]:
    """Find the folder of the files, their suffix and their reader. The binary version wins where both are there."""
    versions = (("cifar-10-batches-bin", ".bin", _read_binary), ("cifar-10-batches-py", "", _read_pickled))
    for subfolder, suffix, reader in versions:
        for place in (folder, folder / subfolder):
            if any(os.path.isfile(place / (stem + suffix)) for stem in _STEMS):
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
    for stem in _STEMS:
        path = find_file(place, [stem + suffix], remedy)
        rows, classes = read(path, remedy)
        bad = (classes < 0) | (classes >= NUM_CLASSES)
        if bad.any():
            position = int(np.argmax(bad))
            found = f"label {position} is {classes[position]}"
            raise bad_file(path, f"hold labels of 0 to {NUM_CLASSES - 1}", found, remedy)
        images.append(np.ascontiguousarray(rows.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)))
        labels.append(classes.astype(np.int32))
    return np.concatenate(images[:-1]), np.concatenate(labels[:-1]), images[-1], labels[-1]
