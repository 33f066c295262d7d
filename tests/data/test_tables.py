# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportCallIssue=false, reportOptionalSubscript=false, reportAttributeAccessIssue=false
"""Data sets in files of one's own: tables and arrays, sites and their names, and one sentence for whatever is wrong."""

import gzip
import os
import pathlib

import datasets
import numpy as np
import PIL.Image
import pyarrow
import pyarrow.parquet
import pytest
from helpers import refused
from hostile import within

from experiments import EXPERIMENTS
from jaxfl import graphs
from jaxfl.core import ArgumentError
from jaxfl.data import by_owner, federate, from_arrays, load_file, only_classes, partition_dataset
from jaxfl.data.columns import short_name
from jaxfl.data.tables import read_by_site
from jaxfl.frame.experiment import request
from jaxfl.graphs.files import read_graph
from jaxfl.training import evaluation_set

HEADING = "age,site,ill,dose"
ROWS = [f"0.{k % 10},{'BCA'[k % 3]},{'no yes'.split()[k % 2]},{-k}" for k in range(60)]


def table(folder, *rows, heading=HEADING):
    path = folder / "own.csv"
    path.write_text("\n".join([heading, *(rows or ROWS)]) + "\n")
    return str(path)


def test_who_tests_depends_on_an_identifier_only(tmp_path):
    def training(persons):  # each has two rows
        rows = [f"0.{k % 7},{k % 2},P{person}" for k, person in enumerate([*persons, *persons])]
        return {*load_file(table(tmp_path, *rows, heading="x,label,id"), id_column="id").train_ids.tolist()}

    everybody = training(range(60))
    assert 40 < len(everybody) < 55
    assert training(range(0, 60, 3)) == everybody & {f"P{person}" for person in range(0, 60, 3)}


def test_a_table_gives_its_numbers_labels_and_sites(tmp_path):
    data = load_file(table(tmp_path), label_column="ill", site_column="site")
    assert (data.train_inputs.shape, data.test_inputs.shape, data.train_inputs.dtype) == ((48, 2), (12, 2), np.float32)
    assert (data.num_classes, data.writer_names) == (2, ("A", "B", "C"))
    for inputs, label, site in zip(data.train_inputs, data.train_labels, data.train_writers, strict=True):
        k = int(-inputs[1])
        assert (inputs[0], label, "ABC"[site]) == (np.float32(f"0.{k % 10}"), k % 2, "BCA"[k % 3])


NUMBERS = {"label_column": "ill", "site_column": "site", "input_columns": ("age", "dose")}


@pytest.mark.parametrize("ids", [False, True])
def test_each_site_and_label_tests_with_its_share(ids, tmp_path):
    """By place a site's share is exact to a sample; all other shares are so in expectation, here in standard errors."""
    rows = [f"{k},{'AAAB'[k % 4]},{k % 5 // 2},0" for k in range(4000)]
    options = {**NUMBERS, "input_columns": ("dose",), "id_column": "age"} if ids else NUMBERS
    data = load_file(table(tmp_path, *rows), **options, test_split=0.25)
    assert len(data.train_labels) + len(data.test_labels) == 4000
    tests = np.array([3000, 1000]) - np.bincount(data.train_writers)
    assert np.abs(tests - [750, 250]).max() <= (4 * np.sqrt([562.5, 187.5]).max() if ids else 1)
    expected = np.array([1600, 1600, 800]) / 4
    assert (np.abs(np.bincount(data.test_labels) - expected) < 4 * np.sqrt(0.75 * expected)).all()


def test_each_site_trains_on_a_sample(tmp_path):
    rows = [f"{k % 7},S{k % 9},{k % 2},0" for k in range(90)]
    for before in range(12):  # whatever stands above it
        data = load_file(table(tmp_path, *rows[:before], "1,Tiny,0,0", *rows), label_column="ill", site_column="site")
        assert len(np.unique(data.train_writers)) == len(data.writer_names) == 10
    options = {"label_column": "ill", "site_column": "site", "input_columns": ("dose",), "id_column": "age"}
    lone = [f"{k},S{k},{k % 2},0" for k in range(60)]
    refused(lambda: load_file(table(tmp_path, *lone), **options), "id_column", "all samples of S")


