"""privsgp_vr: budgets, noise, statements, graphs from files; test_every_experiment.py has what all promise."""

import json
import shlex

import jax
import numpy as np
import pytest
from helpers import leave_untrained, rows_of

from experiments.privsgp_vr import EXPERIMENT
from experiments.privsgp_vr.options import METHODS
from experiments.privsgp_vr.prepare import prepare
from experiments.privsgp_vr.spending import privacy_of, releases_of, rounds_allowed, settled
from jaxfl import graphs, privacy
from jaxfl.frame import main
from jaxfl.frame.command_line import parse
from jaxfl.privacy import gossip
from jaxfl.privacy.gossip import CIFAR10_CONSTANTS


def lines_of(arguments):
    """The lines that a command line asks for."""
    return parse(EXPERIMENT, shlex.split(arguments))[0].rows


def settle(arguments, sizes):
    """Name -> configuration with numbers, for nodes of these sizes."""
    lines = lines_of(arguments)
    of_all = {name: sizes * (line.config.clients.nodes if len(sizes) == 1 else 1) for name, line in lines.items()}
    ready = settled(lines, of_all, lambda config: CIFAR10_CONSTANTS)
    return {name: line.config for name, line in ready.items()}


def epsilon_of(config, size, rounds):
    """The proven epsilon of a node with this many samples."""
    release = min(releases_of(config, [size] * config.clients.nodes).each, key=lambda release: release.noise_std)
    accountant = METHODS[config.learning.method].accountant
    return gossip.account(accountant, release, dp_delta=1e-5, num_nodes=config.clients.nodes).epsilon(rounds)


def proven(statements):
    """The first proven statement."""
    return next(statement for statement in statements if statement["bound"] == "proven")


ALL_METHODS = "--graph ring --grid method=PrivSGP-VR,PrivSGP,DP2-SGD,A(DP)2SGD"
TWO = "--grid method=PrivSGP-VR,PrivSGP"


