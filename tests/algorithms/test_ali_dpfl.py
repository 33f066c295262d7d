"""ALI-DPFL: the paper's lines, the search for tau with its edge cases, both budgets, and what estimates release."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusals
from problems import small_task, uneven_data
from reference import ali_dpfl as reference
from reference.network import as_float64
from reference.runs import flat, node_samples, one_by_one

import jaxfl
from jaxfl.algorithms.ali_dpfl import iteration_gap, next_num_steps
from jaxfl.algorithms.clients.bound_constants import Aggregation, Constants, ConstantsDraws
from jaxfl.algorithms.clients.steps import NoiseKeys
from jaxfl.core.platform import tracing_for

KEY = jax.random.key(5)
SIZES = (17, 9, 23, 12, 14)
STEP_SIZE, BATCH, CLIP, NOISE_STD = 0.5, 4, 0.6, 0.05
PRIVATE = {"clip_norm": 0.7, "loss_bound": 0.3, "noise_multiplier": 0.8}


def clients(max_steps=12, **changes):
    options = {
        "batch_size": BATCH,
        "optimizer": optax.sgd(STEP_SIZE),
        "sampler": jaxfl.gradients.poisson,
        "clip_norm": CLIP,
        "noise": jaxfl.gaussian(NOISE_STD),
        **changes,
    }
    return jaxfl.local_steps(max_steps, **options)


def learner(constants=None, max_steps=12, local=None, task=None, **changes):
    options = {"max_rounds": 20, "max_iterations": 130, "step_size": STEP_SIZE, "kappa": 1.0, **changes}
    return jaxfl.ali_dpfl(
        small_task() if task is None else task,
        clients=clients(max_steps, **(local or {})),
        constants=jaxfl.published_constants(5) if constants is None else constants,
        **options,
    )


def positions(indices, sizes):
    return [[s for s in row if s < size] for row, size in zip(np.asarray(indices), sizes, strict=True)]


@pytest.mark.parametrize(
    ("kind", "platform"),
    [
        ("published", "cpu"),
        ("private", "cpu"),
        ("private", "gpu"),
        ("private, all samples", "cpu"),
        ("private, own noise", "cpu"),
    ],
)
@pytest.mark.quick_cases(1)
def test_follows_the_papers_lines(kind, platform):
    """Twenty rounds on the same draws, in which tau changes: parameters, tau, and the constants.

    In the forms for a CPU and for an accelerator, where these differ. Of clients with noise of their own the rule takes
    the largest, and the estimates subtract the noise that the mean really has.
    """
    size = None if "all" in kind else 5
    is_private = kind.startswith("private")
    constants = jaxfl.private_constants(size, **PRIVATE) if is_private else jaxfl.published_constants(size)
    kappa = {"published": 0.3, "private": 0.3}[kind.partition(",")[0]]
    scales = np.linspace(0.2, 1.0, len(SIZES)) * NOISE_STD if "own" in kind else np.full(len(SIZES), NOISE_STD)
    noise = jaxfl.gaussian(jnp.asarray(scales) if "own" in kind else NOISE_STD)
    algorithm, data = learner(constants, kappa=kappa, local={"noise": noise}), uneven_data(SIZES)
    with tracing_for(platform):
        states, all_draws, infos = one_by_one(algorithm, KEY, data, 20)
    samples, squares = node_samples(data), np.square(SIZES)
    in_mean = np.sqrt(squares @ np.square(scales) / squares.sum())
    noise_of = jax.jit(lambda key, scale, like: NoiseKeys(key).draw(jaxfl.gaussian(scale), like))
    server = reference.Server(as_float64(algorithm.node_params(states[0]), 0), 1, 0, [], [])
    taus = []
    for number, (draws, info) in enumerate(zip(all_draws, infos, strict=True)):
        assert int(states[number].num_steps) == server.tau, f"round {number}"
        taus.append(server.tau)
        batches = [
            positions(client, [length] * 12) for client, length in zip(draws.steps.batch_indices, SIZES, strict=True)
        ]
        noises = [
            [
                as_float64(
                    jax.tree.map(
                        lambda leaf: leaf[None], noise_of(draws.steps.noise.keys[i, t], scales[i], states[0].params)
                    ),
                    0,
                )
                for t in range(server.tau)
            ]
            for i in range(len(SIZES))
        ]
        where = (
            [list(range(length)) for length in SIZES]
            if size is None
            else positions(draws.constants.batch_indices, SIZES)
        )
        if is_private:
            expected = functools.partial(_private, draws.constants.noise, size, where, in_mean)
        else:
            expected = functools.partial(reference.published, positions=where)
        server, means = reference.ali_round(
            server,
            samples,
            batches,
            noises,
            expected,
            number=number,
            eta=STEP_SIZE,
            kappa=kappa,
            largest=12,
            rounds=20,
            iterations=130,
            clip_norm=CLIP,
            batch_size=BATCH,
            step_std=NOISE_STD,
        )
        for name, value in means.items():
            np.testing.assert_allclose(getattr(info, name), value, rtol=2e-3, atol=1e-5)
        after = flat(as_float64(algorithm.node_params(states[number + 1]), 0))
        assert np.linalg.norm(after - flat(server.w)) < 1e-5 * np.linalg.norm(flat(server.w))
    assert len(set(taus)) >= 4, taus


def _private(noise, size, where, step_std, server, clients, w, samples, shares):
    """The reference's estimates, of clients that may have divisors of their own."""
    results = []
    for i in range(len(clients)):
        of_client = reference.private(
            server,
            [clients[i]],
            w,
            [samples[i]],
            [where[i]],
            shares,
            [np.asarray(noise, np.float64)[i]],
            eta=STEP_SIZE,
            size=len(samples[i]) if size is None else size,
            clip_norm=PRIVATE["clip_norm"],
            loss_bound=PRIVATE["loss_bound"],
            z=PRIVATE["noise_multiplier"],
            step_std=step_std,
        )
        results.append([values[0] for values in of_client])
    return tuple(list(values) for values in zip(*results, strict=True))


