"""Whoever sees the models of ALI-DPFL alone guesses, by the variance of w - x, whether one sample was replaced."""

import jax
import numpy as np
import optax
import pytest
from problems import linear_task

import jaxfl
from jaxfl.privacy.clients import ClientRelease, account

FEATURES, SAMPLES, BATCH, CLIP, MULTIPLIER, STEP_SIZE = 800, 40, 10, 0.1, 5.0, 0.1
RUNS = 100  # of each of two data sets
ESTIMATES = {"estimate_batch_size": 20, "estimate_noise_multiplier": 20.0}


def data_set(replaced):
    """Two clients; one sample of the first is replaced by a large finite one."""
    rng = np.random.default_rng(0)
    inputs = 0.01 * rng.normal(size=(2 * SAMPLES, FEATURES)).astype(np.float32)
    inputs[0] *= 1e6 if replaced else 1.0
    return jaxfl.federate(inputs, np.zeros(2 * SAMPLES, np.int32), np.split(np.arange(2 * SAMPLES), 2))


def right_guesses(constants):
    """Guesses of 2 RUNS that are right, by the second message of each run."""
    clients = jaxfl.local_steps(
        8,
        batch_size=BATCH,
        optimizer=optax.sgd(STEP_SIZE),
        sampler=jaxfl.gradients.poisson,
        clip_norm=CLIP,
        noise=jaxfl.gaussian(MULTIPLIER * CLIP / BATCH),
    )
    budget = {"max_rounds": 5, "max_iterations": 20, "step_size": STEP_SIZE, "kappa": 1e3}
    learner = jaxfl.ali_dpfl(linear_task(FEATURES), clients=clients, constants=constants, **budget)

    def steps_seen(key, data):
        states = [learner.init(key, data)]
        for _ in range(2):
            states.append(learner.round(key, states[-1], data)[0])
        moved = states[2].params["w"] - states[1].params["w"]
        return 2 * (moved**2).sum() / (FEATURES * (STEP_SIZE * MULTIPLIER * CLIP / BATCH) ** 2)

    seen = jax.jit(jax.vmap(steps_seen, in_axes=(0, None)))
    honest, replaced = (
        np.asarray(seen(jax.random.split(jax.random.key(seed), RUNS), data_set(bool(seed)))) for seed in (0, 1)
    )
    return int((honest > 1.5).sum() + (replaced <= 1.5).sum())


def stated(estimates, **more):
    release = ClientRelease("poisson", SAMPLES, BATCH, CLIP, MULTIPLIER, estimates=estimates, **more)
    return account([release], dp_delta=1e-5, num_estimates=5, budget=(20, 5)).statements(20)


def test_models_of_estimates_without_noise_tell_one_sample_and_no_epsilon_is_stated():
    assert right_guesses(jaxfl.published_constants()) >= 0.99 * 2 * RUNS
    assert all(one.dp_epsilon is None for one in stated("as_published"))


def test_private_estimates_leave_the_attack_at_chance_and_have_an_epsilon():
    constants = jaxfl.private_constants(20, clip_norm=CLIP, loss_bound=0.5, noise_multiplier=20.0)
    assert right_guesses(constants) == pytest.approx(RUNS, abs=0.18 * RUNS)  # 2.5 standard deviations
    assert all(0 < (one.dp_epsilon or 0) < 10 for one in stated("private", **ESTIMATES))
