"""Tables of runs beside the paper's numbers, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.partial import paper
from experiments.partial.config import CLASSES
from experiments.partial.costs import two_digits
from experiments.partial.results import Result

TITLES = {
    "embracing": "EmbracingFL",
    "width_reduction": "width reduction",
    "ordered_dropout": "ordered dropout",
    "first_half": "first half",
    "random_blocks": "random blocks",
    "fed_avg": "FedAvg, strong alone",
}


def markdown(results: Sequence[Result]) -> str:
    """All tables for which there are results: cases, added weak clients, batch normalization, rounds to a target."""
    tables = [_cases(results), _added_clients(results), _batch_norm(results), _targets(results)]
    notes = [
        f"{result.name}: at round {result.rounds} of {result.wanted_rounds}"
        for result in results
        if result.rounds < result.wanted_rounds
    ]
    counts = sorted({len(result.seeds) for result in results})
    text = " or ".join(map(str, counts))
    heading = (
        f"Test accuracy on {results[0].dataset} in per cent at the end, mean ± standard deviation over {text} seed(s); "
        "behind it the best evaluation of each seed."
    )
    unfinished = ["Not ended: " + "; ".join(notes) + "."] if notes else []
    return "\n\n".join([heading, *unfinished, *(table for table in tables if table)]) + "\n"


def _cases(results: Sequence[Result]) -> str:
    """Rows: comparisons in which all clients take part. Columns: methods, each beside the paper's number."""
    whole = [result for result in _usual(results) if sum(result.counts) == result.nodes]
    rows = sorted({(result.case or 11, result.counts) for result in whole if result.method != "fed_avg"})
    if not rows:
        return ""
    methods = [method for method in TITLES if method != "fed_avg" and any(r.method == method for r in whole)]
    heads = ["", *CLASSES, "average capacity"]
    published = paper.TABLES_BY_DATASET.get(results[0].dataset)
    for method in methods:
        heads += [TITLES[method], *(["paper"] if _paper_of(method, results[0].dataset) else [])]
    both = {"embracing", "width_reduction"} <= set(methods)
    heads += ["gap"] + (["gap, paper"] if published and published.title == "Table 3" else []) if both else []
    body = []
    for case, counts in rows:
        own = {result.method: result for result in whole if result.counts == counts}
        # Of the two methods' nearly equal capacities the paper gives EmbracingFL's.
        of_row = own.get("embracing") or next(iter(own.values()))
        capacity = of_row.average_capacity
        cells = [of_row.label, *map(str, counts), "" if capacity is None else two_digits(capacity)]
        if published and case in published.capacity:
            cells[-1] += f" ({published.capacity[case]:.2f})"
        for method in methods:
            numbers = _paper_of(method, results[0].dataset)
            cells.append(_accuracy(own.get(method)))
            cells += [_pair(numbers.get(case))] if numbers else []
        if both:
            cells.append(_gap(own.get("embracing"), own.get("width_reduction")))
            if published and published.title == "Table 3":
                cells.append(_paper_gap(published.accuracy.get(case), paper.WIDTH_REDUCTION.get(case)))
        body.append(cells)
    return _table("Cases", heads, body)


def _paper_of(method: str, dataset: str) -> dict[int, paper.Accuracy]:
    """The paper's accuracies of a method in the cases."""
    if method == "embracing" and dataset in paper.TABLES_BY_DATASET:
        return paper.TABLES_BY_DATASET[dataset].accuracy
    return paper.WIDTH_REDUCTION if method == "width_reduction" and dataset == "cifar10" else {}


def _added_clients(results: Sequence[Result]) -> str:
    """Rows: comparisons with fewer clients than hold data, as in Table 2."""
    strong = {
        result.counts[0] for result in results if sum(result.counts) < result.nodes and result.method != "fed_avg"
    }
    chosen = [result for result in _usual(results) if result.counts[0] in strong and not result.counts[1]]
    if not chosen:
        return ""
    cifar = results[0].dataset == "cifar10"
    body = []
    for counts in sorted({result.counts for result in chosen}):
        own = {result.method: result for result in chosen if result.counts == counts}
        # By the same share of all clients.
        nodes = next(iter(own.values())).nodes
        weak, strong_share = (counts[number] * paper.NUM_CLIENTS / nodes for number in (2, 0))
        numbers = paper.ADDED_WEAK.get(round(weak)) if cifar and strong_share == 16 and weak == round(weak) else None
        body.append(
            [
                str(counts[0]),
                str(counts[2]),
                _accuracy(own.get("width_reduction")),
                _pair(numbers and numbers[0]),
                _accuracy(own.get("embracing")),
                _pair(numbers and numbers[1]),
                _gap(own.get("embracing"), own.get("width_reduction")),
            ]
        )
    heads = ["strong", "weak", TITLES["width_reduction"], "paper", TITLES["embracing"], "paper", "gap"]
    return _table("Weak clients added to strong ones (Table 2)", heads, body)