def test_the_budget_is_never_overspent():
    """A spent budget of rounds or of iterations, of any size, stops training: nothing changes, is sent, or released."""
    data = uneven_data(SIZES)

    @jax.jit
    def swept(max_rounds, max_iterations):
        def one(rounds, iterations):
            algorithm = learner(max_rounds=rounds, max_iterations=iterations)
            state = algorithm.init(KEY, data)
            return jax.lax.scan(
                lambda s, _: (lambda new: (new[0], (new[0].params, new[1])))(algorithm.round(KEY, s, data)),
                state,
                length=14,
            )

        return jax.vmap(one)(max_rounds, max_iterations)

    budgets = list(itertools.product((1, 3, 9), (1, 2, 7, 23, 60)))
    state, (params, infos) = jax.tree.map(np.asarray, swept(*jnp.array(budgets, jnp.int32).T))
    for lane, (rounds, iterations) in enumerate(budgets):
        taus = infos.local_iterations[lane]
        assert taus.sum() == state.iterations[lane] <= iterations
        assert (taus > 0).sum() <= rounds
        assert taus.sum() == iterations or (taus > 0).sum() == rounds, "nothing is left over while both remain"
        idle = taus == 0
        for name in ("bits_sent", "bits_received", "gradient_evaluations", "estimate_releases", "update_norm"):
            assert not np.any(getattr(infos, name)[lane][idle]), name
        assert np.all(infos.estimate_releases[lane][~idle] == 1)
        moved = np.stack([flat(jax.tree.map(lambda leaf, at=(lane, r): leaf[at], params)) for r in range(14)])
        last = int((taus > 0).sum()) - 1
        np.testing.assert_array_equal(moved[last:], np.broadcast_to(moved[last], moved[last:].shape))


def test_h_is_zero_at_0_and_1_and_equals_its_closed_form():
    def gaps_of(**numbers):
        return np.asarray(iteration_gap(60, **{name: jnp.float32(value) for name, value in numbers.items()}))

    for beta, spread, eta in [(0.5, 2.0, 0.5), (3.0, 0.1, 0.01), (1e-3, 5.0, 0.5), (40.0, 1.0, 0.5)]:
        gaps = gaps_of(beta=beta, spread=spread, step_size=eta)
        assert gaps[0] == gaps[1] == 0
        # Of S alone: the reference's sum of xi and noise.
        expected = [reference.h(x, spread, beta, eta, 1, 0.0) for x in range(61)]
        finite = np.array(expected) < 1e37
        np.testing.assert_allclose(gaps[finite], np.array(expected)[finite], rtol=1e-4, atol=1e-9)
    zero = gaps_of(beta=0.0, spread=1.0, step_size=0.5)
    assert not np.any(zero), "the limit for beta -> 0"


