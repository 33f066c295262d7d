"""Tiny made-up data sets in their authors' file formats: the same bytes everywhere, and classes that can be learned."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

NUM_WRITERS, SAMPLES_PER_WRITER, TESTS_PER_WRITER = 16, 12, 4
_RECORDS = 10_000  # of a CIFAR-10 file, which has neither more nor fewer
_WORDS = (("dull", "bad", "awful", "boring"), ("great", "good", "moving", "funny"), ("film", "the", "a", "plot", "it"))


def patterns(rng: np.random.Generator, labels: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Values of 0 to 255, (N, *shape), uint8: a random pattern for each class, and noise on it."""
    of_class = rng.integers(0, 256, (int(labels.max()) + 1, *shape))
    noise = rng.integers(-60, 61, (len(labels), *shape))
    return np.clip(of_class[labels] + noise, 0, 255).astype(np.uint8)


def _coarse(images: np.ndarray, factor: int) -> np.ndarray:
    """Each pixel of (..., height, width) as a square of several pixels a side."""
    return images.repeat(factor, axis=-2).repeat(factor, axis=-1)


def write_idx(folder: Path, seed: int, num_train: int = 600, num_test: int = 150) -> None:
    """The four files of MNIST or Fashion-MNIST."""
    rng = np.random.default_rng(seed)
    labels = np.arange(num_train + num_test) % 10
    images = _coarse(patterns(rng, labels, (7, 7)), 4)
    for split, part in (("train", slice(num_train)), ("t10k", slice(num_train, None))):
        for kind, values in (("images", images[part]), ("labels", labels[part])):
            header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
            content = header + values.astype(np.uint8).tobytes()
            (folder / f"{split}-{kind}-idx{values.ndim}-ubyte.gz").write_bytes(gzip.compress(content, mtime=0))


def write_cifar10(folder: Path, seed: int) -> None:
    """The six binary files, compressed: of 180 MB a few are left."""
    rng = np.random.default_rng(seed)
    labels = np.arange(_RECORDS) % 10
    of_class = rng.integers(0, 256, (10, 3, 4, 4))
    for stem in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        rows = np.clip(of_class[labels] + rng.integers(-60, 61, (_RECORDS, 3, 4, 4)), 0, 255).astype(np.uint8)
        records = np.column_stack([labels.astype(np.uint8), _coarse(rows, 8).reshape(_RECORDS, -1)])
        (folder / f"{stem}.bin").write_bytes(gzip.compress(records.tobytes(), 1, mtime=0))


def write_femnist(folder: Path, seed: int) -> None:
    """A file of training and of test samples, as LEAF's scripts make them."""
    rng = np.random.default_rng(seed)
    per_writer = SAMPLES_PER_WRITER + TESTS_PER_WRITER
    labels = np.arange(NUM_WRITERS * per_writer) * 7 % 62
    images = np.round(_coarse(patterns(rng, labels, (7, 7)), 4).reshape(-1, 784) / 255, 3)
    content = {split: {"users": [], "num_samples": [], "user_data": {}} for split in ("train", "test")}
    for writer in range(NUM_WRITERS):
        first, name = writer * per_writer, f"f{writer:04d}_00"
        between = first + SAMPLES_PER_WRITER
        for split, part in (("train", slice(first, between)), ("test", slice(between, first + per_writer))):
            content[split]["users"].append(name)
            content[split]["num_samples"].append(part.stop - part.start)
            content[split]["user_data"][name] = {"x": images[part].tolist(), "y": labels[part].tolist()}
    for split, values in content.items():
        (folder / split).mkdir()
        (folder / split / f"all_data_0_niid_0_keep_0_{split}_9.json").write_text(json.dumps(values))


def write_imdb(folder: Path, seed: int, num_reviews: int = 50) -> None:
    """The four folders, with this number of reviews in each."""
    rng = np.random.default_rng(seed)
    for split in ("train", "test"):
        for kind, name in enumerate(("neg", "pos")):
            place = folder / "aclImdb" / split / name
            place.mkdir(parents=True)
            for number in range(num_reviews):
                known = np.array([*_WORDS[kind], *_WORDS[2]])
                review = " ".join(known[rng.integers(0, len(known), int(rng.integers(8, 40)))])
                (place / f"{number}_{3 + 5 * kind}.txt").write_text(review)


WRITERS: dict[str, Callable[[Path, int], None]] = {
    "mnist": write_idx,
    "fashion_mnist": write_idx,
    "cifar10": write_cifar10,
    "femnist": write_femnist,
    "imdb": write_imdb,
}


def write(folder: Path, *names: str) -> dict[str, Path]:
    """The data sets of these names, by default all, each in a folder of its name; those that are there stay.

    Returns:
        Name -> folder, as --data-dir takes it.
    """
    places = {name: folder / name for name in names or WRITERS}
    for name, place in places.items():
        if not place.exists():
            place.mkdir(parents=True)
            WRITERS[name](place, list(WRITERS).index(name))
    return places
