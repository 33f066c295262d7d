"""Final values of cases, against the setting in which they differ."""

import json

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes

from jaxfl.analysis.final_plot import plot_final, series

PROVEN = {"bound": "proven", "dp_epsilon": 3.0, "dp_delta": 1e-5, "neighboring_relation": "zero_out", "assumptions": []}


def write_run(folder, settings):
    """A finished run of two seeds, in which case v and seed s end with loss v + s / 10."""
    lines = [
        {"case": name, "seed": seed, "round": k, "test_loss": index + seed / 10 + 5 - k, "test_accuracy": index / 10}
        for index, name in enumerate(settings)
        for seed in (0, 1)
        for k in (0, 5)
    ]
    (folder / "passes" / "0").mkdir(parents=True, exist_ok=True)
    (folder / "passes" / "0" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({"cases": {name: {"privacy": [PROVEN]} for name in settings}}))


def setting(iterations, *, target_epsilon=None, nodes=4, method="VR"):
    return {"method": method, "nodes": nodes, "iterations": iterations, "target_epsilon": target_epsilon}


def test_cases_that_differ_in_nothing_but_the_axis_are_one_line():
    settings = {
        "a": setting(10, method="VR"),
        "b": setting(20, method="VR"),
        "c": setting(10, method="plain"),
        "d": setting(20, method="plain"),
    }
    assert series(settings, "iterations") == {"VR": ["a", "b"], "plain": ["c", "d"]}


def test_the_points_are_the_seeds_mean_smallest_and_largest(tmp_path, monkeypatch):
    settings = {f"K = {k}": setting(k) for k in (30, 10, 20)}
    write_run(tmp_path, settings)
    drawn = []

    def errorbar(self, x, y, *, yerr, **style):
        drawn.append((list(x), list(y), np.array(yerr)))
        return self.plot(x, y)[0]

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    (path,) = plot_final(tmp_path, settings)
    assert path == tmp_path / "plots" / "final.png"
    assert matplotlib.image.imread(path).shape[2] == 4
    x, mean, bars = drawn[0]
    assert x == [10, 20, 30]  # in order, though the cases are not
    np.testing.assert_allclose(mean, [1.05, 2.05, 0.05])
    np.testing.assert_allclose(bars, np.full((2, 3), 0.05))


@pytest.mark.parametrize(
    "settings",
    [
        {"a": setting(10), "b": setting(20)},  # two points are no curve
        {"a": setting(10, method="VR"), "b": setting(20, method="plain"), "c": setting(30, method="third")},
    ],
)
def test_no_picture_without_a_curve(tmp_path, settings):
    write_run(tmp_path, settings)
    assert plot_final(tmp_path, settings) == []


def test_different_numbers_of_nodes_are_drawn_against_their_product_with_the_iterations(tmp_path, monkeypatch):
    settings = {"few": setting(20, nodes=4), "many": setting(10, nodes=8)}
    write_run(tmp_path, settings)
    drawn, plot = [], Axes.plot

    def recorded(self, x, y, **style):
        drawn.append(list(x))
        return plot(self, x, y, **style)

    monkeypatch.setattr(Axes, "plot", recorded)
    (path,) = plot_final(tmp_path, settings)
    assert path.name == "speedup.png"
    assert drawn[:2] == [[0, 20], [0, 40]]


def test_two_numbers_of_which_all_pairs_ran_are_a_heat_map_without_what_diverged(tmp_path, monkeypatch):
    pairs = [(step, clip) for step in (0.1, 0.2) for clip in (1.0, 2.0)]
    settings = {f"{step} {clip}": {"step_size": step, "clip_norm": clip} for step, clip in pairs}
    write_run(tmp_path, settings)
    rows = [f"{name},{seed},{'diverged' if name == '0.2 2.0' else 'finished'}" for name in settings for seed in (0, 1)]
    (tmp_path / "results.csv").write_text("\n".join(["case,seed,status", *rows]) + "\n")
    drawn, imshow = [], Axes.imshow

    def recorded(self, cells, **style):
        drawn.append(np.array(cells))
        return imshow(self, cells, **style)

    monkeypatch.setattr(Axes, "imshow", recorded)
    (path,) = plot_final(tmp_path, settings)
    assert path.name == "heat_map.png"
    np.testing.assert_allclose(drawn[0], [[0.05, 2.05], [1.05, np.nan]])
    settings.pop("0.2 2.0")
    assert plot_final(tmp_path, settings) == []


