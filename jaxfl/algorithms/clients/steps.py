"""Steps of clients: their random numbers, their inputs, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core import Array, FederatedData, Info, PyTree, Task
from jaxfl.core.devices import varying_like
from jaxfl.core.tasks import of_samples
from jaxfl.core.tree import add_exactly, number_type, scale
from jaxfl.gradients.microbatches import BLOCK
from jaxfl.privacy.mechanisms import NoiseMechanism, add, gaussian


class NoiseKeys(NamedTuple):
    """Noise that is drawn when a step needs it. The noise of all steps would not fit in memory."""

    keys: Array  # typed, (k, tau), one for each step of each active client
    scales: Array | None = None  # (k, tau), float32, in place of the mechanism's, where clients have their own
    pair_keys: Array | None = None  # typed, (k, tau, p), equal at both clients of a pair, where pairs share noise
    pair_stds: Array | None = None  # (k, tau, p), float32, of opposite sign at both clients; 0 for no pair

    def draw(self, mechanism: NoiseMechanism, like: PyTree) -> PyTree:
        """The noise of one step of one client, of the shapes of `like`; here the fields are that step's, ()."""
        if self.scales is not None:
            assert mechanism.rescaled is not None
            mechanism = mechanism.rescaled(self.scales)
        nodes = jax.tree.map(lambda leaf: leaf[None], like)
        drawn = mechanism.draw(self.keys, nodes)
        if self.pair_keys is not None:

            def plus(total, pair):
                key, std = pair
                return add(total, scale(std, gaussian(1.0).draw(key, nodes))), None

            drawn = jax.lax.scan(plus, drawn, (self.pair_keys, self.pair_stds))[0]
        return jax.tree.map(lambda leaf: leaf[0], drawn)


class NoiseValues(NamedTuple):
    """Noise from another source, in place of `NoiseKeys`."""

    values: PyTree  # leaves (k, tau, *leaf)

    def draw(self, mechanism: NoiseMechanism, like: PyTree) -> PyTree:
        """As `NoiseKeys.draw`."""
        return self.values


class StepDraws(NamedTuple):
    """The random numbers of a round's local steps; k clients are active, c is the sampler's capacity."""

    batch_indices: Array  # (k, tau, c), int32, positions among the client's samples; an empty slot: its size or more
    batch_overflow: Array  # (k,), int32, samples drawn that the capacity could not hold; above 0 is an error
    dropout_keys: Array | None  # (k, tau), typed keys, one for each step; None where the task takes none
    noise: NoiseKeys | NoiseValues | None  # of each step; None without noise


class Step(NamedTuple):
    """Inputs of one step of one client."""

    samples: Array  # (c,), int32, places in the pool
    mask: Array  # (c,), bool, False for an empty slot
    dropout_key: Array | None  # (), typed
    noise: NoiseKeys | NoiseValues | None


class StepGradient(NamedTuple):
    """Results of a step's batch at the parameters."""

    gradient: PyTree  # like the parameters
    model_state: PyTree  # after the step
    info: Info  # of the step, each number (); the loss is taken before the step


# Slots whose gradients are summed at once where empty ones are left out.
_SLOTS_AT_ONCE = 32

StepLoss = Callable[[PyTree, PyTree, Any], tuple[Array, PyTree]]
"""(params, model state, input of one step) -> (mean loss (), new model state)."""

GradientOf = Callable[[PyTree, PyTree, Any], StepGradient]
"""(params, model state, input of one step) -> its `StepGradient`."""


def samples_of(data: FederatedData, active: Array, batch_indices: Array) -> tuple[Array, Array]:
    """Look up the positions in the pool of each step's samples.

    Args:
        data: all clients'.
        active: (k,), int32.
        batch_indices: (k, tau, b), int32, as `LocalSteps.draw` gives them.

    Returns:
        (samples (k, tau, b), int32, in [0, N); mask (k, tau, b), bool, False for an empty slot).
    """
    sizes = data.sizes[active][:, None, None]
    return data.indices[active[:, None, None], jnp.minimum(batch_indices, sizes - 1)], batch_indices < sizes


