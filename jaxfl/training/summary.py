"""The summary, the closing table and results.csv of a run, made from its lines in metrics.jsonl."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import rich.table

from jaxfl.core.check import one_of
from jaxfl.core.lines import Lines
from jaxfl.core.outputs import csv_text, read_csv, varying
from jaxfl.privacy.statements import caption as statements_in_short
from jaxfl.privacy.statements import neighbors, simulation, statement_text
from jaxfl.training.case import larger_is_worse
from jaxfl.training.chunks import COSTS
from jaxfl.training.fitting_table import FittingTable
from jaxfl.training.json_files import jsonable, write_atomically

STATUSES = ("finished", "budget_spent", "stopped_early", "diverged", "stopped")
WHOLE = STATUSES[:3]  # ways to end in which the last line counts
EARLY = "a hook ended the run by what it measured, and no epsilon covers the choice of the round"

FEWEST_RANKED = 5  # with as many cases they are sorted, and the best one is named
_MOST_ROWS = 20  # of the closing table
_MOST_STATED = 6  # cases with their statements above the table; for more, ranges of epsilon
_TOTALS = {name: f"total_{name}" for name in COSTS}
_NOT_METRICS = ("case", "seed", "round", *COSTS, *_TOTALS.values())
RESULTS = "results.csv"
_EPSILON = ("dp_epsilon", "dp_delta", "neighboring_relation", "observer")
_BOUNDS = ("proven", "published", "reconstructed")

Statements = Callable[..., Sequence[Mapping[str, Any]]]


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and sample standard deviation over seeds; None among the values stands for a seed that did not end.

    The mean is None without values, the standard deviation with fewer than two.

    Examples:
        >>> spread([1.0, 3.0, None])
        {'mean': 2.0, 'std': 1.4142135623730951, 'per_seed': [1.0, 3.0, None]}
    """
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    return {
        "mean": float(known.mean()) if known.size else None,
        "std": float(known.std(ddof=1)) if known.size > 1 else None,
        "per_seed": list(values),
    }


def rounds_to_target(
    lines: Lines, seeds: Sequence[int], target: float, metric: str = "test_accuracy"
) -> list[int | None]:
    """The first evaluated round of each seed in which a metric reaches a target; None where it never does.

    Examples:
        >>> lines = Lines({"case": "A", "seed": 0, "round": r, "test_accuracy": r / 10} for r in (0, 5, 10))
        >>> rounds_to_target(lines, [0, 1], 0.4)
        [5, None]
    """
    of_line, rounds, values = lines.columns("seed", "round", metric)
    reached = [rounds[(of_line == seed) & (values >= target)].tolist() for seed in seeds]
    return [min(rounds, default=None) for rounds in reached]


