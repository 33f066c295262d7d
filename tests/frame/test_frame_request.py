"""Lines made from layers of options: precedence, derived values, rivals, merging, names, shared programs."""

from typing import cast

import pytest
from toy_experiment import EXPERIMENT, Configuration, ask

from jaxfl.core import ArgumentError
from jaxfl.frame import Row, flat, override, programs
from jaxfl.frame.experiment import request


class TestLayers:
    @pytest.mark.parametrize(
        ("arguments", "names", "expected"),
        [
            # the base, its grid, and what the data set lays
            ("", ("shape", "side", "rounds"), [("circle", 2.0, 10), ("square", 2.0, 10)]),
            # a data set that is not listed has the changes and the axes of "other"
            ("--dataset x --shape square", ("side", "fast"), [(3.0, False), (3.0, True)]),
            # an explicit option goes before the preset, the preset before the data set, the grid before all
            ("--preset figure_1 --shape square", ("rounds", "widths", "side"), [(7, (1, 2), 2.0)]),
            ("--rounds 9 --preset figure_1 --shape circle", ("rounds", "widths"), [(9, (1, 2))]),
            ("--preset figure_2 --shape circle --fast", ("rounds", "step_size"), [(20, 0.1), (20, 0.2)]),
            ("--preset figure_2 --shape circle --no-fast --step-size 3", ("dataset", "step_size"), [("mnist", 3.0)]),
            ("--preset figure_1 --shape circle --grid rounds=3", ("rounds",), [(3,)]),
            # a data set may be varied, and each brings its changes
            ("--shape square --no-fast --grid dataset=digits,x", ("side", "rounds"), [(2.0, 10), (3.0, 20)]),
            # what nobody gave may follow from other options
            ("--shape circle --grid rounds=50,100", ("evaluate_every",), [(10,), (20,)]),
            ("--shape circle --rounds 50 --evaluate-every 7", ("evaluate_every",), [(7,)]),
            # of two rival groups the later layer's one stays
            ("--preset figure_3", ("radius", "side"), [(4.0, None)]),
            ("--preset figure_3 --side 5 --shape square", ("radius", "side"), [(1.0, 5.0)]),
        ],
    )
    def test_a_later_layer_goes_before_an_earlier_one(self, arguments, names, expected):
        flats = [flat(line.config) for line in ask(arguments).rows.values()]
        assert [tuple(values[name] for name in names) for values in flats] == expected

    def test_an_unknown_name_from_python_is_refused(self):
        with pytest.raises(ArgumentError, match="color: must be an option of this experiment"):
            request(EXPERIMENT, {"color": "red"})


class TestLines:
    def test_points_that_differ_in_idle_options_are_one_line(self):
        query = ask("--grid shape=circle,square --grid side=1,2 --grid seed=0,1")
        assert {name: line.seeds for name, line in query.rows.items()} == {
            "circle": (0, 1), "square, side 1": (0, 1), "square, side 2": (0, 1)
        }  # fmt: skip
        assert [line.settings for line in query.rows.values()] == [
            {"shape": "circle"}, {"shape": "square", "side": 1.0}, {"shape": "square", "side": 2.0}
        ]  # fmt: skip

    def test_names_hold_what_varies_in_the_form_of_the_labels(self):
        names = list(ask(["--shape", "square", "--grid", "widths=8 4,16,", "step_size=theory,0.25,1"]).rows)
        assert names == [
            "square, step theory, widths 8 4",
            "square, step 0.25, widths 16",
            "square, step 1, widths none",
        ]
        own = EXPERIMENT._replace(name_of=lambda values, varied: f"{values['rounds']} of {' '.join(varied)}")
        assert list(request(own, {"shape": "circle"}, ({"rounds": (1, 2)},)).rows) == ["1 of rounds", "2 of rounds"]

    def test_what_varies_is_a_setting_and_nothing_else(self):
        (line,) = ask("--shape circle --grid rounds=5").rows.values()
        assert line.settings == {}

    def test_a_setting_that_decides_no_result_makes_no_line(self):
        assert list(ask("--shape circle --grid quiet=true,false").rows) == ["circle"]


class TestPrograms:
    def groups(self, arguments):
        """The lines of each program, and the numbers of each line."""
        built = programs(ask(arguments).rows, lambda config: config)  # the "algorithm" shows what it was built from
        together: dict = {}
        for name, (build, numbers) in built.items():
            together.setdefault(id(build), {})[name] = (numbers, build(cast("dict", numbers)))
        return list(together.values())

    def test_lines_that_differ_in_traced_numbers_share_one(self):
        (group,) = self.groups("--shape circle --grid step_size=0.1,0.2 --grid clip_norm=1,2")
        assert [numbers for numbers, _ in group.values()] == [
            {"step_size": step, "clip_norm": clip} for step in (0.1, 0.2) for clip in (1.0, 2.0)
        ]
        for numbers, config in group.values():
            assert (config.learning.step_size, config.learning.clip_norm) == tuple(numbers.values())

    def test_a_number_that_all_share_is_a_constant(self):
        (group,) = self.groups("--shape circle --clip-norm 3 --grid step_size=0.1,0.2")
        assert [list(numbers) for numbers, _ in group.values()] == [["step_size"]] * 2

    def test_what_switches_a_part_off_has_a_program_of_its_own(self):
        groups = self.groups("--shape circle --grid clip_norm=None,0,inf,1,2 --grid step_size=0.5")
        assert [len(group) for group in groups] == [1, 1, 1, 2]

    @pytest.mark.parametrize(
        ("axis", "programs_"), [("widths=8,4", 2), ("rounds=1,2", 2), ("budget=1,2", 1), ("shape=circle,square", 2)]
    )
    def test_what_is_compiled_splits_and_what_is_stated_does_not(self, axis, programs_):
        shape = "" if "shape" in axis else "--shape circle "
        assert len(self.groups(f"{shape}--grid {axis}")) == programs_

    def test_a_number_that_counts_at_no_line_is_none(self):
        idle = {name: Row(override(Configuration(), {"shape": "square", "side": 1.0}), (0,), {}) for name in ("a", "b")}
        assert [numbers for _, numbers in programs(idle, lambda config: config).values()] == [{}, {}]
