"""Cost of a model: parameters, activations and operations of a forward pass, counted on its traced program.

Each layer is traced for one sample, but not computed. The trace is the same for every platform
(`jaxfl.core.tracing.canonical_form`).

- Parameters: all that `init` makes, without model state such as moving statistics.
- Activations: outputs of convolutions and dense layers, which layers mark (`jaxfl.core.tracing.mark_activation`), as
  EmbracingFL counts them; or outputs of the layers in `counted`.
- Multiply-accumulates: of convolutions and matrix products. Positions of a window that lie on padding count.
- Other operations: one for each number that arithmetic gives, and one for each that a pooling or a sum reads.
  Consecutive additions and multiplications by numbers that do not depend on the sample are one operation: a bias, a
  normalization with given statistics, or the last step of a mean, which belongs to its sum. Adding any other term to a
  product is free: the accumulation starts from it. Moving data is free, and so is all that depends on parameters only.

References: EmbracingFL (`jaxfl.embracing`), Tables 1 and 10, sections 4 and 6.2; DZOFL (`jaxfl.dzofl`), section V.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any, NamedTuple

import jax

from jaxfl.core import ArgumentError, Variables, check
from jaxfl.core.tracing import ACTIVATION, canonical_form

# EmbracingFL's ten numbers per unit, direction and word, inferred from Table 1: 4 gates of 2 products, cell, output.
BILSTM_COUNTED = ("lstm",)  # of jaxfl.models.bilstm_classifier
DZOFL_COUNTED = ("conv_1", "conv_2", "pool", "flatten", "dense_1")  # of jaxfl.models.dzofl_cnn; flatten copies the pool


class Counts(NamedTuple):
    """Counts of one layer, or of several in a row, for one sample."""

    parameters: int
    activations: int
    macs: int  # multiply-accumulate operations
    other_operations: int
    inputs: int = 0  # numbers that enter the first layer

    @property
    def operations(self) -> int:
        """Operations of a forward pass, with a multiply-accumulate as one operation."""
        return self.macs + self.other_operations


def count(
    model: Any, sample_shape: tuple[int, ...], *, dtype: Any = jax.numpy.float32, counted: Collection[str] | None = None
) -> dict[str, Counts]:
    """Layer name -> the counts of a model's layer, input side first.

    Args:
        model: a `jaxfl.models.Model`, counted in evaluation.
        sample_shape: shape of one sample.
        dtype: type of the inputs: int32 for words.
        counted: names of layers whose marked activations count, or whose outputs if none is marked. Default: all marks.

    Raises:
        ArgumentError: an unknown layer in `counted`, or a layer whose operations cannot be counted.

    Guarantees:
        - the counts of EmbracingFL's Tables 1 and 10, and of DZOFL's network.
        - the same on every platform.

    Examples:
        >>> from jaxfl.models import mlp
        >>> layers = count(mlp((784, 32, 10)), (28, 28))
        >>> *layers, *layers["dense_1"]
        ('flatten', 'dense_1', 'relu_1', 'dense_2', 25120, 32, 25088, 32, 784)
        >>> total(layers).parameters, total(layers, trained_from="dense_2").parameters
        (25450, 330)
    """
    names = tuple(name for name, _ in model.layers)
    for name in counted or ():
        check.one_of(names, counted=name)
    inputs = jax.ShapeDtypeStruct((1, *sample_shape), dtype)
    params, states = jax.eval_shape(lambda: (model.init(jax.random.key(0)), model.init_state()))
    counts = {}
    for name, layer in model.layers:
        layer_params = params.get(name)
        variables = Variables(layer_params, states[name]) if name in states else layer_params
        with canonical_form():
            program, outputs = jax.make_jaxpr(layer.apply, return_shape=True)(variables, inputs)
        work = Counter(activations=0, macs=0, other_operations=0)
        _walk(program.jaxpr, [*(None for _ in jax.tree.leaves(variables)), _Kind.OTHER], 1, work)
        if counted is not None:
            work["activations"] = (work["activations"] or outputs.size) if name in counted else 0
        counts[name] = Counts(sum(leaf.size for leaf in jax.tree.leaves(layer_params)), inputs=inputs.size, **work)
        inputs = outputs
    return counts


def total(layers: Mapping[str, Counts], *, trained_from: str | None = None) -> Counts:
    """Sums over the layers of `count`, from the one named `trained_from` on; over all if it is None.

    Raises:
        ArgumentError: an unknown layer.
    """
    names, selection = tuple(layers), tuple(layers.values())
    if trained_from is not None:
        check.one_of(names, trained_from=trained_from)
        selection = selection[names.index(trained_from) :]
    return Counts(*map(sum, zip(*selection, strict=True)))._replace(inputs=selection[0].inputs)


# Kinds of arrays that depend on the sample; they decide whether the next operation counts: results of a convolution or
# matrix product; sums, and results that were scaled and shifted by numbers independent of the sample; anything else.
_Kind = Enum("_Kind", "PRODUCT SCALED OTHER")
_Kinds = list[_Kind | None]  # None: does not depend on the sample
_MOVEMENTS = (
    "broadcast_in_dim concatenate convert_element_type copy dynamic_slice dynamic_update_slice expand_dims gather name "
    "optimization_barrier pad reshape rev scatter slice split squeeze stack transpose"
).split()


def _walk(program: Any, entering: _Kinds, repeats: int, work: Counter[str]) -> _Kinds:
    """Add what a program does, `repeats` times, to `work`; returns the kinds of its outputs."""
    kinds = dict(zip(map(id, program.invars), entering, strict=True))  # literals have no hash, and so no entry
    for equation in program.eqns:
        name, operands = equation.primitive.name, [kinds.get(id(operand)) for operand in equation.invars]
        bodies = [getattr(value, "jaxpr", value) for value in equation.params.values() if hasattr(value, "eqns")]
        if not any(operands):
            continue
        if name in ("cond", "while") or len(bodies) > 1:
            requirement = "must do the same work for every sample, so that it can be counted"
            raise ArgumentError("model", requirement, f"a layer has a {name}", "Trace a model without it.")
        if name == "scan":
            # Arrays that a scan runs over or stacks have one axis less in its body. (JAX 0.12 has other names for the
            # counts.)
            pairs = (equation.invars, bodies[0].invars), (equation.outvars, bodies[0].outvars)
            until, num_carry = (sum(a.aval.ndim == b.aval.ndim for a, b in zip(*pair, strict=True)) for pair in pairs)
            for _ in range(num_carry):  # a step may make one more of the carried values depend on the sample
                ends = _walk(bodies[0], operands, 0, Counter())
                for position, end in enumerate(ends[:num_carry], until - num_carry):
                    operands[position] = _Kind.OTHER if operands[position] or end else None
        if bodies:
            results = _walk(bodies[0], operands, repeats * equation.params.get("length", 1), work)
        else:
            results = [_walk_one(equation, operands, repeats, work)] * len(equation.outvars)
        kinds |= zip(map(id, equation.outvars), results, strict=True)
    return [kinds.get(id(output)) for output in program.outvars]


def _walk_one(equation: Any, kinds: _Kinds, repeats: int, work: Counter[str]) -> _Kind:
    """One operation that depends on the sample; returns the kind of its outputs."""
    name, params, operands = equation.primitive.name, equation.params, equation.invars
    size = repeats * sum(array.aval.size for array in equation.outvars)
    of_sample = [kind for kind in kinds if kind]
    if name in _MOVEMENTS:
        work["activations"] += size if params.get("name") == ACTIVATION else 0
        return of_sample[0] if len({*of_sample}) == 1 else _Kind.OTHER
    if name == "dot_general":
        (axes, _), _ = params["dimension_numbers"]
        work["macs"] += size * math.prod(operands[0].aval.shape[axis] for axis in axes)
        return _Kind.PRODUCT
    if name == "conv_general_dilated":
        kernel = operands[1].aval
        work["macs"] += size * (kernel.size // kernel.shape[params["dimension_numbers"].rhs_spec[0]])
        return _Kind.PRODUCT
    if name.startswith(("reduce_", "arg")):
        window = params.get("window_dimensions")
        work["other_operations"] += size * math.prod(window) if window else repeats * operands[0].aval.size
        return _Kind.SCALED if name in ("reduce_sum", "reduce_window_sum") else _Kind.OTHER
    if name in ("add", "sub", "mul") or (name == "div" and kinds[1] is None):
        if len(of_sample) == 1:
            work["other_operations"] += 0 if of_sample[0] is _Kind.SCALED else size
            return _Kind.SCALED
        if name == "add" and _Kind.PRODUCT in kinds:  # a product's accumulation starts from it
            return _Kind.OTHER
    work["other_operations"] += size
    return _Kind.OTHER
