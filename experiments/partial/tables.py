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
    elsewhere = {result.comparison for result in added_clients(results)}
    whole = [r for r in _usual(results) if sum(r.counts) == r.nodes and r.comparison not in elsewhere]
    rows = sorted({result.comparison for result in whole if result.method != "fed_avg"})
    if not rows:
        return ""
    methods = [method for method in TITLES if method != "fed_avg" and any(r.method == method for r in whole)]
    heads = ["", *CLASSES, "active", "average capacity"]
    published = paper.TABLES_BY_DATASET.get(results[0].dataset)
    for method in methods:
        heads += [TITLES[method], *(["paper"] if _paper_of(method, results[0].dataset) else [])]
    both = {"embracing", "width_reduction"} <= set(methods)
    heads += ["gap"] + (["gap, paper"] if published and published.title == "Table 3" else []) if both else []
    body = []
    for comparison in rows:
        case, counts, num_active = comparison
        own = {result.method: result for result in whole if result.comparison == comparison}
        # Of the two methods' nearly equal capacities the paper gives EmbracingFL's.
        of_row = own.get("embracing") or next(iter(own.values()))
        capacity = of_row.average_capacity
        cells = [of_row.label, *map(str, (*counts, num_active)), "" if capacity is None else two_digits(capacity)]
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


def added_clients(results: Sequence[Result]) -> list[Result]:
    """Comparisons of some strong clients with more and more weak ones, as in Table 2: no cases, both methods.

    Those with fewer clients than hold data, and of the same strong clients the one with all.
    """
    counted = [
        r
        for r in _usual(results)
        if r.case is None and not r.counts[1] and r.method in ("embracing", "width_reduction")
    ]
    strong = {result.counts[0] for result in counted if sum(result.counts) < result.nodes}
    return [result for result in counted if result.counts[0] in strong]


def _added_clients(results: Sequence[Result]) -> str:
    """Rows: comparisons with fewer clients than hold data, as in Table 2."""
    chosen = added_clients(results)
    if not chosen:
        return ""
    body = []
    for comparison in sorted({result.comparison for result in chosen}):
        own = {result.method: result for result in chosen if result.comparison == comparison}
        some, narrow, whole = next(iter(own.values())), own.get("width_reduction"), own.get("embracing")
        of_narrow, of_whole = paper_added(some) or (None, None)
        body.append(
            [
                *(str(count) for count in (some.counts[0], some.counts[2], some.num_active)),
                _accuracy(narrow),
                _pair(of_narrow),
                _accuracy(whole),
                _pair(of_whole),
                _gap(whole, narrow),
                _paper_gap(of_whole, of_narrow),
            ]
        )
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
    for comparison in sorted({result.comparison for result in results}):
        for method in TITLES:
            own = {r.batch_norm: r for r in results if (r.comparison, r.method) == (comparison, method)}
            if len(own) < 2:
                continue
            _, (strong, moderate, weak), num_active = comparison
            fits = results[0].dataset == "cifar10" and 7 * strong == weak and not moderate
            cells = [own["static"].label, str(num_active), TITLES[method]]
            numbers = [paper.BATCH_NORM.get((method, mode)) if fits else None for mode in ("static", "global")]
            for mode, number in zip(("static", "global"), numbers, strict=True):
                cells += [_accuracy(own[mode]), _pair(number)]
            body.append([*cells, _gap(own["static"], own["global"]), _paper_gap(*numbers)])
    heads = ["clients", "active", "method", "static", "paper", "global", "paper", "static less global", "paper"]
    return _table("Batch normalization (Table 9)", heads, body) if body else ""


def _targets(results: Sequence[Result]) -> str:
    """Rows: comparisons with a target, as in Table 7."""
    chosen = [result for result in _usual(results) if result.target_accuracy is not None]
    if not chosen:
        return ""
    methods = [method for method in TITLES if any(result.method == method for result in chosen)]
    body = []
    for comparison in sorted({result.comparison for result in chosen}):
        own = {result.method: result for result in chosen if result.comparison == comparison}
        some = next(iter(own.values()))
        assert some.target_accuracy is not None
        numbers = paper.ROUNDS_TO_TARGET.get(comparison[0]) if some.dataset == "cifar10" else None
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
        key = result.method, result.comparison, result.nodes
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
