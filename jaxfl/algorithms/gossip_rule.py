"""Rounds that the methods over a graph have in common: a method is a rule, two functions of a node's numbers.

    g_i = gradient at x_i + noise,   (x_i, memory_i) <- step(x_i, memory_i, g_i),   start(x^0) -> memory

A rule of K steps gets, in place of g_i, the sum of direction(memory_i, g_i) at K points: x_i, and each a step further.

A rule meets its neighbors by differences only:

    d_i = sum_j W_ij (z_i - z_j),   so that z - d is W z

They are computed as u - W u, with u the messages less their mean over nodes. The mean is a device of arithmetic, and no
message. Where the nodes agree, d is small, and so is what rounding takes from it: sums over nodes that a method keeps
stay through thousands of rounds in float32. Textbook lines with 2 x^k - x^{k-1} drift (docs/new_algorithm.md).

Over `links` d_i runs over the messages that arrive, and over their rounded values at both ends: who misses a message
uses its own value. Where losses and W are symmetric, the d_i still sum to 0. Methods that need this refuse other links.

Privacy: all messages and memories are functions of noisy gradients, of earlier messages and of draws made without data.
A statement about the noisy gradients, one a node and step, covers them (proof in `push_sum`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.algorithms.activation import Activation, check_activation, if_awake, info_of_awake
from jaxfl.algorithms.exchange import exchange, keeps_sum, message_bits, plus_seeds
from jaxfl.algorithms.releases import of_noisy_gradients
from jaxfl.channel import LinkDraws, Links
from jaxfl.channel.links import PLAIN, RoundingKeys, RoundingValues
from jaxfl.core import Algorithm, ArgumentError, Array, Info, Key, Purpose, PyTree, Task, algorithm, check, purpose_key
from jaxfl.core.algorithm import at_round
from jaxfl.core.reprs import short_repr
from jaxfl.core.tasks import evaluated
from jaxfl.core.tree import descend, number_type, replicate
from jaxfl.gradients import GradientEstimator, mini_batch
from jaxfl.graphs import Graph, require_doubly_stochastic, require_strongly_connected, require_undirected
from jaxfl.privacy import NoiseMechanism
from jaxfl.privacy.gossip.compared import without_theorem
from jaxfl.privacy.mechanisms import NO_NOISE, check_types, released, require_kept_sum


class State(NamedTuple):
    """State carried to the next round."""

    params: PyTree  # x, leaves (n, *leaf), float32
    memory: dict[str, PyTree]  # what the method keeps beside x, by name, leaves (n, *leaf), float32
    gradient: Any  # state of the gradient estimator; None for mini_batch
    round_index: Array  # (), int32, rounds completed

    __repr__ = short_repr


class Draws(NamedTuple):
    """The random numbers of one round."""

    # Of a rule of K > 1 steps, the next two have leaves (n, K, ...).
    gradient: Any  # draws of the gradient estimator: which samples
    noise: PyTree  # leaves (n, *leaf), float32, already scaled, or int32, in steps of a grid; None without noise
    # Of each exchange which messages arrive, and how they are rounded.
    links: tuple[tuple[LinkDraws, RoundingKeys | RoundingValues | None], ...]
    rule: Any  # what the method draws for itself


class Round(NamedTuple):
    """One round, as a rule sees it."""

    round_index: Array  # (), int32
    step_size: Array  # (), gamma
    draws: Any  # what `Rule.draw` gave
    # (tree (n, *leaf), sends=None, bits=None) -> d, leaves (n, *leaf), once for each exchange. With `sends`, () bool,
    # False, nothing is sent and d is 0. `bits` of a message where they are not those of the tree.
    apart: Callable[..., PyTree]


class Rule(NamedTuple):
    """A method over a graph.

    Attributes:
        label: name of the method in statements.
        start: x^0 (n, *leaf) -> memory.
        step: (x, memory, noisy gradient at x, `Round`) -> (x, memory). Of K > 1 steps, the sum of their directions.
        num_exchanges: how often a round calls `apart`.
        one_matrix: needs one symmetric W for all rounds.
        needs_sum: why the differences must sum to 0 over the nodes; None where they need not.
        draw: (key, round index, params) -> what `step` draws for itself, the same number of times at every node.
        num_steps: K, gradients of a round, each with its own samples and noise. Static.
        direction: (memory, noisy gradient) -> along which a node makes each of K > 1 steps.
    """

    label: str
    start: Callable[[PyTree], dict[str, PyTree]]
    step: Callable[[PyTree, dict[str, PyTree], PyTree, Round], tuple[PyTree, dict[str, PyTree]]]
    num_exchanges: int = 1
    one_matrix: bool = False
    needs_sum: str | None = None
    draw: Callable[[Key, Array, PyTree], Any] = lambda key, round_index, params: None
    num_steps: int = 1
    direction: Callable[[dict[str, PyTree], PyTree], PyTree] = lambda memory, noisy: noisy


def by_rule(
    rule: Rule,
    task: Task,
    graph: Graph,
    step_size: float | Array | Callable[[Array], Array],
    gradient: GradientEstimator | None,
    noise: NoiseMechanism | None,
    links: Links | None,
    num_mixings: int = 1,
    activation: Activation | None = None,
) -> Algorithm:
    """Make a method over a graph from its rule; the arguments and what is refused are those of `d_sgdm`.

    Where `one_matrix` says so, the graph must be one symmetric matrix. `num_mixings` exchanges take the place of each
    one of the method; those behind the first send 32 bits a number.
    """
    check.scalar(step_size=step_size)
    check.positive(step_size=step_size)
    check.in_float32(step_size=step_size)
    if rule.one_matrix:
        require_undirected(graph, weights=True)
    require_doubly_stochastic(graph)
    require_strongly_connected(graph)
    noise, links, num_nodes, num_steps = noise or NO_NOISE, links or PLAIN, graph.num_nodes, rule.num_steps
    if rule.needs_sum is not None and not keeps_sum(graph, links):
        requirement = f"must lose messages of two nodes together, between nodes of equal weights: {rule.needs_sum}"
        remedy = "Pass jaxfl.links(..., symmetric=True) and an undirected graph."
        raise ArgumentError("links", requirement, "got losses that move the sum over nodes", remedy)
    check.per_node(num_nodes, noise=noise.noise_scale)
    require_kept_sum(noise, num_nodes, is_linear=True, loses_sum=not keeps_sum(graph, links))
    estimator = mini_batch() if gradient is None else gradient
    check_activation(activation, estimator, noise, num_nodes)
    # What is rounded is z, and not u: the exchange below gets rounded values.
    way = exchange(
        graph, links._replace(quantizer=None), num_mixings=num_mixings, first_bits=links.bits, activation=activation
    )

    def steps_of(k):
        return k * num_steps + jnp.arange(num_steps, dtype=jnp.int32)  # keys of each step

    def init(key, data):
        params = replicate(task.init(purpose_key(key, Purpose.INIT)), num_nodes)
        check_types(noise, task, params)
        estimator_state, memory = estimator.init(task, key, params, data), rule.start(params)
        return State(params=params, memory=memory, gradient=estimator_state, round_index=jnp.int32(0))

    def draw(key, state, data):
        k, count = state.round_index, rule.num_exchanges
        places = [k * count + e for e in range(count)]  # keys of each exchange

        def of_step(place):
            drawn = noise.draw(purpose_key(key, Purpose.NOISE, place), state.params)
            return estimator.draw_for(task, key, place, data), drawn

        of_gradient, of_noise = of_step(k) if num_steps == 1 else jax.vmap(of_step, out_axes=1)(steps_of(k))
        return Draws(
            gradient=of_gradient,
            noise=of_noise,
            links=tuple((way.draw(key, place), links.draw_rounding(key, place, num_nodes)) for place in places),
            rule=rule.draw(key, k, state.params),
        )

    def update(state, data, draws):
        k, sent, draws_of_links, awake = state.round_index, [], iter(draws.links), draws.links[0][0].awake
        gamma = at_round(step_size, k, state.params)

        def directed(x, kept, of_gradient, of_noise, place):
            estimate, kept, info = estimator.estimate(task, x, kept, data, of_gradient, place)
            return rule.direction(state.memory, released(noise, estimate, of_noise)), kept, info

        def step(carry, drawn):
            x, total, kept = carry
            along, kept, info = directed(x, kept, *drawn)
            return (descend(x, gamma, along), jax.tree.map(jnp.add, total, along), kept), info

        if num_steps == 1:
            total, kept, info = directed(state.params, state.gradient, draws.gradient, draws.noise, k)
        else:
            by_step = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), (draws.gradient, draws.noise))
            start = state.params, zeros(state.params), state.gradient
            (_, total, kept), infos = jax.lax.scan(step, start, (*by_step, steps_of(k)))
            info = _over_steps(infos)

        def apart(tree, sends=None, bits=None):
            arrivals, rounding = next(draws_of_links)
            messages, counts = links.send(tree, rounding)
            counts = counts if awake is None else {name: jnp.where(awake, one, 0) for name, one in counts.items()}
            around_zero = _less_mean(messages)
            mixture, numbers = way.send(arrivals, around_zero, k)
            difference = jax.tree.map(jnp.subtract, around_zero, mixture)
            numbers |= counts | ({} if bits is None else message_bits(graph, k, bits))
            if sends is not None:
                difference, numbers = jax.tree.map(lambda one: jnp.where(sends, one, 0), (difference, numbers))
            sent.append(numbers)
            return difference

        this = Round(round_index=k, step_size=gamma, draws=draws.rule, apart=apart)
        new = (*rule.step(state.params, state.memory, total, this), kept)
        params, memory, kept = if_awake(awake, new, (state.params, state.memory, state.gradient))
        numbers = functools.reduce(lambda one, other: {name: one[name] + other[name] for name in one}, sent)
        info = info_of_awake(awake, info).plus(plus_seeds(numbers, noise.secrets, k))
        return State(params=params, memory=memory, gradient=kept, round_index=k + 1), info

    def node_params(state):
        return evaluated(task, state.params, state.gradient)

    releases = of_noisy_gradients(without_theorem(rule.label, num_steps), task, num_nodes, estimator, noise)
    nodes = num_nodes, graph.names
    return algorithm(init, draw, update, node_params, estimator.upkeep(task), nodes, releases)


def _over_steps(infos: Info) -> Info:
    """Means of measurements and sums of counts over the steps of a round, (K, n) -> (n,)."""
    counts = jax.tree.map(lambda count: count.sum(axis=0, dtype=jnp.int32), infos.counts)
    return jax.tree.map(lambda value: value.mean(axis=0), Info(infos.loss, infos.measurements)).plus(counts)


def moved(start: PyTree, *steps: PyTree) -> PyTree:
    """start - steps[0] - steps[1] - ..., leaf by leaf."""
    return jax.tree.map(lambda x, *rest: functools.reduce(jnp.subtract, rest, x), start, *steps)


def zeros(params: PyTree) -> PyTree:
    """A memory that starts at 0, leaves (n, *leaf)."""
    return jax.tree.map(jnp.zeros_like, params)


def _less_mean(tree: PyTree) -> PyTree:
    """The tree, leaves (n, *leaf), less its mean over nodes."""

    def one(leaf):
        # The mean as a product: XLA's CPU backend sums over the first axis by strides, at a tenth of the speed.
        weights = jnp.full(len(leaf), 1 / len(leaf), number_type(leaf))
        return leaf - jnp.tensordot(weights, leaf, axes=1, precision=jax.lax.Precision.HIGHEST)[None]

    return jax.tree.map(one, tree)
