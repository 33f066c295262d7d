# pyright: reportArgumentType=false, reportOptionalSubscript=false, reportAttributeAccessIssue=false
"""Data sets in files of one's own: tables and arrays, sites and their names, and one sentence for whatever is wrong."""

import datasets
import numpy as np
import PIL.Image
import pyarrow
import pyarrow.parquet
import pytest
from helpers import refused

from jaxfl import graphs
from jaxfl.data import load_file, partition_dataset
from jaxfl.data.tables import read_by_site
from jaxfl.graphs.files import read_graph

HEADING = "age,site,ill,dose"
ROWS = [f"0.{k % 10},{'BCA'[k % 3]},{'no yes'.split()[k % 2]},{-k}" for k in range(60)]


def table(folder, *rows, heading=HEADING):
    path = folder / "own.csv"
    path.write_text("\n".join([heading, *(rows or ROWS)]) + "\n")
    return str(path)


def test_a_table_gives_its_numbers_labels_and_sites(tmp_path):
    data = load_file(table(tmp_path), label_column="ill", site_column="site")
    assert (data.train_inputs.shape, data.test_inputs.shape, data.train_inputs.dtype) == ((48, 2), (12, 2), np.float32)
    assert (data.num_classes, data.writer_names) == (2, ("A", "B", "C"))
    for inputs, label, site in zip(data.train_inputs, data.train_labels, data.train_writers, strict=True):
        k = int(-inputs[1])
        assert (inputs[0], label, "ABC"[site]) == (np.float32(f"0.{k % 10}"), k % 2, "BCA"[k % 3])


def test_each_site_and_label_tests_with_its_share(tmp_path):
    rows = [f"{k},{'AAAB'[k % 4]},{k % 2},0" for k in range(400)]
    data = load_file(table(tmp_path, *rows), label_column="ill", site_column="site", test_split=0.25)
    kept = set(data.train_inputs[:, 0].tolist())
    tests = [int(k) for k in data.test_inputs[:, 0]]
    assert not kept & set(tests)
    assert len(kept) + len(tests) == 400
    cells = [("AAAB"[k % 4], k % 2) for k in tests]
    counts = [[cells.count((site, label)) for label in (0, 1)] for site in "AB"]
    np.testing.assert_array_equal(counts, [[50, 25], [0, 25]])


def test_numbers_as_names_are_in_the_order_of_numbers(tmp_path):
    rows = [f"{k},{k % 11},{[10, 9][k % 2]},0" for k in range(110)]
    data = load_file(table(tmp_path, *rows), label_column="ill", site_column="site")
    assert data.writer_names == tuple(map(str, range(11)))
    assert {(int(x[0]) % 2, int(label)) for x, label in zip(data.train_inputs, data.train_labels, strict=True)} == {
        (0, 1),
        (1, 0),
    }


def test_names_that_are_no_plain_numbers_stay_as_they_are(tmp_path):
    names = ["007", "7", "99999999999999999999"]
    rows = [f"{k},{names[k % 3]},0,0" for k in range(60)]
    data = load_file(table(tmp_path, *rows), label_column="ill", site_column="site")
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
    found = load_file(path if kind == "parquet" else f"hf:{tmp_path / 'train'}", **options)
    for name in ("train_inputs", "train_labels", "test_inputs", "test_labels", "train_writers"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), strict=True, err_msg=name)
    assert (found.writer_names, found.num_classes) == (expected.writer_names, 2)


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
    "no number": (lambda f: load_file(parquet(f, x=["1", None], label=[0, 1])), "dataset", "None in column x"),
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
    ("rows", "found"),
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
def test_each_site_has_one_number(rows, found, tmp_path):
    path = tmp_path / "budgets.csv"
    path.write_text("\n".join(["site,epsilon", *rows]) + "\n")
    refused(lambda: read_by_site(str(path), ("Lund", "Oslo"), "node_epsilons"), "node_epsilons", found)
    path.write_text("site,epsilon\n\n Oslo , 1.5\nLund,1e1\n")
    assert read_by_site(str(path), ("Lund", "Oslo"), "node_epsilons") == (10.0, 1.5)
