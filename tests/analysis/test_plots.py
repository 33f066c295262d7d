"""Pictures of runs: what is drawn, from what, and what is left alone."""

import itertools
import json
import struct
import sys
from typing import Any

import numpy as np
import pytest
from helpers import refused
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from jaxfl.analysis import plot_run
from jaxfl.analysis.plots import Panel, draw_panels, legend_below, new_figure, save_figure, seeds_curve
from jaxfl.analysis.styles import COLORS, line_styles
from jaxfl.core.lines import Lines

PANEL = Panel("train_loss", "training loss")


def _lines(cases=("A", "B"), seeds=(0, 1, 2), rounds=(0, 10, 20), scale=1.0):
    return [
        {
            "case": case,
            "seed": seed,
            "round": number,
            "train_loss": None if number == 0 else scale * (1 + seed) / number,
            "test_loss": 2.0 - number / 20,
            "test_accuracy": number / 25,
            "test_accuracy_worst_node": number / 30,
        }
        for case in cases
        for seed in seeds
        for number in rounds
    ]


def _columns(**options):
    return Lines(_lines(**options))


def _write(folder, lines):
    (folder / "passes" / "0").mkdir(parents=True, exist_ok=True)
    (folder / "passes" / "0" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_is_drawn_from_its_metrics_alone(tmp_path):
    _write(tmp_path, _lines())
    (path,) = plot_run(tmp_path)
    assert path == tmp_path / "plots" / "training.png"
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 900
    assert height >= 600
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_lines_are_means_and_bands_reach_from_the_smallest_to_the_largest_seed():
    figure = draw_panels(_columns(), [PANEL], "a title")
    (axes,) = figure.axes
    assert len(axes.lines) == 2
    np.testing.assert_array_equal(axes.lines[0].get_xdata(), [10, 20])
    np.testing.assert_allclose(np.asarray(axes.lines[0].get_ydata()), [0.2, 0.1])
    assert len(axes.collections) == 2
    band = np.array(axes.collections[0].get_paths()[0].vertices)
    np.testing.assert_allclose([band[:, 1].min(), band[:, 1].max()], [0.05, 0.3])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["A", "B"]
    assert "mean over 3 seeds, band: smallest to largest seed" in legend.get_title().get_text()
    assert figure.get_suptitle() == "a title"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "training loss")


def _with_costs():
    """Lines in which each seed has costs of its own."""
    return [
        {
            **line,
            "total_bits_sent": 1e6 * line["round"] * (1 + line["seed"]),
            "total_simulated_seconds": 0.5 * line["round"],
            "total_joules": 0.25 * line["round"],
            "total_operations": 1e9 * line["round"],
            "total_gradient_evaluations": 7 * line["round"],
            "total_forward_evaluations": 2 * line["round"],
        }
        for line in _lines()
    ]


@pytest.mark.parametrize(
    ("x", "label", "places", "tick"),
    [
        ("rounds", "round", [10, 20], "20"),
        ("bits", "bits sent, all nodes", [2e7, 4e7], "40M"),  # mean of one, two and three times as many
        ("seconds", "simulated seconds", [5, 10], "10"),
        ("joules", "joules, all nodes", [2.5, 5], "5.0"),
        ("operations", "operations, all nodes", [1e10, 2e10], "20G"),
        ("evaluations", "gradient and forward evaluations, all nodes", [90, 180], "180"),
    ],
)
def test_curves_against_any_cost(tmp_path, monkeypatch, x, label, places, tick):
    """And the same in the picture of a run."""
    figure = draw_panels(Lines(_with_costs()), [PANEL], "", x=x)
    (axes,) = figure.axes
    assert axes.get_xlabel() == label
    np.testing.assert_allclose(np.asarray(axes.lines[0].get_xdata()), places)
    np.testing.assert_allclose(np.asarray(axes.lines[0].get_ydata()), [0.2, 0.1])
    figure.canvas.draw()
    assert axes.xaxis.get_major_formatter().format_ticks(places)[1] == tick
    note = figure.legends[0].get_title().get_text()
    assert (f"{x}: mean over seeds" in note) == (x != "rounds")
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.append(self))
    _write(tmp_path, _with_costs())
    plot_run(tmp_path, x)
    assert {axes.get_xlabel() for axes in drawn[0].axes} == {label}


