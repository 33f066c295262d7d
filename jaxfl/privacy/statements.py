"""Statements of privacy: one builder for all families of algorithms, and the text of an epsilon for people.

The text always has the bound, the neighboring relation and delta beside the epsilon.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

RELATIONS = {  # in words
    "add_or_remove_one": "add or remove one sample",
    "replace_one": "replace one sample",
    "zero_out": "zero out one sample",
    "zero_out_client": "zero out one client",
}
_NEIGHBORS = {  # data that nobody can tell from a run's own, beyond epsilon
    "add_or_remove_one": "one sample is missing or more",
    "replace_one": "another sample stands in the place of one",
    "zero_out": "one sample's gradient counts as 0",
    "zero_out_client": "one client's whole update counts as 0",
}
# Parts of assumptions, word for word; `REMARKS` has the remark that a printed epsilon carries where one of them stands.
ASSUMED = "assumed, not enforced"
REFUTED = "refuted at this noise"
AT_EXPECTED_WAKING = "at the expected number of wake-ups"
# Assumptions that a statement on a private selection takes back.
ONE_RUN = "it is of one run of one seed; others on the same data have batches and noise of their own, and add to it"
UNPAID_CHOICE = "the choice of hyper-parameters is not accounted for"
NO_NOISE = "No noise is added"  # the beginning of a reason
_NO_BOUND = "no bound"
_SIMULATION = "simulation: its seed is public"
SIMULATED = f"{_SIMULATION}, and whoever reads it can take the noise off, so that nothing of the run may be published"
SECRET = "batches and noise are made from a key of 64 bits, which stays secret"
# The 1 % is 2^-8 + b 2^-22 for at most b = 16,384 terms (tests/gradients/test_rounded_sums.py).
FLOAT_SUM = (
    "a sum of bounded terms counts as exact, though in float32 rounding lets one move it by up to 1 % more (the running"
    " mean of a large table by more on a CPU, see docs/finite_precision.md)"
)
# The shares are those of tests/privacy/test_float_noise.py.
FLOAT_NOISE = (
    f"{FLOAT_SUM}; batches and noise from the threefry pseudo-random generator, in float32, count as ideal, which"
    " float32 is not: of one released vector of 20,000 numbers a neighboring state can give only 9 to 95 %, and the"
    " true one all"
)
_LEFT_OUT = ("not accounted", "not cover", "no epsilon covers", "add to it", "resumed", "are public", "seed is public")
REMARKS = {
    ASSUMED: "assumed bound",
    REFUTED: REFUTED,
    AT_EXPECTED_WAKING: AT_EXPECTED_WAKING,
    _NO_BOUND: _NO_BOUND,
}
_PUBLISHES_ONE = "a mechanism that publishes one of them at random satisfies this"
_ASKED = "target: "
_FAR_BELOW = 0.9  # share of the worst node's epsilon; a median below it is printed, too
_MOST_PROTECTING = 100.0  # an epsilon above it lets an observer be sure: exp(100) is 3e43
_NO_PROTECTION = "so large that it protects nothing"


class Statement(NamedTuple):
    """One guarantee, or why there is none. `print` shows it as `statement_text` does."""

    bound: str  # "published", "reconstructed" (our reading of a paper's formula that could not be obtained) or "proven"
    dp_epsilon: float | None  # of the worst node
    dp_delta: float  # the largest of all nodes
    neighboring_relation: str  # of `RELATIONS`
    accountant: str  # how epsilon was found
    nodes: int  # of the network
    assumptions: tuple[str, ...]
    reason: str | None  # why dp_epsilon is None
    node_epsilons: tuple[float, ...] = ()  # of every node, run after run where there are several; else empty
    mechanism: str = ""  # releases of the worst node: their number, noise and samples
    observer: str = ""  # from whom it protects

    def __str__(self) -> str:
        return statement_text(self._asdict())

    def __repr__(self) -> str:
        return f"Statement({self}; {len(self.assumptions)} assumptions)"


def statement(
    bound: str,
    relation: str,
    *,
    dp_epsilon: float | None,
    dp_delta: float,
    accountant: str,
    nodes: int,
    gradients: str | None,
    setting: Sequence[str],
    noise: str = FLOAT_NOISE,
    notes: Sequence[str] = (),
    reason: str | None = None,
    node_epsilons: Sequence[float] = (),
    mechanism: str = "",
    observer: str = "",
    num_records: float = 0,
) -> Statement:
    """A statement with everything that it rests on.

    Args:
        bound, relation, dp_delta, accountant, nodes: as in `Statement`.
        dp_epsilon: None, or infinite, where there is none.
        gradients: what keeps one sample's gradient small; None where nothing does.
        setting: what the family of algorithms takes for granted.
        noise: how random numbers are made, and how exactly.
        notes: what only this statement rests on.
        reason: why there is no epsilon; an infinite one has a reason by itself.
        node_epsilons, mechanism, observer: as in `Statement`.
        num_records: samples, or clients, of the network that the statement protects; 0: unknown.
    """
    if dp_epsilon is not None and not math.isfinite(dp_epsilon):
        dp_epsilon, reason = None, "No finite epsilon is known at this delta."
    return Statement(
        bound=bound,
        dp_epsilon=dp_epsilon,
        dp_delta=dp_delta,
        neighboring_relation=relation,
        accountant="none" if dp_epsilon is None else accountant,
        nodes=nodes,
        assumptions=(
            *(() if gradients is None else (gradients,)),
            ONE_RUN,
            "a resumed run repeats the rounds after its last checkpoint with the same numbers (same machine and"
            " versions)",
            *setting,
            noise,
            UNPAID_CHOICE,
            "it does not cover what is measured or kept without noise: losses, metrics and pictures; whether a run"
            " diverged; checkpoints, which hold raw gradients and states",
            *notes,
            *_large_delta(dp_delta, num_records, relation),
        ),
        reason=reason,
        node_epsilons=() if dp_epsilon is None else tuple(map(float, node_epsilons)),
        mechanism=mechanism,
        observer=observer,
    )


def leaves_out(assumption: str) -> bool:
    """Tell whether an assumption says what an epsilon does not cover, and not what it rests on.

    Examples:
        >>> leaves_out(UNPAID_CHOICE), leaves_out("every sample's gradient is clipped to the L2 norm 2")
        (True, False)
    """
    return any(words in assumption for words in _LEFT_OUT)


def _large_delta(dp_delta: float, num_records: float, relation: str) -> tuple[str, ...]:
    """Say that a delta allows to publish a whole record; nothing where it is below 1 / `num_records`."""
    if dp_delta * num_records < 1:
        return ()
    records = "clients" if relation == "zero_out_client" else "samples"
    product = f"delta {dp_delta:g} times {round(num_records):,} {records} is {dp_delta * num_records:.3g}"
    return (f"{product}: {_PUBLISHES_ONE}",)


def asked_first(
    statements: Sequence[Mapping[str, Any]], bound: str, relation: str | None = None
) -> list[dict[str, Any]]:
    """Move the statement that the run's privacy budget is about to the front, and mark it with "asked": True.

    Args:
        statements: as in summary.json.
        bound: of the budget.
        relation: of the budget; None for the first statement of the bound.

    Returns:
        The statements, unchanged where none has this bound and relation.

    Examples:
        >>> rows = [{"bound": bound, "neighboring_relation": "zero_out"} for bound in ("published", "proven")]
        >>> [(row["bound"], "asked" in row) for row in asked_first(rows, "proven")]
        [('proven', True), ('published', False)]
    """
    rows = [dict(stated) for stated in statements]
    fits = [row["bound"] == bound and relation in (None, row["neighboring_relation"]) for row in rows]
    return [{**rows.pop(fits.index(True)), "asked": True}, *rows] if any(fits) else rows


def drawn(what: str, sampler: str, rate: float, noise_multiplier: float) -> str:
    """Describe a release in words: its noise multiplier, as `noise_text`, and the share of samples or clients in it."""
    which = f"{what} drawn at rate {rate:.4g} ({sampler})" if rate < 1 else f"all {what}"
    return f"noise multiplier {noise_text(noise_multiplier)}, {which}"


def is_unbounded(release: Any, bound: str) -> bool:
    """True if nothing bounds a sample's gradient: it is not clipped, or a proof would rest on an assumed norm."""
    return release.clip_norm is None or (release.assumed and bound == "proven")


