"""Statements for people: what an epsilon rests on, and how it is written, never without bound, relation and delta."""

from __future__ import annotations

import decimal
from collections.abc import Mapping, Sequence
from typing import Any

from jaxfl.privacy.proven import RELATIONS, Release

# How these assumptions read, word for word, and the remark that a printed epsilon then carries.
ASSUMED = "assumed, not enforced"
REFUTED = "refuted at this noise"
NO_BOUND = "no bound"
REMARKS = {ASSUMED: "assumed bound", REFUTED: REFUTED, NO_BOUND: NO_BOUND}


def assumptions(
    algorithm: str, bound: str, release: Release, *, leak: float | None, waking: tuple[int, float] | None
) -> tuple[str, ...]:
    """What a statement rests on.

    Args:
        algorithm, bound: as for `jaxfl.privacy.epsilon`.
        release: of the worst node.
        leak: an epsilon above the one that is published, which is leaked already; None where there is none.
        waking: how often a node wakes at most, and the probability of more, where delta includes it.
    """
    shared = (
        *_bound_on_gradients(bound, release),
        "one run of one seed; runs on the same data compose",
        "a resumed run repeats the rounds after its last checkpoint with the same numbers (same machine and versions)",
        "all messages of a node are visible and nothing else (no losses, no metrics)",
        "a sample is held by one node, and where samples are placed (by label, say) does not depend on the changed one",
        "the node's number of entries J, the batch b and q = b / J are public and fixed",
        "batches and noise from the threefry pseudo-random generator, in float32, count as ideal",
        "the choice of hyper-parameters is not accounted for",
    )
    if waking is not None:
        return (*shared, f"a node wakes at most {waking[0]} times but for a probability {waking[1]:g}, part of delta")
    if bound == "proven" or algorithm == "PrivSGP":
        return shared
    if algorithm == "PrivSGP-VR":
        theorem = (
            "Theorem 2 of the paper holds with this c2, which the paper does not state, and epsilon < c1 K / J^2",
            "the paper names no neighboring relation; replace_one is what its sampler means",
        )
        if leak is None:
            return (*shared, *theorem)
        refuted = f"{REFUTED}: gradients that never change already leak epsilon {rounded_down(leak, 3)}"
        return (*shared, *theorem, refuted)
    reconstructed = (*shared, "formula reconstructed: the original's could not be retrieved")
    return reconstructed if algorithm == "DP2-SGD" else (*reconstructed, "a node wakes no more often than expected")


def statement_text(statement: Mapping[str, Any]) -> str:
    """One statement in one line.

    Args:
        statement: as in summary.json: "bound", "dp_epsilon", "dp_delta", "neighboring_relation", and "reason" where
            there is no epsilon; "assumptions" where there are any.

    Guarantees:
        - the epsilon is rounded up.
        - an epsilon on an assumed bound, or one that is refuted, says so.

    Example:
        >>> proven = {"bound": "proven", "dp_epsilon": 2.5, "dp_delta": 1e-5, "neighboring_relation": "zero_out"}
        >>> statement_text(proven)
        'ε = 2.5 proven (zero out one sample, δ = 1e-05)'
        >>> statement_text({**proven, "dp_epsilon": None, "reason": "Nothing is clipped."})
        'no proven ε (zero out one sample, δ = 1e-05): Nothing is clipped.'
    """
    ground = _ground(statement)
    if statement["dp_epsilon"] is None:
        return f"no {statement['bound']} ε ({ground}): {statement.get('reason')}"
    remarks = "".join(f", {remark}" for remark in _remarks(statement))
    return f"ε = {rounded_up(statement['dp_epsilon'], 4)} {statement['bound']} ({ground}{remarks})"


