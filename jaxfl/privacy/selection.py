"""Private selection: what it costs to train a random number of times and to release the best run only.

A run of a private method with options drawn at random is itself a private mechanism. Repeated K times, with K drawn at
random too, and with nothing released but the best of the K results, it stays private, at a cost that grows with the
logarithm of E[K] at most. A fixed K has no such bound.

The bound. Let Q and Q' be the results of one run on neighboring data, f the generating function of K, so that
f'(1) = E[K], and Q(> y) the probability of a result that is better than y. Both distributions of K have

    f'(x) = E[K] g^(a) / (1 - (1 - g) x)^a,    a = 2 (geometric) or 1 (logarithmic),

and the best of K results has the density f'(Q(<= y)) dQ(y). Where delta is the privacy curve of a run,
Q'(> y) <= exp(e1) Q(> y) + delta(e1) for every e1 >= 0, and so

    f'(Q(<= y)) / f'(Q'(<= y)) = ((g + (1 - g) Q'(> y)) / (g + (1 - g) Q(> y)))^a
        <= ((g (1 + (1 - g) / g delta(e1)) + (1 - g) Q(> y) exp(e1)) / (g + (1 - g) Q(> y)))^a.

The last fraction is a weighted mean of 1 + (1 - g) / g delta(e1) and exp(e1), so that it is at most the larger one:
log C = a max(e1, log(1 + (1 - g) / g delta(e1))). Therefore the selection has, for every e1,

    delta_selected(e) <= E[K] delta(e - log C).

The first number in the maximum rises with e1 and the second one falls, so that the best e1 is where they meet.

References:
    N. Papernot, T. Steinke, "Hyperparameter Tuning with Renyi Differential Privacy", ICLR 2022, arXiv:2110.03620
    (distributions of K; the bound in Renyi divergences).
    A. Koskela, R. Redberg, Y. Wang, "Privacy Profiles for Private Selection", ICML 2024, arXiv:2402.06701 (the bound in
    privacy curves, with a sum in place of the maximum).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import scipy

from jaxfl.core import ArgumentError, check
from jaxfl.privacy.statements import ONE_RUN, UNPAID_CHOICE

# Expected runs: with more, the ten thousand runs that a command may have would cut more than 1e-8 of the distribution.
_MOST_RUNS = {"geometric": 500.0, "logarithmic": 100.0}
_POWERS = {"geometric": 2, "logarithmic": 1}  # a, of each distribution
_NUM_HALVINGS = 25  # of the interval of delta(e1)


class Selection(NamedTuple):
    """The random number of runs of which the best one is released.

    Attributes:
        distribution: "geometric", or "logarithmic", which costs less and draws few runs more often.
        mean_runs: E[K], in (1, 500], of "logarithmic" in (1, 100].
    """

    distribution: str
    mean_runs: float

    @property
    def continuation(self) -> float:
        """g: the smaller, the more runs. E[K] = 1 / g, or (1 / g - 1) / log(1 / g)."""
        if self.distribution == "geometric":
            return 1 / self.mean_runs

        def excess(log_inverse: float) -> float:
            return math.expm1(log_inverse) / log_inverse - self.mean_runs

        return math.exp(-cast(float, scipy.optimize.brentq(excess, 1e-12, 20.0, xtol=1e-14)))


def selection(distribution: str, mean_runs: float) -> Selection:
    """A `Selection`, checked.

    Raises:
        ArgumentError: another distribution, or a mean out of range.
    """
    check.one_of(tuple(_POWERS), private_selection=distribution)
    check.scalar(mean_runs=mean_runs)
    most = _MOST_RUNS[distribution]
    if not 1 < mean_runs <= most:
        requirement, remedy = f"must lie in (1, {most:g}] for {distribution}", "Pass 40, for instance."
        raise ArgumentError("mean_runs", requirement, f"got {mean_runs:g}", remedy)
    return Selection(distribution, float(mean_runs))


def draw_runs(selected: Selection, generator: np.random.Generator) -> int:
    """K >= 1, which must stay secret, as the generator's seed must.

    Examples:
        >>> draw_runs(Selection("geometric", 40.0), np.random.default_rng(0)) >= 1
        True
    """
    if selected.distribution == "geometric":
        return int(generator.geometric(selected.continuation))
    return int(generator.logseries(-math.expm1(math.log(selected.continuation))))


def selected_epsilon(epsilon_at: Callable[[float], float], selected: Selection, dp_delta: float) -> float:
    """epsilon of the best of K runs.

    Args:
        epsilon_at: delta in (0, 1) -> epsilon of one run, options drawn anew; under a symmetric neighboring relation.
        selected: how K is drawn.
        dp_delta: in (0, 1), of the selection.

    Returns:
        dp_epsilon; infinite where the run has none at dp_delta / E[K].

    Raises:
        ArgumentError: a delta outside (0, 1).

    Guarantees:
        - each e1 gives a bound, so that the search over it can only loosen the result.

    Examples:
        >>> from jaxfl.privacy.dominating_pairs import gaussian_epsilon
        >>> for distribution in ("geometric", "logarithmic"):
        ...     best = selected_epsilon(lambda d: gaussian_epsilon(0.5, d), Selection(distribution, 40.0), 1e-5)
        ...     print(distribution, round(best, 2))
        geometric 3.79
        logarithmic 3.37
    """
    check.open_unit(dp_delta=dp_delta)
    share = dp_delta / selected.mean_runs
    spent, g = epsilon_at(share), selected.continuation
    if not math.isfinite(spent):
        return math.inf
    low, high, least = math.log(share), 0.0, math.inf
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        first, second = epsilon_at(math.exp(middle)), math.log1p((1 - g) / g * math.exp(middle))
        least = min(least, max(first, second))
        low, high = (middle, high) if first > second else (low, middle)
    return spent + _POWERS[selected.distribution] * least


def selected_statement(
    stated: Mapping[str, Any], epsilon_at: Callable[[float], float], selected: Selection
) -> dict[str, Any]:
    """The statement on the winner, of that on its run only.

    Args:
        stated: of the run, as in summary.json: "dp_epsilon", "dp_delta", "accountant", "assumptions", "mechanism".
        epsilon_at, selected: as `selected_epsilon` takes them.

    Returns:
        The statement with the epsilon of the selection; without one of the run it stays as it is.
    """
    if stated["dp_epsilon"] is None:
        return dict(stated)
    how = f"{selected.distribution} with mean {selected.mean_runs:g}"
    kept = [text for text in stated["assumptions"] if text not in (ONE_RUN, UNPAID_CHOICE)]
    dp_epsilon = selected_epsilon(epsilon_at, selected, stated["dp_delta"])
    return {
        **{name: value for name, value in stated.items() if name not in ("asked", "dp_epsilon_median_node")},
        "dp_epsilon": dp_epsilon if math.isfinite(dp_epsilon) else None,
        "reason": None if math.isfinite(dp_epsilon) else "No finite epsilon is known at this delta.",
        "accountant": f"{stated['accountant']}; private selection (Papernot and Steinke 2022, Koskela et al. 2024)",
        "mechanism": f"{stated['mechanism']}, the best of a random number of runs ({how})",
        "assumptions": [
            f"the winner alone is released, of a number of runs that is drawn ({how}) and stays secret, each with"
            " options drawn anew from a fixed distribution; a search that has begun is resumed until it ends, and no"
            " other begins in its place; further searches on the same data add to it",
            "the winner is chosen by what is measured on test samples, which this epsilon does not protect",
            *kept,
        ],
    }
