"""Perturbed and quantized states, perturbed outputs: sensitivities, total variation of rounding, composition."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl.channel import ternary_quantizer, uniform_quantizer
from jaxfl.privacy import tracking
from jaxfl.privacy.tracking import TrackingSchedule

STEPS, CHANGE = 20, 6.0


def schedule(state_mixing=0.3, num_nodes=None):
    shape = (STEPS,) if num_nodes is None else (num_nodes, STEPS)
    scale = np.random.default_rng(0).uniform(0.5, 2.0, shape)
    return TrackingSchedule(state_mixing, 0.1, 0.25, 3, scale, np.zeros(STEPS))


def states(numbers, gradients, transcript):
    """x_k of one agent, line by line, with given gradients (K + 1, d) and sums of what arrives."""
    x = [np.zeros(gradients.shape[1])]
    for k in range(len(gradients) - 1):
        received = numbers.state_mixing * transcript[k]
        x.append((1 - numbers.state_mixing) * x[k] + received - numbers.step_size * gradients[k])
    return np.array(x)


def state_changes(numbers, gradient_changes, rng):
    """|x_k - x'_k|_1, (K + 1,), for the same transcript."""
    transcript, gradients = rng.normal(size=(2, *gradient_changes.shape))
    other = states(numbers, gradients + gradient_changes, transcript)
    return np.abs(states(numbers, gradients, transcript) - other).sum(axis=1)


@pytest.mark.parametrize("state_mixing", [0.3, 1.0, 1.7])
def test_no_sequence_of_gradients_exceeds_the_state_sensitivities(state_mixing):
    numbers, rng = schedule(state_mixing), np.random.default_rng(1)
    bound = tracking.perturbed_state_sensitivities(numbers, CHANGE).state
    for _ in range(100):
        changes = rng.laplace(size=(STEPS, 3))
        changes *= CHANGE / numbers.num_samples / np.abs(changes).sum(axis=1, keepdims=True)
        assert (state_changes(numbers, changes, rng) <= bound + 1e-12).all()


@pytest.mark.parametrize("state_mixing", [0.3, 1.0, 1.7])
def test_for_each_k_one_sequence_attains_the_state_sensitivity(state_mixing):
    numbers, rng = schedule(state_mixing), np.random.default_rng(2)
    bound = tracking.perturbed_state_sensitivities(numbers, CHANGE).state
    signs = (-1.0 if state_mixing > 1 else 1.0) ** np.arange(STEPS)[:, None]  # those of the geometric response
    worst = signs * CHANGE / numbers.num_samples
    np.testing.assert_allclose(state_changes(numbers, worst, rng), bound, rtol=1e-9, atol=1e-12)
    assert bound[0] == 0


def test_one_gradient_attains_the_output_sensitivity():
    """o = x - gamma g with x known: what differs is gamma times a mean of which one of m gradients differs by C."""
    numbers = schedule()
    actual = tracking.output_sensitivities(numbers, CHANGE)
    samples = np.random.default_rng(3).normal(size=(numbers.num_samples, 2))
    other = samples.copy()
    other[1] += [CHANGE / 2, -CHANGE / 2]
    moved = numbers.step_size * np.abs(samples.mean(axis=0) - other.mean(axis=0)).sum()
    np.testing.assert_allclose(actual.state, np.full(STEPS, moved))
    assert not actual.tracker.any()


@pytest.mark.parametrize("num_nodes", [None, 4])
def test_budgets_are_sums_over_all_broadcasts(num_nodes):
    numbers = schedule(num_nodes=num_nodes)
    alone = tracking.states_only(numbers)
    for sensitivities in (
        tracking.perturbed_state_sensitivities(numbers, CHANGE),
        tracking.output_sensitivities(numbers, CHANGE),
    ):
        curve = tracking.cumulative_epsilon_curve(alone, sensitivities)
        assert curve.shape == numbers.state_noise_scale.shape
        for k in (0, 7, STEPS - 1):
            terms = sensitivities.state[: k + 1] / numbers.state_noise_scale[..., : k + 1]
            np.testing.assert_allclose(curve[..., k], terms.sum(axis=-1), rtol=1e-12)
        np.testing.assert_array_equal(tracking.cumulative_epsilon(alone, sensitivities), curve[..., -1])