def caption(privacy: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """One line for each bound, relation and delta, with the epsilon of every variant, for the foot of a picture.

    Args:
        privacy: variant -> statements.

    Guarantees:
        - every epsilon is rounded up.
        - an epsilon on an assumed bound, or one that is refuted, says so.

    Example:
        >>> one = {"bound": "proven", "dp_epsilon": 2.5, "dp_delta": 1e-5, "neighboring_relation": "zero_out"}
        >>> caption({"VR": [one], "plain": [{**one, "dp_epsilon": 1.0}]})
        ['proven (zero out one sample, δ = 1e-05): VR: ε = 2.5 | plain: ε = 1']
    """
    groups: dict[str, dict[str, Mapping[str, Any]]] = {}
    for variant, statements in privacy.items():
        for statement in statements:
            key = f"{statement['bound']} ({_ground(statement)})"
            groups.setdefault(key, {})[variant] = statement
    return [f"{key}: {_epsilons(group)}{_remarked(group)}" for key, group in groups.items()]


def rounded_up(value: float, digits: int) -> str:
    """The least number of so many significant digits that is not below `value`: for an epsilon that is claimed.

    Example:
        >>> rounded_up(2.00049, 4), rounded_up(8.0, 4)
        ('2.001', '8')
    """
    return _rounded(value, digits, decimal.ROUND_CEILING)


def rounded_down(value: float, digits: int) -> str:
    """The largest such number that is not above `value`: for a lower bound on epsilon."""
    return _rounded(value, digits, decimal.ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> str:
    """`value`, as its shortest decimal reads, in so many digits."""
    found = decimal.Context(prec=digits, rounding=rounding).create_decimal(repr(float(value)))
    return f"{float(found):.{digits}g}"


def _bound_on_gradients(bound: str, release: Release) -> tuple[str, ...]:
    """What keeps one sample's gradient small; nothing where nothing does."""
    if release.clip_norm is None or (release.assumed and bound == "proven"):
        return ()
    single, norm = release.entry_size == 1, f"{release.clip_norm:g}"
    if release.assumed:
        what = "per-sample gradients stay" if single else "what a sample adds to its entry's gradient stays"
        return (f"{what} below the norm {norm}: {ASSUMED}",)
    how = f"to the L2 norm {norm}" if single else f"to add at most {norm} (L2) to its entry's"
    return (f"every sample's gradient is clipped {how}, before it is stored anywhere",)


def _ground(statement: Mapping[str, Any]) -> str:
    """Relation and delta."""
    relation = statement["neighboring_relation"]
    return f"{RELATIONS.get(relation, relation)}, δ = {statement['dp_delta']:g}"


def _remarks(statement: Mapping[str, Any]) -> list[str]:
    """What a reader of its epsilon must know."""
    if statement["dp_epsilon"] is None:
        return []
    texts = statement.get("assumptions", ())
    return [remark for part, remark in REMARKS.items() if any(part in text for text in texts)]


def _remarked(group: Mapping[str, Mapping[str, Any]]) -> str:
    """The remarks of a line, with the variants they are on unless these are all that have an epsilon."""
    known = sum(statement["dp_epsilon"] is not None for statement in group.values())
    text = ""
    for remark in REMARKS.values():
        names = [name for name, statement in group.items() if remark in _remarks(statement)]
        if names:
            some = ", ".join(names) if len(names) <= 4 else f"{len(names)} variants"
            text += f"; {remark}" + ("" if len(names) == known else f": {some}")
    return text


def _epsilons(group: Mapping[str, Mapping[str, Any]]) -> str:
    """Every variant's epsilon; of many variants the range, of equal ones the value."""
    values = {name: statement["dp_epsilon"] for name, statement in group.items()}
    known = [value for value in values.values() if value is not None]
    if not known:
        return "no ε"
    texts = sorted({rounded_up(value, 3) for value in known}, key=float)
    if len(values) > 1 and len(texts) == 1 and len(known) == len(values):
        return f"ε = {texts[0]} for each variant"
    if len(values) > 4:
        without = "" if len(known) == len(values) else f" ({len(values) - len(known)} without)"
        return (f"ε = {texts[0]}" if len(texts) == 1 else f"ε from {texts[0]} to {texts[-1]}") + without
    shown = {name: "no ε" if value is None else f"ε = {rounded_up(value, 3)}" for name, value in values.items()}
    return " | ".join(f"{name}: {text}" for name, text in shown.items())  # names may hold commas
