"""dzofl: what arrives, what a round costs in both readings, section III; test_every_experiment.py has the rest."""

import contextlib
import csv
import io
import itertools
import math
import shlex
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import leave_undrawn
from made_up_images import write_images
from run_files import run_lines

from experiments.dzofl import EXPERIMENT
from experiments.dzofl.costs import published_ledger, round_costs
from experiments.dzofl.options import Configuration
from jaxfl import channel
from jaxfl.channel.ledger import COUNTED
from jaxfl.frame import main, programs
from jaxfl.frame.command_line import parse
from jaxfl.training import read_results

METHODS = ("DZOFL", "FedAvg")
SMALL = "--nodes 5 --hidden 4 --batch-size 4 --quiet --evaluate-every 2 --checkpoint-every 1"
RUN = f"{SMALL} --rounds 4 --seeds 0 1 --radius-m 900"
MICRO, SLOT = 1e6, 0.125e-3


def configs(arguments: str) -> dict[str, Configuration]:
    """The configurations that a command line asks for."""
    return {name: line.config for name, line in parse(EXPERIMENT, shlex.split(arguments))[0].rows.items()}


class Ended(NamedTuple):
    folder: Path
    printed: str

    def table(self, name):
        """Rows of a table of the run."""
        with open(self.folder / name, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))


def run(arguments, folder):
    """A finished command."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "1000")
        leave_undrawn(patch)
        assert main(EXPERIMENT, shlex.split(f"{arguments} --out {folder}")) == 0
    return Ended(folder, printed.getvalue())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Both methods, two seeds, on wireless links."""
    return run(RUN, tmp_path_factory.mktemp("dzofl") / "run")


@pytest.fixture(scope="module")
def shirts(tmp_path_factory):
    """Arguments for the paper's network, on made-up images."""
    folder = write_images(tmp_path_factory.mktemp("data"))
    return f"--data-dir {folder} --nodes 5"


def assert_near(costs, published, counted):
    """Microjoules of a device; what is counted leaves the flattened copy out of the activations."""
    joules = [MICRO * float(cost.joules) / 5 for cost in costs]
    np.testing.assert_allclose(joules[0], published, rtol=5e-4)
    np.testing.assert_allclose(joules[1], counted, rtol=4e-3)


