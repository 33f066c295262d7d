"""What each class of clients costs: capacity, as the paper counts it, and seconds on its device; Tables 1, 8 and 10."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from experiments.partial import paper
from experiments.partial.build import trained_blocks
from experiments.partial.config import CLASSES, CUT, NARROW, RESNETS, Config, Resolved, resolve
from experiments.partial.networks import Problem, architecture, make_network
from experiments.partial.plan import Variant
from jaxfl import channel
from jaxfl.channel import ONEPLUS_9_PRO, ClientWork, Counts, RoundSeconds
from jaxfl.models import layer_sizes

DEVICE = "OnePlus 9 Pro"
_PAPER_PROBLEMS = {
    "resnet20": Problem((32, 32, 3), 10),
    "femnist_cnn": Problem((28, 28, 1), 62),
    "bilstm": Problem((256,), 2),
}


class ClassCost(NamedTuple):
    """One class of clients under one method."""

    capacity: float  # memory of its training, as a share of a strong client's
    params: int  # that it trains
    seconds: RoundSeconds  # of a round


def class_costs(config: Resolved, method: str, problem: Problem) -> list[ClassCost]:
    """Costs of a strong, a moderate and a weak client.

    Capacity is EmbracingFL's (2 p_w + 2 a_w) / (2 p + 2 a). Activations are those of a batch for resnets, of one sample
    for the other models: so the paper counts them. Where a client's first block is not followed by its own blocks
    alone (first_half, random_blocks), those behind it are differentiated, too, and their activations count.
    """
    whole = _sizes(config, problem)
    full = _total(list(whole.values()))
    full_architecture = architecture(config, problem)
    costs = []
    blocks: list[tuple[str, ...] | int] = [tuple(whole)] * len(CLASSES)  # FedAvg's
    if method in CUT:
        blocks = trained_blocks(config, method, tuple(whole))
    widths = (1.0, config.width_moderate, config.width_weak)
    for number in range(len(CLASSES)):
        if method in NARROW:
            part = _total(list(_sizes(config, problem, widths[number]).values()))
            work = channel.reduced_work(architecture(config, problem, widths[number]))
        else:
            part = _part(whole, blocks[number])
            work = channel.reduced_work(full_architecture)
            if method == "embracing":
                differentiated = _differentiated(config, problem, number)
                part = _part(_sizes(config, differentiated), blocks[number])
                cuts = _cuts(config, tuple(whole), number)
                trained = channel.partial_work(architecture(config, differentiated), cuts).trained
                work = channel.partial_work(full_architecture, cuts)._replace(trained=trained)
        costs.append(
            ClassCost(
                capacity=channel.capacity(part, full, batch_size=_counted_samples(config)),
                params=part.parameters,
                seconds=_seconds(config, work),
            )
        )
    return costs


def _seconds(config: Resolved, work: ClientWork) -> RoundSeconds:
    return channel.round_seconds(work, ONEPLUS_9_PRO, batch_size=config.batch_size, num_local_steps=config.local_steps)


def _counted_samples(config: Resolved) -> int:
    """Samples whose activations are held at once, as Tables 1 and 10 have it."""
    return config.batch_size if config.model in RESNETS else 1


def _sizes(config: Resolved, problem: Problem, width: float = 1.0) -> dict[str, Counts]:
    """Parameters and activations of each block of the model, traced."""
    network = make_network(config, problem, width=width)
    dtype = np.int32 if config.model == "bilstm" else np.float32
    found = layer_sizes(network, problem.sample_shape, dtype)
    # Table 1 leaves out the one logit behind the LSTM.
    uncounted = ("dense",) if config.model == "bilstm" else ()
    return {
        name: Counts(size.params, 0 if name in uncounted else size.activations, 0, 0) for name, size in found.items()
    }


def _total(sizes: Sequence[Counts]) -> Counts:
    return Counts(*(sum(column) for column in zip(*sizes, strict=True)))


def _part(whole: Mapping[str, Counts], own: tuple[str, ...] | int) -> Counts:
    """Parameters of the trained blocks, activations from the first of them on."""
    names = list(whole)
    if isinstance(own, int):  # drawn anew by each client: their mean number, and the whole model is differentiated
        total = _total(list(whole.values()))
        return Counts(round(total.parameters * own / len(names)), total.activations, 0, 0)
    first = min(map(names.index, own))
    activations = _total([whole[name] for name in names[first:]]).activations
    return Counts(_total([whole[name] for name in own]).parameters, activations, 0, 0)


def _differentiated(config: Resolved, problem: Problem, number: int) -> Problem:
    """What a class of embracing differentiates: for a weak client without the words that it reads as they are."""
    if CLASSES[number] != "weak" or not config.frozen_words:
        return problem
    return problem._replace(sample_shape=(problem.sample_shape[0] - config.frozen_words,))


def _cuts(config: Resolved, blocks: tuple[str, ...], number: int) -> tuple[str, ...]:
    """Where the class's multi-step forward pass stores activations: before its own blocks, and for a weak client that
    gets the front in two parts before the moderate clients'."""
    wanted = {CLASSES[0]: (), CLASSES[1]: (config.cut_moderate,), CLASSES[2]: (config.cut_moderate, config.cut_weak)}
    cuts = wanted[CLASSES[number]]
    last = blocks.index(cuts[-1]) if cuts else 0
    return tuple(cut for cut in dict.fromkeys(cuts) if 0 < blocks.index(cut) <= last)