class TestSpending:
    def test_noise_on_a_grid_is_calibrated_for_its_rounding(self):
        """Noise, stop and statements count the rounding, and the released steps are those of the option."""
        axis = "--grid noise=gaussian,grid_gaussian,grid_gaussian grid_bits=12,12,14"
        query = f"--nodes 4 --method PrivSGP-VR {axis} --iterations 50"
        configs = settle(f"{query} --target-epsilon 2", [359] * 4).values()
        assert [releases_of(config, [359] * 4).each[0].grid for config in configs] == [
            None,
            privacy.Grid(12, 2410),
            privacy.Grid(14, 2410),
        ]
        for config in configs:
            assert 1.98 < epsilon_of(config, 359, 50) <= 2.0
        plain, coarse, fine = (config.budget.noise_std for config in configs)
        assert plain < fine < coarse
        fixed = lines_of(f"{query} --target-epsilon 2 --noise-std {plain}")
        rounds = [rounds_allowed(name, line.config, line.config, [359] * 4) or 0 for name, line in fixed.items()]
        assert rounds[0] == 50 > rounds[2] > rounds[1] > 0
        stated = [proven(privacy_of(line.config, [359] * 4)(50))["dp_epsilon"] for line in fixed.values()]
        assert stated[0] < stated[2] < stated[1]

    def test_automatic_iterations_follow_equation_12(self):
        automatic = "--iterations auto --method PrivSGP-VR --bound published --step-size theory"
        configs = settle(f"{automatic} --grid target_epsilon=3,1.5", [3125]).values()
        assert [config.learning.iterations for config in configs] == [3120, 780]
        assert [config.learning.step_size for config in configs] == [(16 / 3120) ** 0.5, (16 / 780) ** 0.5]
        assert [config.run.evaluate_every for config in configs] == [78, 19]

    def test_the_step_goes_by_the_noise_of_the_budget(self):
        """Noise of the noisiest node at all nodes would carry the mean model as far, at every budget; but no step is
        above the quiet."""
        query = "--nodes 4 --method PrivSGP --batch-size 8 --iterations 50 --step-size auto"
        configs = [*settle(f"{query} --grid target_epsilon=0.5,2", [359]).values()]
        configs += settle(f"{query} --node-epsilons 0.5 0.5 2 2", [359] * 4).values()
        for config in configs:
            of_mean = config.budget.noise_std / 2  # of each coordinate of the mean of 4 nodes
            assert config.budget.noise_std == max(config.budget.node_noise or (config.budget.noise_std,))
            assert config.learning.step_size * of_mean * (50 * 2410) ** 0.5 == pytest.approx(11.0)
        quiet = 0.5 * 8**0.6
        (config,) = settle(f"{query} --target-epsilon 1e4", [359]).values()
        assert config.learning.step_size == pytest.approx(quiet, abs=1e-3)
        steps = {
            "--dataset mnist": 0.5 * 12**0.6,
            "--dataset mnist --noise-std 0.1 --target-epsilon 2": 0.5 * 12**0.6,
            "--dataset mnist --method A(DP)2SGD --graph ring --target-epsilon 2": 0.5 * 12**0.6,
            "--dataset mnist --target-epsilon 2": "auto",
            "--target-epsilon 2": "auto",
            "--method A(DP)2SGD --graph ring --target-epsilon 2": 0.2,
            "--iterations 2": 0.2,
        }
        for words, step in steps.items():
            actual = next(iter(lines_of(f"--batch-size 12 {words}").values())).config.learning.step_size
            assert actual == (step if isinstance(step, str) else pytest.approx(step, abs=1e-3))

    def test_a_table_of_batches_is_accounted_by_its_entries(self):
        """Each sample adds its share of the entry: clip norm times entries over samples."""
        configs = settle(f"--nodes 4 --table per_batch --entry-size 10 --batch-size 2 --noise-std 0.1 {TWO}", [355])
        (vr, *_), (plain, *_) = (releases_of(config, [355] * 4).each for config in configs.values())
        assert (vr.estimator, vr.batch_size, vr.num_entries, vr.entry_size) == ("saga", 2, 36, 10)
        assert vr.clip_norm == pytest.approx(2.0 * 36 / 355)
        assert (plain.estimator, plain.batch_size, plain.num_entries, plain.clip_norm) == ("mini_batch", 20, 355, 2.0)

    @pytest.mark.parametrize(
        "options",
        [ALL_METHODS, "--table per_batch --entry-size 41 --graph ring --grid method=PrivSGP-VR,A(DP)2SGD"],
    )
    def test_no_node_of_any_seed_spends_more_than_its_budget(self, options):
        """Uneven nodes, three seeds, every method; with a table of batches the smallest node is not the worst one."""
        sizes = [287, 288, 328, 329, 400] * 3
        options = f"{options} --nodes 5 --batch-size 2 --iterations 20 --target-epsilon 2"
        for config in settle(options, sizes).values():
            main_statement = proven(privacy_of(config, sizes)(20))
            assert 1.9 < main_statement["dp_epsilon"] <= 2.0
            assert main_statement["nodes"] == 5
        for name, line in lines_of(f"{options} --noise-std 1.5").items():
            rounds = rounds_allowed(name, line.config, line.config, sizes)
            assert rounds is not None
            assert proven(privacy_of(line.config, sizes)(rounds))["dp_epsilon"] <= 2.0

    def test_an_assumed_bound_enters_the_published_epsilon_only(self):
        options = "--nodes 4 --clip-norm None --gradient-bound 10 --noise-std 0.5 --batch-size 4 --method PrivSGP-VR"
        ((_, config),) = settle(options, [359] * 4).items()
        published, *others = privacy_of(config, [359] * 4)(50)
        assert published["bound"] == "published"
        assert published["dp_epsilon"] > 0
        assert any("assumed, not enforced" in text for text in published["assumptions"])
        assert all(s["dp_epsilon"] is None and "not clipped" in s["reason"] for s in others)


