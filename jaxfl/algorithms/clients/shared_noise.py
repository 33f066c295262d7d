"""Noise that pairs of a round's active clients share in each local step.

Each local step is a round in which nothing is sent, so that the effective noise of `jaxfl.privacy.shared` covers any
number of them, even against a server that sees every update. In the sum over the active clients only the own noise is
left: on a complete key graph with ratio r and m honest of k active clients the average has (1 + r^2) / (1 + m r^2) of
the variance that noise of one's own brings, and a local model (1 + r^2)(1 + (k - 1) r^2) / (1 + m r^2) of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms.clients.steps import NoiseKeys
from jaxfl.core import ArgumentError, Array, Key, Purpose, leaf_key, node_keys, purpose_key
from jaxfl.privacy.mechanisms import NoiseMechanism, gaussian

# States of optimizers whose updates are linear in the gradients. `optax.clip` has one of them and is not.
_LINEAR = frozenset({"EmptyState", "TraceState", "ScaleByScheduleState", "WrappedScheduleState"})


def check_shared(noise: NoiseMechanism, weighting: str, state_types: set[str], max_steps: int) -> None:
    """Refuse shared noise that would not cancel in the server's sum, or not add up; noise of one's own passes."""
    if noise.secrets is None:
        return
    if noise.distribution == "summed_gaussian" and max_steps > 1:
        requirement = (
            "must be 1 where noise counts by its sum: a second gradient is taken at a hidden model, which moves"
            " by more than the small noise of one client"
        )
        raise ArgumentError("max_steps", requirement, f"got {max_steps}", "Pass 1, or jaxfl.shared_gaussian.")
    if noise.parts is None:
        requirement = "must have one scale where clients share it"
        raise ArgumentError("noise", requirement, "got one a client", "Pass one noise_std.")
    if weighting != "uniform":
        requirement = "must be uniform with shared noise: by size it does not cancel in the sum"
        raise ArgumentError("weighting", requirement, f"got {weighting}", "Pass weighting='uniform'.")
    if others := sorted(name for name in state_types - _LINEAR if name.endswith("State")):
        requirement = "must be linear in the gradients with shared noise, which else does not cancel in the sum"
        raise ArgumentError("optimizer", requirement, f"got one with {', '.join(others)}", "Pass optax.sgd.")


def own_part(noise: NoiseMechanism) -> NoiseMechanism:
    """The noise that a client draws by itself."""
    return noise if noise.parts is None else gaussian(jnp.float32(noise.parts[0][0]) * noise.noise_scale)


def noise_keys(noise: NoiseMechanism, key: Key, round_index: Array, own: Array) -> NoiseKeys:
    """Keys of the noise of a round's local steps; `own` are those of the active clients' own noise, (k, tau)."""
    if noise.parts is None:
        return NoiseKeys(own)
    shared, (k, max_steps) = noise.parts[1], own.shape
    if k != len(shared):
        remedy = "Make the key graph over num_active clients."
        raise ArgumentError("num_active", f"must be {len(shared)}, as the key graph", f"got {k}", remedy)
    if not shared.any():  # it counts by its sum
        return NoiseKeys(own)
    of_round = purpose_key(key, Purpose.SHARED_NOISE, round_index, apart=True)
    keys, stds = keys_of_pairs(of_round, shared, max_steps)
    stds = jnp.asarray(stds, jnp.float32) * jnp.asarray(noise.noise_scale, jnp.float32)
    return NoiseKeys(own, pair_keys=keys, pair_stds=jnp.broadcast_to(stds[:, None], keys.shape))


def keys_of_pairs(of_round: Array, shared: np.ndarray, max_steps: int) -> tuple[Array, np.ndarray]:
    """Keys of the noise that pairs of active clients share.

    Args:
        of_round: typed key, ().
        shared: (k, k), symmetric: standard deviation of the noise of a pair; 0 where two share none.
        max_steps: tau.

    Returns:
        (keys (k, tau, p), equal at both clients of a pair; standard deviations (k, p), negative at the later client).
    """
    k, most = len(shared), int((shared > 0).sum(axis=1).max())
    partners = np.argsort(shared == 0, axis=1, kind="stable")[:, :most]
    own = np.arange(k)[:, None]
    numbers = np.minimum(own, partners) * k + np.maximum(own, partners)

    def of_pair(number):
        return node_keys(leaf_key(of_round, number), max_steps)

    keys = jax.vmap(jax.vmap(of_pair, out_axes=1))(jnp.asarray(numbers, jnp.uint32))
    return keys, np.take_along_axis(shared, partners, axis=1) * np.sign(partners - own)
