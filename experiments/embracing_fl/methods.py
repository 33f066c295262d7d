"""The methods of experiments.embracing_fl: what each class of clients trains, and the algorithm that trains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from experiments.embracing_fl.networks import Form
from experiments.frame import Choice
from jaxfl.algorithms import embracing, fed_avg, first_half, output_side, width_reduction
from jaxfl.channel import Counts, Work, node_work, total
from jaxfl.core import Algorithm, Array, check

if TYPE_CHECKING:
    from experiments.embracing_fl.options import Point

NARROW = ("width_reduction", "ordered_dropout")
CLASSES = ("strong", "moderate", "weak")


class Share(NamedTuple):
    """What a class of clients trains."""

    blocks: tuple[str, ...] | int  # by name, or how many each of its clients draws
    width: float = 1.0  # share of every layer's channels
    frozen_words: int = 0  # words read without gradient


def _sides(blocks: Sequence[str], cut_moderate: str, cut_weak: str) -> list[tuple[str, ...]]:
    """What the classes train of the output side."""
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
    },
)
WITH_WEAKER = tuple(name for name in METHOD.functions if name != "fed_avg")


def algorithm(point: Point) -> Algorithm:
    """The algorithm; traced options may be arrays."""
    method, problem = point.learning.method, point.problem()
    clients = point.steps.clients(point.participation.weighting)
    if method == "fed_avg":
        return fed_avg(point.task(), clients=clients, num_active=point.participation.num_active)
    shares = point.shares(problem)
    tasks = [point.task(share.width, share.frozen_words) for share in shares]  # the same object for the same share
    classes = {"client_class": np.repeat(np.arange(3), point.counts), "num_active": point.num_active}
    if method in NARROW:
        narrow = {"axis_groups": point.network.axis_groups(problem), "ordered_dropout": method == "ordered_dropout"}
        return width_reduction(tasks, clients=clients, **classes, **narrow)
    return embracing(
        tasks[0],
        clients=clients,
        trained_blocks=[share.blocks for share in shares],
        frozen_batch_norm=point.learning.frozen_batch_norm,
        class_tasks=tasks if len({*map(id, tasks)}) > 1 else None,
        **classes,
    )


def work(point: Point) -> list[Work]:
    """What a sample takes each client: a gradient runs from its first block on, as `jaxfl.embracing` counts it.

    Words that are read without gradient run forward alone. A client of ordered_dropout takes the mean over the widths
    that it draws.
    """
    problem, network = point.problem(), point.network
    blocks, of_class = network.task(problem).blocks, []
    for share in point.shares(problem):
        form, first = Form(share.width), blocks[0] if isinstance(share.blocks, int) else share.blocks[0]
        shorter = problem.sample_shape[0] - share.frozen_words, *problem.sample_shape[1:]
        read = network.counts(problem._replace(sample_shape=shorter), form)
        layers = network.counts(problem, form)
        both_ways = node_work(layers, None if first == blocks[0] else first)
        of_class.append(both_ways._replace(backward=total(read, trained_from=first)))
    if point.learning.method == "ordered_dropout":
        of_class = [_mean(of_class[number:]) for number in range(len(of_class))]
    return [of_class[number] for number, count in enumerate(point.counts) for _ in range(count)]


def _mean(works: Sequence[Work]) -> Work:
    """Of each count, rounded."""
    pairs = (zip(*same, strict=True) for same in zip(*works, strict=True))
    return Work(*(Counts(*(round(sum(numbers) / len(works)) for numbers in pair)) for pair in pairs))


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
