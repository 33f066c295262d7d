"""EmbracingFL: the paper's lines, who trains which blocks, how these are averaged, what a weak client saves."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusals
from problems import linear_task, run, small_task, uneven_data, with_clients
from reference.embracing import embracing as reference_embracing
from reference.network import as_float64
from reference.runs import (
    assert_same,
    check_counts,
    check_own_samples_alone_train,
    flat,
    node_samples,
    with_batches,
)

import jaxfl
from jaxfl.algorithms import first_half, output_side
from jaxfl.algorithms.clients import parts
from jaxfl.core.platform import tracing_for
from jaxfl.models import classification, layers, sequential

KEY = jax.random.key(11)
SIZES = (7, 3, 9, 1, 6, 5, 8)
BATCH = 4  # more than two of the clients hold
ROUNDS = 12
BLOCKS = ("dense_1", "dense_2")
# Strong, weak, first half, and one block drawn at random.
CLASSES = (BLOCKS, output_side(BLOCKS, "dense_2"), first_half(BLOCKS), 1)
CLIENT_CLASS = np.array([0, 3, 1, 1, 2, 3, 0])
SAMPLINGS = {"uniform": 4, "stratified": (1, 2, 0, 1)}


def learner(task=None, **changes):
    """Four of seven clients, three steps."""
    options = {
        "trained_blocks": CLASSES,
        "client_class": CLIENT_CLASS,
        "num_active": 4,
        "num_local_steps": 3,
        "batch_size": BATCH,
        "step_size": 0.2,
    }
    return jaxfl.embracing(small_task() if task is None else task, **with_clients(**{**options, **changes}))


def started(algorithm, data):
    """A state whose parameters and statistics are unlike the first ones; nothing is compiled for it."""
    rng = np.random.default_rng(1)

    def moved(shape):
        return jnp.asarray(rng.uniform(0.2, 1.0, shape.shape) * rng.choice([-1, 1], shape.shape), shape.dtype)

    state = jax.eval_shape(algorithm.init, KEY, data)
    return state._replace(
        params=jax.tree.map(moved, state.params),
        model_state=jax.tree.map(lambda shape: jnp.abs(moved(shape)), state.model_state),
        round_index=jnp.int32(3),
    )


@functools.cache
def drawn(count=400, num_active: int | tuple[int, ...] = 4):
    """The draws of many rounds, stacked, as NumPy arrays."""
    algorithm, data = learner(num_active=num_active), uneven_data(SIZES)
    state = started(algorithm, data)
    rounds = jnp.arange(count, dtype=jnp.int32)
    draw = jax.jit(jax.vmap(lambda r: algorithm.draw(KEY, state._replace(round_index=r), data)))
    return jax.tree.map(np.asarray, draw(rounds))


def part_of(task, trained) -> Any:
    assert task.part is not None
    return task.part(trained)


OPTIONS = {
    "uniform": {"momentum": 0.9, "weight_decay": 0.05, "step_size": optax.exponential_decay(0.2, 5, 0.5)},
    "stratified": {"weighting": "uniform"},
}


@pytest.mark.parametrize(("sampling", "platform"), [("uniform", "cpu"), ("uniform", "gpu"), ("stratified", "cpu")])
@pytest.mark.quick_cases(1)
def test_follows_the_papers_lines(sampling, platform):
    """In the forms for a CPU and for an accelerator, where these differ."""
    options, data = OPTIONS[sampling], uneven_data(SIZES)
    algorithm = learner(num_active=SAMPLINGS[sampling], **options)
    first = started(algorithm, data)._replace(round_index=jnp.int32(0))
    with tracing_for(platform):
        state, infos = run(algorithm, KEY, data, ROUNDS, first)
    samples = node_samples(data)
    draws, rounds = drawn(num_active=SAMPLINGS[sampling]), []
    for r in range(ROUNDS):
        rounds.append([])
        for i, steps, row in zip(draws.active[r], draws.steps.batch_indices[r], draws.trained[r], strict=True):
            chosen = CLASSES[CLIENT_CLASS[i]]
            blocks = [block for block, own in zip(BLOCKS, row, strict=True) if own] if chosen == 1 else list(chosen)
            assert len(blocks) == 1 or chosen == BLOCKS
            rounds[r].append((i, blocks, [[s for s in step if s < SIZES[i]] for step in steps]))
    decaying = callable(options.get("step_size"))
    x0 = as_float64(algorithm.node_params(first), 0)
    x, losses = reference_embracing(
        x0,
        samples,
        rounds,
        weighting=options.get("weighting", "data"),
        step_size=lambda r: 0.2 * 0.5 ** (r / 5) if decaying else 0.2,
        momentum=options.get("momentum", 0.0),
        weight_decay=options.get("weight_decay", 0.0),
    )
    actual = flat(as_float64(algorithm.node_params(state), 0))
    assert np.linalg.norm(actual - flat(x)) < 1e-5 * np.linalg.norm(flat(x))
    np.testing.assert_allclose(infos.loss, losses, rtol=1e-4)
    used, bits = np.zeros((ROUNDS, len(SIZES)), int), np.zeros((ROUNDS, len(SIZES)))
    for number, active in enumerate(rounds):
        for client, blocks, batches in active:
            used[number, client] = sum(map(len, batches))
            bits[number, client] = 32 * (("dense_1" in blocks) * (6 * 5 + 5) + ("dense_2" in blocks) * (5 * 3 + 3))
    check_counts(infos, used, bits, (used > 0) * 32 * (6 * 5 + 5 + 5 * 3 + 3))
    untrained = [2 - len({block for _, blocks, _ in active for block in blocks}) for active in rounds]
    np.testing.assert_array_equal(infos.untrained_blocks, untrained)


def normalized(drop=0.0):
    """Three dense layers, two batch normalizations, and dropout around the cut."""
    named = [
        ("dense_1", layers.dense(6, 8)),
        ("norm_1", layers.batch_norm(8)),
        ("tanh_1", layers.tanh()),
        ("dropout_1", layers.dropout(drop)),
        ("dense_2", layers.dense(8, 7)),
        ("norm_2", layers.batch_norm(7)),
        ("tanh_2", layers.tanh()),
        ("dropout_2", layers.dropout(drop)),
        ("dense_3", layers.dense(7, 3)),
    ]
    return sequential([(name, layer) for name, layer in named if drop > 0 or "dropout" not in name])


def two_classes(task, **changes):
    """Strong and weak clients."""
    options = {
        "trained_blocks": (task.blocks, output_side(task.blocks, "dense_2")),
        "client_class": np.array([0, 1, 1, 0, 1, 0, 1]),
    }
    return learner(task, **{**options, **changes})


@functools.cache
def draws_of_all():
    """One round's draws of all seven clients; those of fewer are rows of it, as a test below says."""
    algorithm, data = two_classes(classification(normalized(0.3)), num_active=7), uneven_data(SIZES)
    return jax.jit(algorithm.draw)(KEY, started(algorithm, data), data)


