"""ali_dpfl: iterations and rounds of a budget, statements of what ran, tau; test_every_experiment.py has the rest."""

import contextlib
import csv
import io
import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from helpers import leave_undrawn
from problems import linear_task
from run_files import run_lines

from experiments.ali_dpfl import EXPERIMENT
from experiments.ali_dpfl.options import Configuration
from experiments.ali_dpfl.prepare import prepare
from experiments.ali_dpfl.spending import account_of, privacy_of, released, rounds_of, settled
from jaxfl.core import ArgumentError
from jaxfl.frame import main, override
from jaxfl.frame.command_line import parse
from jaxfl.privacy import clients as accounting
from jaxfl.privacy.clients import WITHOUT_NOISE

ALI, PRIVATE, FIXED = "ALI-DPFL, as_published", "ALI-DPFL, private", "DPFL"
SMALL = (
    "--num-train 400 --num-test 60 --nodes 5 --partition dirichlet --alpha 2 --batch-size 4 --hidden 4 --quiet "
    "--evaluate-every 3 --checkpoint-every 1"
)
BUDGET = f"{SMALL} --target-epsilon 4"
METHODS = "--grid method=ALI-DPFL,DPFL --local-steps 6 --grid constants=as_published,private"
RUN = f"{BUDGET} {METHODS} --kappa 0.02 --seeds 2 7"  # whose largest clients are of one size: a program a case, not two


def lines_of(arguments):
    """The lines that a command line asks for."""
    return parse(EXPERIMENT, shlex.split(arguments))[0].rows


@contextlib.contextmanager
def a_task():
    """Another task, since not all data sets are here; releases do not depend on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Configuration, "task", lambda self: linear_task(1))
        yield


def settle(arguments, sizes):
    """Name -> configuration with numbers, for clients of these sizes."""
    with a_task():
        return {name: settled(line.config, sizes) for name, line in lines_of(arguments).items()}


def first_of(arguments, sizes):
    """The first configuration of a command line, with numbers."""
    return next(iter(settle(arguments, sizes).values()))


def stated(config, sizes, *query):
    """Function from rounds and totals to statements."""
    actual = privacy_of(config, sizes, *query)
    assert actual is not None
    return actual


def numbers(config):
    """T and R_s of a point with numbers."""
    most, rounds = config.budget.max_iterations, config.learning.rounds
    assert isinstance(most, int)
    assert isinstance(rounds, int)
    return most, rounds


def spent_by(config, size, iterations, estimates=0, *claim):
    """Epsilon of a client with this many samples."""
    with a_task():
        return account_of(config, [size] * config.clients.nodes, estimates).epsilon(iterations, *claim)


def counts(arguments, sizes):
    """Epsilon and ratio -> (T, R_s)."""
    configs = settle(arguments, sizes).values()
    return {(config.budget.target_epsilon, config.learning.round_ratio): numbers(config) for config in configs}


class Ended(NamedTuple):
    folder: Path
    printed: str

    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())

    def lines(self, case, seed=2):
        lines = run_lines(self.folder)
        return [line for line in lines if (line["case"], line["seed"]) == (case, seed)]


def run(arguments, folder):
    """A finished command."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "1000")
        leave_undrawn(patch)
        assert main(EXPERIMENT, shlex.split(f"{arguments} --out {folder}")) == 0
    return Ended(folder, printed.getvalue())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """ALI-DPFL with both estimates and DPFL, two seeds, clients of different sizes."""
    return run(RUN, tmp_path_factory.mktemp("ali_dpfl") / "run")


