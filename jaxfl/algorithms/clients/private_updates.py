"""Client-level privacy: clipped updates of clients that take part at random, and noise at the server.

Client i takes part in a round with probability q, independently of the others. Its update Delta_i counts with

    Delta_i min(1, S / |Delta_i|_2),    and the server releases (1 / E) (sum over those that take part + z),

where z is Gaussian noise of standard deviation `noise.noise_scale` on every coordinate, and E is a public constant:
how many clients are expected to count. One client moves the sum by at most S. All releases of the server follow from
these sums: rounds of the Poisson-sampled Gaussian mechanism with noise multiplier noise_scale / S
(`jaxfl.privacy.clients` states its epsilon).

Where pairs of clients share noise (`jaxfl.shared_gaussian`), all n clients take part in every round, and each adds its
noise to its clipped update before the server sees it. Shared parts cancel in the sum, so that z is the sum of the own
parts. Against a server that sees every update a client has the effective noise `noise.noise_scale`.

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018,
arXiv:1710.06963, Algorithm 1 with the estimator of fixed denominator, uniform weights.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.core import ArgumentError, Array, Key, Purpose, PyTree, Task, check, purpose_key
from jaxfl.core.info import Count, Discarded
from jaxfl.core.tree import along_nodes, copied, norm
from jaxfl.gradients import poisson
from jaxfl.gradients.microbatches import in_blocks
from jaxfl.gradients.per_example import clip_scale
from jaxfl.privacy.mechanisms import NoiseMechanism, gaussian, require_float_noise

DISCARDED_UPDATES = "discarded_updates"
"""Count of clients whose update was not finite, and counted as zero."""


class Participants(NamedTuple):
    """The clients that take part in one round, in c slots."""

    active: Array  # (c,), int32, different clients, ascending; any client in an empty slot
    is_active: Array | None  # (c,), bool, False for an empty slot; None where there is none
    overflow: Array | None  # (), int32, 1 if more clients were drawn than there are slots, which is an error


class ClippedSum(NamedTuple):
    """The sum of a round's clipped updates."""

    total: PyTree  # leaves (*leaf)
    counts: dict[str, Count]  # (c,), int32: 1 for an update that was scaled down, or not finite and counts as zero


class PrivateUpdates(NamedTuple):
    """Rule for clipping and releasing the updates of clients, made by `private_updates`."""

    clip_norm: float | Array  # S
    noise: NoiseMechanism  # on the sum; of pairs of clients: of one client, the effective one
    num_rounds: int  # of the run; the slots must suffice in all of them

    def check(self, task: Task, clients: LocalSteps) -> None:
        """Refuse tasks and clients whose data clipped updates would not protect."""
        # Dropout alone has a model state without arrays.
        if task.init_state is not None and jax.tree.leaves(jax.eval_shape(task.init_state)):
            found, remedy = "got a task with batch statistics", "Use group normalization."
            raise ArgumentError("task", "must keep no model state where updates are private", found, remedy)
        if clients.weighting != "uniform":
            requirement = "must weigh all clients equally where updates are private"
            found = "got local steps with weighting 'data'"
            raise ArgumentError("clients", requirement, found, "Pass weighting='uniform' to local_steps.")

    def check_participation(self, num_active: int, num_nodes: int) -> None:
        """Refuse rounds of some clients where pairs share noise: who takes part would show, and parts not cancel."""
        if self.noise.secrets is not None and not num_active == num_nodes == self.noise.secrets.num_nodes:
            requirement = f"must be all of {self.noise.secrets.num_nodes} clients, as the key graph of their noise"
            found = f"got {num_active} of {num_nodes}"
            raise ArgumentError("num_active", requirement, found, "Pass all, or jaxfl.gaussian for the server's noise.")

    def draw(self, key: Key, round_index: Array, num_active: int, num_nodes: int) -> Participants:
        """Draw each client independently, `num_active` of them expected; all of them where that is their number."""
        self.check_participation(num_active, num_nodes)
        if num_active == num_nodes:
            everybody = jnp.arange(num_nodes, dtype=jnp.int32)
            return Participants(everybody, jnp.ones(num_nodes, bool), jnp.int32(0))
        sampler = poisson(num_active, num_draws=self.num_rounds)
        participation_key = purpose_key(key, Purpose.PARTICIPATION, round_index)
        active, is_active, overflow = sampler.draw_node(participation_key, jnp.int32(num_nodes))
        slots = min(sampler.capacity, num_nodes)  # no more than all clients can be drawn
        return Participants(active[:slots], is_active[:slots], overflow if slots == sampler.capacity else jnp.int32(0))

    def draw_noise(self, key: Key, round_index: Array, params: PyTree) -> PyTree:
        """The noise of one round, like the parameters."""
        one = jax.tree.map(lambda leaf: leaf[None], params)
        of_sum = self.noise
        if of_sum.parts is not None:  # shared parts cancel
            of_sum = gaussian(float(np.linalg.norm(of_sum.parts[0])) * of_sum.noise_scale)
        noise = of_sum.draw(purpose_key(key, Purpose.SERVER_NOISE, round_index), one)
        return jax.tree.map(lambda leaf: leaf[0], noise)

    def sum(self, updates: PyTree, is_active: Array) -> ClippedSum:
        """The sum over the clients that take part.

        Args:
            updates: leaves (c, *leaf).
            is_active: (c,), bool.
        """
        norms = norm(updates)
        is_valid = is_active & jnp.isfinite(norms)
        scale = clip_scale(norms, self.clip_norm)

        def total(leaves, weights):
            return jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, axes=1, precision="highest"), leaves), ()

        # A product with 0 would keep NaN and infinity.
        clean = jax.tree.map(lambda leaf: jnp.where(along_nodes(is_valid, leaf), leaf, 0.0), updates)
        return ClippedSum(
            total=in_blocks(total, clean, jnp.where(is_valid, scale, 0.0))[0],
            counts={
                "clipped_updates": (is_valid & (scale < 1)).astype(jnp.int32),
                DISCARDED_UPDATES: Discarded((is_active & ~is_valid).astype(jnp.int32)),
            },
        )


def private_updates(*, clip_norm: float | Array, noise: NoiseMechanism, num_rounds: int = 10**6) -> PrivateUpdates:
    """Clipped updates of clients drawn independently, and noise on their sum: for `jaxfl.uplink`.

    Args:
        clip_norm: S, bound on the L2 norm of a client's update, positive; may be traced.
        noise: on the sum of clipped updates, of one scale: `jaxfl.gaussian(z * clip_norm)` for noise multiplier z,
            which the server adds. `jaxfl.shared_gaussian(z * clip_norm, ...)` is noise of the clients: all of them
            take part in each round, and the server may see every update.
        num_rounds: rounds of the run; the slots for active clients suffice in all of them, as `poisson` says.

    Raises:
        ArgumentError: a number out of range, or noise of several scales or on a grid.

    Guarantees:
        - adding or removing one client changes the sum by at most clip_norm.
        - each client takes part independently with probability num_active / n.
        - an update that is not finite counts as zero.
    """
    check.clip_norm(clip_norm=clip_norm)
    check.at_least(1, num_rounds=num_rounds)
    missing = "how far one client moves the sums of updates that all rounds round to a grid"
    require_float_noise(missing, noise=noise.distribution)
    if jnp.ndim(noise.noise_scale) > 0:
        found = f"got shape {jnp.shape(noise.noise_scale)}"
        raise ArgumentError("noise", "must have one scale", found, "Pass a single number.")
    return PrivateUpdates(copied(clip_norm), noise, num_rounds)
