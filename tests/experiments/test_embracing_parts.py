"""Parts of experiments.embracing_fl: cases, costs, presets, tables and pictures of runs."""

import json

import numpy as np
import pytest

from experiments.embracing_fl import EXPERIMENT, costs, paper, pictures, results, tables
from experiments.embracing_fl.methods import CLASSES
from experiments.embracing_fl.networks import Problem
from jaxfl.core import ArgumentError
from jaxfl.frame import flat, main
from jaxfl.frame.command_line import parse


def configs(arguments):
    """Name -> configuration."""
    return {name: line.config for name, line in parse(EXPERIMENT, arguments.split())[0].rows.items()}


def made_result(method, case, accuracies, *, batch_norm="global", counts=None, active=8, target=None):
    """A result with these accuracies, one a seed, after 10 rounds."""
    lines = [
        {"seed": seed, "round": k, "test_accuracy": value * k / 10}
        for seed, value in enumerate(accuracies)
        for k in (0, 5, 10)
    ]
    clients = tuple(count // 4 for count in paper.CASES[case]) if counts is None else counts
    options = {"method": method, "case": case, **dict(zip(CLASSES, clients, strict=True)), "num_active": active}
    options |= {"batch_norm": batch_norm, "target_accuracy": target, "dataset": "cifar10", "nodes": 32, "rounds": 10}
    return results.result_of(method, options, lines, {"capacity": {"average": 0.5}})


class TestWork:
    """Work of an mlp 64-48-32-10: 3072, 1536 and 320 products, and a number for each bias and relu."""

    FRONT, MIDDLE, LAST = 64 * 48 + 2 * 48, 48 * 32 + 2 * 32, 32 * 10 + 10
    CLIENTS = "--model mlp --hidden 48 32 --strong 1 --moderate 2 --weak 1 --nodes 16 --method "

    def of_clients(self, method):
        """Operations of each client's gradients, of what is differentiated, and of forward evaluations."""
        (config,) = configs(self.CLIENTS + method).values()
        return [tuple(counts.macs + counts.other_operations for counts in one) for one in config.work()]

    def test_embracing(self):
        whole = self.FRONT + self.MIDDLE + self.LAST
        moderate = (self.MIDDLE + self.LAST, self.MIDDLE + self.LAST, self.FRONT)
        weak = (self.LAST, self.LAST, self.FRONT + self.MIDDLE)
        assert self.of_clients("embracing") == [(whole,) * 3, moderate, moderate, weak]

    def test_the_input_side_and_drawn_blocks_differentiate_all_that_follows(self):
        whole = (self.FRONT + self.MIDDLE + self.LAST,) * 3
        assert self.of_clients("first_half") == self.of_clients("random_blocks") == [whole] * 4

    def test_narrow_clients_and_the_mean_of_the_widths_that_they_draw(self):
        narrow = [64 * a + 2 * a + a * b + 2 * b + b * 10 + 10 for a, b in ((48, 32), (24, 16), (12, 8))]
        widths = "--width-moderate 0.5 --width-weak 0.25"
        strong, moderate, _, weak = self.of_clients(f"width_reduction --without-scaler {widths}")
        assert [one[0] for one in (strong, moderate, weak)] == narrow
        strong, moderate, _, weak = self.of_clients(f"ordered_dropout {widths}")
        expected = [sum(narrow) / 3, sum(narrow[1:]) / 2, narrow[2]]
        np.testing.assert_allclose([one[0] for one in (strong, moderate, weak)], expected, atol=1)

    def test_words_read_without_gradient_run_forward_alone(self):
        """The half of the words in front is not differentiated."""
        arguments = (
            "--model bilstm --embedding-features 8 --units 6 --strong 1 --moderate 0 --weak 1 --frozen-words 128"
        )
        config = next(iter(configs(f"{arguments} --method embracing").values()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(config), "problem", lambda self: Problem((256,), 2))
            strong, weak = config.work()
        assert weak.gradient.macs == strong.gradient.macs
        assert weak.forward.macs == 0, "an embedding is a table"
        np.testing.assert_allclose(weak.backward.macs, strong.backward.macs / 2, rtol=0.01)


class TestTables:
    def test_methods_side_by_side_with_the_gap_of_each_seed(self):
        text = tables.markdown(
            [
                made_result("embracing", 7, [0.5, 0.7]),
                made_result("width_reduction", 7, [0.4, 0.5], batch_norm="static"),
            ]
        )
        row = next(line for line in text.splitlines() if line.startswith("| case 7 "))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1:6] == ["4", "0", "28", "8", "0.50 (0.27)"]
        assert cells[6:] == [
            "60.0 ± 14.1 (60.0)",
            "77.0 ± 1.6",
            "45.0 ± 7.1 (45.0)",
            "54.5 ± 2.9",
            "+15.0 ± 7.1",
            "+22.5",
        ]

    def test_batch_normalization_has_the_difference_beside_the_papers(self):
        both = [
            made_result("embracing", 7, accuracies, batch_norm=mode)
            for mode, accuracies in (("static", [0.3, 0.5]), ("global", [0.6, 0.7]))
        ]
        numbers = "40.0 ± 14.1 (40.0) | 74.5 ± 1.1 | 65.0 ± 7.1 (65.0) | 77.3 ± 1.6 | -25.0 ± 7.1 | -2.9"
        assert f"| case 7 | 8 | EmbracingFL | {numbers} |" in tables.markdown(both)

    def test_added_clients(self):
        added = [
            made_result(method, None, [value], counts=(4, 0, weak), active=4 + weak, batch_norm=mode)
            for weak in (0, 16, 28)
            for method, value, mode in (("embracing", 0.3, "global"), ("width_reduction", 0.2, "static"))
        ]
        text = tables.markdown(added)
        numbers = "20.0 (20.0) | 63.7 ± 3.3 | 30.0 (30.0) | 74.8 ± 0.8 | +10.0 | +11.1"
        assert f"| 4 | 16 | 20 | {numbers} |" in text
        assert "| 4 | 28 | 32 |" in text  # all that hold data, and yet no case
        assert "Cases" not in text
        assert tables.paper_added(added[2]) == paper.ADDED_WEAK[64]
        assert tables.paper_added(added[2]._replace(nodes=16)) is None
        assert tables.paper_added(added[2]._replace(dataset="digits")) is None

    def test_other_numbers_of_active_clients_are_other_comparisons(self):
        """Table 2's last row has case 7's clients, and all of them are active."""
        added = [made_result("embracing", None, [0.3], counts=(4, 0, weak), active=4 + weak) for weak in (0, 28)]
        case = made_result("embracing", 7, [0.5])
        for listed in ([*added, case], [case, *added]):
            text = tables.markdown(listed)
            assert "| case 7 | 4 | 0 | 28 | 8 | 0.50 (0.27) | 50.0 (50.0) | 77.0 ± 1.6 |" in text
            assert "| 4 | 28 | 32 |  | 65.0 ± 2.9 | 30.0 (30.0) | 77.3 ± 1.6 |" in text
        everyone = made_result("embracing", 7, [0.6], active=32)
        text = tables.markdown([everyone, case])
        assert "| 8 | 0.50 (0.27) | 50.0 (50.0) |" in text
        assert "| 32 | 0.50 (0.27) | 60.0 (60.0) |" in text

    def test_rounds_to_a_target(self):
        text = tables.markdown([made_result("embracing", 7, [0.5, 0.9], target=0.45)])
        assert "| case 7 | 45 % | 10, 5 | 54 %: 939 and 572 |" in text

    def test_gaps_and_added_clients_are_drawn(self, tmp_path):
        pairs = [
            made_result(method, case, [0.5, 0.6 + 0.01 * case], batch_norm=mode)
            for case in (1, 2, 7)
            for method, mode in (("embracing", "global"), ("width_reduction", "static"))
        ]
        drawn = pictures.plot_gaps(pairs, tmp_path / "gaps.png")
        assert drawn is not None
        assert drawn.stat().st_size > 5000
        assert pictures.plot_gaps(pairs[::2], tmp_path / "none.png") is None
        apart = [made_result("embracing", 7, [0.5], active=32), made_result("width_reduction", 7, [0.5])]
        assert pictures.plot_gaps(apart, tmp_path / "none.png") is None
        assert pictures.plot_added(pairs, tmp_path / "none.png") is None
        added = [made_result("embracing", None, [0.3], counts=(4, 0, weak)) for weak in (0, 16)]
        drawn = pictures.plot_added(added, tmp_path / "added.png")
        assert drawn is not None
        assert drawn.stat().st_size > 5000


class TestCases:
    @pytest.mark.parametrize("case", paper.CASES)
    def test_clients_of_table_3(self, case):
        (config,) = configs(f"--dataset cifar10 --method embracing --case {case}").values()
        assert config.counts == paper.CASES[case]
        assert sum(config.counts) == 128
        (reduced,) = configs(f"--method embracing --case {case} --nodes 32").values()
        assert tuple(4 * count for count in reduced.counts) == paper.CASES[case]

    @pytest.mark.parametrize(("dataset", "published"), paper.CAPACITY.items())
    def test_average_capacities_are_the_papers(self, dataset, published):
        model = {"cifar10": "resnet20", "femnist": "femnist_cnn", "imdb": "bilstm"}[dataset]
        of_class = costs.class_costs(*costs.paper_setting(model, method="embracing"))
        for case, counts in paper.CASES.items():
            average = costs.average_capacity(
                [row._replace(clients=count) for row, count in zip(of_class, counts, strict=True)]
            )
            assert abs(average - published[case]) <= 0.005 + 1e-9, (case, average)

    def test_a_weak_client_of_imdb_runs_back_through_half_of_the_words(self):
        moderate, weak = costs.class_costs(*costs.paper_setting("bilstm", method="embracing"))[1:]
        assert (moderate.params, weak.params) == (1_051_137, 1_051_137)
        assert weak.seconds.forward == moderate.seconds.forward
        assert 0.45 < weak.seconds.backward / moderate.seconds.backward < 0.55

    def test_counts_in_place_of_cases(self):
        compared = configs("--nodes 32 --strong 4 --grid weak=0,28")
        assert {name: config.counts for name, config in compared.items()} == {
            "4 strong embracing": (4, 0, 0),
            "4 strong width_reduction": (4, 0, 0),
            "4 strong fed_avg": (4, 0, 0),
            "4 strong 28 weak embracing": (4, 0, 28),
            "4 strong 28 weak width_reduction": (4, 0, 28),
        }

    def test_stratified_counts_add_up(self):
        (config,) = configs("--method embracing --sampling stratified --num-active 5").values()
        assert config.num_active == (1, 1, 3)  # of 0.625, 1.25 and 3.125

    def test_options_win_over_those_of_a_preset_that_they_replace(self):
        (config, _) = configs("--preset table2_small --case 7 --num-active 3").values()
        chosen = config.participation
        assert (chosen.case, config.counts, chosen.participation_rate) == (7, (4, 0, 28), None)

    def test_targets_of_a_preset_tell_lines_of_one_case_apart(self):
        names = list(configs("--preset table7 --case 3 --method embracing"))
        assert names[0] == "case 3 embracing, target accuracy 0.8"
        assert len(names) == 7


class TestCosts:
    @pytest.mark.parametrize("name", paper.SIZES)
    def test_sizes_of_tables_1_and_10(self, name):
        model, _, narrow = name.partition(", ")
        setting = costs.paper_setting(model, method="width_reduction" if narrow else "embracing")
        for here, there in zip(costs.class_costs(*setting), paper.SIZES[name], strict=True):
            assert (here.params, here.activations) == there[:2]
            assert abs(here.capacity - there[2]) <= 0.005

    def test_a_client_that_trains_the_input_side_keeps_what_is_behind_it(self):
        compared = configs("--grid method=first_half,random_blocks --hidden 6 5").values()
        half, drawn = (costs.class_costs(config, Problem((8, 8, 1), 10)) for config in compared)
        whole = 485 + 21
        assert [entry.capacity for entry in half] == pytest.approx([1.0, (390 + 35 + 21) / whole, (390 + 21) / whole])
        assert [entry.params for entry in drawn] == [485, round(485 * 2 / 3), round(485 / 3)]

    def test_tables_of_sizes_and_timing_train_nothing(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "160")
        assert main(EXPERIMENT, ["--preset", "sizes"]) == 0
        printed = capsys.readouterr().out
        assert "272,762 | 272,762" in printed
        assert "655,360 | 655,360" in printed
        assert main(EXPERIMENT, ["--preset", "table8"]) == 0
        assert "419,643.8 | 419,643.8" in capsys.readouterr().out
        assert list(tmp_path.iterdir()) == []


def test_a_few_rounds_of_a_preset_have_the_decays_that_fit():
    (config,) = configs("--preset table3 --case 1 --rounds 6").values()
    assert config.steps.decay_rounds == (5,)
    (config,) = configs("--preset table3 --case 1 --rounds 1").values()
    assert config.steps.decay_rounds == ()
    names = [*configs("--preset table3 --case 1 --grid decay_rounds=,500")]
    assert names == ["case 1 embracing, decay rounds none", "case 1 embracing, decay rounds 500"]


def made_run(folder, dataset, name="embracing_fl", evaluated=True, **changes):
    """The files of a run that has just begun."""
    options = flat(next(iter(configs("--method embracing --case 7 --rounds 5").values())))
    lines = {"case 7 embracing": {**changes, "seeds": [0]}}
    folder.mkdir()
    content = {**options, "dataset": dataset, "cases": lines}
    (folder / "config.json").write_text(
        json.dumps(
            {
                "experiment": name,
                "preset": None,
                "config": content,
                "environment": {},
                "training": {"passes": [[["case 7 embracing", 0]]]},
            }
        )
    )
    if evaluated:
        line = {"case": "case 7 embracing", "seed": 0, "round": 0, "test_accuracy": 0.1}
        (folder / "passes" / "0").mkdir(parents=True)
        (folder / "passes" / "0" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return str(folder)


def test_runs_that_do_not_belong_together_are_not_collected(tmp_path):
    digits, mnist = (made_run(tmp_path / name, name) for name in ("digits", "mnist"))
    with pytest.raises(ArgumentError, match=r"must be runs of one data set; got digits, mnist"):
        results.read_results([digits, mnist])
    other = made_run(tmp_path / "other", "digits", "privsgp_vr")
    with pytest.raises(ArgumentError, match=r"must be runs of embracing_fl; .*other is one of privsgp_vr"):
        results.read_results([digits, other])
    begun = made_run(tmp_path / "begun", "digits", evaluated=False)
    with pytest.raises(ArgumentError, match=r"must hold evaluated runs; got none"):
        results.read_results([begun])


def test_a_run_of_which_others_are_active_replaces_none(tmp_path):
    runs = [
        made_run(tmp_path / name, "digits", num_active=active)
        for name, active in (("few", 4), ("again", 4), ("all", 16))
    ]
    assert [result.num_active for result in results.read_results(runs)] == [4, 16]


def test_a_run_that_has_not_ended_says_so(tmp_path):
    text = tables.markdown(results.read_results([made_run(tmp_path / "run", "digits")]))
    assert "Not ended: case 7 embracing: at round 0 of 5." in text
