"""ALI-DPFL: DP-SGD at every client; a bound on convergence chooses the number of local iterations in each round.

In each round the server sends the model x and a number tau to all clients. Client i makes tau iterations of DP-SGD from
x, with result w_i:

    w_i <- w_i - gamma g_i,    g_i = (1/B) (sum over a Poisson batch of clipped gradients + Normal(0, sigma^2 C^2 I))
    x <- w = sum_i p_i w_i,    p_i = |D_i| / |D|

Then rho, beta and xi, the constants of the bound, are estimated (`clients.bound_constants`) and averaged with weights
p_i. The next tau is the minimiser over 1, ..., min(2 tau, tau_max) of the bound

    G(tau) = 1 / (T(tau) (gamma phi - rho h(tau) / (tau lambda^2))) + sqrt(3) / 3                                   (13)
    h(tau) = (S / beta) ((gamma beta + 1)^tau - 1) - gamma S tau,    S = xi + 2 sqrt(d) sigma C / B                 (11)
    T(tau) = min(tau (rounds left), iterations left)

| symbol | here |
|---|---|
| x, tau | `State.params`, `State.num_steps` |
| gamma, tau_max | `step_size`, `clients.max_steps` |
| B, C, sigma C / B, p_i | of `clients`: `jaxfl.local_steps`; `clients.noise_std` is the third |
| rho_i, beta_i, xi_i | `State.constants`, by `constants` |
| phi lambda^2 | `kappa` |

Ling, Fu, Wang, Liu, Chen, "ALI-DPFL: Differentially Private Federated Learning with Adaptive Local Iterations",
arXiv:2308.10457, Algorithm 2 (Algorithm 1 is `jaxfl.fed_avg` with private clients).

Differences from the paper: in the second term of (11) the paper prints gamma (xi + 2 sqrt(d) sigma C) / B; h(1) would
then not be 0, although its text says that it is. The paper leaves T open; with T fixed the minimiser is always 1. Only
kappa = phi lambda^2 matters for the minimiser, and the paper gives no value. Its phi = omega (1 - gamma beta / 2)
moves with beta; kappa stays. The paper has one sigma. Of clients with sigmas of their own S takes the largest. A tau
for which the bracket in (13) is not positive is skipped; if no tau is left, the next is 1. The last round is shortened
to the iterations that are left, and a round without iterations changes nothing. The paper's proof of (12) uses
Jensen's inequality in the wrong direction, so the rule is a heuristic. All three constants are estimated at the new
aggregate. This takes a second exchange with the server in each round: its bits are counted, its latency is not.
Algorithm 2 sends rho_i and beta_i together with w_i, as estimates at the previous round's aggregate.

Does not claim: an epsilon; `jaxfl.privacy.clients` states it. With constants estimated without noise there is no
epsilon, not even for the models alone: tau depends on the data, and the variance of w - x reveals tau.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms.clients.bound_constants import Aggregation, BoundConstants, Constants, ConstantsDraws
from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.algorithms.clients.steps import StepDraws
from jaxfl.algorithms.clients.uplink import PLAIN, Uplink, UplinkDraws, of_whole_models
from jaxfl.algorithms.releases import of_chosen_steps
from jaxfl.core import Algorithm, ArgumentError, Purpose, Task, Variables, algorithm, check, over_nodes, purpose_key
from jaxfl.core.algorithm import constructor
from jaxfl.core.devices import varying_like
from jaxfl.core.info import Fatal
from jaxfl.core.platform import is_cpu
from jaxfl.core.reprs import short_repr
from jaxfl.core.tree import number_type, replicate, size
from jaxfl.core.types import Array, PyTree
from jaxfl.gradients.per_example import tree_norm
from jaxfl.gradients.samplers import BATCH_OVERFLOW
from jaxfl.privacy.mechanisms import NO_NOISE, require_own_noise


class State(NamedTuple):
    """State carried to the next round. Parameters are the server's, without a node axis."""

    params: PyTree  # x, leaves (*leaf), float32
    num_steps: Array  # (), int32, tau of the next round; 0 where the budget or the rounds are spent
    iterations: Array  # (), int32, local iterations that every client has made
    constants: Constants  # every client's latest estimates; 0 before the first
    round_index: Array  # (), int32, rounds completed

    __repr__ = short_repr