class TestBudget:
    def test_iterations_and_rounds_of_the_papers_ten_budgets(self):
        """The counts of |D_i| = 5,000, whatever the clients hold; R_s is a share of them."""
        sizes = [6000] * 10
        assert counts("--preset table2", sizes) == {
            **{(1.75, 1.0): (174, 174), (1.85, 1.0): (230, 230), (2.0, 1.0): (314, 314)},
            **{(1.55, 2.0): (78, 156), (1.65, 2.0): (118, 236), (1.75, 2.0): (174, 348)},
        }
        assert counts("--preset table3", sizes) == {
            **{(2.0, 0.5): (314, 157), (2.25, 0.5): (454, 227), (2.5, 0.5): (596, 298)}
        }
        assert counts("--preset table4", sizes) == {
            **{(2.75, 0.2): (770, 154), (3.25, 0.2): (1119, 224), (3.75, 0.2): (1537, 308)}
        }

    def test_clients_of_their_own_sizes_by_default(self):
        """The smallest pays most, and the proven bound allows more iterations."""
        allowed = []
        for bound in ("published", "proven"):
            arguments = f"--method DPFL --local-steps 5 --dataset mnist --bound {bound}"
            (config,) = settle(arguments, [5000, 2000, *[3000] * 8]).values()
            most = numbers(config)[0]
            spent = [spent_by(config, 2000, count, 0, bound) for count in (most, most + 1)]
            assert spent[0] <= 2.0 < spent[1]
            allowed.append(most)
        assert allowed[0] < allowed[1]

    def test_private_estimates_stay_within_the_budget_that_was_asked_for(self):
        """Also where iterations are given: 40 rounds of loud estimates beside iterations that alone are paid for."""
        arguments = "--method ALI-DPFL --dataset mnist --target-epsilon 3 --max-iterations 300 --rounds 40"
        settle(arguments, [6000] * 10)
        with pytest.raises(ArgumentError, match=r"^constants_noise: must leave 40 estimates within target_epsilon, 3"):
            settle(f"{arguments} --constants-noise 0.6", [6000] * 10)

    def test_updates_of_whole_clients_run_all_rounds_and_spend_their_own_budget(self):
        """Not the iterations that another mechanism would pay for."""
        arguments = "--method DP-FedAvg --rounds 200 --num-active 3 --local-steps 5 --target-epsilon 3"
        (config,) = settle(arguments, [144] * 10).values()
        assert rounds_of(config) == 200
        assert [int(config.steps_at(k)) for k in (0, 199)] == [5, 5]
        noise = float(config.learning.update_noise_multiplier)
        release = accounting.UpdateRelease("poisson", 0.3, 1.0, noise)
        account = accounting.client_level_account(release, num_clients=10, dp_delta=1e-5)
        assert 2.99 < account.epsilon(200) <= 3.0

    def test_the_last_round_is_shortened(self):
        (config,) = settle("--method DPFL --local-steps 5 --max-iterations 12 --rounds 9", [100] * 10).values()
        assert [int(config.steps_at(k)) for k in range(4)] == [5, 5, 2, 0]
        assert rounds_of(config) == 3

    def test_a_share_of_the_iterations_is_rounded_up(self):
        for ratio, rounds in (("0.7", 7), ("0.71", 8)):
            arguments = f"--method DPFL --local-steps 5 --max-iterations 10 --round-ratio {ratio}"
            (config,) = settle(arguments, [100] * 10).values()
            assert config.learning.rounds == rounds

    def test_fixed_taus_of_as_many_rounds_share_a_program(self):
        arguments = f"{SMALL} --rounds 8 --max-iterations 12 --method DPFL --grid local_steps=1,2,4"
        cases = prepare(lines_of(arguments)).cases.values()
        assert len({id(case.algorithm) for case in cases}) == 1
        assert [(case.num_rounds, case.last_round) for case in cases] == [(8, 8), (8, 6), (8, 3)]
        assert [case.numbers for case in cases] == [{"local_steps": float(tau)} for tau in (1, 2, 4)]


