"""Several exchanges of a round, and exchanges after the last: the loops' lines, what stays, what counts."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refused
from problems import irregular_graph, run, small_task, start, uneven_data
from reference import links as over_links
from reference.gossip import d_psgd as reference_d_psgd
from reference.perturbed_gossip import perturbed_gossip as reference_perturbed_gossip
from reference.perturbed_gossip import round_uniform
from reference.push_sum import push_sum as reference_push_sum
from reference.runs import assert_same, by_node, each, entries, one_by_one, plain_gradients, relative_error

import jaxfl
from jaxfl import graphs
from jaxfl.algorithms import a_dp2_sgd, d_psgd, dp2_sgd, perturbed_gossip, push_sum
from jaxfl.channel import uniform_quantizer
from jaxfl.gradients import fixed, mini_batch
from jaxfl.graphs import mix
from jaxfl.privacy.tracking import TrackingSchedule

KEY, NODES, MIXINGS, ROUNDS, NUM_PARAMETERS = jax.random.key(3), 5, 3, 20, 53
BATCH, STEP_SIZE, CLIP_NORM = 3, 0.2, 0.7
QUANTIZER = uniform_quantizer(2.0**-5, levels=64)
LOSSY = jaxfl.links(0.7, QUANTIZER)
UNDIRECTED = graphs.star(NODES, weights="metropolis")
# Period 3, and matrices that do not commute: round k at the place k, in place of 3k, gives another product.
TURNING = graphs.sequence([irregular_graph(), graphs.directed_ring(NODES)])


def learner(constructor, graph, **options):
    gradient = mini_batch(sampler=fixed(BATCH), clip_norm=CLIP_NORM)
    options = {"num_mixings": MIXINGS, "step_size": STEP_SIZE, **options}
    return constructor(small_task(), graph=graph, gradient=gradient, noise=jaxfl.gaussian(0.02), **options)


def gossip(num_rounds=ROUNDS, **options):
    numbers = np.full((NODES, num_rounds + 1), 0.02)
    plan = TrackingSchedule(0.3, np.nan, 0.1, BATCH, state_noise_scale=numbers, tracker_noise_scale=np.empty(0))
    options = {"num_mixings": MIXINGS, "gradient_at": "broadcast", "distribution": "gaussian", **options}
    return perturbed_gossip(small_task(), graph=UNDIRECTED, schedule=plan, clip_norm=CLIP_NORM, **options)


def references():
    return plain_gradients(uneven_data(), BATCH, CLIP_NORM, 2)


@pytest.mark.parametrize(
    ("constructor", "graph", "loop"),
    [
        (push_sum, TURNING, reference_push_sum),
        (d_psgd, graphs.exponential(NODES), reference_d_psgd),
        (dp2_sgd, UNDIRECTED, reference_d_psgd),
    ],
)
def test_a_round_of_three_exchanges_follows_the_loop(constructor, graph, loop):
    """Matrices 3k, 3k + 1, 3k + 2 of the period, after one step; the bits of all three."""
    done = one_by_one(learner(constructor, graph), KEY, uneven_data(), ROUNDS)
    x0, rounds = each(done.states[0].params), [(entries(one.gradient), each(one.noise)) for one in done.draws]
    expected = loop(x0, graph.mixing_matrices, references(), STEP_SIZE, rounds, mixings=MIXINGS)
    x = expected[0] if isinstance(expected, tuple) else expected
    assert relative_error(done.states[-1].params, x) < 1e-5
    places = range(MIXINGS * (ROUNDS - 1), MIXINGS * ROUNDS)
    messages = sum((graph.mixing_matrix(place) > 0).sum(axis=0) - 1 for place in places)
    sent = messages * 32 * (NUM_PARAMETERS + (constructor is push_sum))
    np.testing.assert_array_equal(done.infos[-1].bits_sent, sent)


def test_each_exchange_draws_links_and_counts_for_itself():
    """Over links that lose and round, message by message; the numbers are those of the draws."""
    graph, data = irregular_graph(), uneven_data()
    done = one_by_one(learner(push_sum, graph, links=LOSSY), KEY, data, ROUNDS)
    x0, like = each(done.states[0].params), done.states[0].params
    rounds = []
    for draws in done.draws:
        numbers = [each(jax.tree.map(lambda a, m=m: a[m], draws.links).rounding.draw(like)) for m in range(MIXINGS)]
        rounds.append((entries(draws.gradient), each(draws.noise), np.asarray(draws.links.arrived), numbers))
    quantize = functools.partial(round_uniform, step=2.0**-5, levels=64)
    x, w, _ = over_links.push_sum(x0, graph.mixing_matrices, references(), STEP_SIZE, rounds, quantize, mixings=MIXINGS)
    assert relative_error(done.states[-1].params, x) < 5e-4, "small weights enlarge rounding"
    np.testing.assert_allclose(done.states[-1].push_sum_weight, w, rtol=1e-4)
    for k, (draws, info) in enumerate(zip(done.draws, done.infos, strict=True)):
        edges = [(graph.mixing_matrix(MIXINGS * k + m) > 0) & ~np.eye(NODES, dtype=bool) for m in range(MIXINGS)]
        lost = sum((each & ~arrived).sum(axis=0) for each, arrived in zip(edges, rounds[k][2], strict=True))
        np.testing.assert_array_equal(info.lost_messages, lost)
        bits = sum(each.sum(axis=0) for each in edges) * (6 * NUM_PARAMETERS + 32)
        np.testing.assert_array_equal(info.bits_sent, bits)
        assert not np.array_equal(draws.links.arrived[0], draws.links.arrived[1]), "drawn anew"


@pytest.mark.parametrize("links", [None, LOSSY], ids=["plain", "over links"])
def test_the_noisy_gradients_of_a_round_do_not_depend_on_its_exchanges(links, monkeypatch):
    """Bit for bit, given key and state: that is all that the statements are about. So are the draws of one exchange."""
    data, seen = uneven_data(), []
    module = importlib.import_module("jaxfl.algorithms.push_sum")
    plain = module.released

    def watched(*args):
        seen.append(plain(*args))
        return seen[-1]

    monkeypatch.setattr(module, "released", watched)
    graph = graphs.exponential(NODES)
    one, three = (learner(push_sum, graph, links=links, num_mixings=m) for m in (1, MIXINGS))
    state = run(one, KEY, data, 4)[0]
    seen.clear()
    draws = [each.draw(KEY, state, data) for each in (one, three)]
    assert_same(draws[0]._replace(links=None), draws[1]._replace(links=None))
    after = [each.update(state, data, drawn)[0] for each, drawn in zip((one, three), draws, strict=True)]
    assert_same(seen[0], seen[1])
    assert not np.array_equal(by_node(after[0].params), by_node(after[1].params))
    if links is not None:  # with one exchange the place is the round
        first = three.draw(KEY, state._replace(round_index=jnp.int32(0)), data)
        alone = one.draw(KEY, state._replace(round_index=jnp.int32(0)), data)
        np.testing.assert_array_equal(first.links.arrived[0], alone.links.arrived)
        both = (jax.random.key_data(draws.links.rounding.keys) for draws in (first, alone))
        np.testing.assert_array_equal(next(both)[0], next(both))


def test_sums_stay_over_a_thousand_rounds_of_lost_and_rounded_messages():
    """Weights sum to n, and the sum of x moves by the step only, in float32."""
    data, graph = uneven_data(), irregular_graph()
    lossy = learner(push_sum, graph, links=LOSSY)
    still = learner(push_sum, graph, links=LOSSY, step_size=1e-30)  # steps below what float32 adds
    first = start(still, KEY, data)
    own = jax.tree.map(
        lambda leaf: leaf * jnp.arange(1.0, NODES + 1).reshape(-1, *(1,) * (leaf.ndim - 1)), first.params
    )
    first = first._replace(params=own)
    last, _ = run(still, KEY, data, 1000, state=first)
    np.testing.assert_allclose(last.push_sum_weight.sum(), NODES, rtol=1e-5)
    np.testing.assert_allclose(by_node(last.params).sum(axis=0), by_node(own).sum(axis=0), atol=5e-5)
    assert np.abs(by_node(last.params) - by_node(own)).max() > 0.1, "they were mixed"
    last, _ = run(lossy, KEY, data, 1000)
    np.testing.assert_allclose(last.push_sum_weight.sum(), NODES, rtol=1e-5)


def test_log_n_exchanges_of_the_exponential_graph_are_the_mean():
    graph, data = graphs.exponential(8), uneven_data((4,) * 8)
    algorithm = learner(push_sum, graph)
    state, _ = run(algorithm, KEY, data, 2)
    x = by_node(state.params)
    np.testing.assert_allclose(x, np.broadcast_to(x.mean(axis=0), x.shape), atol=1e-6)
    apart = by_node(run(learner(push_sum, graph, num_mixings=2), KEY, data, 2)[0].params)
    assert np.abs(apart - apart.mean(axis=0)).max() > 1e-3


@pytest.mark.parametrize("quantizer", [None, uniform_quantizer(0.05, levels=256)])
def test_perturbed_gossip_passes_on_mixtures_of_broadcasts_only(quantizer):
    """The loop's lines. What the exchanges add does not see a private state: it is a function of the broadcasts."""
    data, algorithm = uneven_data(), gossip(quantizer=quantizer)
    done = one_by_one(algorithm, KEY, data, ROUNDS)
    first = jax.jit(algorithm.draw)(KEY, done.states[0]._replace(round_index=jnp.int32(-1)), data)

    def perturbation(draws):
        return each(draws.state_noise), [None] * NODES if quantizer is None else each(draws.rounding)

    quantize = quantizer and functools.partial(round_uniform, step=0.05, levels=256)
    rounds = [(entries(draws.gradient), *perturbation(draws)) for draws in done.draws]
    x, x_sent = reference_perturbed_gossip(
        each(done.states[0].params),
        UNDIRECTED.mixing_matrix(0),
        references(),
        (0.3, 0.1),
        perturbation(first),
        rounds,
        quantize,
        "broadcast",
        mixings=MIXINGS,
    )
    assert relative_error(done.states[-1].params, x) < 1e-5
    assert relative_error(done.states[-1].broadcast_params, x_sent) < 1e-5
    bits = (8 if quantizer else 32) + 32 * (MIXINGS - 1)
    np.testing.assert_array_equal(done.infos[0].bits_sent, np.array([4, 1, 1, 1, 1]) * bits * NUM_PARAMETERS)

    state, draws, update = done.states[3], done.draws[3], jax.jit(algorithm.update)
    moved = jax.tree.map(lambda leaf: leaf + 1.0, state.params)
    before, after = (update(one, data, draws)[0].params for one in (state, state._replace(params=moved)))
    difference = by_node(after) - by_node(before)
    np.testing.assert_allclose(difference, 0.7, atol=1e-5)  # (1 - alpha) of it stays at its node, nothing is passed on
    own = jax.tree.map(lambda leaf: leaf.at[0].add(1.0), state.params)
    others = by_node(update(state._replace(params=own), data, draws)[0].params)[1:]
    np.testing.assert_array_equal(others, by_node(before)[1:], "a node's private state reaches no other")


