"""Clients of a round that are not drawn uniformly: by their numbers of samples, or by their losses. For `jaxfl.uplink`.

By size: one client after the other, without replacement, each with probability J_i over the sum of J_j of those that
are left. Clients then weigh alike in the mean: a size that also was a weight would count twice. For one client a round
the mean of its update is that of all clients, weighted by data. For more, large clients come less often than c p_i.

By loss (power of choice): of d candidates the c with the largest F_i(x), the mean loss of the server's model over all
samples of client i, take part. The mean over them is biased towards clients that fit badly, on purpose.

| symbol | here |
|---|---|
| J_i, p_i | `data.sizes`, their shares |
| c, d | `num_active`, `num_candidates` |

By size, with the plain mean: Li et al., "Federated Optimization in Heterogeneous Networks" (FedProx), MLSys 2020,
arXiv:1812.06127, Algorithm 2. By loss: Cho, Wang, Joshi, "Client Selection in Federated Learning: Convergence Analysis
and Power-of-Choice Selection Strategies", 2020, arXiv:2010.01243; its candidates are drawn by size (an argument here).

Privacy: numbers of samples are public here. Noise of local steps counts every step of a client, whoever is active, and
keeps its statement by size. A choice by loss shows something of the rows, without noise.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.algorithms.clients.server import by_client, draw_active
from jaxfl.algorithms.clients.steps import samples_of
from jaxfl.core import ArgumentError, Array, FederatedData, Info, Key, PyTree, Task, Variables, check, over_nodes
from jaxfl.core.algorithm import constructor
from jaxfl.core.tasks import evaluated, sample_losses
from jaxfl.core.tree import number_type
from jaxfl.gradients.microbatches import in_blocks


class Selection(NamedTuple):
    """How the clients of a round are chosen: uniformly, or as `by_size` or `by_loss` make it."""

    is_by_size: bool = False  # whether clients, or candidates, are drawn by their numbers of samples
    num_candidates: int | None = None  # d; None where no loss decides

    def check(self, clients: LocalSteps, holds_parts: bool) -> None:
        """Refuse clients whose rows a choice would show, or whose sizes would count twice."""
        if holds_parts and self != Selection():
            requirement = "must be None where clients hold parts of the model"
            raise ArgumentError("selection", requirement, f"got {self}", "Leave it out.")
        if self.num_candidates is not None and clients.is_private:
            requirement = "must not be by loss where steps are private: who takes part would show losses without noise"
            raise ArgumentError("selection", requirement, "got by_loss", "Pass by_size(), or leave it out.")
        if self.is_by_size and clients.weighting != "uniform":
            requirement = "must weigh all clients equally where they are drawn by size, which would count twice"
            found = "got local steps with weighting 'data'"
            raise ArgumentError("clients", requirement, found, "Pass weighting='uniform' to local_steps.")

    def check_count(self, num_active: int) -> None:
        """Refuse fewer candidates than clients of a round."""
        if self.num_candidates is not None:
            check.at_least(num_active, num_candidates=self.num_candidates)

    def check_data(self, data: FederatedData) -> None:
        """Refuse more candidates than clients."""
        if self.num_candidates is not None and self.num_candidates > data.num_nodes:
            found = f"got {self.num_candidates} for data of {data.num_nodes} clients"
            raise ArgumentError("num_candidates", "must be at most the number of clients", found, "Pass fewer.")

    def draw(self, key: Key, round_index: Array, num_active: int, data: FederatedData) -> Array:
        """Draw the clients of a round, (c,), or the candidates, (d,): int32, ascending."""
        count = num_active if self.num_candidates is None else self.num_candidates
        return draw_active(key, round_index, count, data.num_nodes, data.sizes if self.is_by_size else None)

    def choose(
        self, task: Task, data: FederatedData, model: Variables, num_active: int, drawn: Array, of_drawn: PyTree
    ) -> tuple[Array, PyTree]:
        """Take the clients of a round, (c,), int32, ascending, and their rows of what was drawn, leaves (d, ...)."""
        if self.num_candidates is None:
            return drawn, of_drawn
        places = jnp.sort(jax.lax.top_k(mean_losses(task, data, model, drawn), num_active)[1])
        return jax.tree.map(lambda leaf: leaf[places], (drawn, of_drawn))

    def counted(self, info: Info, data: FederatedData, drawn: Array, bits_down: float) -> Info:
        """Count what candidates did: each got the model, computed its loss and sent it."""
        if self.num_candidates is None:
            return info
        asked = by_client(drawn, data.num_nodes, jnp.ones_like(drawn))
        return info.plus(
            forward_evaluations=info.forward_evaluations + asked * data.sizes,
            bits_sent=info.bits_sent + 32 * asked.astype(jnp.float32),
            bits_received=bits_down * asked.astype(jnp.float32),
        )


def by_size() -> Selection:
    """Clients drawn with probability by their numbers of samples, without replacement; their local steps weigh alike.

    Guarantees:
        - one client a round: client i with probability J_i over the number of all samples.
        - equal sizes: every client with the same probability.

    Examples:
        >>> import jaxfl
        >>> jaxfl.uplink(selection=by_size()).selection.is_by_size
        True
    """
    return Selection(is_by_size=True)


@constructor
def by_loss(num_candidates: int, *, candidates: Literal["uniform", "by_size"] = "uniform") -> Selection:
    """Power of choice: of some candidates those with the largest mean loss over their samples, which each computes.

    Weights are those of `local_steps`; the paper takes the plain mean.

    Args:
        num_candidates: d, from the clients of a round to all; that of the clients of a round chooses nobody.
        candidates: how they are drawn; the paper draws them by size.

    Guarantees:
        - no candidate that is left out has a larger loss than one that takes part; the first ones of equal ones do.
        - as many candidates as clients of a round, drawn uniformly, change no bit of the model.
        - bits and forward evaluations of candidates that are left out are counted.
    """
    check.at_least(1, num_candidates=num_candidates)
    check.one_of(("uniform", "by_size"), candidates=candidates)
    return Selection(candidates == "by_size", num_candidates)


def mean_losses(task: Task, data: FederatedData, model: Variables, clients: Array) -> Array:
    """Mean loss of a model over all samples of each of these clients, (d,), from blocks of at most 256 samples.

    Args:
        model: one for all, leaves (*leaf).
        clients: (d,), int32.
    """
    positions = jnp.arange(data.max_size, dtype=jnp.int32)
    places, mask = samples_of(data, clients, jnp.broadcast_to(positions, (len(clients), 1, data.max_size)))
    variables = evaluated(task, *model)

    def of_block(rows, weights):
        losses = sample_losses(task, variables, data.inputs[rows], data.labels[rows])
        return jnp.sum(weights.astype(losses.dtype) * losses), ()

    def of_client(samples):
        rows, is_held = samples
        total = in_blocks(of_block, rows, is_held.astype(number_type(model.params)))[0]
        return total / is_held.sum().astype(total.dtype)

    return over_nodes(of_client, task.node_loop)((places[:, 0], mask[:, 0]))