def statement_text(statement: Mapping[str, Any]) -> str:
    """One statement in one line.

    Args:
        statement: as in summary.json: "bound", "dp_epsilon", "dp_delta", "neighboring_relation", and "reason" where
            there is no epsilon; "observer", "mechanism", "assumptions", "asked" and "dp_epsilon_median_node" where
            there are any.

    Guarantees:
        - the epsilon is rounded up.
        - an epsilon on an assumed bound, or one that is refuted, says so.
        - an epsilon above 100 says that it protects nothing.
        - a delta of 1 / samples, or more, says what it allows.
        - a median far below the worst node's epsilon is printed beside it.
        - an epsilon stands with its observer and its mechanism, so that it can be quoted by itself.

    Examples:
        >>> proven = {"bound": "proven", "dp_epsilon": 2.5, "dp_delta": 1e-5, "neighboring_relation": "zero_out"}
        >>> statement_text(proven)
        'ε = 2.5 proven (zero out one sample, δ = 1e-05)'
        >>> statement_text({**proven, "dp_epsilon": None, "reason": "Nothing is clipped."})
        'no proven ε (zero out one sample, δ = 1e-05): Nothing is clipped.'
    """
    ground, prefix = _ground(statement), _ASKED if statement.get("asked") else ""
    if statement["dp_epsilon"] is None:
        return f"{prefix}no {statement['bound']} ε ({ground}): {statement.get('reason')}"
    remarks = "".join(f", {remark}" for remark in _remarks(statement))
    mechanism = f"; {statement['mechanism']}" if statement.get("mechanism") else ""
    return f"{prefix}{_epsilon(statement, 4)} {statement['bound']}{against(statement)} ({ground}{mechanism}{remarks})"


