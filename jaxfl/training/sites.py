"""Sites, the nodes of a run: sites.csv, a row for each case, seed and node, and the table of a run's best case.

A row holds the node's number of samples, its epsilon by the case's first privacy statement, its noise, and its model's
metric at the last line. If the run has a case `alone` of the same seeds, in which every node learns by itself, the row
holds that case's metric, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import rich.table

from jaxfl.privacy.statements import RELATIONS, against, noise_text, rounded_up
from jaxfl.training.case import larger_is_worse
from jaxfl.training.fitting_table import FittingTable
from jaxfl.training.lanes import Lane
from jaxfl.training.summary import format_spread, in_percent, spread

SITES = "sites.csv"
_ALONE = "alone"  # a part of the name of the case in which every site learns by itself
_MOST_ROWS = 20  # of the table; with more sites it shows the worst ones, half as many
_GROUND = ("dp_epsilon", "dp_delta", "bound", "neighboring_relation", "observer")
_NOT_METRICS = ("case", "seed", "site", "samples", *_GROUND, "noise_std")

Rows = list[dict[str, Any]]


def site_rows(
    lanes: Sequence[Lane],
    records: Mapping[tuple[str, int], Mapping[str, Any]],
    statements: Mapping[str, Sequence[Mapping[str, Any]]],
) -> Rows:
    """The rows of sites.csv; none where every lane has one node.

    Args:
        lanes: in their order.
        records: (case, seed) -> how it ended; "nodes" has metrics, (n,) each, or (1,) if all share a model.
        statements: case -> its statements, with the epsilon of every node.
    """
    rows: Rows = []
    of_seeds: dict[tuple[str, int], dict[int, list[float | None]]] = {}  # epsilons of a case's nodes, once for all
    metrics = dict.fromkeys(name for record in records.values() for name in record.get("nodes", ()))
    alone = [lane for lane in lanes if _ALONE in lane.name.split(", ")]
    for lane in lanes:
        count, noise = len(lane.sizes), lane.case.noise_stds
        if count < 2 or lane.label not in records:
            continue
        stated = next((one for one in statements.get(lane.name, ()) if one["dp_epsilon"] is not None), {})
        if (lane.name, count) not in of_seeds:
            own: Any = stated.get("node_epsilons") or [stated.get("dp_epsilon")] * count
            parts, seeds = np.reshape(own, (-1, count)).tolist(), lane.case.seeds
            parts = parts if len(parts) == len(seeds) else parts[:1] * len(seeds)
            of_seeds[lane.name, count] = dict(zip(seeds, parts, strict=True))
        epsilons = of_seeds[lane.name, count][lane.seed]
        labels = lane.label, _beside(lane, alone)
        values = [records.get(label, {}).get("nodes", {}) for label in labels]
        for node in range(count):
            row = {"case": lane.name, "seed": lane.seed, "site": (lane.node_names or range(count))[node]}
            row |= {"samples": lane.sizes[node], **{name: stated.get(name) for name in _GROUND}}
            row |= {"dp_epsilon": epsilons[node], "noise_std": noise[node % len(noise)] if noise else None}
            for name in metrics:
                for column, nodes in zip((name, f"{name}_{_ALONE}"), values, strict=True):
                    own = nodes.get(name, ())
                    row[column] = own[node % len(own)] if len(own) in (1, count) else None
            rows.append(row)
    return rows


def _beside(lane: Lane, lanes: Sequence[Lane]) -> tuple[str, int]:
    """Label of the lane with the same seed and the most options in common; ("", seed) if there is none."""
    own = lane.case.settings.items()
    others = [other for other in lanes if other.seed == lane.seed]
    return max(others, key=lambda other: len(own & other.case.settings.items()), default=lane._replace(name="")).label


def site_table(rows: Sequence[Mapping[str, Any]], case: str) -> rich.table.Table | None:
    """The sites of a case, mean ± standard deviation over seeds; with more than 20 only the ten worst.

    Args:
        rows: of sites.csv, as `jaxfl.training.read_results` reads them.
        case: its name.

    Returns:
        A table for `rich.console.Console.print`; None where sites have neither names nor noise of their own.
    """
    groups: dict[Any, Rows] = {}
    for row in rows:
        if row["case"] == case:
            groups.setdefault(row["site"], []).append(dict(row))
    own_noise = len({row["noise_std"] for group in groups.values() for row in group}) > 1
    if not own_noise and [*map(str, groups)] == [*map(str, range(len(groups)))]:
        return None
    first = next(iter(groups.values()))[0]
    with_values = {name for own in groups.values() for row in own for name in row if row[name] is not None}
    metrics = [name for name in first if name in with_values and name not in _NOT_METRICS]
    spreads = {site: {name: spread([row[name] for row in own]) for name in metrics} for site, own in groups.items()}
    order, caption = list(groups), []
    if len(order) > _MOST_ROWS and metrics:
        sign = -1 if larger_is_worse(metrics[0]) else 1
        means = {site: own[metrics[0]]["mean"] for site, own in spreads.items()}
        order.sort(key=lambda site: -math.inf if (mean := means[site]) is None else sign * mean)
    if len(order) > _MOST_ROWS:
        order = order[: _MOST_ROWS // 2]
        caption.append(f"the {len(order)} {'worst' if metrics else 'first'} of {len(groups)} sites; all are in {SITES}")
    if first["dp_epsilon"] is not None:
        relation = RELATIONS.get(first["neighboring_relation"], first["neighboring_relation"])
        several = ", largest over seeds" if len(groups[first["site"]]) > 1 else ""
        caption.append(f"ε: {first['bound']}{against(first)} ({relation}, δ = {first['dp_delta']:g}){several}")
    table = FittingTable(file=SITES, title=f"Sites of {case}", caption="\n".join(caption))
    table.add_column("site", overflow="fold")
    for name in ("samples", "ε", "noise std"):
        table.add_column(name, justify="right")
    for name in metrics:
        label = name.replace("_", " ") + (" together" if f"{name}_{_ALONE}" in metrics else "")
        table.add_numbers(label + (" (%)" if in_percent(name) else ""))
    for site in order:
        own = groups[site]
        epsilons = [row["dp_epsilon"] for row in own if row["dp_epsilon"] is not None]
        cells = [_range(row["samples"] for row in own), rounded_up(max(epsilons), 4) if epsilons else "-"]
        cells.append(_range(row["noise_std"] for row in own))
        table.add_row(str(site), *cells, *(format_spread(name, spreads[site][name]) for name in metrics))
    return table


def _range(values: Iterable[float | None]) -> str:
    """The least and the largest value."""
    known = [value for value in values if value is not None]
    ends = dict.fromkeys(end(known) for end in (min, max) if known)
    return " to ".join(noise_text(end) if isinstance(end, float) else str(end) for end in ends) or "-"