def test_costs_that_no_line_has_are_refused(tmp_path):
    _write(tmp_path, _lines())
    for x in ("joules", "steps"):
        refused(lambda x=x: plot_run(tmp_path, x), "x")


def test_a_case_without_the_cost_is_left_out():
    lines = [{**line, "total_joules": 1.0 * line["round"]} for line in _lines() if line["case"] == "A"]
    figure = draw_panels(Lines([*lines, *_lines(cases=("B",))]), [PANEL], "", x="joules")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["A"]


def test_one_seed_has_no_band():
    figure = draw_panels(_columns(seeds=(0,)), [PANEL], "")
    assert len(figure.axes[0].collections) == 0
    assert "one seed" in figure.legends[0].get_title().get_text()


def test_cases_differ_in_color_and_dashes():
    cases = [f"v{number:02}" for number in range(12)]
    figure = draw_panels(_columns(cases=cases), [PANEL], "")
    # `get_linestyle` says "--" for every kind of dashes.
    styles = [(line.get_color(), getattr(line, "_dash_pattern")) for line in figure.axes[0].lines]  # noqa: B009
    assert len(set(map(str, styles))) == 12
    assert [color for color, *_ in styles[:11]] == list(COLORS)


def _lab(color):
    """CIE L*a*b* of a color; two that are 20 apart are told apart at a glance."""
    share = np.array(to_rgb(color))
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.array(to_xyz) @ linear / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_colors_are_more_than_methods_and_far_apart():
    distances = [np.linalg.norm(_lab(one) - _lab(other)) for one, other in itertools.combinations(COLORS, 2)]
    assert len(COLORS) > 10
    assert min(distances) > 20


METHODS = ["PrivSGP-VR", "PrivSGP", "DP2-SGD", "A(DP)2SGD", "DP-GT", "noisy-states", "ALI-DPFL", "DPFL", "DP-FedAvg"]


@pytest.mark.parametrize("case", ["{}", "{}, ε = 3, step 0.3"])
def test_methods_with_a_server_on_a_graph_and_baselines_are_told_apart(case):
    rows = [*METHODS, "alone", "pooled", "curator", "without_noise"]
    styles = list(line_styles(map(case.format, rows)).values())
    assert len({style["color"] for style in styles[:9]}) == 9
    on_graph, served, beside = ({style["linestyle"] for style in part} for part in np.split(np.array(styles), [6, 9]))
    assert (len(on_graph), len(served)) == (1, 1)
    assert on_graph != served
    assert "solid" not in beside
    assert all(len({*to_rgb(style["color"])}) == 1 for style in styles[9:])  # grey
    assert len(set(map(str, styles))) == 13


def test_of_many_cases_the_best_five_are_drawn_over_the_others_in_grey():
    cases = [f"v{number}" for number in range(13)]
    ranked = cases[::-1]
    axes, *_ = (figure := draw_panels(_columns(cases=cases), [PANEL], "", ranked=ranked)).axes
    front, grey = axes.lines[-5:], axes.lines[:-5]
    assert len({line.get_color() for line in front} - {"0.75"}) > 3
    assert {line.get_color() for line in grey} == {"0.75"}
    assert (len(grey), len(axes.collections)) == (8, 5)  # bands of the best only
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ranked[:5]
    assert "the best 5 of 13 in the closing table, the others in light grey" in legend.get_title().get_text()
    few = draw_panels(_columns(cases=cases[:12]), [PANEL], "", ranked=ranked)
    assert len({line.get_color() for line in few.axes[0].lines}) == len(COLORS)


def test_baselines_take_no_place_of_the_best_five_and_the_best_of_each_is_drawn_in_grey():
    cases = [*(f"{method}, step {step}" for method in ("A", "B") for step in range(6)), "A, step 1, pooled"]
    cases += ["B, step 1, pooled", "A, step 2, alone"]
    ranked = cases[::-1]
    (legend,) = draw_panels(_columns(cases=cases), [PANEL], "", ranked=ranked).legends
    assert [text.get_text() for text in legend.get_texts()] == [*ranked[3:8], *ranked[:2]]
    assert "the best 5 of 15 and of each baseline in the closing table" in legend.get_title().get_text()
    handles: list[Any] = legend.legend_handles
    *compared, alone, pooled = handles
    assert len({line.get_color() for line in compared}) == 1  # of one method
    assert len({str(line._dash_pattern) for line in compared}) == 5
    assert all(len({*to_rgb(line.get_color())}) == 1 for line in (alone, pooled))


