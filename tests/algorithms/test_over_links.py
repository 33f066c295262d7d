"""Algorithms over links that lose and round messages: the loops' lines, what is conserved, what is counted."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refused
from problems import irregular_graph, problem, run, small_task, start, uneven_data, with_clients
from reference import links as reference
from reference.fed_avg import Adam, descend
from reference.network import as_float64
from reference.perturbed_gossip import round_uniform
from reference.runs import (
    assert_same,
    by_node,
    client_batches,
    each,
    entries,
    flat,
    node_samples,
    one_by_one,
    plain_gradients,
    relative_error,
)
from registry import REGISTRY

import jaxfl
from jaxfl import ArgumentError, graphs
from jaxfl.channel import Quantizer, uniform_quantizer
from jaxfl.gradients import fixed, mini_batch
from jaxfl.privacy.tracking import TrackingSchedule

KEY, NODES, ROUNDS, NUM_PARAMETERS = jax.random.key(2), 5, 25, 53
STEP, LEVELS = 2.0**-5, 64
QUANTIZER = uniform_quantizer(STEP, levels=LEVELS)
QUANTIZE = functools.partial(round_uniform, step=STEP, levels=LEVELS)
BATCH, STEP_SIZE, CLIP_NORM = 3, 0.2, 0.7
# (links, how the loop rounds)
KINDS = {
    "lossy": (jaxfl.links(0.6), None),
    "rounded": (jaxfl.links(quantizer=QUANTIZER), QUANTIZE),
    "both, by sender": (jaxfl.links(np.linspace(0.4, 0.9, NODES), QUANTIZER), QUANTIZE),
}
EXCHANGES = {
    "push_sum": (jaxfl.push_sum, irregular_graph(), reference.push_sum),
    "d_psgd": (jaxfl.d_psgd, graphs.exponential(NODES), reference.d_psgd),
}
ALL_ARRIVE = np.ones((NODES, NODES), bool)


def exchanging(name, links):
    """An algorithm that exchanges parameters over a graph."""
    constructor, graph, _ = EXCHANGES[name]
    gradient = mini_batch(sampler=fixed(BATCH), clip_norm=CLIP_NORM)
    noise = jaxfl.gaussian(0.02)
    return constructor(small_task(), graph=graph, gradient=gradient, noise=noise, step_size=STEP_SIZE, links=links)


STATE_WEIGHTS = graphs.five_agents().state_weights
TRACKER_WEIGHTS = graphs.five_agents().tracker_weights + np.diag([0.3, 0.0, 0.2, 0.0, 0.1])


def tracking(links, noise_scale: Any = 0.0):
    """Gradient tracking on five agents, self-loops in one of the graphs."""
    scales: Any = noise_scale * (np if isinstance(noise_scale, float) else jnp).ones(ROUNDS + 1)
    return jaxfl.gradient_tracking(
        small_task(),
        state_weights=STATE_WEIGHTS,
        tracker_weights=TRACKER_WEIGHTS,
        schedule=TrackingSchedule(0.3, 0.25, 0.05, BATCH, state_noise_scale=scales, tracker_noise_scale=scales),
        clip_norm=8.0,
        links=links,
    )


def averaging(links, **changes):
    """Federated averaging, three of five clients."""
    options = {"num_active": 3, "num_local_steps": 2, "batch_size": 4, "step_size": 0.2, **changes}
    way = jaxfl.uplink(links=links, updates=options.pop("updates", None))
    return jaxfl.fed_avg(small_task(), **with_clients(**options), uplink=way)


def over(p, links):
    """The arguments by which messages of a registry's example travel over links."""
    return {"links": links} if p.example.over is None else p.example.over(links)


@functools.cache
def exchanged(name, kind):
    """The run of an exchange, one for all tests."""
    return one_by_one(exchanging(name, KINDS[kind][0]), KEY, uneven_data(), ROUNDS)


def numbers_of(rounding, like):
    """Numbers by which each node is rounded, or nothing."""
    return [None] * NODES if rounding is None else each(rounding.draw(like))


def arrived_of(draws):
    return ALL_ARRIVE if draws.links.arrived is None else np.asarray(draws.links.arrived)


