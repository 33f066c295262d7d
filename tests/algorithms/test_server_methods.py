"""Methods with a server beside federated averaging: the papers' lines, sums over 1,000 rounds, and what they become."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import run, small_task, start, statistics_task, uneven_data
from reference import servers
from reference.runs import assert_same, client_batches, one_by_one

import jaxfl
from jaxfl import ArgumentError
from jaxfl.core.tree import num_bytes

KEY, DIM, CLIENTS, ACTIVE, STEPS, STEP_SIZE = jax.random.key(5), 4, 16, 6, 3, 0.05
SIZES = tuple(int(size) for size in np.random.default_rng(3).integers(3, 12, CLIENTS))
OWN_STEPS = 1 + np.arange(CLIENTS) % STEPS
# Adam's root divides small numbers, so that a method is given a problem whose answer is of order 1.
MEDIAN = jaxfl.algorithms.coordinate_median()
TASK = jaxfl.from_functions(lambda key: jax.random.normal(key, (DIM,)), lambda w, x, y: (x @ w - y) ** 2)


@functools.cache
def data():
    """Uneven parts, each with an optimum of its own."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(sum(SIZES), DIM)).astype(np.float32)
    owners, parts = np.repeat(np.arange(CLIENTS), SIZES), np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    optima = rng.normal(size=(CLIENTS, DIM))
    return jaxfl.federate(inputs, (inputs * optima[owners]).sum(axis=1).astype(np.float32), parts)


def gradient(client, y, batch):
    """Mean gradient of a client's samples at y, float64."""
    own = np.asarray(data().indices)[client][list(batch)]
    inputs, labels = np.float64(np.asarray(data().inputs)[own]), np.float64(np.asarray(data().labels)[own])
    return 2 * inputs.T @ (inputs @ y - labels) / len(own)


def loss(client, x):
    """Mean loss of all of a client's samples, float64."""
    own = np.asarray(data().indices)[client][: SIZES[client]]
    return np.mean((np.float64(np.asarray(data().inputs)[own]) @ x - np.float64(np.asarray(data().labels)[own])) ** 2)


def hessian(client, batch):
    """Hessian of the mean loss of a client's samples, float64."""
    own = np.asarray(data().indices)[client][list(batch)]
    inputs = np.asarray(data().inputs, np.float64)[own]
    return 2 * inputs.T @ inputs / len(own)


def learner(
    name, *, active=ACTIVE, steps=STEPS, batch_size=2, weighting="uniform", optimizer=None, uplink=None, **own: Any
):
    """The method on these clients."""
    clients = jaxfl.local_steps(
        steps, batch_size=batch_size, optimizer=optimizer or optax.sgd(STEP_SIZE), weighting=weighting
    )
    own = {"own": clients, **own} if name == "ditto" else own
    return getattr(jaxfl, name)(TASK, clients=clients, num_active=active, uplink=uplink, **own)


METHODS = {
    "fed_avgm": ("fed_avgm", {"server_step_size": 0.7, "server_momentum": 0.6}, {}),
    "fed_adagrad": ("fed_adagrad", {"server_step_size": 0.3, "tau": 0.01}, {}),
    "fed_adam": ("fed_adam", {"server_step_size": 0.1, "tau": 0.01}, {"weighting": "data"}),
    "fed_adam from 0": ("fed_adam", {"server_step_size": 0.1, "tau": 0.01, "first_square": 0.0}, {}),
    "fed_yogi": ("fed_yogi", {"server_step_size": 0.1, "tau": 0.01, "beta_2": 0.9}, {}),
    "fed_prox": ("fed_prox", {"proximal": 0.5}, {"weighting": "data"}),
    "scaffold": ("scaffold", {"server_step_size": 0.8}, {}),
    "fed_nova": ("fed_nova", {"num_steps": OWN_STEPS}, {"weighting": "data"}),
    "fed_nova with momentum": ("fed_nova", {"num_steps": OWN_STEPS}, {"weighting": "data", "momentum": 0.8}),
    "fed_dyn": ("fed_dyn", {"proximal": 0.2}, {}),
    "ditto": ("ditto", {"proximal": 0.7}, {"weighting": "data"}),
    "apfl": ("apfl", {"share": 0.3, "adapts": "steps"}, {}),
    "apfl by round": ("apfl", {"share": 0.6, "adapts": "round"}, {"weighting": "data"}),
    "per_fed_avg": ("per_fed_avg", {"inner_step_size": 0.04}, {"weighting": "data"}),
    "per_fed_avg, first order": ("per_fed_avg", {"inner_step_size": 0.04, "hessian": False}, {}),
    "q_fed_avg": ("q_fed_avg", {"fairness": 1.5}, {}),
    "q_fed_avg by data": ("q_fed_avg", {"fairness": 0.4}, {"weighting": "data"}),
}


