"""Numbers that a refactoring must not change: epsilons of all methods, and the first rounds of every algorithm.

The numbers stand in tests/pins/. `JAXFL_TESTS_PIN=1 python -m pytest -n 0 tests/test_pins.py` writes them anew, which a
change has to give its reason for.
"""

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import problem
from registry import REGISTRY

from jaxfl import privacy
from jaxfl.gradients import mini_batch, poisson
from jaxfl.privacy import clients, gossip, tracking
from jaxfl.training.environment import describe_environment

PINS = Path(__file__).parent / "pins"
WRITES = os.environ.get("JAXFL_TESTS_PIN") == "1"
DELTA, ROUNDS = 1e-5, 3


def pinned(name: str, actual: dict[str, Any]) -> dict[str, Any]:
    """The file's content, which `found` takes the place of where it is to be written."""
    path = PINS / f"{name}.json"
    if WRITES:
        path.write_text(json.dumps(actual, indent=0, sort_keys=True) + "\n")
    return json.loads(path.read_text())


def of_gossip():
    """Statements of each accountant, sampler and kind of noise."""
    cases = [(privacy.PRIVSGP, "mini_batch"), (privacy.PRIVSGP_VR, "saga")]
    cases += [(privacy.DP2_SGD, "mini_batch"), (privacy.A_DP2_SGD, "mini_batch")]
    grid = privacy.Grid(14, 2410)
    for accountant, estimator in cases:
        for sampler in ("poisson", "fixed", "uniform"):
            plain = privacy.Release(estimator, sampler, 40, 90, clip_norm=2.0, noise_std=0.3)
            releases = {"": plain, " on a grid": plain._replace(grid=grid)}
            if estimator == "saga":
                releases[" by batches"] = plain._replace(entry_size=3, num_entries=30, batch_size=13, clip_norm=0.7)
            for name, release in releases.items():
                stated = gossip.account(accountant, release, dp_delta=DELTA, num_nodes=8).statements(100)
                yield f"{accountant.label}, {sampler}{name}", stated


def of_clients():
    """Local steps as published and with private constants, and whole clients."""
    plain = privacy.ClientRelease("poisson", num_samples=5000, batch_size=75, clip_norm=0.1, noise_multiplier=1.1)
    private = plain._replace(estimate_batch_size=150, estimate_noise_multiplier=6.0, estimates="private")
    yield "local steps", clients.account(plain, dp_delta=DELTA).statements(317)
    yield "ALI-DPFL, private", clients.account(private, num_estimates=60, dp_delta=DELTA).statements(317)
    published = plain._replace(estimates="as_published")
    yield "ALI-DPFL, as published", clients.account(published, num_estimates=60, dp_delta=DELTA).statements(317)
    update = privacy.UpdateRelease("poisson", 0.1, clip_norm=2.0, noise_multiplier=1.2)
    yield "whole clients", clients.client_level_account(update, num_clients=40, dp_delta=DELTA).statements(300)


def of_tracking():
    """Both published schedules, both distributions, and the methods that they are compared with."""
    nodes, count = 3, 60
    received, sent = np.array([1.5, 1.0, 0.4]), np.array([0.8, 0.0, 1.3])
    schedules = {
        "S1": tracking.polynomial_schedule(
            count, state_noise_exponent=np.array([0.1, 0.2, 0.3]), tracker_noise_exponent=0.1
        ),
        "S2": tracking.exponential_schedule(
            count, state_noise_base=1.01, tracker_noise_base=np.array([1.0, 1.02, 1.03])
        ),
    }
    for name, plain in schedules.items():
        full = np.ones((nodes, count + 1))
        schedule = plain._replace(
            state_noise_scale=plain.state_noise_scale * full, tracker_noise_scale=plain.tracker_noise_scale * full
        )
        for distribution in ("laplace", "gaussian"):
            release = tracking.TrackingRelease(clip_norm=0.75, distribution=distribution)
            options = {"state_in_weights": received, "tracker_out_weights": sent, "dp_delta": DELTA}
            others = {"num_nodes": nodes, "dp_delta": DELTA}
            accounts = {
                "tracking": tracking.gradient_tracking_account(schedule, release, **options),
                "states": tracking.perturbed_state_account(schedule, release, **others),
                "output": tracking.output_perturbation_account(schedule, release, **others),
            }
            for method, account in accounts.items():
                yield f"{method} {name}, {distribution}", account.statements(count)
        quantized = tracking.quantization_account(
            schedule, tracking.TrackingRelease(clip_norm=0.75), num_nodes=nodes, quantization_step=100.0
        )
        yield f"quantized {name}", quantized.statements(count)


def test_no_epsilon_moves():
    actual = {}
    for name, statements in (*of_gossip(), *of_clients(), *of_tracking()):
        for each in statements:
            key = f"{name}: {each.bound} {each.neighboring_relation} {each.dp_delta:.3g}"
            actual[key if key not in actual else f"{key}, again"] = each.dp_epsilon
    kept = pinned("epsilons", actual)
    assert sorted(actual) == sorted(kept)
    moved = {key: (kept[key], value) for key, value in actual.items() if (value is None) != (kept[key] is None)}
    numbers = {key: value for key, value in actual.items() if value is not None and key not in moved}
    moved |= {key: (kept[key], value) for key, value in numbers.items() if abs(value - kept[key]) > 1e-9 * (1 + value)}
    assert not moved


def digest(leaves) -> str:
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()[:16]


def words(tree) -> list[np.ndarray]:
    """The leaves, typed keys as their numbers."""
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(tree)]
    pairs = zip(is_key, jax.tree.leaves(tree), strict=True)
    return [np.asarray(jax.random.key_data(leaf) if key else leaf) for key, leaf in pairs]


@pytest.fixture(scope="module")
def kept_rounds():
    actual: dict[str, Any] = {}
    yield actual, {} if WRITES else json.loads((PINS / "rounds.json").read_text())
    if WRITES:
        pinned("rounds", actual)


@pytest.mark.parametrize("name", REGISTRY)
def test_first_rounds_do_not_move(name, kept_rounds):
    """Random integers and keys on any machine, all bits of states and losses on one like that of the file."""
    actual, kept = kept_rounds
    one = problem(name)
    algorithm = one.algorithm(
        gradient=functools.partial(mini_batch, sampler=poisson(2)), clip_norm=0.7, noise_scale=0.02
    )
    key, state = jax.random.key(7), jax.jit(algorithm.init)(jax.random.key(7), one.data)
    drawn = words(jax.jit(algorithm.draw)(key, state, one.data))
    step, losses = jax.jit(algorithm.round), []
    for _ in range(ROUNDS):
        state, info = step(key, state, one.data)
        losses.append(np.asarray(info.loss))
    environment = describe_environment()
    optimized = os.environ.get("JAXFL_TESTS_OPTIMIZED", "0") == "1"
    machine = [environment[part] for part in ("jaxlib", "platform", "vector_instructions", "x64")]
    mine = {
        "draws": digest(leaf for leaf in drawn if leaf.dtype.kind in "iub"),
        "loss": [float(np.nanmean(loss)) for loss in losses],
        "bits": digest([*words(state), *losses]),
        "machine": hashlib.sha256(json.dumps([*machine, optimized]).encode()).hexdigest()[:16],
    }
    actual[name] = mine
    if WRITES:
        return
    assert mine["draws"] == kept[name]["draws"]
    np.testing.assert_allclose(mine["loss"], kept[name]["loss"], rtol=1e-4)
    if mine["machine"] == kept[name]["machine"]:
        assert mine["bits"] == kept[name]["bits"]