def draws_of(*clients):
    return jax.tree.map(lambda leaf: leaf[np.array(clients)], draws_of_all())


@pytest.mark.parametrize("frozen_batch_norm", ["running", "batch"])
@pytest.mark.slow
def test_cached_features_equal_those_recomputed_in_every_step(frozen_batch_norm):
    """With batch normalization in front of the cut, and dropout on both sides of it."""
    task, data = classification(normalized(0.3)), uneven_data(SIZES)

    def recomputing(trained):
        part = part_of(task, trained)

        def train_loss(own, frozen, model_state, inputs, labels, weights, key):
            params = {**frozen, **own}
            if frozen_batch_norm == "running":
                features = part.features(params, model_state, inputs)
            else:
                features = part.features_train(params, model_state, inputs, weights, key)
            return part.train_loss(own, frozen, model_state, jax.lax.stop_gradient(features), labels, weights, key)

        return part._replace(features=None, features_train=None, train_loss=train_loss)

    actual, weak = [], {"client_class": np.zeros(7, int), "num_active": 2, "trained_blocks": (("dense_3",),)}
    for one in (task, task._replace(part=recomputing)):
        algorithm = two_classes(one, **weak, frozen_batch_norm=frozen_batch_norm)
        state, info = jax.jit(algorithm.update)(started(algorithm, data), data, draws_of(0, 4))
        assert info.forward_evaluations.any()
        actual.append((state, info.plus(forward_evaluations=np.int32(0))))
    assert_same(*actual, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen_batch_norm", ["running", "batch"])
@pytest.mark.slow
def test_waves_of_slots_and_clients_one_after_the_other_give_the_same(frozen_batch_norm):
    """With batch normalization, dropout, and one class that is not there; a client of three samples has them cached."""
    algorithm = two_classes(classification(normalized(0.3)), frozen_batch_norm=frozen_batch_norm)
    data, draws, rounds = uneven_data(SIZES), draws_of(0, 1, 4, 6), []
    for platform in ("cpu", "gpu"):
        with tracing_for(platform):
            rounds.append(jax.jit(algorithm.update)(started(algorithm, data), data, draws))
    assert_same(*rounds, rtol=1e-5, atol=1e-6)


def test_features_of_a_sample_are_computed_once_a_round(monkeypatch):
    """In groups of two: of four steps of four samples a client holds fewer different ones."""
    monkeypatch.setattr(parts, "_SAMPLES_AT_ONCE", 2)
    task, data, computed = classification(normalized(), node_loop="map"), uneven_data(SIZES), []

    def counting(trained):
        part = part_of(task, trained)

        def features(params, model_state, inputs):
            jax.debug.callback(lambda rows: computed.append(len(rows)), inputs)
            return part.features(params, model_state, inputs)

        return part._replace(features=features)

    weak = {"client_class": np.zeros(7, int), "num_active": 7, "trained_blocks": (("dense_3",),)}
    algorithm = two_classes(task._replace(part=counting), **weak)
    draws = draws_of_all()
    jax.block_until_ready(jax.jit(algorithm.update)(started(algorithm, data), data, draws))
    jax.effects_barrier()
    samples = np.asarray(draws.steps.batch_indices).reshape(7, -1)
    samples = np.where(samples < np.array(SIZES)[:, None], samples, 0)  # empty slots show the first sample
    different = [len(set(own)) for own in samples.tolist()]
    assert computed == [2] * sum(-(-count // 2) for count in different)
    assert 2 * len(computed) < 0.8 * samples.size


TEAM, IS_STRONG = (0, 2, 5, 6), np.array([True, False, True, False])


@functools.cache
def alone(frozen_batch_norm):
    """The server's state, and (state, info) after a round of each of `TEAM` alone."""
    data = uneven_data(SIZES)
    algorithm = two_classes(classification(normalized()), num_active=1, frozen_batch_norm=frozen_batch_norm)
    first, update = started(algorithm, data), jax.jit(algorithm.update)
    return first, [update(first, data, draws_of(client)) for client in TEAM]


def test_blocks_and_their_statistics_are_averaged_over_those_who_trained_them():
    first, singles = alone("running")
    algorithm, data = two_classes(classification(normalized())), uneven_data(SIZES)
    state, info = jax.jit(algorithm.update)(first, data, draws_of(*TEAM))
    for name in ("params", "model_state"):
        for block, values in getattr(state, name).items():
            weights = np.array([7.0, 9.0, 5.0, 8.0]) * (IS_STRONG if block in ("dense_1", "norm_1") else 1.0)
            clients = [flat(getattr(one, name)[block]) for one, _ in singles]
            np.testing.assert_allclose(flat(values), weights @ clients / weights.sum(), rtol=1e-4, atol=1e-5)
            assert np.abs(flat(values) - flat(getattr(first, name)[block])).max() > 1e-4
    assert int(info.untrained_blocks) == 0
    behind, in_front = 8 * 7 + 7 + 2 * 7 + 7 * 3 + 3 + 2 * 7, 6 * 8 + 8 + 2 * 8 + 2 * 8
    expected = np.zeros(7)
    expected[list(TEAM)] = 32 * (behind + in_front * IS_STRONG)
    np.testing.assert_array_equal(info.bits_sent, expected)
    np.testing.assert_array_equal(info.bits_received, (expected > 0) * 32 * (behind + in_front))


@pytest.mark.parametrize("frozen_batch_norm", ["running", "batch"])
def test_forward_evaluations_are_those_of_the_blocks_in_front(frozen_batch_norm):
    """Each different sample counts once with running statistics, each slot with a batch's; strong clients have none."""
    infos = [info for _, info in alone(frozen_batch_norm)[1]]
    repeats = 0
    for client, is_strong, info in zip(TEAM, IS_STRONG, infos, strict=True):
        indices = np.asarray(draws_of(client).steps.batch_indices)
        used = indices[indices < SIZES[client]].tolist()
        entering = used if frozen_batch_norm == "batch" else {*used}
        expected = np.eye(7, dtype=int)[client]
        np.testing.assert_array_equal(info.gradient_evaluations, len(used) * expected)
        np.testing.assert_array_equal(info.forward_evaluations, (0 if is_strong else len(entering)) * expected)
        repeats += len(used) - len({*used})
    assert repeats > 0, "some sample must come again for this test to mean something"


@pytest.mark.parametrize("frozen_batch_norm", ["running", "batch"])
def test_a_block_that_nobody_trained_stays_bit_for_bit(frozen_batch_norm):
    """And its statistics, also where it normalizes by those of the batch."""
    first, singles = alone(frozen_batch_norm)
    for (state, info), is_strong in zip(singles, IS_STRONG, strict=True):
        assert int(info.untrained_blocks) == (0 if is_strong else 2)
        for name in ("params", "model_state"):
            for block, values in getattr(state, name).items():
                stays = np.array_equal(flat(values), flat(getattr(first, name)[block]))
                assert stays == (block in ("dense_1", "norm_1") and not is_strong)


def test_frozen_batch_normalization_may_use_the_batchs_statistics():
    """It changes what weak clients learn, and nothing of what strong ones do."""
    (_, running), (_, batch) = alone("running"), alone("batch")
    for k, is_strong in enumerate(IS_STRONG):
        difference = np.abs(flat(running[k][0].params) - flat(batch[k][0].params)).max()
        assert difference < 1e-5 if is_strong else difference > 1e-3


def test_padding_never_contributes():
    """Each client in turn trains alone, then on a pool in which all other samples are NaN: the same bits, and all of
    its own samples matter."""
    data, algorithm = uneven_data(SIZES), learner(num_active=1, batch_size=12)  # more than any client's
    state, update = started(algorithm, data), jax.jit(algorithm.update)
    drawn_once = jax.eval_shape(algorithm.draw, KEY, state, data)
    # Everything, in order; the rest is padding.
    batches = np.broadcast_to(np.arange(12, dtype=np.int32), drawn_once.steps.batch_indices.shape)
    for client, number in enumerate(CLIENT_CLASS):
        trained = np.array([[number != 1, number in (0, 1)]])
        draws = with_batches(drawn_once, batches)._replace(active=np.array([client], np.int32), trained=trained)
        check_own_samples_alone_train(lambda data, d=draws: update(state, data, d), data, client, 3, 1e-4)


@pytest.mark.slow
def test_a_class_may_have_a_task_of_its_own():
    """Both tasks have the same parameters: a weak client trains its own, a strong one the common task, also in one
    round."""
    data, model = uneven_data(SIZES), normalized()
    other = sequential([(name, layers.relu() if name == "tanh_2" else layer) for name, layer in model.layers])
    task, own = classification(model), classification(other)
    both = two_classes(task, class_tasks=[task, own], num_active=(1, 1))
    first, weights = started(both, data), np.array([7.0, 3.0]) / 10
    mixed = jax.jit(both.update)(first, data, draws_of(0, 1))[0]
    strong = jax.jit(two_classes(task, num_active=1).update)(first, data, draws_of(0))[0]
    weak = jax.jit(two_classes(own, num_active=1).update)(first, data, draws_of(1))[0]
    assert_same(mixed.params["dense_1"], strong.params["dense_1"], rtol=1e-5, atol=1e-6)
    mean = weights @ [flat(strong.params["dense_3"]), flat(weak.params["dense_3"])]
    np.testing.assert_allclose(flat(mixed.params["dense_3"]), mean, rtol=1e-5, atol=1e-6)
    assert np.abs(flat(strong.params["dense_3"]) - flat(weak.params["dense_3"])).max() > 1e-3


def test_stratified_participation_has_fixed_counts_of_each_class():
    """Each client of a class equally often, class after class; nobody of a class of which none takes part."""
    draws = drawn(num_active=(1, 2, 0, 1))
    assert np.all(CLIENT_CLASS[draws.active] == [0, 1, 1, 3])
    assert np.all(draws.active[:, 1:3] == [2, 3])
    rounds = len(draws.active)
    for column, members in ((0, (0, 6)), (3, (1, 5))):
        for member in members:
            assert abs(np.sum(draws.active[:, column] == member) - rounds / 2) <= 4 * np.sqrt(rounds / 4)
    agree = np.mean((draws.active[:, 0] == 0) == (draws.active[:, 3] == 1))
    assert abs(agree - 0.5) <= 4 * np.sqrt(0.25 / rounds), "classes are drawn independently"


def test_blocks_are_drawn_uniformly_and_anew():
    """As many as asked for; by clients of that class only."""
    draws = drawn()
    classes = CLIENT_CLASS[draws.active]
    for number, rows in ((0, [True, True]), (1, [False, True]), (2, [True, False])):
        assert np.all(draws.trained[classes == number] == rows)
    chosen = draws.trained[classes == 3]
    assert np.all(chosen.sum(axis=1) == 1)
    assert abs(chosen[:, 0].mean() - 0.5) <= 4 * np.sqrt(0.25 / len(chosen))
    both = [row[of_class == 3] for row, of_class in zip(draws.trained, classes, strict=True) if sum(of_class == 3) == 2]
    differ = np.array([first[0] != second[0] for first, second in both])
    assert abs(differ.mean() - 0.5) <= 4 * np.sqrt(0.25 / len(differ)), "clients draw for themselves"


def test_a_clients_batches_and_blocks_do_not_depend_on_who_else_is_active():
    some, everybody = drawn(), drawn(num_active=7)
    fields = ((some.steps.batch_indices, everybody.steps.batch_indices), (some.trained, everybody.trained))
    for of_some, of_everybody in fields:
        for active, own, of_all in zip(some.active, of_some, of_everybody, strict=True):
            np.testing.assert_array_equal(own, of_all[active])


@functools.cache
def images():
    """A convolutional network, and data."""
    named, channels = [], (3, 8, 8, 8, 8)
    for number, (before, after) in enumerate(itertools.pairwise(channels), start=1):
        named += [(f"conv_{number}", layers.conv(before, after, (3, 3), strides=(2, 2) if number == 4 else (1, 1)))]
        named += [(f"relu_{number}", layers.relu())]
    model = sequential([*named, ("flatten", layers.reshape((4 * 4 * 8,))), ("dense", layers.dense(4 * 4 * 8, 3))])
    data = uneven_data((40, 40), features=8 * 8 * 3)
    return model, data._replace(inputs=data.inputs.reshape(-1, 8, 8, 3))


def test_a_weak_client_runs_no_backward_pass_through_the_blocks_in_front_of_its_own():
    """Fewer convolutions than a strong client's, less than half of the operations, and of the memory."""
    model, data = images()
    task, options = classification(model), {"num_local_steps": 2, "batch_size": 32, "step_size": 0.1}
    weak, programs = output_side(task.blocks, "conv_4"), []
    for number in (0, 1):
        classes = {"trained_blocks": (task.blocks, weak), "client_class": [number] * 2}
        algorithm = learner(task, **classes, num_active=1, **options)
        state = jax.eval_shape(algorithm.init, KEY, data)
        draws = jax.eval_shape(algorithm.draw, KEY, state, data)
        programs.append(jax.jit(algorithm.update).lower(state, data, draws).compile())
    strong_convolutions, convolutions = (program.as_text().count(" convolution(") for program in programs)
    # Forward through the three in front, once; of a strong client forward and back in each step, too.
    assert strong_convolutions >= 3 + convolutions > 3
    operations = [dict(program.cost_analysis() or {})["flops"] for program in programs]
    assert operations[1] < 0.5 * operations[0]
    temp = [held.temp_size_in_bytes for program in programs if (held := program.memory_analysis()) is not None]
    assert temp[1] < 0.5 * temp[0]


test_refusals = refusals(
    [
        (lambda options=options: learner(**options), argument)
        for argument, rows in {
            "task": [{"task": linear_task()}],
            "class_tasks": [{"class_tasks": [small_task()]}],
            "class_tasks[3]": [
                {"class_tasks": [*[small_task()] * 3, task]} for task in (linear_task(), classification(normalized()))
            ],
            "trained_blocks": [{"trained_blocks": ()}],
            "trained_blocks[0]": [{"trained_blocks": (blocks,)} for blocks in (("dense_2", "conv"), 3, 0)],
            "trained_blocks[1]": [{"trained_blocks": (BLOCKS, blocks)} for blocks in ((), "dense_2")],
            "client_class": [{"client_class": classes} for classes in ([0.0] * 7, [0] * 6 + [-1])],
            "num_active": [{"num_active": counts} for counts in ((1, 1, 1), (0, 0, 0, 0))],
            "num_active[2]": [{"num_active": (1, 1, -1, 1)}],
            "frozen_batch_norm": [{"frozen_batch_norm": "static"}],
        }.items()
        for options in rows
    ]
    + [
        (
            lambda: jax.jit(lambda classes: learner(client_class=classes).init(KEY, uneven_data(SIZES)))(CLIENT_CLASS),
            "client_class",
        ),
        (lambda: output_side(("stem", "dense"), "four"), "first"),
        (lambda: first_half(("stem", "dense"), "four"), "last"),
    ]
)