@pytest.mark.parametrize(
    ("name", "kind"), [*(("push_sum", kind) for kind in [*KINDS][::-1]), ("d_psgd", "both, by sender")]
)
@pytest.mark.quick_cases(1)
def test_exchanges_follow_the_loop(name, kind):
    """Message by message, on the same draws; what is counted is what the loop would count."""
    (_, graph, loop), (links, quantize) = EXCHANGES[name], KINDS[kind]
    done, x0 = exchanged(name, kind), each(exchanged(name, kind).states[0].params)
    rounds = [
        (entries(d.gradient), each(d.noise), arrived_of(d), numbers_of(d.links.rounding, done.states[0].params))
        for d in done.draws
    ]
    references = plain_gradients(uneven_data(), BATCH, CLIP_NORM, 2)
    actual = loop(x0, graph.mixing_matrices, references, STEP_SIZE, rounds, quantize)
    x, weight, z = actual if name == "push_sum" else (actual, None, None)
    last = done.states[-1]
    assert relative_error(last.params, x) < 5e-4, "weights of 0.001 enlarge rounding"
    if weight is not None:
        np.testing.assert_allclose(last.push_sum_weight, weight, rtol=1e-5)
        assert relative_error(exchanging(name, links).node_params(last), z) < 5e-4
    for k, (draws, info) in enumerate(zip(done.draws, done.infos, strict=True)):
        edges = (graph.mixing_matrix(k) > 0) & ~np.eye(NODES, dtype=bool)
        sent = NUM_PARAMETERS * links.bits + (32 if name == "push_sum" else 0)
        np.testing.assert_array_equal(info.bits_sent, edges.sum(axis=0) * sent, "lost messages are sent, too")
        if links.may_lose:
            np.testing.assert_array_equal(info.lost_messages, (edges & ~arrived_of(draws)).sum(axis=0))
        else:
            assert "lost_messages" not in info.counts
        assert ("quantizer_overflow" in info.counts) == (quantize is not None)


@pytest.mark.parametrize(
    ("links", "noise_scale", "quantize"),
    [
        (jaxfl.links(0.6), 0.0, None),
        (jaxfl.links(np.linspace(0.4, 0.9, NODES), QUANTIZER), 0.0, QUANTIZE),
        (jaxfl.links(quantizer=QUANTIZER), 0.01, QUANTIZE),
    ],
    ids=["lossy", "both, by sender", "rounded, with noise"],
)
@pytest.mark.quick_cases(1)
def test_gradient_tracking_follows_the_loop_and_keeps_the_trackers_sum(links, noise_scale, quantize):
    """x, broadcast x, y and g; without tracker noise sum_i y_i = sum_i g_i in every round."""
    algorithm, data = tracking(links, noise_scale), uneven_data()
    done = one_by_one(algorithm, KEY, data, ROUNDS)
    first = done.states[0]
    batch = mini_batch(sampler=fixed(BATCH)).draw(KEY, jnp.int32(0), data)
    zeta = jaxfl.laplace(noise_scale).draw(jaxfl.core.purpose_key(KEY, jaxfl.core.Purpose.NOISE, 0), first.params)
    rounds = []
    for draws in done.draws:
        both = (None, None)
        if draws.links.rounding is not None:
            both = draws.links.rounding.draw((first.params, first.gradient_tracker))
        numbers = [[None] * NODES if one is None else each(one) for one in both]
        noises = (each(draws.state_noise), each(draws.tracker_noise))
        rounds.append((entries(draws.gradient), *noises, arrived_of(draws), *numbers))
    expected = reference.gradient_tracking(
        each(first.params),
        STATE_WEIGHTS,
        TRACKER_WEIGHTS,
        plain_gradients(data, BATCH, 8.0, 1),
        (0.3, 0.25, 0.05),
        (entries(batch), each(zeta), numbers_of(links.draw_rounding(KEY, 0, NODES), first.params)),
        rounds,
        quantize,
    )
    last = done.states[-1]
    for ours, theirs in zip(
        (last.params, last.broadcast_params, last.gradient_tracker, last.gradient), expected, strict=True
    ):
        assert relative_error(ours, theirs) < 1e-5
    for state in done.states if noise_scale == 0 else ():
        difference = by_node(state.gradient_tracker).sum(axis=0) - by_node(state.gradient).sum(axis=0)
        np.testing.assert_allclose(difference, 0.0, atol=1e-5)
    edges = ((STATE_WEIGHTS > 0).astype(int) + (TRACKER_WEIGHTS > 0)) * ~np.eye(NODES, dtype=bool)
    for draws, info in zip(done.draws, done.infos, strict=True):
        np.testing.assert_array_equal(info.bits_sent, edges.sum(axis=0) * NUM_PARAMETERS * links.bits)
        if links.may_lose:
            np.testing.assert_array_equal(info.lost_messages, (edges * ~arrived_of(draws)).sum(axis=0))


