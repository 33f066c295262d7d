"""Tables of runs beside the paper's numbers, in Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from jaxfl.training.summary import rounds_to_target

from . import paper
from .costs import two_digits
from .methods import CLASSES
from .results import Result, gaps, grouped, usual

TITLES = {
    "embracing": "EmbracingFL",
    "width_reduction": "width reduction",
    "ordered_dropout": "FjORD",
    "first_half": "first half",
    "random_blocks": "random blocks",
    "fed_avg": "FedAvg, strong alone",
    "alone": "alone",
}
BOTH = ("embracing", "width_reduction")
Pair = tuple[Result | None, paper.Accuracy | None]
"""Result of a run here, and the paper's number."""


def markdown(results: Sequence[Result]) -> str:
    """All tables that have results: cases, added weak clients, batch normalization, rounds to a target."""
    rows = usual(results)
    tables = [_cases(rows), _added_clients(rows), _batch_norm(results), _targets(rows)]
    begun = [f"{r.name}: at round {r.rounds} of {r.wanted_rounds}" for r in results if r.rounds < r.wanted_rounds]
    seeds = " or ".join(map(str, sorted({len(result.seeds) for result in results})))
    heading = (
        f"Test accuracy on {results[0].dataset} in per cent at the end, mean ± standard deviation over {seeds} seed(s)"
        "; behind it the best evaluation of each seed."
    )
    notes = [f"Not ended: {'; '.join(begun)}."] if begun else []
    return "\n\n".join([heading, *notes, *filter(None, tables)]) + "\n"


def _cases(results: Sequence[Result]) -> str:
    """Rows: comparisons in which all clients take part. Columns: methods, each beside the paper's number."""
    elsewhere = {result.comparison for result in added_clients(results)}
    rows = grouped(result for result in results if result.has_all and result.comparison not in elsewhere)
    rows = {key: row for key, row in rows.items() if {*row} - {"fed_avg"}}
    methods = [method for method in TITLES if method != "fed_avg" and any(method in row for row in rows.values())]
    dataset = results[0].dataset
    published, capacities = paper.ACCURACY.get(dataset, {}), paper.CAPACITY.get(dataset, {})
    heads = ["", *CLASSES, "active", "average capacity", *(h for m in methods for h in (TITLES[m], "paper"))]
    body = []
    for (case, counts, num_active), row in rows.items():
        # The two methods' capacities are nearly equal; the paper gives EmbracingFL's.
        first = row.get("embracing") or next(iter(row.values()))
        capacity = "" if first.average_capacity is None else two_digits(first.average_capacity)
        capacity += f" ({capacities[case]:.2f})" if case in capacities else ""
        pairs = {method: (row.get(method), published.get(method, {}).get(case)) for method in methods}
        gap = _gap_cells(*(pairs.get(method, (None, None)) for method in BOTH))
        body.append([first.label, *map(str, (*counts, num_active)), capacity, *_cells(*pairs.values()), *gap])
    return _table("Cases", [*heads, "gap", "gap, paper"], body, optional=("paper", "gap", "gap, paper"))


def added_clients(results: Sequence[Result]) -> list[Result]:
    """Comparisons of some strong clients with more and more weak ones, as in Table 2: no cases, both methods.

    These have fewer clients than hold data, or all clients beside equally many strong ones.
    """
    candidates = [r for r in usual(results) if r.case is None and not r.counts[1] and r.method in BOTH]
    strong = {result.counts[0] for result in candidates if not result.has_all}
    return [result for result in candidates if result.counts[0] in strong]


def _added_clients(results: Sequence[Result]) -> str:
    """Rows: comparisons with fewer clients than hold data, as in Table 2."""
    body = []
    for (_, counts, num_active), row in grouped(added_clients(results)).items():
        published = paper_added(next(iter(row.values()))) or (None, None)
        narrow, whole = zip(map(row.get, BOTH[::-1]), published, strict=True)
        clients = map(str, (counts[0], counts[2], num_active))
        body.append([*clients, *_cells(narrow, whole), *_gap_cells(whole, narrow)])
    titles = [TITLES["width_reduction"], "paper", TITLES["embracing"], "paper", "gap", "gap, paper"]
    return _table("Weak clients added to strong ones (Table 2)", ["strong", "weak", "active", *titles], body)