def caption(privacy: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """One line for each bound, relation and delta, with the epsilon of every case, for the foot of a picture.

    The line of the statement that the run's privacy budget is about stands first.

    Args:
        privacy: name of a case (an algorithm with its data and seeds) -> its statements.

    Guarantees:
        - every epsilon is rounded up.
        - an epsilon on an assumed bound, or one that is refuted, says so.
        - a simulation is marked.

    Examples:
        >>> one = {"bound": "proven", "dp_epsilon": 2.5, "dp_delta": 1e-5, "neighboring_relation": "zero_out"}
        >>> caption({"VR": [one], "plain": [{**one, "dp_epsilon": 1.0}]})
        ['proven (zero out one sample, δ = 1e-05): VR: ε = 2.5 | plain: ε = 1']
    """
    groups: dict[str, dict[str, Mapping[str, Any]]] = {}
    for case, statements in privacy.items():
        for stated in statements:
            prefix = _ASKED if stated.get("asked") else ""
            groups.setdefault(f"{prefix}{stated['bound']}{against(stated)} ({_ground(stated)})", {})[case] = stated
    in_order = sorted(groups.items(), key=lambda group: not group[0].startswith(_ASKED))
    return [f"{key}: {_epsilons(group, len(privacy))}{_remarked(group)}" for key, group in in_order] + simulation(
        privacy
    )


def simulation(privacy: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """List the line that marks statements of a simulation; empty where there are none.

    Args:
        privacy: name of a case -> its statements.
    """
    texts = (text for stated in privacy.values() for each in stated for text in each.get("assumptions", ()))
    return [_SIMULATION] if any(text == SIMULATED for text in texts) else []


def neighbors(statements: Iterable[Mapping[str, Any]]) -> list[str]:
    """List the line that explains the neighboring relations of statements with an epsilon; empty without one.

    Examples:
        >>> neighbors([{"dp_epsilon": 2.5, "neighboring_relation": "zero_out"}])
        ["ε limits how well anyone tells the data from other data in which one sample's gradient counts as 0 (zero ...
        >>> neighbors([{"dp_epsilon": None, "neighboring_relation": "zero_out"}])
        []
    """
    known = dict.fromkeys(one["neighboring_relation"] for one in statements if one["dp_epsilon"] is not None)
    texts = [f"{_NEIGHBORS[name]} ({RELATIONS[name]})" for name in known if name in _NEIGHBORS]
    return [f"ε limits how well anyone tells the data from other data in which {', or '.join(texts)}"] if texts else []


def against(statement: Mapping[str, Any]) -> str:
    """Name the observer of a statement, " against all other nodes" say; empty where it has none."""
    return f" against {statement['observer']}" if statement.get("observer") else ""


def with_epsilon(statements: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The first statement that has an epsilon: that of the budget, where there is one."""
    return next((one for one in statements if one["dp_epsilon"] is not None), None)


def grounds(privacy: Iterable[Iterable[Mapping[str, Any]]]) -> str:
    """Bound, observers, relation and delta of each case's first epsilon; "or" between those that differ.

    Examples:
        >>> one = {"bound": "proven", "dp_epsilon": 1.0, "neighboring_relation": "replace_one", "observer": "a server"}
        >>> one |= {"dp_delta": 1e-5}
        >>> grounds([[one], [one], [], [one | {"observer": "its nodes"}]])
        'proven against a server or its nodes, replace one sample, δ = 1e-05'
    """
    observers: dict[tuple[str, str], dict[str, None]] = {}
    for one in filter(None, map(with_epsilon, privacy)):
        observers.setdefault((one["bound"], _ground(one)), {})[one.get("observer") or ""] = None
    texts = []
    for (bound, ground), names in observers.items():
        some = " or ".join(filter(None, names))
        texts.append(f"{bound}{f' against {some}' if some else ''}, {ground}")
    return " or ".join(texts)


def rounded_up(value: float, digits: int) -> str:
    """The least number of this many significant digits that is not below `value`: for an epsilon that is claimed.

    Examples:
        >>> rounded_up(2.00049, 4), rounded_up(8.0, 4)
        ('2.001', '8')
    """
    return _rounded(value, digits, decimal.ROUND_CEILING)


def rounded_down(value: float, digits: int) -> str:
    """The largest such number that is not above `value`: for a lower bound on epsilon."""
    return _rounded(value, digits, decimal.ROUND_FLOOR)


def noise_text(noise: float) -> str:
    """A noise rounded up, so that it keeps the epsilon beside it, but not for what float arithmetic adds.

    Examples:
        >>> noise_text(1.28642), noise_text(1.1 + 2e-16)
        ('1.287', '1.1')
    """
    return rounded_up(float(f"{noise:.12g}"), 4)


def _rounded(value: float, digits: int, rounding: str) -> str:
    """Round the shortest decimal form of `value` to this many significant digits."""
    rounded = decimal.Context(prec=digits, rounding=rounding).create_decimal(repr(float(value)))
    return f"{float(rounded):.{digits}g}"


def _ground(statement: Mapping[str, Any]) -> str:
    """Relation and delta."""
    relation = statement["neighboring_relation"]
    return f"{RELATIONS.get(relation, relation)}, δ = {statement['dp_delta']:g}"


def _epsilon(statement: Mapping[str, Any], digits: int) -> str:
    """The worst node's epsilon, with the nodes' median where that is far below."""
    worst, median = statement["dp_epsilon"], statement.get("dp_epsilon_median_node")
    text = f"ε = {rounded_up(worst, digits)}"
    if median is None or median >= _FAR_BELOW * worst:
        return text
    return f"{text} at the worst node, median {rounded_up(median, digits)},"


def _remarks(statement: Mapping[str, Any]) -> list[str]:
    """List the remarks that a reader of the statement's epsilon must know."""
    if statement["dp_epsilon"] is None:
        return []
    texts = statement.get("assumptions", ())
    remarks = [remark for part, remark in REMARKS.items() if any(part in text for text in texts)]
    remarks += [text for text in texts if text.endswith(_PUBLISHES_ONE)]
    return remarks + [_NO_PROTECTION] * (statement["dp_epsilon"] > _MOST_PROTECTING)


def _remarked(group: Mapping[str, Mapping[str, Any]]) -> str:
    """The remarks of a line, with the cases that they are on unless these are all."""
    cases: dict[str, list[str]] = {}
    for name, statement in group.items():
        for remark in _remarks(statement):
            cases.setdefault(remark, []).append(name)
    text = ""
    for remark, names in cases.items():
        some = ", ".join(names) if len(names) <= 4 else f"{len(names)} cases"
        text += f"; {remark}" + ("" if len(names) == len(group) else f": {some}")
    return text


def _epsilons(group: Mapping[str, Mapping[str, Any]], num_cases: int) -> str:
    """Every case's epsilon; for many cases the range, for equal epsilons the value and whose it is."""
    values = {name: statement["dp_epsilon"] for name, statement in group.items()}
    known = [value for value in values.values() if value is not None]
    silent = [name for name, one in group.items() if (one.get("reason") or "").startswith(NO_NOISE)]
    if not known:
        return "no noise, no ε" if len(silent) == len(group) else "no ε"
    texts = sorted({rounded_up(value, 3) for value in known}, key=float)
    if len(values) > 1 and len(texts) == 1 and len(known) == len(values):
        whole = {_epsilon(statement, 3) for statement in group.values()}
        some = " | ".join(group) if len(group) <= 4 else f"{len(group)} of {num_cases} cases"
        whose = "each case" if len(group) == num_cases else some
        return f"{whole.pop() if len(whole) == 1 else f'ε = {texts[0]}'} for {whose}"
    if len(values) > 4:
        others = len(values) - len(known) - len(silent)
        without = f" ({len(silent)} without noise: no ε holds)" * bool(silent) + f" ({others} without ε)" * bool(others)
        return (f"ε = {texts[0]}" if len(texts) == 1 else f"ε from {texts[0]} to {texts[-1]}") + without
    shown = {name: "no ε" if values[name] is None else _epsilon(group[name], 3).rstrip(",") for name in values}
    shown |= dict.fromkeys(silent, "no noise, no ε")
    return " | ".join(f"{name}: {text}" for name, text in shown.items())  # names may hold commas