def test_numbers_as_names_are_in_the_order_of_numbers(tmp_path):
    rows = [f"{k},{k % 11},{[10, 9][k % 2]},0" for k in range(110)]
    data = load_file(table(tmp_path, *rows), **NUMBERS)
    assert data.writer_names == tuple(map(str, range(11)))
    assert {(int(x[0]) % 2, int(label)) for x, label in zip(data.train_inputs, data.train_labels, strict=True)} == {
        (0, 1),
        (1, 0),
    }


def test_names_that_are_no_plain_numbers_stay_as_they_are(tmp_path):
    names = ["007", "7", "99999999999999999999"]
    rows = [f"{k},{names[k % 3]},0,0" for k in range(60)]
    data = load_file(table(tmp_path, *rows), **NUMBERS)
    assert data.writer_names == tuple(names)


@pytest.mark.parametrize("split", [False, True])
def test_arrays_keep_images_and_their_own_split(split, tmp_path):
    images, labels = np.arange(40 * 4, dtype=np.uint8).reshape(40, 2, 2), np.arange(40) % 4
    sites = np.array(["x", "y"])[np.arange(40) % 2]
    arrays = {"inputs": images, "labels": labels, "sites": sites}
    if split:
        arrays = {"train_inputs": images[:30], "train_labels": labels[:30], "train_sites": sites[:30]}
        arrays |= {"test_inputs": images[30:], "test_labels": labels[30:]}
    np.savez(tmp_path / "own.npz", **arrays)
    data = load_file(str(tmp_path / "own.npz"))
    assert (data.train_inputs.dtype, data.num_classes, data.writer_names) == (np.uint8, 4, ("x", "y"))
    assert len(data.train_labels) == (30 if split else 32)
    for image, label, site in zip(data.train_inputs, data.train_labels, data.train_writers, strict=True):
        number = int(image[0, 0]) // 4 % 40
        assert (label, site) == (number % 4, number % 2)


def parquet(folder, name="own.parquet", **columns):
    path = folder / name
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


COLUMNS = {
    "age": [k % 10 / 10 for k in range(60)],
    "site": pyarrow.array(["BCA"[k % 3] for k in range(60)]).dictionary_encode(),
    "ill": ["no yes".split()[k % 2] for k in range(60)],
    "dose": [-k for k in range(60)],
}
IMAGES = np.arange(40 * 4, dtype=np.uint8).reshape(40, 2, 2)


@pytest.mark.parametrize("kind", ["parquet", "hub"])
def test_every_table_gives_what_a_csv_file_does(kind, tmp_path):
    options = {"label_column": "ill", "site_column": "site"}
    expected = load_file(table(tmp_path), **options)
    (tmp_path / "train").mkdir()
    path = parquet(tmp_path / "train", **COLUMNS)
    actual = load_file(path if kind == "parquet" else f"hf:{tmp_path / 'train'}", **options)
    for name in ("train_inputs", "train_labels", "test_inputs", "test_labels", "train_writers"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), strict=True, err_msg=name)
    assert (actual.writer_names, actual.num_classes) == (expected.writer_names, 2)


@pytest.mark.parametrize("kind", ["lists", "images"])
def test_a_column_of_images_is_the_input(kind, tmp_path):
    """The hub's images are PNG files inside a table; its test split stays one."""
    if kind == "lists":
        pixels = pyarrow.array(IMAGES.tolist(), pyarrow.list_(pyarrow.list_(pyarrow.uint8())))
        data = load_file(parquet(tmp_path, image=pixels, label=np.arange(40) % 4, other=np.zeros(40)))
        assert len(data.train_labels) == 32
    else:
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list("abcd"))})
        for split, part in (("train", slice(30)), ("test", slice(30, None))):
            rows = {"image": [PIL.Image.fromarray(image) for image in IMAGES[part]], "label": np.arange(40)[part] % 4}
            datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"{split}.parquet")
        data = load_file(f"hf:{tmp_path}")
        np.testing.assert_array_equal(data.test_inputs, IMAGES[30:], strict=True)
    assert (data.train_inputs.dtype, data.num_classes) == (np.uint8, 4)
    for image, label in zip(data.train_inputs, data.train_labels, strict=True):
        assert label == int(image[0, 0]) // 4 % 4


def test_sites_are_nodes_with_their_names(tmp_path):
    data = load_file(table(tmp_path), label_column="ill", site_column="site")
    parts = partition_dataset(data, "sites", 3, seed=0)
    assert parts.names == ("A", "B", "C")
    assert [set(data.train_writers[part].tolist()) for part in parts] == [{0}, {1}, {2}]
    refused(lambda: partition_dataset(data, "sites", 4, seed=0), "num_nodes", "3")


