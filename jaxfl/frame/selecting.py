"""A search whose winner has an epsilon: --private-selection (`jaxfl.privacy.selection`)."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxfl.core import ArgumentError
from jaxfl.frame.grid import Axis, axis, sample_axis
from jaxfl.frame.options import Option, alternatives, flat
from jaxfl.privacy.selection import Selection, draw_runs, selected_statement, selection
from jaxfl.privacy.statements import statement_text
from jaxfl.training import Case
from jaxfl.training.json_files import read_json
from jaxfl.training.run_directory import CONFIG
from jaxfl.training.summary import WHOLE, deciding, ranking

_NAME = "private_selection"
_OF_COUNT = 2**32 - 1  # stream of random numbers that K is drawn from; options have 0, 1, ...
_AT_ONE_DELTA = "its statements are of one delta, or depend on what a run counts"
ON_TEST = "test_"  # how the names of metrics begin that are measured on test samples


class Search(NamedTuple):
    """A private selection on its way from the command line to the statement on its winner."""

    selected: Selection
    entropy: int  # of K and of the options: secret, unless the run is a simulation
    resumed: Path | None  # config.json of a run that goes on: its draws stay
    ranges: tuple[str, ...] = ()
    ends: Mapping[str, Any] = {}  # name -> row, at the lower and the upper end of all ranges

    @property
    def drawn(self) -> list[str]:
        """The options that are drawn."""
        return [text.partition("=")[0].replace("-", "_") for text in self.ranges]

    def draw(self, ranges: Sequence[str], table: Mapping[str, Option]) -> Axis:
        """A random number of configurations."""
        if self.resumed is not None:
            return _drawn_before(read_json(self.resumed)["config"], sample_axis(ranges, 1, 0, table), table)
        count = draw_runs(self.selected, np.random.default_rng((self.entropy, _OF_COUNT)))
        return sample_axis(ranges, count, self.entropy, table, digits=17)  # so that no two are alike

    def facts(self) -> dict[str, Any]:
        """Facts that config.json keeps, so that a resumed run is of the same search."""
        return {_NAME: {**self.selected._asdict(), "sample": list(self.ranges)}}


def search_of(distribution: str, count: int, values: Mapping[str, Any]) -> Search | None:
    """The search that options ask for; None without one.

    Args:
        distribution: as --private-selection, "off" for none.
        count: E[K].
        values: options as given, over the defaults.
    """
    if distribution == "off":
        return None
    try:
        selected = selection(distribution, count)
    except ArgumentError as error:
        raise ArgumentError("num_samples", error.requirement, error.found, error.remedy) from None
    is_secret = bool(values.get("seed_from_os"))
    if is_secret and values.get("distributed"):
        found = "got it beside distributed"
        raise ArgumentError(_NAME, "must be drawn by one process where it is secret", found, "Leave one out.")
    if values.get("resume") and not values.get("out"):
        raise ArgumentError("resume", "must name the run of a private selection", "got no out", "Name it by --out.")
    config = Path(values["out"]).expanduser() / CONFIG if values.get("resume") else None
    entropy = secrets.randbits(128) if is_secret else int(values.get("seed", 0))
    return Search(selected, entropy, config if config is not None and config.exists() else None)


def ends_of(ranges: Sequence[str], table: Mapping[str, Option]) -> Axis:
    """Both ends of every range. Options of integers are refused: drawn twice, they would be one run."""
    values: dict[str, list[float]] = {}
    sample_axis(ranges, 1, 0, table)  # refuses what is no range
    for text in ranges:
        name, _, bounds = text.partition("=")
        name = name.replace("-", "_")
        if int in alternatives(table[name].kind):
            found = f"{name} takes integers, and two equal draws would be one run"
            raise ArgumentError(_NAME, "must draw real numbers", found, "Sample other options.")
        values[name] = [float(end) for end in bounds.removeprefix("log:").split(":")]
    return axis(table, **values)


def checked_search(
    search: Search, rows: Mapping[str, Any], cases: Mapping[str, Case], ends: Mapping[str, Case]
) -> list[str]:
    """Refuse a search to which the bound does not apply, before any work; returns what its winner will have, in words.

    Args:
        search: of the run.
        rows: of the run.
        cases: of these rows.
        ends: cases at both ends of the ranges.

    Raises:
        ArgumentError: something besides the drawn options varies, statements that are of one delta alone, that depend
            on more than the rounds or on the drawn options, that do not cover the parameters, or that leave the winner
            without an epsilon.
    """
    varying = {name for row in rows.values() for name in row.settings if name not in search.drawn}
    seeds = {len(row.seeds) for row in rows.values()} - {1}
    if varying or seeds:
        found = f"{', '.join(sorted(varying)) or 'the seed'} varies, too"
        remedy = "Give every other option one value, as in --seeds 0."
        raise ArgumentError(_NAME, "must be all that varies", found, remedy)
    for case in cases.values():
        if case.privacy is None or case.released or "dp_delta" not in inspect.signature(case.privacy).parameters:
            found = "nothing here has an epsilon" if case.privacy is None else _AT_ONE_DELTA
            raise ArgumentError(_NAME, "needs statements at every delta", found, "Leave it out.")
        if not case.final_params_are_private:
            found = "no statement covers the parameters that are tested"
            raise ArgumentError(_NAME, "needs runs whose parameters are covered", found, "Leave it out.")
    stated = {
        tuple((one["bound"], one["neighboring_relation"], one["dp_epsilon"]) for one in case.privacy(case.last_round))
        for case in (*cases.values(), *ends.values())
        if case.privacy is not None
    }
    if not any(bound == "proven" and dp_epsilon is not None for one in stated for bound, _, dp_epsilon in one):
        found = "there is none with these options"
        raise ArgumentError(_NAME, "needs runs with a proven epsilon", found, "Clip, and add noise.")
    if len(stated) > 1:
        found = f"epsilon depends on {' and '.join(search.drawn)}"
        raise ArgumentError(_NAME, "must draw options that no epsilon depends on", found, "Sample step_size, say.")
    case = next(iter(cases.values()))
    assert case.privacy is not None
    paid = _paid(search, case, case.privacy(case.last_round))
    if all(one["dp_epsilon"] is None for one in paid):
        found = "none is known at delta over the mean number of runs"
        raise ArgumentError("dp_delta", "must leave the winner an epsilon", found, "Pass a larger one.")
    return [f"the winner: {statement_text(one)}" for one in paid]


def winner_of(
    search: Search,
    summary: Mapping[str, Any],
    rows: Mapping[str, Any],
    cases: Mapping[str, Case],
    metrics: Sequence[str],
) -> dict[str, Any] | None:
    """The winner: its "case", "metric", "settings" and "privacy", the proven statements; None without a result.

    Args:
        search: of the run.
        rows: of the run.
        summary: content of summary.json.
        cases: as they were trained.
        metrics: the first one that is measured on test samples decides.
    """
    on_test = [name for name in metrics if name.startswith(ON_TEST)]
    metric = deciding(summary, on_test)
    name = ranking(summary, on_test)[0]
    row = summary["cases"][name]
    if not metric or row.get(metric, {}).get("mean") is None or row["status"][0] not in WHOLE:
        return None
    values = flat(rows[name].config)
    settings = {option: values[option] for option in search.drawn}
    privacy = _paid(search, cases[name], row["privacy"])
    return {"case": name, "metric": metric, "settings": settings, "privacy": privacy}


def _paid(search: Search, case: Case, stated: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The winner's proven statements, of those on its run only."""
    of_run = case.privacy
    assert of_run is not None

    def epsilon_at(one: Mapping[str, Any], dp_delta: float) -> float:
        same = [other for other in of_run(case.last_round, dp_delta=dp_delta) if _key(other) == _key(one)]
        return float("inf") if same[0]["dp_epsilon"] is None else same[0]["dp_epsilon"]

    return [
        selected_statement(one, lambda dp_delta, one=one: epsilon_at(one, dp_delta), search.selected)
        for one in stated
        if one["bound"] == "proven"
    ]


def _key(stated: Mapping[str, Any]) -> tuple[str, str]:
    return stated["bound"], stated["neighboring_relation"]


def _drawn_before(config: Mapping[str, Any], names: Axis, table: Mapping[str, Option]) -> Axis:
    """The draws of a run, from the options of its config.json."""
    runs = config["cases"].values()
    return axis(table, **{name: [run.get(name, config[name]) for run in runs] for name in names})
