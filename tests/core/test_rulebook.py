"""One rulebook for names and numbers, and text files that are read by it."""

import gzip
import os

import numpy as np
import pytest
from data.hostile import within
from helpers import refused

from jaxfl.core.tables import MISSING, as_name, in_order, numbered, read_rows


def rows_of(path):
    return read_rows(str(path), "file", "must be a table", "Write one.")


@pytest.mark.parametrize("spelling", [*sorted(MISSING), "NA", "N/A", "NaN", "None", " ", "NULL"])
def test_what_is_missing_has_no_name(spelling):
    assert as_name(spelling) is None
    refused(lambda: numbered("sites", ["a", spelling], "row {}".format), "sites", "row 1")


@pytest.mark.parametrize("missing", [None, float("nan"), np.nan])
def test_what_is_missing_in_arrays_has_no_name(missing):
    refused(lambda: numbered("sites", ["a", missing], "row {}".format), "sites", "row 1")


@pytest.mark.parametrize(
    ("spellings", "name"),
    [
        (["1", "1.0", "1.", "+1", " 1 ", "1e0", 1, 1.0, np.int64(1), np.float32(1)], "1"),
        (["100", "1e2", "1E+2", 100.0], "100"),
        (["-3", "-3.0", -3], "-3"),
        (["0", "-0", "0.0", "-0.0"], "0"),
        (["Oslo", " Oslo", "Oslo\t"], "Oslo"),
        (["caf\u00e9", "cafe\u0301"], "caf\u00e9"),
    ],
)
def test_spellings_of_one_name(spellings, name):
    assert {as_name(spelling) for spelling in spellings} == {name}


@pytest.mark.parametrize("text", ["007", "+-5", "1.5", "1e400", "9" * 20, "0x1", "1_0", "1e-3"])
def test_what_is_no_whole_number_stays_text(text):
    assert as_name(text) == text


def test_names_are_in_the_order_of_numbers_where_all_are():
    assert in_order(["10", "9", "-1"]) == ["-1", "9", "10"]
    assert in_order(["10", "9", "a"]) == ["10", "9", "a"]


@pytest.mark.parametrize("pair", [("Oslo", "oslo"), ("New York", "NewYork"), ("a  b", "a b")])
def test_names_that_differ_by_blanks_or_case_only_are_refused(pair):
    refused(lambda: numbered("sites", pair, str), "sites", *pair)


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_is_found(separator, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(separator.join(["a", ' "b, c"', "d"]) + "\n\n" + separator.join("123") + "\n")
    table = rows_of(path)
    assert (table.separator, [number for number, _ in table.cells]) == (separator, [1, 3])
    assert table.cells[0][1] == ["a", "b, c", "d"]


def test_decimal_commas_do_not_separate(tmp_path):
    (tmp_path / "a.csv").write_text("Oslo;2,5\nBergen;3,5\n")
    assert [row for _, row in rows_of(tmp_path / "a.csv").cells] == [["Oslo", "2,5"], ["Bergen", "3,5"]]


@pytest.mark.parametrize("nested", [[[], "a"], [np.array([1, 2]), np.array([1, 2, 3])], [{"a"}, "b"]])
def test_collections_are_no_names(nested):
    refused(lambda: numbered("sites", nested, str), "sites", "vector")


def test_compressed_and_marked_text_is_read(tmp_path):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress("\ufeffa,b\r\n1,2\r\n".encode()))
    assert [row for _, row in rows_of(path).cells] == [["a", "b"], ["1", "2"]]


@pytest.mark.parametrize(
    "content", [b"\xff\xfea\0", b'a,b\n"1,2', gzip.compress(b"a,b\n" * 99, mtime=0)[:-9], b"# by hand\na,b\n"]
)
def test_text_that_is_no_table_is_refused(content, tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    if content.startswith(b"a"):  # an open quotation mark ends with the file
        assert rows_of(path).cells
        return
    refused(lambda: rows_of(path), "file", str(path))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_may_never_end_is_not_opened(make, tmp_path):
    make(tmp_path / "a.csv")
    with within(5):
        refused(lambda: rows_of(tmp_path / "a.csv"), "file", "a.csv")