BAD_TABLES = {
    "no such file": (lambda f: load_file(str(f / "none.csv")), "dataset", "none.csv"),
    "no column": (lambda f: load_file(table(f)), "label_column", "age, site, ill, dose"),
    "many columns": (
        lambda f: load_file(table(f, ",".join("1" * 21), heading=",".join("abcdefghijklmnopqrstu"))),
        "label_column",
        "has a, b, c, d, ..., r, s, t, u",
    ),
    "no site": (lambda f: load_file(table(f), label_column="ill", site_column="town"), "site_column", "town"),
    "short row": (lambda f: load_file(table(f, *ROWS, "1,A,no"), label_column="ill"), "dataset", "row 62"),
    "text": (
        lambda f: load_file(table(f, "x,A,no,1"), label_column="ill", site_column="site"),
        "dataset",
        "'x'",
    ),
    "text in all": (lambda f: load_file(table(f), label_column="ill"), "dataset", "column site"),
    "infinite": (lambda f: load_file(table(f, "inf,A,no,1"), label_column="ill", site_column="site"), "dataset", "inf"),
    "empty": (lambda f: load_file(table(f, "no", heading="ill"), label_column="age"), "label_column", "ill"),
    "twice": (lambda f: load_file(table(f, "1,2,0", heading="a,a,label")), "dataset", "'a' twice"),
    "share": (lambda f: load_file(table(f), test_split=1.0), "test_split", "1.0"),
    "no array": (lambda f: (np.savez(f / "a.npz", x=[1]), load_file(str(f / "a.npz"))), "dataset", "x (1,)"),
    "lengths": (
        lambda f: (np.savez(f / "a.npz", inputs=np.ones((3, 2)), labels=[1]), load_file(str(f / "a.npz"))),
        "dataset",
        "labels (1,)",
    ),
    "objects": (
        lambda f: (np.savez(f / "a.npz", inputs=np.array([{}]), labels=[1]), load_file(str(f / "a.npz"))),
        "dataset",
        "a.npz",
    ),
    "no parquet": (
        (lambda f: ((f / "a.parquet").write_text("x"), load_file(str(f / "a.parquet")))),
        "dataset",
        "a.parquet",
    ),
    "no number": (lambda f: load_file(parquet(f, x=["1", None], label=[0, 1])), "dataset", "column x has None"),
    "no label": (lambda f: load_file(parquet(f, x=[1, 2], label=[0, None])), "dataset", "row 3"),
    "ragged": (lambda f: load_file(parquet(f, x=[[1], [1, 2]], label=[0, 1])), "dataset", "own.parquet"),
    "two blocks": (lambda f: load_file(parquet(f, x=[[1]], y=[[1]], label=[0])), "dataset", "x and y"),
    "no hub": (lambda f: load_file(f"hf:{f}/none"), "dataset", "hf:"),
    "no train": (lambda f: (parquet(f, "test.parquet", label=[1]), load_file(f"hf:{f}")), "dataset", "test"),
    "no archive": (lambda f: ((f / "a.npz").write_text("x"), load_file(str(f / "a.npz"))), "dataset", "a.npz"),
}


@pytest.mark.parametrize("bad", BAD_TABLES)
def test_a_bad_file_is_refused(bad, tmp_path):
    call, argument, word = BAD_TABLES[bad]
    refused(lambda: call(tmp_path), argument, word)


class TestEdges:
    def edges(self, folder, *rows):
        (folder / "edges.csv").write_text("\n".join(["from,to", *rows]) + "\n")
        return str(folder / "edges.csv")

    def test_an_edge_goes_from_the_first_name_to_the_second(self, tmp_path):
        graph = read_graph(self.edges(tmp_path, "B,A", "A,C", "C,B"), 3)
        assert graph.names == ("A", "B", "C")
        np.testing.assert_array_equal(graph.mixing_matrix(0) > 0, [[1, 1, 0], [0, 1, 1], [1, 0, 1]])

    def test_an_edge_without_its_reverse_is_named(self, tmp_path):
        graph = read_graph(self.edges(tmp_path, "A,B", "B,A", "B,C"), 3)
        words = ("edge from node 1 ('B') to node 2 ('C') has no reverse", "Add the reverse of each edge")
        refused(lambda: graphs.require_doubly_stochastic(graph), "graph", *words)

    def test_edges_both_ways_mix_doubly_stochastically(self, tmp_path):
        graph = read_graph(self.edges(tmp_path, "10,2", "2,10", "2,1", "1,2"), 3)
        assert graph.names == ("1", "2", "10")
        np.testing.assert_allclose(graph.mixing_matrix(0).sum(axis=0), 1)
        np.testing.assert_allclose(graph.mixing_matrix(0).sum(axis=1), 1)

    @pytest.mark.parametrize("rows", [(), ("A,B,C",), ("A,B", "B,A")])
    def test_a_bad_file_is_refused(self, rows, tmp_path):
        refused(lambda: read_graph(self.edges(tmp_path, *rows), 3), "graph")


