"""FEMNIST: small files in LEAF's form, writers kept together, damaged files."""

import gzip
import json

import numpy as np
import pytest
from helpers import refused
from hostile import peak_of

from jaxfl.data import femnist, load

RNG = np.random.default_rng(0)
WRITERS = {"f0101_02": 3, "f0100_14": 2, "f2001_44": 4}  # samples for training; one for testing


def leaf(sizes):
    """A file's content: writers with so many random samples."""
    data = {
        name: {
            "x": (RNG.integers(0, 256, (size, 784)) / 255).tolist(),
            "y": RNG.integers(0, 62, size).tolist(),
        }
        for name, size in sizes.items()
    }
    return {"users": list(sizes), "num_samples": list(sizes.values()), "user_data": data}


TRAIN = [leaf({name: WRITERS[name] for name in names}) for names in (["f0101_02", "f0100_14"], ["f2001_44"])]
TEST = [leaf(dict.fromkeys(WRITERS, 1))]


def write(folder, train=TRAIN, test=TEST):
    for split, files in (("train", train), ("test", test)):
        (folder / split).mkdir(parents=True)
        for number, content in enumerate(files):
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / split / f"all_data_{number}_niid_0_keep_0_{split}_9.json").write_text(text)
    return folder


@pytest.mark.parametrize("below", [".", "data"])
def test_written_files_come_back(tmp_path, below):
    write(tmp_path / below)
    dataset = load("femnist", tmp_path)
    assert (dataset.name, dataset.num_classes) == ("femnist", 62)
    by_name = {name: data for file in TRAIN for name, data in file["user_data"].items()}
    expected = np.concatenate([np.array(by_name[name]["x"], np.float32) for name in sorted(by_name)])
    np.testing.assert_array_equal(dataset.train_inputs, expected.reshape(-1, 28, 28, 1), strict=True)
    assert dataset.train_labels.tolist() == [label for name in sorted(by_name) for label in by_name[name]["y"]]
    assert dataset.train_writers is not None
    assert dataset.train_writers.dtype == np.int32
    assert dataset.train_writers.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert dataset.test_inputs.shape == (3, 28, 28, 1)
    assert dataset.test_labels.tolist() == [TEST[0]["user_data"][name]["y"][0] for name in sorted(WRITERS)]


def changed(name="f2001_44", **parts):
    """The second training file with other users, num_samples or user_data, or another x or y of a writer."""
    content = json.loads(json.dumps(TRAIN[1]))
    for key, value in parts.items():
        if key in ("x", "y"):
            content["user_data"][name][key] = value
        else:
            content[key] = value
    return content


IMAGE, LABELS = [0.5] * 784, [1, 2, 3, 4]


DAMAGED = [
    '{"users": ["f2001',
    "[1, 2]",
    "[" * 10**6,
    '{"users": ' + "9" * 5000 + "}",
    '{"a\\ud800\\n": 1}',
    '{"users": [], "num_samples": [], "user_data": {}, "users": []}',
    {"users": [], "x": []},
    *(changed(users=users) for users in ("f2001_44", [["f2001_44"]], ["f9"])),
    *(changed(num_samples=sizes) for sizes in ([3], [True], [4.0])),
    changed(users=["f2001_44"] * 2, num_samples=[4, 4]),
    changed(users=["f1"] * 2, num_samples=[4, 4], user_data={"f1": {}, "f2": {}}),
    changed(user_data={"f2001_44": {"x": [IMAGE]}}),
    changed(user_data={"f2001_44": {"x": [], "y": []}}, num_samples=[0]),
    changed(user_data={"f2001_44": [1]}),
    changed(users=["f\n1"], user_data={"f\n1": {}}),
    changed(users=["f" * 10**6], user_data={"f" * 10**6: {}}),
    changed(x=[IMAGE] * 3),
    changed(x=["0" * 784] * 4),
    *(
        changed(x=[IMAGE] * 3 + [image])
        for image in (
            *(IMAGE[:-1], [0.5]),
            *([*IMAGE[1:], pixel] for pixel in ("0.5", True, [0.5], None, 10**400, 1e39, 255.0, -0.01, float("nan"))),
        )
    ),
    *(changed(y=y) for y in ([], [1, 2, 3], *([1, 2, bad, 4] for bad in (2.0, True, "1", 10**400, 62, -1)))),
    TRAIN[0],  # a writer again
]


@pytest.mark.parametrize("content", DAMAGED, ids=map(str, range(len(DAMAGED))))
def test_damaged_files(tmp_path, content):
    write(tmp_path, train=[TRAIN[0], content])
    message = refused(lambda: load("femnist", tmp_path), "data_dir", "all_data_1_niid_0_keep_0_train_9.json", "leaf")
    assert len(message) < 2000
    assert message.isprintable()


def test_a_gzip_file_with_more_than_a_file_of_leaf(tmp_path, monkeypatch):
    monkeypatch.setattr(femnist, "_MAX_BYTES", 100_000)
    path = write(tmp_path) / "train" / "all_data_2.json"
    path.write_bytes(gzip.compress(b"[" + b"[]," * 20_000_000))
    with peak_of(10_000_000):
        refused(lambda: load("femnist", tmp_path), "data_dir", path.name)


def test_missing_folders(tmp_path):
    refused(lambda: load("femnist"), "data_dir", "preprocess.sh")
    refused(lambda: load("femnist", tmp_path / "nothing"), "data_dir", "preprocess.sh")
    refused(lambda: load("femnist", tmp_path), "data_dir", "holds nothing", "preprocess.sh")
    write(tmp_path / "no_test", test=[])
    refused(lambda: load("femnist", tmp_path / "no_test"), "data_dir", "test holds nothing")
    write(tmp_path / "no_writer", test=[leaf({})])
    refused(lambda: load("femnist", tmp_path / "no_writer"), "data_dir")
