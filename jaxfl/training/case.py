"""Description for `train` of one case, a line of a comparison, and of the measurements on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxfl.channel import Costs, Ledger
from jaxfl.channel.ledger import COUNTED, check_counts
from jaxfl.core import Algorithm, ArgumentError, Array, FederatedData, PyTree, Task
from jaxfl.core.check import at_least, one_of, open_unit, positive
from jaxfl.core.reprs import short_repr
from jaxfl.privacy.releases import releases_of
from jaxfl.training.chunks import COSTS, default_chunk_rounds
from jaxfl.training.run_directory import slug
from jaxfl.training.sharding import Placement

Number = float | tuple[float, ...]
"""A number of a case, or one for each node."""


class EvaluationSet(NamedTuple):
    """A test set on the device in equal batches; the last is filled up with copies of a sample that do not count."""

    inputs: Array  # (m, b, *sample)
    labels: Array  # (m, b, ...)
    counts: Array  # (m, b), bool, False for the copies

    __repr__ = short_repr


class Scores(NamedTuple):
    """Metrics of one evaluation, each a sum over the test set; the host divides them in float64."""

    nodes: dict[str, Array]  # name -> (n,) float
    average_model: dict[str, Array]  # name -> () float
    num_samples: Array  # (), int32


class Measure(NamedTuple):
    """Numbers measured at every evaluation.

    Attributes:
        compute: (node_params with leaves (n, *leaf), arrays) -> name -> () float, entries of the metrics line; or
            `Scores`, always for the entry "test" of `Case.measures`. Pure and traced.
        prepare: (base key (), data on the device) -> arrays, a pytree, once a seed. The arrays are an argument of the
            compiled program, never a constant of it. A leaf that is the same object for all seeds is held once.
        data: seed -> the data, or several in a tuple, that `prepare` takes in place of the training data; None: these.
    """

    compute: Callable[[PyTree, PyTree], Scores | Mapping[str, Array]]
    prepare: Callable[[Array, Any], PyTree]
    data: Callable[[int], PyTree] | None = None

    __repr__ = short_repr


def larger_is_worse(metric: str) -> bool:
    """True for a loss, an error, a perplexity or a distance, by the end of its name; others are best where largest.

    Examples:
        >>> larger_is_worse("test_loss_worst_node"), larger_is_worse("own_error"), larger_is_worse("test_accuracy")
        (True, True, False)
    """
    for part in ("_worst_node", "_average_model", "_spread"):
        metric = metric.removesuffix(part)
    return metric.endswith(("loss", "error", "perplexity", "distance"))


class Case(NamedTuple):
    """One line of a comparison.

    Cases share one compiled program if they have the same objects `algorithm`, `data`, `task` and `test`, the same
    measures, rounds and names of numbers. A case with one of its seeds is a lane of that program.

    Attributes:
        algorithm: numbers -> algorithm. Called with float32 arrays, traced ones and, for its checks, concrete ones: ()
            for a number, (k,) for a tuple.
        task: what is learned; how the engine runs it over nodes.
        test: the test set of the standard evaluation.
        data: seed -> training data.
        seeds: distinct; each has a base key and training data of its own.
        num_rounds: rounds of each seed.
        evaluate_every: rounds between evaluations; round 0 and the last round are always evaluated.
        numbers: name -> finite number, or a tuple of them, one a node for example; cases of one program may differ in
            these.
        settings: name -> value of the options that vary: columns of results.csv and "settings" of the summary.
        identity: name -> everything that tells this case from all others that see the same data, as `run_key` takes
            it: batches and noise depend on it, initial parameters do not. Default: name, settings, numbers and rounds,
            so that lanes of different runs need different names.
        measures: name -> what is measured besides the standard evaluation. An entry "test" replaces that evaluation.
        dp_delta: in (0, 1): the learner itself says what it releases, and the summary has its statements at this delta.
        privacy: in place of these: rounds that really ran -> statements of the summary. Called with the totals of
            `released` by name, too, as in privacy(12, local_iterations=40).
        released: names of `chunks.COSTS` that the statements depend on besides the rounds. A total counts all rounds
            that ran, those after a seed's last line included.
        noise_stds: standard deviation of the noise on what each node sends, (n,), or (1,) for all, or () for none
            known: a column of sites.csv.
        final_params_are_private: whether the statements cover the nodes' last parameters, because these are computed
            from noisy releases only.
        max_rounds: most rounds that the privacy budget pays for; a seed ends there.
        budgets: cost (of `chunks.COSTS`, summed over rounds and nodes) -> most that may be spent. A seed ends, and is
            evaluated, at the end of the chunk (the rounds of one compiled call) in which a budget is reached.
        ledger: turns the counts of the rounds into operations, simulated seconds and joules, on the host; None leaves
            these out.
        chunk_rounds: most rounds in one compiled call. Default: all between two evaluations, at most 100. Without
            budgets they also take at most about 30 s, estimated from the first round.
        placement: the devices that share the nodes, or the lanes. Default: on a CPU its devices share the lanes, or the
            work of a task whose `node_loop` asks for that; else the first device does all.
        class_names: names of the classes, in the order of the model's outputs, for files of parameters; () for none.
    """

    algorithm: Callable[[Mapping[str, Array]], Algorithm]
    task: Task
    test: EvaluationSet
    data: Callable[[int], FederatedData]
    seeds: tuple[int, ...]
    num_rounds: int
    evaluate_every: int
    numbers: Mapping[str, Number] = {}
    settings: Mapping[str, Any] = {}
    identity: Mapping[str, Any] = {}
    measures: Mapping[str, Measure] = {}
    dp_delta: float | None = None
    privacy: Callable[..., Sequence[Mapping[str, Any]]] | None = None
    released: tuple[str, ...] = ()
    noise_stds: tuple[float, ...] = ()
    final_params_are_private: bool = False
    max_rounds: int | None = None
    budgets: Mapping[str, float] = {}
    ledger: Ledger | None = None
    chunk_rounds: int | None = None
    placement: Placement | None = None
    class_names: tuple[str, ...] = ()

    __repr__ = short_repr

    @property
    def last_round(self) -> int:
        """Last round of a seed, unless something ends it earlier."""
        return self.num_rounds if self.max_rounds is None else min(self.num_rounds, self.max_rounds)

    @property
    def num_node_shares(self) -> int:
        """Devices that share the nodes."""
        return 1 if self.placement is None else self.placement.num_node_shares

    @property
    def rounds_per_call(self) -> int:
        """Most rounds in one compiled call."""
        chunk = default_chunk_rounds(min(self.evaluate_every, self.num_rounds))
        return chunk if self.chunk_rounds is None else self.chunk_rounds


def with_statements(case: Case, sizes: Sequence[Sequence[int]]) -> Case:
    """The case with what its learner states; `sizes` are the samples of each node, seed by seed.

    Raises:
        ArgumentError: a learner that does not say what it releases.
    """
    if case.dp_delta is None or case.privacy is not None:
        return case
    releases = releases_of(case.algorithm({name: jnp.float32(value) for name, value in case.numbers.items()}), sizes)
    account = partial(releases.account, releases.each, dp_delta=case.dp_delta)
    account()  # refuses what it cannot account for, before any work

    def privacy(num_rounds, **totals):
        return [statement._asdict() for statement in account(**totals).statements(num_rounds)]

    return case._replace(privacy=privacy)


def check_cases(cases: Mapping[str, Case]) -> None:
    """Refuse cases that cannot label or steer a run.

    Raises:
        ArgumentError: no mapping of names to cases, names that give the same directory, seeds or rounds out of range,
            numbers that are not finite.
    """
    remedy = "Pass {name: Case(...)}."
    if not isinstance(cases, Mapping):
        raise ArgumentError("cases", "must map names to cases", f"got {type(cases).__name__}", remedy)
    if not cases:
        raise ArgumentError("cases", "must hold at least one case", "got none", remedy)
    for name, case in cases.items():
        if not isinstance(name, str) or not isinstance(case, Case):
            found = f"got {type(case).__name__} as {name!r}"
            raise ArgumentError("cases", "must map names to cases", found, remedy)
    slugs: dict[str, str] = {}
    for name, case in cases.items():
        if not slug(name) or slug(name) in slugs:
            found = f"got {name!r}" + (f" beside {slugs[slug(name)]!r}" if slug(name) else "")
            remedy = "Choose names that differ in letters or digits."
            raise ArgumentError("cases", "must have names that give distinct directory names", found, remedy)
        slugs[slug(name)] = name
        _check(name, case)


def costs_of(case: Case, fields: Sequence[str]) -> tuple[str, ...]:
    """List the counted quantities: the fields of the algorithm's info, and what a ledger computes from them."""
    return tuple(fields) if case.ledger is None else (*fields, *Costs._fields)