def summarize_run(
    lines: Lines,
    ended: Mapping[tuple[str, int], Mapping[str, Any]],
    cases: Mapping[str, Mapping[str, Any]],
    *,
    config: Mapping[str, Any],
    status: str,
) -> dict[str, Any]:
    """The content of summary.json.

    Args:
        lines: of metrics.jsonl.
        ended: (case, seed) -> how it ended, as `Lockstep.run` gives it; lanes that did not end are missing.
        cases: name -> "seeds", "settings", "privacy", a function from rounds and totals to statements, and
            "released", the names of these totals; in their order.
        config: content of config.json.
        status: of the run, one of `STATUSES`; "stopped" by a fatal count.

    Returns:
        Per case: "rounds" (largest over seeds) and "rounds_per_seed"; in the form of `spread`, every metric of each
        seed's last line, every count summed over its lines, and "costs"; "privacy"; "status" of each seed and, where
        one is not finished, "reason". A seed that diverged or was stopped has no metrics.
        "seconds": compile; run (of rounds and of evaluations between two chunks, without checkpoints); per_round, which
        is run divided by the rounds that were timed, lane by lane; rounds_a_call, the least and the most rounds of a
        compiled call. `train` adds "command", the seconds of its `Clock`.
    """
    one_of(STATUSES, status=status)
    last, by_case, described = lines.ends(), lines.by_case(), {}
    for case, facts in cases.items():
        records = [ended.get((case, seed), {}) for seed in facts["seeds"]]
        whole = [
            last.get((case, seed)) if record.get("status") in WHOLE else None
            for seed, record in zip(facts["seeds"], records, strict=True)
        ]
        own = by_case.get(case, Lines())
        present = own.names()
        names = [name for name in present if name not in _NOT_METRICS]
        counts = [name for name in names if present[name]]
        rounds = [last[case, seed]["round"] if (case, seed) in last else 0 for seed in facts["seeds"]]
        ran = max(*rounds, *(record.get("until", 0) for record in records), 0)
        totals = {name: _most(last, records, case, facts["seeds"], name) for name in facts.get("released", ())}
        stated = [dict(each) for each in facts["privacy"](ran, **totals)] if facts.get("privacy") else []
        if any(record.get("status") == "stopped_early" for record in records):
            stated = [each | {"assumptions": (*each.get("assumptions", ()), EARLY)} for each in stated]
        described[case] = {
            "rounds": max(rounds),
            "rounds_per_seed": rounds,
            **({"settings": dict(facts["settings"])} if facts.get("settings") else {}),
            "status": [record.get("status") for record in records],
            **({"reason": [r.get("reason") for r in records]} if any(r.get("reason") for r in records) else {}),
            **{name: spread(_values(whole, name)) for name in names if name not in counts},
            **{
                name: spread([None if line is None else sums.get(line["seed"], 0) for line in whole])
                for name, sums in ((name, own.sums_of(name)) for name in counts)
            },
            "privacy": stated,
            "costs": {name: spread(_values(whole, total)) for name, total in _TOTALS.items() if total in present},
        }
    seconds = [record["seconds"] for record in ended.values()]
    run = sum(record["run"] for record in seconds)
    timed = sum(record["timed_rounds"] for record in seconds)
    at_once = [record["rounds_a_call"] for record in seconds]
    return {
        "experiment": config["experiment"],
        "preset": config["preset"],
        "status": status,
        "seeds": list(dict.fromkeys(seed for facts in cases.values() for seed in facts["seeds"])),
        "cases": described,
        "seconds": {
            "compile": sum(record["compile"] for record in seconds),
            "run": run,
            "per_round": run / timed if timed else None,
            "rounds_a_call": [min(at_once), max(at_once)] if at_once else None,
        },
        "environment": dict(config["environment"]),
    }


def _most(
    last: Mapping[tuple[str, int], Mapping[str, Any]],
    records: Sequence[Mapping[str, Any]],
    case: str,
    seeds: Sequence[int],
    name: str,
) -> int:
    """A total over all rounds that ran, the largest over seeds; 0 without any."""
    in_lines = [last[case, seed][f"total_{name}"] for seed in seeds if (case, seed) in last]
    return max(*in_lines, *(record["released"][name] for record in records if record), 0, 0)


def every_node(
    cases: Mapping[str, Mapping[str, Any]], names: Mapping[str, Sequence[str] | None]
) -> dict[str, list[dict[str, Any]]]:
    """Take the epsilons of all nodes out of the statements of a summary's cases, in place, and leave the median.

    Returns:
        Case -> a row for each statement with an epsilon: its bound, relation and delta; "node_epsilons", for each
        partition of the data a list over nodes; "nodes", their names, where `names` gives any for the case.
    """
    content: dict[str, list[dict[str, Any]]] = {}
    for name, row in cases.items():
        for stated in row["privacy"]:
            own = list(stated.pop("node_epsilons", ()))
            if own:
                stated["dp_epsilon_median_node"] = float(np.median(own))
                grounds = {key: stated.get(key) for key in ("bound", "neighboring_relation", "dp_delta", "observer")}
                parts = np.reshape(own, (-1, stated["nodes"])).tolist()
                called = {} if names[name] is None else {"nodes": names[name]}
                content.setdefault(name, []).append({**grounds, **called, "node_epsilons": parts})
    return content


def _values(lines: Sequence[Mapping[str, Any] | None], name: str) -> list[float | None]:
    """One number for each line; None without a line, or where the line lacks it."""
    return [None if line is None else line.get(name) for line in lines]


def deciding(summary: Mapping[str, Any], metrics: Sequence[str]) -> str:
    """The first of the metrics that some case has; an empty string without any."""
    return next((name for name in metrics if any(name in row for row in summary["cases"].values())), "")


def ranking(summary: Mapping[str, Any], metrics: Sequence[str]) -> list[str]:
    """The cases from best to worst.

    Args:
        summary: content of summary.json.
        metrics: the first one that some case has decides, by its mean over seeds: the smallest value if
            `larger_is_worse`, else the largest.

    Returns:
        Names. A case without this number is last.

    Examples:
        >>> rows = {name: {"test_accuracy": {"mean": mean}} for name, mean in (("A", 0.2), ("B", None), ("C", 0.9))}
        >>> ranking({"cases": rows}, ["test_accuracy"])
        ['C', 'A', 'B']
    """
    cases, metric = summary["cases"], deciding(summary, metrics)
    means = {case: (row.get(metric) or {}).get("mean") for case, row in cases.items()}
    sign = 1 if larger_is_worse(metric) else -1
    return sorted(cases, key=lambda case: math.inf if (mean := means[case]) is None else sign * mean)


