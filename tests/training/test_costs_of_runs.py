"""Costs of a run in its lines, its table and its summary, and budgets of them."""

import itertools

import jax
import numpy as np
import pytest
from toy_problem import (
    TASK,
    TOY_LEDGER,
    lasting,
    toy_algorithm,
    toy_case,
    toy_that_counts,
    toy_training_data,
    train_toy,
)

from jaxfl.core import ArgumentError, RunKey
from jaxfl.training import lanes, read_results, read_run

COSTS = ("operations", "simulated_seconds", "joules")
CASE = toy_case(toy_that_counts, ledger=TOY_LEDGER, chunk_rounds=4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(directory, summary) of a run with a ledger."""
    out = tmp_path_factory.mktemp("whole")
    return out, train_toy(out, {"A": CASE})


def by_hand(rounds, seed):
    """Operations, seconds and joules of the first rounds, one round and one node after the other."""
    algorithm, data, key = toy_algorithm(TASK, counts=True), toy_training_data(seed), jax.random.key(seed)
    state, step, totals = algorithm.init(key, data), jax.jit(algorithm.round), np.zeros(3)
    for _ in range(rounds):
        state, info = step(key, state, data)
        ends, bits = [], 480.0
        for node in range(4):
            forwards = int(info.forward_evaluations[node])
            totals[0] += 45 + 15 * forwards
            ends.append([0.3, 0.1, 0.7, 0.1][node] + 0.1 * forwards + bits / 1e3)
            totals[2] += 1.1 + 0.1 * (node + 1) * forwards + 0.7 * bits / 1e3
        totals[1] += max(ends) + bits / 2e3
    return totals


def test_lines_hold_the_sums_over_rounds(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(lanes, "run_keys", lambda keys, words: RunKey(keys, keys))  # the seed's own batches
    train_toy(tmp_path, {"A": CASE})
    lines = read_run(tmp_path).read_metrics()
    assert {(line["seed"], line["round"]) for line in lines} == set(itertools.product((0, 1), (0, 10, 20, 25)))
    for line in lines:
        totals = [line[f"total_{name}"] for name in COSTS]
        np.testing.assert_allclose(totals, by_hand(line["round"], line["seed"]), rtol=1e-12)


def test_table_and_summary_hold_the_totals(whole):
    out, summary = whole
    last = [line for line in read_run(out).read_metrics() if line["round"] == 25]
    for name in COSTS:
        values = [line[f"total_{name}"] for line in last]
        assert [row[f"total_{name}"] for row in read_results(out)] == values
        assert summary["cases"]["A"]["costs"][name]["per_seed"] == values
    assert set(summary["cases"]["A"]["costs"]) == {
        *("bits_sent", "bits_received", "gradient_evaluations", "forward_evaluations", "local_iterations"),
        *COSTS,
    }


def test_without_a_ledger_all_else_is_the_same(whole, tmp_path):
    train_toy(tmp_path, {"A": CASE._replace(ledger=None)})
    expected = [
        {name: value for name, value in line.items() if name.removeprefix("total_") not in COSTS}
        for line in read_run(whole[0]).read_metrics()
    ]
    assert read_run(tmp_path).read_metrics() == expected


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.quick_cases(1)
def test_a_spent_budget_of_it_ends_a_lane_at_the_end_of_the_chunk(whole, tmp_path, cost):
    """In round 14, behind round 10 by a chunk, where it is reached in round 11; resumed it stays ended."""
    least = 1.1 * next(line for line in read_run(whole[0]).read_metrics() if line["round"] == 10)[f"total_{cost}"]
    cases = {"A": CASE._replace(budgets={cost: least}, seeds=(0,))}
    summary = train_toy(tmp_path, cases)
    row = summary["cases"]["A"]
    assert (row["status"], row["rounds_per_seed"]) == (["budget_spent"], [14])
    assert row["reason"][0].startswith(f"{cost} reached")
    assert row["costs"][cost]["per_seed"][0] >= least
    assert lasting(train_toy(tmp_path, cases, resume=True)) == lasting(summary)


def test_another_ledger_is_refused_on_resume(whole):
    gradient = TOY_LEDGER.gradient._replace(simulated_seconds=np.array([0.3, 0.1, 0.7, 0.2]))
    changes = {"gradient.simulated_seconds": {"gradient": gradient}, "transmit_watts": {"transmit_watts": 0.8}}
    for name, change in changes.items():
        with pytest.raises(ArgumentError, match=f"^cases.A.ledger.{name}: must be as in the run"):
            train_toy(whole[0], {"A": CASE._replace(ledger=TOY_LEDGER._replace(**change))}, resume=True)
