""".npy files of graphs: what is no array of numbers is refused in one sentence, before anything is allocated."""

import io
import os
import struct
import tracemalloc

import numpy as np
import pytest
from helpers import refused

from jaxfl.graphs.files import read_graph, read_pair

MATRIX = np.full((2, 2), 0.5)


def npy(header, content=bytes(32), version=b"\x01\x00"):
    """A .npy file with any header."""
    header = header if isinstance(header, bytes) else header.encode()
    length = struct.pack("<H" if version == b"\x01\x00" else "<I", len(header))
    return b"\x93NUMPY" + version + length + header + content


def described(shape="(2, 2)", descr="'<f8'", fortran_order="False"):
    """The header of an array."""
    return f"{{'descr': {descr}, 'fortran_order': {fortran_order}, 'shape': {shape}}}\n"


def archive(size=None):
    """An archive of two arrays, or its beginning."""
    content = io.BytesIO()
    np.savez(content, MATRIX, MATRIX)
    return content.getvalue()[:size]


@pytest.mark.parametrize("version", [b"\x01\x00", b"\x02\x00"])
def test_a_header_written_by_hand_is_read(tmp_path, version):
    path = tmp_path / "graph.npy"
    path.write_bytes(npy(described(), MATRIX.tobytes(), version))
    np.testing.assert_array_equal(read_graph(str(path), 2).mixing_matrix(0), MATRIX)
    path.write_bytes(npy(described("(2L, 2L)"), MATRIX.tobytes(), version))  # as Python 2 wrote it
    np.testing.assert_array_equal(read_graph(str(path), 2).mixing_matrix(0), MATRIX)


DAMAGED = [
    b"",
    b"\x93NUM",
    archive(),
    archive(200),
    npy("{'descr': '<f8', 'shape': (2, 2"),
    npy("{'descr': '''"),
    npy("  {\n {"),
    npy("(" * 9000),
    npy("-" * 9000 + "1"),
    npy("\0"),
    npy(b"\xff\xfe", version=b"\x03\x00"),
    npy("[]", version=b"\x09\x09"),
    npy("9" * 5000),
    npy(described(descr="'O'")),
    npy(described(descr="[('a', 'O'), ('b', '<f8')]")),
    npy(described(descr="'<f99999999999999999999'")),
    npy(described(descr="('<f8', (-1,))")),
    npy(described(descr="None")),
    npy(described(descr="[('a', '<f8')]")),
    npy(described(descr="'<c16'")),
    npy(described(shape="(1000000000000, 1000000000000)")),
    npy(described(shape="(" + "9" * 4000 + ",)")),
    npy(described(shape="(-2, -2)")),
    npy(described(shape="(" + "1, " * 100 + ")")),
    npy(described(shape="(0, 99999999999999999999)")),
    npy(described(shape="(9, 9)")),
    npy(described()) + b"0",
    npy(described(shape="(0, 2, 2)"), b""),
    npy(described(), np.full((2, 2), np.nan).tobytes()),
]


@pytest.mark.parametrize("content", DAMAGED, ids=map(str, range(len(DAMAGED))))
def test_damaged_files(tmp_path, content):
    path = tmp_path / "graph.npy"
    path.write_bytes(content)
    refused(lambda: read_graph(str(path), 2), "graph", str(path))
    refused(lambda: read_pair(str(path), 2), "graph", str(path))


def test_nothing_is_allocated_that_the_file_does_not_hold(tmp_path):
    path = tmp_path / "graph.npy"
    path.write_bytes(npy(described(shape="(3000, 3000)")))
    for size in (5_000, 1 << 40):  # without a block on disk
        os.truncate(path, size)
        tracemalloc.start()
        refused(lambda: read_graph(str(path), 3000), "graph", str(path))
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert held < 1_000_000


def test_an_array_larger_than_the_memory(tmp_path, monkeypatch):
    path = tmp_path / "graph.npy"
    np.save(path, MATRIX)

    def full(held):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(np, "array", full)
        refused(lambda: read_graph(str(path), 2), "graph", str(path), "memory")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_a_pipe_a_socket_or_a_device_is_refused_not_opened(tmp_path, monkeypatch, make):
    path = tmp_path / "graph.npy"
    make(path)
    monkeypatch.setattr(type(path), "open", lambda *_: pytest.fail("it was opened"))
    refused(lambda: read_graph(str(path), 2), "graph", str(path))


def test_a_name_that_no_file_can_have():
    refused(lambda: read_graph("~nobody-of-this-name/x.npy", 2), "graph")
    refused(lambda: read_graph("x" * 5000 + ".npy", 2), "graph")


@pytest.mark.parametrize(
    ("edges", "matrix"),
    [
        ("b,a b,c a,b c,b", [[2 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 3, 2 / 3]]),  # each has its reverse
        ("b,a b,c a,b", [[1 / 2, 1 / 3, 0], [1 / 2, 1 / 3, 0], [0, 1 / 3, 1]]),  # c receives from b and sends nothing
    ],
)
def test_weights_of_edges_are_metropolis_where_each_has_its_reverse(tmp_path, edges, matrix):
    path = tmp_path / "edges.csv"
    path.write_text("\n".join(["sender,receiver", *edges.split()]))
    actual = read_graph(str(path), 3)
    assert actual.names == ("a", "b", "c")
    np.testing.assert_allclose(actual.mixing_matrix(0), matrix)
