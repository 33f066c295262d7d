"""Options of the frame: words to values, choices by signature, grids from words, files and ranges."""

import os
import re

import numpy as np
import pytest
from toy_experiment import EXPERIMENT, SHAPES, Configuration, ask

from jaxfl.core import ArgumentError
from jaxfl.frame import choose, flat
from jaxfl.frame.experiment import request
from jaxfl.frame.grid import configs, parse_axis, sample_axis
from jaxfl.frame.options import options

KNOWN = options(Configuration)


class TestWords:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ("", {}),
            ("--rounds 3 --fast", {"rounds": 3, "fast": True}),
            ("--clip_norm=3", {"clip_norm": 3.0}),
            ("--step-size theory --widths 4 5", {"step_size": "theory", "widths": (4, 5)}),
            ("--step-size -1e-3 --widths -4 -5", {"step_size": -1e-3, "widths": (-4, -5)}),
            ("--step-size -.5 --budget -inf", {"step_size": -0.5, "budget": -float("inf")}),
            ("--clip-norm None --budget inf", {"clip_norm": None, "budget": float("inf")}),
            ("--widths", {"widths": ()}),
            ("--no-fast --budget 1 --no-strict", {"fast": False, "budget": 1.0, "strict": False}),
            ("--set rounds=3 --set title=x", {"rounds": 3, "title": "x"}),
            ("--set=step_size=2 --rounds 2", {"step_size": 2.0, "rounds": 2}),
            ("--set clip-norm=3 --set fast=true", {"clip_norm": 3.0, "fast": True}),
            ("--set fast=false --set clip_norm=None", {"fast": False, "clip_norm": None}),
            (["--set", "widths=1 32", "--title", "a=b"], {"widths": (1, 32), "title": "a=b"}),
        ],
    )
    def test_values(self, arguments, expected):
        derived = {"evaluate_every": flat(ask(arguments).config)["evaluate_every"]}
        assert flat(ask(arguments).config) == {**flat(ask("").config), **derived, **expected}


class TestChoose:
    def test_binds_the_options_of_the_signature(self):
        values = {"shape": "star", "radius": 9.0, "side": 2.0, "corners": 7}
        assert choose(SHAPES, values)() == 14
        assert choose(SHAPES, {**values, "shape": "circle"})() == 243

    @pytest.mark.parametrize(
        ("changes", "argument", "says"),
        [
            ({"shape": "square", "side": None}, "side", "is needed by square; got none. Pass it, or choose another sh"),
            ({"shape": "oval"}, "shape", "must be one of circle, square, star; got 'oval'"),
        ],
    )
    def test_refuses_a_missing_option_and_an_unknown_name(self, changes, argument, says):
        with pytest.raises(ArgumentError) as caught:
            choose(SHAPES, {"shape": "star", "radius": 1.0, "side": 2.0, "corners": 5, **changes})
        assert caught.value.argument == argument
        assert says in str(caught.value)

    def test_an_option_that_counts_somewhere_is_taken(self):
        lines = ask("--grid shape=square,star --corners 6").rows
        assert [line.config.drawing.corners for line in lines.values()] == [6, 6]


def values_of(request_, *names):
    return [tuple(flat(line.config)[name] for name in names) for line in request_.rows.values()]


