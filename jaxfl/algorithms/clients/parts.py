"""Steps of a client on a part of the model, which reads features that are computed once a round."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxfl.algorithms.clients.steps import by_backward
from jaxfl.core.devices import varying_like
from jaxfl.core.platform import is_cpu
from jaxfl.core.tree import number_type

# Samples whose features are computed at once on a CPU: few take less memory, and stay in a core's cache.
_SAMPLES_AT_ONCE = 16


def train_part(part, blocks, frozen_batch_norm, own_blocks, steps, *, state, data, clients):
    """One client's steps on the blocks of its class.

    Args:
        part: how to train them.
        blocks: all of the task.
        frozen_batch_norm: as for `embracing`.
        own_blocks: (L,), bool; not used here, because `part` knows its blocks.
        steps: `Step` with leaves (tau, ...).
        state: the server's.
        data: all clients'.
        clients: how to step.

    Returns:
        (the client's blocks after the steps, model state of these and of layers outside all blocks, `Info`).
    """

    def features_of_batch(one_step):
        weights, inputs = one_step.mask.astype(number_type(state.params)), data.inputs[one_step.samples]
        return part.features_train(state.params, state.model_state, inputs, weights, one_step.dropout_key)

    def features_of(samples):
        return part.features(state.params, state.model_state, data.inputs[samples])

    # Stored inputs of each step, and the function that turns them into the input of the client's first block.
    if part.features is None:
        # Inputs are gathered in each step: they would be larger if they were stored, ready for the first block.
        shares, entering_of = steps.samples, lambda samples: data.inputs[samples]
    elif frozen_batch_norm == "batch":
        shares, entering_of = jax.lax.map(features_of_batch, steps), lambda features: features
    else:
        shares, entering_of = _features_once(features_of, steps.samples, data.indices.shape[1])

    def step_loss(params, model_state, one_step):
        own_step, share = one_step
        weights, labels = own_step.mask.astype(number_type(state.params)), data.labels[own_step.samples]
        losses, model_state = part.train_loss(
            params, frozen, model_state, entering_of(share), labels, weights, own_step.dropout_key
        )
        return clients.mean(losses, own_step.mask), model_state

    start = {name: state.params[name] for name in part.trained}
    frozen = {name: values for name, values in state.params.items() if name not in part.trained}
    gradient_of = by_backward(step_loss)
    params, model_state, info = clients.run(gradient_of, start, state.model_state, (steps, shares), state.round_index)
    new_state = {} if model_state is None else model_state
    return (
        params,
        {name: new_state[name] for name in new_state if name in part.trained or name not in blocks},
        info,
    )


def _features_once(features_of, samples, max_distinct):
    """Compute the features of each distinct sample (tau, b) once, in evaluation mode.

    Returns (what is stored for each step, the function that turns it into features (b, ...)). On an accelerator a group
    of samples is computed even if it is empty: the host would wait to learn whether it is. If the client may hold more
    samples than its steps have slots, an accelerator computes the features of every slot.
    """
    if not is_cpu() and samples.size <= max_distinct:
        return jax.lax.map(features_of, samples), lambda features: features
    rows = min(samples.size, max_distinct)
    at_once = min(_SAMPLES_AT_ONCE if is_cpu() else samples.shape[1], rows)
    num_groups = -(-rows // at_once)
    distinct, places = jnp.unique(samples, return_inverse=True, size=num_groups * at_once)
    last_group = places.max() // at_once  # groups after this one hold no sample
    one_group = jax.eval_shape(features_of, distinct[:at_once])

    def none(members):
        return varying_like(jnp.zeros(one_group.shape, one_group.dtype), members)

    def group(item):
        number, members = item
        return jax.lax.cond(number <= last_group, features_of, none, members)

    members = distinct.reshape(num_groups, at_once)
    groups = jax.lax.map(group, (jnp.arange(num_groups), members)) if is_cpu() else jax.lax.map(features_of, members)
    features = groups.reshape(-1, *one_group.shape[1:])
    return places, lambda places: features[places]