def distribution(quantizer, value):
    """Value -> probability of one rounded number, from 2000 equally spaced uniform numbers."""
    uniform = (jnp.arange(2000, dtype=jnp.float32) + 0.5) / 2000
    actual, counts = np.unique(
        np.asarray(quantizer.apply(jnp.full(2000, value, jnp.float32), uniform)), return_counts=True
    )
    return dict(zip(np.round(actual, 5).tolist(), (counts / 2000).tolist(), strict=True))


def total_variation(quantizer, x, other):
    """Total variation of two vectors whose coordinates are rounded independently."""
    pairs = [(distribution(quantizer, a), distribution(quantizer, b)) for a, b in zip(x, other, strict=True)]
    outcomes = itertools.product(*(sorted({*p, *q}) for p, q in pairs))
    masses = [
        [np.prod([pair[side].get(value, 0) for pair, value in zip(pairs, outcome, strict=True)]) for side in (0, 1)]
        for outcome in outcomes
    ]
    return 0.5 * sum(abs(p - q) for p, q in masses)


@pytest.mark.parametrize(
    "quantizer", [uniform_quantizer(0.5), uniform_quantizer(0.5, levels=4), ternary_quantizer(0.5)]
)
def test_rounding_is_never_further_apart_than_the_delta(quantizer):
    rng, ratios = np.random.default_rng(4), []
    for reach in (0.02, 0.2, 1.0) * 6:
        x = rng.uniform(-0.45, 0.45, 2)
        other = x + reach * rng.uniform(-1, 1, 2)
        moved = tracking.Sensitivities(np.abs(x - other).sum().reshape(1), np.zeros(1))
        bound = tracking.quantization_deltas(moved, quantization_step=0.5)[0]
        actual = total_variation(quantizer, x, other)
        assert actual <= bound + 4 / 2000, "but for how finely probabilities are measured"
        ratios.append(actual / bound)
    moved = tracking.Sensitivities(np.array([0.2]), np.zeros(1))
    bound = tracking.quantization_deltas(moved, quantization_step=0.5)[0]
    np.testing.assert_allclose(total_variation(quantizer, [0.1], [0.3]), bound, atol=2 / 2000)
    assert max(ratios) > 0.7


def test_composed_deltas_cover_adaptive_broadcasts():
    """Random broadcasts whose distributions depend on the earlier ones; and one pair that attains the coupling."""
    rng, deltas = np.random.default_rng(5), np.array([0.3, 0.5, 0.2])
    summed, coupled = (
        tracking.cumulative_delta_curve(deltas, composition=composition) for composition in ("sum", "coupling")
    )
    assert (coupled <= summed + 1e-15).all()

    def joint_distance(pair):
        """Total variation of three broadcasts, by enumeration of all histories."""
        masses = {(): (1.0, 1.0)}
        for delta in deltas:
            extended = {}
            for history, (p, q) in masses.items():
                own, other = pair(delta)
                extended |= {(*history, value): (p * own[value], q * other[value]) for value in range(3)}
            masses = extended
        return 0.5 * sum(abs(p - q) for p, q in masses.values())

    def random_pair(delta):
        shared, own, other = rng.dirichlet(np.ones(3), size=3)
        return (1 - delta) * shared + delta * own, (1 - delta) * shared + delta * other

    def worst_pair(delta):
        return np.array([1 - delta, delta, 0]), np.array([1 - delta, 0, delta])

    assert max(joint_distance(random_pair) for _ in range(50)) < coupled[-1]
    np.testing.assert_allclose(joint_distance(worst_pair), coupled[-1], rtol=1e-12)


def test_delta_by_summation_reaches_one():
    numbers = schedule(1.0)  # every broadcast but the first changes by gamma C / m = 0.5
    deltas = tracking.quantization_deltas(
        tracking.perturbed_state_sensitivities(numbers, CHANGE), quantization_step=2.0
    )
    curve = tracking.cumulative_delta_curve(deltas)
    np.testing.assert_allclose(curve[:6], [0, 0.25, 0.5, 0.75, 1, 1])
    assert tracking.exhausted_at(curve) == 4
    assert tracking.exhausted_at(curve[:4]) is None
    coupled = tracking.cumulative_delta_curve(deltas, composition="coupling")
    np.testing.assert_allclose(coupled, 1 - 0.75 ** np.arange(STEPS), rtol=1e-12)
    saturated = tracking.cumulative_delta_curve(np.array([0.5, 1.0, 0.5]), composition="coupling")
    np.testing.assert_array_equal(saturated[1:], 1)