_next = jax.jit(next_num_steps, static_argnames="max_steps")


def chosen(num_steps, rounds_left, iterations_left, *, rho=1.0, beta=1.0, spread=0.52308, kappa=1.0, max_steps=100):
    numbers = {"rho": rho, "beta": beta, "spread": spread, "step_size": 0.5, "kappa": kappa}
    left = {"rounds_left": np.int32(rounds_left), "iterations_left": np.int32(iterations_left)}
    return int(
        _next(
            np.int32(num_steps),
            **{name: np.float32(value) for name, value in numbers.items()},
            **left,
            max_steps=max_steps,
        )
    )


def test_the_edges_of_the_search():
    assert chosen(1, 63, 317, kappa=100.0) == 2, "at most twice the last"
    assert chosen(50, 63, 317, rho=1e9) == 1, "only h(1) = 0 leaves a positive bracket"
    assert chosen(50, 63, 317, rho=float("inf"), beta=50.0) == 1, "without a feasible tau it is 1"
    assert chosen(100, 2, 10**6, rho=0.0, beta=1e9, max_steps=40) == 40, "rho 0 against an infinite h"
    assert chosen(50, 10, 4, kappa=100.0) == 1, "as many rounds as iterations"
    assert chosen(50, 1, 4, kappa=100.0) == 4, "no more than the iterations that are left"
    assert chosen(8, 0, 10) == chosen(8, 5, 0) == 0, "a spent budget"
    assert chosen(50, 63, 317, rho=0.0) == 6, "equal bounds: the smallest tau that spends all"
    assert chosen(50, 2**30, 2**30, rho=0.0) == 1, "products of more than 32 bits"


def test_the_search_agrees_with_the_loop_on_random_constants():
    rng = np.random.default_rng(0)
    for _ in range(200):
        rho, beta, spread, kappa = 10 ** rng.uniform(-3, 2, 4)
        tau, rounds, iterations = int(rng.integers(1, 60)), int(rng.integers(0, 80)), int(rng.integers(0, 900))
        constants = {"rho": rho, "beta": beta, "xi": spread, "eta": 0.5, "kappa": kappa, "d": 1, "sigma_c_over_b": 0.0}
        expected = reference.search(tau, rounds, iterations, 100, **constants)
        ours = chosen(tau, rounds, iterations, rho=rho, beta=beta, spread=spread, kappa=kappa)
        if ours != expected:  # a tie, as far as float32 sees
            values = [reference.bound(t, min(t * rounds, iterations), **constants) or 0.0 for t in (ours, expected)]
            assert values[0] > 0
            np.testing.assert_allclose(*values, rtol=1e-5)


@pytest.mark.slow
def test_a_client_whose_model_equals_the_aggregate_keeps_its_rho_and_beta():
    data, task = uneven_data(SIZES), small_task()
    params = task.init(KEY)
    same = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (5, *leaf.shape)), params)
    apart = jax.tree.map(lambda leaf: leaf.at[1:].add(0.1), same)
    before = Constants(*(jnp.full(5, value, jnp.float32) for value in (7.0, 8.0, 9.0)))
    shares = jnp.asarray(np.array(SIZES) / sum(SIZES), jnp.float32)
    for constants in (jaxfl.published_constants(), jaxfl.private_constants(4, **PRIVATE)):
        aggregation = Aggregation(
            params, apart, params, shares, shares, jnp.int32(1), jnp.float32(0.5), jnp.float32(0.0)
        )
        draws = constants.draw(KEY, jnp.int32(0), data)
        estimated, evaluations = constants.estimate(task, data, draws, aggregation, before)
        assert (float(estimated.rho[0]), float(estimated.beta[0])) == (7.0, 8.0)
        assert np.all(estimated.rho[1:] != 7.0)
        assert np.all(np.asarray(evaluations) > 0)