@pytest.mark.parametrize(
    ("rows", "actual"),
    [
        (["Oslo,1", "Lund,x"], "'x' for Lund"),
        (["Oslo,1", "Lund,0"], "'0' for Lund"),
        (["Oslo,1", "Lund,inf"], "'inf' for Lund"),
        (["Oslo,1"], "none for Lund"),
        (["Oslo,1", "Lund,2", "Oslo,1"], "Oslo twice"),
        (["Oslo,1", "Lund,2", "Bergen,1"], "Bergen, which is not a site"),
        (["Oslo,1", "Lund,2,3"], "a row of 3"),
        ([], "none for Lund and 1 more"),
    ],
)
def test_each_site_has_one_number(rows, actual, tmp_path):
    path = tmp_path / "budgets.csv"
    path.write_text("\n".join(["site,epsilon", *rows]) + "\n")
    refused(lambda: read_by_site(str(path), ("Lund", "Oslo"), "node_epsilons"), "node_epsilons", actual)
    path.write_text("site,epsilon\n\n Oslo , 1.5\nLund,1e1\n")
    assert read_by_site(str(path), ("Lund", "Oslo"), "node_epsilons") == (10.0, 1.5)


def arrays(folder, **values):
    np.savez(folder / "own.npz", **values)
    return str(folder / "own.npz")


PLAIN = "x,site,label"
GOOD = [f"{k % 7 / 7},{'AB'[k % 2]},{k % 3}" for k in range(40)]


class TestRoles:
    """Each column has one role, seen by the reader."""

    @pytest.mark.parametrize("heading", ["", " ", "patient", "Unnamed: 0"])
    def test_a_number_of_rows_is_no_input_unless_it_is_named(self, heading, tmp_path):
        rows = [f"{k},{row}" for k, row in enumerate(GOOD)]
        path = table(tmp_path, *rows, heading=f"{heading},{PLAIN}")
        name = heading.strip() or "column 1"
        words = ("--drop-columns", "--input-columns", name)
        refused(lambda: load_file(path, site_column="site"), "dataset", *words)
        assert load_file(path, site_column="site", drop_columns=[name]).reading.inputs == ("x",)
        assert load_file(path, site_column="site", id_column=name).reading.inputs == ("x",)
        assert load_file(path, site_column="site", input_columns=[name]).reading.inputs == (name,)

    @pytest.mark.parametrize("options", [{"drop_columns": ["z"]}, {"input_columns": ["z"]}, {"id_column": "z"}])
    def test_an_unknown_column_is_refused(self, options, tmp_path):
        refused(lambda: load_file(table(tmp_path, *GOOD, heading=PLAIN), **options), next(iter(options)), "x, site")

    def test_a_column_with_two_roles_is_refused(self, tmp_path):
        path = table(tmp_path, *GOOD, heading=PLAIN)
        refused(lambda: load_file(path, site_column="site", drop_columns=["site"]), "drop_columns", "site")

    def test_what_was_read_is_kept(self, tmp_path):
        data = load_file(
            table(tmp_path, *[f"{row},t" for row in GOOD], heading=PLAIN + ",note"),
            site_column="site",
            drop_columns=["note"],
        )
        assert data.reading[:4] == (",", {"label": "label", "site": "site"}, ("x",), ("note",))
        assert data.class_names == ("0", "1", "2")


