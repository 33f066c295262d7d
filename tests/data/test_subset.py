"""Data sets made smaller."""

import numpy as np
import pytest
from helpers import refused

from jaxfl.data import load, only_classes
from jaxfl.data.held_out import held_places
from jaxfl.data.subset import without_validation


def test_only_classes_keeps_their_samples_and_numbers_them_in_the_order_given():
    whole = load("digits")
    labels, part = (8, 3, 5), only_classes(whole, (8, 3, 5))
    assert part.num_classes == 3
    for inputs, numbers, all_inputs, all_labels in (
        (part.train_inputs, part.train_labels, whole.train_inputs, whole.train_labels),
        (part.test_inputs, part.test_labels, whole.test_inputs, whole.test_labels),
    ):
        kept = np.isin(all_labels, labels)
        np.testing.assert_array_equal(inputs, all_inputs[kept])
        np.testing.assert_array_equal(np.array(labels)[numbers], all_labels[kept])
        assert numbers.dtype == all_labels.dtype
    assert only_classes(whole, None) is whole


def test_only_classes_keeps_who_wrote_a_sample():
    whole = load("digits")
    whole = whole._replace(train_writers=np.arange(len(whole.train_labels), dtype=np.int32))
    writers = only_classes(whole, (0, 1)).train_writers
    np.testing.assert_array_equal(writers, np.flatnonzero(whole.train_labels < 2))


def written():
    """Digits with writers and identifiers."""
    digits = load("digits")
    count = len(digits.train_labels)
    return digits._replace(
        train_writers=(np.arange(count) % 7).astype(np.int32),
        train_ids=np.array([f"sample {k}" for k in range(count)], object),
    )


@pytest.mark.parametrize("known", ["ids", "writers", "places"])
def test_what_validates_is_no_more_trained_on_and_is_the_same_in_every_call(known):
    whole = written()
    whole = whole if known == "ids" else whole._replace(train_ids=None)
    whole = whole if known != "places" else whole._replace(train_writers=None)
    rest, held = without_validation(whole, 0.2)
    np.testing.assert_array_equal(without_validation(whole, 0.2)[1], held)
    assert 0.17 < held.mean() < 0.23
    np.testing.assert_array_equal(rest.train_inputs, whole.train_inputs[~held])
    np.testing.assert_array_equal(rest.train_labels, whole.train_labels[~held])
    np.testing.assert_array_equal(rest.test_inputs, whole.test_inputs)
    if known == "writers":
        for writer in range(7):
            own = held[np.arange(len(held)) % 7 == writer]
            np.testing.assert_array_equal(own, held_places(len(own), 0.2))
            assert len(own) - own.sum() == np.sum(rest.train_writers == writer)
    if known == "ids":  # a sample that goes moves no other one
        of_samples = ("train_inputs", "train_labels", "train_writers", "train_ids")
        fewer = whole._replace(**{name: getattr(whole, name)[1:] for name in of_samples})
        np.testing.assert_array_equal(without_validation(fewer, 0.2)[1], held[1:])


def test_a_share_that_leaves_nothing_is_refused():
    tiny = load("digits")._replace(train_inputs=np.zeros((1, 8, 8, 1), np.float32), train_labels=np.zeros(1, np.int32))
    refused(lambda: without_validation(tiny, 0.5), "validation")
    refused(lambda: without_validation(load("digits"), 1.0), "validation")
