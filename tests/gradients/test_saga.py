"""SAGA tables: the three stores agree, the mean follows the table, nothing is copied, what cannot fit is refused."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusals, rows_of
from problems import irregular_graph, linear_task, run, small_task, start, uneven_data

import jaxfl
from jaxfl import ArgumentError, gradients, graphs
from jaxfl.core.platform import tracing_for
from jaxfl.core.tree import add_exactly
from jaxfl.gradients import memory as memory_check
from jaxfl.gradients import table_bytes
from jaxfl.models import classification, mlp, sequential
from jaxfl.models.layers import conv, dense, reshape
from jaxfl.training import chunks


def algorithm(task=None, *, step_size=0.2, noise=None, **options: Any) -> jaxfl.Algorithm:
    return jaxfl.push_sum(
        small_task() if task is None else task,
        graph=irregular_graph(),
        gradient=gradients.saga(**options),
        noise=noise,
        step_size=step_size,
    )


def table_as_float(state):
    table = state.gradient.table
    bits = jax.lax.bitcast_convert_type(table, jnp.bfloat16) if table.dtype == jnp.uint16 else table
    return np.asarray(bits, np.float64)


def test_saga_works_for_a_task_without_layers():
    state, _ = run(algorithm(linear_task(), step_size=0.02), jax.random.key(0), uneven_data(), 4)
    assert np.isfinite(rows_of(state.params)).all()
    with pytest.raises(ArgumentError, match=r"table: .*jaxfl\.models"):
        algorithm(linear_task(), table="factored").init(jax.random.key(0), uneven_data())


@pytest.mark.parametrize("table", ["dense", "factored"])
@pytest.mark.slow
def test_passes_over_the_table_in_chunks_count_every_entry_once(table, monkeypatch):
    module = importlib.import_module("jaxfl.gradients.saga")  # the package's attribute of that name is the function
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4 * 5 * (53 if table == "dense" else 13) * 4)
    data = uneven_data(sizes=(14, 3, 9, 5, 6))  # chunks of four entries, the last of which overlaps
    state = start(algorithm(table=table), jax.random.key(0), data)
    task, one = small_task(), jax.tree.map(lambda leaf: leaf[0], state.params)
    for node, size in enumerate(np.asarray(data.sizes)):
        pool = data.indices[node, :size]
        full = jax.grad(lambda p, pool=pool: task.loss(p, data.inputs[pool], data.labels[pool]).mean())(one)
        actual = jax.tree.map(lambda leaf, node=node: leaf[node], state.gradient.table_mean)
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(full), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)


def test_the_mean_is_recomputed_when_it_is_due():
    data, learner = uneven_data(), algorithm(refresh_every=3)
    state = start(learner, jax.random.key(0), data)
    broken = jax.tree.map(lambda leaf: leaf + 1.0, state.gradient.table_mean)
    state = state._replace(gradient=state.gradient._replace(table_mean=broken))
    step, errors = jax.jit(learner.round), []
    for _ in range(3):
        state, _ = step(jax.random.key(0), state, data)
        table, sizes = table_as_float(state), np.asarray(data.sizes)
        expected = np.stack([table[i, : sizes[i]].mean(axis=0) for i in range(5)])
        errors.append(np.abs(rows_of(state.gradient.table_mean) - expected).max())
    assert errors[1] > 0.5
    assert errors[2] < 1e-5


@pytest.mark.parametrize("table", ["dense", "factored"])
def test_no_stored_gradient_exceeds_the_clip_norm(table):
    data, task, clip_norm = uneven_data(), small_task(), 0.3
    params = jax.tree.map(lambda leaf: jnp.stack([leaf] * 5), task.init(jax.random.key(0)))
    estimator = gradients.saga(table=table, storage="bfloat16", clip_norm=clip_norm)
    state = jax.jit(lambda key: estimator.init(task, key, params, data))(jax.random.key(1))
    bits = jax.lax.bitcast_convert_type(state.table, jnp.bfloat16)
    rows = np.asarray(bits, np.float64)
    if table == "dense":
        norms = np.linalg.norm(rows, axis=2)
    else:  # rows hold error 1, input 2, error 2; the first layer's input is the sample
        inputs = np.asarray(data.inputs, np.float64)[np.asarray(data.indices)]
        error1, input2, error2 = np.split(rows, [5, 10], axis=2)
        square = [(x**2).sum(axis=2) for x in (inputs, error1, input2, error2)]
        norms = np.sqrt((square[0] + 1) * square[1] + (square[2] + 1) * square[3])
        norms[np.arange(9)[None] >= np.asarray(data.sizes)[:, None]] = 0.0
    assert 0.97 * clip_norm < norms.max() <= clip_norm * (1 + 1e-6)


def cancelling_convolution():
    """(task, params (2, *leaf), data): equal positions with opposite errors, where rounded factors stop cancelling."""
    layers = [("conv", conv(1, 1, (1, 1))), ("flat", reshape((2,))), ("out", dense(2, 2))]
    task = classification(sequential(layers))
    params = {
        "conv": {"kernel": jnp.zeros((1, 1, 1, 1)), "bias": jnp.zeros(1)},
        "out": {"kernel": jnp.array([[0.0, 2000.0], [0.0, -1999.0]]), "bias": jnp.array([-2.97, 0.0])},
    }
    data = jaxfl.federate(np.ones((6, 1, 2, 1), np.float32), np.zeros(6, np.int32), [np.arange(3), np.arange(3, 6)])
    return task, jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), params), data


def test_rounded_factors_of_clipped_convolutions_are_refused(monkeypatch):
    """bfloat16 factors made a stored gradient of norm 5.7 out of one clipped to 1; what is offered instead holds."""
    task, params, data = cancelling_convolution()
    rounded: dict[str, Any] = {"table": "factored", "storage": "bfloat16"}
    with pytest.raises(ArgumentError, match=r"^storage: .*'conv'.*float32.*dense.*per_batch"):
        gradients.saga(**rounded, clip_norm=1.0).init(task, jax.random.key(0), params, data)
    gradients.saga(**rounded).init(task, jax.random.key(0), params, data)  # no bound is promised
    remedies: list[dict[str, Any]] = [{"table": "factored"}, {"table": "dense", "storage": "bfloat16"}]
    for remedy in remedies:
        state = gradients.saga(**remedy, clip_norm=1.0).init(task, jax.random.key(0), params, data)
        norms = np.linalg.norm(rows_of(state.table_mean), axis=1)
        assert np.all((norms > 0.98) & (norms <= 1 + 1e-5))
    monkeypatch.setattr(memory_check, "available_bytes", lambda: 1)
    with pytest.raises(ArgumentError, match=r"^table: ") as caught:
        gradients.saga(table="factored", clip_norm=1.0).init(task, jax.random.key(0), params, data)
    assert "bfloat16" not in str(caught.value)


def drift(data, num_rounds, **options):
    """Distance of a dense table's mean from that of its rows, over the largest number of the table."""
    state, _ = run(algorithm(noise=jaxfl.gaussian(0.05), **options), jax.random.key(0), data, num_rounds)
    table, sizes = table_as_float(state), np.asarray(data.sizes)
    assert not any(table[i, sizes[i] :].any() for i in range(5)), "padding is never written"
    expected = np.stack([table[i, : sizes[i]].mean(axis=0) for i in range(5)])
    return np.abs(rows_of(state.gradient.table_mean) - expected).max() / np.abs(table).max()


