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
from jaxfl.core.types import Array, PyTree

_BATCH: ContextVar[tuple[Array, bool] | None] = ContextVar("batch", default=None)
"""Weights (b,) of the samples that a module trains on, and whether its statistics come from this batch alone."""


class Modes(NamedTuple):
    """A module that makes random numbers or batch statistics while it trains.

    Attributes:
        init_state: () -> batch statistics, a pure dict; empty for dropout alone.
        evaluate: (params, statistics, inputs (b, *sample)) -> outputs (b, ...), by running statistics, without dropout.
        train: (params, statistics or None, inputs, weights (b,), key) -> (outputs, new statistics), as for
            `Task.train_loss`.
    """

    init_state: Callable[[], PyTree]
    evaluate: Callable[[PyTree, PyTree, Array], Any]
    train: Callable[[PyTree, PyTree, Array, Array, Array], tuple[Any, PyTree]]


def modes_of(make_module: Callable[[nnx.Rngs], nnx.Module], module: nnx.Module) -> Modes:
    """The modes of a module that `make_module` makes; `module` has its shapes.

    Guarantees:
        - samples of weight 0 never count in batch statistics, and a batch without others leaves these as they are.
        - keys of streams differ from each other.

    Raises:
        ArgumentError: the module has state besides parameters, statistics of nnx.BatchNorm and random streams.
    """
    _refuse_others(module)
    evaluated, trained = (_in_mode(module, trains) for trains in (False, True))
    for _, part in nnx.iter_modules(trained):
        if isinstance(part, nnx.BatchNorm):
            part.__class__ = _over_weights(type(part))
    of_evaluation, of_training = (nnx.split(one, nnx.Param, ...)[0] for one in (evaluated, trained))
    streams, form = jax.tree.flatten(nnx.to_pure_dict(nnx.state(module, nnx.RngState)))

    def merged(structure, params, statistics, key):
        is_key = (jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in streams)
        values = [leaf_key(key, i) if keyed else jnp.zeros((), streams[i].dtype) for i, keyed in enumerate(is_key)]
        trees = (params, statistics, jax.tree.unflatten(form, values))
        return nnx.merge(structure, *(nnx.State(tree) for tree in trees if tree))

    def init_state():
        return nnx.to_pure_dict(nnx.state(make_module(nnx.Rngs(0)), nnx.BatchStat))

    def evaluate(params, statistics, inputs):
        return merged(of_evaluation, params, statistics, jax.random.key(0))(inputs)

    def train(params, statistics, inputs, weights, key):
        old = init_state() if statistics is None else statistics
        one = merged(of_training, params, old, key)
        token = _BATCH.set((weights, statistics is None))
        try:
            outputs = one(inputs)
        finally:
            _BATCH.reset(token)
        any_counts = jnp.any(weights > 0)
        new = nnx.to_pure_dict(nnx.state(one, nnx.BatchStat))
        return outputs, jax.tree.map(lambda a, b: jnp.where(any_counts, a.astype(b.dtype), b), new, old)

    return Modes(init_state, evaluate, train)


def _refuse_others(module: nnx.Module) -> None:
    """Refuse variables that are neither parameters, nor nnx.BatchNorm's statistics, nor single streams."""
    norms = [path for path, part in nnx.iter_modules(module) if isinstance(part, nnx.BatchNorm)]
    _, _, rest = nnx.split(module, nnx.Param, ...)
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


def _in_mode(module: nnx.Module, trains: bool) -> nnx.Module:
    """A copy of the module that trains or evaluates."""
    if hasattr(nnx, "view"):
        flags = {"deterministic": not trains, "use_running_average": not trains}
        return nnx.view(nnx.clone(module), **flags, raise_if_not_found=False)
    copy = nnx.clone(module)  # an older flax
    (copy.train if trains else copy.eval)()
    return copy


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
