"""Conditions of theorems: an experiment names those that its cases break, with both numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

_ROUNDING = 1e-12  # exponents are decimals of a few digits: their sums are equal when they differ by less
_HOLDS = {
    "<": lambda left: left < 0,
    "<=": lambda left: left <= _ROUNDING,
    ">": lambda left: left > _ROUNDING,
    ">=": lambda left: left >= -_ROUNDING,
}


class Condition(NamedTuple):
    """One inequality of a theorem; its `str` is a line for a warning.

    Attributes:
        name: where it is stated, and the inequality; its left side is `found`, its right side `required`.
        holds: whether it is true.
        found: of the run.
        required: by the theorem.
    """

    name: str
    holds: bool
    found: float
    required: float

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "fails"
        return f"{self.name} {verdict}: found {self.found:.6g}, required {self.required:.6g}"


def conditions(label: str, *rows: tuple[str, float, float]) -> list[Condition]:
    """Conditions of a theorem from rows of an inequality, its left and its right side.

    Examples:
        >>> for condition in violated(conditions("Theorem 2", ("eta <= 1 / beta", 0.5, 1 / 4), ("rho > 0", 1.0, 0.0))):
        ...     print(condition)
        Theorem 2: eta <= 1 / beta fails: found 0.5, required 0.25
    """
    results = []
    for inequality, found, required in rows:
        (sign,) = _HOLDS.keys() & set(inequality.split())
        holds = bool(_HOLDS[sign](found - required))
        results.append(Condition(f"{label}: {inequality}", holds, float(found), float(required)))
    return results


def violated(conditions: Sequence[Condition]) -> list[Condition]:
    """Select the conditions that do not hold."""
    return [condition for condition in conditions if not condition.holds]


def warnings(of_cases: Mapping[str, Sequence[Condition]]) -> list[str]:
    """A line for each condition that fails, with the names of the cases that break it."""
    by_text: dict[str, list[str]] = {}
    for name, each in of_cases.items():
        for condition in violated(each):
            by_text.setdefault(str(condition), []).append(name)
    of_all = len(of_cases) if len(of_cases) > 1 else None
    names = {text: "all cases" if len(cases) == of_all else ", ".join(cases) for text, cases in by_text.items()}
    return [f"warning: {text} ({names[text]})" for text in by_text]
