"""Zero-order federated learning: devices send one number a round, the difference of two losses, over lossy links.

Round k. All devices know x and make the same direction Phi_k from a shared seed. Device i draws a batch xi_i and sends

    Delta_i = f_i(x + gamma_k Phi_k, xi_i) - f_i(x - gamma_k Phi_k, xi_i)

The rounded messages Q(Delta_i) of a set S of devices reach the server, which sends back

    Q(Delta),  Delta = n / |S| sum_{i in S} Q(Delta_i), or 0 where S is empty
    x <- x - alpha_k Q(Delta) Phi_k

With q directions a message holds q differences, and x moves by the mean of their steps. Where only some devices send,
S holds those of them whose messages arrive, and all devices receive Q(Delta).

| symbol | here |
|---|---|
| x, Phi_k | `State.params`, `Draws.directions` |
| xi_i, S | `Draws.batch`, `Draws.uplink` |
| alpha_k, gamma_k, q | `step_size`, `smoothing`, `num_directions` |
| Q | the quantizers of `uplink`, `downlink` |
| d, n | parameters, devices |

Mhanna, Assaad, "Communication and Energy Efficient Federated Learning using Zero-Order Optimization Technique", 2024,
Algorithm 1 (DZOFL), equations (3) and (4).

The estimate g = Q(Delta) Phi is not divided by gamma, so it is biased: with F = sum_i F_i and E[Phi Phi^T] = I / d,

    E[g] = c_1 gamma_k (grad F(x) + b_k),  |b_k| <= c_3 gamma_k,  c_1 = 2 p / d

(Lemmas A.2 and A.4, alpha_2 = 1 / d; |b_k| falls as gamma_k^2 where F has three derivatives), with p the probability
that a message arrives, if all devices have links alike. Lemma A.3 has E|g|^2 <= c_2 gamma_k^2.
So the step along the gradient of the devices' mean loss is 2 p n alpha_k gamma_k / d. `decaying_schedules` gives step
sizes with a proof of convergence in the paper.

Differences from the paper: several directions, also Gaussian ones (its theorems need bounded ones); rounds in which
only some devices send; messages to the server may be lost with probabilities that differ, which biases Delta towards
devices that are heard more often.
Section III-C counts the energy of both directions. A ledger of `jaxfl.channel` counts the uplink only unless it is
given `downlink_watts`; this favours methods whose server sends more.

Does not claim: privacy; nor convergence for step sizes that do not decay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms.clients.server import at_clients, check_num_active, draw_active, server_model
from jaxfl.channel.links import LOST_MESSAGES, QUANTIZER_OVERFLOW, LinkDraws, Links, links
from jaxfl.channel.quantize import Quantizer
from jaxfl.core import (
    Algorithm,
    ArgumentError,
    Array,
    Info,
    Purpose,
    PyTree,
    Task,
    algorithm,
    check,
    leaf_key,
    over_nodes,
    purpose_key,
)
from jaxfl.core.algorithm import at_round, constructor
from jaxfl.core.info import Fatal
from jaxfl.core.reprs import short_repr
from jaxfl.core.tasks import check_sample_losses, check_task, sample_losses
from jaxfl.gradients import Batch, Sampler, fixed
from jaxfl.gradients.estimator import gather
from jaxfl.gradients.per_example import tree_norm
from jaxfl.gradients.samplers import BATCH_OVERFLOW, check_counts, draw_batch
from jaxfl.gradients.zero_order import (
    Directions,
    RademacherDirections,
    along,
    check_directions,
    losses_along,
    shared_directions,
)

_SERVER = 2**32 - 1  # the server's number among the senders; no device has it
_FLOAT_BITS = 32.0  # of a number without a quantizer


class State(NamedTuple):
    """State carried to the next round. Server and devices hold the same values, so there is no node axis."""

    params: PyTree  # x, leaves (*leaf), float32
    round_index: Array  # (), int32, rounds completed

    __repr__ = short_repr


class Draws(NamedTuple):
    """The random numbers of one round."""

    active: Array | None  # (k,), int32, the devices that send, ascending; None: all n
    batch: Batch  # of the k devices that send
    directions: Directions  # the same for all; numbers are made where they are used
    uplink: LinkDraws  # which of the k messages reach the server, and how they are rounded
    downlink: Array | None  # (q,), float32, uniform on [0, 1), by which the server rounds; None without a quantizer


@constructor
def dzofl(
    task: Task,
    *,
    batch_size: int,
    step_size: float | Array | Callable[[Array], Array],
    smoothing: float | Array | Callable[[Array], Array],
    num_active: int | None = None,
    uplink: Links | None = None,
    downlink: Quantizer | None = None,
    num_directions: int = 1,
    direction: str = "rademacher",
    sampler: Callable[[int], Sampler] = fixed,
) -> Algorithm:
    """Zero-order federated learning.

    All n devices hold the same d parameters x. A probe takes losses at x plus and minus gamma times a random direction.

    Devices' batches run forward as `task.node_loop` says, twice for each direction.

    Args:
        task: the learning task, without batch statistics and dropout.
        batch_size: b, samples of a device in a round.
        step_size: alpha: a number, a traced scalar, or a schedule of the round index. Along the gradient of the mean
            loss a round steps by 2 n alpha gamma / d.
        smoothing: gamma, given like `step_size`: the L2 distance of a probe from x (root mean square if Gaussian).
        num_active: devices that compute and send in a round, uniform without replacement; None: all.
        uplink: `jaxfl.links`: which devices' messages reach the server, and how they are quantised. None: all, in 32
            bits a number.
        downlink: how the server's message is quantised; it always arrives. None: 32 bits a number.
        num_directions: q, static; bits and passes grow with it.
        direction: "rademacher", entries +1 / sqrt(d) and -1 / sqrt(d), or "gaussian", of variance 1 / d.
        sampler: batch size -> how a batch is drawn; `jaxfl.gradients.fixed`, `uniform` or `poisson`.

    Returns:
        An `Algorithm`; `node_params` gives the model with a leading node axis of length 1. Its info has four
        numbers (): the mean loss over active devices and passes; the L2 norm of the step of x; "broadcast", the root
        mean square of Q(Delta) over directions; "broadcast_overflow", how many of these lie beyond the quantizer's
        range.

    Raises:
        ArgumentError: a number out of range, or a task with `train_loss`; from `init`, data or links that do not fit.

    Guarantees:
        - no losses and no quantizers give two-point descent.
        - where no message arrives the model stays as it is.
        - the expected step on a quadratic is 2 n alpha gamma / d times the gradient of the mean loss, times the
          probability that a message arrives.
        - all active devices' batches run forward together, and no others.
        - each device is active with probability num_active / n in each round. A device's batch does not depend on who
          else is active.
        - no direction is held: a round takes the memory of the parameters, which the new ones replace, and of one moved
          copy. With several or with Gaussian directions, the step of x is held as well, to be measured.
        - padding never contributes.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> data = jaxfl.federate(np.eye(4, 2, dtype="float32"), np.ones(4, "float32"), [[0, 1], [2, 3]])
        >>> learner = jaxfl.dzofl(task, batch_size=2, step_size=1.0, smoothing=0.1, num_directions=3)
        >>> key = jax.random.key(0)
        >>> state, info = jax.jit(learner.round)(key, learner.init(key, data), data)
        >>> info.bits_sent.tolist(), info.forward_evaluations.tolist(), info.gradient_evaluations.tolist()
        ([96.0, 96.0], [12, 12], [0, 0])
    """
    check.scalar(step_size=step_size)
    check.positive(step_size=step_size)
    check.in_float32(step_size=step_size)
    check.at_least(1, batch_size=batch_size)
    check_directions(num_directions, direction, smoothing)
    check_sample_losses(task)
    if num_active is not None:
        check.at_least(1, num_active=num_active)
    to_server = links() if uplink is None else uplink
    scheme, q = sampler(batch_size), num_directions

    def init(key, data):
        check_task(task, data)
        check_num_active(num_active or 1, data.num_nodes)
        check_counts(scheme, data.sizes, data.names)
        jax.eval_shape(lambda: to_server.draw_to_server(key, 0, data.num_nodes))  # which refuses links that do not fit
        return State(params=task.init(purpose_key(key, Purpose.INIT)), round_index=jnp.int32(0))

    def draw(key, state, data):
        n, k = data.num_nodes, state.round_index
        server_key = leaf_key(purpose_key(key, Purpose.MESSAGE_ROUNDING, k), _SERVER)
        active = None if num_active in (None, n) else draw_active(key, k, num_active, n)
        of_all = draw_batch(scheme, key, k, data.sizes), to_server.draw_to_server(key, k, n)
        batch, links_of_round = of_all if active is None else jax.tree.map(lambda leaf: leaf[active], of_all)
        return Draws(
            active=active,
            batch=batch,
            directions=shared_directions(direction, key, k),
            uplink=links_of_round,
            downlink=None if downlink is None else jax.random.uniform(server_key, (q,), jnp.float32),
        )

    def update(state, data, draws):
        k, batch, n, num_senders = state.round_index, draws.batch, data.num_nodes, len(draws.batch.mask)
        alpha, gamma = at_round(step_size, k, state.params), at_round(smoothing, k, state.params)
        active, senders = draws.active, data
        if active is not None:  # their pool is not cut by owner
            senders = data._replace(indices=data.indices[active], sizes=data.sizes[active], parts=None)
        inputs, labels = gather(senders, batch.indices)

        def losses(params):
            def of_device(inputs, labels, mask):
                return jnp.where(mask, sample_losses(task, params, inputs, labels), 0.0)

            return over_nodes(of_device, task.node_loop)(inputs, labels, batch.mask)

        above, below = losses_along(losses, state.params, draws.directions, q, gamma)
        differences = (above - below).sum(axis=2).T / batch_size
        messages = to_server.send(differences, draws.uplink.rounding)
        arrived = jnp.ones(num_senders, bool) if draws.uplink.arrived is None else draws.uplink.arrived
        arrivals = jnp.where(arrived[:, None], messages.values, 0.0).sum(axis=0)
        total = arrivals * (n / jnp.maximum(arrived.sum(), 1).astype(arrivals.dtype))
        broadcast = total if downlink is None else downlink.apply(total, draws.downlink)

        coefficients = (alpha / q) * broadcast
        moves = along(draws.directions, coefficients, state.params)
        if q > 1:
            update_norm = tree_norm(moves, 2)
        elif isinstance(draws.directions, RademacherDirections):
            update_norm = jnp.abs(coefficients[0])
        else:
            update_norm = jnp.abs(coefficients[0]) * tree_norm(
                along(draws.directions, jnp.ones_like(coefficients), state.params), 2
            )
        none = jnp.zeros(num_senders, jnp.int32)
        info = Info(loss=(above + below).sum() / (2 * q * num_senders * batch_size)).plus(
            {LOST_MESSAGES: 1 - arrived.astype(jnp.int32), QUANTIZER_OVERFLOW: none, **messages.counts},
            {BATCH_OVERFLOW: Fatal(batch.overflow)},
            broadcast=jnp.sqrt(jnp.mean(broadcast**2)),
            update_norm=update_norm,
            bits_sent=jnp.full(num_senders, q * to_server.bits, jnp.float32),
            gradient_evaluations=none,
            forward_evaluations=2 * q * batch.mask.sum(axis=1, dtype=jnp.int32),
            broadcast_overflow=jnp.int32(0) if downlink is None else downlink.overflows(total),
        )
        info = info if draws.active is None else at_clients(info, draws.active, n)
        received = q * (_FLOAT_BITS if downlink is None else downlink.bits)  # by idle devices, too
        info = info.plus(bits_received=jnp.full(n, received, jnp.float32))
        params = jax.tree.map(jnp.subtract, state.params, moves)
        return State(params=params, round_index=k + 1), info

    return algorithm(init, draw, update, server_model(task))


def decaying_schedules(
    step_size: float | Array,
    smoothing: float | Array,
    *,
    step_exponent: float = 0.26,
    smoothing_exponent: float = 0.26,
) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """Schedules of `dzofl` under which its paper proves convergence.

        alpha_k = alpha_0 (1 + k)^-u1,  gamma_k = gamma_0 (1 + k)^-u2
        0 < u1 + u2 <= 1,  u1 + 3 u2 > 1,  u1 + u2 > 1/2

    Then the sum of alpha gamma is infinite, and the sums of alpha gamma^3 and of (alpha gamma)^2 are finite (Assumption
    IV.3). The rate is 1 / K^(1 - u1 - u2) (Theorem IV.10). The exponents 1/4 and 1/4, which the paper calls optimal,
    break both strict bounds.

    Args:
        step_size: alpha_0, positive; may be traced.
        smoothing: gamma_0, positive; may be traced.
        step_exponent: u1, positive.
        smoothing_exponent: u2, positive.

    Returns:
        (step_size, smoothing): functions of the round index.

    Raises:
        ArgumentError: a number that is not positive, or exponents that break a condition.

    Examples:
        >>> step_size, smoothing = decaying_schedules(2.0, 0.1, step_exponent=0.5, smoothing_exponent=0.25)
        >>> [round(float(schedule(jnp.int32(15))), 6) for schedule in (step_size, smoothing)]
        [0.5, 0.05]
    """
    check.scalar(step_size=step_size, smoothing=smoothing)
    check.positive(step_size=step_size, smoothing=smoothing)
    check.positive(step_exponent=step_exponent, smoothing_exponent=smoothing_exponent)
    u1, u2 = step_exponent, smoothing_exponent
    for holds, requirement in (
        (u1 + u2 <= 1, "step_exponent + smoothing_exponent must be at most 1"),
        (u1 + 3 * u2 > 1, "step_exponent + 3 smoothing_exponent must be above 1"),
        (u1 + u2 > 0.5, "step_exponent + smoothing_exponent must be above 1/2"),
    ):
        if not holds:
            found, remedy = f"got {u1} and {u2}", "Pass for instance 0.26 and 0.26, or 0.5 and 0.25."
            raise ArgumentError("step_exponent, smoothing_exponent", requirement, found, remedy)

    def decaying(first, exponent):
        return lambda round_index: first * (1.0 + round_index.astype(jnp.float32)) ** np.float32(-exponent)

    return decaying(step_size, u1), decaying(smoothing, u2)
