"""Claim, run and observation of each method: one row of METHODS per method.

Gossip: an observer of all messages learns every node's noisy gradient of every round. From the states of A(DP)2SGD it
learns the network's sum alone.

ALI-DPFL: clients send their models after tau local iterations, and the states hold the aggregate alone. Seen through
the aggregate, a client's gradients would have the noise of all clients over them, as those of A(DP)2SGD have. So the
run has a single client: the aggregate is then its own model, under no more noise than is claimed. A message reveals
the sum of tau noisy gradients. The claim counts local iterations and not rounds, and so do the checks. It covers the
estimates of the rule's constants too, which have noise; the audit does not look at them. kappa is so large that the
next tau follows from the budget alone.

DP-FedAvg: canaries are whole clients, and the observer sees the server's releases. See `jaxfl.privacy.client_audit`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

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
from jaxfl.privacy import clients, gossip
from jaxfl.privacy.audit import Canaries, with_canaries
from jaxfl.privacy.client_audit import with_client_canaries

from .options import Configuration

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


class Method(NamedTuple):
    """One method.

    Attributes:
        claimed: configuration -> (noise standard deviation of one release, statement), calibrated to the target.
        learner: (configuration, task, noise standard deviation) -> `Learner`.
        add_canaries: (configuration, task, data) -> the two with canaries.
        releases_total: a release is the sum over nodes, with the noise of all.
        stored: a gradient table shows a sample in every release.
    """

    claimed: Callable[[Configuration], tuple[float, privacy.Statement]]
    learner: Callable[[Configuration, Task, float], Learner]
    add_canaries: Callable[[Configuration, Task, FederatedData], WithCanaries]
    releases_total: bool = False
    stored: bool = False


def _among_samples(
    config: Configuration, task: Task, data: FederatedData, *, shared_coordinates: bool = True
) -> WithCanaries:
    """Canaries that are samples: each has a coordinate of its own, at its node or in the whole network."""
    strength = config.data.canary_strength * config.learning.clip_norm
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
    accountant: privacy.Accountant,
    estimator: str,
    constructor: Callable[..., Algorithm],
    released: Callable[..., PyTree],
    topology: Callable[[int], Any],
    *,
    releases_total: bool = False,
) -> Method:
    """An algorithm whose messages reveal noisy gradients."""
    table = {"table": "factored"} if estimator == "saga" else {}

    def claimed(config):
        rounds, nodes = config.learning.iterations, config.data.nodes
        release = privacy.Release(
            estimator=estimator,
            sampler="poisson",
            batch_size=config.claimed_batch_size,
            num_entries=config.entries,
            clip_norm=config.learning.clip_norm,
            noise_std=0.0,
        )
        target, dp_delta = config.claim.target_epsilon, config.claim.dp_delta
        noise_std = gossip.calibrate_noise_std(
            accountant, "proven", release, rounds, target_epsilon=target, dp_delta=dp_delta, num_nodes=nodes
        )
        releases = [release._replace(noise_std=noise_std)] * nodes
        stated = gossip.statements(accountant, releases, rounds, dp_delta=dp_delta)
        (claim,) = (s for s in stated if s.bound == "proven" and s.neighboring_relation != "replace_one")
        return noise_std, claim

    def learner(config, task, noise_std):
        graph, step_size = topology(config.data.nodes), config.learning.step_size
        sampler = gradients.poisson(config.batch_size, num_draws=config.data.nodes * config.rounds)
        gradient = getattr(gradients, estimator)(sampler=sampler, clip_norm=config.used_clip_norm, **table)
        noise = privacy.gaussian(noise_std)
        algorithm = constructor(task, graph=graph, step_size=step_size, gradient=gradient, noise=noise)
        return Learner(algorithm, functools.partial(released, graph, step_size), config.rounds)

    add_canaries = functools.partial(_among_samples, shared_coordinates=not releases_total)
    return Method(claimed, learner, add_canaries, releases_total, stored=bool(table))


def _ali_rounds(iterations: int) -> int:
    """Rounds that spend a budget of iterations."""
    return 1 + math.ceil(iterations / _ITERATIONS_A_ROUND)


def _ali_claimed(config: Configuration) -> tuple[float, privacy.Statement]:
    """Claim for all local iterations and estimates that the budget allows."""
    iterations, learning, claim = config.learning.iterations, config.learning, config.claim
    release = clients.ClientRelease(
        sampler="poisson",
        num_samples=config.entries,
        batch_size=config.claimed_batch_size,
        clip_norm=learning.clip_norm,
        noise_multiplier=0.0,
        estimates="private",
        estimate_batch_size=_CONSTANTS_BATCH,
        estimate_noise_multiplier=_CONSTANTS_NOISE,
    )
    counts = (iterations, _ali_rounds(iterations))
    multiplier = clients.calibrate_noise_multiplier(
        [release], *counts, target_epsilon=claim.target_epsilon, bound="proven", dp_delta=claim.dp_delta
    )
    statements = clients.statements([release._replace(noise_multiplier=multiplier)], *counts, dp_delta=claim.dp_delta)
    (proven,) = (s for s in statements if s.bound == "proven" and s.neighboring_relation == "zero_out")
    return multiplier * learning.clip_norm / release.batch_size, proven


def _ali_learner(config: Configuration, task: Task, noise_std: float) -> Learner:
    """One client, whose aggregate is its message."""
    step_size, num_rounds = config.learning.step_size, _ali_rounds(config.rounds)
    steps = jaxfl.local_steps(
        config.rounds,
        batch_size=config.batch_size,
        optimizer=optax.sgd(step_size),
        sampler=functools.partial(gradients.poisson, num_draws=config.rounds),
        clip_norm=config.used_clip_norm,
        noise=privacy.gaussian(noise_std),
    )
    bounds = {"clip_norm": config.learning.clip_norm, "loss_bound": 1.0, "noise_multiplier": _CONSTANTS_NOISE}
    algorithm = ali_dpfl(
        task,
        clients=steps,
        constants=jaxfl.private_constants(_CONSTANTS_BATCH, **bounds),
        step_size=step_size,
        max_rounds=num_rounds,
        max_iterations=config.rounds,
        kappa=_KAPPA,
    )
    released = functools.partial(released_gradients, step_size)
    return Learner(algorithm, released, num_rounds, lambda before, after: after.iterations - before.iterations)


def _fed_avg_claimed(config: Configuration) -> tuple[float, privacy.Statement]:
    """Claim for whole clients; the noise is on the released mean."""
    rounds, clip_norm, claim = config.learning.iterations, config.learning.clip_norm, config.claim
    expected, dp_delta = config.claimed_batch_size, config.claim.dp_delta
    rate = expected / config.entries
    multiplier = clients.client_noise_multiplier(
        claim.target_epsilon, rounds, participation_rate=rate, dp_delta=dp_delta
    )
    release = clients.UpdateRelease("poisson", rate, clip_norm, multiplier)
    (proven,) = clients.client_level_statements(release, rounds, num_clients=config.entries, dp_delta=dp_delta)
    return multiplier * clip_norm / expected, proven


def _fed_avg_learner(config: Configuration, task: Task, noise_std: float) -> Learner:
    """Clients that each take part independently, with clipped updates."""
    steps = jaxfl.local_steps(
        _LOCAL_STEPS,
        batch_size=_LOCAL_BATCH,
        optimizer=optax.sgd(config.learning.step_size),
        weighting="uniform",
    )
    clip_norm = _NO_CLIPPING if config.used_clip_norm is None else config.used_clip_norm
    of_sum = privacy.gaussian(noise_std * config.batch_size)
    updates = jaxfl.private_updates(clip_norm=clip_norm, noise=of_sum, num_rounds=config.rounds)
    algorithm = fed_avg(task, clients=steps, num_active=config.batch_size, uplink=jaxfl.uplink(updates=updates))
    return Learner(algorithm, released_updates, config.rounds)


METHODS = {
    "PrivSGP": _gossip(privacy.PRIVSGP, "mini_batch", push_sum, released_by_push_sum, graphs.directed_ring),
    "PrivSGP-VR": _gossip(privacy.PRIVSGP_VR, "saga", push_sum, released_by_push_sum, graphs.directed_ring),
    "DP2-SGD": _gossip(privacy.DP2_SGD, "mini_batch", dp2_sgd, released_by_d_psgd, graphs.ring),
    "A(DP)2SGD": _gossip(
        privacy.A_DP2_SGD, "mini_batch", a_dp2_sgd, released_by_a_dp2_sgd, graphs.ring, releases_total=True
    ),
    "ALI-DPFL": Method(_ali_claimed, _ali_learner, _among_samples),
    "DP-FedAvg": Method(_fed_avg_claimed, _fed_avg_learner, _as_clients),
}