class TestPrepare:
    def test_lines_that_differ_in_numbers_share_a_program_and_their_data(self):
        lines = lines_of(
            "--nodes 4 --hidden 4 --noise-std 0.1 --method PrivSGP --batch-size 2 --grid step_size=0.1,0.2"
        )
        first, second = prepare(lines).cases.values()
        for name in ("algorithm", "task", "test", "data"):
            assert getattr(first, name) is getattr(second, name)
        assert [dict(case.numbers) for case in (first, second)] == [{"step_size": 0.1}, {"step_size": 0.2}]

    @pytest.mark.parametrize(("trust", "programs"), [("everyone", 1), ("pairs", 2)])
    def test_budgets_of_sites_share_a_program_unless_pairs_share_noise(self, trust, programs):
        """Of shared noise the nodes' scales decide what it leaves to an observer, which is no traced number."""
        options = "--nodes 4 --partition quantity --alpha 1 --hidden 4 --method PrivSGP --batch-size 2 --iterations 3"
        cases = prepare(lines_of(f"{options} --target-epsilon 1 8 --trust {trust}")).cases.values()
        assert len({id(case.algorithm) for case in cases}) == programs
        for case in cases:
            assert len(case.noise_stds) == 4
            assert case.numbers.get("node_noise", case.noise_stds) == case.noise_stds

    def test_a_graph_file_is_recorded_by_its_content(self, tmp_path):
        saved = []
        options = f"--nodes 4 --hidden 4 --method PrivSGP --batch-size 2 --noise-std 0 --graph {tmp_path / 'graph.npy'}"
        for graph in (graphs.complete(4), graphs.directed_ring(4)):
            np.save(tmp_path / "graph.npy", graph.mixing_matrix(0))
            saved.append(prepare(lines_of(options)).saved["graph_crc32"])
        assert saved[0] != saved[1]


