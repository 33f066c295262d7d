"""`train` asks the learner what it releases, where a case has a delta."""

import numpy as np
import pytest
from toy_problem import NUM_NODES, TASK, toy_algorithm, toy_case, toy_data, train_toy

import jaxfl
from jaxfl.core import ArgumentError

ROUNDS = 6


def learner(noise_std):
    gradient = jaxfl.mini_batch(3, clip_norm=0.5)
    noise = jaxfl.gaussian(noise_std)
    graph = jaxfl.graphs.ring(NUM_NODES)
    return jaxfl.push_sum(TASK, graph=graph, step_size=0.1, gradient=gradient, noise=noise)


def private(**fields):
    return toy_case(lambda numbers: learner(numbers["noise_std"]), num_rounds=ROUNDS, evaluate_every=3, **fields)


def test_the_statements_of_a_run_are_those_of_the_learner_that_ran(tmp_path):
    cases = {str(noise): private(numbers={"noise_std": noise}, dp_delta=1e-4) for noise in (1.0, 2.5)}
    summary = train_toy(tmp_path, cases, compiled=True)
    for noise in (1.0, 2.5):
        stated = summary["cases"][str(noise)]["privacy"]
        expected = jaxfl.privacy.statements(learner(np.float32(noise)), toy_data()[0], ROUNDS, dp_delta=1e-4)
        assert [row["dp_epsilon"] for row in stated] == [one.dp_epsilon for one in expected]
        assert [row["observer"] for row in stated] == ["all other nodes"] * len(expected)
    first, second = ([row["dp_epsilon"] for row in summary["cases"][str(noise)]["privacy"]] for noise in (1.0, 2.5))
    assert all(one > other for one, other in zip(first, second, strict=True) if one is not None)
    assert any(one is not None for one in first)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (toy_case(toy_algorithm(TASK), dp_delta=1e-5), "learner: must be an algorithm that says what it releases"),
        (private(numbers={"noise_std": 1.0}, dp_delta=2.0), "dp_delta: must lie"),
        (private(numbers={"noise_std": 1.0}, dp_delta=1e-5, privacy=lambda rounds: []), "privacy: must be None"),
    ],
)
def test_what_cannot_be_stated_is_refused_before_any_work(tmp_path, case, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        train_toy(tmp_path / "run", {"A": case})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