class Draws(NamedTuple):
    """The random numbers of one round."""

    steps: StepDraws  # of all clients
    constants: ConstantsDraws  # for the estimates
    uplink: UplinkDraws  # what arrives


@constructor
def ali_dpfl(
    task: Task,
    *,
    clients: LocalSteps,
    constants: BoundConstants,
    step_size: float | Array,
    max_rounds: int | Array,
    max_iterations: int | Array,
    kappa: float | Array = 1.0,
    uplink: Uplink | None = None,
) -> Algorithm:
    """DP federated averaging with adaptive local iterations.

    tau is the number of local iterations of a round; the server chooses it anew after each.

    Args:
        task: the learning task, each sample with a loss of its own.
        clients: `jaxfl.local_steps(tau_max, ...)` with the step size below, a clip norm and noise.
        constants: `jaxfl.published_constants` or `jaxfl.private_constants`.
        step_size: gamma, the step size of the clients' optimizer. The bound is made for plain SGD.
        max_rounds: R_s, the rounds that communication allows; may be traced.
        max_iterations: the local iterations of a client that the privacy budget allows
            (`most_rounds` of `jaxfl.privacy.clients.account`); may be traced.
        kappa: phi lambda^2 of the paper's bound, positive; a larger value leaves room for a larger tau; may be traced.
        uplink: `jaxfl.uplink(links=...)`, links over which the clients' changes reach the server; the numbers for the
            estimates always arrive. None loses and rounds nothing.

    Returns:
        An `Algorithm`; `node_params` gives the server's model with a leading node axis of length 1. The estimates and
        the choice of tau are computed in float32, also where params are float64. The loss of its info, () float32, is
        taken on each step's batch before the step: mean over steps, p-weighted sum over clients.

    Raises:
        ArgumentError: a number out of range, or clients other than private SGD; from `init`, unusable data.

    Guarantees:
        - no client makes more than max_iterations local iterations, and no more than max_rounds rounds count.
        - a round without an iteration left changes nothing.
        - with at least as many rounds as iterations, every tau is 1.
        - a new tau needs no new compilation.
        - without noise, one step a round is fed_avg.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, optax, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> x = np.random.default_rng(0).normal(size=(40, 2)).astype("float32")
        >>> data = jaxfl.federate(x, x @ np.array([1.0, -1.0], "float32"), np.split(np.arange(40), 2))
        >>> rule = {"optimizer": optax.sgd(0.2), "sampler": jaxfl.gradients.poisson}
        >>> clients = jaxfl.local_steps(100, batch_size=5, clip_norm=1.0, noise=jaxfl.gaussian(0.01), **rule)
        >>> budget = {"max_rounds": 5, "max_iterations": 20, "step_size": 0.2}
        >>> constants = jaxfl.private_constants(10, clip_norm=1.0, loss_bound=0.5, noise_multiplier=20.0)
        >>> learner = jaxfl.ali_dpfl(task, clients=clients, constants=constants, **budget, kappa=100.0)
        >>> key = jax.random.key(0)
        >>> rounds = jax.lax.scan(lambda s, _: learner.round(key, s, data), learner.init(key, data), length=5)
        >>> rounds[1].local_iterations.tolist(), int(rounds[0].iterations)
        ([1, 2, 4, 6, 2], 15)
    """
    check.scalar(step_size=step_size, max_rounds=max_rounds, max_iterations=max_iterations, kappa=kappa)
    check.positive(step_size=step_size, max_rounds=max_rounds, max_iterations=max_iterations, kappa=kappa)
    check.whole(max_rounds=max_rounds, max_iterations=max_iterations)
    _check_clients(clients, step_size)
    way = PLAIN if uplink is None else uplink
    if way.more_than_mean:
        found = f"got {way.more_than_mean}"
        remedy = "Pass only links: the clients' own steps are private."
        raise ArgumentError("uplink", "must leave updates as they are", found, remedy)

    def limits():
        return jnp.asarray(max_rounds, jnp.int32), jnp.asarray(max_iterations, jnp.int32)

    def init(key, data):
        clients.check_data(task, data)
        constants.check_data(data)
        unknown = jnp.zeros(data.num_nodes, jnp.float32)
        params = task.init(purpose_key(key, Purpose.INIT))
        way.init(key, params, data.num_nodes)
        return State(
            params=params,
            num_steps=jnp.minimum(1, limits()[1]),
            iterations=jnp.int32(0),
            constants=Constants(unknown, unknown, unknown),
            round_index=jnp.int32(0),
        )

    def draw(key, state, data):
        k = state.round_index
        active, of_way = way.draw(key, k, state.params, data.num_nodes, data.num_nodes, lambda: _everybody(data))
        return Draws(
            steps=clients.draw(key, k, active, data, task, state.num_steps),
            constants=constants.draw(key, k, data),
            uplink=of_way,
        )

    def update(state, data, draws):
        k, n, tau = state.round_index, data.num_nodes, state.num_steps
        everybody, ran = _everybody(data), state.num_steps > 0
        steps = clients.steps(data, everybody, draws.steps)
        gradient_of = clients.gradient_of(task, data)

        def one_client(client_steps):
            return clients.run(gradient_of, state.params, None, client_steps, k, tau)

        client_params, _, client_info = over_nodes(one_client, task.node_loop)(steps)
        weights = clients.weigh(data, everybody).astype(number_type(state.params))
        shares, before = weights / weights.sum(), Variables(state.params, None)
        models = of_whole_models(before, Variables(client_params, None), n)
        received = way.send(draws.uplink, everybody, weights, client_info.loss, before, models)
        # The mean of equal models may differ from them by rounding.
        params = jax.tree.map(lambda new, old: jnp.where(ran, new, old), received.model.params, state.params)
        aggregation = Aggregation(
            before=state.params,
            client_params=client_params,
            after=params,
            shares=shares,
            received=received.shares,
            num_steps=tau,
            step_size=jnp.asarray(step_size, jnp.float32),
            noise_std=jnp.asarray(clients.noise_std, jnp.float32),
        )
        aggregation = varying_like(aggregation, client_params)
        new_constants, evaluations = _where(
            ran,
            lambda: constants.estimate(task, data, draws.constants, aggregation, state.constants),
            (state.constants, jnp.zeros(n, jnp.int32)),
            client_params,
        )
        rho, beta, xi = (jnp.sum(shares.astype(values.dtype) * values) for values in new_constants)
        most_rounds, most_iterations = limits()
        next_tau = next_num_steps(
            tau,
            rho=rho,
            beta=beta,
            spread=xi + 2 * jnp.sqrt(jnp.float32(size(params))) * jnp.max(aggregation.noise_std),
            step_size=aggregation.step_size,
            kappa=jnp.asarray(kappa, jnp.float32),
            rounds_left=most_rounds - (k + 1),
            iterations_left=most_iterations - (state.iterations + tau),
            max_steps=clients.max_steps,
        )
        model, times = 32.0 * size(params), ran.astype(jnp.float32)
        extra = 96.0 if constants.is_private else model + 64.0
        counts = clients.counts(steps, draws.steps, k)
        info = client_info._replace(loss=received.loss).plus(
            counts,
            jax.tree.map(lambda count: jnp.where(ran, count, 0), received.counts),
            {BATCH_OVERFLOW: Fatal(draws.steps.batch_overflow + draws.constants.batch_overflow)},
            update_norm=tree_norm(jax.tree.map(jnp.subtract, params, state.params), 2),
            num_steps=tau.astype(jnp.float32),  # a measurement: its mean is over rounds
            rho=rho,  # p-weighted means over clients, as estimated after this round
            beta=beta,
            xi=xi,
            bits_sent=jnp.full(n, way.bits * size(params) + extra, jnp.float32) * times,
            bits_received=jnp.full(n, model + 32.0, jnp.float32) * times,  # the model and the next tau
            gradient_evaluations=counts["gradient_evaluations"] + evaluations,  # the estimates' losses come with them
            local_iterations=tau,
            estimate_releases=ran.astype(jnp.int32),  # 1 where constants were estimated
        )
        new_state = State(
            params=params,
            num_steps=next_tau,
            iterations=state.iterations + tau,
            constants=new_constants,
            round_index=k + 1,
        )
        return new_state, info

    releases = of_chosen_steps(clients, constants, max_rounds, max_iterations)
    return algorithm(init, draw, update, lambda state: replicate(state.params, 1), releases=releases)


