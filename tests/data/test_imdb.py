"""IMDB: small folders in the published form, tokens by hand, damaged files, the real reviews where they are."""

import gzip
import io
import os
import tarfile

import numpy as np
import pytest
from helpers import refused
from hostile import member, peak_of, within
from test_sources import real

from jaxfl.data import imdb, load
from jaxfl.data.imdb import count_words, encode, load_imdb, words_text

REVIEWS = {
    "train/neg/0_2.txt": "Bad, bad film.<br /><br />It's BAD!",
    "train/neg/1_4.txt": "a dull film",
    "train/pos/0_9.txt": "A good film; GOOD (really_good)!",
    "train/pos/1_10.txt": "good",
    "test/neg/0_1.txt": "the word test is unknown, film is not",
    "test/neg/1_3.txt": "bad",
    "test/pos/0_7.txt": "good\tfilm\n",
    "test/pos/1_8.txt": "fän & fun",
}
OTHERS = {"README": "about", "imdb.vocab": "the", "train/urls_pos.txt": "http", "train/unsup/0_0.txt": "no label"}
# good 4, bad 3, film 3, a 2, and once each: dull, it's, really. Equal counts in alphabetical order.
VOCABULARY = {"good": 4, "bad": 5, "film": 6, "a": 7, "dull": 8, "it's": 9, "really": 10}


def write_folder(folder, reviews=None):
    for name, text in {**(REVIEWS if reviews is None else reviews), **OTHERS}.items():
        path = folder / "aclImdb" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return folder / "aclImdb"


