"""Colors, dashes and marks of lines, by what the lines stand for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Okabe and Ito's colors, told apart with any color vision, without yellow, too pale for a line on white; then four that
# are far from them.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
COLORS += ("#3A1FA0", "#8A8A00", "#C00040", "#6B3E00")
GREY = "0.75"  # of what stands behind
_GREYS = ("0.3", "0.5", "0.65")  # of baselines
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
_GREY_DASHES = (*DASHES[2:], DASHES[1], (0, (9, 1.5, 1, 1.2, 1, 1.5)))
MARKS = dict(zip((*COLORS, *_GREYS, GREY), "osD^vPX*<>pdhH.", strict=True))  # color -> mark of its points
_BASELINES = ("alone", "pooled", "curator", "without noise")
_WITH_SERVER = ("DPFL", "ALI-DPFL", "DP-FedAvg", "SCAFFOLD", "FedAvg", "FedAvgM", "FedProx", "FedNova", "FedDyn")
_WITH_SERVER += ("FedAdam", "FedYogi", "FedAdagrad", "q-FedAvg", "Ditto", "APFL", "Per-FedAvg", "FedPer", "FedRep")


def line_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Give each line of a picture its color and dashes.

    Args:
        names: of methods, cases or series, in the order of the legend; parts of a name have ", " between them.

    Returns:
        Name -> style. Baselines are grey and never solid. Where the picture has methods on a graph and methods with a
        server, the former are solid and the latter dashed; else dashes differ from line to line.

    Examples:
        >>> styles = line_styles(["PrivSGP, step 1", "DPFL, step 1", "alone"])
        >>> [style["linestyle"] for style in styles.values()]
        ['solid', (0, (5, 2)), (0, (1, 1.2))]
    """
    parts = {name: name.replace("_", " ").split(", ") for name in names}
    grey = [name for name, own in parts.items() if {*own} & {*_BASELINES}]
    served = {name: parts[name][0] in _WITH_SERVER for name in parts if name not in grey}
    is_mixed, styles = len({*served.values()}) > 1, {}
    for number, (name, has_server) in enumerate(served.items()):
        dashes = {"linestyle": DASHES[(has_server + 2 * (number // len(COLORS))) % 4]} if is_mixed else {}
        styles[name] = line_style(number) | dashes
    for number, name in enumerate(grey):
        styles[name] = {"color": _GREYS[number % 3], "linestyle": _GREY_DASHES[number % 4]}
    return {name: styles[name] for name in parts}


def line_style(number: int) -> dict[str, Any]:
    """Color and dashes of the line with this number."""
    # Eleven colors and four kinds of dashes have no common divisor: 44 lines look different.
    return {"color": COLORS[number % len(COLORS)], "linestyle": DASHES[number % len(DASHES)]}
