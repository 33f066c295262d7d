"""Colors, dashes and marks of lines, by what the lines stand for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

# Okabe and Ito's colors, told apart with any color vision, without yellow, too pale for a line on white; then four that
# are far from them.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
COLORS += ("#3A1FA0", "#8A8A00", "#C00040", "#6B3E00")
GREY = "0.75"  # of what stands behind
_GREYS = ("0.3", "0.5", "0.65")  # of baselines
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
_MORE_DASHES = (*DASHES, (0, (2.5, 1)), (0, (5, 1, 1, 1, 1, 1)), (0, (9, 2)))  # of the cases of one method
_GREY_DASHES = (*DASHES[2:], DASHES[1], _MORE_DASHES[5])
MARKS = dict(zip((*COLORS, *_GREYS, GREY), "osD^vPX*<>pdhH.", strict=True))  # color -> mark of its points
_BASELINES = ("alone", "pooled", "curator", "without noise")
_WITH_SERVER = ("DPFL", "ALI-DPFL", "DP-FedAvg", "SCAFFOLD", "FedAvg", "FedAvgM", "FedProx", "FedNova", "FedDyn")
_WITH_SERVER += ("FedAdam", "FedYogi", "FedAdagrad", "q-FedAvg", "Ditto", "APFL", "Per-FedAvg", "FedPer", "FedRep")
_MOST_ALIKE, _IN_FRONT = 12, 5  # of more than 12 cases, the best 5 are drawn over the others


def baseline_in(name: str) -> str:
    """The baseline that a case is by its name; empty for a case that is compared."""
    parts = (part.rpartition(": ")[2] for part in name.replace("_", " ").split(", "))  # after a run's name
    return next((part for part in parts if part in _BASELINES), "")


def in_front(ranked: Sequence[str]) -> list[str]:
    """The cases that are drawn over the others: of more than 12 the best five, and the best of each baseline.

    Examples:
        >>> in_front([*"abcdefghijk", "a, pooled", "b, pooled"])
        ['a', 'b', 'c', 'd', 'e', 'a, pooled']
    """
    if len(ranked) <= _MOST_ALIKE:
        return [*ranked]
    best: dict[str, str] = {}
    for name in ranked:
        best.setdefault(baseline_in(name), name)
    return [*[name for name in ranked if not baseline_in(name)][:_IN_FRONT], *(best[kind] for kind in best if kind)]


def line_styles(names: Iterable[str], run: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Give each line of a picture its color and dashes.

    Args:
        names: of methods, cases or series, in the order of the legend; parts of a name have ", " between them.
        run: the names of a run, whose pictures give a method one color, in whatever order they name it.

    Returns:
        Name -> style. Baselines are grey and never solid, and their dashes tell which. Where there are methods on a
        graph and methods with a server, the former are solid and the latter dashed; else dashes differ from line to
        line.

    Examples:
        >>> styles = line_styles(["PrivSGP, step 1", "DPFL, step 1", "alone"])
        >>> [style["linestyle"] for style in styles.values()]
        ['solid', (0, (5, 2)), (0, (1, 1.2))]
        >>> of_run = line_styles(["DPFL", "PrivSGP"], ["PrivSGP", "DPFL"])
        >>> of_run == line_styles(["PrivSGP", "DPFL"], ["DPFL", "PrivSGP"])
        True
    """
    names = [*dict.fromkeys(names)]
    compared = [name for name in (sorted(names) if run else names) if not baseline_in(name)]
    methods = sorted({_method(name) for name in run if not baseline_in(name)}) if run else []
    of_method = {method: [name for name in compared if _method(name) == method] for method in methods}
    most = max(map(len, of_method.values()), default=0)
    served = {name: _method(name) in _WITH_SERVER for name in (methods or compared)}
    is_mixed, styles = len({*served.values()}) > 1, {}
    if 1 < len(methods) <= len(COLORS) * (len(DASHES) if most == 1 else 1) and most <= len(_MORE_DASHES):
        for number, (method, own) in enumerate(of_method.items()):
            first = _number_of_dashes(number, served[method]) if is_mixed else number % len(DASHES)
            for place, name in enumerate(own):
                dashes = _MORE_DASHES[(first + 2 * place) % len(_MORE_DASHES)]
                styles[name] = line_style(number) | {"linestyle": dashes}
    else:
        for number, name in enumerate(compared):
            has_server = _method(name) in _WITH_SERVER
            dashes = {"linestyle": DASHES[_number_of_dashes(number, has_server)]} if is_mixed else {}
            styles[name] = line_style(number) | dashes
    for number, kind in enumerate(_BASELINES):
        own = [name for name in names if baseline_in(name) == kind]
        for place, name in enumerate(sorted(own)):
            styles[name] = {"color": _GREYS[(number + place) % 3], "linestyle": _GREY_DASHES[number]}
    return {name: styles[name] for name in names}


def _method(name: str) -> str:
    """The first part of a case's name."""
    return name.replace("_", " ").split(", ")[0]


def _number_of_dashes(number: int, has_server: bool) -> int:
    return (has_server + 2 * (number // len(COLORS))) % len(DASHES)


def line_style(number: int) -> dict[str, Any]:
    """Color and dashes of the line with this number."""
    # Eleven colors and four kinds of dashes have no common divisor: 44 lines look different.
    return {"color": COLORS[number % len(COLORS)], "linestyle": DASHES[number % len(DASHES)]}
