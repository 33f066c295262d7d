"""PrivSGP and PrivSGP-VR: the noise and iterations that their paper states.

Zhu, Huang, Wang, Xu, "PrivSGP-VR: Differentially Private Variance-Reduced Stochastic Gradient Push with Tight Utility
Bounds", IJCAI 2024, arXiv:2405.02638, equations (10) to (12). With A = 13 F0 + 6 L |x0|^2 + 18 L b2, in the symbols of
`ProblemConstants`:

    (10)  mean squared gradient <= (A + 24 L d mean(sigma_i^2)) / sqrt(n K)
    (11)  sigma_i = 3 c2 G sqrt(K log(1/delta_i)) / (J eps_i)
    (12)  K = A J^2 n / (216 L d c2^2 G^2 sum_i log(1/delta_i) / eps_i^2)

Does not claim: that (11) gives the epsilon it names. The paper does not give c2, and with the c2 that its own
iteration counts need, gradients that never change already leak more: a stored gradient shows a sample in every release,
which is N(mu, 1) against N(0, 1) with mu = 2 eps / (3 c2 sqrt(log(1/delta))) under replace_one, epsilon 7.5 for the
paper's 3. At the optimal K, sigma_i^2 = A / (24 L d) whatever epsilon is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxfl.core import check
from jaxfl.privacy.accountant import Bound
from jaxfl.privacy.gossip.accountant import C2_OF_THE_PAPER, Accountant, Published
from jaxfl.privacy.gossip.proven import Release, constant_gradient_epsilon
from jaxfl.privacy.statements import REFUTED, rounded_down


class ProblemConstants(NamedTuple):
    """Constants of a problem in the theory of PrivSGP-VR."""

    smoothness: float  # L, of every sample's loss
    gradient_bound: float  # G, largest L2 norm of a sample's gradient
    initial_gap: float  # F0 = f(x^0) - min f
    heterogeneity: float  # b^2, bound on |grad f_i - grad f|^2
    initial_norm_squared: float  # |x^0|^2
    num_samples: int  # J, of each node
    num_params: int  # d

    @property
    def numerator(self) -> float:
        """A = 13 F0 + 6 L |x0|^2 + 18 L b2."""
        of_start = 13 * self.initial_gap + 6 * self.smoothness * self.initial_norm_squared
        return of_start + 18 * self.smoothness * self.heterogeneity


# Section 5.1; b^2 and |x^0|^2 contradict G and a standard start, and they make up nearly all of A in equation (12).
CIFAR10_CONSTANTS = ProblemConstants(
    smoothness=25.0,
    gradient_bound=10.0,
    initial_gap=2.8,
    heterogeneity=500_000.0,
    initial_norm_squared=780_000.0,
    num_samples=3125,
    num_params=11_170_000,
)


def optimal_iterations(
    constants: ProblemConstants,
    *,
    dp_epsilon: float | Sequence[float],
    dp_delta: float | Sequence[float],
    c2: float = C2_OF_THE_PAPER,
    num_nodes: int,
) -> float:
    """K of equation (12), not rounded.

    Args:
        constants: of the problem.
        dp_epsilon: one for all nodes, or one for each (personalized privacy).
        dp_delta: one for all nodes, or one for each.
        c2: of equation (11).
        num_nodes: n.

    Raises:
        ArgumentError: a sequence that does not hold one number per node, or a number out of range.

    Guarantees:
        - it minimizes (10) with the noise of (11) inserted.

    Examples:
        >>> round(optimal_iterations(CIFAR10_CONSTANTS, dp_epsilon=3, dp_delta=1e-5, num_nodes=16))
        3120
    """
    c, total = constants, _sum_over_nodes(dp_epsilon, dp_delta, num_nodes)
    check.positive(c2=c2)
    variance = 216 * c.smoothness * c.num_params * (c2 * c.gradient_bound) ** 2 * total
    return c.numerator * c.num_samples**2 * num_nodes / variance


def _sum_over_nodes(dp_epsilon: float | Sequence[float], dp_delta: float | Sequence[float], num_nodes: int) -> float:
    """Sum over nodes of log(1 / delta_i) / eps_i^2."""
    check.at_least(1, num_nodes=num_nodes)
    check.positive(dp_epsilon=dp_epsilon, dp_delta=dp_delta)
    check.probability(dp_delta=dp_delta)
    check.per_node(num_nodes, dp_epsilon=dp_epsilon, dp_delta=dp_delta)
    terms = np.log(1 / np.asarray(dp_delta, np.float64)) / np.asarray(dp_epsilon, np.float64) ** 2
    return float(np.sum(np.broadcast_to(terms, num_nodes)))


def _bound(release: Release, _relation: str, num_rounds: int, dp_delta: float, c2: float) -> Bound:
    """Equation (11) for a release: sigma eps = 3 c2 G sqrt(K log(1/delta)) / J."""
    assert release.clip_norm is not None
    product = 3 * c2 * release.clip_norm * math.sqrt(num_rounds * math.log(1 / dp_delta)) / release.num_entries
    return Bound(product / release.noise_std, f"PrivSGP-VR, equation (11) with c2 = {c2:g}")


def _notes(release: Release, num_rounds: int, dp_delta: float, stated: float | None) -> tuple[str, ...]:
    """List the assumptions of Theorem 2, and a note where the epsilon is refuted."""
    theorem = (
        "Theorem 2 of the paper holds with this c2, which the paper does not state, and epsilon < c1 K / J^2",
        "the paper names no neighboring relation; replace_one is what its sampler means",
    )
    leak = constant_gradient_epsilon(release, "replace_one", num_rounds, dp_delta) if stated else 0.0
    if not stated or leak <= stated:
        return theorem
    return (*theorem, f"{REFUTED}: gradients that never change already leak epsilon {rounded_down(leak, 3)}")


PRIVSGP = Accountant(
    label="PrivSGP",
    published="The paper states no privacy theorem for PrivSGP (Algorithm 2).",
    estimator="mini_batch",
)
PRIVSGP_VR = Accountant(
    label="PrivSGP-VR",
    # The algorithm draws a fixed number of samples, hence the relation.
    published=Published(_bound, lambda release: "replace_one", _notes, lambda release: None),
    estimator="saga",
)
