"""Conditions on graphs, step sizes and noise in theorems on differentially private gradient tracking, as predicates.

Each predicate returns all of its conditions, with the number found and the one required, whether they hold or not; the
caller warns of those that do not hold, or refuses them. They take the step sizes of the run at its horizon K (alpha_K,
beta_K, gamma_K). Assumption 4 and Theorem 4 bound the gains a1, a2, a3 instead, so that the step sizes of every K
qualify; the paper's a1 = 72 cannot, since Re(w) / (1 + |w|^2) <= 1/2 for every w. To check the gains, pass them as step
sizes.

- R, C: the pair's weights; L1 = diag(R 1) - R, L2 = diag(1^T C) - C, with eigenvalues w_l, w_1 = 0.
- v1, v2 >= 0: v1^T L1 = 0, L2 v2 = 0, each of sum n. r1, r2: the largest numbers that Lemma 1 (ii) allows,
  rho(W1 - alpha L1) = 1 - r1 alpha and likewise for L2. (Its proof has smaller numbers, which make Assumption 5 harder
  to meet.)
- L: `smoothness`, the Lipschitz constant of every sample's gradient (the paper's L_1, and L of Assumption 4).
- mu: `gradient_dominance`, of the Polyak-Lojasiewicz inequality |grad F|^2 >= 2 mu (F - min F); 0 when it is not used.

Not covered: Assumptions 2 and 3, which are about the losses.

References:
    J. Chen, J. Wang, J.-F. Zhang, "Differentially Private Gradient-Tracking-Based Distributed Stochastic Optimization
    over Directed Graphs": Assumptions 1, 4 and 5, Lemmas 1 and 2, Theorems 4 and 5, Remark 19.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxfl.core import check
from jaxfl.core.check import ArgumentError
from jaxfl.core.conditions import Condition, conditions, violated
from jaxfl.graphs.spectral import consensus_weights, laplacian_eigenvalues, spanning_tree_roots
from jaxfl.graphs.topologies import TrackingPair

PerNode = float | np.ndarray  # () or (n,)


class StepSizes(NamedTuple):
    """A run's step sizes at its horizon K, positive."""

    state_mixing: float  # alpha_K
    tracker_mixing: float  # beta_K
    step_size: float  # gamma_K


class PolynomialExponents(NamedTuple):
    """Exponents of Scheme (S1); the defaults stand in section 4.1."""

    state_noise: PerNode  # p_zeta
    tracker_noise: PerNode  # p_eta
    state_mixing: float = 0.987  # p_alpha
    tracker_mixing: float = 0.69  # p_beta
    step_size: float = 0.997  # p_gamma
    num_samples: float = 1.78  # p_m


class ExponentialBases(NamedTuple):
    """Bases of Scheme (S2); the default stands in section 4.1."""

    state_noise: PerNode  # p_zeta
    tracker_noise: PerNode  # p_eta
    num_samples: float = 1.002  # p_m


def common_roots(pair: TrackingPair) -> tuple[int, ...]:
    """The agents that root a spanning tree both of G_R and of G_{C^T}, ascending.

    Raises:
        ArgumentError: unusable weights.

    Examples:
        >>> from jaxfl.graphs import five_agents
        >>> common_roots(five_agents())
        (0,)
    """
    _check_pair(pair)
    of_trackers = spanning_tree_roots(pair.tracker_weights.T)
    return tuple(root for root in spanning_tree_roots(pair.state_weights) if root in of_trackers)


def step_size_bounds(pair: TrackingPair, *, smoothness: float) -> StepSizes:
    """Compute the limits below which Lemma 2 needs alpha_K, beta_K and gamma_K. Lemma 1 needs the first two, too.

    Raises:
        ArgumentError: a pair that does not satisfy Assumption 1, one agent, or a smoothness out of range.

    Guarantees:
        - the first two are at most 1/2.

    Examples:
        >>> from jaxfl.graphs import five_agents
        >>> [round(bound, 6) for bound in step_size_bounds(five_agents(), smoothness=1.0)]
        [0.4, 0.4, 0.2]
    """
    check.positive(smoothness=smoothness)
    failures = violated(assumption_1(pair))
    if failures:
        raise ArgumentError("pair", "must satisfy Assumption 1", str(failures[0]), "Add edges that make a common root.")
    spectrum = _spectrum(pair)
    return StepSizes(
        state_mixing=min(_inverse_largest_sum(pair.state_weights), _eigenvalue_bound(spectrum.state_eigenvalues)),
        tracker_mixing=min(
            _inverse_largest_sum(pair.tracker_weights.T), _eigenvalue_bound(spectrum.tracker_eigenvalues)
        ),
        step_size=spectrum.num_nodes / (4 * spectrum.overlap * smoothness),
    )