def released_gradients(step_size: float | Array, before: State, after: State) -> PyTree:
    """Recover the sum of a round's noisy gradients over its tau iterations from the aggregate: (x - w) / gamma.

    With several clients it is the sum of their p-weighted means. With one client it is all that the client's message
    tells: the aggregate is its model.

    Args:
        step_size: gamma, of plain SGD.
        before, after: states around one round, of `after.iterations - before.iterations` iterations.

    Returns:
        Leaves (1, *leaf), float32, off by the rounding of x divided by gamma.

    Guarantees:
        - equals the sum of the round's noisy gradients.
        - it is zero for a round without iterations.
    """
    return jax.tree.map(lambda old, new: ((old - new) / step_size)[None], before.params, after.params)


def iteration_gap(max_steps: int, *, beta: Array, spread: Array, step_size: Array) -> Array:
    """h of equation (11): how far local iterations drift from gradient descent on all data.

    Args:
        max_steps: largest tau.
        beta: smoothness, at least 0.
        spread: S = xi + 2 sqrt(d) sigma C / B.
        step_size: gamma.

    Returns:
        (max_steps + 1,), float32: h(0), ..., h(max_steps); infinite where it overflows.

    Guarantees:
        - h(0) and h(1) are 0, and for beta 0 all are.

    Examples:
        >>> one = jnp.float32(1.0)
        >>> iteration_gap(3, beta=one, spread=one, step_size=0.5 * one).tolist()  # 1.5^t - 1 - 0.5 t
        [0.0, 0.0, 0.25, 0.875]
    """

    # h(t + 1) / S = (1 + gamma beta) h(t) / S + gamma^2 beta t: no term is negative, so no digits cancel.
    def following(gap, t):
        return (1 + step_size * beta) * gap + step_size**2 * beta * t, gap

    steps = jnp.arange(max_steps + 1, dtype=jnp.float32)
    if is_cpu():
        _, gaps = jax.lax.scan(following, varying_like(jnp.float32(0.0), step_size, beta), steps)
    else:  # the same sums, h(t) / S = sum_{0 < s < t} gamma^2 beta s (1 + gamma beta)^(t - 1 - s), without a loop
        t, s = steps[:, None], steps[None]
        terms = step_size**2 * beta * s * (1 + step_size * beta) ** (t - 1 - s)
        gaps = jnp.where((s > 0) & (s < t), terms, 0.0).sum(axis=1)
    return jnp.where(gaps == 0, 0.0, spread * gaps)


