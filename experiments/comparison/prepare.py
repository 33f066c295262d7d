"""The cases of experiments.comparison: rows of other experiments, which prepare them."""

from __future__ import annotations

from collections.abc import Mapping

from jaxfl.frame import Prepared, Row, override
from jaxfl.frame.experiment import request
from jaxfl.training import Case

from .options import METHODS, Configuration, Method, check_config


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
    return Prepared({name: cases[name] for name in rows}, description[:1] + _counted(rows), {"settled": facts})


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
    if not method.baseline:
        return theirs
    changes = method.experiment.baselines[method.baseline](theirs)
    return theirs if changes is None else theirs._replace(config=override(theirs.config, changes))


def _counted(rows: Mapping[str, Row]) -> list[str]:
    """Describe what is compared."""
    configs = [row.config for row in rows.values()]
    methods = dict.fromkeys(config.learning.method for config in configs)
    budgets = dict.fromkeys(f"{config.budget.target_epsilon:g}" for config in configs)
    rounds = dict.fromkeys(str(config.learning.rounds) for config in configs)
    return [
        f"{len(rows)} cases: {', '.join(methods)}; proven ε of {', '.join(budgets)}; {', '.join(rounds)} rounds;"
        f" step sizes {', '.join(dict.fromkeys(f'{config.learning.step_size:g}' for config in configs))}"
    ]