def assumption_1(pair: TrackingPair) -> list[Condition]:
    """G_R and G_{C^T} have spanning trees, with a common root. Everything but Theorems 4 and 5 needs it.

    Raises:
        ArgumentError: unusable weights.
    """
    _check_pair(pair)
    root_sets = {
        "roots of spanning trees of G_R": spanning_tree_roots(pair.state_weights),
        "roots of spanning trees of G_{C^T}": spanning_tree_roots(pair.tracker_weights.T),
        "agents that are roots in both": common_roots(pair),
    }
    return conditions("Assumption 1", *((f"{name} >= 1", len(roots), 1) for name, roots in root_sets.items()))


def assumption_4(
    pair: TrackingPair, steps: StepSizes, exponents: PolynomialExponents, *, smoothness: float
) -> list[Condition]:
    """Convergence under Scheme (S1) (Theorems 1 and 2), with alpha_K, beta_K, gamma_K in the place of a1, a2, a3.

    Raises:
        ArgumentError: unusable weights, fewer than two agents, or a number out of range.
    """
    label, p = "Assumption 4", exponents
    zeta, eta = (max(float(np.max(noise)), 0.0) for noise in (p.state_noise, p.tracker_noise))
    alpha, beta, gamma = p.state_mixing, p.tracker_mixing, p.step_size
    return _step_size_conditions(label, pair, steps, smoothness) + conditions(
        label,
        ("p_beta > 1/2", beta, 0.5),
        ("p_alpha > p_beta", alpha, beta),
        ("p_gamma > p_alpha", gamma, alpha),
        ("p_gamma < 1", gamma, 1),
        ("p_m - p_beta >= 1", p.num_samples - beta, 1),
        ("2 p_gamma - p_alpha >= 1", 2 * gamma - alpha, 1),
        ("2 p_alpha - p_beta - 2 max(p_zeta, 0) >= 1", 2 * alpha - beta - 2 * zeta, 1),
        ("p_gamma + 2 p_beta - 2 max(p_eta, 0) >= 2", gamma + 2 * beta - 2 * eta, 2),
    )


def assumption_5(
    pair: TrackingPair,
    steps: StepSizes,
    bases: ExponentialBases,
    *,
    smoothness: float,
    gradient_dominance: float = 0.0,
) -> list[Condition]:
    """Convergence under Scheme (S2) (Theorems 1 and 3).

    Raises:
        ArgumentError: unusable weights, fewer than two agents, or a number out of range.
    """
    check.positive(smoothness=smoothness)
    check.non_negative(gradient_dominance=gradient_dominance)
    label = "Assumption 5"
    least, most = _extremes(bases)
    on_bases = conditions(
        label,
        ("min(p_zeta, p_eta) > 0", least, 0),
        ("max(p_zeta, p_eta) < 1", most, 1),
        ("p_m > 1", bases.num_samples, 1),
    )
    on_mixing = _mixing_conditions(label, pair, steps)
    if violated(assumption_1(pair)):
        return on_mixing + on_bases
    spectrum = _spectrum(pair)
    norm_1, norm_2 = (float(np.linalg.norm(v)) for v in (spectrum.state_vector, spectrum.tracker_vector))
    radius = float(np.abs(spectrum.state_eigenvalues).max())  # rho(L1)
    rate_1 = _contraction_rate(spectrum.state_eigenvalues, steps.state_mixing)
    rate_2 = _contraction_rate(spectrum.tracker_eigenvalues, steps.tracker_mixing)
    n, overlap, mu = spectrum.num_nodes, spectrum.overlap, gradient_dominance
    root_1 = math.sqrt(mu / (12 * smoothness + 2 * mu) if mu else 1 / 2)
    root_2 = math.sqrt(mu / (36 * smoothness + 7 * mu) if mu else 1 / 7)
    q1 = rate_1 / (norm_2 * smoothness) * min(n * math.sqrt(3 * n) / 24, root_1 / 2)
    of_q2 = (
        math.sqrt(3) / (6 * n),
        math.sqrt(3) * overlap / (36 * norm_1 * norm_2),
        math.sqrt(6) * overlap * rate_1 / (144 * radius * norm_1 * norm_2),
        math.sqrt(6) * overlap / (12 * norm_1 * norm_2) * root_2,
    )
    q2 = rate_2 / smoothness * min(of_q2)
    tracking = math.sqrt(2) * overlap * rate_2 * steps.tracker_mixing / (12 * radius * norm_1 * smoothness)
    alpha, gamma = steps.state_mixing, steps.step_size
    on_steps = conditions(
        label,
        ("alpha < sqrt(2) (v1 . v2) r2 beta / (12 rho(L1) |v1| L)", alpha, tracking),
        ("gamma < 1", gamma, 1),
        ("gamma < n / (20 (v1 . v2) L)", gamma, n / (20 * overlap * smoothness)),
        ("gamma < Q1 alpha", gamma, q1 * alpha),
        ("gamma < Q2 beta", gamma, q2 * steps.tracker_mixing),
    )
    return on_mixing + on_steps + on_bases