@pytest.mark.slow
def test_a_mean_that_carries_its_rounding_is_not_refreshed_and_stays_near():
    """A round changes the mean of many entries by little: what rounding takes from the mean is most of the drift, which
    refreshing removes."""
    data = uneven_data(sizes=(400, 300, 500, 350, 450))
    carried, lost, refreshed = (drift(data, 10_000, refresh_every=every) for every in ("never", 10**9, 1000))
    assert refreshed < 1e-7
    assert 1e-9 < lost < 1e-4
    assert carried < 1e-7
    assert carried < lost / 3
    assert carried < 3 * refreshed + 3e-8


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.slow
def test_on_accelerators_a_call_ends_with_a_mean_that_is_recomputed(lanes, monkeypatch):
    """The mean is recomputed past a multiple of so many rounds, for lanes together, too; no table is copied for it."""
    monkeypatch.setattr(chunks, "UPKEEP_EVERY", 50)
    data, learner = uneven_data(sizes=(400, 300, 500, 350, 450)), algorithm(sampler=gradients.fixed(2))
    keys = jax.random.split(jax.random.key(0), lanes)
    with tracing_for("gpu"):
        start = [jax.jit(learner.init)(key, data) for key in keys]
        call = chunks.rounds_fn(learner, 40)
        if lanes == 1:
            states, run_rounds = start[0], lambda states: call(keys[0], states, data, np.int32(40))[0]
        else:
            whole = jax.tree.map(lambda *leaves: jnp.stack(leaves), *start)
            states = whole._replace(round_index=start[0].round_index)  # which lanes have in common
            axes = jax.tree.map(lambda _: 0, states)._replace(round_index=None)
            together = jax.vmap(lambda key, state: call(key, state, data, np.int32(40))[0], (0, axes), axes)
            run_rounds = lambda states: together(keys, states)  # noqa: E731
        shifted = jax.tree.map(lambda leaf: leaf + 1.0, states.gradient.table_mean)
        states = states._replace(gradient=states.gradient._replace(table_mean=shifted))
        compiled = jax.jit(run_rounds, donate_argnums=0).lower(states).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    if lanes == 1:
        assert memory.temp_size_in_bytes < 0.8 * states.gradient.table.nbytes  # half of it is read at a time

    def off(states):
        actual = states if lanes == 1 else jax.tree.map(lambda leaf: leaf[1] if leaf.ndim else leaf, states)
        table, sizes = table_as_float(actual), np.asarray(data.sizes)
        expected = np.stack([table[i, : sizes[i]].mean(axis=0) for i in range(5)])
        return np.abs(rows_of(actual.gradient.table_mean) - expected).max()

    states = compiled(states)
    assert off(states) > 0.9  # 40 rounds
    states = compiled(states)
    assert off(states) < 1e-6  # 80
    assert not np.any(rows_of(states.gradient.mean_rounding))


