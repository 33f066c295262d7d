"""Types of parameters and model state that local steps keep."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxfl.algorithms.clients.slices import variable_shapes
from jaxfl.core import ArgumentError, FederatedData, Task
from jaxfl.core.tree import number_type
from jaxfl.privacy.mechanisms import NoiseMechanism
from jaxfl.privacy.mechanisms import check_types as check_noise_types


def check_types(task: Task, data: FederatedData, noise: NoiseMechanism) -> None:
    """Refuse, before the first round, a task with types that a step would change; nothing is computed.

    Args:
        task: what clients train.
        data: all clients'.
        noise: of each step.

    Examples:
        >>> import jaxfl, numpy as np
        >>> from jaxfl.models import classification, mlp
        >>> data = jaxfl.federate(np.eye(2, dtype="float32"), np.array([0, 1]), [[0, 1]])
        >>> check_types(classification(mlp((2, 3, 2))), data, jaxfl.gaussian(1.0))
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    variables = variable_shapes(task)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), variables.params)
    check_noise_types(noise, task, one)
    dtype, train_loss = number_type(variables.params), task.train_loss
    if train_loss is None or dtype == jnp.float32:
        return

    def step(params, model_state, inputs, labels, dropout_key):
        return train_loss(params, model_state, inputs, labels, jnp.ones(1, dtype), dropout_key)[1]

    after = jax.eval_shape(step, *variables, data.inputs[:1], data.labels[:1], key)
    pairs = zip(jax.tree.leaves_with_path(variables.model_state), jax.tree.leaves(after), strict=True)
    for path, old, new in ((path, old, new) for (path, old), new in pairs):
        if old.dtype != new.dtype:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            found = f"{name} is {old.dtype}, and {new.dtype} after a step, with params in {dtype}"
            remedy = f"Let `init_state` give {dtype}, or `init` float32."
            raise ArgumentError("task", "must have a model state whose type steps keep", found, remedy)