class TestNames:
    """Labels and sites by one rulebook, in tables, arrays, budgets and graphs."""

    @pytest.mark.parametrize("missing", ["", "NA", "nan", "None", "?"])
    @pytest.mark.parametrize("column", [1, 2])
    @pytest.mark.parametrize("kind", ["csv", "npz"])
    def test_a_missing_label_or_site_is_refused_with_its_row(self, missing, column, kind, tmp_path):
        cells = [row.split(",") for row in GOOD]
        cells[4][column] = missing
        if kind == "csv":
            path, row = table(tmp_path, *map(",".join, cells), heading=PLAIN), "row 6"
        else:
            columns = dict(zip(("inputs", "sites", "labels"), map(np.array, zip(*cells, strict=True)), strict=True))
            columns["inputs"], row = columns["inputs"].astype(float)[:, None], "row 4"
            path = arrays(tmp_path, **columns)
        refused(lambda: load_file(path, site_column="site"), "dataset", row)

    def test_blanks_and_spellings_make_no_names(self, tmp_path):
        rows = [
            f"{k % 7 / 7},{['Oslo', ' Oslo', 'Lund ', 'Lund'][k % 4]},{['1', '1.0', '2', ' 2'][k % 4]}"
            for k in range(40)
        ]
        data = load_file(table(tmp_path, *rows, heading=" x, site ,label "), site_column="site")
        assert (data.writer_names, data.class_names) == (("Lund", "Oslo"), ("1", "2"))
        budgets, edges = tmp_path / "b.csv", tmp_path / "e.csv"
        budgets.write_text("site;epsilon\nOslo ;1,5\n Lund;2\n")
        assert read_by_site(str(budgets), data.writer_names, "node_epsilons") == (2.0, 1.5)
        budgets.write_text("Oslo;1,5\nLund;2,5\n")
        assert read_by_site(str(budgets), data.writer_names, "node_epsilons") == (2.5, 1.5)
        edges.write_text("Oslo, Lund\nLund ,Oslo\n")
        assert read_graph(str(edges), 2).names == data.writer_names

    @pytest.mark.parametrize("spelling", ["oslo", "OSLO"])
    def test_names_that_differ_by_case_only_are_refused_everywhere(self, spelling, tmp_path):
        rows = [f"{k % 7 / 7},{['Oslo', spelling][k % 2]},{k % 3}" for k in range(40)]
        refused(lambda: load_file(table(tmp_path, *rows, heading=PLAIN), site_column="site"), "dataset", spelling)
        (tmp_path / "e.csv").write_text(f"Oslo,Lund\nLund,Oslo\n{spelling},Lund\n")
        refused(lambda: read_graph(str(tmp_path / "e.csv"), 3), "graph", spelling)
        refused(lambda: by_owner(["Oslo", spelling]), "owner_ids", spelling)
        parts = [np.array([0]), np.array([1])]
        refused(lambda: federate(np.ones((2, 1), "f4"), [0, 1], parts, names=["Oslo", spelling]), "names", spelling)

    def test_numbers_are_in_one_order_everywhere(self, tmp_path):
        names = ["10", "9", "02"], ["10", "9", "2"]
        for given, expected in zip(names, (("02", "10", "9"), ("2", "9", "10")), strict=True):
            rows = [f"{k % 7 / 7},{given[k % 3]},{k % 2}" for k in range(60)]
            (tmp_path / "e.csv").write_text("".join(f"{a},{b}\n" for a in given for b in given if a != b))
            assert load_file(table(tmp_path, *rows, heading=PLAIN), site_column="site").writer_names == expected
            assert read_graph(str(tmp_path / "e.csv"), 3).names == expected
            assert by_owner(given).names == expected

    def test_a_first_edge_without_heading_is_kept(self, tmp_path):
        (tmp_path / "e.csv").write_text("A,B\nB,A\nB,C\nC,B\nC,A\nA,C\n")
        np.testing.assert_allclose(read_graph(str(tmp_path / "e.csv"), 3).mixing_matrix(0), np.full((3, 3), 1 / 3))

    def test_names_of_classes_are_those_of_the_source(self, tmp_path):
        features = datasets.Features(
            {"x": datasets.Value("float32"), "label": datasets.ClassLabel(names=["z", "none"])}
        )
        rows = {"x": np.arange(40) % 7, "label": np.arange(40) % 2}
        (tmp_path / "hub").mkdir()
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "hub" / "train.parquet")
        data = load_file(f"hf:{tmp_path / 'hub'}")
        assert (data.class_names, data.num_classes) == (("z", "none"), 2)
        assert only_classes(
            load_file(table(tmp_path, *GOOD, heading=PLAIN), drop_columns=["site"]), (2, "0")
        ).class_names == ("2", "0")


