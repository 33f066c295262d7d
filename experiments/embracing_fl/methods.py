"""The methods of experiments.embracing_fl by name; keyword-only parameters are their options."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import optax

from experiments.frame import Choice
from jaxfl.algorithms import embracing, fed_avg, first_half, output_side, width_reduction
from jaxfl.core import Algorithm, Array, check

if TYPE_CHECKING:
    from experiments.embracing_fl.options import Point

NARROW = ("width_reduction", "ordered_dropout")
CLASSES = ("strong", "moderate", "weak")
Blocks = tuple[str, ...] | int
"""What a class of clients trains: blocks by name, or how many each of its clients draws."""


def _narrow(point: Point, *widths: float, **options: Any) -> Algorithm:
    tasks = [point.task(width) for width in (1.0, *widths)]
    groups = point.network.axis_groups(point.problem())
    return width_reduction(tasks, axis_groups=groups, **_classes(point), **point.local(), **options)


def _in_blocks(point: Point, method: str, *cuts: Any, frozen: str | None = None, words: int = 0) -> Algorithm:
    task, weak = point.task(), point.task(frozen_words=words)  # the same object without such words
    return embracing(
        task,
        trained_blocks=trained_blocks(method, task.blocks, *cuts),
        frozen_batch_norm=frozen or ("batch" if point.is_static else "running"),
        class_tasks=None if weak is task else [task, task, weak],
        **_classes(point),
        **point.local(),
    )


def _classes(point: Point) -> dict[str, Any]:
    return {"client_class": np.repeat(np.arange(3), point.counts), "num_active": point.num_active}


def _embracing(point: Point, *, cut_moderate: str, cut_weak: str, frozen_words: int, frozen_batch_norm: str):
    words = 0 if cut_weak == "dense" else frozen_words
    return _in_blocks(point, "embracing", cut_moderate, cut_weak, frozen=frozen_batch_norm, words=words)


METHOD = Choice(
    "method",
    {
        "embracing": _embracing,
        "width_reduction": lambda point, *, width_moderate, width_weak, without_scaler: _narrow(
            point, width_moderate, width_weak
        ),
        "ordered_dropout": lambda point, *, width_moderate, width_weak: _narrow(
            point, width_moderate, width_weak, ordered_dropout=True
        ),
        "first_half": lambda point, *, cut_moderate, cut_weak, classifier: _in_blocks(
            point, "first_half", cut_moderate, cut_weak, classifier
        ),
        "random_blocks": lambda point, *, cut_moderate, cut_weak: _in_blocks(
            point, "random_blocks", cut_moderate, cut_weak
        ),
        "fed_avg": lambda point: fed_avg(point.task(), num_active=point.participation.num_active, **point.local()),
    },
)
WITH_WEAKER = tuple(name for name in METHOD.functions if name != "fed_avg")


def trained_blocks(
    method: str, blocks: tuple[str, ...], cut_moderate: str, cut_weak: str, classifier: bool = False
) -> list[Blocks]:
    """What the strong, moderate and weak clients of a method train.

    Raises:
        ArgumentError: a cut is no block.
    """
    check.one_of(blocks, cut_moderate=cut_moderate)
    check.one_of(blocks, cut_weak=cut_weak)
    sides = [output_side(blocks, cut) for cut in (cut_moderate, cut_weak)]
    if method == "first_half":
        return [blocks, *(first_half(blocks, blocks[len(side) - 1], classifier=classifier) for side in sides)]
    return [blocks, *(map(len, sides) if method == "random_blocks" else sides)]


def counts_of(method: str, strong: int, moderate: int, weak: int) -> tuple[int, int, int]:
    """Strong, moderate and weak clients that take part in a method."""
    return (strong, 0, 0) if method == "fed_avg" else (strong, moderate, weak)


def shared_out(num_active: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Active clients of each class, by largest remainders.

    Example:
        >>> shared_out(5, (2, 4, 10))  # of 0.625, 1.25 and 3.125
        (1, 1, 3)
    """
    shares = [divmod(count * num_active, max(1, sum(counts))) for count in counts]
    rest = num_active - sum(whole for whole, _ in shares)
    first = sorted(range(len(shares)), key=lambda number: -shares[number][1])[:rest]
    return tuple(whole + (number in first) for number, (whole, _) in enumerate(shares))


def label_of(case: int | None, counts: tuple[int, ...], joint: str = " ") -> str:
    """Who takes part, in words.

    Example:
        >>> label_of(7, (4, 0, 28)), label_of(None, (4, 0, 28))
        ('case 7', '4 strong 28 weak')
    """
    named = [f"{count} {name}" for count, name in zip(counts, CLASSES, strict=True) if count]
    return joint.join(named) if case is None else f"case {case}"


def decayed(step_size: float | Array, rounds: tuple[int, ...]) -> float | Array | Callable[[Array], Array]:
    """The number, or a schedule of the round index that falls to a tenth after each of these rounds."""
    if not rounds:
        return step_size
    falling = optax.piecewise_constant_schedule(step_size, dict.fromkeys(rounds, 0.1))  # pyright: ignore
    return lambda round_index: jnp.asarray(falling(round_index.astype(jnp.float32)))  # optax divides by the count
