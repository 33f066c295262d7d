"""An audit of private gradient tracking: forced transcripts give its sensitivities, draws give its noise.

Two data sets that differ in one sample run on one transcript: x~_k and y~_k are chosen, and the noise is what leads
there from each run's own x_k and y_k. This takes the algorithm's own `update`. The changed sample has opposite
gradients in the two data sets, of a norm above the clip norm. They depend on k, which the transcript's first coordinate
tells the loss, in the way that is worst:

- Laplace noise: a coordinate of its own in each round. Where the transcript lies outside both runs, the log density
  ratio is sum_k |x_k - x'_k|_1 / b_x,k + |y_k - y'_k|_1 / b_y,k. Such transcripts have a positive density, so no pure
  epsilon can be smaller;
- Gaussian noise: the directions of `worst_changes`, which depend on k alone. The run is then N(mu, 1) against N(0, 1),
  with mu^2 the sum of squared shifts, so no epsilon at delta can be smaller.

The noise in both is measured: what `draw` and `init` add, over what is claimed. |Laplace| / b is exponential, and twice
the sum of N such numbers is chi-square with 2 N degrees; (Gaussian / s)^2 is chi-square with 1. The bound takes the
noise at its upper confidence limits.

Does not claim: anything on batches (every batch here holds every sample) or on what others learn from timing or losses.
The noise is assumed to have the distribution that is named; independence over rounds is not tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import Algorithm, Array, FederatedData, Task, check
from jaxfl.core.tasks import from_functions
from jaxfl.privacy import dominating_pairs
from jaxfl.privacy.audit_mechanism import Check, noise_check
from jaxfl.privacy.tracking.joint_bound import gram_rows, worst_changes
from jaxfl.privacy.tracking.schedules import TrackingSchedule
from jaxfl.privacy.tracking.sensitivities import TrackingAgent, noise_scales

_ROUNDING = 1e-4  # relative, of sensitivities that float32 runs show


class ForcedAudit(NamedTuple):
    """Findings on one run from forced transcripts and from draws."""

    dp_epsilon_lower_bound: float
    dp_delta: float  # 0 for Laplace noise
    significance: float  # probability that the bound exceeds the true epsilon, at most
    checks: tuple[Check, ...]


def forced_audit(
    build: Callable[[Task, TrackingSchedule], Algorithm],
    schedule: TrackingSchedule,
    num_rounds: int,
    claimed: TrackingSchedule,
    claimed_rounds: int,
    agent: TrackingAgent,
    keys: Array,
    *,
    node: int,
    num_nodes: int,
    dp_epsilon: float,
    dp_delta: float = 0.0,
    distribution: str = "laplace",
    strength: float,
    significance: float = 0.05,
) -> ForcedAudit:
    """Force transcripts, measure noise, and hold both against what is claimed.

    Args:
        build: (task, schedule) -> the algorithm that is run, with gradients at the broadcast state.
        schedule: of the run; noise scales (K + 1,).
        num_rounds: that are run, at most K of it.
        claimed, claimed_rounds: what the accountant was told; noise scales (K + 1,).
        agent: node's weights and the claimed C.
        keys: (r,), typed, base keys of r runs whose noise is measured.
        node: whose sample is changed.
        num_nodes: n.
        dp_epsilon: that is claimed under replace_one.
        dp_delta: of the claim; 0 for Laplace noise.
        distribution: "laplace" or "gaussian".
        strength: norm of the changed sample's gradient before clipping; take more than the clip norm.
        significance: in (0, 1), probability that a right run is refused, at most.

    Returns:
        The bound and the checks: releases, noise of states, noise of trackers, sensitivity, epsilon.

    Raises:
        ArgumentError: a number out of range.

    Guarantees:
        - a right run is refused with probability at most significance.
        - with Laplace noise the sensitivity of a right run is all that is claimed, so that a claim a few percent too
          low is refused.
    """
    check.at_least(1, num_rounds=num_rounds, claimed_rounds=claimed_rounds)
    check.at_least(0, node=node)
    check.one_of(("laplace", "gaussian"), distribution=distribution)
    check.positive(strength=strength, dp_epsilon=dp_epsilon)
    check.open_unit(significance=significance)
    if distribution == "gaussian":
        check.open_unit(dp_delta=dp_delta)
    pattern = _pattern(schedule, agent, num_rounds, distribution)
    task = _task(pattern, strength)
    moves = _moves(build(task, _silent(schedule)), schedule.num_samples, len(pattern), node, num_nodes, distribution)
    scales = [_cut(scale, num_rounds + (i == 0)) for i, scale in enumerate(noise_scales(_extended(claimed, schedule)))]
    noise = _noise(build(task, schedule), schedule.num_samples, num_rounds, num_nodes, keys)
    names = ("noise of states", "noise of trackers")
    found = [
        _of_noise(name, drawn / scale[:, None], distribution, significance / 2)
        for name, drawn, scale in zip(names, noise, scales, strict=True)
    ]

    def cost(*ratios: float) -> float:
        """epsilon on the transcript, with the claimed noise times these ratios."""
        shifts = [m / (s * r) for m, s, r in zip(moves, scales, ratios, strict=True)]
        if distribution == "laplace":
            return float(sum(shift.sum() for shift in shifts))
        mu = math.sqrt(sum(float(np.square(shift).sum()) for shift in shifts))
        return dominating_pairs.gaussian_epsilon(mu, dp_delta)

    reached, bound = cost(1.0, 1.0), cost(*(c.largest for c in found))
    of_right_run = cost(*(c.smallest_error for c in found))  # noise at a limit that it stays below with probability .95
    sensitivity = Check(
        "sensitivity",
        reached,
        dp_epsilon,
        reached,
        reached > (1 + _ROUNDING) * dp_epsilon,
        max(1.0, (1 + _ROUNDING) * dp_epsilon / reached),
    )
    last = Check("epsilon", reached, dp_epsilon, bound, bound > dp_epsilon, max(1.0, dp_epsilon / of_right_run))
    counted = Check(
        "releases",
        num_rounds,
        claimed_rounds,
        num_rounds,
        num_rounds > claimed_rounds,
        (claimed_rounds + 1) / claimed_rounds,
    )
    return ForcedAudit(bound, dp_delta, significance, (counted, *found, sensitivity, last))


def _pattern(schedule: TrackingSchedule, agent: TrackingAgent, num_rounds: int, distribution: str) -> np.ndarray:
    """(R + 1, c): the direction of the changed gradient g_k of each round, of norm 1."""
    if distribution == "laplace":
        return np.eye(num_rounds + 1)
    states, trackers = (_cut(scale, num_rounds + 1) for scale in noise_scales(schedule))
    sent = schedule._replace(state_noise_scale=states, tracker_noise_scale=np.append(trackers[:-1], np.inf))
    gram = np.zeros((num_rounds + 1, num_rounds + 1))
    for index, row in zip(reversed(range(num_rounds + 1)), gram_rows(sent, agent), strict=True):
        gram[index, : index + 1] = gram[: index + 1, index] = row
    return worst_changes(gram)


def _task(pattern: np.ndarray, strength: float) -> Task:
    """Gradient y strength pattern[k] in all coordinates but the first, which holds k."""
    table = jnp.asarray(pattern, jnp.float32)

    def loss(params, inputs, labels):
        k = jnp.clip(jnp.round(jax.lax.stop_gradient(params[0])).astype(jnp.int32), 0, len(pattern) - 1)
        return labels * jnp.float32(strength) * (table[k] @ params[1:])

    return from_functions(lambda key: jnp.zeros(1 + pattern.shape[1], jnp.float32), loss)


def _data(num_samples: int, num_nodes: int, node: int, label: float | Array) -> FederatedData:
    """m samples a node, of gradient 0 but for the first of `node`."""
    count = num_samples * num_nodes
    labels = jnp.zeros(count, jnp.float32).at[node * num_samples].set(label)
    indices = np.arange(count, dtype=np.int32).reshape(num_nodes, num_samples)
    sizes = np.full(num_nodes, num_samples, np.int32)
    return FederatedData(jnp.zeros((count, 1)), labels, jnp.asarray(indices), jnp.asarray(sizes))


def _moves(
    algorithm: Algorithm, num_samples: int, length: int, node: int, num_nodes: int, distribution: str
) -> list[np.ndarray]:
    """Norms of the changes of node's x_0, ..., x_R and y_0, ..., y_{R-1} on one transcript."""
    key = jax.random.key(0)  # draws nothing that counts: batches hold all samples, and the noise is replaced

    def path(label):
        data = _data(num_samples, num_nodes, node, label)

        def body(state, k):
            target = jnp.zeros_like(state.params).at[:, 0].set(k)
            draws = algorithm.draw(key, state, data)._replace(tracker_noise=-state.gradient_tracker)
            unperturbed, _ = algorithm.update(state, data, draws)
            # x is the same for every noise on it; with this one x~ is what was chosen.
            after, _ = algorithm.update(state, data, draws._replace(state_noise=target - unperturbed.params))
            return after, (after.params, state.gradient_tracker)

        start = algorithm.init(key, data)
        _, (params, trackers) = jax.lax.scan(body, start, jnp.arange(1, length, dtype=jnp.float32))
        return jnp.concatenate([start.params[None], params]), trackers

    order, follow = 1 if distribution == "laplace" else 2, jax.jit(path)
    both = [[np.asarray(part, np.float64)[:, node] for part in follow(jnp.float32(y))] for y in (1, -1)]
    return [np.linalg.norm(one - other, ord=order, axis=-1) for one, other in zip(*both, strict=True)]


