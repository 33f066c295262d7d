"""Refusals of the constructors of the registry, row by row."""

import inspect
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import linear_task, problem, small_task, uneven_data, with_clients
from registry import REGISTRY

import jaxfl
from jaxfl import ArgumentError, graphs
from jaxfl.core.info import FatalCount
from jaxfl.privacy.tracking import TrackingSchedule

KEY = jax.random.key(7)
COUNT = "must be an integer of at least 1; got 0"
REFUSED = [  # of every row
    ({"step_size": 0.0}, "step_size: must be positive"),
    ({"step_size": jnp.ones(5)}, r"step_size: must be a single number; got shape \(5,\)"),
    ({"batch_size": 0}, "batch_size: "),
]
PRIVATE_REFUSED = [
    (
        {"noise_scale": np.ones(3)},
        "(state_noise_scale: .* 5 nodes|noise: must be a scalar or hold one number per node)",
    ),
    ({"noise_scale": -1.0}, "(state_noise_scale|noise_std): must be non-negative"),
    ({"clip_norm": 0.0}, "clip_norm: must be positive"),
    ({"batch_size": 5}, "batch_size: "),  # more than the smallest node holds; without privacy it uses all that it has
]
OF_ARGUMENT = {  # where the constructor takes it
    "graph": (graphs.from_matrix(np.eye(2)), "graph: .*strongly connected"),
    "num_active": (0, f"num_active: {COUNT}"),
    "distribution": ("uniform", "distribution: must be one of laplace, gaussian; got 'uniform'"),
    "gradient_at": ("tracker", "gradient_at: must be one of .*; got 'tracker'"),
}
OF_NUMBER = {  # which the example puts into this argument, where the constructor takes it
    "clients": ({"num_local_steps": 0}, f"max_steps: {COUNT}"),
}
CLIENTS = {"num_local_steps": 2, "batch_size": 1, "step_size": 0.1}
CLIENTS_REFUSED = [
    ({"step_size": -1.0}, "step_size: must be positive and finite; got -1.0"),
    ({"momentum": -0.1}, "momentum: must be non-negative"),
    ({"momentum": jnp.ones(3)}, r"momentum: must be a single number; got shape \(3,\)"),
    ({"weight_decay": -0.1}, "weight_decay: must be non-negative"),
    ({"weight_decay": jnp.ones(2)}, r"weight_decay: must be a single number; got shape \(2,\)"),
    ({"weighting": "size"}, "weighting: must be one of data, uniform; got 'size'"),
]


@pytest.mark.parametrize(("changes", "message"), CLIENTS_REFUSED)
def test_what_clients_refuse(changes, message):
    """Before any algorithm has them."""
    with_clients(**CLIENTS)
    with pytest.raises(ArgumentError, match=f"^{message}"):
        with_clients(**{**CLIENTS, **changes})


@pytest.mark.parametrize("name", REGISTRY)
def test_what_a_constructor_refuses(name):
    p = problem(name)
    taken = inspect.signature(p.row.constructor).parameters
    of_arguments = [({key: value}, text) for key, (value, text) in OF_ARGUMENT.items() if key in taken]
    of_numbers = [refused for key, refused in OF_NUMBER.items() if key in taken]
    private = PRIVATE_REFUSED if p.row.noise_draws else []
    for changes, message in [*REFUSED, *private, *of_arguments, *of_numbers, *p.example.refused]:
        with pytest.raises(ArgumentError, match=f"^{message}"):
            p.algorithm(**changes).init(KEY, p.data)


@pytest.mark.parametrize("name", REGISTRY)
def test_an_algorithm_of_five_nodes_does_not_run_on_two(name):
    """Unless nothing in it counts nodes: then it is one of two."""
    algorithm = problem(name).algorithm()
    try:
        models = algorithm.node_params(algorithm.init(KEY, uneven_data(sizes=(3, 4))))
        outcome = f"{len(jax.tree.leaves(models)[0])} models"
    except ArgumentError as refusal:
        outcome = str(refusal)
    assert re.match("(data|client_class|num_active): .* 2|[12] models", outcome)


# What would otherwise be taken in silence


@pytest.mark.parametrize("mechanism", [jaxfl.gaussian, jaxfl.laplace, jaxfl.grid_gaussian])
def test_noise_scales_are_copied(mechanism):
    """A buffer that is filled anew for the next learner takes no noise off the last one."""
    scales, like = np.full(3, 0.5, np.float32), jnp.zeros((3, 4))
    noise = mechanism(scales)
    released = np.asarray(noise.release(like, noise.draw(KEY, like)))
    scales[:] = 0
    assert np.all(released != 0)
    np.testing.assert_array_equal(noise.release(like, noise.draw(KEY, like)), released)
    np.testing.assert_array_equal(noise.noise_scale, 0.5)


