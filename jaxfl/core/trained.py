"""Tasks that train a part of their parameters, while the others are constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfl.core.algorithm import constructor
from jaxfl.core.check import ArgumentError
from jaxfl.core.tree import leaf_names, with_new_arrays
from jaxfl.core.types import Factors, Part, PyTree, Task


@constructor
def train_only(
    task: Task, trained: str | Sequence[str] | Callable[[str, Any], bool], constants: PyTree | None = None
) -> Task:
    """The task whose parameters are the part of a task's parameters that trains.

    All else that an algorithm does with parameters then does not reach the others: no gradient, clip norm, noise,
    table, direction, message or count. For a flax module `from_flax(trainable=...)` does the same, with filters of nnx
    and with batch normalization.

    Args:
        task: without batch normalization and dropout, its parameters in named groups (a dict, or a registered class).
        trained: names of the groups (blocks) that train; or a function (path, leaf) -> bool, where a path is
            "dense_1/kernel" and a leaf has a shape and a dtype.
        constants: a tree with the values of the parameters that do not train, such as pretrained ones, where the task
            has them; more is ignored. Default: those of `task.init(jax.random.key(0))`, the same for all seeds.

    Returns:
        A task whose params are nested dicts of the trained arrays. Where whole blocks train it keeps `blocks` and
        `part`, and the factored form of layers.

    Raises:
        ArgumentError: nothing trains, an unknown name, missing constants, or a task with batch statistics or dropout.

    Guarantees:
        - it trains as the smaller network does on the outputs of frozen layers in front.

    Examples:
        >>> import jax, jax.numpy as jnp, jaxfl
        >>> task = jaxfl.models.classification(jaxfl.models.mlp((4, 8, 2)))
        >>> jax.tree.map(jnp.shape, train_only(task, "dense_2").init(jax.random.key(0)))
        {'dense_2': {'bias': (2,), 'kernel': (8, 2)}}
    """
    if task.train_loss is not None:
        found, remedy = f"got one with {', '.join(task.modes) or 'some'}", "Use from_flax(trainable=...), or GroupNorm."
        raise ArgumentError("task", "must have no batch statistics or dropout where a part trains", found, remedy)
    shapes = jax.eval_shape(task.init, jax.eval_shape(lambda: jax.random.key(0)))
    structure, named = jax.tree.structure(shapes), leaf_names(shapes)
    groups = tuple(dict.fromkeys(name.partition("/")[0] for name in named))
    if callable(trained):
        picked = {name: bool(trained(name, leaf)) for name, leaf in named.items()}
    else:
        wanted = (trained,) if isinstance(trained, str) else tuple(trained)
        unknown = [name for name in wanted if name not in groups]
        if unknown:
            requirement = f"must name groups of the parameters, {', '.join(groups)}"
            raise ArgumentError("trained", requirement, f"got {unknown[0]!r}", "Pass a function (path, leaf) -> bool.")
        picked = {name: name.partition("/")[0] in wanted for name in named}
    if not any(picked.values()):
        raise ArgumentError(
            "trained", "must leave parameters to train", "got none", f"Name one of {', '.join(groups)}."
        )
    with jax.ensure_compile_time_eval():
        given = leaf_names(task.init(jax.random.key(0)) if constants is None else constants)
    frozen = [name for name, trains in picked.items() if not trains]
    for name in frozen:
        if _form(given.get(name)) != _form(named[name]):
            requirement = f"must hold {name}, {_form(named[name])}, which does not train"
            found = f"got {_form(given[name])}" if name in given else f"got {', '.join(given)}"
            raise ArgumentError("constants", requirement, found, "Pass parameters as the task's init makes them.")
    held = {name: jnp.array(given[name]) for name in frozen}
    touched = [group for group in groups if any(_of(group, picked))]
    by_blocks = all(all(_of(group, picked)) for group in touched)

    def whole(params):
        own = leaf_names(params)
        return structure.unflatten([own[name] if trains else held[name] for name, trains in picked.items()])

    def init(key):
        values = leaf_names(task.init(key))
        return with_new_arrays(_nested({name: values[name] for name, trains in picked.items() if trains}))

    def over(function):
        """The function of the trained part, where one of all parameters is given; None for None."""
        return None if function is None else lambda params, *others: function(whole(params), *others)

    def factors(params, inputs, labels):
        losses, of_all = task.factors(whole(params), inputs, labels)  # pyright: ignore[reportOptionalCall]
        kept = [index for index, layer in enumerate(task.layers) if layer.name in touched]
        return losses, Factors(*(tuple(arrays[index] for index in kept) for arrays in of_all))

    def part(names):
        of_all = task.part(names)  # pyright: ignore[reportOptionalCall]

        def train_loss(own, others, *rest):
            return of_all.train_loss(own, {**_nested(held), **others}, *rest)

        return Part(of_all.trained, over(of_all.features), over(of_all.features_train), train_loss)

    factored = by_blocks and task.factors is not None
    return task._replace(
        init=init,
        loss=over(task.loss),
        metrics=over(task.metrics),
        logits=over(task.logits),
        blocks=tuple(block for block in task.blocks if block in touched) if by_blocks else (),
        layers=tuple(layer for layer in task.layers if layer.name in touched) if factored else (),
        factors=factors if factored else None,
        part=part if by_blocks and task.part is not None else None,
    )


def _of(group: str, picked: dict[str, bool]) -> list[bool]:
    """Whether each parameter of a group trains."""
    return [trains for name, trains in picked.items() if name.partition("/")[0] == group]


def _form(leaf: Any) -> str:
    """Type and shape for people; a leaf that is missing has another."""
    return "nothing" if leaf is None else f"{leaf.dtype} of shape {leaf.shape}"


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Nested dicts of values by path."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split("/")
        inside = tree
        for parent in parents:
            inside = inside.setdefault(parent, {})
        inside[last] = value
    return tree