class TestCosts:
    def test_published_reading_is_the_papers_energy_and_counted_that_of_two_passes_over_a_batch(self, shirts):
        """23.46685 and 89.93295 uJ; of a batch 201.369 and 881.141 uJ; 10,564,722 operations a sample."""
        zero, first = configs(f"{shirts} --dataset fashion_mnist").values()
        counts = {"gradient_evaluations": [0] * 5, "forward_evaluations": [20] * 5}
        nothing = {"bits_sent": np.zeros(5), "bits_received": np.zeros(5)}
        passes = {name: np.array(values) for name, values in counts.items()}
        costs = [book.of_round({**nothing, **passes}) for book in (published_ledger(zero), zero.ledger())]
        assert_near(costs, 23.46685, 2 * 201.369)
        np.testing.assert_allclose(
            [cost.simulated_seconds for cost in costs], [10_564_722 / 4e9, 2 * 105_647_220 / 4e9], rtol=1e-6
        )
        passes = {"gradient_evaluations": np.full(5, 10), "forward_evaluations": np.zeros(5)}
        costs = [book.of_round({**nothing, **passes}) for book in (published_ledger(first), first.ledger())]
        assert_near(costs, 23.46685 + 89.93295, 201.369 + 881.141)
        np.testing.assert_allclose([cost.simulated_seconds for cost in costs], [0, 3 * 105_647_220 / 4e9], rtol=1e-6)

    def test_a_lost_update_is_sent_again_at_the_cost_of_airtime(self, finished):
        """1 / p times as long in the mean; the joules are those of sending for so long."""
        zero, first = configs(RUN).values()
        num_params = 64 * 4 + 4 + 5 * 2
        airtime = np.maximum(16 * num_params / 10e6, SLOT) / np.asarray(first.success())
        counts = {"bits_received": np.zeros(5), "gradient_evaluations": np.zeros(5), "forward_evaluations": np.zeros(5)}
        of_first = first.ledger().of_round({**counts, "bits_sent": np.full(5, 16.0 * num_params)})
        assert float(of_first.simulated_seconds) == pytest.approx(float(airtime.max()), abs=SLOT)
        assert float(of_first.joules) == pytest.approx(0.2 * airtime.sum(), abs=5 * 0.2 * SLOT)
        of_zero = zero.ledger().of_round({**counts, "bits_sent": np.full(5, 16.0)})
        assert float(of_zero.simulated_seconds) == pytest.approx(SLOT)  # never sent again
        rows = {row["case"]: row for row in finished.table("costs.csv") if row["reading"] == "counted"}
        assert float(rows["FedAvg"]["sending_joules"]) == pytest.approx(float(of_first.joules), rel=1e-6)
        assert [float(rows[name]["bits"]) for name in METHODS] == [16, 16 * num_params]

    def test_costs_of_rounds_add_up_to_the_runs(self, finished):
        totals = {row["case"]: row for row in read_results(finished.folder)}
        for row in finished.table("costs.csv"):
            if row["reading"] == "counted":
                assert float(row["run_joules"]) == pytest.approx(totals[row["case"]]["total_joules"], rel=1e-6)
                seconds = totals[row["case"]]["total_simulated_seconds"]
                assert float(row["run_seconds"]) == pytest.approx(seconds, rel=1e-6)
        assert "costs.png" in finished.printed

    @pytest.mark.parametrize("method", METHODS)
    def test_only_drawn_devices_compute_and_send(self, method):
        """All pairs of five devices, by hand; the slower one ends a round. With DZOFL all five receive."""
        (config,) = configs(f"{RUN} --method {method} --num-active 2 --downlink-watts 0.5").values()
        data, algorithm, key = config.clients.data(config.data)(0), config.algorithm(), jax.random.key(0)
        info, book = jax.jit(algorithm.round)(key, algorithm.init(key, data), data)[1], config.ledger()
        counts = {name: np.asarray(info.named()[name], np.float64) for name in COUNTED}
        receivers = {"DZOFL": 5, "FedAvg": 2}[method]
        assert [np.count_nonzero(counts[name]) for name in ("bits_sent", "bits_received")] == [2, receivers]
        assert np.count_nonzero(counts["gradient_evaluations"] + counts["forward_evaluations"]) == 2
        by_hand = []
        for pair in itertools.combinations(range(5), 2):
            drawn = np.isin(np.arange(5), pair)
            own = {name: np.where(drawn, values.max(), 0) for name, values in counts.items()}
            if method == "DZOFL":
                own["bits_received"] = counts["bits_received"]
            by_hand.append(book.of_round(own))
        entry = {"rounds": 3, "costs": {name: {"mean": 3 * values.sum()} for name, values in counts.items()}}
        cost = round_costs(config, entry)["counted"]
        assert cost.joules == pytest.approx(np.mean([one.joules for one in by_hand]))
        assert cost.seconds == pytest.approx(np.mean([one.simulated_seconds for one in by_hand]))
        assert cost.bits == counts["bits_sent"].max()

    @pytest.mark.slow
    def test_section_3(self, shirts, tmp_path):
        ended = run(f"--preset section3 {shirts} --num-test 20 --quiet", tmp_path / "run")
        heads = list(ended.table("section3.csv")[0])
        rows = {row[heads[0]]: [row[head] for head in heads[1:]] for row in ended.table("section3.csv")}
        right = {name: [float(cell) if cell else math.nan for cell in row] for name, row in rows.items()}
        d = 45_362
        np.testing.assert_allclose(right["FedAvg: bits of a device"], [64e7, 64e7, 100 * 16 * d])
        np.testing.assert_allclose(right["DZOFL: bits of a device"], [16e3, 16e4, 16e4])
        np.testing.assert_allclose(right["ratio of the two"], [40_000, 4000, d / 100])
        np.testing.assert_allclose(right["FedAvg: seconds of sending"], [64, 64, 100 * 16 * d / 1e7], rtol=1e-3)
        np.testing.assert_allclose(right["DZOFL: seconds, one pass a round"][:2], [41.25, 41.25])
        two = right["DZOFL: seconds, two passes a round"]
        slots = 2 * 0.125e-3  # up and down
        np.testing.assert_allclose(two[1:], [81.25, 1e4 * (2 * 105_647_220 / 4e9 + slots)], rtol=1e-6)
        assert "Section III" in ended.printed