class TestClasses:
    @pytest.mark.parametrize("kind", ["csv", "npz"])
    def test_a_target_is_no_label(self, kind, tmp_path):
        targets = np.random.default_rng(0).normal(size=120).round(5)
        path = arrays(tmp_path, inputs=np.ones((120, 1)), labels=targets)
        if kind == "csv":
            path = table(tmp_path, *[f"{k % 7},A,{target}" for k, target in enumerate(targets)], heading=PLAIN)
        refused(lambda: load_file(path, site_column="site"), "label_column", "regression", "jaxfl.from_functions")

    def test_identifiers_are_no_labels(self, tmp_path):
        path = table(tmp_path, *[f"{k % 7},A,p{k}" for k in range(9)], heading=PLAIN)
        refused(lambda: load_file(path, site_column="site"), "label_column", "9 different")

    def test_classes_that_are_given_do_not_follow_from_labels(self, tmp_path):
        """A label of its own adds no class, and a class without samples stays one."""
        path = table(tmp_path, *GOOD, "1,A,rare", heading=PLAIN)
        data = only_classes(load_file(path, site_column="site"), ("0", "1", "2", "none here"))
        assert (data.num_classes, data.train_labels.max()) == (4, 2)
        refused(lambda: only_classes(load_file(path, site_column="site"), ("yes", "no")), "classes", "0 1 2 rare")


class TestTypes:
    @pytest.mark.parametrize("dtype", [np.int64, np.uint16, np.int8])
    def test_whole_numbers_of_arrays_stay_whole(self, dtype, tmp_path):
        tokens = (np.arange(80).reshape(40, 2) % 100).astype(dtype)
        data = load_file(arrays(tmp_path, inputs=tokens, labels=np.arange(40) % 2))
        assert data.train_inputs.dtype == np.int32
        assert {*data.train_inputs.ravel().tolist()} <= {*range(100)}
        path = parquet(
            tmp_path, x=pyarrow.array(tokens.tolist(), pyarrow.list_(pyarrow.int64())), label=np.arange(40) % 2
        )
        assert load_file(path).train_inputs.dtype == np.int32
        refused(lambda: federate(tokens.astype(np.int64), np.zeros(40, int), [np.arange(40)]), "inputs", "np.int32")

    @pytest.mark.parametrize(
        ("values", "word"),
        [
            ({"inputs": np.array(["a"] * 40)}, "<U1"),
            ({"inputs": np.ones((40, 2)) * 1j}, "complex"),
            ({"inputs": np.full((40, 2), 2**40)}, "32 bits"),
            ({"inputs": np.array(1.0)}, "inputs ()"),
            ({"inputs": np.where(np.arange(80).reshape(40, 2) == 7, np.nan, 1)}, "row 3"),
            ({"inputs": np.full((40, 2), 1e300)}, "inf"),
            ({"labels": np.ones((40, 1), int)}, "(40, 1)"),
            ({"labels": np.eye(2)[np.arange(40) % 2]}, "argmax"),
            ({"labels": np.array(1)}, "labels ()"),
            ({"sites": np.ones((40, 2), int)}, "(40, 2)"),
            ({"labels": np.full(40, np.nan)}, "row 0"),
        ],
    )
    def test_arrays_are_checked_before_they_are_cut(self, values, word, tmp_path):
        path = arrays(tmp_path, **{"inputs": np.ones((40, 2)), "labels": np.arange(40) % 2, **values})
        refused(lambda: load_file(path), "dataset", word)

    @pytest.mark.parametrize(("inputs", "labels"), [(np.nan, 0.0), (1.0, np.inf)])
    def test_what_is_not_finite_is_refused_with_its_node(self, inputs, labels):
        """In `federate` and in a test set, as in `from_arrays`."""
        pool, targets = np.ones((4, 2), "f4"), np.zeros(4, "f4")
        pool[2, 1], targets[2] = inputs, labels
        words = ("sample 2 of", "Oslo")
        name = "inputs" if np.isnan(inputs) else "labels"
        parts = [np.array([0, 1]), np.array([3, 2])]
        refused(lambda: federate(pool, targets, parts, names=["Lund", "Oslo"]), name, *words)
        refused(lambda: evaluation_set(pool, targets), f"test_{name}", "sample 2")

    @pytest.mark.parametrize(
        ("parts", "word"),
        [
            ({0: [0], 1: [1]}, "list(parts.values())"),
            ([np.array([True, False])], "np.flatnonzero"),
            ([{0, 1}], "sorted"),
        ],
    )
    def test_partitions_of_other_kinds_are_refused_with_the_remedy(self, parts, word):
        refused(lambda: federate(np.ones((2, 1), "f4"), [0, 1], parts), "parts", word)

    def test_images_of_several_sizes_are_refused_with_their_row(self, tmp_path):
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
        images = [PIL.Image.fromarray(IMAGES[k][: 1 + (k != 5)]) for k in range(40)]
        rows = {"image": images, "label": np.arange(40) % 2}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
        refused(lambda: load_file(f"hf:{tmp_path}"), "dataset", "row 7", "(1, 2)")