def test_a_method_has_one_color_in_all_pictures_of_a_run():
    """Whatever the order, and whether a picture names methods or cases."""
    cases = [f"{method}, step {step}" for method in METHODS for step in range(5)]
    methods = line_styles(METHODS, METHODS)
    for drawn in (cases[::7], cases[::-7], [cases[-1]]):
        styles = line_styles(drawn, cases[::-1])
        assert all(style["color"] == methods[name.split(", ")[0]]["color"] for name, style in styles.items())
        assert len(set(map(str, styles.values()))) == len(drawn)
    beside = ["curator", "alone", "without_noise", "pooled"]
    assert line_styles([*METHODS, *beside], METHODS) == line_styles([*beside[::-1], *METHODS[::-1]], METHODS[::-1])


@pytest.mark.parametrize(("values", "scale"), [((1.0, 0.5), "linear"), ((1.0, 1e-3), "log"), ((1.0, 0.0), "linear")])
def test_log_scale_only_where_a_positive_loss_spans_much(values, scale):
    lines = [
        {"case": "A", "seed": 0, "round": number, "train_loss": value, "test_accuracy": value}
        for number, value in enumerate(values)
    ]
    figure = draw_panels(Lines(lines), [PANEL, Panel("test_accuracy", "accuracy", is_accuracy=True)], "")
    assert [axes.get_yscale() for axes in figure.axes] == [scale, "linear"]


def test_an_interrupted_run_is_drawn_as_far_as_it_came(tmp_path):
    lines = _lines()[:-2]  # the last seed of B has but its first line
    _write(tmp_path, lines)
    with open(tmp_path / "passes" / "0" / "metrics.jsonl", "a") as file:
        file.write('{"case": "B", "se')
    assert plot_run(tmp_path)[0].exists()
    curve = seeds_curve(Lines(lines).by_case()["B"], "train_loss")
    np.testing.assert_allclose(curve.mean, [0.15, 0.075])
    assert seeds_curve(Lines(lines), "absent").x.size == 0


def test_a_case_without_a_metric_and_a_single_evaluation_are_drawn(tmp_path):
    lines = _lines(cases=("A",), rounds=(0,))
    _write(tmp_path, lines)
    assert plot_run(tmp_path)[0].exists()
    figure = draw_panels(Lines([*_lines(cases=("A",)), {"case": "B", "seed": 0, "round": 5}]), [PANEL], "")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["A"]


@pytest.mark.parametrize("count", [2, 15, 84])
def test_a_legend_of_long_names_stays_within_the_picture(count, tmp_path):
    figure = new_figure(9.6, 4.0, "title")
    axes = figure.add_subplot()
    names = [f"ALI-DPFL, κ = 1e+06, step size {number / 2}, evaluate every 1000" for number in range(count)]
    legend_below(figure, {name: axes.plot([0, 1])[0] for name in names}, ["a note"])
    save_figure(figure, tmp_path / "picture.png")
    whole, (legend,) = figure.bbox, figure.legends
    inside = legend.get_window_extent()
    assert whole.x0 <= inside.x0 <= inside.x1 <= whole.x1
    assert whole.y0 <= inside.y0 <= inside.y1 <= whole.y1
    assert axes.get_window_extent().height > 150


def test_the_title_comes_from_the_configuration(tmp_path):
    from jaxfl.analysis.plots import run_title

    config = {"experiment": "privsgp_vr", "preset": None, "config": {"dataset": "digits"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run_title(tmp_path / "config.json") == "privsgp_vr, digits"
    assert run_title(tmp_path / "none" / "config.json") == "none"


def test_a_directory_without_metrics_is_refused(tmp_path):
    refused(lambda: plot_run(tmp_path), "run_dir")
    _write(tmp_path, [{"case": "A", "seed": 0, "round": 0}])
    refused(lambda: plot_run(tmp_path), "run_dir")