def next_num_steps(
    num_steps: Array,
    *,
    rho: Array,
    beta: Array,
    spread: Array,
    step_size: Array,
    kappa: float | Array,
    rounds_left: Array,
    iterations_left: Array,
    max_steps: int,
) -> Array:
    """The minimiser of equation (13) over 1, ..., min(2 tau, tau_max), at most the iterations that are left.

    Args:
        num_steps: tau of this round, (), int32.
        rho, beta: (), float32, at least 0.
        spread: as for `iteration_gap`.
        step_size: gamma.
        kappa: phi lambda^2.
        rounds_left, iterations_left: (), int32, after this round.
        max_steps: tau_max, static.

    Returns:
        (), int32; 0 where no round or no iteration is left.

    Guarantees:
        - a tau without a finite, positive bracket is skipped; where no tau is left, the result is 1.
        - of equal bounds the smallest tau is taken.
    """
    taus = jnp.arange(1, max_steps + 1, dtype=jnp.int32)
    slowdown = (
        rho * iteration_gap(max_steps, beta=beta, spread=spread, step_size=step_size)[1:] / taus.astype(jnp.float32)
    )
    bracket = step_size * kappa - jnp.where(rho > 0, slowdown, 0.0)
    most = taus.astype(jnp.float32) * rounds_left.astype(jnp.float32)  # the product may exceed 32 bits
    possible = jnp.minimum(most, iterations_left.astype(jnp.float32))
    # The largest T (gamma kappa - rho h / tau) makes G least: the rest of (13) does not depend on tau.
    value = jnp.where((taus <= 2 * num_steps) & (bracket > 0), possible * bracket, 0.0)
    best = jnp.where(value.max() > 0, taus[jnp.argmax(value)], 1)
    return jnp.where(rounds_left > 0, jnp.minimum(best, jnp.maximum(iterations_left, 0)), 0)


