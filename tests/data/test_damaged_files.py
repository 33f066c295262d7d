"""A thousand damaged files of all formats: each is refused in one sentence or read whole, within its bounds."""

import contextlib
import gzip
import random
import resource
import sys
import time
import tracemalloc
from pathlib import Path

import hostile
import numpy as np
import pytest
import test_cifar
import test_femnist
import test_imdb
import test_sources

from jaxfl.core import ArgumentError
from jaxfl.data import cifar, femnist, idx, imdb, load
from jaxfl.graphs.files import read_graph

SEEDS = 120  # for each of eight formats
SECONDS = 20
MAX_HELD = 20_000_000
MAX_MORE = 1 << 30  # of addresses: beyond it the system refuses memory, so that no failure takes the machine's


def write_npy(folder):
    np.save(folder / "graph.npy", np.full((3, 4, 4), 0.25))


def write_tar(folder, compress=lambda content: content):
    (folder / "aclImdb_v1.tar").write_bytes(compress(test_imdb.archive_bytes(test_imdb.REVIEWS)))


def sizes_of(name):
    """Reads the data set of a folder; the numbers of its samples."""

    def read(folder):
        dataset = load(name, folder)
        return len(dataset.train_labels), len(dataset.test_labels)

    return read


# The writer of good files, those to damage, the reader, what a whole one gives, and other contents to be damaged.
ARCHIVES = [first + test_imdb.archive_bytes(test_imdb.REVIEWS) for first in test_imdb.HARMFUL]
FORMATS = {
    "idx": (test_sources.write_idx, "*", sizes_of("mnist"), (7, 3), []),
    "idx in gzip": (lambda folder: test_sources.write_idx(folder, compress=True), "*", sizes_of("mnist"), (7, 3), []),
    "cifar": (test_cifar.write_binary, "*", sizes_of("cifar10"), (20, 4), []),
    "leaf": (test_femnist.write, "*/*", sizes_of("femnist"), (9, 3), [b"[" * 9_000, b'{"users": 1' + b"0" * 4_000]),
    "tar": (write_tar, "*", sizes_of("imdb"), (4, 4), ARCHIVES),
    "tar in gzip": (lambda folder: write_tar(folder, gzip.compress), "*", sizes_of("imdb"), (4, 4), ARCHIVES),
    "reviews": (test_imdb.write_folder, "*/t*/[np]*/*.txt", sizes_of("imdb"), (4, 4), []),
    "npy": (write_npy, "*", lambda folder: read_graph(str(folder / "graph.npy"), 4).period, 3, []),
}


def damaged(content, chance):
    """One to four changes: bytes flipped, cut off, put in, taken away or repeated, numbers made huge or negative."""
    content = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        start = min(chance.choice([chance.randrange(len(content) + 1), chance.randrange(600)]), len(content))
        end = min(start + chance.choice([1, 4, 8, 50, 512]), len(content))
        match chance.randrange(7):
            case 0:
                content[start:end] = chance.randbytes(end - start)
            case 1 if start < len(content):
                content[start] ^= 1 << chance.randrange(8)
            case 2:
                del content[start:]
            case 3:
                content[start:start] = chance.randbytes(chance.choice([1, 8, 512]))
            case 4:
                del content[start:end]
            case 5:
                content[start:start] = content[start:end] * chance.choice([1, 1, 1000])
            case _:
                content[start:end] = chance.choice(
                    [b"\xff" * (end - start), b"9" * 40, b"-1", b"\x00\x00\x00\x80", b"true"]
                )
    return bytes(content)


def harm(path, others, chance):
    """Damages one file, inside of its compression or outside."""
    content = path.read_bytes()
    inside = content.startswith(b"\x1f\x8b") and chance.random() < 0.7
    if inside:
        content = gzip.decompress(content)
    if others and chance.random() < 0.4:
        content = chance.choice(others)
    content = damaged(content, chance)
    path.write_bytes(gzip.compress(content) if inside else content)


def everything(folder):
    """Each file below a folder, with its content."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@contextlib.contextmanager
def bounded():
    """Within this, at most MAX_HELD bytes are held at a time, and SECONDS pass."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MAX_MORE, hard))
    try:
        with hostile.within(SECONDS), hostile.peak_of(MAX_HELD):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch):
    """Files of four records, and bounds that the small files do not reach but a bomb does."""
    monkeypatch.setattr(cifar, "_SAMPLES_PER_FILE", test_cifar.SAMPLES)
    for module, bound in ((idx, "_MAX_BYTES"), (femnist, "_MAX_BYTES"), (imdb, "_MAX_ARCHIVE")):
        monkeypatch.setattr(module, bound, 1 << 20)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, which limits memory")
@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_refused_in_one_sentence_or_read_whole(tmp_path, name):
    write, pattern, read, whole, others = FORMATS[name]
    outcomes = {"refused": 0, "read": 0}
    for seed in range(SEEDS):
        chance = random.Random(f"{name} {seed}")
        folder = tmp_path / str(seed)
        folder.mkdir()
        write(folder)
        path = chance.choice(sorted(folder.glob(pattern)))
        assert seed or read(folder) == whole
        harm(path, others, chance)
        before = everything(folder)
        actual, error = None, None
        with bounded():
            try:
                actual = read(folder)
            except ArgumentError as refusal:
                error = refusal
        assert everything(folder) == before, f"seed {seed}"
        outcomes["read" if error is None else "refused"] += 1
        if error is None:
            assert actual == whole, f"seed {seed}"
        else:
            assert error.argument in ("data_dir", "graph")
            assert len(str(error)) < 2000, f"seed {seed}"
            assert str(error).isprintable(), f"seed {seed}: {error}"
    assert sum(outcomes.values()) == SEEDS
    assert outcomes["refused"] >= 10, outcomes


def test_the_bounds_see_memory_and_time(monkeypatch):
    """The tests above can fail."""
    with pytest.raises(AssertionError, match="bytes were held"), bounded():
        bytes(MAX_HELD + 1)
    with pytest.raises(MemoryError), bounded():
        bytes(2 * MAX_MORE)
    monkeypatch.setitem(globals(), "SECONDS", 0.1)
    with pytest.raises(pytest.fail.Exception, match="not at its end"), bounded():
        time.sleep(60)
    assert not tracemalloc.is_tracing()
