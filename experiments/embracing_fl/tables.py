"""Tables of runs beside the paper's numbers, in Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.embracing_fl import paper
from experiments.embracing_fl.costs import two_digits
from experiments.embracing_fl.methods import CLASSES, NARROW
from experiments.embracing_fl.results import Result

TITLES = {
    "embracing": "EmbracingFL",
    "width_reduction": "width reduction",
    "ordered_dropout": "ordered dropout",
    "first_half": "first half",
    "random_blocks": "random blocks",
    "fed_avg": "FedAvg, strong alone",
}
BOTH = ("embracing", "width_reduction")


def markdown(results: Sequence[Result]) -> str:
    """All tables for which there are results: cases, added weak clients, batch normalization, rounds to a target."""
    usual = _usual(results)
    tables = [_cases(usual), _added_clients(usual), _batch_norm(results), _targets(usual)]
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
    whole = [r for r in results if sum(r.counts) == r.nodes and r.comparison not in elsewhere]
    rows = {key: row for key, row in grouped(whole).items() if set(row) - {"fed_avg"}}
    methods = [method for method in TITLES if method != "fed_avg" and any(method in row for row in rows.values())]
    table = paper.TABLES_BY_DATASET.get(results[0].dataset)
    published = {"embracing": table.accuracy} if table else {}
    published |= {"width_reduction": paper.WIDTH_REDUCTION} if results[0].dataset == "cifar10" else {}
    both = {*BOTH} <= {*methods}
    with_paper = both and {*BOTH} <= {*published}
    heads = ["", *CLASSES, "active", "average capacity"]
    for method in methods:
        heads += [TITLES[method], *(["paper"] if method in published else [])]
    body = []
    for (case, counts, num_active), row in rows.items():
        # Of the two methods' nearly equal capacities the paper gives EmbracingFL's.
        first = row.get("embracing") or next(iter(row.values()))
        capacity = "" if first.average_capacity is None else two_digits(first.average_capacity)
        capacity += f" ({table.capacity[case]:.2f})" if table and case in table.capacity else ""
        cells = [first.label, *map(str, (*counts, num_active)), capacity]
        for method in methods:
            cells.append(_accuracy(row.get(method)))
            cells += [_pair(published[method].get(case))] if method in published else []
        cells += [_gap(*map(row.get, BOTH))] if both else []
        body.append([*cells, *([_paper_gap(*(published[method].get(case) for method in BOTH))] if with_paper else [])])
    return _table("Cases", [*heads, *(["gap"] if both else []), *(["gap, paper"] if with_paper else [])], body)


def added_clients(results: Sequence[Result]) -> list[Result]:
    """Comparisons of some strong clients with more and more weak ones, as in Table 2: no cases, both methods.

    Those with fewer clients than hold data, and of the same strong clients the one with all.
    """
    counted = [r for r in _usual(results) if r.case is None and not r.counts[1] and r.method in BOTH]
    strong = {result.counts[0] for result in counted if sum(result.counts) < result.nodes}
    return [result for result in counted if result.counts[0] in strong]


def _added_clients(results: Sequence[Result]) -> str:
    """Rows: comparisons with fewer clients than hold data, as in Table 2."""
    body = []
    for (_, counts, num_active), row in grouped(added_clients(results)).items():
        whole, narrow = map(row.get, BOTH)
        of_narrow, of_whole = paper_added(next(iter(row.values()))) or (None, None)
        cells = [_accuracy(narrow), _pair(of_narrow), _accuracy(whole), _pair(of_whole), _gap(whole, narrow)]
        body.append([str(counts[0]), str(counts[2]), str(num_active), *cells, _paper_gap(of_whole, of_narrow)])
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
            cells, pair = [], [paper.BATCH_NORM.get((method, mode)) if fits else None for mode in ("static", "global")]
            for mode, number in zip(("static", "global"), pair, strict=True):
                cells += [_accuracy(row[mode]), _pair(number)]
            gaps = [_gap(row["static"], row["global"]), _paper_gap(*pair)]
            body.append([row["static"].label, str(num_active), TITLES[method], *cells, *gaps])
    heads = ["clients", "active", "method", "static", "paper", "global", "paper", "static less global", "paper"]
    return _table("Batch normalization (Table 9)", heads, body)


def _targets(results: Sequence[Result]) -> str:
    """Rows: comparisons with a target, as in Table 7."""
    rows = grouped([result for result in results if result.target_accuracy is not None])
    methods = [method for method in TITLES if any(method in row for row in rows.values())]
    body = []
    for (case, _, _), row in rows.items():
        first = next(iter(row.values()))
        numbers = paper.ROUNDS_TO_TARGET.get(case) if first.dataset == "cifar10" else None
        of_paper = "" if numbers is None else f"{numbers[0]} %: {numbers[1]} and {numbers[2]}"
        reached = [row[method].rounds_to_target() if method in row else [] for method in methods]
        texts = [", ".join("never" if number is None else str(number) for number in seeds) for seeds in reached]
        body.append([first.label, f"{100 * (first.target_accuracy or 0):g} %", *texts, of_paper])
    heads = ["", "target", *(TITLES[method] for method in methods), "paper: width reduction and EmbracingFL"]
    return _table("Rounds until a target accuracy is reached, of each seed (Table 7)", heads, body)


def _usual(results: Sequence[Result]) -> list[Result]:
    """One result for each method and comparison: of two kinds of batch normalization the one that suits it."""
    chosen: dict[object, Result] = {}
    for result in results:
        key = result.method, result.comparison, result.nodes
        if key not in chosen or result.batch_norm == ("static" if result.method in NARROW else "global"):
            chosen[key] = result
    return list(chosen.values())


def grouped(
    results: Sequence[Result], key: Callable[[Result], str] = lambda result: result.method
) -> dict[Any, dict[str, Result]]:
    """Comparison -> key -> result, comparisons in order."""
    rows: dict[Any, dict[str, Result]] = {}
    for result in sorted(results, key=lambda result: result.comparison):
        rows.setdefault(result.comparison, {})[key(result)] = result
    return rows


def gaps(first: Result, second: Result) -> np.ndarray:
    """(seeds,), accuracy of the first less that of the second, in points, seed by seed where both have the same."""
    if first.seeds == second.seeds:
        return first.last() - second.last()
    return np.array([first.last().mean() - second.last().mean()])


def _accuracy(result: Result | None) -> str:
    return "" if result is None else f"{_spread(result.last())} ({result.best().mean():.1f})"


def _spread(values: np.ndarray, sign: str = "") -> str:
    return f"{values.mean():{sign}.1f}" + (f" ± {values.std(ddof=1):.1f}" if len(values) > 1 else "")


def _gap(first: Result | None, second: Result | None) -> str:
    return "" if first is None or second is None else _spread(gaps(first, second), "+")


def _pair(number: paper.Accuracy | None) -> str:
    return "" if number is None else f"{number[0]:.1f} ± {number[1]:.1f}"


def _paper_gap(first: paper.Accuracy | None, second: paper.Accuracy | None) -> str:
    return "" if first is None or second is None else f"{first[0] - second[0]:+.1f}"


def _table(title: str, heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """In Markdown; nothing without rows."""
    rows = [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *body)]
    return "\n".join([f"### {title}", "", *rows]) if body else ""