def test_what_rounding_takes_from_a_sum_is_carried():
    """total + rounding is total + change exactly, and so a sum of many changes far below its last bit arrives."""
    rng = np.random.default_rng(0)
    totals, changes = (rng.normal(size=5000) * 10.0 ** rng.integers(-6, 6, 5000) for _ in range(2))
    totals, changes = jnp.asarray(totals, jnp.float32), jnp.asarray(changes, jnp.float32)
    total, rounding = jax.jit(add_exactly)(totals, jnp.zeros(5000), changes)
    exact = np.asarray(totals, np.float64) + np.asarray(changes, np.float64)
    np.testing.assert_array_equal(np.asarray(total, np.float64) + np.asarray(rounding, np.float64), exact)

    def add_many(total):
        tiny = jnp.full_like(total, 1e-9)
        return jax.lax.fori_loop(
            0, 10**5, lambda _, held: add_exactly(held[0], held[1], tiny), (total, jnp.zeros_like(total))
        )

    total, _ = jax.jit(add_many)(jnp.ones(3))
    np.testing.assert_allclose(total, 1.0001, rtol=1e-7)


def test_by_default_the_mean_is_refreshed_on_a_cpu_and_carries_its_rounding_elsewhere():
    for platform, carries in (("cpu", False), ("gpu", True)):
        with tracing_for(platform):
            task, data = small_task(), uneven_data()
            learner = algorithm(task, sampler=gradients.fixed(2))
            state = jax.eval_shape(lambda key, a=learner, d=data: a.init(key, d), jax.random.key(0))
            program = str(jax.make_jaxpr(learner.round)(jax.random.key(0), state, data))
        assert (state.gradient.mean_rounding is not None) == carries
        assert ("cond[" in program) != carries, "its host would wait for the branch"


@pytest.mark.parametrize("sampler", [None, gradients.poisson(2)], ids=["one entry", "poisson"])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_no_copy_of_the_table_in_a_round(storage, sampler):
    """Rounds in a loop need temporaries far below the table's size, so the table is written in place."""
    count, nodes = 2000, 4
    task = classification(mlp((64, 32, 10)))
    images = np.zeros((count * nodes, 64), np.float32)
    parts = list(np.arange(count * nodes).reshape(nodes, count))
    data = jaxfl.federate(images, np.zeros(count * nodes, np.int32), parts)
    gradient = gradients.saga(storage=storage, sampler=sampler)
    learner = jaxfl.push_sum(task, graph=graphs.exponential(nodes), gradient=gradient, step_size=0.1)
    state = jax.eval_shape(learner.init, jax.random.key(0), data)

    def rounds(key, state, data):
        return jax.lax.fori_loop(0, 10, lambda _, s: learner.round(key, s, data)[0], state)

    compiled = jax.jit(rounds, donate_argnums=1).lower(jax.random.key(0), state, data).compile()
    table = state.gradient.table.size * state.gradient.table.dtype.itemsize
    assert table > 30e6
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 0.5 * table
    assert memory.alias_size_in_bytes > table


