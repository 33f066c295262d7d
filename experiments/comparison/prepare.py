"""The cases of experiments.comparison: rows of other experiments, which prepare them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jaxfl.frame import Prepared, Row, override
from jaxfl.frame.experiment import request
from jaxfl.training import Case

from .options import METHODS, OF_BASELINES, Configuration, Method, check_config


def prepare(rows: Mapping[str, Row]) -> Prepared:
    """The cases of all rows, each made by the experiment that its method comes from."""
    for row in rows.values():
        check_config(row.config)
    cases: dict[str, Case] = {}
    facts, description = {}, []
    for experiment in dict.fromkeys(method.experiment.name for method in METHODS.values()):
        methods = {name: METHODS[row.config.learning.method] for name, row in rows.items()}
        own = [name for name in rows if methods[name].experiment.name == experiment]
        if own:
            make = methods[own[0]].experiment.prepare
            assert make is not None
            prepared = make({name: _row(methods[name], rows[name]) for name in own})
            cases |= prepared.cases
            facts[experiment] = dict(prepared.saved)
            description += prepared.description[:1]
    cases = {name: cases[name] for name in rows}
    cases |= {name: _of_curator(cases[name]) for name, row in rows.items() if _baseline(row) == "curator"}
    for name, row in rows.items():
        baseline = METHODS[row.config.learning.method].baseline
        if baseline and "method" in row.settings:  # a table says whose it is
            settings = {**row.settings, "method": OF_BASELINES, "baseline": baseline}
            cases[name] = cases[name]._replace(settings=settings)
    return Prepared(cases, description[:1] + _counted(rows), {"settled": facts})


def _row(method: Method, row: Row) -> Row:
    """The row of the experiment that a method comes from."""
    config: Configuration = row.config
    same = [*vars(config.data).items(), *vars(config.clients).items(), *vars(config.network).items()]
    same += [("seed", config.run.seed), ("evaluate_every", config.run.evaluate_every)]
    changes = method.changes(config)
    if "batch_size" not in changes:  # bounds that do not gain from drawing samples: a mean over more of them moves less
        data_of = config.clients.data(config.data)
        changes["batch_size"] = min(int(data_of(seed).sizes.min()) for seed in row.seeds)
    whole = request(method.experiment, changes)
    theirs = Row(override(whole.config, dict(same)), row.seeds, row.settings)
    if not _baseline(row):
        return theirs
    changes = method.experiment.baselines[_baseline(row)](theirs)
    return theirs if changes is None else theirs._replace(config=override(theirs.config, changes))


def _baseline(row: Row) -> str:
    """The baseline that a row is of the experiment that its method comes from; empty for none."""
    return "curator" if row.config.trust.trust == "curator" else METHODS[row.config.learning.method].baseline


def _of_curator(case: Case) -> Case:
    """The case of one place with all samples, whose statements name its observer: there is no other node."""

    def stated(*args: Any, **options: Any) -> list[dict[str, Any]]:
        assert case.privacy is not None
        return [{**one, "observer": "whoever sees its models"} for one in case.privacy(*args, **options)]

    return case._replace(privacy=functools.wraps(case.privacy)(stated) if case.privacy is not None else None)


def _counted(rows: Mapping[str, Row]) -> list[str]:
    """Describe what is compared."""
    configs = [row.config for row in rows.values()]
    methods = dict.fromkeys(config.learning.method for config in configs)
    methods = [f"{OF_BASELINES}, {name}" if METHODS[name].baseline else name for name in methods]
    budgets = dict.fromkeys(f"{config.budget.target_epsilon:g}" for config in configs)
    rounds = dict.fromkeys(str(config.learning.rounds) for config in configs)
    trust = dict.fromkeys(config.trust.trust for config in configs)
    return [
        f"{len(rows)} cases: {' | '.join(methods)}; proven ε of {', '.join(budgets)}, trust {', '.join(trust)} (each ε"
        f" names its observer); {', '.join(rounds)} rounds;"
        f" step sizes {', '.join(dict.fromkeys(f'{config.learning.step_size:g}' for config in configs))}"
    ]