@pytest.mark.parametrize("case", METHODS)
@pytest.mark.quick_cases(4)
def test_follows_the_papers_lines(case):
    """Six of sixteen clients for 30 rounds, to 1e-5 of the model."""
    name, options, local = METHODS[case]
    weighting, momentum = local.get("weighting", "uniform"), local.get("momentum")
    algorithm = learner(name, weighting=weighting, optimizer=optax.sgd(STEP_SIZE, momentum), **options)
    ours = one_by_one(algorithm, KEY, data(), 30)
    x, state = np.float64(ours.states[0].params), {}
    extra = {"momentum": momentum} if momentum else {}
    extra |= {"loss": loss} if name == "q_fed_avg" else {}
    for draws, after in zip(ours.draws, ours.states[1:], strict=True):
        active = client_batches(np.asarray(draws.active).tolist(), np.asarray(draws.steps.batch_indices), SIZES)
        sizes = np.array([SIZES[i] if weighting == "data" else 1.0 for i, _ in active])
        p = sizes / sizes.sum()
        step = {"num_clients": CLIENTS, "step": STEP_SIZE}
        more = [client_batches(draws.active.tolist(), np.asarray(each.batch_indices), SIZES) for each in draws.more]
        if name == "ditto":
            step["own_batches"] = more[0]
        if name == "per_fed_avg":
            step |= {"more": more, "curvature": hessian}
        x = getattr(servers, name)(x, active, gradient, state, p, **step, **options, **extra)
        tolerance = 1e-5 * float(np.linalg.norm(x))
        np.testing.assert_allclose(after.params, x, atol=tolerance)
        if name == "ditto":
            np.testing.assert_allclose(after.memory.params, state["own"], atol=tolerance)
        if name == "apfl":
            np.testing.assert_allclose(after.memory.own.params, state["own"], atol=tolerance)
            np.testing.assert_allclose(after.memory.share, state["share"], atol=1e-5)
            mixed = state["share"][:, None] * state["own"] + (1 - state["share"][:, None]) * x
            np.testing.assert_allclose(algorithm.node_params(after), mixed, atol=2 * tolerance)
    assert np.linalg.norm(x - ours.states[0].params) > 0.1, "it must move for this test to mean something"


SUMS: dict[str, Any] = {  # the server's vector is the mean of the clients'
    "scaffold": {"server_step_size": 1.0},
    "fed_dyn": {"proximal": 0.1},
}


@pytest.mark.parametrize("name", SUMS)
def test_the_servers_vector_is_the_mean_of_the_clients_over_1000_rounds(name):
    """In float32, on random batches and clients; relative to the largest value of a client."""
    algorithm = learner(name, **SUMS[name])

    def body(state, _):
        state, _ = algorithm.round(KEY, state, data())
        error = jnp.abs(state.optimizer - state.memory.mean(axis=0)).max()
        return state, (error / jnp.abs(state.memory).max(), jnp.linalg.norm(state.params))

    _, (errors, norms) = jax.jit(lambda s: jax.lax.scan(body, s, length=1000))(start(algorithm, KEY, data()))
    print(f"{name}: {errors.max():.1e}")
    assert np.isfinite(norms).all()
    assert errors.max() < 1e-5


