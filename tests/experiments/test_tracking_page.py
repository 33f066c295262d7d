"""Numbers of the gradient tracking page that follow from the algorithm's lines, without a run."""

import re
from pathlib import Path

import numpy as np
import pytest

from jaxfl.graphs.topologies import five_agents, five_agents_self_loops, ring
from jaxfl.privacy.tracking import (
    TrackingAgent,
    cumulative_epsilon,
    paper_schedule,
    proven_sensitivities,
    published_sensitivities,
)

PAGE = Path(__file__).parents[2] / "experiments" / "results" / "dp_gradient_tracking" / "README.md"
AGENTS, ROUNDS, PARAMETERS, CHANGE = 5, 2001, 1066, 40.0


def transitions(schedule, pair):
    """One round of (x, y) without gradients, (10, 10), and the weights of the noise in it, (10, 10)."""
    of_states, of_trackers = schedule.state_mixing * pair.state_weights, schedule.tracker_mixing * pair.tracker_weights
    zero, identity = np.zeros((AGENTS, AGENTS)), np.eye(AGENTS)
    states = identity - np.diag(of_states.sum(axis=1)) + of_states
    trackers = identity - np.diag(of_trackers.sum(axis=0)) + of_trackers
    return (
        np.block([[states, -schedule.step_size * identity], [zero, trackers]]),
        np.block([[of_states, zero], [zero, of_trackers]]),
    )


def spread(schedule, move, inflow, size):
    """Covariance of the agents' x from Laplace noise alone, (5, 5)."""
    scales = np.concatenate([schedule.state_noise_scale, schedule.tracker_noise_scale])[:size]
    covariance = np.zeros((size, size))
    for scale in scales.T:
        covariance = move @ covariance @ move.T + inflow @ np.diag(2 * scale**2) @ inflow.T
    return covariance[:AGENTS, :AGENTS]


def distance(covariance):
    centered = np.eye(AGENTS) - 1 / AGENTS
    return PARAMETERS * np.trace(centered @ covariance @ centered) / AGENTS


def numbers(scheme, weight, pair):
    """Noise, share of own gradients, mean step over gamma, distance from the average, epsilons proven, published."""
    schedule = paper_schedule(scheme, ROUNDS - 1, AGENTS)
    pair = type(pair)(*(weight * one for one in pair))
    move, inflow = transitions(schedule, pair)
    covariance = spread(schedule, move, inflow, 2 * AGENTS)
    state = np.vstack([np.zeros((AGENTS, AGENTS)), np.eye(AGENTS)])  # gradients that never change enter y_0 only
    for _ in range(ROUNDS):
        state = move @ state
    owed = -state[:AGENTS]
    agent = TrackingAgent(CHANGE, pair.state_weights.sum(axis=1), pair.tracker_weights.sum(axis=0))
    epsilons = [
        cumulative_epsilon(schedule, of(schedule, agent)).max()
        for of in (proven_sensitivities, published_sensitivities)
    ]
    step = owed.sum() / (AGENTS * schedule.step_size * ROUNDS)
    share = np.mean(np.diag(owed) / owed.sum(axis=1))
    return np.sqrt(np.mean(np.diag(covariance))), share, step, distance(covariance), *epsilons


def cells(weight):
    """Value for S2 and value for S1, in brackets, of each cell of a row of the page."""
    (row,) = [line for line in PAGE.read_text().splitlines() if re.match(rf"\| {weight:g} \| .*\(", line)]
    pairs = re.findall(r"([\d.,]+) \(([\d.,]+)\)", row)
    return [[float(text.replace(",", "")) for text in texts] for texts in zip(*pairs, strict=True)]


@pytest.mark.parametrize("weight", [1, 0.01])
def test_the_table_of_weights_follows_from_the_algorithm(weight):
    for scheme, stated in zip(("S2", "S1"), cells(weight), strict=True):
        noise, share, step, _, proven, published = numbers(scheme, weight, five_agents())
        np.testing.assert_allclose(stated[:3], [noise, share, step], rtol=0.02)
        for value, true in zip(stated[3:], (proven, published), strict=True):
            assert true <= value < 1.02 * true


def test_distances_from_the_average_follow_from_the_algorithm():
    words = " ".join(PAGE.read_text().split())
    actual = re.search(
        r"of ([\d.]+) \(([\d.]+)\), and ([\d.]+) \(([\d.]+)\) with self-loops"
        r".*noisy-states the lines predict ([\d.]+),",
        words,
    )
    assert actual is not None
    pairs = [(scheme, pair) for pair in (five_agents(), five_agents_self_loops()) for scheme in ("S2", "S1")]
    predicted = [numbers(scheme, 0.01, pair)[3] for scheme, pair in pairs]
    schedule, mixing = paper_schedule("S2", ROUNDS - 1, AGENTS), ring(AGENTS).mixing_matrix(0)
    move = (1 - schedule.state_mixing) * np.eye(AGENTS) + schedule.state_mixing * mixing
    predicted.append(distance(spread(schedule, move, schedule.state_mixing * mixing, AGENTS)))
    np.testing.assert_allclose([float(text) for text in actual.groups()], predicted, rtol=0.01)


def test_the_noise_of_noisy_states_with_less_mixing_follows_from_the_algorithm():
    words, mixing = " ".join(PAGE.read_text().split()), ring(AGENTS).mixing_matrix(0)
    stated = re.search(r"noisy-states has ([\d.]+) at 0.1, ([\d.]+) at 0.017 and ([\d.]+) at 0.003", words)
    assert stated is not None
    for alpha, text in zip((0.1, 0.017, 0.003), stated.groups(), strict=True):
        schedule = paper_schedule("S2", ROUNDS - 1, AGENTS)
        move = (1 - alpha) * np.eye(AGENTS) + alpha * mixing
        noise = np.sqrt(np.mean(np.diag(spread(schedule, move, alpha * mixing, AGENTS))))
        np.testing.assert_allclose(float(text), noise, rtol=0.03)