def test_a_budget_without_an_epsilon_ends_with_its_reason(tmp_path, capsys):
    def without_privacy(rows):
        prepared = prepare(rows)
        budget = {"privacy": None, "budgets": {"bits_sent": 1.0}, "chunk_rounds": 2}
        return prepared._replace(cases={name: case._replace(**budget) for name, case in prepared.cases.items()})

    options = "--nodes 2 --hidden 4 --iterations 4 --noise-std 0.1 --method PrivSGP --seeds 0 --quiet".split()
    assert main(EXPERIMENT._replace(prepare=without_privacy), [*options, "--out", str(tmp_path / "run")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "PrivSGP: the budget was spent after 1 rounds, and the run stopped there: bits_sent reached 19904" in printed


def test_a_run_accounted_by_another_theorem_is_not_resumed(tmp_path, monkeypatch, capsys):
    """Its noise, and what it has stated, come from another bound, as those of releases before this one do."""
    command = ["--nodes", "2", "--iterations", "2", "--seeds", "0", "--method", "PrivSGP-VR", "--out", str(tmp_path)]
    leave_untrained(monkeypatch)
    assert main(EXPERIMENT, command) == 130
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    (kept,) = content["config"]["settled"].values()
    theorem = kept.pop("table_theorem")
    path.write_text(json.dumps(content))
    assert main(EXPERIMENT, [*command, "--resume"]) == 2
    says = capsys.readouterr().err
    assert (
        f'table_theorem: must be as in the run that is resumed; {tmp_path} has no such key, this call has "{theorem}"'
        in says
    )
    assert says.rstrip().endswith("Start a new run with another out.")


def start_of(config):
    """(key, first state, data) of a settled point."""
    key, data = jax.random.key(0), config.clients.data(config.data)(0)
    return key, config.algorithm().init(key, data), data


class TestSitesOfUnequalSize:
    """Sizes are public: one budget gives each node the least noise of its own size."""

    SIZES = (48, 96, 360, 1966)

    @pytest.mark.parametrize(
        "options",
        ["", "--bound published --method PrivSGP-VR", "--noise grid_gaussian --grid-bits 12 --method PrivSGP-VR"],
    )
    def test_every_node_spends_the_budget(self, options):
        query = f"--nodes 4 --batch-size 20 --iterations 30 --target-epsilon 3 {options}"
        query += "" if "--method" in options else f" {ALL_METHODS}"
        for name, config in settle(query, list(self.SIZES)).items():
            actual = privacy_of(config, self.SIZES)(30)[0]
            assert actual["asked"]
            assert all(0.99 * 3 < epsilon <= 3 for epsilon in actual["node_epsilons"]), name
            noise = config.budget.node_noise
            assert "grid" in options or [*noise] == sorted(noise, reverse=True)
            assert noise[0] > 1.5 * noise[-1]
            config.algorithm()

    def test_a_node_meets_the_budget_in_every_seed(self):
        """Each node's noise is that of its worst seed: the smallest, where nodes lie in another order."""
        sizes = [60, 300, 120, 480, 360, 90, 120, 240]
        (config,) = settle(
            "--nodes 4 --batch-size 20 --method PrivSGP --iterations 30 --target-epsilon 3", sizes
        ).values()
        spent = np.reshape(privacy_of(config, sizes)(30)[0]["node_epsilons"], (2, 4))
        assert (spent <= 3).all()
        assert (spent.max(axis=0) > 0.99 * 3).all()
        assert spent[1, 0] < spent[0, 0]

    def test_an_even_deal_keeps_one_noise(self):
        """Sizes that differ by the one sample that is left over are no sizes of their own; two samples are."""
        options = "--nodes 4 --batch-size 20 --method PrivSGP --iterations 30 --target-epsilon 3"
        (one,) = settle(options, [90, 90, 89, 89]).values()
        assert one.budget.node_noise == ()
        assert 0.99 * 3 < epsilon_of(one, 89, 30) <= 3
        (own,) = settle(options, [90, 90, 89, 88]).values()
        assert len(own.budget.node_noise) == 4
        said = [privacy_of(config, [90, 90, 89, 88])(30)[1]["mechanism"] for config in (one, own)]
        assert ["others have noise of their own" in text for text in said] == [False, True]
        assert own.budget.noise_std == max(own.budget.node_noise) == own.budget.node_noise[3]
        (given,) = settle(f"{options} --noise-std 0.5", list(self.SIZES)).values()
        assert given.budget.node_noise == ()

    def test_a_run_that_began_with_one_noise_is_not_resumed(self, tmp_path, monkeypatch, capsys):
        """Its first rounds had other noise than what a run of today states."""
        words = "--nodes 4 --partition quantity --alpha 1 --iterations 2 --batch-size 4 --method PrivSGP --quiet"
        command = [
            *words.split(),
            *"--hidden 4 --target-epsilon 8 --step-size 0.1 --seeds 0 --out".split(),
            str(tmp_path),
        ]
        leave_untrained(monkeypatch)
        assert main(EXPERIMENT, command) == main(EXPERIMENT, [*command, "--resume"]) == 130
        path = tmp_path / "config.json"
        content = json.loads(path.read_text())
        del content["config"]["settled"]["PrivSGP"]["noise_by_size"]
        path.write_text(json.dumps(content))
        capsys.readouterr()
        assert main(EXPERIMENT, [*command, "--resume"]) == 2
        assert "noise_by_size: must be as in the run that is resumed" in capsys.readouterr().err


class TestPersonalizedBudgets:
    SIZES = (287, 359, 359, 360)
    BUDGETS = (1.0, 2.0, 4.0, 8.0)

    def stated(self, config, rounds):
        """The first proven statement."""
        return proven(privacy_of(config, self.SIZES)(rounds))

    def test_noise_meets_every_nodes_own_budget(self):
        options = f"--nodes 4 {TWO} --node-epsilons 1 2 4 8 --iterations 50"
        for config in settle(options, list(self.SIZES)).values():
            actual = self.stated(config, 50)
            assert actual["dp_epsilon"] == max(actual["node_epsilons"])
            for epsilon, budget in zip(actual["node_epsilons"], self.BUDGETS, strict=True):
                assert 0.99 * budget < epsilon <= budget

    @pytest.mark.statistical
    def test_the_noise_of_each_node_is_that_of_its_option(self):
        """2,410 coordinates: a standard deviation is known to 1.4 %."""
        (config,) = settle(
            "--nodes 4 --node-noise 0.1 0.2 0.4 0.8 --method PrivSGP --iterations 5", self.SIZES
        ).values()
        key, state, data = start_of(config)
        drawn = rows_of(config.algorithm().draw(key, state, data).noise)
        np.testing.assert_allclose(drawn.std(axis=1), [0.1, 0.2, 0.4, 0.8], rtol=0.07)

    def test_the_run_stops_when_the_first_budget_is_spent(self):
        noise, budgets = " ".join(["0.1"] * 4), (2.0, 2.0, 1.5, 2.0)
        options = f"--nodes 4 --method PrivSGP --node-noise {noise} --iterations 500"
        query = lines_of(f"{options} --node-epsilons {' '.join(map(str, budgets))}")
        (name,) = query
        config = settled(query, {name: self.SIZES}, lambda config: CIFAR10_CONSTANTS)[name].config
        rounds = rounds_allowed(name, query[name].config, config, self.SIZES)
        assert rounds is not None
        assert 0 < rounds < 500
        within, beyond = (self.stated(config, ran)["node_epsilons"] for ran in (rounds, rounds + 1))
        assert (np.array(within) <= budgets).all()
        assert (np.array(beyond) > budgets).any()


def test_mixings_cost_their_bits_and_seconds_and_no_epsilon(tmp_path):
    """Three exchanges of a round take three times as many bits; final ones are in the total, at the same state."""
    options = (
        "--method PrivSGP --nodes 4 --num-train 200 --num-test 40 --hidden 4 --batch-size 4 --iterations 4 --quiet"
    )
    options += " --evaluate-every 2 --seeds 0 --target-epsilon 8"
    cases = {}
    for name, more in {"one": "", "three": "--mixings 3", "final": "--final-mixings 2"}.items():
        assert main(EXPERIMENT, shlex.split(f"{options} {more} --out {tmp_path / name}")) == 0
        (cases[name],) = json.loads((tmp_path / name / "summary.json").read_text())["cases"].values()
    bits, seconds = (
        {name: case["costs"][cost]["mean"] for name, case in cases.items()}
        for cost in ("bits_sent", "simulated_seconds")
    )
    assert (bits["three"], bits["final"]) == (3 * bits["one"], 1.5 * bits["one"])
    assert 2.9 < seconds["three"] / seconds["one"] < 3.001
    assert len({case["privacy"][0]["dp_epsilon"] for case in cases.values()}) == 1
    accuracies = [case["test_loss"]["mean"] for case in cases.values()]
    assert len({*accuracies}) == 3, "all three change what is measured"


def test_all_data_in_one_place_hold_against_whoever_sees_its_models():
    words = {"method": "PrivSGP", "target_epsilon": 3.0, "noise_std": "calibrated", "nodes": 8, "batch_size": 20}
    rows = parse(
        EXPERIMENT, [*shlex.split("--baselines curator"), *(f"--{k.replace('_', '-')}={v}" for k, v in words.items())]
    )
    cases = prepare(rows[0].rows).cases
    observers = [{one["observer"] for one in case.privacy(5)} for case in cases.values() if case.privacy]
    assert observers == [{"all other nodes"}, {"whoever sees its models"}]
