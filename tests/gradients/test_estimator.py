"""Refusals of estimators, and of the algorithms with them."""

import jax
import pytest
from problems import problem, uneven_data
from registry import REGISTRY

from jaxfl import ArgumentError, gradients
from jaxfl.models import classification, layers, sequential

KEY = jax.random.key(0)
BATCH_NORM = classification(sequential([("norm", layers.batch_norm(6)), ("dense", layers.dense(6, 3))]))
DROPOUT = classification(sequential([("dropout", layers.dropout(0.5)), ("dense", layers.dense(6, 3))]))


@pytest.mark.parametrize("task", [BATCH_NORM, DROPOUT], ids=["batch statistics", "dropout"])
@pytest.mark.parametrize(
    "estimator", [gradients.mini_batch(2, clip_norm=1.0), gradients.saga()], ids=["mini_batch", "saga"]
)
def test_a_task_without_losses_of_single_samples_is_refused(estimator, task):
    with pytest.raises(ArgumentError, match=r"^task: .*batch statistics or dropout"):
        estimator.init(task, KEY, task.init(KEY), uneven_data())


@pytest.mark.parametrize("name", [name for name, row in REGISTRY.items() if row.noise_draws])
def test_every_algorithm_that_uses_them_refuses_it(name):
    p = problem(name)
    with pytest.raises(ArgumentError, match=r"^task: "):
        p.algorithm(task=BATCH_NORM).init(KEY, p.data)