@pytest.mark.parametrize("name", ["fed_adagrad", "fed_adam", "fed_yogi"])
def test_second_moments_are_never_negative_over_1000_rounds(name):
    algorithm = learner(name, server_step_size=0.1)

    def body(state, _):
        state, _ = algorithm.round(KEY, state, data())
        return state, state.optimizer.second.min()

    _, smallest = jax.jit(lambda s: jax.lax.scan(body, s, length=1000))(start(algorithm, KEY, data()))
    assert smallest.min() >= 0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fed_nova_moves_by_the_mean_of_constant_gradients(momentum):
    """Over 1,000 rounds, whatever the numbers of steps; clients that do not move leave all bits."""
    slope = jaxfl.from_functions(lambda key: jnp.zeros(DIM), lambda w, x, y: x @ w)
    clients = jaxfl.local_steps(STEPS, batch_size=99, optimizer=optax.sgd(STEP_SIZE, momentum), weighting="data")
    algorithm = jaxfl.fed_nova(slope, clients=clients, num_active=CLIENTS, num_steps=OWN_STEPS)
    inputs, indices = np.asarray(data().inputs, np.float64), np.asarray(data().indices)
    p = np.array(SIZES) / sum(SIZES)
    b = np.array([inputs[row[:size]].mean(axis=0) for row, size in zip(indices, SIZES, strict=True)])
    tau = OWN_STEPS
    masses = (tau - momentum * (1 - momentum**tau) / (1 - momentum)) / (1 - momentum)
    moved = -STEP_SIZE * (p @ masses) * (p @ b)
    state, _ = run(algorithm, KEY, data(), 1000)
    error = np.abs(np.float64(state.params) / 1000 - moved).max() / np.abs(moved).max()
    print(f"fed_nova, momentum {momentum}: {error:.1e}")
    assert error < 1000 * 2**-25  # equal moves round x alike, by up to half of half an eps of it a round
    flat = jaxfl.from_functions(lambda key: jax.random.normal(key, (DIM,)), lambda w, x, y: 0 * (x @ w))
    still = jaxfl.fed_nova(flat, clients=clients, num_active=5, num_steps=OWN_STEPS)
    np.testing.assert_array_equal(run(still, KEY, data(), 50)[0].params, start(still, KEY, data()).params)


