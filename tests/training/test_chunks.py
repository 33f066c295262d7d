"""Chunks of rounds: one executable, the same bits, nothing copied; what infos say."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import small_task, uneven_data
from toy_problem import NUM_NODES, State, toy_algorithm, toy_data, toy_task

import jaxfl
from jaxfl import core, gradients, graphs
from jaxfl.core import ArgumentError, tree
from jaxfl.core.platform import tracing_for
from jaxfl.training import Diverged, FatalCount
from jaxfl.training.chunks import (
    add_costs,
    default_chunk_rounds,
    first_state,
    info_fields,
    refuse_bad,
    rounds_fn,
    summarize,
)

KEY = jax.random.key(4)


def chunk_fn(algorithm, chunk_rounds):
    return jax.jit(rounds_fn(algorithm, chunk_rounds), donate_argnums=1)


def init_fn(algorithm):
    return jax.jit(functools.partial(first_state, algorithm))


@functools.cache
def _setup():
    """Compiled once for all tests of this file."""
    data, _, _ = toy_data()
    algorithm = toy_algorithm(toy_task())
    key = jax.random.key(3)
    init = init_fn(algorithm).lower(key, data).compile()
    # A compiled function cannot compile again: any number of rounds runs this one executable.
    run = chunk_fn(algorithm, 8).lower(key, init(key, data), data, np.int32(0)).compile()
    return algorithm, key, data, init, run


def test_a_chunk_equals_as_many_calls_of_round():
    algorithm, key, data, init, run = _setup()
    state, buffers = run(key, init(key, data), data, np.int32(5))
    one_round = jax.jit(algorithm.round)
    expected, losses = init(key, data), []
    for _ in range(5):
        expected, info = one_round(key, expected, data)
        losses.append(info.loss)
    np.testing.assert_allclose(state.params["kernel"], expected.params["kernel"], rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(state.table, expected.table)
    assert buffers.loss.shape == (8, NUM_NODES)
    np.testing.assert_allclose(buffers.loss[:5], np.stack(losses), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(buffers.loss)[5:], 0)


def test_splitting_the_same_rounds_differently_gives_the_same_bits_in_one_executable():
    _, key, data, init, run = _setup()
    ends = []
    for counts in ([8, 5], [5, 8], [1, 1, 8, 3]):
        state = init(key, data)
        for count in counts:
            state, _ = run(key, state, data, np.int32(count))
        ends.append(state)
    assert int(ends[0].round_index) == 13
    chex.assert_trees_all_equal(ends[0], ends[1], strict=True)
    chex.assert_trees_all_equal(ends[0], ends[2], strict=True)


def test_a_full_chunk_has_a_static_length_on_accelerators():
    """Their host waits in every round of another; full and other chunks run the same rounds."""
    _, key, data, init, run = _setup()
    with tracing_for("gpu"):
        lowered = chunk_fn(toy_algorithm(toy_task()), 8).trace(key, init(key, data), data, np.int32(0))
        program = lowered.lower().compile()
    full, rest = [eqn for eqn in lowered.jaxpr.eqns if eqn.primitive.name == "while"]
    assert [str(loop).count("scan[") for loop in (full, rest)] == [1, 0]
    assert "while[" not in str(full.params["body_jaxpr"])
    for count in (8, 5, 0):
        for ours, theirs in zip(
            *(jax.tree.leaves(f(key, init(key, data), data, np.int32(count))) for f in (program, run)), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_no_rounds_change_nothing():
    _, key, data, init, run = _setup()
    state, _ = run(key, init(key, data), data, np.int32(0))
    chex.assert_trees_all_equal(state, init(key, data), strict=True)


def test_the_state_is_donated_and_the_data_survive():
    _, key, data, init, run = _setup()
    state = init(key, data)
    run(key, state, data, np.int32(4))
    assert state.table.is_deleted()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(data))


def test_a_state_that_holds_the_data_themselves_leaves_the_data_whole():
    data, _, _ = toy_data()
    key = jax.random.key(0)

    def update(state, data, draws):
        info = core.Info(loss=jnp.sum(state, dtype=state.dtype).astype(jnp.float32))
        return state + jnp.ones((), state.dtype), info

    algorithm = core.algorithm(lambda key, data: data.sizes, lambda *_: (), update, lambda state: state)
    state, _ = chunk_fn(algorithm, 3)(key, init_fn(algorithm)(key, data), data, np.int32(3))
    np.testing.assert_array_equal(np.asarray(data.sizes), 10)
    np.testing.assert_array_equal(np.asarray(state), 13)


def test_a_weakly_typed_state_is_made_strong():
    data, _, _ = toy_data()

    def update(state, data, draws):
        return state * 0.5, core.Info(loss=state)

    algorithm = core.algorithm(lambda key, data: jnp.asarray(1.0), lambda *_: (), update, lambda state: state)
    key = jax.random.key(0)
    state = init_fn(algorithm)(key, data)
    assert not state.weak_type
    # A restored state has strong types; the executable made for this one must take it.
    compiled = chunk_fn(algorithm, 2).lower(key, state, data, np.int32(0)).compile()
    state, _ = compiled(key, jnp.array(np.asarray(state)), data, np.int32(2))
    assert float(state) == 0.25


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_large_array_that_a_round_updates_in_place_is_not_copied(platform):
    """In the forms for both."""
    data, _, _ = toy_data(num_samples=400)
    algorithm = toy_algorithm(toy_task(), table_width=3000)
    key = jax.random.key(0)
    state = jax.eval_shape(algorithm.init, key, data)
    table_bytes = tree.num_bytes(state.table)
    assert table_bytes > 2_000_000
    with tracing_for(platform):
        compiled = chunk_fn(algorithm, 10).lower(key, state, data, np.int32(0)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 0.1 * table_bytes
    # And donated: the table that comes out is the one that went in.
    assert memory.alias_size_in_bytes >= table_bytes


def test_measurements_are_averaged_and_counts_summed_without_overflow():
    first = {
        "loss": np.array([[1.0, 2.0], [3.0, 4.0]], np.float32),
        "norm": np.array([1.0, 2.0], jnp.bfloat16),
        "dropped": np.full((2, 2), 2**31 - 1, np.int32),
    }
    second = {
        "loss": np.array([[10.0, 10.0]], np.float32),
        "norm": np.array([9.0], jnp.bfloat16),
        "dropped": np.array([[1, 0]], np.int32),
    }
    actual = summarize([first, second])
    assert actual == {"loss": 5.0, "norm": 4.0, "dropped": 4 * (2**31 - 1) + 1}
    assert type(actual["dropped"]) is int
    assert summarize([]) == {}


def test_costs_are_summed_over_rounds_and_nodes():
    stretch = [
        {"bits_sent": np.array([[8.0, 4.0]], np.float32), "gradient_evaluations": np.array([[2, 3]], np.int32)},
        {"bits_sent": np.array([[1.0, 0.5]], np.float32), "gradient_evaluations": np.array([[1, 0]], np.int32)},
    ]
    assert add_costs({"bits_sent": 100.0}, stretch) == {"bits_sent": 113.5, "gradient_evaluations": 6}


def test_what_every_client_does_counts_once_a_round():
    stretch = [
        {"local_iterations": np.array([3, 2], np.int32), "estimate_releases": np.array([1, 0], np.int32)},
        {"local_iterations": np.array([4], np.int32), "estimate_releases": np.array([1], np.int32)},
    ]
    assert add_costs({"local_iterations": 10, "estimate_releases": 0}, stretch) == {
        "local_iterations": 19,
        "estimate_releases": 2,
    }


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_bad_round_decides_what_is_named(bad):
    infos = {
        "loss": np.array([[1, 1, 1], [1, 1, 1], [1, bad, bad]], np.float32),
        "consensus_distance": np.array([1, bad, bad], np.float32),
        "drops": np.array([0, 0, 0], np.int32),
    }
    with pytest.raises(Diverged) as caught:
        refuse_bad(infos, "plain", 4, first_round=21)
    error = caught.value
    assert (error.metric, error.first_round, error.rounds, error.node) == ("consensus_distance", 22, (21, 23), None)
    with pytest.raises(Diverged) as caught:
        refuse_bad({"loss": infos["loss"]}, "plain", 4, first_round=21)
    error = caught.value
    assert (error.metric, error.first_round, error.rounds, error.node) == ("loss", 23, (21, 23), None)
    for word in ("loss", "all nodes", "round 23", "21 to 23", "plain", "seed 4"):
        assert word in str(error)
    refuse_bad({"loss": infos["loss"][:2]}, "plain", 4, first_round=21)


def test_a_bad_number_of_the_network_is_placed_by_the_parameters():
    infos = {"consensus_distance": np.array([1, np.nan], np.float32)}
    params = {"w": np.ones((4, 2), np.float32), "b": np.ones(4, np.float32)}
    with pytest.raises(Diverged) as caught:
        refuse_bad(infos, "plain", 0, first_round=1, params=lambda: params)
    assert caught.value.node is None
    params["w"][2, 1] = np.inf
    with pytest.raises(Diverged, match=r"got nan in round 2 .*seed 0\), which left node 2 with parameters") as caught:
        refuse_bad(infos, "plain", 0, first_round=1, params=lambda: params)
    assert caught.value.node == 2
    params["b"][3] = np.nan  # it has spread
    with pytest.raises(Diverged, match="samples and labels of all nodes") as caught:
        refuse_bad(infos, "plain", 0, first_round=1, params=lambda: params)
    assert caught.value.node is None
    loss = {"loss": np.array([[1, np.nan, 1, 1]], np.float32)}
    with pytest.raises(Diverged, match="at node 1 in round 1") as caught:
        refuse_bad(loss, "plain", 0, first_round=1, params=lambda: params)
    assert caught.value.node == 1


def test_of_a_round_the_field_that_fewest_nodes_spoil_is_named():
    """One NaN pixel at node 3 spoils its loss, the network's numbers of the round, and by gossip all parameters."""
    lone, spread = np.ones((1, 5), np.float32), np.full((1, 5), np.nan, np.float32)
    lone[0, 3] = np.nan
    infos = {"consensus_distance": np.array([np.nan], np.float32), "gradient_norm": spread, "loss": lone}
    params = {"w": np.full((5, 2), np.nan, np.float32)}
    with pytest.raises(
        Diverged, match=r"loss: .* at node 3 in round 1 .*\. Check the samples .* of node 3\.$"
    ) as caught:
        refuse_bad(infos, "plain", 0, first_round=1, params=lambda: params)
    assert caught.value.node == 3
    with pytest.raises(Diverged, match=r"at node 3 in round 7 .* smaller step size.*; if it stays, check .* of node 3"):
        refuse_bad(infos, "plain", 0, first_round=7, params=lambda: params)


