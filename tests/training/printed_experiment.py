"""A small experiment whose runs have everything that is printed.

It has named sites with noise of their own, seeds that differ, a lane that diverges, a baseline that is better than all
private rows, costs, and statements with and without an epsilon.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from toy_problem import TASK, TOY_LEDGER, toy_data, toy_test, toy_that_counts

from jaxfl import core
from jaxfl.data import federate
from jaxfl.frame import Experiment, Prepared, Publication, Row, Run, affects_statements_only, programs, traced
from jaxfl.privacy.statements import FLOAT_NOISE, statement
from jaxfl.training import Case

SITES = ("=Oslo", "<Lund>", "Bergen", "Espoo")
SIZES = {3: (7, 12, 9, 11), 1: (13, 4, 10, 8), 0: (9, 9, 9, 9)}  # of a seed's sites
FRAGILE, LARGE = 3, 50  # the seed whose first site has less than 9 samples, and diverges above this step size


@dataclasses.dataclass(frozen=True)
class Learning:
    """The learning."""

    step_size: float = traced(0.01)
    """Step size; at 100 seed 3 diverges, and a budget ends the others."""
    noise: float = affects_statements_only(0.5)
    """Noise of the first site; the others have 2, 3 and 4 times this."""
    rounds: int = 15
    """Number of rounds."""
    dp_delta: float = affects_statements_only(1e-5)
    """Delta."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One run."""

    learning: Learning = Learning()
    run: Run = Run(evaluate_every=5)
    publication: Publication = Publication()

    def algorithm(self) -> core.Algorithm:
        """The toy's; a loss is NaN in the second evaluation of a fragile seed."""
        plain = toy_that_counts({"step_size": self.learning.step_size})

        def update(state, data, draws):
            is_bad = (state.round_index >= 7) & (data.sizes[0] < 9) & (self.learning.step_size > LARGE)
            new, info = plain.update(state, data, draws)
            return new, info._replace(loss=jnp.where(is_bad, jnp.float32(np.nan), info.loss))

        return core.algorithm(plain.init, plain.draw, update, plain.node_params)


@functools.cache
def data_of(seed: int) -> core.FederatedData:
    """Sites of a seed's own sizes."""
    whole, *_ = toy_data(seed)
    ends = np.cumsum((0, *SIZES[seed]))
    parts = [np.arange(*part) for part in itertools.pairwise(ends)]
    return federate(whole.inputs, whole.labels, parts, names=SITES)


def epsilon_of(rounds: int, noise: float, size: int, dp_delta: float) -> float:
    """A formula of the toy's; what is printed must be its value."""
    return rounds * math.sqrt(math.log(1 / dp_delta)) / (noise * size)


def noises(config: Configuration) -> tuple[float, ...]:
    """Noise of each site."""
    return tuple(config.learning.noise * times for times in (1, 2, 3, 4))


def _statements(config: Configuration, seeds: tuple[int, ...], rounds: int, *, dp_delta: float | None = None):
    delta = config.learning.dp_delta if dp_delta is None else dp_delta
    facts: Any = {"dp_delta": delta, "accountant": "toy", "nodes": 4, "gradients": None, "setting": ()}
    rows = [statement("published", "replace_one", dp_epsilon=None, reason="No noise.", **facts)]
    for factor, relation in ((1, "zero_out"), (2, "replace_one")):
        noise: Any = noises(config) if config.learning.noise else ()
        own = [
            factor * epsilon_of(rounds, *at, delta) for seed in seeds for at in zip(noise, SIZES[seed], strict=False)
        ]
        message = (
            {"mechanism": f"noise {noise[0]:g}", "notes": [f"step size {config.learning.step_size:g}"]} if own else {}
        )
        worst = max(own) if own else None
        each = {"dp_epsilon": worst, "node_epsilons": own, "reason": None if own else "No noise.", "noise": FLOAT_NOISE}
        rows.append(statement("proven", relation, **each, **message, **facts))
    return [row._asdict() for row in rows]


def prepare(rows: Mapping[str, Row]) -> Prepared:
    """The cases."""
    cases = {}
    for name, (build, numbers) in programs(rows, Configuration.algorithm).items():
        config, seeds, settings = rows[name]
        cases[name] = Case(
            algorithm=build,
            numbers=numbers,
            task=TASK,
            test=toy_test(),
            data=data_of,
            seeds=seeds,
            num_rounds=config.learning.rounds,
            evaluate_every=config.run.evaluate_every,
            settings=settings,
            privacy=functools.partial(_statements, config, seeds),
            noise_stds=noises(config) if config.learning.noise else (),
            final_params_are_private=True,
            max_rounds=12 if config.learning.step_size > LARGE else None,
            ledger=TOY_LEDGER,
        )
    return Prepared(cases, ["what is about to run"])


EXPERIMENT = Experiment(
    name="printed",
    description="A run of which everything is printed.",
    base=Configuration(),
    prepare=prepare,
    labels={"step_size": "step {}", "noise": "noise {}"},
    columns=("test_accuracy", "test_accuracy_worst_node", "test_accuracy_average_model", "train_loss"),
    baselines={"without_noise": lambda row: {"noise": 0.0, "step_size": 0.5}},
)