def test_gradient_tracking_refuses_to_lose_messages_beside_noise():
    """Its budget holds for weights that do not change. What may be lost, or noise, counts also where it is traced."""
    tracking(jaxfl.links(quantizer=QUANTIZER), 0.01)
    with pytest.raises(ArgumentError, match=r"^links: must lose nothing where there is noise"):
        tracking(jaxfl.links(0.9), 0.01)
    with pytest.raises(ArgumentError, match=r"^links: "):
        jax.eval_shape(lambda success: tracking(jaxfl.links(success), 0.01).draw, jnp.float32(1.0))
    with pytest.raises(ArgumentError, match=r"^links: "):
        jax.eval_shape(lambda scale: tracking(jaxfl.links(0.9), scale).draw, jnp.float32(0.0))


CLIENTS = {
    "rounded": (jaxfl.links(quantizer=QUANTIZER), QUANTIZE, {}, lambda: descend),
    "both, adam": (jaxfl.links(0.4, QUANTIZER), QUANTIZE, {"server_optimizer": optax.adam(0.03)}, lambda: Adam(0.03)),
}


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.quick_cases(1)
def test_federated_averaging_follows_the_loop(kind):
    """The mean over clients that arrive, whose updates are rounded; where none arrives the server's state stays."""
    (links, quantize, options, server), data = CLIENTS[kind], uneven_data()
    algorithm, sizes = averaging(links, **options), tuple(np.asarray(data.sizes).tolist())
    with jax.numpy_dtype_promotion("standard"):  # optax.adam raises a Python number to an int32 power
        done = one_by_one(algorithm, KEY, data, ROUNDS)
    rounds, nobody = [], 0
    for before, draws, after, info in zip(done.states[:-1], done.draws, done.states[1:], done.infos, strict=True):
        arrived = np.ones(NODES, bool) if draws.uplink.links.arrived is None else np.asarray(draws.uplink.links.arrived)
        of_one = jax.tree.map(lambda leaf: jnp.zeros((NODES, *leaf.shape), leaf.dtype), before.params)
        numbers = numbers_of(draws.uplink.links.rounding, of_one)
        batches = client_batches(np.asarray(draws.active), np.asarray(draws.steps.batch_indices), sizes)
        rounds.append([(i, steps, arrived[i], numbers[i]) for i, steps in batches])
        is_active = np.isin(np.arange(NODES), draws.active)
        np.testing.assert_array_equal(info.bits_sent, is_active * links.bits * NUM_PARAMETERS)
        np.testing.assert_array_equal(info.bits_received, is_active * 32 * NUM_PARAMETERS)
        if links.may_lose:
            np.testing.assert_array_equal(info.lost_messages, is_active & ~arrived)
        if not (is_active & arrived).any():
            nobody += 1
            assert_same(before._replace(round_index=after.round_index), after)
            assert (float(info.update_norm), float(info.pseudo_gradient_norm)) == (0.0, 0.0)
    assert (nobody > 1) == links.may_lose, "in some rounds nobody arrives"
    local = {"step_size": 0.2, "momentum": 0.0, "weight_decay": 0.0}
    x0 = as_float64(algorithm.node_params(done.states[0]), 0)
    x = reference.fed_avg(x0, node_samples(data), rounds, server(), quantize, **local)
    actual = flat(as_float64(algorithm.node_params(done.states[-1]), 0))
    assert np.linalg.norm(actual - flat(x)) < 1e-5 * np.linalg.norm(flat(x))


def test_a_lost_model_that_is_not_finite_does_not_count():
    data = uneven_data()
    algorithm = averaging(jaxfl.links(0.5), num_active=5)
    state = start(algorithm, KEY, data)
    draws = jax.jit(algorithm.draw)(KEY, state, data)
    lost = ~np.asarray(draws.uplink.links.arrived)
    assert 0 < lost.sum() < NODES
    inputs = np.array(data.inputs)
    for node in np.flatnonzero(lost):
        inputs[np.asarray(data.indices)[node, : int(data.sizes[node])]] = np.nan
    after, _ = jax.jit(algorithm.update)(state, data._replace(inputs=inputs), draws)
    assert np.isfinite(flat(after.params)).all()