def average_capacity(costs: Sequence[ClassCost], counts: Sequence[int]) -> float:
    """Mean over clients of capacities with two digits: the paper's column "Avg. Capacity".

    Example:
        >>> costs = [ClassCost(capacity, 0, RoundSeconds(0, 0, 0, 0)) for capacity in (1.0, 0.41702, 0.15570)]
        >>> [two_digits(average_capacity(costs, counts)) for counts in ((16, 0, 112), (32, 32, 64))]
        ['0.27', '0.44']
    """
    total = sum(count * round(100 * cost.capacity) for cost, count in zip(costs, counts, strict=True))
    return total / sum(counts) / 100


def two_digits(share: float) -> str:
    """Rounded half up, as the paper rounds 0.265 and 0.435."""
    return f"{math.floor(100 * share + 0.5 + 1e-9) / 100:.2f}"


def described(costs: Sequence[ClassCost], variant: Variant) -> dict[str, Any]:
    """What summary.json says of a variant's clients."""
    present = [number for number, count in enumerate(variant.counts) if count]
    return {
        "clients": dict(zip(CLASSES, variant.counts, strict=True)),
        "capacity": {
            **{CLASSES[number]: costs[number].capacity for number in present},
            "average": average_capacity(costs, variant.counts),
        },
        "trained_params": {CLASSES[number]: costs[number].params for number in present},
        "device_seconds_per_round": {CLASSES[number]: costs[number].seconds._asdict() for number in present},
    }


def cost_lines(name: str, variant: Variant, costs: Sequence[ClassCost]) -> list[str]:
    """A variant's clients and what they cost, for people."""
    total = sum(variant.counts)
    active = variant.num_active if isinstance(variant.num_active, int) else sum(variant.num_active)
    each = "" if isinstance(variant.num_active, int) else f" ({' + '.join(map(str, variant.num_active))})"
    present = [number for number, count in enumerate(variant.counts) if count]
    shares = ", ".join(
        f"{variant.counts[number]} {CLASSES[number]} (capacity {two_digits(costs[number].capacity)})"
        for number in present
    )
    average = two_digits(average_capacity(costs, variant.counts))
    seconds = ", ".join(f"{CLASSES[number]} {_seconds_text(costs[number].seconds)}" for number in present)
    return [
        f"{name}: {shares}, {active} of {total}{each} active a round; average capacity {average}",
        f"  seconds a round on a {DEVICE}: {seconds}",
    ]


def _seconds_text(seconds: RoundSeconds) -> str:
    parts = [
        f"{label} {value:.3g}"
        for label, value in (
            ("forward", seconds.forward),
            ("backward", seconds.backward),
            ("I/O", seconds.io),
            ("link", seconds.communication),
        )
        if value
    ]
    return f"{sum(seconds):.3g} ({', '.join(parts)})"


def sizes_table() -> Table:
    """Tables 1 and 10 as counted on the models, and as published."""
    table = Table(title="Tables 1 and 10: parameters and activations of what a client trains (here | paper)")
    for heading in ("model", "client", "parameters", "activations", "capacity"):
        table.add_column(heading, justify="left" if heading in ("model", "client") else "right")
    for name, published in paper.SIZES.items():
        for label, here, there in zip(CLASSES, _paper_sizes(name), published, strict=True):
            numbers = [f"{mine:,} | {theirs:,}" for mine, theirs in zip(here[:2], there[:2], strict=True)]
            table.add_row(name, label, *numbers, f"{here[2]:.4f} | {there[2]:.2f}")
    return table


@functools.cache
def _paper_sizes(name: str) -> list[tuple[int, int, float]]:
    """Parameters, activations and capacity of the three classes of one of the paper's models."""
    model, _, narrow = name.partition(", ")
    config, problem = _paper_setting(model)
    samples = _counted_samples(config)
    whole = _sizes(config, problem)
    if narrow:
        parts = [
            _total(list(_sizes(config, problem, width).values()))
            for width in (1.0, config.width_moderate, config.width_weak)
        ]
    else:
        parts = [
            _part(_sizes(config, _differentiated(config, problem, number)), own)
            for number, own in enumerate(trained_blocks(config, "embracing", tuple(whole)))
        ]
    full = _total(list(whole.values()))
    return [
        (part.parameters, samples * part.activations, channel.capacity(part, full, batch_size=samples))
        for part in parts
    ]


def _paper_setting(model: str) -> tuple[Resolved, Problem]:
    dataset = {"resnet20": "cifar10", "femnist_cnn": "femnist", "bilstm": "imdb"}[model]
    return resolve(Config(dataset=dataset, method=("embracing", "width_reduction"))), _PAPER_PROBLEMS[model]


def timing_table(batch_size: int) -> Table:
    """Table 8 for the device profile: milliseconds of one batch of ResNet-20, and those published for 32 samples."""
    config, problem = _paper_setting("resnet20")
    config = resolve(Config(dataset="cifar10", method=config.method, batch_size=batch_size, local_steps=1))
    table = Table(
        title=f"Table 8: milliseconds of one batch of {batch_size} on a {DEVICE} (profile here | paper, 32 samples)",
        caption="The profile is fitted to EmbracingFL's strong row and I/O column; the other numbers follow from it.",
    )
    for heading in ("method", "client", "forward", "I/O", "backward"):
        table.add_column(heading, justify="left" if heading in ("method", "client") else "right")
    for method, published in paper.TIMING.items():
        for label, cost in zip(CLASSES, class_costs(config, method, problem), strict=True):
            here = (cost.seconds.forward, cost.seconds.io, cost.seconds.backward)
            cells = [
                "-" if theirs is None else f"{1000 * mine:,.1f} | {theirs:,.1f}"
                for mine, theirs in zip(here, published[label], strict=True)
            ]
            table.add_row(method, label, *cells)
    return table