def summary_table(
    summary: Mapping[str, Any],
    metrics: Sequence[str] = ("test_accuracy", "test_accuracy_worst_node", "test_accuracy_average_model", "train_loss"),
    rank_by: str | None = None,
) -> rich.table.Table:
    """The closing table: a row a case, mean ± deviation over seeds; from five on by rank, baselines last.

    Args:
        summary: content of summary.json.
        metrics: columns; those that no case has are left out.
        rank_by: the metric that sorts; default: the first column.

    Returns:
        A table for `rich.console.Console.print`. Above it stands every case's epsilon with its bound, neighboring
        relation and delta, for many cases the range, and what neighboring data are. Its last column says what all
        nodes sent and, with a ledger, the simulated time and the energy of the whole run. Its caption says how lanes
        ended that did not finish.
    """
    cases, half = summary["cases"], _MOST_ROWS // 2
    decide = metrics if rank_by is None else (rank_by, *metrics)
    if len(cases) >= FEWEST_RANKED:
        ranked = sorted(
            ranking(summary, decide), key=lambda name: bool(cases[name].get("settings", {}).get("baseline"))
        )
        ranked = ranked if len(ranked) <= _MOST_ROWS else [*ranked[:half], ranked[-1]]
        cases = {name: cases[name] for name in ranked}
    shown = [name for name in metrics if any(name in row for row in cases.values())]
    count = len(summary["seeds"])
    over = f"mean ± standard deviation over {count} seeds" if count > 1 else f"seed {summary['seeds'][0]}"
    lines = [f"{over}, {summary['status'].replace('_', ' ')}"]
    if len(cases) >= FEWEST_RANKED and deciding(summary, decide):
        last = ", baselines last" if any(row.get("settings", {}).get("baseline") for row in cases.values()) else ""
        lines.append(f"sorted by {deciding(summary, decide).replace('_', ' ')}{last}")
    if len(cases) < len(summary["cases"]):
        lines.append(f"the best {half} of {len(summary['cases'])} cases and the last; all are in results.csv")
    stated = {name: row.get("privacy", ()) for name, row in summary["cases"].items()}
    if len(stated) > _MOST_STATED:
        claims = statements_in_short(stated)
    else:
        claims = [f"{name}: {statement_text(each)}" for name, statements in stated.items() for each in statements]
        claims += simulation(stated)
    claims += neighbors(each for statements in stated.values() for each in statements)
    costs = {name: _costs_text(row.get("costs", {})) for name, row in cases.items()}
    troubled = any(trouble(row) for row in cases.values())
    title, caption = "\n".join([summary["experiment"], *claims]), "\n".join(lines)
    table = FittingTable(file=RESULTS, title=title, title_justify="left", caption=caption)
    options, named = varying({name: row.get("settings", {}) for name, row in summary["cases"].items()})
    for option in options:
        table.add_column(option, overflow="fold")  # values with the same first letters must stay distinct
    table.add_column("rounds", justify="right")
    for name in shown:
        table.add_numbers(name.replace("_", " ") + (" (%)" if in_percent(name) else ""))
    if any(costs.values()):
        table.add_column("nodes sent, time, energy", justify="right")
    if troubled:
        table.add_column("status", overflow="fold")
    for case, row in cases.items():
        cells = [format_spread(name, row.get(name)) for name in shown]
        cells += [costs[case]] if any(costs.values()) else []
        table.add_row(*named[case], str(row["rounds"]), *cells, *([trouble(row)] if troubled else []))
    return table


def _costs_text(costs: Mapping[str, Any]) -> str:
    """Format the bits sent by all nodes and, where known, the simulated time and the energy, as means over seeds."""
    units = {"bits_sent": "bit", "simulated_seconds": "s", "joules": "J"}
    means = {name: costs[name]["mean"] for name in units if name in costs}
    return " ".join(with_prefix(mean, units[name]) for name, mean in means.items() if mean is not None)


def with_prefix(value: float, unit: str) -> str:
    """Three digits and a unit with its SI prefix, without a space, at which a narrow table would break the line.

    Examples:
        >>> with_prefix(74_065_920, "bit"), with_prefix(0.00149, "J"), with_prefix(0.0, "s"), with_prefix(999.9, "s")
        ('74.1Mbit', '1.49mJ', '0s', '1ks')
    """
    rounded = float(f"{value:.3g}")
    power = min(max(math.floor(math.log10(abs(rounded)) / 3), -4), 5) if rounded else 0
    return f"{rounded / 1000.0**power:.3g}{' kMGTPpnµm'[power].strip()}{unit}"