def test_one_sample_moves_the_three_numbers_by_at_most_the_stated_bounds():
    """Without noise; and the noise that is added is z sqrt(3) times these bounds."""
    data, task = uneven_data((6, 6)), small_task()
    constants = jaxfl.private_constants(3, **PRIVATE)
    params = task.init(KEY)
    other = jax.tree.map(lambda leaf: jnp.stack([leaf + 0.5, leaf - 0.5]), params)
    half, one = jnp.full(2, 0.5), jnp.int32(1)
    aggregation = Aggregation(params, other, params, half, half, one, jnp.float32(0.5), jnp.float32(0.0))
    distance = np.linalg.norm(np.concatenate([np.full(leaf.size, 0.5) for leaf in jax.tree.leaves(params)]))

    @jax.jit
    def estimated(third):
        """Estimates of client 0, whose third sample may be replaced by another or masked."""
        indices = jnp.stack([jnp.stack([0, 1, third, 6]), jnp.array([0, 1, 2, 6])]).astype(jnp.int32)
        draws = ConstantsDraws(indices, jnp.zeros(2, jnp.int32), jnp.zeros((2, 3)))
        unknown = jnp.zeros(2, jnp.float32)
        actual, _ = constants.estimate(task, data, draws, aggregation, Constants(unknown, unknown, unknown))
        return actual.rho[0] * distance, actual.beta[0] * distance, actual.xi[0]

    change = np.abs(np.array(estimated(6)) - np.array(estimated(2)))
    bounds = np.array([PRIVATE["loss_bound"], 2 * PRIVATE["clip_norm"], PRIVATE["clip_norm"]]) / 3
    assert np.all(change > 0)
    assert np.all(change <= bounds * (1 + 1e-5))


def test_noise_of_the_estimates_is_standard_normal_and_used_once():
    data, constants = uneven_data(SIZES), jaxfl.private_constants(4, **PRIVATE)
    rounds = jnp.arange(3000, dtype=jnp.int32)
    draws = jax.jit(jax.vmap(lambda r: constants.draw(KEY, r, data)))(rounds)
    noise = np.asarray(draws.noise, np.float64)
    assert len(np.unique(noise)) > 0.99 * noise.size
    assert abs(noise.mean()) < 4 / np.sqrt(noise.size)
    assert abs(noise.std() - 1) < 4 / np.sqrt(2 * noise.size)
    counts = (np.asarray(draws.batch_indices) < np.array(SIZES)[None, :, None]).sum(axis=2)
    np.testing.assert_allclose(counts.mean(axis=0), 4, atol=4 * np.sqrt(4 / 3000))
    step = clients().draw(KEY, jnp.int32(0), jnp.arange(5), data, small_task())
    batches = np.asarray(step.batch_indices)[:, 0]
    assert any(set(a) != set(b) for a, b in zip(batches, np.asarray(draws.batch_indices)[0], strict=True))


test_refusals = refusals(
    [
        (lambda changes=changes: learner(**changes), argument)
        for argument, rows in {
            "kappa": [{"kappa": 0.0}],
            "max_iterations": [{"max_iterations": -1}],
            "max_rounds": [{"max_rounds": jnp.ones(2)}, {"max_rounds": 20.7}],
            "clients": [
                {"local": local}
                for local in (
                    {"noise": None, "clip_norm": None},
                    {"num_steps": 3},
                    {"sampler": jaxfl.gradients.fixed},
                    {"optimizer": optax.sgd(5.0)},
                    {"optimizer": optax.sgd(STEP_SIZE, momentum=0.9)},
                    {"optimizer": lambda k: optax.sgd(STEP_SIZE / (1.0 + k.astype(jnp.float32)))},
                )
            ],
        }.items()
        for changes in rows
    ]
    + [(lambda name=name: jaxfl.private_constants(4, **{**PRIVATE, name: 0.0}), name) for name in PRIVATE]
    + [(lambda: learner(jaxfl.private_constants(9, **PRIVATE)).init(KEY, uneven_data(SIZES)), "batch_size")]
)
