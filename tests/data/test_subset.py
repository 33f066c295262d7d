"""Data sets made smaller."""

import numpy as np

from jaxfl.data import load, only_classes


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
