"""Privacy of the samples of a server's clients: the epsilon that ALI-DPFL states, and the epsilons that are proven.

A client makes T local iterations of DP-SGD in all rounds together: Poisson batches with q_i = B / |D_i|, every sample's
gradient clipped to the L2 norm C, Gaussian noise of standard deviation sigma C on the sum. Its messages follow from
these releases and from what it received, so its guarantee is that of T releases composed, however rounds divide them.

ALI-DPFL also sends R estimates, one a round: rho_i, beta_i and xi_i. As published they have no noise. The number of
local iterations of the next round follows from them, and with it the variance of the models: neither the estimates nor
the models have an epsilon then.

Private estimates are one Gaussian mechanism each. w_i is the client's model before the aggregation, w the aggregate and
v a vector: all three follow from what was released with noise. A Poisson sample of expected size m of the client's data
gives three numbers, with l_s and g_s the loss and the gradient of sample s:

    a_i = (1/m) sum_s clip(l_s(w_i) - l_s(w), [-L, L])
    b_i = |(1/m) sum_s (clip_C(g_s(w_i)) - clip_C(g_s(w)))|_2
    c_i = |(1/m) sum_s clip_C(g_s(w)) - v|_2

Taking one sample away moves a_i by at most L / m, b_i by at most 2 C / m and c_i by at most C / m: a term of the first
sum is at most L, one of the second at most 2 C long, one of the third at most C, and a norm moves by no more than its
vector (|x| - |y| <= |x - y|). Each number gets noise of z_e sqrt(3) times its own bound. In units of their noise the
three together then move by at most sqrt(3 (1 / (z_e sqrt(3)))^2) = 1 / z_e, so that they are one Gaussian mechanism of
noise multiplier z_e, sampled with rate m / |D_i|. The denominators |w_i - w| are public.

Bounds:

- published: Renyi DP of integer orders 2 to 64 (`local_iterations_epsilon`), add_or_remove_one. Private estimates add
  their divergence at each order;
- proven: privacy loss distributions (`sampled_releases`), for zero_out and replace_one. Batch sizes and |D_i| are
  public and stay, so zero_out is what a sample that is added or removed comes to. Renyi DP as above is proven for
  zero_out, too, whose pair of distributions is the same (the reverse divergence is never larger: Mironov, Talwar,
  Zhang); it is given where delta is too small for a grid.

References:
    X. Ling, J. Fu, K. Wang, H. Liu, Z. Chen, "ALI-DPFL: Differentially Private Federated Learning with Adaptive Local
    Iterations", arXiv:2308.10457.
    I. Mironov, K. Talwar, L. Zhang, "Renyi Differential Privacy of the Sampled Gaussian Mechanism", arXiv:1908.10530.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxfl.core import ArgumentError, check
from jaxfl.privacy.calibration import most_rounds
from jaxfl.privacy.clients.client_release import (
    CLIENT_RELATIONS,
    WITHOUT_NOISE,
    ClientRelease,
    checked,
    no_epsilon,
)
from jaxfl.privacy.clients.local_iterations import ORDERS, renyi_divergences
from jaxfl.privacy.clients.sampled_releases import SampledReleases, sampled_epsilon
from jaxfl.privacy.statements import Statement, rounded_up, statement

_SETTING = (
    "it holds against whoever sees all models and estimates that a client sends, and no losses or metrics",
    "each sample joins a batch independently with probability q_i = B / |D_i|, and which do stays secret",
    "a sample is held by one client, and where samples are placed (by label, say) does not depend on the changed one",
    "the client's number of samples |D_i|, batch sizes and weights in the average are public and fixed",
    "the numbers of iterations and of estimates count as fixed in advance; where they follow from what was released,"
    " the epsilon of the most that the run could make is the one that holds",
)


class _Bound(NamedTuple):
    """An epsilon and where it comes from."""

    dp_epsilon: float
    accountant: str


def epsilon(
    release: ClientRelease,
    num_iterations: int,
    num_estimates: int = 0,
    *,
    bound: str,
    dp_delta: float,
    neighboring_relation: str | None = None,
) -> float:
    """Epsilon of one client under one neighboring relation; infinite where there is none.

    Args:
        release: of the client.
        num_iterations: T, local iterations of the whole run, at least 0.
        num_estimates: R, estimates of the whole run, at least 0. With those without noise there is no epsilon.
        bound: "published" or "proven".
        dp_delta: in (0, 1).
        neighboring_relation: "add_or_remove_one" for the published bound, "zero_out" (default) or "replace_one" for the
            proven one.

    Raises:
        ArgumentError: an argument out of range, or a relation that the bound is not stated for.

    Guarantees:
        - the published epsilon is exactly that of local_iterations_epsilon.
        - more iterations or estimates never lower it.

    Example:
        >>> release = ClientRelease("poisson", num_samples=5000, batch_size=75, clip_norm=0.1, noise_multiplier=1.1)
        >>> [round(epsilon(release, 317, bound=bound, dp_delta=1e-5), 3) for bound in ("published", "proven")]
        [2.005, 1.357]
    """
    release, relation = checked(release, num_iterations, num_estimates, bound, dp_delta, neighboring_relation)
    return _epsilon(release, bound, relation, num_iterations, num_estimates, float(dp_delta))


def max_iterations(
    releases: Sequence[ClientRelease],
    num_rounds: int,
    target_epsilon: float,
    bound: str,
    *,
    dp_delta: float,
    limit: int,
    neighboring_relation: str | None = None,
) -> int:
    """Most local iterations of a run that every client's budget pays for.

    Args:
        releases: of each client.
        num_rounds: R, rounds of the run, at least 0, with an estimate in each where the release has estimates.
        target_epsilon: positive.
        bound, dp_delta, neighboring_relation: as for `epsilon`.
        limit: most iterations that are asked for, at least 0.

    Returns:
        T, 0 ... limit; 0 where not one iteration fits, or where there is no such bound.

    Raises:
        ArgumentError: as for `epsilon`, or no client.

    Guarantees:
        - no client spends more than its budget, and one more iteration overspends, unless the limit is reached.

    Example:
        >>> release = ClientRelease("poisson", num_samples=5000, batch_size=75, clip_norm=0.1, noise_multiplier=1.1)
        >>> budget = {"target_epsilon": 1.55, "dp_delta": 1e-5, "limit": 10_000}
        >>> [max_iterations([release] * 10, 50, bound=bound, **budget) for bound in ("published", "proven")]
        [78, 422]
    """
    check.scalar(target_epsilon=target_epsilon)
    check.positive(target_epsilon=target_epsilon)
    check.at_least(0, num_rounds=num_rounds, limit=limit)
    _refuse_none(releases)
    dp_delta, most = float(dp_delta), limit
    # Descending rates: the smallest client pays most, but for others with less noise.
    for given in sorted(set(releases), key=lambda release: release.num_samples):
        num_estimates = num_rounds if given.estimates != "none" else 0
        release, relation = checked(given, 0, num_estimates, bound, dp_delta, neighboring_relation)

        def spent(num_iterations: int, release=release, relation=relation, num_estimates=num_estimates) -> float:
            return _epsilon(release, bound, relation, num_iterations, num_estimates, dp_delta)

        # The limit itself may be too far away to be accounted for in short time.
        if most and (most == limit or spent(most) > target_epsilon):
            # Without estimates, which cost next to nothing to account for, it is never less.
            above = most_rounds(lambda num: spent(num, num_estimates=0), target_epsilon, most)
            most = above if num_estimates == 0 else _most_below(spent, target_epsilon, above)
    return most


def statements(
    releases: Sequence[ClientRelease],
    num_iterations: int,
    num_estimates: int = 0,
    *,
    dp_delta: float,
    num_clients: int | None = None,
    budgeted: tuple[int, int] | None = None,
) -> list[Statement]:
    """List the privacy statements on the samples of a run: published, then proven (zero_out, replace_one).

    Args:
        releases: of each client, or of the clients of several runs. Clients without noise or clipping are stated, too,
            with a reason and no epsilon.
        num_iterations: T, local iterations of each client in the whole run, at least 0.
        num_estimates: R, estimates of each client in the whole run, at least 0.
        dp_delta: in (0, 1).
        num_clients: of one run; by default there is a release for each.
        budgeted: most iterations and estimates that the run could have made, where those that it made follow from what
            was released (ALI-DPFL). A proven epsilon is then theirs: it bounds whatever the run chose, while the number
            that was reached is itself an outcome.

    Raises:
        ArgumentError: as for `epsilon`, or no client.

    Guarantees:
        - dp_epsilon is that of the client with the largest, node_epsilons those of all.
        - where nothing is clipped, no noise is added or estimates have none there is a reason and no epsilon.
        - beside estimates without noise a note has the cost of the iterations, had they been fixed in advance.
        - nothing is spent in 0 iterations.
        - of a run that chose its iterations, the proven epsilon is that of its budget.

    Example:
        >>> release = ClientRelease("poisson", num_samples=5000, batch_size=75, clip_norm=0.1, noise_multiplier=1.1)
        >>> for stated in statements([release] * 10, 1585, dp_delta=1e-5):
        ...     print(stated.bound, stated.neighboring_relation, round(stated.dp_epsilon, 2))
        published add_or_remove_one 3.81
        proven zero_out 3.0
        proven replace_one 5.09
    """
    _refuse_none(releases)
    num_clients = len(releases) if num_clients is None else num_clients
    check.at_least(1, num_clients=num_clients)
    plain = [checked(release, num_iterations, num_estimates, "proven", dp_delta, None)[0] for release in releases]
    ran, chosen = (num_iterations, num_estimates), None
    if budgeted is not None and num_iterations and all(release.estimates == "private" for release in releases):
        chosen = f"stated for its budget of {budgeted[0]} local iterations; {num_iterations} ran: the run chose"
        chosen += f" them by what it released ({budgeted[1]} and {num_estimates} estimates)"
    return [
        _stated(plain, bound, relation, *ran, float(dp_delta), num_clients)
        if chosen is None or bound == "published"
        else _stated(plain, bound, relation, *budgeted, float(dp_delta), num_clients, chosen)  # pyright: ignore
        for bound, relations in CLIENT_RELATIONS.items()
        for relation in relations
    ]


def _stated(
    releases: Sequence[ClientRelease],
    bound: str,
    relation: str,
    num_iterations: int,
    num_estimates: int,
    dp_delta: float,
    num_clients: int,
    chosen: str | None = None,
) -> Statement:
    """The statement of the client with the largest epsilon, or of the first that has none."""
    reasons = [no_epsilon(release, num_iterations, num_estimates) for release in releases]
    reason = next((reason for reason in reasons if reason is not None), None)
    bounds = []
    if reason is None:
        bounds = [_bound(each, bound, relation, num_iterations, num_estimates, dp_delta) for each in releases]
    worst = max(bounds, key=lambda each: each.dp_epsilon, default=_Bound(math.inf, "none"))
    private = next((release for release in releases if release.estimates == "private"), None)
    notes = []
    if WITHOUT_NOISE in reasons and set(reasons) <= {None, WITHOUT_NOISE}:
        fixed = max(_bound(each, bound, relation, num_iterations, 0, dp_delta).dp_epsilon for each in releases)
        notes.append(f"{num_iterations} local iterations fixed in advance would cost epsilon {rounded_up(fixed, 4)}")
    if private is not None:
        sizes = f"{private.estimate_batch_size} samples in expectation"
        notes.append(
            f"an estimate of rho, beta and xi has noise of {private.estimate_noise_multiplier:g} times its sensitivity,"
            f" drawn from {sizes}"
        )
    notes += [] if chosen is None else [chosen]
    norms = sorted({release.clip_norm for release in releases if release.clip_norm is not None})
    clipped = f"every sample's gradient is clipped to the L2 norm {' or '.join(f'{norm:g}' for norm in norms)}"
    return statement(
        bound,
        relation,
        dp_epsilon=None if reason else worst.dp_epsilon,
        dp_delta=dp_delta,
        accountant=worst.accountant,
        nodes=num_clients,
        gradients=clipped if all(release.clip_norm is not None for release in releases) else None,
        setting=_SETTING,
        notes=notes,
        reason=reason,
        node_epsilons=[each.dp_epsilon for each in bounds],
    )


def _refuse_none(releases: Sequence[ClientRelease]) -> None:
    if not len(releases):
        raise ArgumentError("releases", "must hold one release a client", "got none", "Pass a non-empty sequence.")


def _epsilon(
    release: ClientRelease, bound: str, relation: str, num_iterations: int, num_estimates: int, dp_delta: float
) -> float:
    """Epsilon; infinite where there is none."""
    if no_epsilon(release, num_iterations, num_estimates) is not None:
        return math.inf
    return _bound(release, bound, relation, num_iterations, num_estimates, dp_delta).dp_epsilon


@lru_cache(maxsize=4096)
def _bound(
    release: ClientRelease, bound: str, relation: str, num_iterations: int, num_estimates: int, dp_delta: float
) -> _Bound:
    """The epsilon of a release; `no_epsilon` of it is None."""
    kinds = [SampledReleases(release.batch_size / release.num_samples, release.noise_multiplier, num_iterations)]
    if release.estimates == "private":
        rate = release.estimate_batch_size / release.num_samples
        kinds.append(SampledReleases(rate, release.estimate_noise_multiplier, num_estimates))
    kinds = [kind for kind in kinds if kind.num_releases]
    if not kinds:
        return _Bound(0.0, "nothing was released")
    what = (
        "local iterations and estimates" if len(kinds) == 2 else "local iterations" if num_iterations else "estimates"
    )
    renyi = sum(kind.num_releases * _divergences(kind.sampling_rate, kind.noise_multiplier) for kind in kinds)
    converted = _Bound(
        float(np.min(renyi - math.log(dp_delta) / (ORDERS - 1))), f"Renyi DP of {what}, integer orders 2 to 64"
    )
    if bound == "published":
        return converted
    proven, secret = sampled_epsilon(kinds, dp_delta, exchange=relation == "replace_one")
    how = "Poisson-sampled Gaussian" if secret else "Gaussian"
    found = _Bound(proven, f"privacy loss distribution of {how} releases: {what}")
    return converted if relation == "zero_out" and converted.dp_epsilon < proven else found


@lru_cache(maxsize=64)
def _divergences(sampling_rate: float, noise_multiplier: float) -> np.ndarray:
    return renyi_divergences(sampling_rate=sampling_rate, noise_multiplier=noise_multiplier)


def _most_below(epsilon_of: Callable[[int], float], target_epsilon: float, above: int) -> int:
    """Most iterations in 0 ... above within the target, which are probably not many fewer than `above`."""
    step, beyond = 1, above + 1
    within = above
    while within > 0 and epsilon_of(within) > target_epsilon:
        within, beyond, step = max(0, within - step), within, 2 * step
    while beyond - within > 1:
        middle = (within + beyond) // 2
        if epsilon_of(middle) <= target_epsilon:
            within = middle
        else:
            beyond = middle
    return within