def _check_clients(clients: LocalSteps, step_size: float | Array) -> None:
    """Refuse clients that the accountant or the bound does not cover; traced numbers pass."""
    remedy = "Pass clip_norm and noise to local_steps, and no num_steps."
    if not clients.is_private or clients.num_steps is not None:
        found = "got clients without either" if not clients.is_private else "got clients with num_steps"
        raise ArgumentError("clients", "must clip or add noise, and leave the number of steps open", found, remedy)
    noise = NO_NOISE if clients.noise is None else clients.noise
    require_own_noise("the rule for the next tau counts noise of a client's own", clients=noise.distribution)
    noisy = check.is_traced(clients.noise_std) or bool(np.any(np.asarray(clients.noise_std)))
    if noisy and clients.sampler != "poisson":
        requirement, found = "must draw Poisson batches where they add noise", f"got sampler {clients.sampler!r}"
        raise ArgumentError("clients", requirement, found, "Pass sampler=jaxfl.gradients.poisson to local_steps.")
    moves: list[Any] = []
    with jax.ensure_compile_time_eval():
        for k in (0, 1, 1000):  # a schedule over rounds shows in one of them
            rule, params = clients.optimizer_at(jnp.int32(k)), jnp.float32(1.0)
            first, memory = rule.update(jnp.float32(3.0), rule.init(params), params)
            moves += [first, rule.update(jnp.float32(3.0), memory, params)[0]]
    if any(map(check.is_traced, (step_size, *moves))):
        return
    if not np.allclose(moves, -3.0 * np.float32(step_size), rtol=1e-5, atol=0.0):
        steps = " and ".join(dict.fromkeys(f"{-float(move) / 3:.6g}" for move in moves))
        found = f"got steps of {steps} times the gradient"
        remedy = "Pass optax.sgd(step_size) to local_steps."
        raise ArgumentError("clients", f"must make SGD with step_size, {float(step_size):.6g}", found, remedy)


def _where(ran: Array, compute: Callable[[], PyTree], otherwise: PyTree, like: PyTree) -> PyTree:
    """`compute()` where `ran`, (), bool, else `otherwise`; both vary over a caller's devices as `like` does."""
    otherwise = varying_like(otherwise, like)
    if is_cpu():
        return jax.lax.cond(ran, lambda: varying_like(compute(), like), lambda: otherwise)
    return jax.tree.map(partial(jnp.where, ran), compute(), otherwise)  # the host need not wait for `ran`


def _everybody(data) -> Array:
    """All clients, (n,), int32."""
    return jnp.arange(data.num_nodes, dtype=jnp.int32)
