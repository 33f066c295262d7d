"""Algorithms whose releases lie on a grid, against float64 loops on the same draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference.runs import assert_same

import jaxfl
from jaxfl import graphs
from jaxfl.gradients import fixed, mini_batch

KEY, NODES, SIZE, BITS, STEP_SIZE = jax.random.key(5), 4, 12, 8, 0.25
SCALES = np.array([0.5, 1.0, 2.0, 4.0], np.float32)


def pull(w, x, y):
    """A loss with the gradient w - x."""
    return 0.5 * jnp.sum((w[None] - x) ** 2, axis=1) + 0.0 * y


def setting():
    rng = np.random.default_rng(0)
    task = jaxfl.from_functions(lambda key: jax.random.normal(key, (SIZE,)), pull)
    samples = rng.normal(size=(NODES, SIZE)).astype(np.float32)
    return task, jaxfl.federate(samples, np.zeros(NODES, np.float32), [[node] for node in range(NODES)]), samples


def on_grid(gradient, drawn, scale):
    """h (round(g / h) + k), and how far g / h is from where it would round to another number."""
    step = float(scale) * 2.0**-BITS
    steps = gradient / step
    return step * (np.rint(steps) + drawn), 0.5 - np.abs(steps - np.rint(steps))


GRAPHS = {"push_sum": graphs.directed_ring(NODES), "d_psgd": graphs.ring(NODES)}
BUILDERS = {"push_sum": jaxfl.push_sum, "d_psgd": jaxfl.d_psgd}


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.quick_cases(1)
def test_a_round_releases_integers_times_each_nodes_step(name):
    task, data, samples = setting()
    noise = jaxfl.grid_gaussian(jnp.asarray(SCALES), BITS)
    options = {"gradient": mini_batch(sampler=fixed(1)), "noise": noise, "step_size": STEP_SIZE}
    learner = BUILDERS[name](task, graph=GRAPHS[name], **options)
    state = learner.init(KEY, data)
    draws = jax.jit(learner.draw)(KEY, state, data)
    assert draws.noise.dtype == jnp.int32
    after, _ = jax.jit(learner.update)(state, data, draws)
    start = np.asarray(state.params, np.float64)
    released, margins = [], []
    for node in range(NODES):
        noisy, margin = on_grid(start[node] - samples[node], np.asarray(draws.noise)[node], SCALES[node])
        released.append(noisy)
        margins.append(margin)
    assert np.min(margins) > 1e-3, "float32 and float64 round alike"
    matrix = np.asarray(GRAPHS[name].mixing_matrix(0), np.float64)

    def moved_by(released):
        move = STEP_SIZE * np.array(released)
        return matrix @ (start - move) if name == "push_sum" else matrix @ start - move

    np.testing.assert_allclose(after.params, moved_by(released), atol=2e-6)
    unrounded = start - samples + np.asarray(draws.noise) * SCALES[:, None].astype(np.float64) * 2.0**-BITS
    assert np.abs(after.params - moved_by(unrounded)).max() > 1e-4, "rounding shows"


def test_an_event_has_the_step_of_its_waking_node():
    task, data, samples = setting()
    noise = jaxfl.grid_gaussian(jnp.asarray(SCALES), BITS)
    options = {"gradient": mini_batch(sampler=fixed(1)), "noise": noise, "step_size": STEP_SIZE, "max_delay": 0}
    learner = jaxfl.a_dp2_sgd(task, graph=graphs.ring(NODES), **options)
    state = learner.init(KEY, data)
    draws = jax.jit(learner.draw)(KEY, state, data)
    after, _ = jax.jit(learner.update)(state, data, draws)
    params = np.asarray(state.params, np.float64)
    for event in range(NODES):
        node, neighbor = int(draws.node[event]), int(draws.neighbor[event])
        noisy, margin = on_grid(params[node] - samples[node], np.asarray(draws.noise)[event], SCALES[node])
        assert margin.min() > 1e-3, "float32 and float64 round alike"
        mean = (params[node] + params[neighbor]) / 2
        params[neighbor], params[node] = mean, mean - STEP_SIZE * noisy
    assert len(set(np.asarray(draws.node).tolist())) > 1
    np.testing.assert_allclose(after.params, params, atol=2e-6)


def test_alone_in_a_scan_and_for_traced_scales_the_same_numbers():
    task, data, _ = setting()

    def learner(scale):
        noise = jaxfl.grid_gaussian(scale, BITS)
        return jaxfl.push_sum(task, graph=GRAPHS["push_sum"], noise=noise, step_size=STEP_SIZE)

    one = learner(0.3)
    state = first = one.init(KEY, data)
    step = jax.jit(lambda scale, state: learner(scale).round(KEY, state, data)[0])
    for _ in range(3):
        state = step(jnp.float32(0.3), state)
    scanned = jax.jit(lambda start: jax.lax.scan(lambda s, _: (one.round(KEY, s, data)[0], None), start, length=3)[0])(
        first
    )
    assert_same(state, scanned)
    together = jax.jit(jax.vmap(step, in_axes=(0, None)))(jnp.array([0.3, 0.6], jnp.float32), first)
    assert_same(jax.tree.map(lambda leaf: leaf[0], together), step(jnp.float32(0.3), first), rtol=1e-6, atol=1e-6)
    assert np.any(together.params[0] != together.params[1])