class TestFiles:
    @pytest.mark.parametrize("ending", [".tsv", ".CSV", ".csv.gz", ".Parquet", ".NPZ"])
    def test_other_spellings_of_endings_are_read(self, ending, tmp_path):
        expected = load_file(table(tmp_path), label_column="ill", site_column="site")
        path = tmp_path / f"own{ending}"
        text = (tmp_path / "own.csv").read_text()
        if ending == ".Parquet":
            parquet(tmp_path, path.name, **COLUMNS)
        elif ending == ".NPZ":
            with path.open("wb") as file:
                columns = {"inputs": np.array([COLUMNS["age"], COLUMNS["dose"]]).T, "labels": COLUMNS["ill"]}
                np.savez(file, **columns, sites=COLUMNS["site"].to_pylist())
        else:
            text = text.replace(",", "\t") if ending == ".tsv" else text
            path.write_bytes(gzip.compress(text.encode()) if ending == ".csv.gz" else text.encode())
        data = load_file(str(path), label_column="ill", site_column="site")
        for name in ("train_inputs", "train_labels", "train_writers", "test_inputs"):
            np.testing.assert_array_equal(getattr(data, name), getattr(expected, name), strict=True)
        assert short_name(str(path)) == "own"

    def test_semicolons_and_decimal_commas(self, tmp_path):
        rows = [row.replace(",", ";").replace(".", ",") for row in GOOD]
        data = load_file(table(tmp_path, *rows, heading="x; site;label"), site_column="site")
        expected = load_file(table(tmp_path, *GOOD, heading=PLAIN), site_column="site")
        np.testing.assert_array_equal(data.train_inputs, expected.train_inputs)
        rows = [row.replace(",", ";") for row in GOOD]
        refused(lambda: load_file(table(tmp_path, *rows, heading=PLAIN)), "dataset", "comma as separator")

    @pytest.mark.parametrize(
        "name", ["a.json", "a.jsonl", "a.xlsx", "a.svm", "a.h5", "folder/", "./folder", "a.csv.zip"]
    )
    def test_another_kind_of_file_is_named_as_such(self, name):
        for change in ({"label_column": "ill"}, {"site_column": "town"}, {}):
            error = refused(
                lambda change=change: request(EXPERIMENTS["privsgp_vr"], {"dataset": name, **change}), "dataset"
            )
            assert ".csv" in error
            assert "from_arrays" in error

    @pytest.mark.parametrize("ending", ["csv", "npz", "parquet"])
    def test_a_pipe_is_not_opened(self, ending, tmp_path):
        os.mkfifo(tmp_path / f"a.{ending}")
        with within(5):
            refused(lambda: load_file(str(tmp_path / f"a.{ending}")), "dataset", f"a.{ending}")

    @pytest.mark.parametrize("content", [gzip.compress(b"a,b\n1,2\n" * 99, mtime=0), b"sa\xdfen,label\n1,2\n"])
    def test_damaged_and_other_text_is_refused(self, content, tmp_path):
        damaged = content[:20] + bytes([content[20] ^ 255]) + content[21:] if content[0] == 31 else content
        (tmp_path / "a.csv.gz").write_bytes(damaged)
        refused(lambda: load_file(str(tmp_path / "a.csv.gz")), "dataset", *(() if content[0] == 31 else ("UTF-8",)))

    def test_damaged_archives_are_refused(self, tmp_path):
        content = pathlib.Path(arrays(tmp_path, inputs=np.ones((40, 2)), labels=np.arange(40) % 2)).read_bytes()
        for place in range(0, len(content), 97):
            (tmp_path / "b.npz").write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
            try:
                load_file(str(tmp_path / "b.npz"))
            except ArgumentError:
                continue
        np.save(tmp_path / "c.npy", np.ones(3))
        (tmp_path / "c.npy").rename(tmp_path / "c.npz")
        refused(lambda: load_file(tmp_path / "c.npz"), "dataset", "c.npz")
        np.savez(tmp_path / "d.npz", inputs=np.ones((4, 1)), labels=np.array(["a", None], object))
        refused(lambda: load_file(tmp_path / "d.npz"), "dataset", ".astype(str)")


