"""Parts of experiments.embracing_fl: cases, costs, presets."""

import numpy as np
import pytest

from experiments.embracing_fl import EXPERIMENT, costs, paper
from experiments.embracing_fl.networks import Problem
from jaxfl.frame import main
from jaxfl.frame.command_line import parse


def configs(arguments):
    """Name -> configuration."""
    return {name: line.config for name, line in parse(EXPERIMENT, arguments.split())[0].rows.items()}


# Tables 3 to 5 of the paper: data set -> average capacity of the clients in the ten cases.
CAPACITY = {
    "cifar10": (1.00, 0.71, 0.57, 0.49, 0.58, 0.37, 0.27, 0.44, 0.33, 0.30),
    "femnist": (1.00, 0.99, 0.99, 0.99, 0.51, 0.27, 0.14, 0.51, 0.39, 0.26),
    "imdb": (1.00, 0.74, 0.61, 0.55, 0.68, 0.51, 0.43, 0.55, 0.46, 0.45),
}


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


class TestCases:
    @pytest.mark.parametrize("case", paper.CASES)
    def test_clients_of_table_3(self, case):
        (config,) = configs(f"--dataset cifar10 --method embracing --case {case}").values()
        assert config.counts == paper.CASES[case]
        assert sum(config.counts) == 128
        (reduced,) = configs(f"--method embracing --case {case} --nodes 32").values()
        assert tuple(4 * count for count in reduced.counts) == paper.CASES[case]

    @pytest.mark.parametrize(("dataset", "published"), CAPACITY.items())
    def test_average_capacities_are_the_papers(self, dataset, published):
        model = {"cifar10": "resnet20", "femnist": "femnist_cnn", "imdb": "bilstm"}[dataset]
        of_class = costs.class_costs(*costs.paper_setting(model, method="embracing"))
        for case, counts in paper.CASES.items():
            average = costs.average_capacity(
                [row._replace(clients=count) for row, count in zip(of_class, counts, strict=True)]
            )
            assert abs(average - published[case - 1]) <= 0.005 + 1e-9, (case, average)

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