def test_fed_prox_stays_where_the_loss_is_flat_and_reaches_the_proximal_optimum():
    flat = jaxfl.from_functions(lambda key: jnp.float32([0.5, -2.0]), lambda w, x, y: 0 * w[0] * y)
    clients = jaxfl.local_steps(5, batch_size=2, optimizer=optax.sgd(0.1), weighting="uniform")
    still = jaxfl.fed_prox(flat, clients=clients, num_active=4, proximal=0.5)
    np.testing.assert_array_equal(run(still, KEY, data(), 20)[0].params, [0.5, -2.0])
    alone = learner("fed_prox", active=1, steps=2000, batch_size=99, proximal=0.7)
    first = start(alone, KEY, data())
    draws = jax.jit(alone.draw)(KEY, first, data())
    own = np.asarray(data().indices)[int(draws.active[0])][: SIZES[int(draws.active[0])]]
    inputs, labels = (np.asarray(leaf, np.float64)[own] for leaf in (data().inputs, data().labels))
    x = np.float64(first.params)
    hessian = 2 * inputs.T @ inputs / len(own) + 0.7 * np.eye(DIM)
    expected = np.linalg.solve(hessian, 2 * inputs.T @ labels / len(own) + 0.7 * x)
    np.testing.assert_allclose(jax.jit(alone.update)(first, data(), draws)[0].params, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("adapts", ["steps", "never"])
def test_apfls_common_model_is_that_of_fed_avg(adapts):
    """Bit for bit over 1,000 rounds, with statistics, too; a share of 0 gives x to all, a share of 1 each alone."""
    for task in (TASK, statistics_task(DIM)):
        clients = jaxfl.local_steps(STEPS, batch_size=2, optimizer=optax.sgd(0.01, 0.5))
        options = {"clients": clients, "num_active": ACTIVE}
        plain, infos = run(jaxfl.fed_avg(task, **options), KEY, data(), 1000)
        ours = jaxfl.apfl(task, adapts=adapts, share=0.4, **options)
        state, measured = run(ours, KEY, data(), 1000)
        assert_same((plain.params, plain.model_state), (state.params, state.model_state))
        np.testing.assert_array_equal(measured.gradient_evaluations, 2 * np.asarray(infos.gradient_evaluations))
        assert np.ptp(np.asarray(state.memory.share)) > (0.1 if adapts == "steps" else -1)
        assert np.asarray(state.memory.share).min() >= 0
        assert np.asarray(state.memory.share).max() <= 1
    common, alone = (learner("apfl", share=share, adapts="never") for share in (0.0, 1.0))
    state = run(common, KEY, data(), 5)[0]
    np.testing.assert_array_equal(common.node_params(state), np.tile(state.params, (CLIENTS, 1)))
    first = start(alone, KEY, data())
    kept = [run(alone, KEY, data(), 5, first._replace(params=first.params + by))[0].memory.own.params for by in (0, 1)]
    assert_same(*kept)


def test_apfl_keeps_what_idle_clients_have():
    algorithm = learner("apfl", adapts="never")
    before, _ = run(algorithm, KEY, data(), 4)
    after, info = jax.jit(algorithm.round)(KEY, before, data())
    idle = np.asarray(info.active) == 0
    assert_same(*(jax.tree.map(lambda leaf: leaf[idle], state.memory) for state in (before, after)))
    assert (np.asarray(after.memory.own.params) != np.asarray(before.memory.own.params))[~idle].any(axis=1).all()


def test_models_after_one_own_step_keep_their_statistics():
    """The step follows the loss in evaluation mode; one model, or one a client."""
    task = statistics_task(DIM)
    one = jaxfl.core.Variables({"w": jnp.ones((1, DIM))}, {"mean": jnp.full((1, DIM), 0.5)})
    every = jax.tree.map(lambda leaf: jnp.tile(leaf, (CLIENTS, 1)), one)
    ours, others = (jaxfl.algorithms.after_own_step(task, data(), each, inner_step_size=0.1) for each in (one, every))
    assert_same(ours, others)
    np.testing.assert_array_equal(ours.model_state["mean"], every.model_state["mean"])
    for client in range(CLIENTS):
        own = np.asarray(data().indices)[client][: SIZES[client]]
        inputs, labels = np.asarray(data().inputs, np.float64)[own] - 0.5, np.asarray(data().labels)[own]
        expected = 1 - 0.1 * 2 * inputs.T @ (inputs.sum(axis=1) - labels) / len(own)
        np.testing.assert_allclose(ours.params["w"][client], expected, rtol=1e-5, atol=1e-6)


def test_per_fed_avg_goes_down_the_loss_after_one_step_and_its_batches_differ():
    """All active, one step on full batches: gradient descent on mean F_i(x - alpha grad F_i(x))."""
    algorithm = learner("per_fed_avg", active=CLIENTS, steps=1, batch_size=99, inner_step_size=0.05)
    state = start(algorithm, KEY, data())

    def models(x):
        return jaxfl.algorithms.after_own_step(TASK, data(), x[None], inner_step_size=0.05)

    def meta(x):
        padded = jax.vmap(TASK.loss)(models(x), data().inputs[data().indices], data().labels[data().indices])
        mask = jnp.arange(padded.shape[1], dtype=jnp.int32)[None] < data().sizes[:, None]
        return (jnp.where(mask, padded, 0).sum(axis=1) / data().sizes.astype(jnp.float32)).mean()

    values = [float(meta(state.params))]
    for _ in range(30):
        expected = state.params - STEP_SIZE * jax.jit(jax.grad(meta))(state.params)
        state, _ = jax.jit(algorithm.round)(KEY, state, data())
        np.testing.assert_allclose(state.params, expected, atol=1e-5 * float(np.linalg.norm(expected)))
        values.append(float(meta(state.params)))
    assert (np.diff(values) < 0).all()
    draws = jax.jit(learner("per_fed_avg", inner_step_size=0.05).draw)(KEY, state, data())
    batches = [np.asarray(each.batch_indices) for each in (draws.steps, *draws.more)]
    assert len(batches) == 3
    assert all((batches[i] != batches[j]).any() for i, j in ((0, 1), (0, 2), (1, 2)))


def test_q_fed_avg_moves_by_the_shortened_mean_where_losses_are_equal():
    """Over 1,000 rounds in float32: all losses are 5 wherever they are taken, and clients differ in their slopes."""
    slope = jaxfl.from_functions(lambda key: jnp.zeros(DIM), lambda w, x, y: 5.0 + x @ (w - jax.lax.stop_gradient(w)))
    clients = jaxfl.local_steps(STEPS, batch_size=99, optimizer=optax.sgd(STEP_SIZE), weighting="uniform")
    algorithm = jaxfl.q_fed_avg(slope, clients=clients, num_active=CLIENTS, fairness=2.0)
    inputs, indices = np.asarray(data().inputs, np.float64), np.asarray(data().indices)
    slopes = [inputs[row[:size]].mean(axis=0) for row, size in zip(indices, SIZES, strict=True)]
    changes = -STEP_SIZE * STEPS * np.array(slopes)
    moved = changes.mean(axis=0) / (1 + 2.0 * (changes**2).sum(axis=1).mean() / (STEP_SIZE * 5.0))
    state, infos = run(algorithm, KEY, data(), 1000)
    error = np.abs(np.float64(state.params) / 1000 - moved).max() / np.abs(moved).max()
    print(f"q_fed_avg: {error:.1e}")
    assert error < 1000 * 2**-25  # as for fed_nova
    np.testing.assert_array_equal(infos.forward_evaluations, np.tile(SIZES, (1000, 1)))
    assert np.abs(changes.mean(axis=0) - moved).max() > 0.1 * np.abs(moved).max()


def test_q_fed_avg_makes_losses_more_equal():
    """The spread of the clients' losses falls with q."""
    spreads = []
    for fairness in (0.0, 2.0):
        state, _ = run(learner("q_fed_avg", active=CLIENTS, fairness=fairness), KEY, data(), 600)
        losses = [loss(client, np.float64(state.params)) for client in range(CLIENTS)]
        spreads.append(np.std(losses) / np.mean(losses))
    assert spreads[1] < 0.9 * spreads[0]


def test_q_fed_avg_refuses_noise():
    updates = jaxfl.private_updates(clip_norm=0.5, noise=jaxfl.gaussian(0.3))
    for private in ({"clip_norm": 1.0, "noise": jaxfl.gaussian(0.2)}, {"updates": updates}):
        with pytest.raises(ArgumentError, match="noise: must be None: losses and norms of updates would be further"):
            private_learner("q_fed_avg", fairness=1.0, **private)


# Off lines: (method, its arguments, bit for bit)
OFF = [
    ("fed_avgm", {"server_momentum": 0.0}, True),
    ("fed_prox", {"proximal": 0.0}, True),
    ("fed_nova", {"num_steps": np.full(CLIENTS, STEPS)}, False),
    ("q_fed_avg", {"fairness": 0.0}, True),
    ("per_fed_avg", {"inner_step_size": 0.0}, True),
    ("per_fed_avg", {"inner_step_size": 0.0, "hessian": False}, True),
]


@pytest.mark.parametrize(("name", "options", "same"), OFF)
def test_switched_off_it_is_fed_avg(name, options, same):
    plain, other = (run(learner(one, **own), KEY, data(), 20)[0] for one, own in (("fed_avg", {}), (name, options)))
    assert_same(plain.params, other.params, **({} if same else {"rtol": 1e-6, "atol": 1e-6}))


def test_scaffold_and_fed_dyn_without_what_they_keep():
    """Variates held at 0 give fed_avg, and h and q held at 0 give fed_prox, to rounding."""
    pairs = [(("scaffold", {}), ("fed_avg", {})), (("fed_dyn", {"proximal": 0.3}), ("fed_prox", {"proximal": 0.3}))]
    for (name, options), (plain, arguments) in pairs:
        algorithm, other = learner(name, **options), learner(plain, **arguments)

        def forgetful(state, _, algorithm=algorithm, dyn=name == "fed_dyn"):
            new, _ = algorithm.round(KEY, state, data())
            params = new.params + new.optimizer / 0.3 if dyn else new.params  # x without the term of h
            zeros = jax.tree.map(jnp.zeros_like, (new.optimizer, new.memory))
            return new._replace(params=params, optimizer=zeros[0], memory=zeros[1]), None

        ours, _ = jax.jit(lambda s, f=forgetful: jax.lax.scan(f, s, length=20))(start(algorithm, KEY, data()))
        np.testing.assert_allclose(ours.params, run(other, KEY, data(), 20)[0].params, rtol=1e-5, atol=1e-6)


def test_scaffold_and_fed_dyn_reach_the_optimum_of_the_uniform_mean():
    """All active, full batches: where fed_avg with ten steps stays away."""
    inputs, labels = np.float64(data().inputs), np.float64(data().labels)
    scales = np.repeat(1 / np.array(SIZES), SIZES)
    optimum = np.linalg.solve((inputs.T * scales) @ inputs, (inputs.T * scales) @ labels)
    distance = {}
    cases: Any = (("fed_avg", {}), ("scaffold", {}), ("fed_dyn", {"proximal": 0.5}))
    for name, options in cases:
        algorithm = learner(name, active=CLIENTS, steps=10, batch_size=99, **options)
        distance[name] = float(np.abs(run(algorithm, KEY, data(), 600)[0].params - optimum).max())
    assert distance["fed_avg"] > 1e-2
    assert max(distance["scaffold"], distance["fed_dyn"]) < 1e-4


@pytest.mark.parametrize("task", [TASK, statistics_task(DIM)], ids=["plain", "statistics"])
def test_dittos_common_model_is_that_of_fed_avg(task):
    """Bit for bit over 1,000 rounds; without the term each client learns alone, on batches of its own."""
    clients = jaxfl.local_steps(STEPS, batch_size=2, optimizer=optax.sgd(0.01))
    options = {"clients": clients, "num_active": ACTIVE}
    plain, _ = run(jaxfl.fed_avg(task, **options), KEY, data(), 1000)
    ours, alone = (jaxfl.ditto(task, own=clients, proximal=mu, **options) for mu in (0.5, 0.0))
    state, infos = run(ours, KEY, data(), 1000)
    assert_same((plain.params, plain.model_state), (state.params, state.model_state))
    assert (np.asarray(infos.client_loss).sum(axis=0) > 0).all()
    assert ours.node_params(state) is not state.params
    first = start(alone, KEY, data())
    moved = first._replace(params=jax.tree.map(lambda leaf: leaf + 1, first.params))
    kept = [run(alone, KEY, data(), 5, each)[0].memory.params for each in (first, moved)]
    assert_same(*kept)
    draws = jax.jit(alone.draw)(KEY, first, data())
    assert (np.asarray(draws.steps.batch_indices) != np.asarray(draws.more[0].batch_indices)).any()


@pytest.mark.parametrize(
    ("name", "options", "local", "message"),
    [
        ("scaffold", {}, {"optimizer": optax.sgd(0.1, 0.9)}, "clients: must make steps of SGD.*TraceState"),
        ("scaffold", {}, {"optimizer": optax.adam(0.1)}, "clients: must make steps of SGD.*ScaleByAdamState"),
        ("scaffold", {}, {"optimizer": jaxfl.client_sgd(0.1, weight_decay=0.1)}, "clients: .*got weight decay"),
        ("fed_nova", {"num_steps": OWN_STEPS}, {"optimizer": optax.chain(optax.clip(1.0), optax.sgd(0.1))}, "clipping"),
        ("scaffold", {}, {"weighting": "data"}, "clients: must weigh all clients equally"),
        ("fed_dyn", {"proximal": 0.1}, {"weighting": "data"}, "clients: must weigh all clients equally"),
        ("fed_dyn", {"proximal": 0.1}, {"uplink": jaxfl.uplink(links=jaxfl.links(0.5))}, "links: must lose and round"),
        ("fed_adam", {"beta_2": 1.5}, {}, "beta_2: must"),
        ("apfl", {"share": 1.5}, {}, "share: must"),
        ("apfl", {}, {"optimizer": optax.adam(0.1)}, "clients: must make steps of SGD or momentum, the same"),
        ("q_fed_avg", {"fairness": 1.0}, {"optimizer": optax.adam(0.1)}, "clients: must make steps of SGD: L is 1"),
        (
            "q_fed_avg",
            {"fairness": 1.0},
            {"uplink": jaxfl.uplink(aggregate=MEDIAN)},
            "uplink: must leave updates.*got a robust",
        ),
    ],
)
def test_refusals(name, options, local, message):
    with pytest.raises(ArgumentError, match=message):
        learner(name, **options, **local)


def private_learner(name, *, updates=None, noise=None, clip_norm=None, **options):
    clients = jaxfl.local_steps(
        STEPS, batch_size=2, optimizer=optax.sgd(STEP_SIZE), weighting="uniform", clip_norm=clip_norm, noise=noise
    )
    uplink = None if updates is None else jaxfl.uplink(updates=updates)
    options |= {"own": clients} if name == "ditto" else {}
    return getattr(jaxfl, name)(TASK, clients=clients, num_active=ACTIVE, uplink=uplink, **options)


def test_per_fed_avg_refuses_noisy_steps_and_takes_private_updates():
    with pytest.raises(ArgumentError, match="clients: must neither clip nor add noise: clipping does not bound"):
        private_learner("per_fed_avg", inner_step_size=0.1, clip_norm=1.0, noise=jaxfl.gaussian(0.2))
    updates = jaxfl.private_updates(clip_norm=0.5, noise=jaxfl.gaussian(0.3))
    ours, plain = (
        private_learner(name, updates=updates, **own)
        for name, own in (("per_fed_avg", {"inner_step_size": 0.1}), ("fed_avg", {}))
    )
    mine, other = (jaxfl.privacy.releases_of(each, data()).each for each in (ours, plain))
    assert mine == other
    assert np.isfinite(run(ours, KEY, data(), 5)[0].params).all()


@pytest.mark.parametrize("name", ["fed_adam", "fed_prox", "scaffold", "fed_nova", "fed_dyn", "ditto", "apfl"])
def test_private_rounds_release_what_those_of_fed_avg_do(name):
    """Local noise, and whole clients: the same statement, and corrections act on what was released."""
    options = next(own for method, own, _ in METHODS.values() if method == name)
    updates = jaxfl.private_updates(clip_norm=0.5, noise=jaxfl.gaussian(0.3))
    for private in ({"clip_norm": 1.0, "noise": jaxfl.gaussian(0.2)}, {"updates": updates}):
        ours, plain = private_learner(name, **private, **options), private_learner("fed_avg", **private)
        mine, other = (jaxfl.privacy.releases_of(each, data()).each for each in (ours, plain))
        assert mine == other
        state = run(ours, KEY, data(), 5)[0]
        assert np.isfinite(state.params).all()
        np.testing.assert_array_equal(ours.node_params(state), state.params[None])  # no model of a client
    if name == "fed_adam":
        return
    # Gradients are clipped to almost nothing: corrections are not, and a method's memory moves x by itself.
    quiet = private_learner(name, clip_norm=1e-9, **options)
    first = start(quiet, KEY, data())
    np.testing.assert_allclose(run(quiet, KEY, data(), 1)[0].params, first.params, atol=1e-6)
    if name in SUMS:
        kept = first._replace(memory=jnp.ones_like(first.memory))
        assert np.abs(run(quiet, KEY, data(), 1, kept)[0].params - first.params).min() > 1e-2


def test_only_rows_of_active_clients_are_read_and_written():
    algorithm = learner("scaffold")
    first = start(algorithm, KEY, data())
    draws = jax.jit(algorithm.draw)(KEY, first, data())
    idle = np.setdiff1d(np.arange(CLIENTS), draws.active)
    broken = first._replace(memory=first.memory.at[idle].set(jnp.nan))
    update = jax.jit(algorithm.update)
    clean, other = update(first, data(), draws)[0], update(broken, data(), draws)[0]
    np.testing.assert_array_equal(clean.params, other.params)
    np.testing.assert_array_equal(clean.memory[draws.active], other.memory[draws.active])
    assert np.isnan(other.memory[idle]).all()
    assert (np.asarray(clean.memory[draws.active]) != 0).all()
    assert not np.asarray(clean.memory[idle]).any()


def test_rounds_copy_no_memory_of_idle_clients():
    """Two of 200 are active: five rounds take the room of a few models beside the state, which they are given."""
    many = uneven_data((5,) * 200)
    clients = jaxfl.local_steps(3, batch_size=2, optimizer=optax.sgd(0.1), weighting="uniform")
    algorithm = jaxfl.scaffold(small_task(hidden=2000), clients=clients, num_active=2)
    state = jax.eval_shape(algorithm.init, KEY, many)
    rounds = jax.jit(lambda s, d: jax.lax.scan(lambda s, _: (algorithm.round(KEY, s, d)[0], None), s, length=5)[0])
    memory = jax.jit(rounds, donate_argnums=0).lower(state, many).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 12 * num_bytes(state.params) < 0.1 * num_bytes(state)


def test_a_round_in_which_nothing_arrives_keeps_the_moments():
    nothing = jaxfl.uplink(links=jaxfl.links(0.0))
    algorithm = learner("fed_adam", uplink=nothing)
    before = start(algorithm, KEY, data())._replace(round_index=jnp.int32(0))
    after, _ = run(algorithm, KEY, data(), 3)
    assert_same((before.params, before.optimizer), (after.params, after.optimizer))


def test_statistics_of_a_model_are_averaged_and_not_corrected():
    task, parts = statistics_task(), uneven_data()
    clients = jaxfl.local_steps(3, batch_size=3, optimizer=optax.sgd(0.1), weighting="uniform")
    plain, ours = (
        jaxfl.fed_avg(task, clients=clients, num_active=5),
        jaxfl.scaffold(task, clients=clients, num_active=5),
    )
    kept = [run(each, KEY, parts, 4)[0].model_state["mean"] for each in (plain, ours)]
    np.testing.assert_allclose(*kept, rtol=1e-5)