class TestGrids:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ("--grid rounds=1,2 step-size=3,theory", [(1, 3.0), (2, "theory")]),
            ("--grid rounds=1,2 --grid step_size=3,4", [(1, 3.0), (1, 4.0), (2, 3.0), (2, 4.0)]),
            ("--rounds 5 --grid step_size=-1,inf", [(5, -1.0), (5, float("inf"))]),
        ],
    )
    def test_values_go_together_within_one_axis_and_cross_between_axes(self, arguments, expected):
        assert values_of(ask(f"--shape circle {arguments}"), "rounds", "step_size") == expected

    def test_a_value_of_several_words_is_quoted(self):
        lines = ask(["--shape", "circle", "--grid", "widths=8 4,16", "clip_norm=1,None"])
        assert values_of(lines, "widths", "clip_norm") == [((8, 4), 1.0), ((16,), None)]

    @pytest.mark.parametrize(
        ("words", "grid"),
        [
            ("--rounds 2 1 --step-size 3 theory", "--grid rounds=2,1 --grid step_size=3,theory"),
            ("--step-size 3 theory --rounds 2 1", "--grid step_size=3,theory --grid rounds=2,1"),
            ("--clip-norm None 1 --seeds 4 3", "--grid clip_norm=None,1 --grid seed=4,3"),
            ("--seed 4 3 --grid rounds=1,2 radius=1,2", "--grid seed=4,3 --grid rounds=1,2 radius=1,2"),
            ("--preset figure_2 --step-size -1 -2", "--preset figure_2 --grid step_size=-1,-2"),
        ],
    )
    def test_several_words_after_a_number_or_a_choice_are_an_axis(self, words, grid):
        one, other = ask(f"--shape circle {words}"), ask(f"--shape circle {grid}")
        assert (list(one.rows.items()), one.grid, one.changes) == (list(other.rows.items()), other.grid, other.changes)

    def test_several_words_after_a_choice_take_the_place_of_the_base_s_axis(self):
        assert [*ask("--shape square star --side 1 2").rows] == [*ask("--grid shape=square,star --grid side=1,2").rows]
        assert [*ask(["--shape", "circle", "--set", "rounds=1 2"]).rows] == [*ask("--shape circle --rounds 1 2").rows]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("--rounds 1 2 --grid rounds=3,4", "rounds: must be varied once; it is on two axes. Remove one of them."),
            ("--rounds 1 2 --rounds 3 4", "rounds: must be varied once; it is on two axes. Remove one of them."),
            ("--rounds 1 2 --rounds 3", "rounds: must be given once; got 3 beside several values. Remove one of them."),
            ("--seed 1 2 --seeds 3", "seed: must be varied once; it is on two axes. Remove one of them."),
            ("--rounds 1 2 --sample rounds=1:9", "rounds: must be varied once; it is on two axes. Remove one of them."),
            ("--rounds 1 1", "rounds: must be distinct and at least one; got 1 1. List each once."),
            ("--rounds 1 x", "rounds: must be an integer; got 'x'. Pass another, or leave it out for the default."),
            ("--widths 8 4 --widths 2", "widths: must be given once; got '2' as well. Remove one of them."),
            ("--step-size 1e-46", "step_size: must lie between 1.2e-38 and 3.4e+38 in size; got 1e-46."),
            ("--title a b", "title: must be a text; got 'a b'. Pass another, or leave it out for the default."),
            ("--checkpoint-every 1 2", "checkpoint_every: must be an integer; got '1 2'."),
            ("--fast true false", "fast: takes no value; got 'true false'. Write --fast alone, or leave it out."),
        ],
    )
    def test_one_sentence_where_several_words_are_no_axis(self, words, message):
        with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
            ask(f"--shape circle {words}")

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("a.csv", "rounds,step-size,widths,fast\n1,theory,8 4,true\n2,0.5,16,false\n"),
            (
                "a.jsonl",
                '{"rounds": 1, "step_size": "theory", "widths": [8, 4], "fast": true}\n\n'
                '{"rounds": 2, "step_size": 0.5, "widths": [16], "fast": false}\n',
            ),
            (
                "c.jsonl",
                '{"rounds": 1, "step_size": "theory", "widths": [8, 4], "fast": true, "clip_norm": null}\n'
                '{"rounds": 2, "step_size": 0.5, "widths": [16], "fast": false, "clip_norm": 1}\n',
            ),
        ],
    )
    def test_a_row_of_a_file_is_a_point(self, name, text, tmp_path):
        (tmp_path / name).write_text(text)
        lines = ask(["--shape", "circle", "--grid-file", str(tmp_path / name)])
        expected = [(1, "theory", (8, 4), True), (2, 0.5, (16,), False)]
        assert values_of(lines, "rounds", "step_size", "widths", "fast") == expected

    def test_a_mark_of_byte_order_is_no_letter_of_a_name(self, tmp_path):
        for name, text in (("a.csv", "rounds\n1\n2\n"), ("a.jsonl", '{"rounds": 1}\n{"rounds": 2}\n')):
            (tmp_path / name).write_text(text, "utf-8-sig")
            lines = ask(["--shape", "circle", "--grid-file", str(tmp_path / name)])
            assert values_of(lines, "rounds") == [(1,), (2,)]

    @pytest.mark.parametrize(
        ("name", "text", "says"),
        [
            ("a.csv", "rounds,rounds\n1,2\n", "must name each option once; got rounds rounds"),
            ("a.csv", "step_size,step-size\n1,2\n", "must name each option once; got step_size step-size"),
            ("a.csv", "rounds, rounds\n1,2\n", "must name each option once"),
            ("a.jsonl", '{"rounds": 1, "rounds": 2}', "must name each option once; got rounds rounds"),
            ("a.jsonl", '{"step_size": 1, "step-size": 2}', "must name each option once"),
            ("a.csv", f"rounds,title\n1,{'x' * 140_000}\n", "must be a .csv or .jsonl file"),
            ("a.jsonl", f'{{"rounds": {"[" * 100_000}{"]" * 100_000}}}', "must be a .csv or .jsonl file"),
            ("a.csv", "rounds,title\n1\n", "rows of different options"),
            ("a.csv", "rounds\n1,2\n", "rows of different options"),
            ("a.jsonl", '{"rounds": 1}\n{"title": "x"}', "rows of different options"),
            ("a.jsonl", "[1]", "rows of different options"),
            ("a.csv", "", "has 0 rows"),
            ("a.csv", "rounds\n" + "1\n" * 10_001, "must ask for at most 10,000 configurations; got 10,001"),
        ],
    )
    def test_one_sentence_where_a_file_is_no_grid(self, name, text, says, tmp_path):
        (tmp_path / name).write_text(text)
        with pytest.raises(ArgumentError, match=f"^--grid-file: .*{re.escape(says)}"):
            ask(["--shape", "circle", "--grid-file", str(tmp_path / name)])

    @pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
    @pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
    def test_what_is_no_regular_file_is_not_waited_for(self, name, make, tmp_path):
        make(tmp_path / name)
        with pytest.raises(ArgumentError, match=r"^--grid-file: .* must be a file; it is a "):
            ask(["--shape", "circle", "--grid-file", str(tmp_path / name)])
        with pytest.raises(ArgumentError, match=r"^--grid-file: .*No such file"):
            ask(["--shape", "circle", "--grid-file", str(tmp_path / "none.csv")])

    def test_a_million_values_are_refused_before_one_is_read(self, monkeypatch):
        monkeypatch.setattr("jaxfl.frame.grid.value_of", lambda *_: pytest.fail("a value was read"))
        many = ",".join(["1"] * 10**6)
        with pytest.raises(ArgumentError, match=r"^--grid: must ask for at most 10,000 configurations; got 1,000,000"):
            parse_axis([f"rounds={many}"], KNOWN)

    def test_a_range_is_given_once(self):
        with pytest.raises(ArgumentError, match="--sample: must name each option once; got 'rounds' twice"):
            sample_axis(["rounds=1:3", "rounds=5:9"], 4, 0, KNOWN)

    def test_ranges_are_kept_reproducible_and_extended(self):
        ranges = ["step_size=log:0.01:1", "rounds=3:5", "radius=-1:1"]
        drawn = sample_axis(ranges, 200, 0, KNOWN)
        assert set(drawn["rounds"]) == {3, 4, 5}
        assert 0.01 <= min(drawn["step_size"]) < 0.02 < 0.5 < max(drawn["step_size"]) <= 1
        assert 80 < sum(value < 0.1 for value in drawn["step_size"]) < 120, "half of them below the geometric mean"
        assert -1 <= min(drawn["radius"]) < -0.9 < 0.9 < max(drawn["radius"]) <= 1
        shares = np.log(drawn["step_size"]), drawn["radius"], drawn["rounds"]
        assert np.abs(np.corrcoef(shares) - np.eye(3)).max() < 5 / 200**0.5, "options are drawn independently"
        assert sample_axis(ranges, 200, 0, KNOWN) == drawn != sample_axis(ranges, 200, 1, KNOWN)
        first = sample_axis(ranges, 50, 0, KNOWN)
        assert first == {name: values[:50] for name, values in drawn.items()}
        assert len({*ask(["--shape", "circle", "--sample", *ranges, "--num-samples", "7"]).rows}) == 7
        assert len(ask(["--shape", "circle", "--sample", *ranges]).rows) == 10

    def test_seeds_are_lanes_of_a_line(self):
        for arguments in ("--seeds 2 0", "--grid seed=2,0"):
            lines = ask(f"{arguments} --grid rounds=1,2 --shape circle").rows
            assert [(line.seeds, line.config.run.seed) for line in lines.values()] == [((2, 0), 2)] * 2

    def test_from_python_as_from_the_command_line(self):
        grid = ({"step_size": (0.1, 0.2)}, {"rounds": (1, 2), "seed": (3, 4)})
        query = request(EXPERIMENT, {"shape": "circle"}, grid)
        assert query.rows == ask("--shape circle --grid step_size=0.1,0.2 --grid rounds=1,2 seed=3,4").rows
        assert list(configs(grid))[1] == {"step_size": 0.1, "rounds": 2, "seed": 4}
