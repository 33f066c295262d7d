"""LSTMs that read a sequence in both directions.

Gradients come in factored form: they are sums over time of outer products. The factors at a step are the inputs of the
gates (input, previous hidden state, 1) and the errors at their pre-activations. `Layer.tapped` returns them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxfl.core import check, one_kernel
from jaxfl.core.check import ArgumentError
from jaxfl.core.keys import leaf_keys
from jaxfl.core.tracing import mark_activation
from jaxfl.core.types import Array, FactoredLayer
from jaxfl.models.kernels import position_sums
from jaxfl.models.layers import Layer
from jaxfl.models.normalization import at_least_float32

# Initial values of Keras: Glorot uniform for inputs, orthogonal for states.
_initial_kernel = jax.nn.initializers.glorot_uniform()
_initial_recurrent_kernel = jax.nn.initializers.orthogonal()


def bidirectional_lstm(
    in_features: int,
    units: int,
    *,
    whole_sequence: bool = False,
    unit_forget_bias: bool = True,
    frozen_steps: int = 0,
) -> Layer:
    """Two LSTMs over a sequence (b, t, in_features), one from its start and one from its end, each from zero states.

    With z = x_t @ kernel + h @ recurrent_kernel + bias, cut into four parts of `units` in the order of Keras and flax,
    input gate i, forget gate f, candidate g, output gate o,

        c <- sigmoid(f) * c + sigmoid(i) * tanh(g),    h <- sigmoid(o) * tanh(c).

    Parameters, index 0 for the direction from the start and 1 for that from the end: {"kernel": (2, in_features,
    4 * units), "recurrent_kernel": (2, units, 4 * units), "bias": (2, 4 * units)}. They start as in Keras: kernels
    Glorot uniform, recurrent kernels orthogonal, biases zero. Inputs are multiplied before the loop over time, for all
    steps at once, and so is the gradient to the recurrent kernel after it. Forward mode (`jax.jvp`) does not work.

    Its factors (`jaxfl.core.FactoredLayer`) are, at each position of the sequence, the input and both hidden states
    before it, (b, t, in_features + 2 * units), and the errors at z, (b, t, 2, 4 * units).

    Args:
        in_features: numbers in a step of the input.
        units: size of each direction's hidden state.
        whole_sequence: False returns the last hidden state of each direction, (b, 2 * units), from the start first;
            True those of every position, (b, t, 2 * units).
        unit_forget_bias: whether the forget gates' biases start at 1, so that states are kept at first.
        frozen_steps: number of steps that each direction reads first without gradient, neither for the inputs nor for
            the parameters: truncated back-propagation. The outputs stay the same. There is then no factored form.

    Raises:
        ArgumentError: a number out of range; from `apply`, sequences of another width or too short.

    Guarantees:
        - equals flax's LSTM cells run in both directions, in value and in every gradient.
        - frozen steps change no value, and their inputs have no gradient.
        - its factored form agrees with per-sample gradients.
        - no norm is below the gradient's where its terms cancel.

    Examples:
        >>> layer = bidirectional_lstm(3, 4)
        >>> params = layer.init(jax.random.key(0))
        >>> layer.apply(params, jnp.ones((2, 7, 3))).shape
        (2, 8)
        >>> bidirectional_lstm(3, 4, whole_sequence=True).apply(params, jnp.ones((2, 7, 3))).shape
        (2, 7, 8)

    References:
        Hochreiter, Schmidhuber: "Long Short-Term Memory", Neural Computation 9(8), 1997. Forget gates: Gers,
        Schmidhuber, Cummins 2000. Both directions: Schuster, Paliwal 1997.
    """
    check.at_least(1, in_features=in_features, units=units)
    check.at_least(0, frozen_steps=frozen_steps)

    def init(key):
        keys = leaf_keys(key, 4)
        bias = jnp.zeros((2, 4, units), jnp.float32).at[:, 1].set(1.0 if unit_forget_bias else 0.0)
        input_shape, recurrent_shape = (in_features, 4 * units), (units, 4 * units)
        return {
            "kernel": jnp.stack([_initial_kernel(one_kernel(k), input_shape, jnp.float32) for k in keys[:2]]),
            "recurrent_kernel": jnp.stack(
                [_initial_recurrent_kernel(one_kernel(k), recurrent_shape, jnp.float32) for k in keys[2:]]
            ),
            "bias": bias.reshape(2, 4 * units),
        }

    def project(params, inputs, first=0, last=None):
        """Compute the part of z from each direction's inputs at steps [first, last), (t, 2, b, 4 * units)."""
        if inputs.ndim != 3 or inputs.shape[2] != in_features:
            requirement = f"must be sequences (b, t, {in_features})"
            raise ArgumentError("inputs", requirement, f"got shape {inputs.shape}", "Build the model for this shape.")
        length = inputs.shape[1]
        last = length if last is None else last

        def product(direction, start, end):
            part = inputs[:, start:end]
            rows = jnp.swapaxes(part, 0, 1).reshape(-1, in_features)
            return (rows @ params["kernel"][direction]).reshape(end - start, inputs.shape[0], -1)

        from_start, from_end = product(0, first, last), product(1, length - last, length - first)
        both = jnp.stack([from_start, from_end[::-1]], axis=1)
        # In float32, as in `dense`: the gradient to the bias is a sum over the batch and all steps.
        bias = at_least_float32(params["bias"])[None, :, None, :]
        return mark_activation((at_least_float32(both) + bias).astype(both.dtype))

    def outputs_of(hidden):
        if whole_sequence:
            return _at_positions(hidden).reshape(hidden.shape[2], hidden.shape[0], 2 * units)
        return jnp.concatenate([hidden[-1, 0], hidden[-1, 1]], axis=1)

    def apply(params, inputs):
        if not frozen_steps:
            projections = project(params, inputs)
            return outputs_of(_run(projections, params["recurrent_kernel"], _zeros(projections, units)))
        if frozen_steps >= inputs.shape[1]:
            requirement = f"must be longer than the {frozen_steps} frozen steps"
            raise ArgumentError("inputs", requirement, f"got {inputs.shape[1]}", "Freeze fewer steps.")
        constants, constant_inputs = jax.lax.stop_gradient((params, inputs))
        projections = project(constants, constant_inputs, 0, frozen_steps)
        before, cells, _ = _states(projections, constants["recurrent_kernel"], _zeros(projections, units))
        projections = project(params, inputs, frozen_steps)
        hidden = _run(projections, params["recurrent_kernel"], (before[-1], cells[-1]))
        return outputs_of(jnp.concatenate([before, hidden]) if whole_sequence else hidden)

    def tapped(params, inputs, tap):
        projections = project(params, inputs)
        if tap is not None:
            projections = projections + _in_reading_order(tap)
        start = _zeros(projections, units)
        hidden = _run(projections, params["recurrent_kernel"], start)
        entering = _at_positions(_previous(hidden, start[0])).reshape(*inputs.shape[:2], 2 * units)
        factor_input = jnp.concatenate([inputs, entering], axis=2)
        return outputs_of(hidden), factor_input, _at_positions(projections)

    def split(factor_input):
        """(b, t, in_features) inputs and (b, t, 2, units) hidden states."""
        inputs, entering = factor_input[..., :in_features], factor_input[..., in_features:]
        return inputs, entering.reshape(*entering.shape[:2], 2, units)

    def norms_of(norm_of_sums):
        """The norm over both directions, each a sum over positions of [input, hidden state, 1]^T error."""

        def of_group(factor_input, errors):
            inputs, entering = split(factor_input)
            rows = [jnp.concatenate([inputs, entering[:, :, d]], axis=2) for d in (0, 1)]
            return norm_of_sums(rows[0], errors[:, :, 0]) + norm_of_sums(rows[1], errors[:, :, 1])

        return of_group

    def squared_norm(factor_input, errors):
        sizes = (errors.shape[1], in_features + units, 4 * units)
        bytes_of_one = position_sums.sample_bytes(*sizes)
        return position_sums.in_groups(norms_of(position_sums.squared_norm), factor_input, errors, bytes_of_one)

    def absolute_norm(factor_input, errors):
        bytes_of_one = 4 * (in_features + units) * 4 * units
        return position_sums.in_groups(norms_of(position_sums.absolute_norm), factor_input, errors, bytes_of_one)

    def weighted_sum(factor_input, errors, weight):
        inputs, entering = split(factor_input)
        products = errors * weight[:, None, None, None]
        return {
            "kernel": jnp.einsum("bti,btdv->div", inputs, products, precision="highest"),
            "recurrent_kernel": jnp.einsum("btdu,btdv->duv", entering, products, precision="highest"),
            "bias": products.sum(axis=(0, 1)),
        }

    def per_sample(factor_input, errors):
        inputs, entering = split(factor_input)
        return {
            "kernel": jnp.einsum("bti,btdv->bdiv", inputs, errors, precision="highest"),
            "recurrent_kernel": jnp.einsum("btdu,btdv->bduv", entering, errors, precision="highest"),
            "bias": errors.sum(axis=1),
        }

    def factored(name, input_is_sample):
        return FactoredLayer(
            name=name,
            input_is_sample=False,  # the hidden states are not part of the sample, even if the inputs are
            is_outer_product=False,
            squared_norm=squared_norm,
            absolute_norm=absolute_norm,
            weighted_sum=weighted_sum,
            per_sample=per_sample,
        )

    # Gradients of 4 and 8 nodes one after the other took 0.6 to 0.7 of the processor time of all at once, and an eighth
    # to a quarter of the memory (two cores, 64 steps, 64 and 256 units): one node fills the caches, like convolutions.
    if frozen_steps:
        return Layer(init=init, apply=apply, fills_caches=True)
    return Layer(init=init, apply=apply, factored=factored, fills_caches=True, tapped=tapped)