def archive_bytes(reviews):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name, text in {**reviews, **OTHERS}.items():
            member = tarfile.TarInfo(f"aclImdb/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return content.getvalue()


def test_reviews_become_tokens(tmp_path):
    write_folder(tmp_path)
    train, train_labels, test, test_labels = load_imdb(tmp_path, length=6)
    expected_train = [[1, 5, 5, 6, 9, 5], [7, 4, 6, 4, 10, 4], [0, 0, 1, 7, 8, 6], [0, 0, 0, 0, 1, 4]]
    assert train.tolist() == expected_train
    assert test.tolist() == [[2, 2, 2, 6, 2, 2], [0, 0, 0, 1, 4, 6], [0, 0, 0, 0, 1, 5], [0, 0, 0, 1, 2, 2]]
    assert train_labels.tolist() == test_labels.tolist() == [0, 1, 0, 1]
    assert {array.dtype.name for array in (train, train_labels, test, test_labels)} == {"int32"}


def test_load_gives_a_data_set(tmp_path):
    write_folder(tmp_path)
    dataset = load("imdb", tmp_path)
    assert (dataset.name, dataset.num_classes, dataset.train_writers) == ("imdb", 2, None)
    assert dataset.train_inputs.shape == dataset.test_inputs.shape == (4, 256)
    assert dataset.train_inputs[0, -7:].tolist() == [0, 1, 5, 5, 6, 9, 5]


def test_words_are_as_keras_has_them():
    text = words_text('It\'s "GREAT"...<br/>10/10 <BR />well-made\tA_b {c} d~e`f é İ')
    assert text.split() == ["it's", "great", "10", "10", "well", "made", "a", "b", "c", "d", "e", "f", "é", "i̇"]
    assert "br" not in text.split()


def test_the_vocabulary_is_that_of_the_training_reviews_alone(tmp_path):
    texts = [words_text(text) for name, text in REVIEWS.items() if name.startswith("train")]
    assert count_words(texts) == VOCABULARY
    assert count_words(texts, num_tokens=6) == {"good": 4, "bad": 5}
    write_folder(tmp_path)
    tokens = load_imdb(tmp_path, num_tokens=6, length=9)
    assert max(tokens[0].max(), tokens[2].max()) == 5
    assert tokens[2][0].tolist() == [1, 2, 2, 2, 2, 2, 2, 2, 2]


def test_the_last_words_are_kept_and_short_reviews_padded_in_front():
    text = " ".join(["good"] * 5 + ["bad"] * 3)
    assert encode(text, VOCABULARY, length=4).tolist() == [4, 5, 5, 5]
    assert encode(text, VOCABULARY, length=8).tolist() == [4] * 5 + [5] * 3  # no room for the start
    assert encode(text, VOCABULARY, length=10).tolist() == [0, 1] + [4] * 5 + [5] * 3
    assert encode("", VOCABULARY, length=3).tolist() == [0, 0, 1]


@pytest.mark.parametrize("compress", [False, True])
def test_an_archive_gives_what_its_folder_gives(tmp_path, compress):
    place = write_folder(tmp_path)
    expected = load_imdb(tmp_path)
    other = tmp_path / "archive"
    other.mkdir()
    content = archive_bytes(REVIEWS)
    name = "aclImdb_v1.tar.gz" if compress else "aclImdb_v1.tar"
    (other / name).write_bytes(gzip.compress(content) if compress else content)
    for folder in (place, other):
        for actual, array in zip(load_imdb(folder), expected, strict=True):
            np.testing.assert_array_equal(actual, array, strict=True)


def without(*names):
    return {name: text for name, text in REVIEWS.items() if name not in names}


@pytest.mark.parametrize(
    ("reviews", "word"),
    [
        (without("train/pos/0_9.txt"), "lacks 0 of 2"),
        (without("test/neg/1_3.txt"), "1 in test/neg, 2 in test/pos"),
        (without("test/pos/0_7.txt", "test/pos/1_8.txt"), "aclImdb/test/pos"),
        ({**REVIEWS, "train/neg/1_3.txt": "again"}, "review 1 of aclImdb/train/neg"),
        ({**REVIEWS, "train/neg/1_4.txt": " \n"}, "1_4.txt"),
    ],
)
@pytest.mark.parametrize("archived", [False, True])
def test_missing_and_empty_reviews(tmp_path, reviews, word, archived):
    if archived:
        (tmp_path / "aclImdb_v1.tar").write_bytes(archive_bytes(reviews))
    else:
        write_folder(tmp_path, reviews)
    refused(lambda: load("imdb", tmp_path), "data_dir", word)


NAME = "aclImdb/train/neg/2_1.txt"
# What stands before the members of a good archive.
HARMFUL = [
    member(NAME, size=-1024),
    member("README", size=-512),  # back to its own header
    member(NAME, size=10**25),
    member("x", size=10**6),
    member(NAME, b"x" * 1025, size=513),  # a header inside
    member(NAME, bytes(1 << 20) + b"x"),
    member(f"aclImdb/train/neg/{'9' * 50}_1.txt"),
    member(NAME, b"\xff good"),
    member(NAME, b" \n"),
    b"x" * 512,
    member(NAME)[:-1],
]


@pytest.mark.parametrize("first", HARMFUL, ids=map(str, range(len(HARMFUL))))
def test_archives_made_to_harm(tmp_path, first):
    path = tmp_path / "aclImdb_v1.tar"
    path.write_bytes(first + archive_bytes(REVIEWS))
    before = sorted(tmp_path.rglob("*"))
    with within(20), peak_of(10_000_000):
        refused(lambda: load("imdb", tmp_path), "data_dir", imdb._REMEDY)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_archive_ends_with_its_mark(tmp_path):
    path = tmp_path / "aclImdb_v1.tar"
    members = b"".join(member(f"aclImdb/{name}", text.encode()) for name, text in REVIEWS.items())
    path.write_bytes(members + bytes(1024))
    assert len(load("imdb", tmp_path).train_labels) == 4
    whole = gzip.compress(members + bytes(1024))
    ends = (b"", member("aclImdb/README")[:-1], bytes(100))
    for content in (*(members + end for end in ends), whole[:-20], b"<html>not found</html>", members[:700]):
        path.write_bytes(content)
        refused(lambda: load("imdb", tmp_path), "data_dir", path.name, "Download")


def test_bounds_of_an_archive(tmp_path, monkeypatch):
    path = tmp_path / "aclImdb_v1.tar.gz"
    path.write_bytes(gzip.compress(archive_bytes(REVIEWS) + bytes(50_000_000)))
    for bound, most in (("_MAX_ARCHIVE", 100_000), ("_MAX_REVIEW", 20)):
        with monkeypatch.context() as patch, peak_of(200_000_000 if most == 20 else 10_000_000):
            patch.setattr(imdb, bound, most)
            refused(lambda: load("imdb", tmp_path), "data_dir", path.name, f"at most {most:,} bytes")


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        lambda path: path.write_bytes(gzip.compress(bytes(50_000_000))),
        lambda path: path.write_bytes(b"good \xff film"),
    ],
)
def test_what_is_no_review_among_the_reviews(tmp_path, make):
    make(write_folder(tmp_path) / "train" / "neg" / "2_1.txt")
    with within(20), peak_of(10_000_000):
        refused(lambda: load("imdb", tmp_path), "data_dir", "2_1.txt in")


def test_missing_folder(tmp_path):
    refused(lambda: load("imdb"), "data_dir", "https://")
    refused(lambda: load("imdb", tmp_path / "nothing"), "data_dir", "https://")
    (tmp_path / "aclImdb_notes.txt").write_text("x")
    refused(lambda: load("imdb", tmp_path), "data_dir", "aclImdb_v1.tar.gz", "aclImdb_notes.txt", "https://")


def test_bad_numbers(tmp_path):
    refused(lambda: load_imdb(tmp_path, num_tokens=4), "num_tokens")
    refused(lambda: load_imdb(tmp_path, length=0), "length")


@pytest.mark.slow
def test_the_real_reviews():
    dataset = load("imdb", real("imdb"))
    assert dataset.train_inputs.shape == dataset.test_inputs.shape == (25_000, 256)
    assert np.bincount(dataset.train_labels).tolist() == np.bincount(dataset.test_labels).tolist() == [12_500] * 2
    assert (dataset.train_inputs.min(), dataset.train_inputs.max()) == (0, 9_999)
    assert 3 not in np.unique(dataset.train_inputs)
    # Keras' copy has the same most frequent words, "br" apart: the, and, a, of.
    counts = np.bincount(dataset.train_inputs.ravel())
    assert counts[4:].argmax() == 0
    assert np.all(np.diff(counts[4:8]) < 0)
