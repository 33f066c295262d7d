"""The IMDB movie reviews, as their authors publish them, and their conversion to sequences of tokens.

The archive unpacks to `aclImdb/{train,test}/{pos,neg}/<id>_<rating>.txt`, one review in each file, with ids from 0. The
published archive has 12,500 in each of the four folders. Other files are not read, nor is `train/unsup`, which has no
labels.

Text becomes tokens as with Keras' `Tokenizer` and its `imdb.load_data(num_words=10_000)`:

- Lower case; the line breaks `<br />` (which Keras leaves as a word "br") and the characters of `_FILTERED` become
  spaces; words are the parts between spaces. Apostrophes stay: "don't" is one word.
- Token 0 is padding, 1 the start of a review, 2 any word outside the vocabulary, 3 is unused. The word with the r-th
  most occurrences in the training reviews, r = 1, 2, ..., is token r + 3; equally frequent ones go by the alphabet.
  There are `num_tokens` tokens in all: 10,000 tokens cover the 9,996 most frequent words.
- A review keeps its last `length` tokens, and a shorter one is padded in front, as `pad_sequences` does by default.

References:
    A. L. Maas, R. E. Daly, P. T. Pham, D. Huang, A. Y. Ng, C. Potts, "Learning Word Vectors for Sentiment Analysis",
    ACL 2011, https://ai.stanford.edu/~amaas/data/sentiment/.
"""

from __future__ import annotations

import collections
import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxfl.core import check
from jaxfl.core.check import ArgumentError
from jaxfl.data.files import bad_file, check_folder, contents, read_bytes

NUM_CLASSES = 2
NUM_TOKENS = 10_000
LENGTH = 256
PADDING, START, UNKNOWN = 0, 1, 2
_FIRST_WORD = 4

_FILTERED = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'  # the default of Keras
_TO_SPACES = str.maketrans(dict.fromkeys(_FILTERED, " "))
_LINE_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)

_FOLDERS = tuple(f"{split}/{label}" for split in ("train", "test") for label in ("neg", "pos"))
_REVIEW = re.compile(r"(?:.*/)?((?:train|test)/(?:neg|pos))/(\d+)_\d+\.txt")
# Limits above anything like the published files: a review there has at most 14 kB, the archive 0.3 GB unpacked.
_MAX_REVIEW, _MAX_ARCHIVE = 1 << 20, 1 << 30
_MAX_DIGITS = 9
_REMEDY = "Download https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz into this folder, packed or not."