class TestClientsOfUnequalSize:
    """Sizes are public: one budget gives each client the least noise of its own size."""

    SIZES = (48, 96, 360, 1966)
    ASKED = "--nodes 4 --batch-size 20 --rounds 10 --max-iterations 30"
    CALIBRATED = f"{ASKED} --target-epsilon 3 --noise-multiplier calibrated"

    def spent(self, config, sizes):
        """Epsilons of clients by the statement that the budget is held by."""
        totals = dict.fromkeys(released(config), 30) | {"estimate_releases": 10}
        ran = {name: totals[name] for name in released(config)}
        query = config.budget.bound, "zero_out" if config.budget.bound == "proven" else None
        (first, *_) = stated(config, sizes, query)(10, **ran)
        assert first["asked"]
        return first["node_epsilons"]

    @pytest.mark.parametrize("options", ["DPFL", "alone", "DPFL --bound published", "ALI-DPFL --constants private"])
    def test_every_client_spends_the_budget(self, options):
        config = first_of(f"{self.CALIBRATED} --method {options}", self.SIZES)
        assert all(0.99 * 3 < epsilon <= 3 for epsilon in self.spent(config, self.SIZES))
        noise = config.budget.client_noise
        assert [*noise] == sorted(noise, reverse=True)
        assert noise[0] > 1.5 * noise[-1]
        assert config.budget.noise_multiplier == noise[0]
        config.algorithm()

    def test_a_client_meets_the_budget_in_every_seed(self):
        """Each client's noise is that of its worst seed: the smallest, where clients lie in another order."""
        sizes = [60, 300, 120, 480, 360, 90, 120, 240]
        config = first_of(f"{self.CALIBRATED} --method DPFL", sizes)
        spent = np.reshape(self.spent(config, sizes), (2, 4))
        assert (spent <= 3).all()
        assert (spent.max(axis=0) > 0.99 * 3).all()
        assert spent[1, 0] < spent[0, 0]

    def test_an_even_deal_and_a_given_noise_stay_as_they_are(self):
        query = f"{self.CALIBRATED} --method DPFL"
        one = first_of(query, [90, 90, 89, 89])
        assert one.budget.client_noise == ()
        assert 0.99 * 3 < spent_by(one, 89, 30) <= 3
        own = first_of(query, [90, 90, 89, 88])
        assert len(own.budget.client_noise) == 4
        said = [stated(config, [90, 90, 89, 88])(10, 30)[1]["mechanism"] for config in (one, own)]
        assert ["others have noise of their own" in text for text in said] == [False, True]
        given = first_of(f"{self.ASKED} --method DPFL --noise-multiplier 2", self.SIZES)
        assert (given.budget.noise_multiplier, given.budget.client_noise) == (2, ())
        request = next(iter(lines_of(query).values())).config
        assert settled(override(request, {"method": "FedAvg"}), self.SIZES).budget.client_noise == ()  # a baseline

    def test_noise_of_each_client_may_be_given(self):
        given = "--nodes 4 --batch-size 20 --rounds 10 --method DPFL --target-epsilon 3"
        config = first_of(f"{given} --client-noise 4 3 2 1", self.SIZES)
        most, _ = numbers(config)
        spent = [max(stated(config, self.SIZES)(10, count)[1]["node_epsilons"]) for count in (most, most + 1)]
        assert spent[0] <= 3 < spent[1]
        for wrong in ("--client-noise 4 3 2", "--client-noise 4 3 2 0", "--client-noise 4 3 2 -1"):
            with pytest.raises(ArgumentError, match=r"^client_noise: "):
                prepare(lines_of(f"{given} {wrong}"))
        with pytest.raises(ArgumentError, match="excludes the other"):
            lines_of(f"{given} --client-noise 4 3 2 1 --noise-multiplier 2")

    def test_a_run_has_the_noise_of_each_client(self, tmp_path, capsys):
        """In sites.csv and on the steps; a run that began with one noise is not resumed."""
        words = "--num-train 400 --num-test 60 --nodes 4 --partition quantity --alpha 1 --batch-size 4 --hidden 4"
        words += " --rounds 3 --max-iterations 6 --local-steps 2 --noise-multiplier calibrated --target-epsilon 8"
        words += f" --quiet --seeds 0 --method DPFL --out {tmp_path}"
        assert main(EXPERIMENT, words.split()) == 0
        with open(tmp_path / "sites.csv", newline="") as file:
            rows = [*csv.DictReader(file)]
        noise, sizes = ([float(row[name]) for row in rows] for name in ("noise_std", "samples"))
        assert np.argsort(sizes).tolist() == np.argsort(noise)[::-1].tolist()
        assert max(noise) > 1.1 * min(noise)
        assert all(0.99 * 8 < float(row["dp_epsilon"]) <= 8 for row in rows)
        assert main(EXPERIMENT, [*words.split(), "--resume"]) == 0
        path = tmp_path / "config.json"
        path.write_text(re.sub(r'"client_noise": \[\],\s*', "", path.read_text()))
        capsys.readouterr()
        assert main(EXPERIMENT, [*words.split(), "--resume"]) == 2
        assert "client-noise: must be as in the run that is resumed" in capsys.readouterr().err