def trouble(row: Mapping[str, Any]) -> str:
    """Describe the ends of the seeds that did not finish. The text is empty if all finished."""
    statuses = row.get("status", ())
    bad = [status for status in STATUSES[2:] if status in statuses]
    texts = [f"{statuses.count(status)} of {len(statuses)} {status}" for status in bad]
    return ", ".join(bad if len(statuses) == 1 else texts).replace("_", " ")


def in_percent(name: str) -> bool:
    """True for a metric that is shown in per cent."""
    return "accuracy" in name or "_auc" in name


def format_spread(name: str, value: Mapping[str, Any] | None) -> str:
    r"""One cell: accuracies in per cent, other numbers with three digits.

    Examples:
        >>> format_spread("test_accuracy", {"mean": 0.9123, "std": 0.004})
        '91.2\xa0±\xa00.4'
        >>> format_spread("train_loss", {"mean": 0.25, "std": None})
        '0.25'
    """
    if value is None or value["mean"] is None:
        return "-"
    parts = [part for part in (value["mean"], value["std"]) if part is not None]
    texts = [f"{100 * part:.1f}" if in_percent(name) else f"{part:.3g}" for part in parts]
    # No-break spaces: `FittingTable` breaks no line there.
    return "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}".join(texts)


def write_results(
    path: Path,
    lanes: Mapping[tuple[str, int], Mapping[str, Any]],
    last: Mapping[tuple[str, int], Mapping[str, Any]],
    settings: Mapping[str, Mapping[str, Any]],
    privacy: Mapping[str, Statements],
) -> None:
    """Replace results.csv: a row a case and seed with the options that vary, last metrics, costs, epsilon and its end.

    Args:
        path: of the file.
        lanes: (case, seed) -> how it ended, as `Lockstep.run` gives it, in the order of the rows.
        last: (case, seed) -> its last line, as `Lines.ends` gives it.
        settings: case -> the options that vary.
        privacy: case -> function from the rounds that ran, and totals by name, to statements.

    Guarantees:
        - resumed equals uninterrupted, byte for byte, but for the last column, the seconds that the rounds took.
        - no two columns have one name: an option named like another column is option_NAME.
    """
    metrics = list(dict.fromkeys(name for lane in lanes for name in last.get(lane, ())))[3:]
    options = list(dict.fromkeys(name for case, _ in lanes for name in settings[case]))
    stated = {
        lane: privacy[lane[0]](record["until"], **record.get("released", {})) if lane[0] in privacy else ()
        for lane, record in lanes.items()
    }
    stated_bounds = {statement["bound"] for statements in stated.values() for statement in statements}
    bounds = [bound for bound in _BOUNDS if bound in stated_bounds]
    ending = ["status", "rounds", *metrics, *(f"{bound}_{name}" for bound in bounds for name in _EPSILON)]
    ending += ["reason", "seconds"]
    columns = [f"option_{name}" if name in ("case", "seed", *ending) else name for name in options]
    header = ["case", "seed", *columns, *ending]
    rows = []
    for (case, seed), record in lanes.items():
        line = last.get((case, seed), {})
        row = [case, seed, *(settings[case].get(name) for name in options), record["status"], record["until"]]
        row += [line.get(name) for name in metrics]
        for bound in bounds:
            first = next((each for each in stated[case, seed] if each["bound"] == bound), {})
            row += [first.get(name) for name in _EPSILON]
        row += [record["reason"], f"{record['seconds']['run']:.3f}"]
        rows.append(dict(zip(header, row, strict=True)))
    write_table(path, rows)


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace a CSV file; the first row has all columns."""
    cells = [[jsonable(row[name], name) for name in rows[0]] for row in rows]
    write_atomically(path, csv_text([list(rows[0]), *cells]).encode())


def read_results(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a results.csv, or of that in a run directory: numbers as numbers, empty cells as None.

    It also reads sites.csv, named by its path.
    """
    path = Path(path)
    return [
        {name: text if name in ("case", "site") else _value(text) for name, text in row.items()}
        for row in read_csv(path / RESULTS if path.is_dir() else path)
    ]


@lru_cache(maxsize=4096)  # most columns have few values
def _value(text: str) -> Any:
    for kind in () if not text else (float,) if "." in text else (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None