FINAL = {
    "push_sum": lambda **options: learner(push_sum, TURNING, **options),
    "dp2_sgd": lambda **options: learner(dp2_sgd, UNDIRECTED, **options),
    "perturbed_gossip": gossip,
}


@pytest.mark.parametrize("name", FINAL)
def test_final_exchanges_mix_what_was_released_and_change_no_state(name):
    data, made = uneven_data(), FINAL[name]
    plain, final = made(), made(num_final_mixings=2)
    (state, infos), (same, counted) = (run(one, KEY, data, 4) for one in (plain, final))
    assert_same(state, same)
    graph = TURNING if name == "push_sum" else UNDIRECTED
    released = state.broadcast_params if name == "perturbed_gossip" else state.params
    weight = state.push_sum_weight if name == "push_sum" else jnp.ones(NODES)
    for place in (4 * MIXINGS, 4 * MIXINGS + 1):
        released, weight = mix(graph, (released, weight), place)
    expected = by_node(released) / np.asarray(weight)[:, None]
    np.testing.assert_allclose(by_node(final.node_params(state)), expected, rtol=1e-5, atol=1e-6)
    sent = sum((graph.mixing_matrix(place) > 0).sum(axis=0) - 1 for place in (MIXINGS, MIXINGS + 1))
    more = np.asarray(counted.bits_sent) - np.asarray(infos.bits_sent)
    np.testing.assert_array_equal(more[0], sent * 32 * (NUM_PARAMETERS + (name == "push_sum")))
    assert not more[1:].any(), "in the first round only"