class TestStatements:
    def test_epsilon_is_the_accountants_for_the_iterations_that_ran(self, finished):
        """Each client counts with its own size, and of several seeds the one with most; where tau is chosen by what was
        released, the proven epsilon is that of the budget."""
        summary, privacy = finished.summary(), json.loads((finished.folder / "privacy.json").read_text())
        lines = lines_of(RUN)
        assert set(privacy) == set(lines) - {ALI}
        for name in privacy:
            line = lines[name]
            sizes, ends = _sizes(line), [finished.lines(name, seed)[-1] for seed in (2, 7)]
            assert len(set(sizes)) > 5
            ran = [
                max(end.get(f"total_{what}", 0) for end in ends) for what in ("local_iterations", "estimate_releases")
            ]
            config = settled(line.config, sizes)
            counts = {"published": ran, "proven": ran if name == FIXED else numbers(config)}
            for stated, whole in zip(summary["cases"][name]["privacy"], privacy[name], strict=True):
                claim, (most, estimates) = (stated["bound"], stated["neighboring_relation"]), counts[stated["bound"]]
                each = [spent_by(config, size, most, estimates, *claim) for size in sizes]
                assert stated["dp_epsilon"] == pytest.approx(max(each), rel=1e-12)
                np.testing.assert_allclose(np.ravel(whole["node_epsilons"]), each)

    def test_a_run_with_estimates_without_noise_has_no_epsilon(self, finished):
        """Neither in table and summary nor in pictures' captions."""
        table = " ".join(finished.printed.split()).split("budget was spent")[0]
        assert len(re.findall(rf"{ALI}: (?:target: )?no (?:published|proven) ε", table)) == 3
        assert len(re.findall(rf"{PRIVATE}: (?:target: )?ε = ", table)) == 3
        assert table.count("target: ") == 3  # the budget's bound, of all methods but FedAvg
        for name, row in finished.summary()["cases"].items():
            stated = [(one["dp_epsilon"] is None, one["reason"] == WITHOUT_NOISE) for one in row["privacy"]]
            assert stated == [(name == ALI, name == ALI)] * 3

    def test_parameters_are_covered_where_all_has_noise(self):
        methods = "ALI-DPFL,DPFL,FedAvg,DP-FedAvg"
        arguments = f"{BUDGET} --rounds 2 --grid method={methods} --local-steps 4 --grid constants=as_published,private"
        covered = {name: case.final_params_are_private for name, case in prepare(lines_of(arguments)).cases.items()}
        assert covered == {ALI: False, PRIVATE: True, FIXED: True, "FedAvg": False, "DP-FedAvg": True}


def _sizes(line):
    data_of = line.config.clients.data(line.config.data)
    return np.concatenate([data_of(seed).sizes for seed in line.seeds]).tolist()
