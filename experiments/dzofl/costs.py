"""Costs of a round under two readings of the paper, and section III of the paper with corrected arithmetic.

counted: the costs of the program, the way down included. DZOFL runs two forward passes over a batch for each direction,
FedAvg one forward and one backward pass. All counts are of the batch.
published: the costs that the paper charges. They have one forward pass, and for FedAvg one backward pass. Activations
count for the batch, all else for one sample. FedAvg's computing and the way down take no time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxfl.channel import DZOFL_COUNTED, Ledger, backward_energy, forward_energy, total
from jaxfl.channel.ledger import COUNTED
from jaxfl.core.outputs import csv_text
from jaxfl.frame import Finished
from jaxfl.training.json_files import write_atomically
from jaxfl.training.summary import with_prefix

from .options import DZOFL, FED_AVG, Configuration

READINGS = ("counted", "published")
_D, _M, _T, _FIRST_ORDER_T = 4e5, 16, 10_000, 100  # section III: parameters, bits, rounds of DZOFL and of FedAvg
_MOST_TOLD = 24  # most rows of a table on the screen
_RATE, _SLOT, _PASS = 10e6, 0.125e-3, 16e6 / 4e9  # its bits a second, slot and seconds of a pass


class RoundCost(NamedTuple):
    """The expected cost of a round: of all devices, or of those that are drawn."""

    bits: float  # up, of a device that sends
    computing_joules: float
    sending_joules: float
    seconds: float

    @property
    def joules(self) -> float:
        """Energy of computing and sending."""
        return self.computing_joules + self.sending_joules


def published_ledger(config: Configuration) -> Ledger:
    """The configuration's ledger as the paper charges it."""
    model, batch = config.costs.energy_model(), config.learning.batch_size
    names = DZOFL_COUNTED if config.network.model == "dzofl_cnn" else None  # the paper's O_c has these layers' outputs
    counts = total(config.network.counts(config.data, names))
    batch_counts = counts._replace(activations=batch * counts.activations)
    forward, backward = forward_energy(batch_counts, model), backward_energy(batch_counts, model)
    book, seconds = config.ledger(), counts.operations / config.costs.operations_per_second
    return book._replace(
        forward=book.forward._replace(joules=forward / (2 * batch), simulated_seconds=seconds / (2 * batch)),
        gradient=book.gradient._replace(joules=(forward + backward) / batch, simulated_seconds=0.0),
        downlink_bits_per_second=math.inf,
    )


def round_costs(config: Configuration, entry: Mapping[str, Any]) -> dict[str, RoundCost]:
    """Reading -> the cost of a round; `entry` is the summary's of the case. All active devices and rounds count alike.

    A round ends with its slowest device. Of n devices in ascending order of their seconds, device j (from 1) is the
    slowest of k drawn ones with probability C(j - 1, k - 1) / C(n, k).
    """
    num_nodes, num_active = config.clients.nodes, config.num_active
    num_receivers = num_nodes if config.learning.method == DZOFL else num_active
    of_round = {name: entry["costs"][name]["mean"] / entry["rounds"] for name in COUNTED}
    counts = {name: np.full(num_nodes, number / num_active) for name, number in of_round.items()}  # if it is active
    counts["bits_received"] = np.full(num_nodes, of_round["bits_received"] / num_receivers)
    nothing = np.zeros(num_nodes)
    last = [math.comb(j, num_active - 1) / math.comb(num_nodes, num_active) for j in range(num_nodes)]
    costs = {}
    for reading, book in zip(READINGS, (config.ledger(), published_ledger(config)), strict=True):
        (whole, receiving), (unsent, _) = book.of_nodes(counts), book.of_nodes({**counts, "bits_sent": nothing})
        idle, _ = book.of_nodes({**dict.fromkeys(COUNTED, nothing), "bits_received": counts["bits_received"]})
        sending = num_active * float(np.mean(whole.joules - unsent.joules))
        computing = float(np.mean(num_active * unsent.joules + (num_receivers - num_active) * idle.joules))
        seconds = float(np.sort(whole.simulated_seconds) @ last + receiving.max())
        costs[reading] = RoundCost(of_round["bits_sent"] / num_active, computing, sending, seconds)
    return costs


def write_costs(finished: Finished) -> None:
    """Write costs.csv and print a table: bits, seconds and joules of a round and of the run, in both readings."""
    rows, texts = [], []
    for name, row in finished.rows.items():
        entry = finished.summary["cases"][name]
        for reading, cost in (round_costs(row.config, entry) if entry["rounds"] else {}).items():
            seconds, joules = entry["rounds"] * cost.seconds, entry["rounds"] * cost.joules
            rows.append([name, reading, entry["test_accuracy"]["mean"], entry["rounds"], *cost, seconds, joules])
            of_round = [with_prefix(number, unit) for number, unit in zip(cost, ("bit", "J", "J", "s"), strict=True)]
            texts.append([name, reading, *of_round, with_prefix(seconds, "s"), with_prefix(joules, "J")])
    heads = ["case", "reading", "test_accuracy", "rounds", *RoundCost._fields, "run_seconds", "run_joules"]
    write_atomically(finished.run.path / "costs.csv", csv_text([heads, *rows]).encode())
    heads = ["", "reading", "a device sends", "computing", "sending", "time", "run: time", "energy"]
    _print("Costs of a round, all devices", [heads, *texts[:_MOST_TOLD]])


def write_section3(finished: Finished) -> Sequence[Path]:
    """Write section3.csv and print a table: the paper's example, as published, corrected, and counted by this run."""
    write_costs(finished)
    here = {
        row.config.learning.method: round_costs(row.config, finished.summary["cases"][name])
        for name, row in finished.rows.items()
    }
    zero, first = here[DZOFL]["counted"], here[FED_AVG]["counted"]
    bits, counts = (_FIRST_ORDER_T * _D * _M, _T * _M), (_FIRST_ORDER_T * first.bits, _T * zero.bits)
    rows = [
        ["FedAvg: bits of a device", 64e7, bits[0], counts[0]],
        ["DZOFL: bits of a device", 16e3, bits[1], counts[1]],
        ["ratio of the two", 40_000, bits[0] / bits[1], counts[0] / counts[1]],
        ["FedAvg: seconds of sending", 64, bits[0] / _RATE, _FIRST_ORDER_T * here[FED_AVG]["published"].seconds],
        ["FedAvg: seconds of sending and computing", None, None, _FIRST_ORDER_T * first.seconds],
        ["DZOFL: seconds, one pass a round", 41.25, _T * (_SLOT + _PASS), _T * here[DZOFL]["published"].seconds],
        ["DZOFL: seconds, two passes a round", None, _T * (_SLOT + 2 * _PASS), _T * zero.seconds],
    ]
    heads = [f"T = {_T:,}, T' = {_FIRST_ORDER_T}", "paper (d = 400,000)", "corrected", "counted here"]
    write_atomically(finished.run.path / "section3.csv", csv_text([heads, *rows]).encode())
    _print("Section III", [heads, *([row[0], *("" if n is None else f"{n:.6g}" for n in row[1:])] for row in rows)])
    return []


def _print(title: str, rows: Sequence[Sequence[str]]) -> None:
    """A table whose first row is its heading."""
    table = Table(*rows[0], title=title)
    for row in rows[1:]:
        table.add_row(*row)
    Console(markup=False).print(table)
