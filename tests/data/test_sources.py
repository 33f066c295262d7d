"""Named data sets: the embedded digits, IDX files, the real files where they are."""

import gzip
import inspect
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import refused
from hostile import peak_of

from jaxfl.data import idx, load
from jaxfl.data.sources import NAMES

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
STEMS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx_bytes(array):
    """A file in IDX format, written from its published description."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def idx_arrays():
    """Small stand-ins for the four files: 7 training and 3 test images."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (10, 28, 28)).astype(np.uint8)
    labels = np.array([5, 0, 4, 1, 9, 2, 1, 7, 2, 1], np.uint8)
    return images[:7], labels[:7], images[7:], labels[7:]


def write_idx(folder, compress=False, dotted=False):
    """Writes the four files; returns their paths in the order of STEMS."""
    paths = []
    for stem, array in zip(STEMS, idx_arrays(), strict=True):
        name = stem.replace("-idx", ".idx") if dotted else stem
        content = idx_bytes(array)
        path = folder / (name + ".gz" if compress else name)
        path.write_bytes(gzip.compress(content) if compress else content)
        paths.append(path)
    return paths


class TestDigits:
    def test_dtypes_and_range(self):
        digits = load("digits")
        assert digits.num_classes == 10
        assert digits.train_inputs.dtype == digits.test_inputs.dtype == np.float32
        assert digits.train_labels.dtype == digits.test_labels.dtype == np.int32
        assert (digits.train_inputs.min(), digits.train_inputs.max()) == (0.0, 1.0)

    def test_the_digits_split_is_stratified_as_documented(self):
        from sklearn.datasets import load_digits

        images, labels = map(np.asarray, load_digits(return_X_y=True))
        position, chosen = 0, []
        for label in range(10):
            for sample in range(len(labels)):
                if labels[sample] == label:
                    if position % 5 == 0:
                        chosen.append(sample)
                    position += 1
        digits = load("digits")
        rest = [sample for sample in range(len(labels)) if sample not in chosen]
        np.testing.assert_array_equal(digits.test_inputs.reshape(-1, 64) * 16, images[sorted(chosen)])
        np.testing.assert_array_equal(digits.test_labels, labels[sorted(chosen)])
        np.testing.assert_array_equal(digits.train_inputs.reshape(-1, 64) * 16, images[rest])
        np.testing.assert_array_equal(digits.train_labels, labels[rest])

    def test_the_file_of_digits_is_what_the_package_reads(self, monkeypatch):
        by_file = load("digits")
        monkeypatch.setattr("jaxfl.data.sources._DIGITS", "moved")
        for own, other in zip(by_file, load("digits"), strict=True):
            np.testing.assert_array_equal(own, other, strict=isinstance(own, np.ndarray))

    def test_a_folder_is_refused(self):
        refused(lambda: load("digits", "somewhere"), "data_dir", "left out", "digits", "'somewhere'")


class TestIdx:
    @pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
    @pytest.mark.parametrize("compress", [False, True])
    @pytest.mark.parametrize("dotted", [False, True])
    def test_written_files_come_back(self, tmp_path, name, compress, dotted):
        write_idx(tmp_path, compress, dotted)
        dataset = load(name, tmp_path)
        train_images, train_labels, test_images, test_labels = idx_arrays()
        np.testing.assert_array_equal(dataset.train_inputs, train_images[..., None], strict=True)
        np.testing.assert_array_equal(dataset.test_inputs, test_images[..., None], strict=True)
        np.testing.assert_array_equal(dataset.train_labels, train_labels.astype(np.int32), strict=True)
        np.testing.assert_array_equal(dataset.test_labels, test_labels.astype(np.int32), strict=True)
        assert (dataset.name, dataset.num_classes) == (name, 10)

    def test_compression_is_told_by_content(self, tmp_path):
        path = write_idx(tmp_path, compress=True)[0]
        path.rename(tmp_path / STEMS[0])
        path = tmp_path / (STEMS[1] + ".gz")
        path.write_bytes(gzip.decompress(path.read_bytes()))
        assert load("mnist", str(tmp_path)).train_labels.tolist() == [5, 0, 4, 1, 9, 2, 1]

    def test_missing_folders_and_files(self, tmp_path):
        refused(lambda: load("mnist"), "data_dir", "https://")
        refused(lambda: load("mnist", 5), "data_dir", "https://")  # pyright: ignore[reportArgumentType]
        refused(lambda: load("mnist", tmp_path / "nothing"), "data_dir", str(tmp_path / "nothing"), "https://")
        refused(lambda: load("fashion_mnist", tmp_path), "data_dir", STEMS[0], "holds nothing", "zalandoresearch")
        path, _, missing, _ = write_idx(tmp_path)
        missing.unlink()
        refused(lambda: load("mnist", tmp_path), "data_dir", STEMS[2], f"{tmp_path} holds t10k-labels", "https://")
        refused(lambda: load("mnist", path), "data_dir", "is a file")

    @pytest.mark.parametrize(
        ("number", "damage"),
        [
            *((0, lambda content, keep=keep: gzip.compress(content)[:keep]) for keep in (2, 11, 200, -1)),
            (0, lambda content: gzip.compress(content)[:10] + b"\xff" * 300),  # no deflate stream at all
            (0, lambda content: gzip.compress(content)[:-6] + b"\0" * 6),  # another checksum
            *((0, lambda content, keep=keep: content[:keep]) for keep in (-1, 9, 0)),
            (0, lambda content: content + b"\0"),
            (0, lambda content: b"<html>Not found</html>"),
            (0, lambda content: idx_bytes(idx_arrays()[1])),  # labels for images
            (0, lambda content: idx_bytes(np.zeros((7, 28, 27)))),
            (0, lambda content: idx_bytes(np.zeros((0, 28, 28)))),
            (0, lambda content: gzip.compress(content + bytes(50_000_000))),
            (1, lambda content: idx_bytes(np.arange(6))),  # 7 images
            (3, lambda content: idx_bytes(np.array([1, 10, 2]))),
        ],
    )
    def test_a_damaged_file_is_refused(self, tmp_path, number, damage):
        path = write_idx(tmp_path)[number]
        path.write_bytes(damage(path.read_bytes()))
        with peak_of(10_000_000):
            refused(lambda: load("mnist", tmp_path), "data_dir", path.name, "Download")

    def test_a_header_that_promises_too_much(self, tmp_path, monkeypatch):
        monkeypatch.setattr(idx, "_MAX_BYTES", 5_503)
        path = write_idx(tmp_path)[0]
        refused(lambda: load("mnist", tmp_path), "data_dir", path.name, "Download")

    def test_unreadable_file(self, tmp_path, monkeypatch):
        path = write_idx(tmp_path)[0]

        def denied(self, mode):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", denied)  # the tests may run as root, whom no mode bits stop
        refused(lambda: load("mnist", tmp_path), "data_dir", path.name, "permissions")


