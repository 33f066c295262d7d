"""Weighted output perturbation: the comparison's lines, and the noise."""

import math
from typing import Any

import jax
import networkx as nx
import numpy as np
from problems import small_task, uneven_data
from reference.output_perturbation import output_perturbation as reference_output_perturbation
from reference.runs import check_info, each, entries, one_by_one, plain_gradients, relative_error

from jaxfl import graphs
from jaxfl.algorithms.output_perturbation import output_perturbation
from jaxfl.privacy.tracking import TrackingSchedule

KEY = jax.random.key(7)
NODES, ROUNDS, CLIP_NORM, GAMMA = 5, 40, 8.0, 0.1


def bull():
    """A triangle with two horns, degrees 2, 3, 3, 1, 1; its weights are not doubly stochastic and must not matter."""
    return graphs.from_networkx(nx.bull_graph())


def schedule(num_iterations, state_noise_scale: Any = None):
    """Constant step, three samples a gradient; unless given, noise that differs over nodes and iterations."""
    varied = 0.01 * np.arange(1.0, NODES + 1)[:, None] * (1 + np.arange(num_iterations + 1) % 3)
    return TrackingSchedule(
        state_mixing=math.nan,  # not read
        tracker_mixing=math.nan,  # not read
        step_size=GAMMA,
        num_samples=3,
        state_noise_scale=varied if state_noise_scale is None else state_noise_scale,
        tracker_noise_scale=np.empty(0),  # not read
    )


def test_follows_the_lines():
    """x within 1e-5 after 40 rounds, and the last round's measurements."""
    data = uneven_data()
    algorithm = output_perturbation(small_task(), graph=bull(), schedule=schedule(ROUNDS - 1), clip_norm=CLIP_NORM)
    done, references = one_by_one(algorithm, KEY, data, ROUNDS), plain_gradients(data, 3, CLIP_NORM, 1)
    rounds = [(entries(draws.gradient), each(draws.state_noise)) for draws in done.draws]
    x0 = each(done.states[0].params)
    x = reference_output_perturbation(x0, bull().adjacency(0), data.sizes, references, GAMMA, rounds)
    assert relative_error(algorithm.node_params(done.states[-1]), x) < 1e-5

    info = done.infos[-1]
    check_info(info, references)
    np.testing.assert_array_equal(info.gradient_evaluations, [3] * NODES)
    np.testing.assert_array_equal(info.bits_sent, np.array([2, 3, 3, 1, 1]) * 32 * 53)
    np.testing.assert_array_equal(info.bits_received, info.bits_sent)
    assert 0 < np.mean([i.clipped_fraction for i in done.infos]) < 1, "clipping must matter, and not everywhere"
