"""Gossip over perturbed and quantised states: the comparison's lines, the noise and what is refused."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from problems import small_task, uneven_data
from reference.perturbed_gossip import perturbed_gossip as reference_perturbed_gossip
from reference.perturbed_gossip import round_ternary, round_uniform
from reference.runs import (
    by_node,
    check_info,
    each,
    entries,
    one_by_one,
    plain_gradients,
    relative_error,
    stacked,
)

from jaxfl import ArgumentError, graphs
from jaxfl.algorithms.perturbed_gossip import perturbed_gossip
from jaxfl.channel import ternary_quantizer, uniform_quantizer
from jaxfl.privacy.tracking import TrackingSchedule

KEY = jax.random.key(6)
NODES, ROUNDS, NUM_PARAMETERS = 5, 40, 53
ALPHA, GAMMA = 0.3, 0.1


def bull():
    """A triangle with two horns: degrees 2, 3, 3, 1, 1. Its weights are doubly stochastic and not symmetric, so that a
    transposed matrix would show."""
    symmetric = graphs.from_networkx(nx.bull_graph(), weights="metropolis").mixing_matrix(0)
    around = np.zeros((NODES, NODES))
    around[[0, 1, 2], [1, 2, 0]] = 0.2
    return graphs.from_matrix(symmetric + around - around.T)


def schedule(num_iterations, state_noise_scale: Any = None):
    """Constant steps, three samples a gradient; unless given, noise that differs over nodes and iterations."""
    varied = 0.01 * np.arange(1.0, NODES + 1)[:, None] * (1 + np.arange(num_iterations + 1) % 3)
    return TrackingSchedule(
        state_mixing=ALPHA,
        tracker_mixing=math.nan,  # not read
        step_size=GAMMA,
        num_samples=3,
        state_noise_scale=varied if state_noise_scale is None else state_noise_scale,
        tracker_noise_scale=np.empty(0),  # not read
    )


class Case(NamedTuple):
    """One method of the comparison; its run ends where its schedule does."""

    arguments: dict
    clip_norm: float
    quantize: Any  # of the reference
    bits: float


CASES = {
    "perturbed and quantised": Case(
        {
            "schedule": schedule(ROUNDS),
            "distribution": "gaussian",
            "quantizer": uniform_quantizer(0.05, levels=16),
            "gradient_at": "broadcast",
        },
        1.8,
        functools.partial(round_uniform, step=0.05, levels=16),
        4,
    ),
    "perturbed states": Case({"schedule": schedule(ROUNDS - 1)}, 8.0, None, 32),
    "ternary": Case(
        {"schedule": schedule(ROUNDS - 1, np.zeros(ROUNDS)), "quantizer": ternary_quantizer(1.5)},
        8.0,
        functools.partial(round_ternary, threshold=1.5),
        math.log2(3),
    ),
}


@functools.cache
def engine_run(name):
    """(algorithm, its run, the draws of `init`)."""
    case, data = CASES[name], uneven_data()
    algorithm = perturbed_gossip(small_task(), graph=bull(), clip_norm=case.clip_norm, **case.arguments)
    done = one_by_one(algorithm, KEY, data, ROUNDS)
    # `init` perturbs with the numbers that a round -1 would draw.
    return algorithm, done, jax.jit(algorithm.draw)(KEY, done.states[0]._replace(round_index=jnp.int32(-1)), data)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick_cases(1)
def test_follows_the_lines(name):
    """x and broadcast x within 1e-5 after 40 rounds, and the last round's measurements."""
    (algorithm, done, first), case, data = engine_run(name), CASES[name], uneven_data()
    references = plain_gradients(data, 3, case.clip_norm, 2 if "distribution" in case.arguments else 1)

    def perturbation(draws):
        return each(draws.state_noise), [None] * NODES if draws.rounding is None else each(draws.rounding)

    # A schedule that ends one round earlier leaves the last x without a perturbation.
    last, ends_before = done.states[-1], "gradient_at" not in case.arguments
    x, x_sent = reference_perturbed_gossip(
        each(done.states[0].params),
        bull().mixing_matrix(0),
        references,
        (ALPHA, GAMMA),
        perturbation(first),
        [(entries(draws.gradient), *perturbation(draws)) for draws in done.draws],
        case.quantize,
        case.arguments.get("gradient_at", "state"),
    )
    assert relative_error(last.params, x) < 1e-5
    assert ends_before or relative_error(last.broadcast_params, x_sent) < 1e-5
    returned = stacked(x if ends_before else x_sent)
    np.testing.assert_allclose(by_node(algorithm.node_params(last)), returned, rtol=1e-4, atol=1e-5)
    assert np.isnan(by_node(last.broadcast_params)).all() == ends_before, "noise is NaN behind the schedule's end"

    info = done.infos[-1]
    check_info(info, references)
    np.testing.assert_array_equal(info.gradient_evaluations, [3] * NODES)
    np.testing.assert_allclose(info.bits_sent, np.array([2, 3, 3, 1, 1]) * case.bits * NUM_PARAMETERS, rtol=1e-6)
    np.testing.assert_array_equal(info.bits_received, info.bits_sent)
    assert 0 < np.mean([i.clipped_fraction for i in done.infos]) < 1, "clipping must matter, and not everywhere"

    beyond = []  # numbers of x + zeta beyond the 16 levels or the threshold, of each node
    lowest, highest = {4: (-0.4, 0.35), 32: (-math.inf, math.inf)}.get(int(case.bits), (-1.5, 1.5))
    for draws, after, one in zip(done.draws[:-1], done.states[1:-1], done.infos[:-1], strict=True):
        noisy = by_node(jax.tree.map(jnp.add, after.params, draws.state_noise))
        beyond.append(((noisy > highest) | (noisy < lowest)).sum(axis=1))
        np.testing.assert_array_equal(one.counts.get("quantizer_overflow", np.zeros(NODES)), beyond[-1])
        assert ("quantizer_overflow" in one.counts) == (case.quantize is not None)
    assert np.any(beyond) == (case.quantize is not None)


def test_refuses_a_mixing_weight_of_each_node():
    numbers = schedule(4)._replace(state_mixing=np.ones(5))
    with pytest.raises(ArgumentError, match=r"^state_mixing: must be a single number"):
        perturbed_gossip(small_task(), graph=bull(), schedule=numbers, clip_norm=1.0)
