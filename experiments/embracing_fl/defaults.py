"""Derived options, checks and names of cases in experiments.embracing_fl."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from jaxfl.core import ArgumentError, check
from jaxfl.frame import Overlay, Row, flat
from jaxfl.frame.options import text_of

from . import paper
from .methods import CLASSES, NARROW, counts_of, label_of
from .networks import RESNETS, narrow
from .options import Configuration

_SMALL_DIGITS = {"nodes": 16, "model": "mlp", "rounds": 150, "step_size": 0.03, "participation_rate": 0.5, "alpha": 0.5}
DATASETS = {
    # With alpha 0.1 its two strong clients know a class or two. Which ones they know decides much: five seeds.
    "digits": Overlay(_SMALL_DIGITS, ({"seed": (0, 1, 2, 3, 4)},)),
    "cifar10": Overlay({"model": "resnet20", "rounds": 1000, "step_size": 0.4}),
    "imdb": Overlay({"model": "bilstm", "rounds": 400, "step_size": 0.1}),
    "femnist": Overlay({"partition": "writers"}),
}
_DECAYS = {"cifar10": (0.8, 0.9), "imdb": (0.5, 0.75)}  # shares of all rounds
_OF_MODEL: dict[str, dict[str, Any]] = {
    "resnet20": {"cut_moderate": "block_2_1", "cut_weak": "block_3_1", "resnet_blocks": (3, 3, 3)},
    "resnet8": {"cut_moderate": "block_2_1", "cut_weak": "block_3_1", "resnet_blocks": (1, 1, 1)},
    "femnist_cnn": {"cut_moderate": "dense_1", "cut_weak": "dense_2", "hidden": (2048,)},
    "bilstm": {"cut_moderate": "lstm", "cut_weak": "lstm"},
}
Options: TypeAlias = Mapping[str, Any]
Names: TypeAlias = Collection[str]


def of_model(name: str, options: Options, names: Names = ()) -> Any:
    """Value of an option that suits the model."""
    if options["model"] == "mlp" and name in ("cut_moderate", "cut_weak"):
        last = f"dense_{len(options['hidden']) + 1}"
        return "dense_2" if options["hidden"] and name == "cut_moderate" else last
    if name == "frozen_words":
        return 128 if options["model"] == "bilstm" and options["cut_weak"] != "dense" else 0
    return _OF_MODEL.get(options["model"], {}).get(name, options[name])


def _count(number: int, options: Options, names: Names) -> int:
    shares = paper.CASES.get(options["case"], (0, 0, 0))
    return shares[number] * options["nodes"] // paper.NUM_CLIENTS


def _num_active(options: Options, names: Names) -> int:
    total = sum(counts_of(options["method"], *(options[name] for name in CLASSES)))
    rate = 1 if options["method"] == "alone" else options["participation_rate"] or 0
    return max(1, round(rate * total)) if rate <= 1 else total  # a larger rate is refused later


def _decay_rounds(options: Options, names: Names) -> tuple[int, ...]:
    rounds = options["rounds"]
    decays = {round(share * rounds) for share in _DECAYS.get(options["dataset"], ())}  # a few rounds have fewer
    return tuple(sorted(number for number in decays if 0 < number < rounds))


OF_MODEL = {
    name: functools.partial(of_model, name)
    for name in ("resnet_blocks", "hidden", "cut_moderate", "cut_weak", "frozen_words")
}
DERIVED = {
    "case": lambda options, names: None if {*CLASSES} & {*names} else options["case"],
    **{name: functools.partial(_count, number) for number, name in enumerate(CLASSES)},
    "participation_rate": lambda options, names: None if "num_active" in names else options["participation_rate"],
    "num_active": _num_active,
    **OF_MODEL,
    "batch_norm": lambda options, names: (
        "static" if options["method"] in NARROW and options["model"] in RESNETS else "global"
    ),
    "frozen_batch_norm": lambda options, names: "batch" if options["batch_norm"] == "static" else "running",
    "decay_rounds": _decay_rounds,
    "evaluate_every": lambda options, names: max(1, options["rounds"] // 20),
}


def name_of(options: Options, varied: Collection[str]) -> str:
    """The name of a line: its clients, its method, and what else varies."""
    clients = label_of(options.get("case"), tuple(options.get(name, 0) for name in CLASSES))
    parts = [f"{clients} {options.get('method', '')}".strip()]
    varies = {"case", *CLASSES} & {*varied} & {*options}
    own_names = {"method", "case", *CLASSES, *(("target_accuracy",) if varies else ())}
    for name in [name for name in varied if name in options and name not in own_names]:
        value = text_of(options[name]) or "none"
        parts.append(value if name == "batch_norm" else f"{name.replace('_', ' ')} {value}")
    return ", ".join(parts)


def _alone(row: Row) -> dict[str, Any]:
    """All clients, each with the whole model."""
    clients = row.config.participation
    active = clients.strong + clients.moderate + clients.weak
    return {"method": "alone", "participation_rate": None, "num_active": active, "batch_norm": "global"}


def _pooled(row: Row) -> dict[str, Any]:
    """One client with all samples, in batches of as many as the active clients take together."""
    clients = row.config.participation
    total, rate = clients.strong + clients.moderate + clients.weak, clients.participation_rate
    batch_size = row.config.steps.batch_size * (clients.num_active if rate is None else max(1, round(rate * total)))
    one = {"nodes": 1, "partition": "iid", "case": None, "strong": 1, "moderate": 0, "weak": 0}
    return {**_alone(row), **one, "num_active": 1, "batch_size": batch_size}


BASELINES = {"alone": _alone, "pooled": _pooled}


def check_config(config: Configuration) -> None:
    """Refuse values out of range and what does not go together, before any work."""
    learning, steps = config.learning, config.steps
    steps.check()
    check.at_least(1, nodes=config.clients.nodes, evaluate_every=config.run.evaluate_every)
    check.at_least(1, calibration_samples=learning.calibration_samples)
    check.at_least(0, frozen_words=learning.frozen_words)
    check.positive(step_size=steps.step_size)
    config.network.check()
    for name in ("participation_rate", "width_moderate", "width_weak", "target_accuracy"):
        value = flat(config)[name]
        if value is not None and not 0 < value <= 1:
            raise ArgumentError(name, "must lie in (0, 1]", f"got {value}", "Pass a share, 0.25 for instance.")
    _check_clients(config)
    decays = steps.decay_rounds
    if list(decays) != sorted(set(decays)) or any(not 0 < number < steps.rounds for number in decays):
        requirement = f"must be ascending and above 0, below the {steps.rounds} rounds"
        raise ArgumentError("decay_rounds", requirement, f"got {list(decays)}", "Leave it out, or change the rounds.")
    if config.clients.partition == "writers" and config.data.num_train is not None:
        requirement, found = "must be left out where whole writers are dealt", f"got {config.data.num_train}"
        raise ArgumentError("num_train", requirement, found, "Leave it out, or take fewer nodes.")
    if learning.method in NARROW:
        if learning.width_weak > learning.width_moderate:
            found = f"got {learning.width_weak} beside {learning.width_moderate}"
            raise ArgumentError("width_weak", "must not exceed the moderate clients' width", found, "Exchange the two.")
        for name in ("width_moderate", "width_weak"):
            layers, width = config.network.widths(), getattr(learning, name)
            if 0 in narrow(layers, width):
                found = f"got {width} of {min(layers)}"
                raise ArgumentError(name, "must leave every layer a channel", found, "Pass more.")
    if learning.masked_loss and config.network.model == "bilstm":  # a client without label 1 would learn nothing
        found = "got bilstm, which has one logit"
        raise ArgumentError("masked_loss", "needs a logit for each class", found, "Leave it out.")
    if config.is_static and learning.method == "first_half":
        found = "got static for first_half, whose last blocks evaluate"
        raise ArgumentError("batch_norm", "must have statistics where blocks evaluate", found, "Pass global.")
    if config.is_static and learning.method == "embracing" and learning.frozen_batch_norm == "running":
        requirement = "must be batch without running statistics"
        raise ArgumentError("frozen_batch_norm", requirement, "got running with static", "Pass batch.")


def _check_clients(config: Configuration) -> None:
    """Refuse cases and counts that the nodes do not make."""
    clients, nodes, counts = config.participation, config.clients.nodes, config.counts
    if clients.case is not None:
        check.one_of(tuple(paper.CASES), case=clients.case)
        if any(count * nodes % paper.NUM_CLIENTS for count in paper.CASES[clients.case]):
            shares = ", ".join(f"{count}/{paper.NUM_CLIENTS}" for count in paper.CASES[clients.case])
            requirement = f"must make whole numbers of case {clients.case}'s {shares}"
            raise ArgumentError("nodes", requirement, f"got {nodes}", "Pass 16 or 32.")
    numbers = clients.strong, clients.moderate, clients.weak
    for name, count in zip(CLASSES, numbers, strict=True):
        check.at_least(0, **{name: count})
    if not 1 <= sum(numbers) <= nodes:
        found = f"got {nodes} for {' + '.join(map(str, numbers))} clients"
        raise ArgumentError("nodes", "must be at least the clients, and one must be there", found, "Pass more.")
    if not sum(counts):
        found = f"{label_of(clients.case, numbers)} has none"
        raise ArgumentError("method", "must have strong clients for fed_avg", found, "Leave fed_avg out.")
    check.at_least(1, num_active=clients.num_active)
    if clients.num_active > sum(counts):
        found = f"got {clients.num_active}, and {label_of(None, counts)} {config.learning.method} has {sum(counts)}"
        raise ArgumentError("num_active", "must be at most the clients", found, "Pass fewer, or a rate.")