def real(folder):
    """The folder of the real files, or a skip."""
    if not (SHARED / folder).is_dir():
        pytest.skip(f"no real files in {SHARED / folder}")
    return SHARED / folder


class TestRealFiles:
    def test_mnist(self):
        mnist = load("mnist", real("mnist"))
        assert mnist.train_inputs.shape == (60_000, 28, 28, 1)
        assert mnist.test_inputs.shape == (10_000, 28, 28, 1)
        assert mnist.train_labels[:6].tolist() == [5, 0, 4, 1, 9, 2]
        assert mnist.test_labels[:6].tolist() == [7, 2, 1, 0, 4, 1]
        counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
        assert np.bincount(mnist.train_labels).tolist() == counts
        assert abs(mnist.train_inputs.mean() / 255 - 0.1307) < 1e-4  # the mean that every MNIST example subtracts

    def test_fashion_mnist(self):
        fashion = load("fashion_mnist", real("fashion-mnist"))
        assert np.bincount(fashion.train_labels).tolist() == [6000] * 10
        assert np.bincount(fashion.test_labels).tolist() == [1000] * 10
        assert abs(fashion.train_inputs.mean() / 255 - 0.2860) < 1e-4

    @pytest.mark.parametrize(("name", "folder"), [("mnist", "fashion-mnist"), ("fashion_mnist", "mnist")])
    def test_one_read_for_the_other_is_refused(self, name, folder):
        other = folder.replace("-", "_")
        refused(lambda: load(name, real(folder)), "data_dir", f"files of {name}", f"those of {other}")

    @pytest.mark.slow
    def test_cifar10(self, tmp_path):
        pytest.importorskip("PIL")
        folder = real("cifar-10")
        subprocess.run([sys.executable, folder / "unpack.py", tmp_path], check=True, capture_output=True)
        dataset = load("cifar10", tmp_path)
        assert dataset.train_inputs.shape == (50_000, 32, 32, 3)
        assert np.bincount(dataset.train_labels).tolist() == [5000] * 10
        assert np.bincount(dataset.test_labels).tolist() == [1000] * 10
        means = [dataset.train_inputs[..., channel].mean() / 255 for channel in range(3)]
        np.testing.assert_allclose(means, [0.4913, 0.4821, 0.4465], atol=1e-4)

    def test_cifar10_as_jpeg_archive_is_refused(self):
        folder = real("cifar-10")
        words = ("data_batch_1.bin", "cifar10-jpeg.npz", "cifar-10-binary.tar.gz")
        refused(lambda: load("cifar10", folder), "data_dir", *words)


class TestNames:
    @pytest.mark.parametrize("name", ["MNIST", "imagenet", "", None, 3])
    def test_unknown(self, name):
        refused(lambda: load(name), "dataset", *NAMES)

    def test_every_line_of_the_table_loads(self):
        table = re.findall(r"^\| ([a-z0-9_, ]+) \| \d", inspect.getdoc(load) or "", re.MULTILINE)
        assert tuple(", ".join(table).split(", ")) == NAMES
