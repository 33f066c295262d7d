"""Which comparisons and variants the options of experiments.embracing_fl ask for."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from experiments.partial import paper
from experiments.partial.config import CLASSES, NARROW, RESNETS, BatchNorm, Method, Resolved
from jaxfl.core import ArgumentError, check


class Setting(NamedTuple):
    """How many clients of each class there are."""

    case: int | None  # of Table 3
    counts: tuple[int, int, int]  # strong, moderate, weak

    @property
    def label(self) -> str:
        """Short, for the names of variants."""
        if self.case is not None:
            return f"case {self.case}"
        return " ".join(f"{count} {name}" for count, name in zip(self.counts, CLASSES, strict=True) if count)


class Variant(NamedTuple):
    """The settings of one variant."""

    method: Method
    case: int | None
    counts: tuple[int, int, int]  # strong, moderate, weak clients that take part
    num_active: int | tuple[int, ...]  # of all, or of each class
    batch_norm: BatchNorm
    target_accuracy: float | None


def settings(config: Resolved) -> list[Setting]:
    """What is compared: cases, or counts.

    Raises:
        ArgumentError: a case whose shares of the clients are no whole numbers, counts that do not fit each other, or
            more clients than nodes.
    """
    given = [getattr(config, name) for name in CLASSES]
    if all(counts is None for counts in given):
        return [Setting(case, _shares(config, case)) for case in config.cases or (9,)]
    several = {len(counts) for counts in given if counts is not None and len(counts) != 1}
    if len(several) > 1 or 0 in several:
        name = next(name for name, counts in zip(CLASSES, given, strict=True) if counts is not None and len(counts) > 1)
        found = f"got {', '.join(str(len(counts)) for counts in given if counts is not None)}"
        raise ArgumentError(name, "must be one number, or as many as for the others", found, "Pass as many of each.")
    length = max(several, default=1)
    columns = [
        (0,) * length if counts is None else counts * (1 if len(counts) == length else length) for counts in given
    ]
    found_settings = [Setting(None, (int(s), int(m), int(w))) for s, m, w in zip(*columns, strict=True)]
    for setting in found_settings:
        for name, count in zip(CLASSES, setting.counts, strict=True):
            check.at_least(0, **{name: count})
        if not 1 <= sum(setting.counts) <= config.nodes:
            found = f"got {config.nodes} for {' + '.join(map(str, setting.counts))} clients"
            raise ArgumentError(
                "nodes", "must be at least the clients, of which one must be there", found, "Pass more."
            )
    if len(set(found_settings)) != len(found_settings):
        name = next(name for name, counts in zip(CLASSES, given, strict=True) if counts is not None)
        raise ArgumentError(name, "must make different comparisons", f"got {given}", "List each once.")
    return found_settings


def _shares(config: Resolved, case: int) -> tuple[int, int, int]:
    """The clients of a case of Table 3, of this run's number of nodes."""
    strong, moderate, weak = paper.CASES[case]
    if any(count * config.nodes % paper.NUM_CLIENTS for count in (strong, moderate, weak)):
        shares = ", ".join(f"{count}/128" for count in (strong, moderate, weak))
        raise ArgumentError(
            "nodes", f"must make whole numbers of case {case}'s {shares}", f"got {config.nodes}", "Pass 16 or 32."
        )
    of_nodes = [count * config.nodes // paper.NUM_CLIENTS for count in (strong, moderate, weak)]
    return of_nodes[0], of_nodes[1], of_nodes[2]


def plan(config: Resolved) -> dict[str, Variant]:
    """Name -> settings of every variant.

    FedAvg has the strong clients of a comparison alone, and is named by their number.

    Raises:
        ArgumentError: as `settings`; a comparison without strong clients for FedAvg, more active clients than there
            are, targets for other than the comparisons.
    """
    variants: dict[str, Variant] = {}
    compared = settings(config)
    targets = config.target_accuracy or (None,)
    if len(targets) not in (1, len(compared)):
        found = f"got {len(targets)} for {len(compared)}"
        raise ArgumentError("target_accuracy", "must be one, or one for each case", found, "Pass as many.")
    targets = targets * (len(compared) // len(targets))
    for (setting, target), method in itertools.product(zip(compared, targets, strict=True), config.method):
        label, counts, case = setting.label, setting.counts, setting.case
        if method == "fed_avg":
            if not counts[0]:
                found = f"{label} has none"
                raise ArgumentError("method", "must have strong clients for fed_avg", found, "Leave fed_avg out.")
            label, counts, case = f"{counts[0]} strong", (counts[0], 0, 0), case if case == 1 else None
        modes = config.batch_norm or (("static",) if method in NARROW and config.model in RESNETS else ("global",))
        for mode in modes:
            name = f"{label} {method}" + (f", {mode}" if len(modes) > 1 else "")
            num_active = _num_active(config, name, counts)
            variants[name] = Variant(method, case, counts, num_active, mode, target)
    return variants


def _num_active(config: Resolved, name: str, counts: tuple[int, int, int]) -> int | tuple[int, ...]:
    """Active clients in a round: of all, or if stratified of each class, by largest remainders."""
    total = sum(counts)
    wanted = config.num_active
    if wanted is None:
        assert config.participation_rate is not None
        wanted = max(1, round(config.participation_rate * total))
    if wanted > total:
        found = f"got {wanted}, and {name} has {total}"
        raise ArgumentError("num_active", "must be at most the clients", found, "Pass fewer, or a rate.")
    if config.sampling == "uniform":
        return wanted
    whole = [count * wanted // total for count in counts]
    rest = [count * wanted % total for count in counts]
    for number in sorted(range(3), key=lambda number: -rest[number])[: wanted - sum(whole)]:
        whole[number] += 1
    return tuple(whole)