def test_probabilities_of_links_are_copied():
    success = np.full(64, 0.5, np.float32)
    links = jaxfl.links(success)
    success[:] = 1
    assert 0 < np.asarray(links.draw_to_server(KEY, 0, 64).arrived).sum() < 64


@pytest.mark.parametrize("name", ["gradient_tracking", "perturbed_gossip", "output_perturbation"])
def test_noise_scales_of_a_schedule_are_copied(name):
    p, scales = problem(name), np.full(4, 0.5)
    learner = p.algorithm(schedule=TrackingSchedule(0.5, 0.1, 0.2, 2, scales, scales))
    before = learner.draw(KEY, learner.init(KEY, p.data), p.data)
    scales[:] = 0
    after = learner.draw(KEY, learner.init(KEY, p.data), p.data)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(before.state_noise))
    jax.tree.map(np.testing.assert_array_equal, before.state_noise, after.state_noise)


def test_numbers_of_clients_are_copied():
    norm, bound, multiplier = numbers = [typing.cast(typing.Any, np.array(number)) for number in (0.5, 1.0, 2.0)]
    updates = jaxfl.private_updates(clip_norm=norm, noise=jaxfl.gaussian(0.1))
    norm[...] = 7.0
    assert float(updates.clip_norm) == 0.5
    learner = jaxfl.private_constants(4, clip_norm=norm, loss_bound=bound, noise_multiplier=multiplier)
    kept = [cell.cell_contents for cell in learner.estimate.__closure__ or ()]
    assert not any(number is given for number in kept for given in numbers)


def clients_of(**changes):
    return jaxfl.local_steps(3, **{"batch_size": 2, "optimizer": optax.sgd(0.1), **changes})


ON_A_GRID = "must be drawn in float32 here: no bound says how far "  # what the family's accountant lacks


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: clients_of(noise=jaxfl.grid_gaussian(1.0), clip_norm=1.0),
            f"noise: {ON_A_GRID}one sample .*gradients",
        ),
        (
            lambda: jaxfl.private_updates(clip_norm=1.0, noise=jaxfl.grid_gaussian(1.0)),
            f"noise: {ON_A_GRID}one client .*updates",
        ),
        *(
            (
                lambda name=name: problem(name).algorithm(distribution="grid_gaussian"),
                f"distribution: {ON_A_GRID}one sample .*messages",
            )
            for name in ("gradient_tracking", "perturbed_gossip", "output_perturbation")
        ),
        (lambda: jaxfl.grid_gaussian(1e-34, bits=16), "grid_step: must lie between"),
        (lambda: clients_of(optimizer=optax.adam), "optimizer: must be an optimizer.* got a constructor"),
        (lambda: clients_of(num_steps=1.5), "num_steps: must be a whole number; got 1.5"),
    ],
)
def test_what_nobody_accounts_for_is_refused(make, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        make()


CONSTANTS = {"loss_bound": 1.0, "noise_multiplier": 1.0}
CLIPPED = {  # every place that takes a clip norm
    "mini_batch": lambda norm: jaxfl.mini_batch(clip_norm=norm),
    "saga": lambda norm: jaxfl.saga(clip_norm=norm),
    "local_steps": lambda norm: clients_of(clip_norm=norm),
    "private_updates": lambda norm: jaxfl.private_updates(clip_norm=norm, noise=jaxfl.gaussian(1.0)),
    "private_constants": lambda norm: jaxfl.private_constants(None, clip_norm=norm, **CONSTANTS),
    **{
        name: lambda norm, name=name: problem(name).algorithm(clip_norm=norm)
        for name in ("gradient_tracking", "perturbed_gossip", "output_perturbation")
    },
}


@pytest.mark.parametrize("name", CLIPPED)
def test_a_clip_norm_whose_squares_leave_float32_is_refused(name):
    """test_per_example shows that the smallest one that is taken clips a million coordinates."""
    for norm in (1e-21, 1e-17, 0.99e-12, 1.9e19, 1e30, np.float32(1e-21)):
        with pytest.raises(ArgumentError, match=r"^clip_norm: must lie between 1e-12 and 1\.8e"):
            CLIPPED[name](norm)
    for norm in (1e-12, 1.8e19, np.float32(1e-12)):
        CLIPPED[name](norm)
    jax.eval_shape(lambda norm: (CLIPPED[name](norm), norm)[1], jnp.float32(1e-21))  # a traced one is not read


@pytest.mark.parametrize("schedule", [lambda k: jnp.full(5, 0.1), lambda k: jnp.float32(-0.1)])
@pytest.mark.parametrize("name", ["push_sum", "fed_avg"])
def test_a_schedule_of_another_shape_or_sign_is_refused(name, schedule):
    p = problem(name)
    learner = p.algorithm(step_size=schedule)
    with pytest.raises(ArgumentError, match=r"^schedule: must be (a single number|non-negative)"):
        learner.round(KEY, learner.init(KEY, p.data), p.data)


def test_a_negative_number_of_steps_counts_as_none():
    """An epsilon is stated for the steps that are counted."""
    learner = jaxfl.fed_avg(linear_task(), clients=clients_of(num_steps=lambda k: k - 3, clip_norm=1.0), num_active=5)
    data, counts = uneven_data(), []
    state = learner.init(KEY, data)
    for _ in range(5):
        state, info = learner.round(KEY, state, data)
        counts.append(int(info.local_iterations.max()))
    assert counts == [0, 0, 0, 0, 1]


RING = {"graph": graphs.directed_ring(5), "step_size": 0.1}
LEARNERS = {
    "fed_avg": lambda task: jaxfl.fed_avg(task, clients=clients_of(), num_active=5),
    "mini_batch": lambda task: jaxfl.push_sum(task, gradient=jaxfl.gradients.mini_batch(), **RING),
    "saga": lambda task: jaxfl.push_sum(task, gradient=jaxfl.gradients.saga(), **RING),
    "dzofl": lambda task: jaxfl.dzofl(task, batch_size=2, step_size=1.0, smoothing=0.1, num_directions=3),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_a_loss_that_mixes_the_samples_of_a_batch_is_refused(name):
    mixing = jaxfl.from_functions(
        lambda key: jnp.zeros(6), lambda w, x, y: ((x - x.mean(axis=0, keepdims=True)) @ w - y.astype(jnp.float32)) ** 2
    )
    with pytest.raises(ArgumentError, match=r"^task.loss: must not mix the samples of a batch"):
        LEARNERS[name](mixing).init(KEY, uneven_data())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32])