def theorem_4(pair: TrackingPair, steps: StepSizes, exponents: PolynomialExponents) -> list[Condition]:
    """A finite budget over infinitely many iterations under Scheme (S1), by Lemma 4 as published.

    Raises:
        ArgumentError: unusable weights, or a step size that is not positive.
    """
    p, label = exponents, "Theorem 4"
    tracker = p.num_samples - p.tracker_mixing + min(float(np.min(p.tracker_noise)) - 1, 0)
    state = p.num_samples + min(0, p.step_size - p.state_mixing - p.tracker_mixing)
    state += min(float(np.min(p.state_noise)) - 1, 0)
    on_exponents = conditions(
        label,
        ("p_m - p_beta + min(p_eta - 1, 0) > 0", tracker, 0),
        ("p_m + min(0, p_gamma - p_alpha - p_beta) + min(p_zeta - 1, 0) > 0", state, 0),
    )
    return on_exponents + _sum_conditions(label, pair, steps)


def theorem_2(exponents: PolynomialExponents) -> float:
    """The exponent theta - p_gamma of Scheme (S1): |grad F|^2 = O((K + 1)^-exponent). It is positive by Assumption 4.

    Examples:
        >>> round(theorem_2(PolynomialExponents(state_noise=-0.1, tracker_noise=-0.1)), 3)
        0.093
    """
    p = exponents
    zeta, eta = (max(float(np.max(noise)), 0.0) for noise in (p.state_noise, p.tracker_noise))
    of_noise = 2 * p.state_mixing - p.tracker_mixing - 2 * zeta, 2 * p.tracker_mixing - 2 * eta
    return min(p.num_samples - p.tracker_mixing, *of_noise) - p.step_size


def theorem_3(bases: ExponentialBases) -> float:
    """Bound the factor of Scheme (S2) by samples and noise: |grad F|^2 = O(factor^K). rho(A_K) may be larger."""
    return max(1 / bases.num_samples, _extremes(bases)[1] ** 2)


def theorem_5(pair: TrackingPair, steps: StepSizes, bases: ExponentialBases) -> list[Condition]:
    """A finite budget over infinitely many iterations under Scheme (S2), by Lemma 4 as published.

    Raises:
        ArgumentError: unusable weights, or a step size or base that is not positive.

    Examples:
        >>> from jaxfl.graphs import five_agents
        >>> bases = ExponentialBases(state_noise=0.95, tracker_noise=0.9, num_samples=1.1)
        >>> for condition in violated(theorem_5(five_agents(), StepSizes(0.1, 0.1, 0.01), bases)):
        ...     print(condition)
        Theorem 5: p_m > max(1 / p_zeta, 1 / p_eta) fails: found 1.1, required 1.11111
    """
    check.positive(state_noise=bases.state_noise, tracker_noise=bases.tracker_noise)
    label = "Theorem 5"
    least, most = _extremes(bases)
    on_bases = conditions(
        label,
        ("max(p_zeta, p_eta) < 1", most, 1),
        ("p_m > max(1 / p_zeta, 1 / p_eta)", bases.num_samples, 1 / least),
    )
    return on_bases + _sum_conditions(label, pair, steps)


class _Spectrum(NamedTuple):
    """Spectral data of both Laplacians. The eigenvalue 0 is left out."""

    num_nodes: int
    state_eigenvalues: np.ndarray  # (n - 1,) complex128, of L1
    tracker_eigenvalues: np.ndarray  # (n - 1,) complex128, of L2
    state_vector: np.ndarray  # (n,), v1
    tracker_vector: np.ndarray  # (n,), v2
    overlap: float  # v1 . v2


