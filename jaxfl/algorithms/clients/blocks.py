"""Blocks that a client trains: named choices, their checks, and steps on blocks drawn at random."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms.clients.steps import batch_loss, by_backward
from jaxfl.core import ArgumentError, PyTree, Task, check


def output_side(blocks: Sequence[str], first: str) -> tuple[str, ...]:
    """The blocks from `first` on, which EmbracingFL's weaker clients train.

    Examples:
        >>> output_side(("stem", "block_1", "block_2", "dense"), "block_2")
        ('block_2', 'dense')
    """
    return tuple(blocks[_position(blocks, "first", first) :])


def first_half(blocks: Sequence[str], last: str | None = None, *, classifier: bool = False) -> tuple[str, ...]:
    """The blocks of the input side, which EmbracingFL's figure 3.b compares with the output side.

    Args:
        blocks: of the task, input side first.
        last: name of the last block to train; default: half of the blocks, rounded down, at least one.
        classifier: train the last block of the model, too, as InclusiveFL's weaker clients do.

    Examples:
        >>> blocks = ("stem", "block_1", "block_2", "block_3", "dense")
        >>> first_half(blocks), first_half(blocks, "block_2", classifier=True)
        (('stem', 'block_1'), ('stem', 'block_1', 'block_2', 'dense'))

    References:
        Liu and others: "No One Left Behind: Inclusive Federated Learning over Heterogeneous Devices", KDD 2022.
    """
    end = max(len(blocks) // 2, 1) if last is None else _position(blocks, "last", last) + 1
    return (*blocks[:end], *(blocks[-1:] if classifier and end < len(blocks) else ()))


def _position(blocks: Sequence[str], argument: str, name: str) -> int:
    """Return the index of `name` among the blocks."""
    if not blocks:
        remedy = "jaxfl.models.classification and jaxfl.from_flax make tasks with blocks; from_functions has none."
        raise ArgumentError("blocks", "must name a model's blocks", "got none", remedy)
    check.one_of(tuple(blocks), **{argument: name})
    return list(blocks).index(name)


def check_blocks(
    blocks: tuple[str, ...], trained_blocks: Sequence[Sequence[str] | int]
) -> tuple[list[tuple[str, ...]], np.ndarray]:
    """Check the blocks of each class.

    Args:
        blocks: of the task, input side first.
        trained_blocks: for each class the names of its blocks, or how many it draws.

    Returns:
        (each class's blocks, none where it draws them; how many it draws, (classes,), int32, 0 where it names them).

    Raises:
        ArgumentError: a class without blocks, with an unknown one, or with more than there are.
    """
    if not trained_blocks:
        remedy = "Pass a tuple of blocks for each class."
        raise ArgumentError("trained_blocks", "must hold the blocks of each class", "got none", remedy)
    names, counts = [], []
    for number, choice in enumerate(trained_blocks):
        argument = f"trained_blocks[{number}]"
        if isinstance(choice, int):
            check.at_least(1, **{argument: choice})
            if choice > len(blocks):
                found = f"got {choice} of {len(blocks)}"
                raise ArgumentError(argument, "must be at most the number of blocks", found, "Pass fewer.")
            names.append(())
            counts.append(choice)
            continue
        wrong = [name for name in choice if name not in blocks]
        if isinstance(choice, str) or wrong or not choice:
            found = f"got {wrong[0]!r}" if wrong and not isinstance(choice, str) else f"got {choice!r}"
            remedy = f"Choose among {', '.join(blocks)}."
            raise ArgumentError(argument, "must be a tuple of blocks of the task, or a number of them", found, remedy)
        names.append(tuple(choice))
        counts.append(0)
    return names, np.array(counts, np.int32)


def tasks_of_classes(task: Task, class_tasks: Sequence[Task] | None, num_classes: int) -> list[Task]:
    """The task of each class.

    Args:
        task: the common one.
        class_tasks: one a class; None: the common one for all.
        num_classes: how many classes there are.

    Raises:
        ArgumentError: another number of tasks, a task without `part`, or a task with other variables.
    """
    tasks = [task] * num_classes if class_tasks is None else list(class_tasks)
    if len(tasks) != num_classes:
        found = f"got {len(tasks)} for {num_classes}"
        raise ArgumentError("class_tasks", "must hold the task of each class", found, "Pass one task for each class.")
    for name, one in {"task": task, **{f"class_tasks[{number}]": one for number, one in enumerate(tasks)}}.items():
        if one.part is None:
            found = "got a task without `part`"
            remedy = (
                "Use jaxfl.models.classification, or from_flax of a module without batch normalization and dropout."
            )
            raise ArgumentError(name, "must be able to train model parts", found, remedy)
        if one is not task and _variables_of(one) != _variables_of(task):
            requirement = "must have the blocks, parameters and model state of `task`"
            raise ArgumentError(name, requirement, "got others", "Build both models alike.")
    return tasks


def _variables_of(task: Task) -> PyTree:
    """Names and shapes of a task's variables."""
    state = None if task.init_state is None else jax.eval_shape(task.init_state)
    return task.blocks, jax.eval_shape(task.init, jax.random.key(0)), state


def train_drawn(task, own_blocks, steps, *, state, data, clients):
    """One client's steps on the blocks where `own_blocks` is True.

    Args:
        task: the learning task.
        own_blocks: (L,), bool.
        steps: `Step` with leaves (tau, ...).
        state: the server's, with `params`, `model_state` and `round_index`.
        data: all clients'.
        clients: how to step.

    Returns:
        (all blocks, all model state, `Info` of its steps). The values of blocks that the client does not train mean
        nothing.
    """
    is_own = dict(zip(task.blocks, own_blocks, strict=True))
    whole = batch_loss(task, data, clients.mean)

    def step_loss(params, model_state, one_step):
        block_params = {
            name: jax.tree.map(functools.partial(jnp.where, is_own[name]), values, state.params[name])
            for name, values in params.items()
        }
        return whole(block_params, model_state, one_step)

    params, model_state, info = clients.run(
        by_backward(step_loss), state.params, state.model_state, steps, state.round_index
    )
    return params, {} if model_state is None else model_state, info