def test_private_updates_that_are_lost_count_as_zero_and_what_arrives_is_clipped_after_rounding():
    """The server's sum moves by at most the clip norm whatever a client sends; noise is added in every round."""
    data, clip_norm = uneven_data(), 0.01
    coarse = uniform_quantizer(1.0)  # rounds to norms far above the clip norm
    updates = jaxfl.private_updates(clip_norm=clip_norm, noise=jaxfl.gaussian(1e-9))

    def moved(links):
        algorithm = averaging(links, num_active=5, updates=updates, weighting="uniform")
        state = start(algorithm, KEY, data)
        after, info = jax.jit(algorithm.round)(KEY, state, data)
        return 5 * (flat(after.params) - flat(state.params)), info

    total, info = moved(jaxfl.links(0.5, coarse))
    arrived = NODES - int(info.lost_messages.sum())
    assert 0 < int(info.clipped_updates.sum()) <= arrived < NODES
    assert 0.5 * clip_norm < np.linalg.norm(total) < arrived * clip_norm * (1 + 1e-4)
    assert np.mean(np.abs(total) < 1e-5) > 0.5, "most numbers are rounded to 0"
    nothing, info = moved(jaxfl.links(0.0))
    assert int(info.lost_messages.sum()) == NODES
    assert 0 < np.linalg.norm(nothing) < 1e-6, "noise alone"


@pytest.mark.parametrize("name", [*EXCHANGES, "gradient_tracking", "fed_avg"])
@pytest.mark.quick_cases(2)
def test_links_that_lose_and_round_nothing_change_no_bit(name):
    """The same program, instruction by instruction, also where push-sum weights stay one."""
    p = problem(name)
    for changes in ({}, {"graph": graphs.exponential(NODES)} if name in ("push_sum", "d_psgd") else {}):
        texts = []
        for links in (jaxfl.links(), None):
            algorithm = p.algorithm(**over(p, links), **changes)
            first = jax.eval_shape(lambda key, a=algorithm: a.init(key, p.data), KEY)
            texts.append(str(jax.make_jaxpr(algorithm.round)(KEY, first, p.data)))
        assert texts[0] == texts[1]


LINKED = [
    name
    for name, row in REGISTRY.items()
    if "links" in (taken := inspect.signature(row.constructor).parameters)
    or ("uplink" in taken and (name == "dzofl" or problem(name).example.over is not None))
]


@pytest.mark.parametrize("name", LINKED)
def test_links_of_another_size_are_refused_before_a_round(name):
    p = problem(name)
    for shape in ((NODES - 1,), (NODES + 1, NODES + 1)):
        links = jaxfl.links(np.full(shape, 0.5))
        taken = {"uplink": links} if name == "dzofl" else over(p, links)
        refused(lambda taken=taken: p.algorithm(**taken).init(KEY, p.data), "success", "shape")


@pytest.mark.parametrize("name", LINKED)
@pytest.mark.quick_cases(2)
def test_bursts_reach_every_algorithm_that_takes_links(name):
    """A recovery equal to success changes no bit; another changes what is lost."""
    p = problem(name)

    def after(**options):
        links = jaxfl.links(0.6, **options)
        taken = {"uplink": links} if name == "dzofl" else over(p, links)
        return run(p.algorithm(noise_scale=0.0, **taken), KEY, p.data, 6)

    (plain, lost), (same, _), (_, in_bursts) = after(), after(recovery=0.6), after(recovery=0.1)
    assert_same(same, plain)
    assert 0 < lost.lost_messages.sum() < in_bursts.lost_messages.sum()


@pytest.mark.parametrize("name", ["push_sum", "d_psgd", "gradient_tracking", "fed_avg"])
@pytest.mark.quick_cases(1)
def test_overflow_is_counted_at_every_node(name):
    """By a quantizer whose range nothing is in: everything that is sent overflows."""
    everything = Quantizer(
        bits=1.0, apply=lambda values, uniform: values, overflows=lambda values: jnp.int32(values.size)
    )
    p = problem(name)
    _, infos = run(p.algorithm(**over(p, jaxfl.links(quantizer=everything))), KEY, p.data, 2)
    messages = 2 if name == "gradient_tracking" else 1  # a state and a tracker
    took_part = getattr(infos, "active", np.ones((2, NODES), int))
    np.testing.assert_array_equal(infos.quantizer_overflow, took_part * messages * NUM_PARAMETERS)
