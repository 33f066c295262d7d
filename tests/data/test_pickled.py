"""Pickled arrays from files that are not to be trusted."""

import collections
import os
import pickle
import random

import numpy as np
import pytest

from jaxfl.data.pickled import unpickle_arrays

ARRAY = np.arange(24, dtype=np.uint8).reshape(4, 6)


class Attack:
    """Unpickled without care, this runs a function of the file's choosing."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("array", [ARRAY, np.asfortranarray(ARRAY), ARRAY.astype(">i4"), ARRAY.astype(np.int64)])
def test_arrays_come_back(protocol, array):
    loaded = unpickle_arrays(pickle.dumps({"data": array, "labels": [1, 2], "name": "x"}, protocol=protocol))
    assert list(loaded) == ["data", "labels", "name"]
    assert loaded["labels"] == [1, 2]
    assert loaded["data"].dtype == array.dtype
    np.testing.assert_array_equal(loaded["data"], array)


def test_nothing_is_imported_or_called_on_behalf_of_the_file(tmp_path):
    target = tmp_path / "written"
    with pytest.raises(pickle.UnpicklingError, match=rf"it asks for {os.mkdir.__module__}\.mkdir"):
        unpickle_arrays(pickle.dumps({"data": Attack(os.mkdir, str(target))}))
    assert not target.exists()


@pytest.mark.parametrize("value", [collections.OrderedDict(), np.float64(1.0), np.memmap, eval, type, bytes])
def test_other_classes_are_refused(value):
    with pytest.raises(pickle.UnpicklingError, match="it asks for"):
        unpickle_arrays(pickle.dumps({"data": value}))


def test_other_codecs_are_refused():
    content = b"c_codecs\nencode\n(X\x03\x00\x00\x00abcX\x05\x00\x00\x00rot13tR."
    with pytest.raises(pickle.UnpicklingError, match="codec rot13"):
        unpickle_arrays(content)


@pytest.mark.parametrize("array", [ARRAY.astype(np.float32), np.array(["a"]), np.zeros(2, "i4,i4"), np.array([None])])
def test_other_dtypes_are_refused(array):
    with pytest.raises(pickle.UnpicklingError, match=r"dtype|no bytes"):
        unpickle_arrays(pickle.dumps({"data": array}))


def test_no_dictionary():
    with pytest.raises(pickle.UnpicklingError, match="it holds a list"):
        unpickle_arrays(pickle.dumps([1]))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_damaged_files_give_one_kind_of_error(protocol):
    # With NumPy's own constructors in place of the stand-ins, files damaged like these crash the interpreter.
    content = pickle.dumps({"data": ARRAY, "labels": list(range(4))}, protocol=protocol)
    chance = random.Random(0)
    refused = 0
    for _ in range(1000):
        damaged = bytearray(content)
        for _ in range(chance.choice([1, 1, 2, 5])):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            assert isinstance(unpickle_arrays(bytes(damaged)), dict)
        except pickle.UnpicklingError:
            refused += 1
    assert refused > 300