def _batch_norm(results: Sequence[Result]) -> str:
    """Rows: methods with both kinds of batch normalization in one comparison, as in Table 9."""
    body = []
    for counts in sorted({result.counts for result in results}):
        for method in TITLES:
            own = {r.batch_norm: r for r in results if (r.counts, r.method) == (counts, method)}
            if len(own) < 2:
                continue
            for mode in ("static", "global"):
                number = paper.BATCH_NORM.get((method, mode))
                fits = number and results[0].dataset == "cifar10" and 7 * counts[0] == counts[2] and not counts[1]
                cells = [own[mode].label, TITLES[method], mode, _accuracy(own[mode]), _pair(number if fits else None)]
                body.append(cells)
    heads = ["clients", "method", "batch normalization", "accuracy", "paper"]
    return _table("Batch normalization (Table 9)", heads, body) if body else ""


def _targets(results: Sequence[Result]) -> str:
    """Rows: comparisons with a target, as in Table 7."""
    chosen = [result for result in _usual(results) if result.target_accuracy is not None]
    if not chosen:
        return ""
    methods = [method for method in TITLES if any(result.method == method for result in chosen)]
    body = []
    for case, counts in sorted({(result.case or 11, result.counts) for result in chosen}):
        own = {result.method: result for result in chosen if result.counts == counts}
        some = next(iter(own.values()))
        assert some.target_accuracy is not None
        numbers = paper.ROUNDS_TO_TARGET.get(case) if some.dataset == "cifar10" else None
        of_paper = "" if numbers is None else f"{numbers[0]} %: {numbers[1]} and {numbers[2]}"
        row = [some.label, f"{100 * some.target_accuracy:g} %", *(_rounds(own.get(method)) for method in methods)]
        body.append([*row, of_paper])
    heads = ["", "target", *(TITLES[method] for method in methods), "paper: width reduction and EmbracingFL"]
    return _table("Rounds until a target accuracy is reached, of each seed (Table 7)", heads, body)


def _usual(results: Sequence[Result]) -> list[Result]:
    """One result for each method and comparison: of two kinds of batch normalization the one that suits it."""
    chosen: dict[object, Result] = {}
    for result in results:
        suits = "static" if result.method in ("width_reduction", "ordered_dropout") else "global"
        key = result.method, result.counts, result.nodes
        if key not in chosen or result.batch_norm == suits:
            chosen[key] = result
    return list(chosen.values())


def _accuracy(result: Result | None) -> str:
    return "" if result is None else f"{_spread(result.last())} ({result.best().mean():.1f})"


def _spread(values: np.ndarray) -> str:
    return f"{values.mean():.1f}" + (f" ± {values.std(ddof=1):.1f}" if len(values) > 1 else "")


def _pair(number: paper.Accuracy | None) -> str:
    return "" if number is None else f"{number[0]:.1f} ± {number[1]:.1f}"


def gaps(one: Result, other: Result) -> np.ndarray:
    """(seeds,), accuracy of one less that of the other in points, seed by seed where both have the same seeds."""
    if one.seeds == other.seeds:
        return one.last() - other.last()
    return np.array([one.last().mean() - other.last().mean()])


def _gap(one: Result | None, other: Result | None) -> str:
    if one is None or other is None:
        return ""
    values = gaps(one, other)
    return f"{values.mean():+.1f}" + (f" ± {values.std(ddof=1):.1f}" if len(values) > 1 else "")


def _paper_gap(one: paper.Accuracy | None, other: paper.Accuracy | None) -> str:
    return "" if one is None or other is None else f"{one[0] - other[0]:+.1f}"


def _rounds(result: Result | None) -> str:
    if result is None or result.target_accuracy is None:
        return ""
    return ", ".join("never" if found is None else str(found) for found in result.rounds_to_target())


def _table(title: str, heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    return "\n".join([f"### {title}", "", line(heads), line(["---"] * len(heads)), *map(line, body)])
