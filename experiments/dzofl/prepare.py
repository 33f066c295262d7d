"""Cases from options of experiments.dzofl: checks, ledgers, and the description of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxfl.core.conditions import Condition, conditions, warnings
from jaxfl.core.tree import size
from jaxfl.frame import Prepared, Row, cases_of
from jaxfl.training.chunks import check_start

from .options import ALONE, DZOFL, FED_AVG, Configuration, check_config


def prepare(rows: Mapping[str, Row]) -> Prepared:
    """The cases of all rows; rows that cannot run are refused before any work."""
    for row in rows.values():
        row.config.clients.data(row.config.data)(row.seeds[0])  # refuses more devices than there are samples
        check_config(row.config)

    def of_row(name: str, row: Row) -> dict[str, Any]:
        config: Configuration = row.config
        data_of = config.clients.data(config.data)
        for seed in row.seeds:
            check_start(config.algorithm(), jax.random.key(seed), data_of(seed))
        return {"data": data_of, "num_rounds": config.learning.rounds, "ledger": config.ledger()}

    cases = cases_of(rows, Configuration.algorithm, of_row)
    theory = {name: _theory(row.config) for name, row in rows.items() if row.config.learning.method == DZOFL}
    return Prepared(cases, [_common(next(iter(rows.values())).config), *_links(rows), *warnings(theory)])


def _theory(config: Configuration) -> list[Condition]:
    """List the assumptions of Theorem IV.9 but for the exponents of the steps, which the constructor checks."""
    learning, success = config.learning, np.asarray(config.losses().rate)
    return conditions(
        "Theorem IV.9",
        ("max |Phi| < inf (IV.7)", math.inf if learning.direction == "gaussian" else 1.0, math.inf),
        (
            "max E|Q(x) - x|^2 / |x|^2 < inf (IV.5)",
            math.inf if config.channel.quantizer == "dithered" else 0.0,
            math.inf,
        ),
        ("max p_i - min p_i <= 0 (Lemma A.1)", float(success.max() - success.min()), 0.0),
    )


def _common(config: Configuration) -> str:
    """Describe the data and the model of the first case, which all cases share."""
    dataset, clients = config.data.load(), config.clients
    num_params = size(jax.eval_shape(config.task().init, jax.random.key(0)))
    return (
        f"{dataset.name}: {len(dataset.train_labels)} samples of {dataset.num_classes} classes over {clients.nodes} "
        f"devices ({clients.partition}), model {config.network.model} with d = {num_params} parameters; quantizer "
        f"{config.channel.quantizer}"
    )


def _links(rows: Mapping[str, Row]) -> list[str]:
    """Describe links that lose messages: how often, and what happens then."""
    lines = {}
    for row in rows.values():
        config, success = row.config, np.asarray(row.config.losses().rate)
        then = "sent again" if config.resends else "lost"
        if success.min() < 1 and config.learning.method != ALONE:
            spread = f"{success.min():.3f} to {success.max():.3f}, mean {success.mean():.3f}"
            text = f"{config.learning.method}: a message arrives with probability {spread}, or is {then}"
            if config.channel.recovery and not config.resends:
                text += f", in bursts of {1 / config.channel.recovery:.3g} rounds"
            is_biased = config.learning.method != FED_AVG and success.min() < success.max()
            lines[text + ("; the sum over devices is biased towards those near the server" if is_biased else "")] = None
    return list(lines)