def _spectrum(pair: TrackingPair) -> _Spectrum:
    """Compute the spectral data of a pair that satisfies Assumption 1."""
    if len(pair.state_weights) == 1:
        raise ArgumentError("pair", "must have at least two agents", "got one", "Pass more: one mixes with nobody.")
    state_vector, tracker_vector = consensus_weights(pair.state_weights), consensus_weights(pair.tracker_weights.T)
    return _Spectrum(
        num_nodes=len(pair.state_weights),
        state_eigenvalues=laplacian_eigenvalues(pair.state_weights)[1:],
        tracker_eigenvalues=laplacian_eigenvalues(pair.tracker_weights.T)[1:],
        state_vector=state_vector,
        tracker_vector=tracker_vector,
        overlap=float(state_vector @ tracker_vector),
    )


def _check_pair(pair: TrackingPair) -> None:
    shapes = np.shape(pair.state_weights), np.shape(pair.tracker_weights)
    if shapes[0] != shapes[1]:
        found = f"got shapes {shapes[0]} and {shapes[1]}"
        raise ArgumentError("pair", "both graphs must have the same agents", found, "Pass two (n, n) matrices.")


def _extremes(bases: ExponentialBases) -> tuple[float, float]:
    """The least and the largest of all agents' p_zeta and p_eta."""
    noises = np.append(bases.state_noise, bases.tracker_noise)
    return float(noises.min()), float(noises.max())


def _eigenvalue_bound(eigenvalues: np.ndarray) -> float:
    """min over l >= 2 of Re(w_l) / (1 + |w_l|^2)."""
    return float((np.real(eigenvalues) / (1 + np.abs(eigenvalues) ** 2)).min())


def _contraction_rate(eigenvalues: np.ndarray, mixing: float) -> float:
    """The largest r with |1 - mixing w_l| <= 1 - r mixing for every l >= 2: r1 or r2 of Lemma 1 (ii)."""
    return float((1 - np.abs(1 - mixing * eigenvalues).max()) / mixing)


def _inverse_largest_sum(weights: np.ndarray) -> float:
    """1 / the largest row sum; infinite without edges."""
    largest = float(np.sum(weights, axis=1).max())
    return 1 / largest if largest > 0 else math.inf


def _sum_conditions(label: str, pair: TrackingPair, steps: StepSizes) -> list[Condition]:
    """alpha and beta leave I - alpha L1 and I - beta L2 non-negative."""
    check.positive(state_mixing=steps.state_mixing, tracker_mixing=steps.tracker_mixing, step_size=steps.step_size)
    _check_pair(pair)
    return conditions(
        label,
        ("alpha < 1 / max_i sum_j R_ij", steps.state_mixing, _inverse_largest_sum(pair.state_weights)),
        ("beta < 1 / max_i sum_j C_ji", steps.tracker_mixing, _inverse_largest_sum(pair.tracker_weights.T)),
    )


def _mixing_conditions(label: str, pair: TrackingPair, steps: StepSizes) -> list[Condition]:
    """Assumption 1 and, if it holds, Lemma 1's bounds."""
    on_graphs, on_sums = assumption_1(pair), _sum_conditions(label, pair, steps)
    if violated(on_graphs):
        return on_graphs
    spectrum = _spectrum(pair)
    of_states = _eigenvalue_bound(spectrum.state_eigenvalues)
    of_trackers = _eigenvalue_bound(spectrum.tracker_eigenvalues)
    on_eigenvalues = conditions(
        label,
        ("alpha < min_l Re(w_l) / (1 + |w_l|^2) of L1", steps.state_mixing, of_states),
        ("beta < min_l Re(w_l) / (1 + |w_l|^2) of L2", steps.tracker_mixing, of_trackers),
    )
    return on_graphs + on_sums + on_eigenvalues


def _step_size_conditions(label: str, pair: TrackingPair, steps: StepSizes, smoothness: float) -> list[Condition]:
    """Assumption 1 and, if it holds, Lemma 2's bounds."""
    check.positive(smoothness=smoothness)
    on_mixing = _mixing_conditions(label, pair, steps)
    if violated(assumption_1(pair)):
        return on_mixing
    bound = step_size_bounds(pair, smoothness=smoothness).step_size
    return on_mixing + conditions(label, ("gamma < n / (4 (v1 . v2) L)", steps.step_size, bound))