@pytest.mark.parametrize("name", ["fed_avg", "mini_batch"])
def test_parameters_of_another_type_than_float32_and_float64_are_refused(name, dtype):
    task = jaxfl.from_functions(
        lambda key: {"w": jnp.zeros(6), "odd": jnp.zeros((), dtype)},
        lambda params, x, y: (x @ params["w"] - y.astype(jnp.float32)) ** 2,
    )
    with pytest.raises(ArgumentError, match=rf"^params: must be float32 or float64; .*odd is {jnp.dtype(dtype)}"):
        LEARNERS[name](task).init(KEY, uneven_data())


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("label", [3, -1])
def test_a_label_without_a_logit_is_refused(name, label):
    """Under a clip norm its sample would count as zero in every round."""
    data = uneven_data()
    wrong = data._replace(labels=data.labels.at[4].set(label))
    with pytest.raises(ArgumentError, match=r"^labels: must be classes .* for 3 logits"):
        LEARNERS[name](small_task()).init(KEY, wrong)


def test_an_embedder_is_told_what_train_refuses():
    """`init` under jit cannot see the sizes: a batch of 5 at nodes of 4 samples shows in its count only."""
    batches = jaxfl.gradients.mini_batch(sampler=jaxfl.gradients.fixed(5), clip_norm=1.0)
    learner, data = jaxfl.push_sum(small_task(), gradient=batches, **RING), uneven_data()
    state = jax.jit(learner.init)(KEY, data)
    _, infos = jax.lax.scan(lambda s, _: learner.round(KEY, s, data), state, length=3)
    with pytest.raises(FatalCount, match=r"^batch_overflow: must stay 0; got 3 in all, first 1 at position 0, 1 "):
        jaxfl.check_info(infos)
    right = infos.plus(batch_overflow=0 * infos.batch_overflow)
    jaxfl.check_info(right)
    jaxfl.check_info(jax.tree.map(lambda leaf: leaf[0], right))
    with pytest.raises(FatalCount, match=r"^discarded_gradients: must stay 0; got 7 in all. .*labels"):
        jaxfl.check_info(right.plus(discarded_gradients=jnp.int32(7)))
