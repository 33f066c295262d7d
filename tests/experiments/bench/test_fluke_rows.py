"""fluke's own loop does the rounds that ours does. No step of the gate installs fluke."""

import importlib
from functools import partial

import jax
import numpy as np
import optax
import pytest

from experiments.bench import peers
from experiments.bench.setting import KEY, Setting, perceptron, random_data
from jaxfl import algorithms
from jaxfl.core import Purpose, purpose_key

SMALL = Setting(perceptron(12, 4, 3), 4, batch_size=7, samples=7, step_size=0.1, method="fed_avg")
ROUNDS = 30


def steps(count):
    """Steps of a client with full batches."""
    optimizer = optax.sgd(SMALL.step_size)
    return algorithms.local_steps(count, batch_size=SMALL.samples, optimizer=optimizer, weighting="uniform")


METHODS = {  # fluke's module and class -> options of its clients, and ours
    "fedavg.FedAVG": ({}, algorithms.fed_avg),
    "fedprox.FedProx": ({"mu": 0.3}, partial(algorithms.fed_prox, proximal=0.3)),
    "scaffold.SCAFFOLD": ({}, algorithms.scaffold),
    "ditto.Ditto": ({"tau": 2, "lam": 0.5}, partial(algorithms.ditto, own=steps(2), proximal=0.5)),
}


def test_fluke_does_the_same_rounds():
    """Two rounds from the same parameters; a batch holds all of a client's samples."""
    pytest.importorskip("fluke", reason="needs fluke-fl, whose torchvision must fit the build of torch")
    from experiments.bench import fluke_rows, torch_rows

    algorithm, data = peers.method(SMALL), random_data(SMALL, np.float32)
    params = jax.jit(SMALL.network.model.init)(purpose_key(KEY, Purpose.INIT))
    theirs = fluke_rows.federation(SMALL, params, data)
    theirs.run(2, 1.0)
    state = jax.jit(algorithm.init)(KEY, data)
    for _ in range(2):
        state, _ = jax.jit(algorithm.round)(KEY, state, data)
    result, start = dict(theirs.server.model.named_parameters()), torch_rows.as_torch(params)
    wanted = torch_rows.as_torch(state.params)
    assert set(result) == set(wanted)
    for name, values in wanted.items():
        np.testing.assert_allclose(result[name].detach(), values, rtol=1e-5, atol=1e-6)
        assert (values - start[name]).abs().max() > 1e-3


@pytest.mark.parametrize("name", METHODS)
def test_trajectories_agree(name):
    """Three of four clients a round, the same ones, with three steps each."""
    pytest.importorskip("fluke", reason="needs fluke-fl, whose torchvision must fit the build of torch")
    from experiments.bench import fluke_rows, torch_rows

    data, (options, build) = random_data(SMALL, np.float32), METHODS[name]
    learner = build(SMALL.task(), clients=steps(3), num_active=3)
    start = learner.init(KEY, data)

    def one_round(state, _):
        drawn = learner.draw(KEY, state, data)
        return learner.update(state, data, drawn)[0], drawn.active

    state, active = jax.lax.scan(one_round, start, length=ROUNDS)
    module, _, kind = name.partition(".")
    method = getattr(importlib.import_module(f"fluke.algorithms.{module}"), kind)
    theirs, rounds = fluke_rows.federation(SMALL, start.params, data, method, local_epochs=3, **options), iter(active)
    theirs.server.get_eligible_clients = lambda share: [theirs.clients[number] for number in next(rounds).tolist()]
    theirs.run(ROUNDS, 1.0)
    models = [(theirs.server.model, state.params, start.params)]
    if kind == "Ditto":
        for number, client in enumerate(theirs.clients):
            own = jax.tree.map(lambda leaf, number=number: leaf[number], state.memory.params)
            models.append((client.personalized_model, own, start.params))
    for model, ours, first in models:
        values = dict(model.named_parameters())
        actual, wanted, before = (
            np.concatenate([np.ravel(tree[leaf].detach()) for leaf in sorted(values)])
            for tree in (values, torch_rows.as_torch(ours), torch_rows.as_torch(first))
        )
        assert np.linalg.norm(wanted - before) > 0.1
        error = np.linalg.norm(actual - wanted) / np.linalg.norm(wanted)
        print(name, error)
        assert error < 1e-5


def test_fluke_is_timed_beside_ours_where_it_has_the_workload():
    pytest.importorskip("fluke", reason="needs fluke-fl, whose torchvision must fit the build of torch")
    report = peers.suite({"w1": SMALL._replace(repeats=3), "w4": SMALL._replace(method="push_sum", repeats=3)}, "fluke")
    assert "peers/w4_jaxfl" in report
    assert "peers/w4_fluke_loop" not in report
    assert report["peers/w1_vs_fluke"].value == pytest.approx(
        report["peers/w1_jaxfl"].value / report["peers/w1_fluke_loop"].value
    )