def test_an_automatic_value_has_a_row_of_a_heat_map_behind_the_numbers(tmp_path, monkeypatch):
    pairs = [(step, clip) for step in ("auto", 0.1, 0.05) for clip in (1.0, 2.0)]
    settings = {f"{step} {clip}": {"step_size": step, "clip_norm": clip} for step, clip in pairs}
    write_run(tmp_path, settings)
    ticks = recorded(monkeypatch, "set_xticks")
    (path,) = plot_final(tmp_path, settings)
    assert path.name == "heat_map.png"
    assert ticks[0][0][1] == ["0.05", "0.1", "auto"]


def recorded(monkeypatch, name):
    """Arguments of a method of axes, call by call."""
    drawn, method = [], getattr(Axes, name)

    def noted(self, *values, **style):
        drawn.append((values, style))
        return method(self, *values, **style)

    monkeypatch.setattr(Axes, name, noted)
    return drawn


def test_sampled_numbers_are_a_scatter_colored_by_their_metric(tmp_path, monkeypatch):
    """One scale for both series, a ring around the best, a cross where a case diverged."""
    settings = {
        f"{method} {k}": {"method": method, "step_size": 10.0**-k, "clip_norm": 1.0 + k}
        for method in "ab"
        for k in range(5)
    }
    write_run(tmp_path, settings)
    ends = [f"{name},{seed},{'diverged' if name == 'a 1' else 'finished'}" for name in settings for seed in (0, 1)]
    (tmp_path / "results.csv").write_text("\n".join(["case,seed,status", *ends]) + "\n")
    drawn = recorded(monkeypatch, "scatter")
    (path,) = plot_final(tmp_path, settings)
    assert path.name == "scatter.png"
    losses, shares = drawn[:6], drawn[6:]
    for calls, values in ((losses, np.arange(10) + 0.05), (shares, np.arange(10) / 10)):
        crosses, points, rings = (calls[place::3] for place in range(3))
        assert [len(cross[0][0]) for cross in crosses] == [1, 0]
        np.testing.assert_allclose(np.concatenate([style["c"] for _, style in points]), np.delete(values, 1))
        assert len({id(style["norm"]) for _, style in points}) == 1
        assert (points[0][1]["norm"].vmin, points[0][1]["norm"].vmax) == pytest.approx((values[0], values[-1]))
        best = np.flatnonzero([len(ring[0][0]) for ring in rings]).tolist()
        assert best == ([0] if calls is losses else [1])
    np.testing.assert_allclose(losses[1][0][0], [1.0, 1e-2, 1e-3, 1e-4])
    assert plot_final(tmp_path, {name: settings[name] for name in list(settings)[:4]}) == []


def test_all_panels_of_a_metric_share_one_scale(tmp_path, monkeypatch):
    settings = {
        f"{method} {step} {clip}": {"method": method, "step_size": step, "clip_norm": clip}
        for method in "ab"
        for step in (0.1, 0.2)
        for clip in (1.0, 2.0)
    }
    write_run(tmp_path, settings)
    drawn = recorded(monkeypatch, "imshow")
    plot_final(tmp_path, settings)
    first, second, *shares = (style["norm"] for _, style in drawn)
    assert first is second
    assert shares[0] is shares[1] is not first
    assert (shares[0].vmin, shares[0].vmax) == (0.0, 0.7)
