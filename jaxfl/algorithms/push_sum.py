"""Stochastic gradient push (SGP), private, over time-varying directed graphs: PrivSGP and PrivSGP-VR.

    x_i^{k+1/2} = x_i^k - gamma (g_i^k + N_i^k),   N_i^k ~ Normal(0, sigma_i^2 I)
    x_i^{k+1}   = sum_j P^k_ij x_j^{k+1/2}                      M times, with P^{kM}, ..., P^{kM+M-1}
    w_i^{k+1}   = sum_j P^k_ij w_j^k,              w_i^0 = 1    likewise
    z_i^{k+1}   = x_i^{k+1} / w_i^{k+1}

| symbol | here |
|---|---|
| x_i, w_i, z_i | `State.params`, `State.push_sum_weight`, `debiased_params` |
| g_i, at z_i | `gradient`: `mini_batch` gives PrivSGP (Algorithm 2), `saga` gives PrivSGP-VR (Algorithm 1) |
| N_i, sigma_i | `noise` |
| gamma, P^k, M | `step_size`, `graph`, `num_mixings` |

Zhu, Huang, Wang, Xu, "PrivSGP-VR: Differentially Private Variance-Reduced Stochastic Gradient Push with Tight Utility
Bounds", IJCAI 2024, arXiv:2405.02638, Algorithms 1 and 2. Push-sum: Nedic and Olshevsky 2016,
doi:10.1109/TAC.2016.2529285.

Over `links` a message (P^k_ij x_j, P^k_ij w_j) may be lost, and x_j may be rounded to q_j. A receiver acknowledges
each message. Acknowledgements are assumed to arrive always and to cost nothing, so that a sender keeps what did not
arrive:

    x_i^{k+1} = x_i^{k+1/2} + sum_{j: arrived} P^k_ij q_j - sum_{m: arrived} P^k_mi q_i,   likewise w, not rounded

Each round mixes by a random column-stochastic matrix, and a sender keeps its rounding error: the sums of x and w stay.
Ratios x / w then converge to the quotient of the sums, if links keep delivering: Kempe, Dobra, Gehrke, "Gossip-Based
Computation of Aggregate Information", FOCS 2003. Hadjicostis, Vaidya, Dominguez-Garcia, "Robust Distributed Average
Consensus via Exchange of Running Sums", IEEE Transactions on Automatic Control 61(6), 2016, need no acknowledgement: a
message holds the sum of all that was ever sent, and a receiver remembers the last; mass waits on the edge meanwhile.
Neither paper covers gradient steps between the averaging rounds.

An observer of all messages learns a function of the noisy gradients and of random numbers that do not depend on the
data, with links as without: x_j^{k+1/2} is made of earlier noisy gradients, losses and rounding. So a statement about
all noisy gradients, each at a point that may depend on earlier ones, covers it as well.

Any number of exchanges of a round, and after the last, costs no epsilon. Every message is a function of the noisy
gradients y_1, ..., y_k so far and of draws made without data (losses, rounding); w does not depend on data at all. The
statements are about the y. (A later exchange may show a rounding error that the first does not; the y cover it.)

Differences from the paper: gradients may be clipped per sample, batches may hold more than one sample, the step size
may follow a schedule; links; more than one exchange in a round (the paper has M = 1). All nodes start from the same
parameters.

Does not claim: a privacy guarantee. The noise has the scale that the caller passes. Nor that lost messages
protect: no statement has a smaller epsilon over links.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms.activation import Activation, check_activation, if_awake, info_of_awake
from jaxfl.algorithms.exchange import exchange, plus_seeds
from jaxfl.algorithms.node_steps import node_steps
from jaxfl.algorithms.releases import of_noisy_gradients
from jaxfl.channel import LinkDraws, Links
from jaxfl.core import Algorithm, ArgumentError, Array, Purpose, PyTree, Task, algorithm, check, purpose_key
from jaxfl.core.algorithm import at_round, constructor
from jaxfl.core.platform import is_cpu
from jaxfl.core.reprs import short_repr
from jaxfl.core.tasks import evaluated
from jaxfl.core.tree import number_type, replicate, scale
from jaxfl.gradients import GradientEstimator, mini_batch
from jaxfl.graphs import (
    Graph,
    mix,
    require_column_stochastic,
    require_strongly_connected,
)
from jaxfl.privacy import PRIVSGP, PRIVSGP_VR, NoiseMechanism
from jaxfl.privacy.mechanisms import NO_NOISE, check_types, released, require_kept_sum

if TYPE_CHECKING:
    import optax

_MAX_CONDITION = 1e4  # of a mixing matrix that is inverted: the rounding of float32, 6e-8, grows by as much


class State(NamedTuple):
    """State carried to the next round."""

    params: PyTree  # x, leaves (n, *leaf), float32
    push_sum_weight: Array  # w, (n,), float32, sums to n
    gradient: Any  # state of the gradient estimator; None for mini_batch
    round_index: Array  # (), int32, rounds completed
    optimizer: Any = None  # state of each node's optimizer, leaves (n, *leaf); None with a step size

    __repr__ = short_repr


class Draws(NamedTuple):
    """The random numbers of one round."""

    gradient: Any  # draws of the gradient estimator: which samples
    noise: PyTree  # leaves (n, *leaf), float32, already scaled, or int32, in steps of a grid; None without noise
    links: LinkDraws  # which messages arrive, and how they are rounded


@constructor
def push_sum(
    task: Task,
    *,
    graph: Graph,
    step_size: float | Array | Callable[[Array], Array] | None = None,
    gradient: GradientEstimator | None = None,
    noise: NoiseMechanism | None = None,
    links: Links | None = None,
    optimizer: optax.GradientTransformation | None = None,
    num_mixings: int = 1,
    num_final_mixings: int = 0,
    activation: Activation | None = None,
) -> Algorithm:
    """PrivSGP or PrivSGP-VR, by the choice of `gradient`.

    In round k node i holds numbers x_i^k and a weight w_i^k, which starts at 1. Both are mixed over the graph. The
    node's model is z_i^k = x_i^k / w_i^k, where gradients are taken.

    Args:
        task: the learning task.
        graph: a column-stochastic mixing matrix or a periodic sequence of them, strongly connected over its period.
        step_size: gamma: a number, a traced scalar, or a schedule of the round index (any optax schedule).
        gradient: `mini_batch(...)` (PrivSGP; the default, one uniform sample) or `saga(...)` (PrivSGP-VR).
        noise: added to every node's gradient in every round; None adds nothing. `shared_gaussian` needs a step size.
        links: `jaxfl.links(...)`, over which messages between different nodes travel; None loses and rounds nothing.
        optimizer: any optax optimizer, in place of a step size. Each node runs its own: x_i^{k+1/2} = x_i^k + u_i, with
            u_i the update for the noisy gradient, given z. The optimizer's state stays at the node. It is computed from
            noisy gradients alone, so a privacy statement about these covers it.
        num_mixings: M, exchanges of a round. Epsilon is that of one, bits are M times as many. Static.
        num_final_mixings: exchanges after the last round, over links that lose and round nothing: `node_params` gives
            what they would make of the state. Their bits count in the first round. Static.
        activation: as for `d_psgd`; the sums of x and w stay whatever the graph. A step is divided by w, which sleep
            makes small at times: it needs smaller step sizes.

    Returns:
        An `Algorithm`; `node_params` gives the de-biased parameters z. In its info the loss is taken at z before the
        round; parameters and weight go to every out-neighbor. Lost messages count as sent.

    Raises:
        ArgumentError: a graph that does not qualify, a step size out of range, or noise of another size.

    Guarantees:
        - total mass preserved: the push-sum weights sum to n after every round.
        - over any links mass is preserved: the weights sum to n, and the sum of x moves by the step only.
        - links that lose and round nothing change no bit.
        - the noisy gradients of a round, given key and state, do not depend on num_mixings.
        - on a doubly stochastic graph the weights stay 1 and the node mean follows the mean noisy gradient.
        - no noise, no clipping and one node give stochastic gradient descent.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> data = jaxfl.federate(np.eye(4, 2, dtype="float32"), np.ones(4, "float32"), [[0, 1], [2, 3]])
        >>> learner = jaxfl.push_sum(task, graph=jaxfl.graphs.directed_ring(2), step_size=0.1)
        >>> key = jax.random.key(0)
        >>> state, info = jax.jit(learner.round)(key, learner.init(key, data), data)
        >>> float(state.push_sum_weight.sum()), int(state.round_index)
        (2.0, 1)
    """
    init_steps, steps_of_round = node_steps(step_size, optimizer)
    require_column_stochastic(graph)
    require_strongly_connected(graph)
    noise = noise or NO_NOISE
    check.per_node(graph.num_nodes, noise=noise.noise_scale)
    require_kept_sum(noise, graph.num_nodes, is_linear=optimizer is None)
    estimator = mini_batch() if gradient is None else gradient
    check_activation(activation, estimator, noise, graph.num_nodes)
    way = exchange(
        graph,
        links,
        kept_by="sender",
        num_mixings=num_mixings,
        num_final_mixings=num_final_mixings,
        activation=activation,
    )

    def init(key, data):
        params = replicate(task.init(purpose_key(key, Purpose.INIT)), graph.num_nodes)
        check_types(noise, task, params)
        return State(
            params=params,
            push_sum_weight=jnp.ones(graph.num_nodes, number_type(params)),
            gradient=estimator.init(task, key, params, data),
            round_index=jnp.int32(0),
            optimizer=init_steps(params),
        )

    def draw(key, state, data):
        k = state.round_index
        return Draws(
            gradient=estimator.draw_for(task, key, k, data),
            noise=noise.draw(purpose_key(key, Purpose.NOISE, k), state.params),
            links=way.draw(key, k),
        )

    def update(state, data, draws):
        k, x, w = state.round_index, state.params, state.push_sum_weight
        # Weights that stay one are left out on accelerators: two passes over the parameters. On a CPU that would take a
        # tenth longer, because z stays in place below.
        is_one = way.keeps_ones and not is_cpu()
        z = x if is_one else debiased_params(state)
        estimate, estimator_state, info = estimator.estimate(task, z, state.gradient, data, draws.gradient, k)
        noisy = released(noise, estimate, draws.noise)
        direction, memory, half_step = steps_of_round(noisy, state.optimizer, z, k)
        if way.keeps_ones and not is_one:
            # x = w z without rounding. The step is taken while mixing, because z stays in place when the new x replaces
            # x in memory. This saves a pass over the parameters: an iteration without noise takes 0.9 of the time.
            message = lambda z, d, w: (half_step(scale(w, z), d), w), (z, direction, w)
        elif is_one:
            # Written before it is mixed, or the step would be taken again for each receiver, and x copied to be read.
            message = lambda *both: both, (jax.lax.optimization_barrier(half_step(x, direction)), w)
        else:
            message = lambda *both: both, (half_step(x, direction), w)
        (new_params, new_weight), sent = way.send_result(draws.links, *message, k)
        awake, new = draws.links.awake, (new_params, w if is_one else new_weight, estimator_state, memory)
        params, weight, kept, memory = if_awake(awake, new, (x, w, state.gradient, state.optimizer))
        new_state = State(params=params, push_sum_weight=weight, gradient=kept, round_index=k + 1, optimizer=memory)
        return new_state, info_of_awake(awake, info).plus(plus_seeds(sent, noise.secrets, k))

    def node_params(state):
        params, weight = way.finish((state.params, state.push_sum_weight), state.round_index)
        state = state._replace(params=params, push_sum_weight=weight)
        return evaluated(task, debiased_params(state), state.gradient)

    has_table = estimator.sampling is not None and estimator.sampling.estimator == "saga"
    accountant = PRIVSGP_VR if has_table else PRIVSGP
    releases = of_noisy_gradients(accountant, task, graph.num_nodes, estimator, noise)
    nodes = graph.num_nodes, graph.names
    return algorithm(init, draw, update, node_params, estimator.upkeep(task), nodes, releases)


def debiased_params(state: State) -> PyTree:
    """z_i = x_i / w_i, leaves (n, *leaf)."""
    # The quotient is computed anew in every kernel that reads it. Whether it and a sum there (a layer's bias) become
    # one fused multiply-add, which rounds once, depends on how that kernel's loops came out, and so on the program
    # around it: a round alone and the same round in a scan differed by an ulp. A maximum in between keeps them apart;
    # it changes no finite number, but the compiler cannot drop it.
    quotient = scale(1.0 / state.push_sum_weight, state.params)
    return jax.tree.map(lambda z: jnp.maximum(z, jnp.finfo(z.dtype).min), quotient)


def released_gradients(
    graph: Graph, step_size: float | Array | Callable[[Array], Array], before: State, after: State
) -> PyTree:
    """Recover every node's noisy gradient of one round, as an observer of all messages can.

    A message of node j holds x_j^{k+1/2} up to a known weight. From the states around a round the same follows by
    solving x^{k+1} = P^k (x^k - gamma g) for g, unless links lose or round messages.

    Args:
        graph: as given to the algorithm, with one mixing in a round; static under jit.
        step_size: gamma as given to the algorithm. From a run with an optimizer nothing can be recovered.
        before, after: states around one round.

    Returns:
        Leaves (n, *leaf), float32, off by the rounding of x times the condition number of P^k, divided by gamma.

    Raises:
        ArgumentError: a mixing matrix that is singular or ill-conditioned.

    Guarantees:
        - equals the gradient plus the noise of the round.

    Examples:
        >>> import jaxfl
        >>> released_gradients(jaxfl.graphs.exponential(4), 0.1, None, None)
        Traceback (most recent call last):
        ...
        jaxfl.core.check.ArgumentError: graph: every mixing matrix must be well-conditioned (at most 1e+04); the one ...
    """
    condition = np.linalg.cond(graph.mixing_matrices)
    worst = int(np.argmax(condition))
    if not condition[worst] <= _MAX_CONDITION:
        found = f"the one of round {worst} of {graph.name} has condition number {condition[worst]:.3g}"
        remedy = "Audit on a directed ring with an odd number of nodes."
        requirement = f"every mixing matrix must be well-conditioned (at most {_MAX_CONDITION:g})"
        raise ArgumentError("graph", requirement, found, remedy)
    k = before.round_index
    dtype = number_type(before.params)
    inverse = jnp.asarray(np.linalg.inv(graph.mixing_matrices).astype(dtype))[k % graph.period]
    gamma = at_round(step_size, k, before.params)

    def solve(mixture, new):
        # The difference is small, so the inverse multiplies little rounding beyond that of the states.
        return jnp.tensordot(inverse, (mixture - new) / gamma, axes=1, precision=jax.lax.Precision.HIGHEST)

    return jax.tree.map(solve, mix(graph, before.params, k), after.params)


def theory_step_size(num_nodes: int, num_rounds: int) -> float:
    """gamma = sqrt(n / K) of Theorem 1.

    Args:
        num_nodes: n.
        num_rounds: K, iterations of the whole run.

    Raises:
        ArgumentError: a count below 1.

    Examples:
        >>> theory_step_size(4, 400)
        0.1
    """
    check.at_least(1, num_nodes=num_nodes, num_rounds=num_rounds)
    return (num_nodes / num_rounds) ** 0.5
