"""Gossip averaging: D-PSGD, and DP2-SGD, which is D-PSGD with noise on a fixed undirected graph.

    x_i^{k+1} = sum_j W_ij x_j^k - gamma (g_i^k + N_i^k),   g_i at x_i^k

| symbol | here |
|---|---|
| x_i | `State.params` |
| g_i | `gradient` |
| N_i | `noise` |
| gamma, W | `step_size`, `graph` |

With `num_mixings` M the first term is a product of M matrices, of the places kM, ..., kM + M - 1 of the graph's period.
A message is then still a function of earlier noisy gradients, so that no epsilon changes (proof in `push_sum`).

D-PSGD: Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can Decentralized Algorithms Outperform Centralized Algorithms?",
NeurIPS 2017, arXiv:1705.09056, Algorithm 1. DP2-SGD: Yu, Zou, Chen, Tao, Tian, Lv, Cheng, "Decentralized Parallel SGD
with Privacy Preservation in Vehicular Networks", IEEE Transactions on Vehicular Technology 70(6), 2021. A(DP)2SGD, its
asynchronous relative, is in `a_dp2_sgd`.

Over `links` the message x_j may be lost, and may be rounded to q_j. A receiver that misses a message uses its own value
in place of it, and a node subtracts from its own value the rounded shares that it gives:

    x_i^{k+1} = x_i^k + sum_{j: arrived} W_ij (q_j^k - q_i^k) - gamma (g_i^k + N_i^k)

The rows of the resulting matrix sum to 1 in every round. Its columns do, too, if W is symmetric and both directions of
an edge fail together (`jaxfl.links(..., symmetric=True)`). Otherwise lost messages move the mean of the nodes. Links do
not weaken a privacy statement about the messages, for the reasons in `push_sum`.

Differences from the papers: links; more than one exchange in a round; any gradient estimator; for D-PSGD optional noise
and any sequence of doubly stochastic matrices. The paper's DP2-SGD chooses its noise by basic composition; here the
caller does, by `jaxfl.privacy`.

Does not claim: a privacy guarantee. The noise has the scale that the caller passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.algorithms.activation import Activation, check_activation, if_awake, info_of_awake
from jaxfl.algorithms.clients.robust import Aggregate, Attack
from jaxfl.algorithms.exchange import exchange, keeps_sum, plus_seeds
from jaxfl.algorithms.node_steps import node_steps
from jaxfl.algorithms.releases import of_noisy_gradients
from jaxfl.algorithms.robust_neighbors import ClippedGossip, robust_exchange
from jaxfl.algorithms.robust_neighbors import Draws as RobustDraws
from jaxfl.channel import LinkDraws, Links
from jaxfl.channel.links import PLAIN
from jaxfl.core import Algorithm, ArgumentError, Array, Purpose, PyTree, Task, algorithm, check, purpose_key
from jaxfl.core.algorithm import at_round, constructor
from jaxfl.core.reprs import short_repr
from jaxfl.core.tasks import evaluated
from jaxfl.core.tree import replicate
from jaxfl.gradients import GradientEstimator, mini_batch
from jaxfl.graphs import (
    Graph,
    mix,
    require_doubly_stochastic,
    require_strongly_connected,
    require_undirected,
)
from jaxfl.privacy import D_PSGD, DP2_SGD, NoiseMechanism
from jaxfl.privacy.mechanisms import NO_NOISE, check_types, released, require_kept_sum, require_own_noise

if TYPE_CHECKING:
    import optax


class State(NamedTuple):
    """State carried to the next round."""

    params: PyTree  # x, leaves (n, *leaf), float32
    gradient: Any  # state of the gradient estimator; None for mini_batch
    round_index: Array  # (), int32, rounds completed
    optimizer: Any = None  # state of each node's optimizer, leaves (n, *leaf); None with a step size

    __repr__ = short_repr


class Draws(NamedTuple):
    """The random numbers of one round."""

    gradient: Any  # draws of the gradient estimator: which samples
    noise: PyTree  # leaves (n, *leaf), float32, already scaled, or int32, in steps of a grid; None without noise
    links: LinkDraws | RobustDraws  # which messages arrive, and how they are rounded


@constructor
def d_psgd(
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
    aggregate: Aggregate | ClippedGossip | None = None,
    attack: Attack | None = None,
    activation: Activation | None = None,
) -> Algorithm:
    """Decentralised parallel SGD.

    Node i holds the parameters x_i^k in round k.

    Args:
        task: the learning task.
        graph: a doubly stochastic mixing matrix or a periodic sequence of them, strongly connected over its period.
        step_size: gamma: a number, a traced scalar, or a schedule of the round index (any optax schedule).
        gradient: how each node estimates its gradient; default `mini_batch()`, one uniform sample.
        noise: added to every node's gradient in every round; None adds nothing. `shared_gaussian` needs a step size,
            and symmetric matrices and losses over links that lose: else the sum over nodes changes and nothing cancels.
        links: `jaxfl.links(...)`, over which messages travel; None loses and rounds nothing.
        optimizer: any optax optimizer, in place of a step size. Each node runs its own: the update for the noisy
            gradient, given x_i^k, is added to the mixture. The optimizer's state stays at the node. It is computed from
            noisy gradients alone, so a privacy statement about these covers it.
        num_mixings: M, exchanges of a round. Epsilon is that of one, bits are M times as many. Static.
        num_final_mixings: exchanges after the last round, over links that lose and round nothing: `node_params` gives
            what they would make of the state. Their bits count in the first round. Static.
        aggregate: what a node makes of its own and its neighbors' x in place of their sum by W:
            `jaxfl.algorithms.clipped_gossip(1.0)`, or a robust mean such as `trimmed_mean(1)`, where they weigh alike
            and the mean of the nodes moves. It takes one exchange a round, and no noise that pairs share.
        attack: what some nodes send in place of x, such as `jaxfl.algorithms.sign_flip([0, 3])`; `sign_flip(2)` draws
            them.
        activation: nodes that sleep in some rounds, such as `jaxfl.algorithms.random_activation(0.5)`, which lowers no
            epsilon. Where W is symmetric the mean of the nodes then moves by the steps of those that are awake only.
            None: all are awake. Not with a gradient table, noise that pairs share, a robust mean or attackers.

    Returns:
        An `Algorithm`; the loss of its info is taken at the parameters before the round.

    Raises:
        ArgumentError: a graph that does not qualify, a step size out of range, or noise of another size.

    Guarantees:
        - node mean preserved by mixing: it moves by minus step_size times the mean noisy gradient.
        - also over links with symmetric losses, rounded or not, where the matrix is symmetric.
        - a lost message's share stays with its receiver: equal parameters stay equal under mixing.
        - links that lose and round nothing change no bit, nor does an attack of nobody.
        - no noise, no clipping and one node give stochastic gradient descent.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> data = jaxfl.federate(np.eye(4, 2, dtype="float32"), np.ones(4, "float32"), [[0, 1], [2, 3]])
        >>> learner = jaxfl.d_psgd(task, graph=jaxfl.graphs.complete(2), step_size=0.1)
        >>> key = jax.random.key(0)
        >>> state, info = jax.jit(learner.round)(key, learner.init(key, data), data)
        >>> info.gradient_evaluations.tolist()
        [1, 1]
    """
    init_steps, steps_of_round = node_steps(step_size, optimizer)
    require_doubly_stochastic(graph)
    require_strongly_connected(graph)
    noise, links = noise or NO_NOISE, links or PLAIN
    check.per_node(graph.num_nodes, noise=noise.noise_scale)
    loses_sum = not keeps_sum(graph, links)
    require_kept_sum(noise, graph.num_nodes, is_linear=optimizer is None, loses_sum=loses_sum)
    estimator = mini_batch() if gradient is None else gradient
    check_activation(activation, estimator, noise, graph.num_nodes)
    attack = None if attack is None or attack.num_attackers == 0 else attack
    if aggregate is None and attack is None:
        way = exchange(
            graph, links, num_mixings=num_mixings, num_final_mixings=num_final_mixings, activation=activation
        )
    else:
        require_own_noise("a robust mean does not cancel it", noise=noise.distribution)
        if activation is not None:
            found, remedy = "got a robust mean or attackers", "Leave activation out."
            raise ArgumentError("activation", "must be None with aggregate or attack", found, remedy)
        if (num_mixings, num_final_mixings) != (1, 0):
            found, remedy = f"got {num_mixings} and {num_final_mixings}", "Leave num_mixings and num_final_mixings out."
            requirement = "must be one exchange a round, and none after the last, with aggregate or attack"
            raise ArgumentError("num_mixings", requirement, found, remedy)
        way = robust_exchange(graph, links, aggregate, attack)

    def init(key, data):
        params = replicate(task.init(purpose_key(key, Purpose.INIT)), graph.num_nodes)
        check_types(noise, task, params)
        estimator_state = estimator.init(task, key, params, data)
        memory = init_steps(params)
        return State(params=params, gradient=estimator_state, round_index=jnp.int32(0), optimizer=memory)

    def draw(key, state, data):
        k = state.round_index
        return Draws(
            gradient=estimator.draw_for(task, key, k, data),
            noise=noise.draw(purpose_key(key, Purpose.NOISE, k), state.params),
            links=way.draw(key, k),
        )

    def update(state, data, draws):
        k = state.round_index
        estimate, estimator_state, info = estimator.estimate(
            task, state.params, state.gradient, data, draws.gradient, k
        )
        noisy = released(noise, estimate, draws.noise)
        direction, memory, step = steps_of_round(noisy, state.optimizer, state.params, k)
        mixture, sent = way.send(draws.links, state.params, k)
        awake = None if activation is None else draws.links.awake
        new, old = (step(mixture, direction), estimator_state, memory), (state.params, state.gradient, state.optimizer)
        params, estimator_state, memory = if_awake(awake, new, old)
        new_state = State(params=params, gradient=estimator_state, round_index=k + 1, optimizer=memory)
        return new_state, info_of_awake(awake, info).plus(plus_seeds(sent, noise.secrets, k))

    def node_params(state):
        return evaluated(task, way.finish(state.params, state.round_index), state.gradient)

    releases = of_noisy_gradients(D_PSGD, task, graph.num_nodes, estimator, noise)
    nodes = graph.num_nodes, graph.names
    return algorithm(init, draw, update, node_params, estimator.upkeep(task), nodes, releases)


@constructor
def dp2_sgd(
    task: Task,
    *,
    graph: Graph,
    step_size: float | Array | Callable[[Array], Array] | None = None,
    noise: NoiseMechanism,
    gradient: GradientEstimator | None = None,
    links: Links | None = None,
    optimizer: optax.GradientTransformation | None = None,
    num_mixings: int = 1,
    num_final_mixings: int = 0,
) -> Algorithm:
    """D-PSGD with noise on a fixed undirected graph.

    Args:
        task, step_size, gradient, links, optimizer, num_mixings: as for `d_psgd`.
        num_final_mixings: as for `d_psgd`. The paper's round ends with a node's own fresh noise; 1 measures it after a
            mixing, as PrivSGP is.
        graph: one symmetric, doubly stochastic mixing matrix for all rounds, connected.
        noise: added to every node's gradient in every round.

    Raises:
        ArgumentError: a graph that changes or is not symmetric, no noise, or as `d_psgd`.

    Guarantees:
        - the same rounds as d_psgd with the same arguments.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
        >>> dp2_sgd(task, graph=jaxfl.graphs.exponential(4), step_size=0.1, noise=jaxfl.gaussian(1.0))
        Traceback (most recent call last):
        ...
        jaxfl.core.check.ArgumentError: graph: must be the same in every round; exponential(4) has 2 mixing matrices ...
    """
    require_undirected(graph, weights=True)
    options = {"step_size": step_size, "gradient": gradient, "noise": noise, "links": links, "optimizer": optimizer}
    options |= {"num_mixings": num_mixings, "num_final_mixings": num_final_mixings}
    estimator = mini_batch() if gradient is None else gradient
    releases = of_noisy_gradients(DP2_SGD, task, graph.num_nodes, estimator, noise)
    return d_psgd(task, graph=graph, **options)._replace(releases=releases)


def released_gradients(
    graph: Graph, step_size: float | Array | Callable[[Array], Array], before: State, after: State
) -> PyTree:
    """Recover every node's noisy gradient of one round, as an observer of all messages can: (W x^k - x^{k+1}) / gamma.

    The states do not suffice over links that lose or round messages.

    Args:
        graph: as given to the algorithm, with one mixing in a round; static under jit.
        step_size: gamma as given to the algorithm. From a run with an optimizer nothing can be recovered.
        before, after: states around one round.

    Returns:
        Leaves (n, *leaf), float32, off by the rounding of x divided by gamma.

    Guarantees:
        - equals the gradient plus the noise of the round.
    """
    gamma = at_round(step_size, before.round_index, before.params)
    mixture = mix(graph, before.params, before.round_index)
    return jax.tree.map(lambda old, new: (old - new) / gamma, mixture, after.params)
