"""Records print as short texts, without contents and addresses."""

import jax
import optax
import pytest
from problems import problem, small_task, uneven_data
from registry import REGISTRY

import jaxfl
from jaxfl import algorithms
from jaxfl.channel import dithered_quantizer, top_k
from jaxfl.core.lines import Lines
from jaxfl.data import load
from jaxfl.training import open_run

KEY = jax.random.key(0)


@pytest.mark.parametrize("name", REGISTRY)
def test_learners_and_states_are_short(name):
    p = problem(name)
    learner = p.algorithm()
    for record in (learner, jax.eval_shape(learner.init, KEY, p.data)):
        assert " at 0x" not in repr(record)
        assert len(repr(record)) < 700


def test_data_tasks_and_parts_are_short():
    data = uneven_data()
    assert repr(data).startswith(f"FederatedData(inputs=float32({', '.join(map(str, data.inputs.shape))}), labels=")
    clients, model = jaxfl.local_steps(1, batch_size=2, optimizer=optax.sgd(0.1)), jaxfl.models.mlp((3, 2))
    records = data, small_task(), jaxfl.gaussian(0.1), jaxfl.saga(), load("digits"), clients, *model.layers
    compressor, robust, attack = top_k(0.1), algorithms.krum(1), algorithms.sign_flip([0, 3])
    records += (compressor, robust, attack, algorithms.ef21(compressor), jaxfl.gradients.poisson(2), jaxfl.uplink())
    records += (jaxfl.uplink(aggregate=robust, attack=attack), jaxfl.uplink(feedback=algorithms.ef21(compressor)))
    records += (jaxfl.links(success=0.9, quantizer=dithered_quantizer(4, 1.0)),)
    for record in records:
        assert len(repr(record)) < 700
        assert " at 0x" not in repr(record)


def test_runs_and_their_lines_are_short(tmp_path):
    run = open_run(tmp_path / "run", {})
    assert repr(run).startswith(f"RunDirectory('{tmp_path / 'run'}': ")
    assert repr(run).endswith(", no runs yet)")
    lines = Lines({"case": case, "seed": 0, "round": 0, "loss": 1.0} for case in "AB")
    assert repr(lines) == "Lines(2 lines of 2 cases: case, seed, round, loss)"
