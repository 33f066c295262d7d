"""Flax (nnx) modules with batch normalization or dropout, whose training differs from evaluation, as functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxfl.core.check import ArgumentError
from jaxfl.core.keys import leaf_key
from jaxfl.core.tree import with_new_arrays
from jaxfl.core.types import Array, PyTree

_BATCH: ContextVar[tuple[Array, bool] | None] = ContextVar("batch", default=None)
"""Weights (b,) of the samples that a module trains on, and whether its statistics come from this batch only."""


class Functions(NamedTuple):
    """A module as functions of the parameters that train.

    Attributes:
        blocks: attributes of the module that hold parameters that train, in order of definition.
        modes: names of the layers that make random numbers or batch statistics while they train.
        init: key -> parameters that train, a pure dict.
        init_state: () -> batch statistics, a pure dict; empty for dropout only.
        evaluate: (params, statistics, inputs (b, *sample)) -> outputs (b, ...), by running statistics, without dropout.
        train: (params, statistics or None, inputs, weights (b,), key) -> (outputs, new statistics), as for
            `Task.train_loss`.
    """

    blocks: tuple[str, ...]
    modes: tuple[str, ...]
    init: Callable[[Array], PyTree]
    init_state: Callable[[], PyTree]
    evaluate: Callable[[PyTree, PyTree, Array], Any]
    train: Callable[[PyTree, PyTree, Array, Array, Array], tuple[Any, PyTree]]


def functions_of(make_module: Callable[[nnx.Rngs], nnx.Module], trainable: Any) -> Functions:
    """The functions of a module; parameters that the filter `trainable` leaves out are constants, of `nnx.Rngs(0)`.

    Guarantees:
        - samples of weight 0 never count in batch statistics, and a batch without others leaves these as they are.
        - keys of streams differ from each other.
        - random numbers that decide nothing make no mode; constant parameters keep a normalization's statistics, too.

    Raises:
        ArgumentError: nothing trains, or the module has state besides parameters, statistics of nnx.BatchNorm and
            random streams; from `evaluate`, outputs that depend on random numbers.
    """
    order: list[str] = []  # flax sorts the attributes of the module that eval_shape returns

    def in_order():
        made = make_module(nnx.Rngs(0))
        order.extend(vars(made) if isinstance(made, nnx.Module) else ())
        return made

    module = nnx.eval_shape(in_order)
    if not isinstance(module, nnx.Module):
        found, remedy = f"got {type(module).__name__}", "Return MyModule(..., rngs=rngs)."
        raise ArgumentError("make_module", "must return an nnx module", found, remedy)
    trained_part = nnx.All(nnx.Param, trainable)
    _, trained, frozen, rest = nnx.split(module, trained_part, nnx.Param, ...)
    _refuse_others(module, rest)
    trained = dict(nnx.to_flat_state(trained))
    if not trained:
        name, remedy = "trainable", "Pass nnx.LoRAParam, or lambda path, value: 'head' in path, for instance."
        if not frozen:
            name, remedy = "make_module", "nnx.bridge.ToNNX has some after .lazy_init(inputs)."
        raise ArgumentError(name, "must leave parameters to train", "got none", remedy)
    evaluated = training = module
    if rest:  # nnx.view would fail on modules that hold nnx.Rngs, and pass over flags of a user's own layers
        evaluated, training = nnx.clone(module), nnx.clone(module)
        evaluated.eval()
        training.train()
    modes, still = [], set()
    for (path, one), (_, other) in zip(nnx.iter_modules(evaluated), nnx.iter_modules(training), strict=True):
        flags = [{name: flag for name, flag in vars(part).items() if isinstance(flag, bool)} for part in (one, other)]
        params = nnx.to_flat_state(nnx.state(one, nnx.Param)) if isinstance(one, nnx.BatchNorm) else ()
        if params and not any(path + rest in trained for rest, _ in params):
            still.add(path)
        if path in still or getattr(one, "rate", getattr(one, "dropout_rate", None)) == 0:
            vars(other).update(flags[0])
        elif flags[0] != flags[1]:
            modes.append(".".join(map(str, path)) or type(one).__name__)
            if isinstance(other, nnx.BatchNorm):
                other.__class__ = _over_weights(type(other))
    of_evaluation, of_training = (nnx.split(one, nnx.Param, ...)[0] for one in (evaluated, training))
    streams, form = jax.tree.flatten(nnx.to_pure_dict(nnx.state(module, nnx.RngState)))

    def is_constant(path, value):
        return isinstance(value, nnx.Param) or (isinstance(value, nnx.BatchStat) and path[:-1] in still)

    def part_of(made, *filters):
        """The state that the last of the filters picks after the others, as a pure dict."""
        return nnx.to_pure_dict(nnx.split_state(nnx.state(made), *filters, ...)[len(filters) - 1])

    with jax.ensure_compile_time_eval():
        constants = part_of(make_module(nnx.Rngs(0)), trained_part, is_constant) if frozen else {}

    def merged(structure, params, statistics, key):
        is_key = (jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in streams)
        values = [leaf_key(key, i) if keyed else jnp.zeros((), streams[i].dtype) for i, keyed in enumerate(is_key)]
        trees = (params, constants, statistics, jax.tree.unflatten(form, values))
        return nnx.merge(structure, *(nnx.State(tree) for tree in trees if tree))

    def init(key):
        return with_new_arrays(part_of(make_module(nnx.Rngs(key)), trained_part))

    def init_state():
        return part_of(make_module(nnx.Rngs(0)), nnx.Param, is_constant, nnx.BatchStat)

    def evaluate(params, statistics, inputs):
        key = jax.random.key(0)
        if not streams:
            return merged(of_evaluation, params, statistics, key)(inputs)
        by_key = jax.vmap(lambda key: merged(of_evaluation, params, statistics, key)(inputs), out_axes=None)
        try:
            return by_key(key[None])  # JAX refuses outputs that depend on the key
        except ValueError as error:
            if "out_axes" not in str(error):
                raise
        names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module, nnx.RngKey))]
        requirement = "must draw no random numbers in evaluation, as nnx.Dropout under its flag `deterministic`"
        found = f"got outputs that depend on {', '.join(names[:3])}"
        raise ArgumentError("make_module", requirement, found, "Give the layer this flag, and draw where it is False.")

    def train(params, statistics, inputs, weights, key):
        old = init_state() if statistics is None else statistics
        one = merged(of_training, params, old, key)
        token = _BATCH.set((weights, statistics is None))
        try:
            outputs = one(inputs)
        finally:
            _BATCH.reset(token)
        any_counts = jnp.any(weights > 0)
        new = part_of(one, nnx.Param, is_constant, nnx.BatchStat)
        return outputs, jax.tree.map(lambda a, b: jnp.where(any_counts, a.astype(b.dtype), b), new, old)

    groups = {path[0] for path in trained}
    return Functions(tuple(name for name in order if name in groups), tuple(modes), init, init_state, evaluate, train)


def _refuse_others(module: nnx.Module, rest: nnx.State) -> None:
    """Refuse variables that are neither parameters, nor nnx.BatchNorm's statistics, nor single streams."""
    norms = [path for path, part in nnx.iter_modules(module) if isinstance(part, nnx.BatchNorm)]
    others = {
        ".".join(map(str, path)): type(variable).__name__
        for path, variable in nnx.to_flat_state(rest)
        if not (isinstance(variable, nnx.BatchStat) and path[:-1] in norms)
        and not (isinstance(variable, nnx.RngState) and variable.shape == ())
    }
    if others:
        raise ArgumentError(
            "make_module",
            "must hold parameters, nnx.BatchNorm and dropout, and no other state",
            f"found {', '.join(f'{kind} at {path}' for path, kind in list(others.items())[:3])}",
            "Use GroupNorm in place of layers that keep state, or build the network from jaxfl.models.layers.",
        )


@functools.cache
def _over_weights(kind: type[nnx.BatchNorm]) -> type[nnx.BatchNorm]:
    """Batch normalization over the samples of weight above 0 in the batch that the module trains on."""

    class OverWeights(kind):
        def __call__(self, x, use_running_average=None, *, mask=None):
            batch = _BATCH.get()
            if batch is None:
                return super().__call__(x, use_running_average, mask=mask)
            weights, alone = batch
            if x.shape[:1] != weights.shape:
                found = f"got shape {x.shape} for {len(weights)} samples"
                remedy = "Keep the samples on axis 0, or use GroupNorm."
                raise ArgumentError(
                    "make_module", "must normalize over arrays with the samples in front", found, remedy
                )
            counts = ((weights > 0) | ~jnp.any(weights > 0)).reshape(-1, *[1] * (x.ndim - 1))
            self.momentum = 0.0 if alone else self.momentum
            return super().__call__(x, use_running_average, mask=counts if mask is None else counts & mask)

    return OverWeights
