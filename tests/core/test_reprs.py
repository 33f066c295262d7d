"""Records print as short texts, without contents and addresses."""

import jax
import optax
import pytest
from problems import problem, small_task, uneven_data
from registry import REGISTRY

import jaxfl
from jaxfl import algorithms, training
from jaxfl.channel import dithered_quantizer, top_k
from jaxfl.core.lines import Lines
from jaxfl.data import load

KEY = jax.random.key(0)


@pytest.mark.parametrize("name", REGISTRY)
def test_learners_and_states_are_short(name):
    p = problem(name)
    learner = p.algorithm()
    for record in (learner, jax.eval_shape(learner.init, KEY, p.data)):
        assert " at 0x" not in repr(record)
        assert len(repr(record)) < 700
    assert repr(learner).startswith(f"Algorithm({name}, ")
    assert len(repr(learner)) < 120


def test_rounds_statements_and_cases_are_short():
    p = problem("push_sum")
    learner, task = p.algorithm(), small_task()
    info = learner.round(KEY, learner.init(KEY, p.data), p.data)[1]
    assert len(repr(info)) < 400
    assert f"loss={info.loss.mean():.5g}, " in repr(info)
    assert "batch_overflow" not in repr(info)
    assert "batch_overflow=5, " in repr(info.plus(batch_overflow=jax.numpy.array([2, 3, 0, 0, 0])))
    texts = [repr(jax.eval_shape(lambda: info))]
    jax.jit(lambda info: texts.append(repr(info)))(info)
    assert all(text.startswith("Info(loss=float32(5), ") for text in texts)
    measures = {"test": training.test_scores(task, test := training.evaluation_set(p.data.inputs, p.data.labels))}
    case = training.Case(lambda numbers: learner, task, test, lambda seed: p.data, (0, 1), 9, 3, measures=measures)
    statements = jaxfl.privacy.statements(learner, p.data, 5, dp_delta=1e-5)
    for record in (task, jaxfl.models.mlp((3, 2)), case, *statements):
        assert len(repr(record)) < 500
        assert " at 0x" not in repr(record)


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
    run = training.open_run(tmp_path / "run", {})
    assert repr(run).startswith(f"RunDirectory('{tmp_path / 'run'}': ")
    assert repr(run).endswith(", no runs yet)")
    lines = Lines({"case": case, "seed": 0, "round": 0, "loss": 1.0} for case in "AB")
    assert repr(lines) == "Lines(2 lines of 2 cases: case, seed, round, loss)"