def tracking(**options):
    numbers = np.full((NODES, 5), 0.02)
    plan = TrackingSchedule(0.3, 0.3, 0.1, BATCH, state_noise_scale=numbers, tracker_noise_scale=numbers)
    weights = graphs.static_exponential(NODES).mixing_matrix(0)
    options = {"distribution": "gaussian", **options}
    return jaxfl.gradient_tracking(
        small_task(), state_weights=weights, tracker_weights=weights, schedule=plan, clip_norm=CLIP_NORM, **options
    )


def test_a_dp2_sgd_and_gradient_tracking_mix_after_the_end_only():
    """By doubly stochastic weights here, so that the mean of the nodes stays and their noise is averaged."""
    data, noise = uneven_data(), jaxfl.gaussian(0.5)

    def waking(**options):
        return a_dp2_sgd(small_task(), graph=UNDIRECTED, step_size=STEP_SIZE, noise=noise, **options)

    for made, degree in ((waking, 4), (tracking, graphs.static_exponential(NODES).out_degree[0, 0])):
        plain, final = made(), made(num_final_mixings=2)
        (state, infos), (same, counted) = (run(one, KEY, data, 4) for one in (plain, final))
        assert_same(state, same)
        before, after = (by_node(one.node_params(state)) for one in (plain, final))
        np.testing.assert_allclose(after.mean(axis=0), before.mean(axis=0), atol=1e-5)
        assert after.var(axis=0).sum() < 0.7 * before.var(axis=0).sum()
        more = np.asarray(counted.bits_sent - infos.bits_sent)
        assert (more[0, 0], more[1:].any()) == (2 * degree * 32 * NUM_PARAMETERS, False)


@pytest.mark.parametrize(
    ("build", "argument"),
    [
        (lambda: learner(push_sum, irregular_graph(), num_mixings=0), "num_mixings"),
        (lambda: learner(d_psgd, UNDIRECTED, num_final_mixings=-1), "num_final_mixings"),
        (lambda: gossip(gradient_at="state", num_final_mixings=1), "num_final_mixings"),
        (lambda: tracking(gradient_at="state", num_final_mixings=1), "num_final_mixings"),
        (lambda: tracking(num_final_mixings=-1), "num_final_mixings"),
        (
            lambda: a_dp2_sgd(small_task(), graph=graphs.star(NODES), step_size=0.1, num_final_mixings=1),
            "graph",
        ),
        (lambda: a_dp2_sgd(small_task(), graph=UNDIRECTED, step_size=0.1, num_mixings=2), "num_mixings"),  # pyright: ignore
    ],
)
def test_refuses_what_cannot_be_mixed(build, argument):
    refused(build, argument)
