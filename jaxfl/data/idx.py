"""MNIST and Fashion-MNIST: IDX files, as their authors publish them.

An IDX file is a big-endian header (two zero bytes, a type code, the number of axes, then the length of every axis in
four bytes each) followed by the values in row-major order. Both data sets use type code 8, unsigned bytes.

References:
    Y. LeCun, C. Cortes, C. J. C. Burges, "The MNIST database of handwritten digits", 1998.
    H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
    Algorithms", 2017, https://github.com/zalandoresearch/fashion-mnist.
"""

from __future__ import annotations

import math
import os
import zlib
from pathlib import Path

import numpy as np

from jaxfl.core.check import ArgumentError
from jaxfl.data.files import bad_file, check_folder, find_file, read_bytes, read_start

NUM_CLASSES = 10
_SIDE = 28
_UNSIGNED_BYTES = 0x08
_MAX_BYTES = 1 << 30  # twenty times the published training images; a gzip file of 1 MB could expand to it

_ADDRESSES = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion_mnist": "https://github.com/zalandoresearch/fashion-mnist/tree/master/data/fashion",
}
# CRC-32 of the published training labels. The two data sets share file names and shapes, so that one in place of the
# other would train without an error and be reported under the wrong name.
_TRAIN_LABELS_CRC = {"mnist": 0xBA07E8EF, "fashion_mnist": 0x2ED6E46A}


def read_idx(path: Path, num_axes: int, remedy: str) -> np.ndarray:
    """The array in one IDX file of unsigned bytes, gzip or not.

    Args:
        path: the file.
        num_axes: the number of axes it must have: 3 for images, 1 for labels.
        remedy: how to get a good copy.

    Returns:
        An array of `num_axes` axes, uint8.

    Raises:
        ArgumentError: a file that is unusable or empty.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "labels"
        >>> _ = file.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 5, 0, 4]))
        >>> read_idx(file, 1, "Download it again.").tolist()
        [5, 0, 4]
    """
    header = 4 + 4 * num_axes
    start = read_start(path, remedy, header)
    magic = bytes([0, 0, _UNSIGNED_BYTES, num_axes])
    if start[:4] != magic or len(start) < header:
        found = f"its first bytes are 0x{start[:4].hex()}, of {len(start)}" if start else "it is empty"
        raise bad_file(path, f"begin with an IDX header of {header} bytes, 0x{magic.hex()} first", found, remedy)
    shape = tuple(int(length) for length in np.frombuffer(start, ">u4", num_axes, offset=4))
    expected = header + math.prod(shape)
    if math.prod(shape) == 0:
        raise bad_file(path, "hold at least one sample", f"its shape is {shape}", remedy)
    if expected > _MAX_BYTES:
        raise bad_file(path, f"hold at most {_MAX_BYTES:,} bytes", f"its header has the shape {shape}", remedy)
    requirement = f"hold {expected:,} bytes for the shape {shape} of its header"
    content = read_bytes(path, remedy, expected, requirement)
    if len(content) != expected:
        raise bad_file(path, requirement, f"it holds {len(content):,}", remedy)
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy()


def _read_split(folder: Path, split: str, remedy: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 28, 28, 1) uint8 and labels (N,) int32 of "train" or "t10k"."""
    paths = []
    for kind, num_axes in (("images", 3), ("labels", 1)):
        # Some archives unpack to names with a dot in place of the last dash.
        stems = (f"{split}-{kind}-idx{num_axes}-ubyte", f"{split}-{kind}.idx{num_axes}-ubyte")
        paths.append(find_file(folder, [stem + end for stem in stems for end in ("", ".gz")], remedy))
    images_path, labels_path = paths
    images, labels = read_idx(images_path, 3, remedy), read_idx(labels_path, 1, remedy)
    if images.shape[1:] != (_SIDE, _SIDE):
        found = f"they are {images.shape[1]} by {images.shape[2]}"
        raise bad_file(images_path, f"hold images of {_SIDE} by {_SIDE} pixels", found, remedy)
    if len(images) != len(labels):
        requirement = f"hold one label for each of the {len(images):,} images of {images_path.name}"
        raise bad_file(labels_path, requirement, f"it holds {len(labels):,}", remedy)
    if labels.max() >= NUM_CLASSES:
        position = int(np.argmax(labels >= NUM_CLASSES))
        found = f"label {position} is {labels[position]}"
        raise bad_file(labels_path, f"hold labels of 0 to {NUM_CLASSES - 1}", found, remedy)
    return images[..., np.newaxis], labels.astype(np.int32)


def load_idx(name: str, data_dir: str | os.PathLike[str] | None) -> tuple[np.ndarray, ...]:
    """The four arrays of MNIST or Fashion-MNIST.

    Args:
        name: "mnist" or "fashion_mnist".
        data_dir: folder with the four files under their published names, each gzip or not.

    Returns:
        (train images, train labels, test images, test labels): (N, 28, 28, 1) uint8 and (N,) int32.

    Raises:
        ArgumentError: a file is missing or unusable.
    """
    remedy = f"Download the four files train-* and t10k-* from {_ADDRESSES[name]} into this folder."
    folder = check_folder(data_dir, f"the folder with the four IDX files of {name}", remedy)
    train, test = (_read_split(folder, split, remedy) for split in ("train", "t10k"))
    checksum = zlib.crc32(train[1].astype(np.uint8).tobytes())
    for other, crc in _TRAIN_LABELS_CRC.items():
        if other != name and checksum == crc:
            found = f"the training labels in {folder} are those of {other}"
            raise ArgumentError(
                "data_dir", f"must hold the files of {name}", found, f"Choose {other} or another folder."
            )
    return (*train, *test)