def num_different(steps: Step) -> Array:
    """Count the distinct samples in each client's steps, (k,), int32.

    Args:
        steps: with leaves (k, tau, b).

    Examples:
        >>> samples, mask = jnp.array([[[4, 7], [7, 9]]]), jnp.array([[[True, True], [True, False]]])
        >>> num_different(Step(samples, mask, None, None)).tolist()  # 4 and 7
        [2]
    """
    in_order = jnp.sort(jnp.where(steps.mask, steps.samples, -1).reshape(len(steps.mask), -1), axis=1)
    is_new = jnp.diff(in_order, axis=1, prepend=-1) > 0  # -1: an empty slot
    return is_new.sum(axis=1, dtype=jnp.int32)


def by_backward(step_loss: StepLoss) -> GradientOf:
    """The gradient of a step's mean loss, by one backward pass."""

    def gradient_of(params, model_state, one_step):
        (loss, model_state), gradient = jax.value_and_grad(step_loss, has_aux=True)(params, model_state, one_step)
        return StepGradient(gradient, model_state, Info(loss))

    return gradient_of


def batch_loss(task: Task, data: FederatedData, mean: Callable[[Array, Array], Array]) -> StepLoss:
    """The mean loss of the whole model on a batch.

    Args:
        task: the learning task.
        data: all clients'; its pool holds the samples.
        mean: (losses (c,), mask (c,)) -> mean loss, as `LocalSteps.mean`.

    Returns:
        A `StepLoss` of `Step`.
    """

    def step_loss(params, model_state, step):
        inputs, labels = data.inputs[step.samples], data.labels[step.samples]
        if task.train_loss is None:
            losses = task.loss(params, inputs, labels)
        else:
            weights = step.mask.astype(number_type(params))
            losses, model_state = task.train_loss(params, model_state, inputs, labels, weights, step.dropout_key)
        return mean(of_samples("task.loss", losses, inputs), step.mask), model_state

    return step_loss


def over_used_groups(sums: Callable[[Step], tuple[PyTree, PyTree]], step: Step) -> tuple[PyTree, PyTree]:
    """Sums over the slots of a step, group by group, as far as there are samples.

    Args:
        sums: a `Step` -> (gradient, measured), sums over its slots, to which an empty one adds 0.
        step: of one client.

    Guarantees:
        - with rounding, too, a sample moves the gradient by hardly more than its norm, however many groups there are.
    """
    at_once = min(_SLOTS_AT_ONCE, len(step.mask))
    padding = (0, -len(step.mask) % at_once)
    samples, mask = jnp.pad(step.samples, padding), jnp.pad(step.mask, padding)
    last = jnp.max(jnp.where(mask, jnp.arange(1, len(mask) + 1, dtype=jnp.int32), 0))

    def group(number):
        part = (jax.lax.dynamic_slice_in_dim(values, number * at_once, at_once) for values in (samples, mask))
        return sums(Step(*part, dropout_key=step.dropout_key, noise=step.noise))

    def add(number, carry):
        return jax.tree.map(jnp.add, carry, group(number))

    def add_block(number, carry):
        (total, info), rounding = carry
        part, new = jax.lax.fori_loop(number * groups, jnp.minimum((number + 1) * groups, num_groups), add, start)
        total, rounding = add_exactly(total, rounding, part)
        return (total, jax.tree.map(jnp.add, info, new)), rounding

    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(group, jnp.int32(0)))
    num_groups, start, groups = (last + at_once - 1) // at_once, varying_like(nothing, step), BLOCK // at_once
    return jax.lax.fori_loop(0, (num_groups + groups - 1) // groups, add_block, (start, start[0]))[0]


def masked_mean(losses: Array, mask: Array) -> Array:
    """Mean of losses (c,) over the slots that hold a sample; 0 where none does."""
    weights = mask.astype(number_type(losses))
    return jnp.sum(weights / jnp.maximum(weights.sum(), 1.0) * losses)