class TestLinks:
    def test_a_device_is_to_arrive_as_often_as_its_distance_says(self):
        (config,) = configs("--method DZOFL --uplink-bits-per-second 8e6 --transmit-dbm 20 --placement-seed 3").values()
        places = channel.disc_positions(jax.random.key(3), 10)
        radio = channel.Radio(bits_per_second=8e6, power_dbm=20.0)
        expected = channel.success_probability(jnp.linalg.norm(places, axis=1), radio)
        np.testing.assert_array_equal(config.success(), expected)
        assert np.ptp(expected) > 0.1

    @pytest.mark.slow
    def test_fed_avg_loses_updates_only_where_it_does_not_send_them_again(self, tmp_path):
        options = f"{SMALL} --rounds 4 --method FedAvg --links given --success 0.3 --grid lost=resend,drop"
        rows = read_results(run(options, tmp_path / "run").folder)
        again, without = ([row for row in rows if row["lost"] == lost] for lost in ("resend", "drop"))
        assert [row.get("lost_messages") for row in again] == [None]
        assert all(row["lost_messages"] > 0 for row in without)
        assert again[0]["total_joules"] > 2.9 * without[0]["total_joules"]

    def test_losses_come_in_the_bursts_that_recovery_says(self, tmp_path, capsys):
        options = f"{SMALL} --rounds 60 --method DZOFL --links given --success 0.9"
        ended = run(f"{options} --recovery 0.05", tmp_path / "run")
        assert "probability 0.333 to 0.333, mean 0.333, or is lost, in bursts of 20 rounds" in ended.printed
        lost = sum(line["lost_messages"] for line in run_lines(ended.folder) if line["round"])
        assert lost > 2 * 0.1 * 60 * 5
        for other in ("--method FedAvg --links given", "--links perfect"):
            assert main(EXPERIMENT, shlex.split(f"{other} --recovery 0.5 --out {tmp_path / 'other'}")) != 0
            assert "error: --recovery: " in capsys.readouterr().err

    @pytest.mark.parametrize(("quantizer", "bits"), [("none", 32), ("float8", 8), ("dithered", 6)])
    @pytest.mark.quick_cases(1)
    def test_quantizers_send_their_bits_both_ways(self, quantizer, bits):
        own = "--quantizer-bits 6 --quantizer-limit 2" if quantizer == "dithered" else ""
        (config,) = configs(f"--method DZOFL --quantizer {quantizer} {own} --num-directions 3").values()
        data, algorithm, key = config.clients.data(config.data)(0), config.algorithm(), jax.random.key(0)
        info = jax.jit(algorithm.round)(key, algorithm.init(key, data), data)[1]
        assert info.bits_sent.tolist() == info.bits_received.tolist() == [3 * bits] * 10


def test_numbers_that_may_be_traced_share_a_program():
    axes = (
        "step_size=1,2 smoothing=0.5,1 quantizer_limit=1,2 radius_m=300,600 bandwidth_hz=1e6,3e6 transmit_dbm=17,20 "
        "noise_dbm_per_hz=-174,-170 path_loss_db=120,130 path_loss_exponent=3,4 uplink_bits_per_second=2e6,3e6"
    )
    query, _ = parse(EXPERIMENT, shlex.split(f"--method DZOFL --quantizer dithered --grid {axes}"))
    (first, numbers), (second, _) = programs(query.rows, Configuration.algorithm).values()
    assert first is second
    assert set(numbers) == {pair.partition("=")[0] for pair in axes.split()}
    (left, right) = (line.config for line in query.rows.values())
    assert not np.allclose(left.success(), right.success())
