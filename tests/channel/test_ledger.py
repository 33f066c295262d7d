"""Ledgers against sums made by hand, and against DZOFL's published numbers."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusals
from problems import start

import jaxfl
from jaxfl.channel import (
    DZOFL_COUNTED,
    Counts,
    EnergyModel,
    Work,
    backward_energy,
    count,
    forward_energy,
    ledger,
    node_work,
    total,
)
from jaxfl.channel.ledger import COUNTED
from jaxfl.models import classification, dzofl_cnn, mlp

MODEL = mlp((2, 4, 3))
LAYERS = count(MODEL, (2,))
# Dense 2 x 4 with biases, relu, dense 4 x 3 with biases.
FORWARD, PARAMS = 2 * 4 + 4 + 4 + 4 * 3 + 3, 2 * 4 + 4 + 4 * 3 + 3
LINK: dict[str, Any] = {
    "uplink_bits_per_second": 1e3,
    "downlink_bits_per_second": 4e3,
    "slot_seconds": 0.0,
    "transmit_dbm": 30.0,
}
BOOK = ledger(node_work(LAYERS), batch_size=2, operations_per_second=1e2, **LINK)
KEY = jax.random.key(0)


def data_of(sizes):
    rng, ends = np.random.default_rng(0), np.cumsum([0, *sizes])
    inputs = rng.normal(size=(ends[-1], 2)).astype(np.float32)
    own = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
    return jaxfl.federate(inputs, np.arange(ends[-1]) % 3, own)


def first_round(algorithm, data):
    return jax.jit(algorithm.round)(KEY, start(algorithm, KEY, data), data)[1]


def charged(operations, activations, parameters, inputs):
    return Counts(parameters, activations, macs=operations, other_operations=0, inputs=inputs)


def joules_of_gradient(batch_size=2):
    """Energy of the gradient of one sample of a batch."""
    batch = charged(batch_size * FORWARD, batch_size * total(LAYERS).activations, PARAMS, batch_size * 2)
    return (forward_energy(batch, EnergyModel()) + backward_energy(batch, EnergyModel())) / batch_size


def test_a_round_of_fed_avg_by_hand():
    """Two of three clients make three steps; the one with a single sample takes it alone."""
    clients = jaxfl.local_steps(3, batch_size=2, optimizer=optax.sgd(0.1))
    learner = jaxfl.fed_avg(classification(MODEL), clients=clients, num_active=2)
    info = first_round(learner, data_of((4, 1, 5)))
    samples = np.array([3 * 2, 3 * 1, 3 * 2]) * np.asarray(info.active)
    assert info.active.sum() == 2
    costs, bits = BOOK.of_round(jax.tree.map(np.asarray, info)), 32 * PARAMS
    np.testing.assert_allclose(costs.operations, samples.sum() * 3 * FORWARD, rtol=1e-12)
    slowest = samples.max() * 3 * FORWARD / 1e2 + bits / 1e3
    np.testing.assert_allclose(costs.simulated_seconds, slowest + bits / 4e3, rtol=1e-12)
    np.testing.assert_allclose(costs.joules, samples.sum() * joules_of_gradient() + 2 * bits / 1e3, rtol=1e-12)


def test_a_round_of_push_sum_by_hand():
    """On a star the center sends to three nodes and hears from three, and is the slowest."""
    learner = jaxfl.push_sum(classification(MODEL), graph=jaxfl.graphs.star(4), step_size=0.1)
    costs, bits = BOOK.of_round(first_round(learner, data_of((2, 3, 2, 2)))), 32 * (PARAMS + 1)
    np.testing.assert_allclose(costs.operations, 4 * 3 * FORWARD, rtol=1e-6)
    np.testing.assert_allclose(costs.simulated_seconds, 3 * FORWARD / 1e2 + 3 * bits / 1e3 + 3 * bits / 4e3, rtol=1e-6)
    np.testing.assert_allclose(costs.joules, 4 * joules_of_gradient() + 6 * bits / 1e3, rtol=1e-6)


def counts_of(**counts):
    return {name: np.zeros(1) for name in COUNTED} | {name: np.array([value]) for name, value in counts.items()}


def test_published_numbers_of_dzofl():
    """A batch of 10: 201.369 and 881.141 uJ for 10.56e6 operations; 14.48 mJ to send all parameters in 16 bits."""
    book = ledger(node_work(count(dzofl_cnn(), (28, 28, 1), counted=DZOFL_COUNTED)), batch_size=10)
    np.testing.assert_allclose(book.forward.operations, 10.56e6, rtol=1e-3)
    np.testing.assert_allclose(10 * book.forward.joules, 201.369e-6, rtol=1e-3)
    np.testing.assert_allclose(10 * book.gradient.joules, (201.369 + 881.141) * 1e-6, rtol=1e-3)
    np.testing.assert_allclose(book.of_round(counts_of(bits_sent=45_362 * 16)).joules, 14.48e-3, rtol=1e-3)
    scalar = book.of_round(counts_of(bits_sent=16))  # in a slot of 0.125 ms
    np.testing.assert_allclose(scalar, [0, 0.125e-3, 24.94e-6], rtol=1e-3)
    # 16 million operations take 4 ms, and 640 ms the upload of 4e5 parameters.
    np.testing.assert_allclose(book.forward.simulated_seconds * 16e6 / book.forward.operations, 4e-3, rtol=1e-9)
    uploaded = book.of_round(counts_of(bits_sent=64e5))
    np.testing.assert_allclose(uploaded.simulated_seconds, 0.64, rtol=1e-9)


def test_a_gradient_takes_three_times_the_operations_of_a_forward_evaluation():
    assert BOOK.forward.operations == FORWARD
    assert BOOK.gradient.operations == 3 * FORWARD
    forward = BOOK.of_round(counts_of(forward_evaluations=7))
    np.testing.assert_allclose(forward[:2], [7 * FORWARD, 7 * FORWARD / 1e2], rtol=1e-12)


def test_weak_clients_run_the_front_forward_and_the_output_side_both_ways():
    front, behind = 2 * 4 + 4 + 4, 4 * 3 + 3
    book = ledger([node_work(LAYERS), node_work(LAYERS, "dense_2")], batch_size=2)
    assert book.gradient.operations.tolist() == [3 * FORWARD, 3 * behind]
    assert book.forward.operations.tolist() == [FORWARD, front]
    assert book.gradient.simulated_seconds.tolist() == [3 * FORWARD / 4e9, 3 * behind / 4e9]
    # Four features enter the trained layer, three activations leave it; four lie in front of it.
    side, device = charged(2 * behind, 2 * 3, 4 * 3 + 3, 2 * 4), EnergyModel()
    both_ways = forward_energy(side, device) + backward_energy(side, device)
    np.testing.assert_allclose(2 * book.gradient.joules[1], both_ways, rtol=1e-12)
    in_front = forward_energy(charged(2 * front, 2 * 4, 2 * 4 + 4, 2 * 2), device)
    np.testing.assert_allclose(2 * book.forward.joules[1], in_front, rtol=1e-12)


def random_counts(rounds=5, nodes=4):
    rng = np.random.default_rng(3)
    bits = {name: rng.integers(0, 9999, (rounds, nodes)).astype(np.float32) for name in COUNTED[:2]}
    return bits | {name: rng.integers(0, 99, (rounds, nodes)).astype(np.int32) for name in COUNTED[2:]}


BOOKS = {"in slots": ledger([node_work(LAYERS)] * 4, batch_size=2), "without": BOOK}


@pytest.mark.parametrize("book", BOOKS.values(), ids=BOOKS)
def test_several_rounds_at_once_give_what_each_gives_alone(book):
    counts = random_counts()
    together = book.of_round(counts)
    for number in range(5):
        alone = book.of_round({name: values[number] for name, values in counts.items()})
        assert alone == tuple(values[number] for values in together)
        assert all(values.dtype == np.float64 for values in together)


@pytest.mark.parametrize("book", BOOKS.values(), ids=BOOKS)
def test_numpy_and_jax_arrays_give_the_same_to_rounding(book):
    """Under jit, with numbers that are traced; two rates give two times."""
    counts = random_counts()
    on_device = {name: jnp.asarray(values) for name, values in counts.items()}
    costs = jax.jit(lambda counts, rate: book._replace(uplink_bits_per_second=rate).of_round(counts))
    for rate in (1e3, 7e3):
        expected = book._replace(uplink_bits_per_second=rate).of_round(counts)
        got = costs(on_device, jnp.float32(rate))
        assert {leaf.dtype for leaf in got} == {jnp.dtype("float32")}
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_the_costs_of_each_node_and_of_their_round_by_hand():
    """By hand: 5 operations a second, 2 bits up and 4 down a second, 1 W while it sends, 3 J a gradient."""
    book = BOOK._replace(gradient=BOOK.gradient._replace(simulated_seconds=0.2, joules=3.0), downlink_watts=0.5)
    book = book._replace(uplink_bits_per_second=2.0, downlink_bits_per_second=4.0, transmit_watts=1.0)
    counts = {name: np.zeros(2) for name in COUNTED} | {"bits_sent": np.array([4.0, 0.0])}
    counts |= {"gradient_evaluations": np.array([1.0, 2.0]), "bits_received": np.array([0.0, 8.0])}
    own, receiving = book.of_nodes(counts)
    np.testing.assert_allclose(own.simulated_seconds, [0.2 + 2, 0.4])
    np.testing.assert_allclose(receiving, [0, 2])
    np.testing.assert_allclose(own.joules, [3 + 2, 6 + 0.5 * 2])
    whole = book.of_round(counts)
    assert (whole.simulated_seconds, whole.joules) == (2.2 + 2, own.joules.sum())


def test_an_infinite_downlink_takes_no_time():
    link: dict[str, Any] = {**LINK, "downlink_bits_per_second": math.inf}
    for slot in (0.0, 1.0):
        book = ledger(node_work(LAYERS), batch_size=2, **{**link, "slot_seconds": slot})
        assert book.of_round(counts_of(bits_received=1e9)).simulated_seconds == 0


def without_forwards():
    return {name: values for name, values in random_counts().items() if name != "forward_evaluations"}


BAD = [
    ("batch_size", 0),
    *((name, 0.0) for name in ("operations_per_second", "uplink_bits_per_second", "downlink_bits_per_second")),
    *((name, -0.1) for name in ("slot_seconds", "downlink_watts")),
    ("work", []),
]
test_refusals = refusals(
    [
        *(
            (lambda row=row: ledger(**{"work": node_work(LAYERS), "batch_size": 2, row[0]: row[1]}), row[0])
            for row in BAD
        ),
        (lambda: ledger(node_work(LAYERS), batch_size=2, energy=EnergyModel(mac_joules=0.0)), "mac_joules"),
        (lambda: BOOK.of_round(without_forwards()), "ledger"),
        (lambda: ledger([Work(*node_work(LAYERS))] * 3, batch_size=2).of_round(random_counts()), "ledger"),
        (lambda: node_work(LAYERS, "dense_3"), "trained_from"),
    ]
)


def test_the_energy_of_the_way_down_is_charged_where_its_power_is_given():
    """100 W for the airtime of what was received: 8 bits at 4,000 a second."""
    counts = {name: np.zeros(2) for name in COUNTED} | {"bits_received": np.array([8.0, 4.0])}
    for watts in (0.0, 100.0):
        book = ledger(node_work(LAYERS), batch_size=2, operations_per_second=1e2, **LINK, downlink_watts=watts)
        assert float(book.of_round(counts).joules) == pytest.approx(watts * (8 + 4) / 4e3)