def check_counted(case: Case, fields: Sequence[str], num_nodes: int) -> None:
    """Refuse totals of numbers that the algorithm does not count; `fields` are those of its info."""
    if len(case.noise_stds) not in (0, 1, num_nodes):
        found, remedy = f"got {len(case.noise_stds)} for {num_nodes}", "Pass one for each node, or one for all."
        raise ArgumentError("noise_stds", "must fit the nodes", found, remedy)
    if case.ledger is not None:
        check_counts(fields)
        case.ledger.of_round(dict.fromkeys(COUNTED, np.zeros(num_nodes)))  # refuses another number of nodes
    counted = costs_of(case, fields)
    for argument, names in (("released", case.released), ("budgets", case.budgets)):
        for cost in names:
            if cost not in counted:
                found = f"{cost} is none of {', '.join(counted)}"
                remedy = "Leave it out, or count it in the algorithm's info, or give a ledger that computes it."
                raise ArgumentError(argument, "must name what the algorithm counts", found, remedy)


def _check(name: str, case: Case) -> None:
    at_least(1, num_rounds=case.num_rounds, evaluate_every=case.evaluate_every)
    at_least(1, max_rounds=case.last_round, chunk_rounds=case.rounds_per_call)
    if case.num_rounds >= 2**31:  # an int32 counts them
        found, remedy = f"got {case.num_rounds}", "Train in several runs."
        raise ArgumentError("num_rounds", "must be below 2^31", found, remedy)
    if case.dp_delta is not None:
        open_unit(dp_delta=case.dp_delta)
        if case.privacy is not None:
            remedy = "Leave one out: the learner says what it releases."
            raise ArgumentError("privacy", "must be None with dp_delta", f"{name} has both", remedy)
    seeds = case.seeds
    if not seeds or len(set(seeds)) != len(seeds):
        raise ArgumentError("seeds", "must be distinct and at least one", f"got {list(seeds)}", "Pass e.g. 0 1 2.")
    for seed in seeds:
        at_least(0, seeds=seed)
        if seed >= 2**32:  # a larger seed would lose its upper bits
            raise ArgumentError("seeds", "must lie in [0, 2^32)", f"got {seed}", "Pass e.g. 0 1 2.")
    for number, value in case.numbers.items():
        each = value if isinstance(value, tuple) else (value,)
        if any(isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one) for one in each):
            remedy = "Build values that are not numbers into the algorithm."
            raise ArgumentError(f"numbers.{number}", "must be a finite number", f"{name} has {value!r}", remedy)
    for measure, value in case.measures.items():
        if not isinstance(value, Measure):
            found = f"{name} has a {type(value).__name__}"
            raise ArgumentError(f"measures.{measure}", "must be a Measure", found, "Pass Measure(compute, prepare).")
    for cost in case.released:
        one_of(COSTS, released=cost)
    for cost, most in case.budgets.items():
        one_of(COSTS, budgets=cost)
        positive(**{f"budgets.{cost}": most})
