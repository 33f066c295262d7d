"""Claim, run and observation of each method: one row of METHODS per method.

Gossip: an observer of all messages learns every node's noisy gradient of every round. Where pairs of nodes share noise
the observer weighs the gradients of all nodes, so that only each node's effective noise is left. From the states of
A(DP)2SGD it learns the network's sum only.

ALI-DPFL: clients send their models after tau local iterations, and the states hold the aggregate only. Seen through
the aggregate, a client's gradients would have the noise of all clients over them, as those of A(DP)2SGD have. So the
run has a single client: the aggregate is then its own model, under no more noise than is claimed. A message reveals
the sum of tau noisy gradients. The claim counts local iterations and not rounds, and so do the checks. It covers the
estimates of the rule's constants too, which have noise; the audit does not look at them. kappa is so large that the
next tau follows from the budget only.

DP-FedAvg: canaries are whole clients, and the observer sees the server's releases. See `jaxfl.privacy.client_audit`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optax

import jaxfl
from jaxfl import gradients, graphs, privacy
from jaxfl.algorithms import ali_dpfl, fed_avg
from jaxfl.algorithms.a_dp2_sgd import a_dp2_sgd
from jaxfl.algorithms.a_dp2_sgd import released_gradients as released_by_a_dp2_sgd
from jaxfl.algorithms.ali_dpfl import released_gradients
from jaxfl.algorithms.d_psgd import dp2_sgd
from jaxfl.algorithms.d_psgd import released_gradients as released_by_d_psgd
from jaxfl.algorithms.fed_avg import released_updates
from jaxfl.algorithms.push_sum import push_sum
from jaxfl.algorithms.push_sum import released_gradients as released_by_push_sum
from jaxfl.core import Algorithm, Array, FederatedData, PyTree, Task
from jaxfl.privacy.audit import Canaries, with_canaries
from jaxfl.privacy.client_audit import with_client_canaries
from jaxfl.privacy.shared_noise import covariance

from .options import Configuration, Numbers

_LOCAL_STEPS, _LOCAL_BATCH = 2, 8  # of DP-FedAvg's clients; a claim for whole clients does not depend on them
_ITERATIONS_A_ROUND = 3  # of ALI-DPFL, on average, but for the first round, whose tau is 1
_KAPPA = 1e3
_CONSTANTS_BATCH, _CONSTANTS_NOISE = 64, 20.0  # expected samples of ALI-DPFL's estimates, and their noise multiplier
_NO_CLIPPING = 1e18  # private updates always have a clip norm, whose square float32 holds

WithCanaries = tuple[Task, FederatedData, Canaries]


class Learner(NamedTuple):
    """Algorithm that is really run, and what it releases to an observer."""

    algorithm: Algorithm
    released: Callable[[Any, Any], PyTree]  # (state before, after a round) -> what an observer learns, (n, *leaf)
    num_rounds: int
    num_releases: Callable[[Any, Any], Array] | None = None  # number of releases that `released` adds up; None: one
    covariance: np.ndarray | None = None  # over nodes, of noise that pairs share


class Method(NamedTuple):
    """One method.

    Attributes:
        learner: (configuration, task, numbers that are claimed or used, noise standard deviation of one release) ->
            `Learner`.
        add_canaries: (configuration, task, data) -> the two with canaries.
        releases_total: a release is the sum over nodes, with the noise of all.
        stored: a gradient table shows a sample in every release.
    """

    learner: Callable[[Configuration, Task, Numbers, float], Learner]
    add_canaries: Callable[[Configuration, Task, FederatedData], WithCanaries]
    releases_total: bool = False
    stored: bool = False


def claimed(config: Configuration, task: Task, data: FederatedData) -> tuple[float, privacy.Statement]:
    """Claim of a learner without mistakes: the noise of one release, calibrated to the target, and the statement."""
    learner, claim = METHODS[config.learning.method].learner, config.claim

    def account(noise_std: float) -> privacy.Account:
        algorithm = learner(config, task, config.claimed, noise_std).algorithm
        return privacy.account(algorithm, data, dp_delta=claim.dp_delta)

    rounds = learner(config, task, config.claimed, 1.0).num_rounds
    noise_std = account(1.0).calibrate(rounds, claim.target_epsilon)
    return noise_std, next(one for one in account(noise_std).statements(rounds) if one.bound == "proven")


def _among_samples(
    config: Configuration, task: Task, data: FederatedData, *, shared_coordinates: bool = True
) -> WithCanaries:
    """Canaries that are samples: each has a coordinate of its own, at its node or in the whole network."""
    strength = config.data.canary_strength * config.learning.clip_norm
    # An outside observer of shared noise adds up what nodes release.
    shared_coordinates = shared_coordinates and not config.learning.shared_ratio
    options = {"strength": strength, "seed": config.run.seed, "shared_coordinates": shared_coordinates}
    return with_canaries(task, data, config.data.canaries, **options)


def _as_clients(config: Configuration, task: Task, data: FederatedData) -> WithCanaries:
    """Canaries that are clients: their gradients make updates of `canary_strength` clip norms."""
    learning = config.learning
    strength = config.data.canary_strength * learning.clip_norm / (learning.step_size * _LOCAL_STEPS)
    # Each has a coordinate, and each client a model. With 5,000 canaries, all clients at once take 9.3 GB and 14.6 s a
    # round on two processor cores; one after the other 0.8 GB and 0.7 s.
    task = task._replace(node_loop="map")
    return with_client_canaries(task, data, config.data.canaries, strength=strength, seed=config.run.seed)


def _gossip(
    estimator: str,
    constructor: Callable[..., Algorithm],
    released: Callable[..., PyTree],
    topology: Callable[[int], Any],
    *,
    releases_total: bool = False,
) -> Method:
    """An algorithm whose messages reveal noisy gradients."""
    table = {"table": "factored"} if estimator == "saga" else {}

    def learner(config, task, numbers, noise_std):
        graph, step_size = topology(config.data.nodes), config.learning.step_size
        sampler = gradients.poisson(numbers.batch_size, num_draws=config.data.nodes * numbers.rounds)
        gradient = getattr(gradients, estimator)(sampler=sampler, clip_norm=numbers.clip_norm, **table)
        noise = config.learning.noise(config.data.nodes, noise_std)
        algorithm = constructor(task, graph=graph, step_size=step_size, gradient=gradient, noise=noise)
        seen = functools.partial(released, graph, step_size)
        return Learner(algorithm, seen, numbers.rounds, covariance=covariance(noise) if noise_std else None)

    add_canaries = functools.partial(_among_samples, shared_coordinates=not releases_total)
    return Method(learner, add_canaries, releases_total, stored=bool(table))


def _ali_rounds(iterations: int) -> int:
    """Rounds that spend a budget of iterations."""
    return 1 + math.ceil(iterations / _ITERATIONS_A_ROUND)


def _ali_learner(config: Configuration, task: Task, numbers: Numbers, noise_std: float) -> Learner:
    """One client, whose aggregate is its message."""
    step_size, num_rounds = config.learning.step_size, _ali_rounds(numbers.rounds)
    steps = jaxfl.local_steps(
        numbers.rounds,
        batch_size=numbers.batch_size,
        optimizer=optax.sgd(step_size),
        sampler=functools.partial(gradients.poisson, num_draws=numbers.rounds),
        clip_norm=numbers.clip_norm,
        noise=privacy.gaussian(noise_std),
    )
    bounds = {"clip_norm": config.learning.clip_norm, "loss_bound": 1.0, "noise_multiplier": _CONSTANTS_NOISE}
    algorithm = ali_dpfl(
        task,
        clients=steps,
        constants=jaxfl.private_constants(_CONSTANTS_BATCH, **bounds),
        step_size=step_size,
        max_rounds=num_rounds,
        max_iterations=numbers.rounds,
        kappa=_KAPPA,
    )
    released = functools.partial(released_gradients, step_size)
    return Learner(algorithm, released, num_rounds, lambda before, after: after.iterations - before.iterations)


def _fed_avg_learner(config: Configuration, task: Task, numbers: Numbers, noise_std: float) -> Learner:
    """Clients that each take part independently, with clipped updates."""
    steps = jaxfl.local_steps(
        _LOCAL_STEPS,
        batch_size=_LOCAL_BATCH,
        optimizer=optax.sgd(config.learning.step_size),
        weighting="uniform",
    )
    clip_norm = _NO_CLIPPING if numbers.clip_norm is None else numbers.clip_norm
    of_sum = privacy.gaussian(noise_std * numbers.batch_size)
    updates = jaxfl.private_updates(clip_norm=clip_norm, noise=of_sum, num_rounds=numbers.rounds)
    algorithm = fed_avg(task, clients=steps, num_active=numbers.batch_size, uplink=jaxfl.uplink(updates=updates))
    return Learner(algorithm, released_updates, numbers.rounds)


METHODS = {
    "PrivSGP": _gossip("mini_batch", push_sum, released_by_push_sum, graphs.directed_ring),
    "PrivSGP-VR": _gossip("saga", push_sum, released_by_push_sum, graphs.directed_ring),
    "DP2-SGD": _gossip("mini_batch", dp2_sgd, released_by_d_psgd, graphs.ring),
    "A(DP)2SGD": _gossip("mini_batch", a_dp2_sgd, released_by_a_dp2_sgd, graphs.ring, releases_total=True),
    "ALI-DPFL": Method(_ali_learner, _among_samples),
    "DP-FedAvg": Method(_fed_avg_learner, _as_clients),
}
