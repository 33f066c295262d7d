"""The node-by-label picture, read back as pixels."""

import matplotlib.image
import numpy as np
import pytest
from helpers import refused
from matplotlib.figure import Figure

from jaxfl.analysis.partition_plot import plot_partition
from jaxfl.analysis.pictures import figures_of
from jaxfl.data import dirichlet, federate, iid, label_shards

LABELS = np.arange(2000) % 10


def pixels(path):
    """Red, green, blue in [0, 1], (height, width, 3)."""
    assert path.read_bytes().startswith(b"\x89PNG")
    return matplotlib.image.imread(path)[..., :3]


def colored_share(image):
    """Share of the picture that is neither white nor gray."""
    return float((np.ptp(image, axis=-1) > 0.2).mean())


@pytest.mark.parametrize("num_nodes", [1, 8, 128])
def test_png_is_written(tmp_path, num_nodes):
    path = plot_partition(dirichlet(LABELS, num_nodes, 0.3, 0), LABELS, 10, tmp_path / "new" / "partition.png")
    assert path == tmp_path / "new" / "partition.png"
    image = pixels(path)
    assert image.shape[1] >= 600
    assert colored_share(image) > 0.1


def test_empty_cells_are_white(tmp_path):
    # Of the 10 x 10 cells, 10 are filled under one shard of one class a node, all under an even deal.
    shards = pixels(plot_partition(label_shards(LABELS, 10, 1, 0), LABELS, 10, tmp_path / "shards.png"))
    even = pixels(plot_partition(iid(2000, 10, 0), LABELS, 10, tmp_path / "iid.png"))
    assert shards.shape == even.shape
    assert colored_share(even) > 4 * colored_share(shards)


def test_partition_and_its_data_look_the_same(tmp_path):
    parts = dirichlet(LABELS, 6, 0.3, 0)
    data = federate(np.zeros((2000, 1), np.float32), LABELS, parts)
    first = pixels(plot_partition(parts, LABELS, 10, tmp_path / "parts.png"))
    second = pixels(plot_partition(data, data.labels, 10, tmp_path / "data.png"))
    np.testing.assert_array_equal(first, second)


def test_many_classes(tmp_path):
    labels = np.arange(6200) % 62
    assert colored_share(pixels(plot_partition(iid(6200, 20, 0), labels, 62, tmp_path / "many.png"))) > 0.3


def test_names_with_control_letters_are_drawn_and_a_link_is_replaced(tmp_path):
    data = federate(np.zeros((2000, 1), np.float32), LABELS, iid(2000, 2, 0), names=["a\x1b[2J", "b\x00\u202e"])
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "names.png").symlink_to(tmp_path / "mine")
    assert colored_share(pixels(plot_partition(data, data.labels, 10, tmp_path / "names.png"))) > 0.1
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_run_has_its_partition_in_any_format(tmp_path):
    """The PNG carries counts and names; a link to the folder stays."""
    parts = dirichlet(LABELS, 3, 0.3, 0)
    (tmp_path / "plots").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "plots")
    plot_partition(
        federate(np.zeros((2000, 1), np.float32), LABELS, parts, names=["a", "ä\n", "$c$"]),
        LABELS,
        10,
        tmp_path / "link" / "p.png",
    )
    assert (tmp_path / "link").is_symlink()
    again = figures_of(tmp_path)["p"]
    again.savefig(tmp_path / "again.png", dpi=120)
    np.testing.assert_array_equal(pixels(tmp_path / "again.png"), pixels(tmp_path / "plots" / "p.png"))


def test_unwritable_path(tmp_path):
    (tmp_path / "file").write_text("")
    refused(lambda: plot_partition(iid(2000, 4, 0), LABELS, 10, tmp_path / "file" / "partition.png"), "path")


def test_thousands_of_nodes_are_drawn_as_one_outline(tmp_path, monkeypatch):
    """A hundred thousand bars would take 90 seconds and a gigabyte."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    num_nodes = 3_000
    sizes = np.arange(num_nodes) % 3 + 1
    parts = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
    plot_partition(parts, np.arange(sizes.sum()) % 2, 2, tmp_path / "many.png")
    (outline,) = drawn[0].axes[0].patches
    np.testing.assert_array_equal(outline.get_data().values, sizes)
