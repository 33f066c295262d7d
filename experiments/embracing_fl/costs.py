"""Costs of each class of clients: capacity, as the paper counts it, and seconds on its device; Tables 1, 8 and 10."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table

from jaxfl import algorithms, channel
from jaxfl.frame import flat, override

from . import paper
from .defaults import OF_MODEL
from .methods import CLASSES
from .networks import RESNETS, Form, Problem
from .options import Configuration
from .phone import ONEPLUS_9_PRO, RoundSeconds, partial_work, round_seconds

DEVICE = "OnePlus 9 Pro"
_SHAPES = {"resnet20": ((32, 32, 3), 10), "femnist_cnn": ((28, 28, 1), 62), "bilstm": ((256,), 2)}


class ClassCost(NamedTuple):
    """One class of clients under one method."""

    label: str
    clients: int  # how many
    capacity: float  # memory of a client's training, as a share of a strong client's
    params: int  # parameters that it trains
    activations: int  # activations that it keeps for this
    seconds: RoundSeconds  # of a round


def class_costs(config: Configuration, problem: Problem) -> list[ClassCost]:
    """Costs of a strong, a moderate and a weak client.

    Capacity is EmbracingFL's (2 p_w + 2 a_w) / (2 p + 2 a). Activations are those of a batch for resnets, of one sample
    for the other models, as the paper counts them. Where a client's first block is not followed by its own blocks
    alone (first_half, random_blocks), those behind it are differentiated, too, and their activations count.
    """
    network, steps = config.network, config.steps
    whole, blocks = channel.total(network.counts(problem)), network.task(problem).blocks
    samples = steps.batch_size if network.model in RESNETS else 1
    costs, firsts = [], []
    for label, count, share in zip(CLASSES, config.counts, config.shares(problem), strict=True):
        block_names = blocks if isinstance(share.blocks, int) else share.blocks
        firsts.append(block_names[0])
        # Activations are stored in front of its first block, and where a stronger class begins.
        last = blocks.index(block_names[0])
        cuts = tuple(first for first in dict.fromkeys(firsts) if 0 < blocks.index(first) <= last)
        form = Form(share.width)
        read = problem.sample_shape[0] - share.frozen_words, *problem.sample_shape[1:]  # with gradient
        layers = network.counts(problem._replace(sample_shape=read), form)
        backward = partial_work(layers, cuts).trained
        work = partial_work(network.counts(problem, form), cuts)._replace(trained=backward)
        samples_of_round = {"batch_size": steps.batch_size, "num_local_steps": steps.local_steps}
        seconds = round_seconds(work, ONEPLUS_9_PRO, **samples_of_round)
        parameters = sum(layers[name].parameters for name in block_names)
        if isinstance(share.blocks, int):  # drawn anew each round: their mean number
            parameters = round(parameters * share.blocks / len(blocks))
        part = backward._replace(parameters=parameters)
        capacity = algorithms.capacity(part, whole, batch_size=samples)
        costs.append(ClassCost(label, count, capacity, parameters, samples * part.activations, seconds))
    return costs


def average_capacity(costs: Sequence[ClassCost]) -> float:
    """Mean over clients of capacities with two digits: the paper's column "Avg. Capacity".

    Examples:
        >>> rows = ("strong", 16, 1.0), ("weak", 112, 0.15570)
        >>> two_digits(average_capacity([ClassCost(*row, 0, 0, RoundSeconds(0, 0, 0, 0)) for row in rows]))
        '0.27'
    """
    return sum(row.clients * round(100 * row.capacity) for row in costs) / sum(row.clients for row in costs) / 100


def two_digits(share: float) -> str:
    """Rounded half up, as the paper rounds 0.265 and 0.435."""
    return f"{math.floor(100 * share + 0.5 + 1e-9) / 100:.2f}"


def described(costs: Sequence[ClassCost]) -> dict[str, Any]:
    """Entries of summary.json on a case's clients."""
    present = [row for row in costs if row.clients]
    return {
        "clients": {row.label: row.clients for row in costs},
        "capacity": {**{row.label: row.capacity for row in present}, "average": average_capacity(costs)},
        "trained_params": {row.label: row.params for row in present},
        "device_seconds_per_round": {row.label: row.seconds._asdict() for row in present},
    }


def cost_lines(name: str, config: Configuration, costs: Sequence[ClassCost]) -> list[str]:
    """Lines for the screen about a case's clients and their costs."""
    each = f" ({' + '.join(map(str, config.num_active))})" if isinstance(config.num_active, tuple) else ""
    active = f"{config.participation.num_active} of {sum(config.counts)}{each} active a round"
    present = [row for row in costs if row.clients]
    shares = ", ".join(f"{row.clients} {row.label} (capacity {two_digits(row.capacity)})" for row in present)
    seconds = ", ".join(f"{row.label} {_seconds_text(row.seconds)}" for row in present)
    clients = f"{name}: {shares}, {active}; average capacity {two_digits(average_capacity(costs))}"
    if config.network.model not in _SHAPES:  # far from the networks that the phone was measured with
        return [clients]
    return [clients, f"  seconds a round on a {DEVICE}: {seconds}"]


def _seconds_text(seconds: RoundSeconds) -> str:
    labels = ("forward", "backward", "I/O", "link")
    parts = [f"{label} {value:.3g}" for label, value in zip(labels, seconds, strict=True) if value]
    return f"{sum(seconds):.3g} ({', '.join(parts)})"


def sizes_table() -> Table:
    """Tables 1 and 10 as counted on the models, and as published."""
    title = "Tables 1 and 10: parameters and activations of what a client trains (here | paper)"
    table = _table(title, "model", "parameters", "activations", "capacity")
    for name, published in paper.SIZES.items():
        model, _, is_narrow = name.partition(", ")
        costs = class_costs(*paper_setting(model, method="width_reduction" if is_narrow else "embracing"))
        for here, (params, activations, capacity) in zip(costs, published, strict=True):
            numbers = f"{here.params:,} | {params:,}", f"{here.activations:,} | {activations:,}"
            table.add_row(name, here.label, *numbers, f"{here.capacity:.4f} | {capacity:.2f}")
    return table


def timing_table(batch_size: int) -> Table:
    """Table 8 for the device profile: milliseconds of one batch of ResNet-20, and those published for 32 samples."""
    title = f"Table 8: milliseconds of one batch of {batch_size} on a {DEVICE} (profile here | paper, 32 samples)"
    table = _table(title, "method", "forward", "I/O", "backward")
    table.caption = "Fitted to EmbracingFL's strong row and I/O column; the other numbers follow from the profile."
    for method, published in paper.TIMING.items():
        setting = paper_setting("resnet20", method=method, batch_size=batch_size, local_steps=1)
        for row, of_class in zip(class_costs(*setting), published, strict=True):
            pairs = zip((row.seconds.forward, row.seconds.io, row.seconds.backward), of_class, strict=True)
            cells = ["-" if there is None else f"{1000 * here:,.1f} | {there:,.1f}" for here, there in pairs]
            table.add_row(method, row.label, *cells)
    return table


def _table(title: str, first: str, *numbers: str) -> Table:
    table = Table(first, "client", title=title)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def paper_setting(model: str, **changes: Any) -> tuple[Configuration, Problem]:
    """One of the paper's models on its data set."""
    config = override(Configuration(), {"model": model, **changes})
    for name, rule in OF_MODEL.items():
        config = override(config, {name: rule(flat(config))})
    return config, Problem(*_SHAPES[model])
