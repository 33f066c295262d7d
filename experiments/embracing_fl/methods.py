"""Methods of experiments.embracing_fl: the share of the model that each class of clients trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from jaxfl.algorithms import first_half, output_side
from jaxfl.core import Array, FederatedData, check
from jaxfl.core.tasks import cross_entropy
from jaxfl.frame import Choice

NARROW = ("width_reduction", "ordered_dropout")
CLASSES = ("strong", "moderate", "weak")


class Share(NamedTuple):
    """Part of the model that a class of clients trains."""

    blocks: tuple[str, ...] | int  # by name, or how many each of its clients draws
    width: float = 1.0  # share of every layer's channels
    frozen_words: int = 0  # words read without gradient


def _sides(blocks: Sequence[str], cut_moderate: str, cut_weak: str) -> list[tuple[str, ...]]:
    """Blocks of the output side that each class trains."""
    check.one_of(tuple(blocks), cut_moderate=cut_moderate, cut_weak=cut_weak)
    return [output_side(blocks, cut) for cut in (blocks[0], cut_moderate, cut_weak)]


def _embracing(blocks, *, cut_moderate, cut_weak, frozen_words, frozen_batch_norm):
    strong, moderate, weak = map(Share, _sides(blocks, cut_moderate, cut_weak))
    return [strong, moderate, weak._replace(frozen_words=0 if cut_weak == "dense" else frozen_words)]


def _width_reduction(blocks, *, width_moderate, width_weak, without_scaler):
    return [Share(blocks, width) for width in (1.0, width_moderate, width_weak)]


def _ordered_dropout(blocks, *, width_moderate, width_weak):
    return [Share(blocks, width) for width in (1.0, width_moderate, width_weak)]


def _first_half(blocks, *, cut_moderate, cut_weak, classifier):
    numbers = map(len, _sides(blocks, cut_moderate, cut_weak)[1:])
    return [Share(blocks), *(Share(first_half(blocks, blocks[n - 1], classifier=classifier)) for n in numbers)]


def _random_blocks(blocks, *, cut_moderate, cut_weak):
    return [Share(blocks), *map(Share, map(len, _sides(blocks, cut_moderate, cut_weak)[1:]))]


METHOD = Choice(  # blocks of the model -> shares of the classes; keyword-only parameters are options
    "method",
    {
        "embracing": _embracing,
        "width_reduction": _width_reduction,
        "ordered_dropout": _ordered_dropout,
        "first_half": _first_half,
        "random_blocks": _random_blocks,
        "fed_avg": lambda blocks: [Share(blocks)] * 3,
        "alone": lambda blocks: [Share(blocks)] * 3,
    },
)
TOGETHER = tuple(name for name in METHOD.functions if name != "alone")
WITH_WEAKER = tuple(name for name in METHOD.functions if name != "fed_avg")


def with_classes(data: FederatedData, num_classes: int) -> FederatedData:
    """The data with labels (N, 1 + c) int32: a sample's class, then 1 for each class that its client has, else 0."""
    labels, table = np.asarray(data.labels), np.zeros((len(data.labels), 1 + num_classes), np.int32)
    table[:, 0] = labels
    for indices, size in zip(np.asarray(data.indices), np.asarray(data.sizes), strict=True):
        own = indices[:size]
        table[own, 1:] = np.isin(np.arange(num_classes), labels[own])
    return data._replace(labels=jnp.asarray(table))


def masked_cross_entropy(logits: Array, labels: Array) -> Array:
    """HeteroFL's masked loss: the cross entropy (b,) of logits (b, c), 0 for classes that the client lacks.

    Labels are (b, 1 + c) as `with_classes` makes them, or (b,) classes of test samples. Those mask no logit.
    """
    if labels.ndim == 1:
        return cross_entropy(logits, labels)
    return cross_entropy(jnp.where(labels[:, 1:] > 0, logits, 0.0), labels[:, 0])


def counts_of(method: str, strong: int, moderate: int, weak: int) -> tuple[int, int, int]:
    """Strong, moderate and weak clients that take part in a method."""
    return (strong, 0, 0) if method == "fed_avg" else (strong, moderate, weak)


def shared_out(num_active: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Active clients of each class, by largest remainders.

    Examples:
        >>> shared_out(5, (2, 4, 10))  # of 0.625, 1.25 and 3.125
        (1, 1, 3)
    """
    shares = [divmod(count * num_active, max(1, sum(counts))) for count in counts]
    rest = num_active - sum(whole for whole, _ in shares)
    first = sorted(range(len(shares)), key=lambda number: -shares[number][1])[:rest]
    return tuple(whole + (number in first) for number, (whole, _) in enumerate(shares))


def label_of(case: int | None, counts: tuple[int, ...]) -> str:
    """The participants in words.

    Examples:
        >>> label_of(7, (4, 0, 28)), label_of(None, (4, 0, 28))
        ('case 7', '4 strong 28 weak')
    """
    parts = [f"{count} {name}" for count, name in zip(counts, CLASSES, strict=True) if count]
    return " ".join(parts) if case is None else f"case {case}"


def decayed(step_size: float | Array, rounds: tuple[int, ...]) -> float | Array | Callable[[Array], Array]:
    """The number, or a schedule of the round index that falls to a tenth after each of these rounds."""
    if not rounds:
        return step_size
    falling = optax.piecewise_constant_schedule(step_size, dict.fromkeys(rounds, 0.1))  # pyright: ignore
    return lambda round_index: jnp.asarray(falling(round_index.astype(jnp.float32)))  # optax divides by the count
