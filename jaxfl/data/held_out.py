"""Samples that are held out for testing, or to validate: each is chosen by itself, by its place in a list or by its
identifier.

No label, no input and no other sample has a say, so that a changed sample moves no other one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxfl.core import check
from jaxfl.core.check import ArgumentError
from jaxfl.data.partition import NamedParts, Stream, generator_of

_TESTS, _OWN_TESTS = b"jaxfl: does this sample test?", b"jaxfl: does it test its node?"
_VALIDATES = b"jaxfl: does this sample validate?"


def held_places(count: int, share: float) -> npt.NDArray[np.bool_]:
    """Choose the places of a list that are held out: the second, and then one of every 1 / share, at random.

    Args:
        count: length of the list.
        share: in (0, 1).

    Returns:
        (count,), bool.

    Guarantees:
        - a place is held out or not whatever the count; the first place never is.

    Examples:
        >>> held_places(4, 0.25).tolist(), bool((held_places(9, 0.25) == held_places(12, 0.25)[:9]).all())
        ([False, True, False, False], True)
    """
    stops = np.minimum(np.ceil(np.arange(1, int(count * share) + 3) / share), 2.0**60).astype(np.int64)
    first, lengths = stops[:-1], np.diff(stops)
    drawn = generator_of(0, Stream.HELD_OUT).random(len(first))
    places = np.concatenate([[1], first + np.floor(drawn * lengths).astype(np.int64)])
    held = np.zeros(count, np.bool_)
    held[places[places < count]] = True
    return held


def held_names(names: Sequence[str], share: float, *, validate: bool = False) -> npt.NDArray[np.bool_]:
    """Choose the names, identifiers of samples, whose keyed hash is below `share`, in (0, 1); (N,), bool.

    Those that validate are chosen by another key than those that test.
    """
    return _hashes(names, _VALIDATES if validate else _TESTS) < share


def _hashes(names: Sequence[str], key: bytes) -> np.ndarray:
    """Keyed hashes of names as numbers in [0, 1)."""
    digests = (
        hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=6, key=key).digest() for name in names
    )
    return np.array([int.from_bytes(digest, "big") / 2**48 for digest in digests])


def hold_out(
    parts: Sequence[Any], share: float, ids: npt.NDArray[Any] | None = None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Splits every node's samples into a part for training and a part for testing.

    Args:
        parts: a partition, every node with two samples or more.
        share: of a node's samples for testing, in (0, 1): by their places in its list, as `held_places`.
        ids: (N,), text, identifiers of all samples, whose hashes then decide in place of places: those below `share`,
            the least at any rate, but never the largest.

    Returns:
        Two partitions of the same nodes, in the same order and with the same names: for training, and for testing
        (`jaxfl.training.own_scores`).

    Raises:
        ArgumentError: a share out of range, or a node with a single sample or identifier.

    Examples:
        >>> hold_out([np.arange(5), np.array([7, 9])], 0.2)
        ([array([0, 2, 3, 4]), array([7])], [array([1]), array([9])])
    """
    check.open_unit(share=share)
    train, test = [], []
    for node, part in enumerate(map(np.asarray, parts)):
        numbers = np.arange(len(part)) if ids is None else _hashes(ids[part].tolist(), _OWN_TESTS)
        if len({*numbers.tolist()}) < 2:
            found = f"node {node} has {len({*numbers.tolist()})}"
            raise ArgumentError("parts", "must give every node two samples to hold one out", found, "Merge nodes.")
        held = held_places(len(part), share)
        if ids is not None:
            held = ((numbers < share) | (numbers == numbers.min())) & (numbers < numbers.max())
        train.append(part[~held])
        test.append(part[held])
    names = getattr(parts, "names", None)
    return (train, test) if names is None else (NamedParts(train, names), NamedParts(test, names))
