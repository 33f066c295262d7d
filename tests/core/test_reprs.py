"""Records print as short texts, without contents and addresses."""

import jax
import pytest
from problems import problem, small_task, uneven_data
from registry import REGISTRY

import jaxfl
from jaxfl.data import load

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
    for record in (data, small_task(), jaxfl.gaussian(0.1), jaxfl.saga(), load("digits")):
        assert len(repr(record)) < 700
        assert " at 0x" not in repr(record)
