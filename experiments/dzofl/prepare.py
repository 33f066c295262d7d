"""From lines of experiments.dzofl to variants: checks, ledgers, and what is told before the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxfl.core.tree import size
from jaxfl.frame import Line, Prepared, variants_of
from jaxfl.training.chunks import check_start

from .options import FED_AVG, Point, check_point


def prepare(lines: Mapping[str, Line]) -> Prepared:
    """The variants of all lines; what cannot run is refused before any work."""
    for line in lines.values():
        line.point.clients.data(line.point.data)(line.seeds[0])  # refuses more devices than there are samples
        check_point(line.point)

    def of_line(name: str, line: Line) -> dict[str, Any]:
        point: Point = line.point
        data_of = point.clients.data(point.data)
        for seed in line.seeds:
            check_start(point.algorithm(), jax.random.key(seed), data_of(seed))
        return {"data": data_of, "num_rounds": point.learning.rounds, "ledger": point.ledger()}

    variants = variants_of(lines, Point.algorithm, of_line)
    return Prepared(variants, [_shared(next(iter(lines.values())).point), *_links(lines)])


def _shared(point: Point) -> str:
    """Describe the data and the model of the first line, which all lines share."""
    dataset, clients = point.data.load(), point.clients
    num_params = size(jax.eval_shape(point.task().init, jax.random.key(0)))
    return (
        f"{dataset.name}: {len(dataset.train_labels)} samples of {dataset.num_classes} classes over {clients.nodes} "
        f"devices ({clients.partition}), model {point.network.model} with d = {num_params} parameters; quantizer "
        f"{point.channel.quantizer}"
    )


def _links(lines: Mapping[str, Line]) -> list[str]:
    """Describe links that lose messages: how often, and what happens then."""
    told = {}
    for line in lines.values():
        point, success = line.point, np.asarray(line.point.success())
        then = "sent again" if point.resends else "lost"
        if success.min() < 1:
            spread = f"{success.min():.3f} to {success.max():.3f}, mean {success.mean():.3f}"
            text = f"{point.learning.method}: a message arrives with probability {spread}, or is {then}"
            biased = point.learning.method != FED_AVG and success.min() < success.max()
            told[text + ("; the sum over devices is biased towards near ones" if biased else "")] = None
    return list(told)
