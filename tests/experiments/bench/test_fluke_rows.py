"""fluke's own loop does the rounds that ours does. No step of the gate installs fluke."""

import jax
import numpy as np
import pytest

from experiments.bench import peers
from experiments.bench.setting import KEY, Setting, perceptron, random_data
from jaxfl.core import Purpose, purpose_key

SMALL = Setting(perceptron(12, 4, 3), 4, batch_size=7, samples=7, step_size=0.1, method="fed_avg")


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


def test_fluke_is_timed_beside_ours_where_it_has_the_workload():
    pytest.importorskip("fluke", reason="needs fluke-fl, whose torchvision must fit the build of torch")
    report = peers.suite({"w1": SMALL._replace(repeats=3), "w4": SMALL._replace(method="push_sum", repeats=3)}, "fluke")
    assert "peers/w4_jaxfl" in report
    assert "peers/w4_fluke_loop" not in report
    assert report["peers/w1_vs_fluke"].value == pytest.approx(
        report["peers/w1_jaxfl"].value / report["peers/w1_fluke_loop"].value
    )