def load_imdb(
    data_dir: str | os.PathLike[str] | None, *, num_tokens: int = NUM_TOKENS, length: int = LENGTH
) -> tuple[np.ndarray, ...]:
    """The four arrays of IMDB. Negative and positive reviews alternate, each kind in the order of its ids.

    Args:
        data_dir: a folder with `aclImdb`, that folder itself, or one with an archive `aclImdb*.tar.gz` or `.tar`.
        num_tokens: tokens in all, at least 5; the size of an embedding.
        length: tokens of a review, at least 1.

    Returns:
        (train tokens, train labels, test tokens, test labels): (N, length) int32 in [0, num_tokens) and (N,) int32,
        0 for negative and 1 for positive.

    Raises:
        ArgumentError: a folder, an archive or a review is missing or unusable.

    Guarantees:
        - an archive gives the same as its unpacked folder.
        - the vocabulary is that of the training reviews only.
    """
    check.at_least(_FIRST_WORD + 1, num_tokens=num_tokens)
    check.at_least(1, length=length)
    folder = check_folder(data_dir, "the folder with aclImdb or its archive", _REMEDY)
    reviews = _read(folder)
    texts = {name: _in_order(name, reviews, folder) for name in _FOLDERS}
    sizes = {name: len(part) for name, part in texts.items()}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{size:,} in {name}" for name, size in sizes.items())
        raise ArgumentError("data_dir", "must hold as many reviews of each kind", f"{folder} holds {counts}", _REMEDY)
    vocabulary = count_words((text for split in ("train/neg", "train/pos") for text in texts[split]), num_tokens)
    arrays = []
    for split in ("train", "test"):
        pairs = zip(texts[f"{split}/neg"], texts[f"{split}/pos"], strict=True)
        tokens = [encode(text, vocabulary, length) for pair in pairs for text in pair]
        arrays += [np.stack(tokens), np.tile(np.array([0, 1], np.int32), len(tokens) // 2)]
    return tuple(arrays)


def words_text(review: str) -> str:
    """A review in lower case with only spaces around its words, which `split` then gives.

    Examples:
        >>> words_text("Don't miss it!<br /><br />10/10 - GREAT.").split()
        ["don't", 'miss', 'it', '10', '10', 'great']
    """
    return _LINE_BREAK.sub(" ", review).lower().translate(_TO_SPACES)


def count_words(texts: Iterable[str], num_tokens: int = NUM_TOKENS) -> dict[str, int]:
    """The vocabulary: word -> token of the most frequent words of texts from `words_text`.

    Args:
        texts: the training reviews.
        num_tokens: tokens in all, including the four that are not words.

    Examples:
        >>> count_words(["b a c", "b c c d"], num_tokens=7)
        {'c': 4, 'b': 5, 'a': 6}
    """
    counts = collections.Counter()
    for text in texts:
        counts.update(text.split())
    ranking = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: token for token, word in enumerate(ranking[: num_tokens - _FIRST_WORD], start=_FIRST_WORD)}


def encode(text: str, vocabulary: Mapping[str, int], length: int = LENGTH) -> np.ndarray:
    """One text from `words_text` as tokens, (length,) int32.

    Examples:
        >>> encode("a new film", {"a": 4, "film": 5}, length=6).tolist()
        [0, 0, 1, 4, 2, 5]
        >>> encode("a new film", {"a": 4, "film": 5}, length=2).tolist()
        [2, 5]
    """
    tail = [START, *(vocabulary.get(word, UNKNOWN) for word in text.split())][-length:]
    tokens = np.full(length, PADDING, np.int32)
    tokens[length - len(tail) :] = tail
    return tokens


def _read(folder: Path) -> dict[str, dict[int, str]]:
    """Text of each review by folder, such as "train/neg", and id."""
    for place in (folder / "aclImdb", folder):
        if any(os.path.isdir(place / name) for name in _FOLDERS):
            return _by_folder(_from_folder(place))
    archives = sorted(path for path in folder.glob("aclImdb*.tar*") if os.path.isfile(path))
    if not archives:
        requirement = "must hold aclImdb or aclImdb_v1.tar.gz"
        raise ArgumentError("data_dir", requirement, f"{folder} holds {contents(folder)}", _REMEDY)
    return _by_folder(_from_archive(archives[0]))


def _from_folder(place: Path) -> Iterator[tuple[str, int, str]]:
    """(folder, id, text) of each review."""
    for name in _FOLDERS:
        for path in (place / name).glob("*.txt"):
            match = _REVIEW.fullmatch(path.as_posix())
            if match:
                yield name, _number(path, match[2]), _decode(path, read_bytes(path, _REMEDY, _MAX_REVIEW))


def _from_archive(archive: Path) -> Iterator[tuple[str, int, str]]:
    """Read the same from a tar archive, compressed or not; nothing is written to disk."""
    content = read_bytes(archive, _REMEDY, _MAX_ARCHIVE)
    # tarfile takes damage behind the first member for the end: the mark of the end must be there.
    if not content.rstrip(b"\0") or content[-2 * tarfile.BLOCKSIZE :].strip(b"\0"):
        raise bad_file(archive, "be a complete tar archive", "it has no mark at its end", _REMEDY)
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as members:
            for member in members:
                match = _REVIEW.fullmatch(member.name)
                if not match or not member.isreg():
                    continue
                if member.size > _MAX_REVIEW:
                    found = f"there is one of {member.size:,}"
                    raise bad_file(archive, f"hold reviews of at most {_MAX_REVIEW:,} bytes", found, _REMEDY)
                file = members.extractfile(member)
                assert file is not None
                yield match[1], _number(archive, match[2]), _decode(archive / member.name, file.read())
    except (tarfile.TarError, OSError, ValueError, OverflowError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise bad_file(archive, "be a complete tar archive", str(error), _REMEDY) from None


def _number(path: Path, digits: str) -> int:
    """The id of a review."""
    if len(digits) > _MAX_DIGITS:
        raise bad_file(path, "hold reviews numbered from 0", f"it has the number {digits}", _REMEDY)
    return int(digits)


def _decode(path: Path, content: bytes) -> str:
    """The words of one review."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_file(path, "be UTF-8 text", f"byte {error.start:,} is not", _REMEDY) from None
    if not text.strip():
        raise bad_file(path, "hold a review", "it is empty", _REMEDY)
    return words_text(text)


def _by_folder(reviews: Iterable[tuple[str, int, str]]) -> dict[str, dict[int, str]]:
    """Folder -> id -> text."""
    texts: dict[str, dict[int, str]] = {name: {} for name in _FOLDERS}
    for name, number, text in reviews:
        if number in texts[name]:
            found = f"review {number} of aclImdb/{name} is there twice"
            raise ArgumentError("data_dir", "must hold one review of each id", found, "Remove one of the two files.")
        texts[name][number] = text
    return texts


def _in_order(name: str, reviews: Mapping[str, Mapping[int, str]], folder: Path) -> list[str]:
    """The texts of one folder by id; a review that is missing leaves a gap, unless it is the last."""
    texts = reviews[name]
    missing = next((number for number in range(len(texts)) if number not in texts), None)
    if not texts or missing is not None:
        found = f"{folder} has none" if not texts else f"{folder} lacks {missing} of {max(texts) + 1:,}"
        raise ArgumentError("data_dir", f"must hold every review of aclImdb/{name}", found, _REMEDY)
    return [texts[number] for number in range(len(texts))]