def _noise(algorithm: Algorithm, num_samples: int, num_rounds: int, num_nodes: int, keys: Array) -> list[np.ndarray]:
    """Noise of x~_0, ..., x~_R and y~_0, ..., y~_{R-1}, (R + 1, count) and (R, count)."""
    data = _data(num_samples, num_nodes, 0, 0.0)

    def of_key(key):
        start = algorithm.init(key, data)
        rounds = jax.vmap(lambda k: _two(algorithm.draw(key, start._replace(round_index=k), data)))
        states, trackers = rounds(jnp.arange(num_rounds, dtype=jnp.int32))
        first = start.broadcast_params - start.params
        return jnp.concatenate([first[None], states]), trackers

    drawn = jax.jit(jax.vmap(of_key, out_axes=1))(keys)
    return [np.asarray(part, np.float64).reshape(len(part), -1) for part in drawn]


def _two(draws: Any) -> tuple[Array, Array]:
    return draws.state_noise, draws.tracker_noise


def _of_noise(name: str, noise: np.ndarray, distribution: str, significance: float) -> Check:
    """Measured over claimed, of noise in units of what is claimed."""
    if distribution == "gaussian":
        return noise_check(name, float(np.square(noise).sum()), noise.size, 1.0, significance)
    found = noise_check(name, 2 * float(np.abs(noise).sum()), 2 * noise.size, 1.0, significance)
    squared = {field: getattr(found, field) ** 2 for field in ("measured", "limit", "smallest_error", "largest")}
    return found._replace(**squared)


def _silent(schedule: TrackingSchedule) -> TrackingSchedule:
    """The same without noise."""
    silent = np.zeros_like(np.asarray(schedule.state_noise_scale, float))
    return schedule._replace(state_noise_scale=silent, tracker_noise_scale=silent)


def _extended(claimed: TrackingSchedule, run: TrackingSchedule) -> TrackingSchedule:
    """The claimed scales, the last one repeated where the run is longer."""
    missing = max(0, len(run.state_noise_scale) - len(claimed.state_noise_scale))
    states, trackers = (np.pad(np.asarray(scale, float), (0, missing), mode="edge") for scale in noise_scales(claimed))
    return claimed._replace(state_noise_scale=states, tracker_noise_scale=trackers)


def _cut(scale: np.ndarray, count: int) -> np.ndarray:
    """The first ones."""
    return np.asarray(scale, float)[:count]