def _at_positions(steps: Array) -> Array:
    """(t, 2, b, u) in the order in which each direction reads -> (b, t, 2, u) by position in the sequence."""
    return jnp.stack([steps[:, 0], steps[::-1, 1]], axis=2).swapaxes(0, 1)


def _in_reading_order(positions: Array) -> Array:
    """The inverse of `_at_positions`."""
    return jnp.stack([positions[:, :, 0], positions[:, ::-1, 1]], axis=0).transpose(2, 0, 1, 3)


def _previous(states: Array, start: Array) -> Array:
    """The states that enter each step, given those that leave it, (t, ...), and the first (...)."""
    return jnp.concatenate([start[None], states[:-1]])


def _zeros(projections: Array, units: int) -> tuple[Array, Array]:
    """Hidden states and cells (2, b, u) from which both directions start."""
    zeros = jnp.zeros((*projections.shape[1:-1], units), projections.dtype)
    return zeros, zeros


def _step(cell: Array, gates: Array) -> tuple[Array, Array]:
    """One step from the pre-activations of the gates (..., 4u): the new cell and hidden state, (..., u) each."""
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    cell = mark_activation(jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g))
    return cell, mark_activation(jax.nn.sigmoid(o) * jnp.tanh(cell))


def _states(projections: Array, kernel: Array, start: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Hidden states and cells (t, 2, b, u) and pre-activations (t, 2, b, 4u), of both directions in one loop."""

    def step(state, projection):
        hidden, cell = state
        gates = projection + mark_activation(jnp.matmul(hidden, kernel))
        cell, hidden = _step(cell, gates)
        return (hidden, cell), (hidden, cell, gates)

    return jax.lax.scan(step, start, projections)[1]


@jax.custom_vjp
def _run(projections: Array, kernel: Array, start: tuple[Array, Array]) -> Array:
    """Hidden states (t, 2, b, u) from projections (t, 2, b, 4u), recurrent kernels (2, u, 4u) and the states before.

    Automatic differentiation would add up the gradient to the kernels step by step and keep every intermediate result.
    The rule here takes one product over all steps and keeps pre-activations and cells only. This saves a quarter of
    the memory and takes 0.9 to 1.0 of the time on a busy CPU. Forward mode (`jax.jvp`) does not work.
    """
    return _states(projections, kernel, start)[0]


def _run_forward(projections, kernel, start):
    hidden, cells, gates = _states(projections, kernel, start)
    return hidden, (hidden, cells, gates, kernel, start)


def _run_backward(residuals, cotangent):
    hidden, cells, gates, kernel, start = residuals

    def step(errors_at_state, here):
        error_at_hidden, error_at_cell = errors_at_state
        output_error, cell, gates = here
        _, pull_back = jax.vjp(_step, cell, gates)
        error_at_cell, error = pull_back((error_at_cell, error_at_hidden + output_error))
        return (jnp.matmul(error, jnp.swapaxes(kernel, -1, -2)), error_at_cell), error

    zeros = jnp.zeros_like(hidden[0])
    steps = (cotangent, _previous(cells, start[1]), gates)
    errors_at_start, errors = jax.lax.scan(step, (zeros, zeros), steps, reverse=True)
    return errors, jnp.einsum("tdbu,tdbv->duv", _previous(hidden, start[0]), errors), errors_at_start


_run.defvjp(_run_forward, _run_backward)