class TestPandas:
    """Files and columns as pandas and Spark write them."""

    @pytest.mark.parametrize("name", ["__index_level_0__", "Unnamed: 0"])
    def test_a_shuffled_index_is_no_input(self, name, tmp_path):
        path = parquet(
            tmp_path, **{name: np.random.default_rng(0).permutation(60), "x": np.ones(60), "label": np.arange(60) % 2}
        )
        refused(lambda: load_file(path), "dataset", name)

    @pytest.mark.parametrize("kind", [pyarrow.timestamp("us"), pyarrow.date32(), pyarrow.duration("s")])
    @pytest.mark.parametrize("first", [None, 3])
    def test_dates_are_no_inputs(self, kind, first, tmp_path):
        path = parquet(
            tmp_path, day=pyarrow.array([first, *[5, 3] * 20], kind), x=np.arange(41) % 3, label=np.arange(41) % 2
        )
        refused(lambda: load_file(path), "dataset", "column day")
        assert load_file(path, drop_columns=["day"]).reading.inputs == ("x",)

    @pytest.mark.parametrize(
        "lists",
        [
            [[1, None], [2, 3]],
            [None, [1, 2]],
            [[True, None], [False, True]],
            [[1], [1, 2]],
            [[{"a": 1}], [{"a": 2}]],
        ],
    )
    def test_lists_with_gaps_are_refused_where_they_are_inputs(self, lists, tmp_path):
        path = parquet(tmp_path, x=lists * 20, y=np.arange(40) % 3, label=np.arange(40) % 2)
        refused(lambda: load_file(path), "dataset", "column x")
        assert load_file(path, drop_columns=["x"]).reading.inputs == ("y",)

    def test_bytes_are_text(self, tmp_path):
        names = [b"no", "Åbo".encode()] * 20
        path = parquet(tmp_path, x=np.arange(40) % 3, label=names)
        assert load_file(path).class_names == by_owner(np.array(names, object)).names == ("no", "Åbo")
        assert by_owner(np.array([b"a", b"b"])).names == ("a", "b")

    def test_masked_and_nested_names_are_refused(self):
        refused(lambda: by_owner(np.ma.masked_equal([1, 2, 1], 2)), "owner_ids", "sample 1")
        refused(lambda: by_owner([["a"], ["b", "c"]]), "owner_ids", "['a']")
        refused(lambda: by_owner(np.array([["a"], ["b"]])), "owner_ids", ".ravel()")


def test_names_keep_their_spelling_in_options(tmp_path):
    labels = ["007", "7", "1"]
    path = table(tmp_path, *[f"{k % 7 / 7},A,{labels[k % 3]}" for k in range(60)], heading=PLAIN)
    given = {"dataset": path, "site_column": "site", "classes": ("007", "1")}
    data = request(EXPERIMENTS["privsgp_vr"], given).config.data.load()
    assert (data.class_names, len(data.train_labels)) == (("007", "1"), 31)
    assert request(EXPERIMENTS["privsgp_vr"], {"classes": ("3", "8")}).config.data.classes == (3, 8)
    refused(lambda: only_classes(data, ("007", "1", "1.0")), "classes")


def test_integers_that_do_not_fit_are_refused():
    inputs = np.ones((4, 1), np.float32)
    refused(lambda: from_arrays(inputs, [0, 2**32, 0, 1], inputs[:1], [0]), "train_labels", "int32")
    owners = [1538296000, 1538296000 + 2**32] * 2
    refused(lambda: from_arrays(inputs, [0, 1, 0, 1], inputs[:1], [0], train_writers=owners), "train_writers", "int32")
    assert from_arrays(inputs, np.array([3, 5, 3, 5], object), inputs[:1], [0]).num_classes == 6
