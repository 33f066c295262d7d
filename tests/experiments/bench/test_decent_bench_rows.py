"""Methods over a graph beside decent-bench's own loops: the same trajectories. No step of the gate installs it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.bench import peers
from experiments.bench.setting import KEY, Setting, random_data
from jaxfl import algorithms, gradients, graphs

SMALL = Setting(peers.LOGISTIC, 6, batch_size=10, samples=10, step_size=0.02, method="gossip")
ROUNDS = 60
METHODS = {  # ours, with full batches on a ring -> the class of decent-bench
    "DGD": algorithms.d_psgd,
    "ATC": lambda task, **common: algorithms.d_sgdm(task, momentum=0.0, **common),
    "ED": algorithms.exact_diffusion,
    "EXTRA": algorithms.extra,
    "NIDS": algorithms.nids,
    "ATC_Tracking": algorithms.atc_tracking,
    "AugDGM": lambda task, **common: algorithms.atc_tracking(task, variant="aug_dgm", **common),
    "GT_SAGA": lambda task, **common: algorithms.gt_saga(task, **common),
}
UNEVEN = (1, 4, 2, 3, 4, 1)  # steps of FedNova's clients; others make the most
ADAPTIVE = {"server_step_size": 0.01, "beta_1": 0.9, "epsilon": 1e-3}
OURS: dict[str, Any] = {"server_step_size": 0.01, "beta_1": 0.9, "tau": 1e-3, "first_square": 0.0}
SERVER_METHODS = {  # the class of decent-bench -> its numbers, and ours
    "FedAvg": ({}, algorithms.fed_avg),
    "FedProx": ({"penalty": 0.3}, partial(algorithms.fed_prox, proximal=0.3)),
    "Scaffold": ({"server_step_size": 0.7}, partial(algorithms.scaffold, server_step_size=0.7)),
    "FedDyn": ({"penalty": 0.1}, partial(algorithms.fed_dyn, proximal=0.1)),
    "FedNova": ({}, partial(algorithms.fed_nova, num_steps=jnp.array(UNEVEN))),
    "FedAdam": (ADAPTIVE, partial(algorithms.fed_adam, **OURS)),
    "FedYogi": (ADAPTIVE, partial(algorithms.fed_yogi, **OURS)),
    "FedAdagrad": (ADAPTIVE, partial(algorithms.fed_adagrad, **OURS)),
}


@pytest.mark.parametrize("name", METHODS)
def test_trajectories_agree(name):
    p2p = pytest.importorskip("decent_bench.algorithms.p2p", reason="needs decent-bench, and so Python 3.13")
    from experiments.bench import decent_bench_rows

    data = random_data(SMALL, np.float32)
    agents = decent_bench_rows.agents_of(data)
    getattr(p2p, name)(step_size=SMALL.step_size).run(decent_bench_rows.ring(agents), ROUNDS)
    expected = np.stack([decent_bench_rows.state(one) for one in agents])
    gradient = gradients.mini_batch(sampler=gradients.fixed(SMALL.samples))
    common = {"graph": graphs.ring(SMALL.num_nodes), "gradient": gradient, "step_size": SMALL.step_size}
    learner = METHODS[name](peers.logistic(), **common)
    assert_near(learner, data, expected, name)


@pytest.mark.parametrize("name", SERVER_METHODS)
def test_trajectories_with_a_server_agree(name):
    """Uniform weights, all clients; the squares of the adaptive servers begin with 0, as decent-bench's do."""
    federated = pytest.importorskip(
        "decent_bench.algorithms.federated", reason="needs decent-bench, and so Python 3.13"
    )
    from decent_bench.networks import FedNetwork  # pyright: ignore[reportMissingImports]

    from experiments.bench import decent_bench_rows

    data, (theirs, build) = random_data(SMALL, np.float32), SERVER_METHODS[name]
    network = FedNetwork(decent_bench_rows.agents_of(data))
    steps = dict(zip(network.clients(), UNEVEN, strict=True)) if name == "FedNova" else max(UNEVEN)
    getattr(federated, name)(step_size=SMALL.step_size, num_local_steps=steps, **theirs).run(network, ROUNDS)
    expected = decent_bench_rows.state(network.server())[None]
    optimizer, count = optax.sgd(SMALL.step_size), SMALL.samples
    clients = algorithms.local_steps(max(UNEVEN), batch_size=count, optimizer=optimizer, weighting="uniform")
    learner = build(peers.logistic(), clients=clients, num_active=SMALL.num_nodes)
    assert_near(learner, data, expected, name)


def assert_near(learner, data, expected, name):
    """Models of the nodes, or of the server, after the rounds."""
    state, _ = jax.lax.scan(lambda s, _: learner.round(KEY, s, data), learner.init(KEY, data), length=ROUNDS)
    actual = np.asarray(learner.node_params(state))
    assert np.linalg.norm(expected) > 0.1
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    print(name, error)
    assert error < 1e-5


def test_it_is_timed_beside_ours_where_it_has_the_workload():
    pytest.importorskip("decent_bench", reason="needs decent-bench, and so Python 3.13")
    short = SMALL._replace(rounds=4, slow_rounds=2, repeats=3)
    report = peers.suite({"w6": short, "w4": short._replace(method="push_sum")}, "decent_bench")
    assert report["peers/w6_vs_decent_bench"].value == pytest.approx(
        report["peers/w6_jaxfl"].value / report["peers/w6_decent_bench_loop"].value
    )
    assert "peers/w4_decent_bench_loop" not in report
