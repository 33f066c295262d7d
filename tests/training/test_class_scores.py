"""Balanced accuracy and AUC of every node's model against scikit-learn."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refused
from sklearn.metrics import accuracy_score, balanced_accuracy_score, roc_auc_score

from jaxfl.core import from_functions
from jaxfl.training import class_scores, evaluation_set
from jaxfl.training.measures import flatten_scores, node_scores

NODES = 3


def logits(params, inputs):
    return jnp.round(inputs @ params, 1)  # so that many scores are equal


def task(classes):
    def metrics(params, inputs, labels):
        return {"accuracy": (logits(params, inputs).argmax(axis=1) == labels).astype(float)}

    plain = from_functions(lambda key: jnp.zeros((4, classes)), lambda params, inputs, labels: inputs[:, 0], metrics)
    return plain._replace(logits=logits)


def scored(classes, labels, batch_size=7):
    """Scores on 40 samples in batches of 7, so that two copies fill the last; and logits (n + 1, N, c)."""
    rng = np.random.default_rng(classes)
    inputs, params = rng.normal(size=(len(labels), 4)), rng.normal(size=(NODES, 4, classes))
    inputs, params = inputs.astype(np.float32), params.astype(np.float32)
    measure = class_scores(task(classes), evaluation_set(inputs, labels, batch_size))
    scores: Any = jax.jit(measure.compute)(params, evaluation_set(inputs, labels, batch_size))
    outputs = [np.asarray(logits(one, inputs)) for one in (*params, params.mean(axis=0))]
    return scores, outputs


def unequal(classes):
    return np.minimum(np.arange(40) % 9 % 5, classes - 1).astype(np.int32)


@pytest.mark.parametrize("classes", [2, 3])
def test_equal_scikit_learns(classes):
    labels = unequal(classes)
    scores, outputs = scored(classes, labels)
    expected = {
        "test_accuracy": [accuracy_score(labels, one.argmax(axis=1)) for one in outputs],
        "test_balanced_accuracy": [balanced_accuracy_score(labels, one.argmax(axis=1)) for one in outputs],
    }
    if classes == 2:
        assert len({*(outputs[0][:, 1] - outputs[0][:, 0]).tolist()}) < 40  # ties
        expected["test_auc"] = [roc_auc_score(labels, one[:, 1] - one[:, 0]) for one in outputs]
    line, nodes = flatten_scores(scores), node_scores(scores, "test")
    assert {*nodes} == {*expected}
    assert {*scores.nodes} == {name.removeprefix("test_") for name in expected} | {"loss"}
    for name, values in expected.items():
        np.testing.assert_allclose(nodes[name], values[:NODES], rtol=1e-6)
        np.testing.assert_allclose(line[name], np.mean(values[:NODES]), rtol=1e-6)
        np.testing.assert_allclose(line[f"{name}_worst_node"], min(values[:NODES]), rtol=1e-6)
        np.testing.assert_allclose(line[f"{name}_average_model"], values[NODES], rtol=1e-6)


def test_a_class_that_the_test_set_lacks_does_not_count():
    labels = 1 + unequal(2)
    scores, outputs = scored(3, labels)
    expected = [
        np.mean([(one.argmax(axis=1) == label)[labels == label].mean() for label in (1, 2)]) for one in outputs[:NODES]
    ]
    np.testing.assert_allclose(node_scores(scores, "test")["test_balanced_accuracy"], expected, rtol=1e-6)
    assert "auc" not in scored(2, np.ones(40, np.int32))[0].nodes


def test_batches_change_nothing_beyond_rounding():
    few, many = (flatten_scores(scored(2, unequal(2), size)[0]) for size in (7, 40))
    assert few == pytest.approx(many, rel=1e-6)


def test_a_score_that_is_not_finite_gives_none():
    labels = unequal(2)
    test = evaluation_set(np.ones((40, 4), np.float32), labels)
    measure = class_scores(task(2), test)
    scores: Any = measure.compute(jnp.full((NODES, 4, 2), jnp.nan), test)
    assert np.isnan(scores.nodes["auc"]).all()


def test_a_task_without_logits_is_refused():
    plain = from_functions(lambda key: jnp.zeros(4), lambda w, x, y: (x @ w - y) ** 2)
    refused(lambda: class_scores(plain, evaluation_set(np.ones((2, 4)), np.zeros(2))), "task", "logits")
