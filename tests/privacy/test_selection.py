"""Private selection: exact on small mechanisms, which a generating function gives in closed form, and its draws."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import dp_event, rdp
from helpers import refused
from scipy.optimize import brentq
from scipy.special import ndtr

from jaxfl.privacy.dominating_pairs import gaussian_epsilon
from jaxfl.privacy.selection import Selection, draw_runs, selected_epsilon, selected_statement, selection
from jaxfl.privacy.statements import UNPAID_CHOICE

KINDS = ("geometric", "logarithmic")


def generating(selected, x):
    g = selected.continuation
    return g * x / (1 - (1 - g) * x) if selected.distribution == "geometric" else np.log1p(-(1 - g) * x) / np.log(g)


def curve(p, q, dp_epsilon):
    """delta of two distributions, the larger of both directions."""
    return max(np.maximum(a - math.exp(dp_epsilon) * b, 0.0).sum() for a, b in ((p, q), (q, p)))


def least_epsilon(p, q, dp_delta):
    low, high = 0.0, 60.0
    if curve(p, q, low) <= dp_delta:
        return low
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if curve(p, q, middle) <= dp_delta else (middle, high)
    return high


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_of_random_runs_keeps_its_epsilon(kind):
    rng = np.random.default_rng(0)
    least = math.inf
    for case in range(200):
        p = rng.dirichlet(np.full(rng.integers(2, 9), rng.choice([0.3, 1.0, 5.0])))
        q = p * np.exp(rng.normal(size=p.size) * rng.choice([0.1, 0.5, 2.0]))
        q /= q.sum()
        selected = Selection(kind, float(rng.choice([1.5, 4.0, 30.0, 300.0])))
        best_p, best_q = (np.diff(generating(selected, np.append(0.0, np.cumsum(one)).clip(0, 1))) for one in (p, q))
        for dp_delta in (1e-6, 1e-3, 0.05):
            actual = selected_epsilon(lambda delta, p=p, q=q: least_epsilon(p, q, delta), selected, dp_delta)
            assert curve(best_p, best_q, actual) <= dp_delta * (1 + 1e-9), (case, dp_delta)
            true = least_epsilon(best_p, best_q, dp_delta)
            least = min(least, actual / true if true > 0.1 else math.inf)
    assert 1 <= least < 1.1  # it is no bound that is far from every case


@pytest.mark.parametrize(("kind", "factor"), [("geometric", 3), ("logarithmic", 2)])
def test_pure_epsilons_multiply(kind, factor):  # Papernot and Steinke, Corollary 3
    actual = selected_epsilon(lambda _: 0.7, Selection(kind, 50.0), 1e-9)
    assert actual == pytest.approx(factor * 0.7, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_below_the_bound_in_renyi_divergences(kind):
    for mu, mean in ((0.3, 10), (0.3, 100), (1.0, 40), (2.0, 2)):
        theirs = rdp.RdpAccountant(orders=(1 + np.geomspace(0.05, 2000, 300)).tolist())
        one = dp_event.GaussianDpEvent(1 / mu)
        theirs.compose(dp_event.RepeatAndSelectDpEvent(one, mean, 1 if kind == "geometric" else 0))
        ours = selected_epsilon(lambda delta, mu=mu: gaussian_epsilon(mu, delta), Selection(kind, mean), 1e-5)
        assert 0.7 < ours / theirs.get_epsilon(1e-5) < 0.94


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_of_gaussian_runs_keeps_its_epsilon(kind):  # the score is the output, in cells of 0.002
    edges = np.append(np.linspace(-9, 12, 10_501), np.inf)
    for mu, mean in ((0.3, 10), (1.0, 40), (2.0, 2)):
        selected = Selection(kind, float(mean))
        p, q = (np.diff(generating(selected, ndtr(edges - shift))) for shift in (mu, 0.0))
        actual = selected_epsilon(lambda delta, mu=mu: gaussian_epsilon(mu, delta), selected, 1e-4)
        assert curve(p, q, actual) <= 1e-4
        assert actual < 2.5 * least_epsilon(p, q, 1e-4)


def test_the_document_says_what_is_computed():
    lines = (Path(__file__).parents[2] / "docs" / "epsilon.md").read_text().splitlines()
    for row in (line.split("|")[1:-1] for line in lines if line.startswith("| ε = ")):
        one = float(row[0].split("=")[1])
        mu = float(brentq(lambda mu, one=one: gaussian_epsilon(mu, 1e-5) - one, 0.01, 9.0))  # pyright: ignore[reportArgumentType]
        for column, (kind, mean) in zip(row[1:], itertools.product(KINDS, (10.0, 100.0)), strict=True):
            exact = selected_epsilon(lambda delta, mu=mu: gaussian_epsilon(mu, delta), Selection(kind, mean), 1e-5)
            assert float(column) == float(f"{exact:.3g}")


@pytest.mark.statistical
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mean", [1.5, 40.0])
def test_the_number_of_runs_has_its_distribution(kind, mean):
    selected, rng, count = Selection(kind, mean), np.random.default_rng(1), 20_000
    drawn = np.array([draw_runs(selected, rng) for _ in range(count)])
    assert drawn.min() == 1
    assert abs(drawn.mean() - mean) < 5 * drawn.std() / math.sqrt(count)
    for x in (0.3, 0.9):  # the generating function says all of a distribution
        powers = x**drawn
        assert abs(powers.mean() - generating(selected, x)) < 5 * powers.std() / math.sqrt(count)


def test_what_a_statement_on_the_winner_says():
    run = {"bound": "proven", "dp_epsilon": 1.0, "dp_delta": 1e-5, "neighboring_relation": "zero_out", "asked": True}
    run |= {"accountant": "PLD", "assumptions": (UNPAID_CHOICE, "clipped"), "mechanism": "40 rounds", "reason": None}
    actual = selected_statement(run, lambda _: 1.0, Selection("geometric", 20.0))
    assert actual["dp_epsilon"] == pytest.approx(3.0, abs=1e-3)
    assert "asked" not in actual
    assert UNPAID_CHOICE not in actual["assumptions"]
    assert "clipped" in actual["assumptions"]
    assert "geometric with mean 20" in actual["mechanism"]
    unknown = selected_statement(run, lambda _: math.inf, Selection("geometric", 20.0))
    assert unknown["dp_epsilon"] is None
    assert unknown["reason"]
    none = {**run, "dp_epsilon": None, "reason": "Nothing is clipped."}
    assert selected_statement(none, lambda _: 1.0, Selection("geometric", 20.0)) == none


def test_refusals():
    refused(lambda: selection("poisson", 10), "private_selection", "geometric")
    for mean in (1, 0, -3, 501, math.nan, math.inf):
        refused(lambda mean=mean: selection("geometric", mean), "mean_runs")
    refused(lambda: selected_epsilon(lambda _: 1.0, Selection("geometric", 4.0), 0.0), "dp_delta")