def test_storage_takes_what_is_said():
    data, task = uneven_data(), classification(mlp((6, 32, 10)))
    params = jax.eval_shape(lambda: jax.tree.map(lambda x: jnp.zeros((5, *x.shape)), task.init(jax.random.key(0))))
    learner = jaxfl.push_sum(
        task, graph=irregular_graph(), gradient=gradients.saga(table="factored", storage="bfloat16"), step_size=0.1
    )
    state = start(learner, jax.random.key(0), data)
    assert state.gradient.table.shape == (5, 9, 74)  # error 32, input 32, error 10; the sample is not stored
    assert state.gradient.table.nbytes == table_bytes(task, params, data, table="factored", storage="bfloat16")
    assert table_bytes(task, params, data, table="dense") == 5 * 9 * (6 * 32 + 32 + 32 * 10 + 10) * 4
    assert table_bytes(task, params, data, table="per_batch", entry_size=4) == 5 * 3 * 554 * 4


def test_a_table_that_cannot_fit_is_refused_with_the_alternatives(monkeypatch):
    monkeypatch.setattr(memory_check, "available_bytes", lambda: 1000)
    with pytest.raises(ArgumentError, match=r"table: must fit in memory; it needs .* are free\..*factored.*bfloat16"):
        algorithm().init(jax.random.key(0), uneven_data())


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize("table", ["dense", "factored"])
@pytest.mark.quick_cases(1)
def test_rows_read_for_another_batch_make_the_gradient_nan_and_are_counted(table, storage):
    """With a new base key in a round, as a caller may write it, training went on by other entries' gradients."""
    options = {"table": table, "storage": storage, "sampler": gradients.fixed(2)}
    data, learner = uneven_data(), algorithm(**options)
    state = start(learner, jax.random.key(0), data)
    foreign = jax.jit(learner.draw)(jax.random.key(9), state, data)
    _, info = jax.jit(learner.update)(state, data, foreign)
    missed = np.asarray(info.prefetch_misses) > 0
    assert missed.any()
    np.testing.assert_array_equal(np.isnan(info.gradient_norm), missed)


test_refusals = refusals(
    [
        (lambda: gradients.saga(table="sparse"), "table"),
        (lambda: gradients.saga(storage="float16"), "storage"),
        (lambda: gradients.saga(refresh_every=0), "refresh_every"),
        (lambda: gradients.saga(refresh_every="often"), "refresh_every"),  # pyright: ignore[reportArgumentType]
        (lambda: gradients.saga(entry_size=4), "entry_size"),
        (lambda: gradients.saga(table="per_batch"), "entry_size"),
        (lambda: gradients.saga(table="per_batch", entry_size=0), "entry_size"),
    ]
)


@pytest.mark.parametrize("table", ["dense", "factored", "per_batch"])
@pytest.mark.quick_cases(1)
def test_a_broken_sample_reaches_no_node_under_a_clip_norm(table):
    """One NaN pixel at node 1: every node's parameters stay finite, and what was discarded is counted there."""
    data, task = uneven_data(), small_task()
    broken = data._replace(inputs=data.inputs.at[data.indices[1, 0], 2].set(jnp.nan))
    entry_size = 2 if table == "per_batch" else None
    options = {"sampler": gradients.fixed(2), "table": table, "entry_size": entry_size}
    gradient = gradients.saga(**options, clip_norm=0.5, refresh_every=3)
    learner = jaxfl.push_sum(task, graph=graphs.complete(data.num_nodes), gradient=gradient, step_size=0.1)
    key, discarded = jax.random.key(0), np.zeros(data.num_nodes, int)
    state, step = start(learner, key, broken), jax.jit(learner.round)
    for _ in range(8):
        state, info = step(key, state, broken)
        discarded += np.asarray(info.discarded_gradients)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    assert (discarded > 0).tolist() == [node == 1 for node in range(data.num_nodes)]
