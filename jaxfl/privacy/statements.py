"""How an epsilon is written for people: never without its bound, its neighboring relation and its delta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

RELATIONS = {
    "add_or_remove_one": "add or remove one sample",
    "replace_one": "replace one sample",
    "zero_out": "zero out one sample",
}


def statement_text(statement: Mapping[str, Any]) -> str:
    """One statement in one line.

    Args:
        statement: as in summary.json: "bound", "dp_epsilon", "dp_delta", "neighboring_relation", and "reason" where
            there is no epsilon.

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
    return f"ε = {statement['dp_epsilon']:.4g} {statement['bound']} ({ground})"


def caption(privacy: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """One line for each bound, relation and delta, with the epsilon of every variant, for the foot of a picture.

    Args:
        privacy: variant -> statements.

    Example:
        >>> one = {"bound": "proven", "dp_epsilon": 2.5, "dp_delta": 1e-5, "neighboring_relation": "zero_out"}
        >>> caption({"VR": [one], "plain": [{**one, "dp_epsilon": 1.0}]})
        ['proven (zero out one sample, δ = 1e-05): VR ε = 2.5, plain ε = 1']
    """
    groups: dict[str, dict[str, float | None]] = {}
    for variant, statements in privacy.items():
        for statement in statements:
            key = f"{statement['bound']} ({_ground(statement)})"
            groups.setdefault(key, {})[variant] = statement["dp_epsilon"]
    return [f"{key}: {_epsilons(values)}" for key, values in groups.items()]


def _ground(statement: Mapping[str, Any]) -> str:
    """Relation and delta."""
    relation = statement["neighboring_relation"]
    return f"{RELATIONS.get(relation, relation)}, δ = {statement['dp_delta']:g}"


def _epsilons(values: Mapping[str, float | None]) -> str:
    """Every variant's epsilon; of many variants the range, of equal ones the value."""
    known = [value for value in values.values() if value is not None]
    if not known:
        return "no ε"
    texts = sorted({f"{value:.3g}" for value in known}, key=float)
    if len(values) > 1 and len(texts) == 1 and len(known) == len(values):
        return f"ε = {texts[0]} for each variant"
    if len(values) > 4:
        without = "" if len(known) == len(values) else f" ({len(values) - len(known)} variants without)"
        return (f"ε = {texts[0]}" if len(texts) == 1 else f"ε from {texts[0]} to {texts[-1]}") + without
    return ", ".join(f"{name} " + ("no ε" if value is None else f"ε = {value:.3g}") for name, value in values.items())
