"""A(DP)2SGD: who wakes, with whom it averages and how old its gradient is; test_references.py has its lines."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import small_task, start, uneven_data

import jaxfl
from jaxfl import ArgumentError, graphs
from jaxfl.algorithms.a_dp2_sgd import a_dp2_sgd
from jaxfl.gradients import mini_batch, poisson
from jaxfl.graphs import require_undirected

KEY = jax.random.key(11)
NOISE_STD = (0.0, 0.5, 1.0, 2.0, 4.0)
MAX_DELAY, ROUNDS = 3, 4000


@pytest.fixture(scope="module")
def drawn():
    """The draws of many rounds on a star of nodes with unequal data, leaves (R * n, ...) with the events of all rounds
    in one row, as NumPy arrays."""
    algorithm = a_dp2_sgd(
        small_task(),
        graph=graphs.star(5),
        step_size=0.1,
        noise=jaxfl.gaussian(jnp.array(NOISE_STD)),
        gradient=mini_batch(sampler=poisson(2)),
        max_delay=MAX_DELAY,
    )
    data = uneven_data()
    state = start(algorithm, KEY, data)

    def of_round(k):
        draws = algorithm.draw(KEY, state._replace(round_index=k), data)
        return draws._replace(noise=draws.noise["dense_2"]["kernel"])

    draws = jax.jit(jax.vmap(of_round))(jnp.arange(ROUNDS, dtype=jnp.int32))
    return data, jax.tree.map(lambda leaf: np.asarray(leaf).reshape(-1, *leaf.shape[2:]), draws)


def standard_errors(count, trials, probability):
    """Distance of a count from trials * probability, in standard errors."""
    return (count - trials * probability) / np.sqrt(trials * probability * (1 - probability))


@pytest.mark.statistical
def test_waking_nodes_neighbors_and_delays_are_uniform(drawn):
    """Every cell of (node, delay) is within 4.5 standard errors of uniform, and so is the hub's choice of neighbor. The
    nearest wrong laws, one delay or one node more or fewer, are not."""
    _, draws = drawn
    events = ROUNDS * 5
    cells = np.zeros((5, MAX_DELAY + 1))
    np.add.at(cells, (draws.node, draws.delay), 1)
    assert np.abs(standard_errors(cells, events, 1 / cells.size)).max() < 4.5
    for wrong in (1 / (5 * MAX_DELAY), 1 / (5 * (MAX_DELAY + 2)), 1 / (6 * (MAX_DELAY + 1))):
        assert np.abs(standard_errors(cells, events, wrong)).max() > 4.5
    hub = draws.neighbor[draws.node == 0]
    counts = np.bincount(hub, minlength=5)
    assert counts[0] == 0, "a node with neighbors never averages with itself"
    assert np.abs(standard_errors(counts[1:], len(hub), 1 / 4)).max() < 4.5
    assert np.abs(standard_errors(counts[1:], len(hub), 1 / 5)).max() > 4.5
    assert not draws.neighbor[draws.node != 0].any(), "the others know the hub alone"
    # Successive events are independent: the same node twice with probability 1/5.
    assert abs(standard_errors((np.diff(draws.node) == 0).sum(), events - 1, 1 / 5)) < 4.5


@pytest.mark.statistical
def test_batches_and_noise_are_those_of_the_waking_node(drawn):
    """Sampling rate b / J_i within 5 standard errors, noise of the node's own scale within 5 of its."""
    data, draws = drawn
    for node, size in enumerate(np.asarray(data.sizes)):
        own = draws.node == node
        indices, mask = draws.gradient.indices[own], draws.gradient.mask[own]
        used = np.bincount(indices[mask], minlength=size)
        assert used.shape == (size,), "no position behind the node's data"
        assert np.abs(standard_errors(used, own.sum(), 2 / size)).max() < 5
        others = [other for other in np.unique(data.sizes) if other != size]
        assert all(np.abs(standard_errors(used.sum() / size, own.sum(), 2 / o)) > 5 for o in others)
        noise = draws.noise[own]
        tolerance = 5 / math.sqrt(2 * noise.size)
        assert abs(noise.std() - NOISE_STD[node]) <= tolerance * NOISE_STD[node]


@pytest.mark.skipif(jax.__version_info__ < (0, 10, 2), reason="older compilers copy the state once an event")
@pytest.mark.parametrize("max_delay", [0, 3])
def test_no_copy_of_all_nodes_in_an_event(max_delay):
    """An update in place needs a few rows besides the state, whatever the number of nodes."""
    nodes, features = 40, 200
    task = jaxfl.from_functions(
        lambda key: jnp.zeros((features, 20), jnp.float32),
        lambda w, x, y: jnp.sum(x @ w, axis=1) * y.astype(jnp.float32),
    )
    data = uneven_data(sizes=(2,) * nodes, features=features)
    algorithm = a_dp2_sgd(task, graph=graphs.ring(nodes), step_size=0.1, max_delay=max_delay)
    shapes = jax.eval_shape(lambda: algorithm.init(KEY, data))
    draws = jax.eval_shape(algorithm.draw, KEY, shapes, data)
    # Aliased with its input, and so with room for no copy but a temporary one.
    compiled = jax.jit(algorithm.update, donate_argnums=0).lower(shapes, data, draws).compile()
    memory, program, row = compiled.memory_analysis(), compiled.as_text(), features * 20 * 4
    assert memory is not None
    assert memory.temp_size_in_bytes < 8 * row
    assert program is not None
    assert f"f32[{nodes},{features},20]" in program
    assert not re.findall(rf"= f32\[{nodes},{features},20\]\S* copy\(", program)


def test_what_only_the_asynchronous_method_refuses():
    task = small_task()
    bad: tuple[Any, ...] = (-1, 1.5, True)
    for max_delay in bad:
        with pytest.raises(ArgumentError, match=r"^max_delay: must be an integer of at least 0"):
            a_dp2_sgd(task, graph=graphs.ring(5), step_size=0.1, max_delay=max_delay)
    with pytest.raises(ArgumentError, match=r"^max_delay: must be a static integer"):
        jax.jit(lambda d: a_dp2_sgd(task, graph=graphs.ring(5), step_size=0.1, max_delay=d).init)(3)
    other = jaxfl.gaussian(jnp.ones(5))._replace(distribution="cauchy", rescaled=None)
    with pytest.raises(ArgumentError, match=r"^noise: must be .* rescaled where its scale is per node; got cauchy"):
        a_dp2_sgd(task, graph=graphs.ring(5), step_size=0.1, noise=other)
    a_dp2_sgd(task, graph=graphs.ring(5), step_size=0.1, noise=other._replace(noise_scale=1.0))


def test_an_undirected_graph_may_have_unequal_weights_where_only_its_edges_count():
    require_undirected(graphs.star(4))
    with pytest.raises(ArgumentError, match=r"^graph: must have symmetric weights; entry \(0, 1\) of star\(4\) is 0.5"):
        require_undirected(graphs.star(4), weights=True)
    require_undirected(graphs.star(4, weights="metropolis"), weights=True)
