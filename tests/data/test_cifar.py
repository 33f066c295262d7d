"""CIFAR-10 files, binary and pickled, written here from their published description."""

import gzip
import hashlib
import pickle
import struct

import numpy as np
import pytest
from helpers import refused
from hostile import peak_of

from jaxfl.data import cifar, load

SAMPLES = 4
STEMS = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]


@pytest.fixture(autouse=True)
def short_files(monkeypatch):
    """Files of 4 records: the reader insists on the published number, which would be 184 MB to write."""
    monkeypatch.setattr(cifar, "_SAMPLES_PER_FILE", SAMPLES)


def samples():
    """Images (6, 4, 32, 32, 3) and labels (6, 4) of the six files."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (6, SAMPLES, 32, 32, 3)).astype(np.uint8), rng.integers(0, 10, (6, SAMPLES))


def rows_of(images):
    """Red plane, green plane, blue plane of each image, written out as a loop."""
    return np.stack([np.concatenate([image[:, :, channel].ravel() for channel in range(3)]) for image in images])


def write_binary(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for stem, images, labels in zip(STEMS, *samples(), strict=True):
        records = [bytes([label]) + row.tobytes() for label, row in zip(labels, rows_of(images), strict=True)]
        (folder / f"{stem}.bin").write_bytes(b"".join(records))


def python2_pickle(rows, labels):
    """A batch as Python 2 and an old NumPy wrote it: the published files begin with just these opcodes."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    def integer(value):
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNN"
    dtype += integer(-1) * 2 + b"K\x00tb"
    raw = rows.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + b"K\x00\x85" + text(b"b") + b"\x87R"
    array += b"(K\x01" + integer(rows.shape[0]) + integer(rows.shape[1]) + b"\x86" + dtype + b"\x89"
    array += b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}" + text(b"labels") + numbers + b"s" + text(b"data") + array + b"s."


def write_pickled(folder, monkeypatch):
    """The six files, whose MD5 sums take the places of the published ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, images, labels in zip(STEMS, *samples(), strict=True):
        content = python2_pickle(rows_of(images), labels)
        (folder / stem).write_bytes(content)
        monkeypatch.setitem(cifar._PICKLED, stem, hashlib.md5(content).hexdigest())


def assert_complete(dataset):
    images, labels = samples()
    np.testing.assert_array_equal(dataset.train_inputs, images[:5].reshape(-1, 32, 32, 3), strict=True)
    np.testing.assert_array_equal(dataset.test_inputs, images[5], strict=True)
    np.testing.assert_array_equal(dataset.train_labels, labels[:5].reshape(-1).astype(np.int32), strict=True)
    np.testing.assert_array_equal(dataset.test_labels, labels[5].astype(np.int32), strict=True)
    assert (dataset.name, dataset.num_classes) == ("cifar10", 10)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("subfolder", ["", "cifar-10-batches-bin", "cifar-10-batches-py"])
def test_both_versions_come_back(tmp_path, monkeypatch, subfolder, compress):
    if subfolder.endswith("py"):
        write_pickled(tmp_path / subfolder, monkeypatch)
    else:
        write_binary(tmp_path / subfolder)
    for path in tmp_path.rglob("*_batch*") if compress else ():
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert_complete(load("cifar10", tmp_path))


class Attack:
    """Unpickled, this makes a folder."""

    def __reduce__(self):
        return __import__("os").mkdir, ("made",)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: b"",
        lambda content: pickle.dumps(Attack()),
        lambda content: pickle.dumps(pickle.loads(content, encoding="bytes")),
        lambda content: gzip.compress(bytes(50_000_000)),
    ],
)
@pytest.mark.filterwarnings("ignore:dtype")
def test_a_pickle_of_other_bytes_is_refused_unread(tmp_path, monkeypatch, damage):
    monkeypatch.chdir(tmp_path)
    write_pickled(tmp_path, monkeypatch)
    path = tmp_path / "data_batch_2"
    path.write_bytes(damage(path.read_bytes()))
    monkeypatch.setattr(cifar, "_MAX_PICKLED", 1 << 20)
    with peak_of(10_000_000):
        refused(lambda: load("cifar10", tmp_path), "data_dir", "data_batch_2", "cifar-10-binary.tar.gz")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:-3073],
        lambda content: content + b"\0",
        lambda content: content[: 2 * 3073] + b"\x0a" + content[2 * 3073 + 1 :],  # a label of 10
        lambda content: gzip.compress(content)[:-9],
        lambda content: gzip.compress(bytes(50_000_000)),
    ],
)
def test_a_damaged_binary_file_is_refused(tmp_path, damage):
    write_binary(tmp_path)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(damage(path.read_bytes()))
    with peak_of(10_000_000):
        refused(lambda: load("cifar10", tmp_path), "data_dir", "data_batch_2.bin", "cifar-10-binary.tar.gz")


def test_missing_files_and_the_published_number_of_records(tmp_path, monkeypatch):
    refused(lambda: load("cifar10", tmp_path), "data_dir", "data_batch_1.bin", "holds nothing")
    write_binary(tmp_path)
    (tmp_path / "test_batch.bin").unlink()
    refused(lambda: load("cifar10", tmp_path), "data_dir", "test_batch.bin", "holds data_batch_1")
    monkeypatch.undo()
    refused(lambda: load("cifar10", tmp_path), "data_dir", "data_batch_1.bin", "30,730,000 bytes")
