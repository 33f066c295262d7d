"""From the lines of a run to its summary and its closing table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import rich.table

from jaxfl.core.check import one_of
from jaxfl.privacy.statements import statement_text
from jaxfl.training.chunks import COSTS

STATUSES = ("finished", "budget_spent", "diverged", "stopped")

_NOT_METRICS = ("variant", "seed", "round", *(f"total_{name}" for name in COSTS))


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and sample standard deviation over seeds.

    Args:
        values: one a seed; None where a seed did not end.

    Returns:
        {"mean", "std", "per_seed"}; mean is None without values, std (divisor: number of seeds minus 1) with fewer
        than two.

    Example:
        >>> spread([1.0, 3.0, None])
        {'mean': 2.0, 'std': 1.4142135623730951, 'per_seed': [1.0, 3.0, None]}
    """
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    return {
        "mean": float(known.mean()) if known.size else None,
        "std": float(known.std(ddof=1)) if known.size > 1 else None,
        "per_seed": list(values),
    }


def summarize_run(
    lines: Sequence[Mapping[str, Any]],
    finished: Mapping[tuple[str, int], Mapping[str, Any] | None],
    *,
    experiment: str,
    preset: str | None,
    status: str,
    variants: Sequence[str],
    seeds: Sequence[int],
    privacy: Mapping[str, Callable[[int], Sequence[Mapping[str, Any]]]],
    environment: Mapping[str, Any],
    released: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The content of summary.json.

    Args:
        lines: of metrics.jsonl.
        finished: (variant, seed) -> record of `RunDirectory.mark_finished`, None for one that did not end.
        experiment, preset, environment: as in config.json.
        status: "finished", "budget_spent", "diverged" or "stopped" (by a fatal count).
        variants, seeds: in the order in which they are listed.
        privacy: variant -> function from rounds to statements.
        released: variant -> rounds that ran, where that is more than its last line says.

    Returns:
        Per variant: "rounds" (most over seeds) and "rounds_per_seed"; as `spread` gives them every metric of each
        seed's last line, every count summed over its lines, and "costs"; and "privacy".
        "seconds": compile, run (rounds alone, without evaluation and checkpoints), and per_round = run divided by the
        rounds that were timed.
    """
    one_of(STATUSES, status=status)
    last = {(line["variant"], line["seed"]): line for line in lines}
    described = {}
    for variant in variants:
        parts = [(variant, seed) for seed in seeds]
        ended = [last.get(part) if finished.get(part) else None for part in parts]
        own = [line for line in lines if line["variant"] == variant]
        names = [name for name in dict.fromkeys(name for line in own for name in line) if name not in _NOT_METRICS]
        counts = {name for name in names if any(isinstance(line.get(name), int) for line in own)}
        rounds = [last[part]["round"] if part in last else 0 for part in parts]
        described[variant] = {
            "rounds": max(rounds),
            "rounds_per_seed": rounds,
            **{name: spread(_values(ended, name)) for name in names if name not in counts and name not in COSTS},
            **{
                name: spread([_total(own, seed, name) if finished.get((variant, seed)) else None for seed in seeds])
                for name in names
                if name in counts and name not in COSTS
            },
            "privacy": _statements(privacy.get(variant), max(*rounds, (released or {}).get(variant, 0))),
            "costs": {name: spread(_values(ended, f"total_{name}")) for name in COSTS if name in names},
        }
    records = [record["seconds"] for record in finished.values() if record]
    run = sum(record["run"] for record in records)
    timed = sum(record["timed_rounds"] for record in records)
    return {
        "experiment": experiment,
        "preset": preset,
        "status": status,
        "seeds": list(seeds),
        "variants": described,
        "seconds": {
            "compile": sum(record["compile"] for record in records),
            "run": run,
            "per_round": run / timed if timed else None,
        },
        "environment": dict(environment),
    }


def _statements(privacy: Callable[[int], Sequence[Mapping[str, Any]]] | None, rounds: int) -> list[dict[str, Any]]:
    """What is claimed after this many rounds."""
    return [] if privacy is None else [dict(statement) for statement in privacy(rounds)]


def _total(lines: Sequence[Mapping[str, Any]], seed: int, name: str) -> int:
    """A count summed over one seed's lines; null in round 0 counts nothing."""
    return sum(line.get(name) or 0 for line in lines if line["seed"] == seed)


def _values(lines: Sequence[Mapping[str, Any] | None], name: str) -> list[float | None]:
    """One number a line; None without a line or where it has none."""
    return [None if line is None else line.get(name) for line in lines]


def summary_table(
    summary: Mapping[str, Any],
    metrics: Sequence[str] = (
        "test_accuracy",
        "test_accuracy_worst_node",
        "test_accuracy_average_model",
        "train_loss",
    ),
) -> rich.table.Table:
    """The closing table: a row a variant, mean ± standard deviation over seeds.

    Args:
        summary: content of summary.json.
        metrics: columns; those that no variant has are left out.

    Returns:
        A table for `rich.console.Console.print`. Its caption says which epsilon every variant has, on what ground:
        bound, neighboring relation and delta.
    """
    variants = summary["variants"]
    shown = [name for name in metrics if any(name in row for row in variants.values())]
    count = len(summary["seeds"])
    caption = f"mean ± standard deviation over {count} seeds" if count > 1 else f"seed {summary['seeds'][0]}"
    lines = [f"{caption}, {summary['status'].replace('_', ' ')}"]
    for variant, row in variants.items():
        lines += [f"{variant}: {statement_text(statement)}" for statement in row.get("privacy", ())]
    table = rich.table.Table(title=summary["experiment"], caption="\n".join(lines), caption_justify="left")
    table.add_column("variant", overflow="fold")  # names alike in their first letters must stay apart
    table.add_column("rounds", justify="right")
    for name in shown:
        unit = " (%)" if _is_share(name) else ""
        table.add_column(name.replace("_", " ") + unit, justify="right")
    for variant, row in variants.items():
        table.add_row(variant, str(row["rounds"]), *(format_spread(name, row.get(name)) for name in shown))
    return table


def format_spread(name: str, value: Mapping[str, Any] | None) -> str:
    r"""One cell: accuracies in per cent, other numbers with three digits.

    Example:
        >>> format_spread("test_accuracy", {"mean": 0.9123, "std": 0.004})
        '91.2\xa0±\xa00.4'
        >>> format_spread("train_loss", {"mean": 0.25, "std": None})
        '0.25'
    """
    if value is None or value["mean"] is None:
        return "-"
    parts = [part for part in (value["mean"], value["std"]) if part is not None]
    texts = [f"{100 * part:.1f}" if _is_share(name) else f"{part:.3g}" for part in parts]
    # No-break spaces: a narrow table breaks its headings, not its numbers.
    return "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}".join(texts)


def _is_share(name: str) -> bool:
    """Whether a metric is shown in per cent."""
    return "accuracy" in name