def test_the_node_with_a_broken_sample_is_named():
    """Gossip has taken it to all nodes by the end of the round."""
    data = uneven_data((6,) * 5)
    broken = data._replace(inputs=jnp.asarray(data.inputs).at[data.indices[3, 0], 2].set(np.nan))
    batches = gradients.mini_batch(sampler=gradients.fixed(6))  # all samples
    learner = jaxfl.d_psgd(small_task(), graph=graphs.complete(5), gradient=batches, step_size=0.1)
    state, infos = chunk_fn(learner, 3)(KEY, init_fn(learner)(KEY, broken), broken, np.int32(3))
    assert np.isnan(np.asarray(jax.tree.leaves(state.params)[0]).reshape(5, -1)).any(axis=1).all()
    with pytest.raises(Diverged, match=r"got nan at node 3 in round 1 .* labels of node 3\.$"):
        refuse_bad(jax.device_get(info_fields(infos)), "plain", 0, first_round=1, params=lambda: state.params)


def test_a_fatal_count_stops_and_names_node_and_round():
    infos = {"prefetch_misses": np.array([[0, 0, 0], [0, 0, 2]], np.int32), "dropped": np.array([5, 5], np.int32)}
    with pytest.raises(FatalCount, match=r"prefetch_misses: .* got 2 in rounds 11 to 12 .* node 2 in round 12"):
        refuse_bad(infos, "private", 0, first_round=11, fatal=("prefetch_misses",))
    refuse_bad(infos, "private", 0, first_round=11, fatal=())


def test_an_info_of_another_form_is_refused():
    with pytest.raises(ArgumentError, match=r"info: must be a jaxfl\.Info; the round returned dict"):
        info_fields({"loss": np.ones(())}, 3)
    with pytest.raises(ArgumentError, match=r"info\.loss: .*got shape \(3, 2\) for 3 nodes"):
        info_fields(core.Info(loss=jnp.ones((3, 2))), 3)


def test_chunks_between_evaluations_have_equal_lengths():
    assert [default_chunk_rounds(every) for every in (1, 10, 100, 101, 150, 1000)] == [1, 10, 100, 51, 75, 100]


def test_the_toy_state_covers_the_hard_dtypes():
    data, _, _ = toy_data()
    state = jax.eval_shape(toy_algorithm(toy_task()).init, jax.random.key(0), data)
    assert isinstance(state, State)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} >= {"uint16", "uint32", "bool", "bfloat16", "int32"}