def paper_added(result: Result) -> tuple[paper.Accuracy, paper.Accuracy] | None:
    """Table 2's width reduction and EmbracingFL at the same shares of all clients; None where it has no such row."""
    strong, weak = (result.counts[number] * paper.NUM_CLIENTS / result.nodes for number in (0, 2))
    fits = result.dataset == "cifar10" and strong == 16 and weak == round(weak)
    return paper.ADDED_WEAK.get(round(weak)) if fits else None


def _batch_norm(results: Sequence[Result]) -> str:
    """Rows: methods with both kinds of batch normalization in one comparison, as in Table 9."""
    body = []
    for comparison, method in itertools.product(grouped(results), TITLES):
        row = {r.batch_norm: r for r in results if (r.comparison, r.method) == (comparison, method)}
        if len(row) == 2:
            _, (strong, moderate, weak), num_active = comparison
            fits = results[0].dataset == "cifar10" and 7 * strong == weak and not moderate
            published = paper.BATCH_NORM.get(method, (None, None)) if fits else (None, None)
            pairs = list(zip((row["static"], row["global"]), published, strict=True))
            clients = row["static"].label, str(num_active), TITLES[method]
            body.append([*clients, *_cells(*pairs), *_gap_cells(*pairs)])
    heads = ["clients", "active", "method", "static", "paper", "global", "paper", "static less global", "paper"]
    return _table("Batch normalization (Table 9)", heads, body)


def _targets(results: Sequence[Result]) -> str:
    """Rows: comparisons with a target, as in Table 7."""
    rows = grouped(result for result in results if result.target_accuracy is not None)
    methods = [method for method in TITLES if any(method in row for row in rows.values())]
    body = []
    for (case, _, _), row in rows.items():
        first = next(iter(row.values()))
        numbers = paper.ROUNDS_TO_TARGET.get(case) if first.dataset == "cifar10" else None
        of_paper = "" if numbers is None else f"{numbers[0]} %: {numbers[1]} and {numbers[2]}"
        texts = [_reached(row[method]) if method in row else "" for method in methods]
        body.append([first.label, f"{100 * (first.target_accuracy or 0):g} %", *texts, of_paper])
    heads = ["", "target", *(TITLES[method] for method in methods), "paper: width reduction and EmbracingFL"]
    return _table("Rounds until a target accuracy is reached, of each seed (Table 7)", heads, body)


def _reached(result: Result) -> str:
    rounds = rounds_to_target(result.lines, result.seeds, result.target_accuracy or 0.0)
    return ", ".join("never" if number is None else str(number) for number in rounds)


def _cells(*pairs: Pair) -> list[str]:
    """Two cells each: accuracy here, the end and the best evaluation, and in the paper."""
    cells = []
    for result, published in pairs:
        cells.append("" if result is None else f"{_spread(result.last)} ({result.best.mean():.1f})")
        cells.append("" if published is None else f"{published[0]:.1f} ± {published[1]:.1f}")
    return cells


def _gap_cells(first: Pair, second: Pair) -> list[str]:
    """Lead of the first over the second, here and in the paper."""
    (result, published), (other, of_other) = first, second
    here = "" if result is None or other is None else _spread(gaps(result, other), "+")
    there = "" if published is None or of_other is None else f"{published[0] - of_other[0]:+.1f}"
    return [here, there]


def _spread(values: np.ndarray, sign: str = "") -> str:
    return f"{values.mean():{sign}.1f}" + (f" ± {values.std(ddof=1):.1f}" if len(values) > 1 else "")


def _table(title: str, heads: Sequence[str], body: Sequence[Sequence[str]], optional: Sequence[str] = ()) -> str:
    """A Markdown table; nothing without rows. Columns with these optional heads are left out where they are empty."""
    is_column = [head not in optional or any(row[number] for row in body) for number, head in enumerate(heads)]
    rows = [list(itertools.compress(cells, is_column)) for cells in (heads, ["---"] * len(heads), *body)]
    return "\n".join([f"### {title}", "", *(f"| {' | '.join(cells)} |" for cells in rows)]) if body else ""
