"""Privacy of the samples of a server's clients: the epsilon that ALI-DPFL states, and the epsilons that are proven.

A client makes T local iterations of DP-SGD in all rounds together: Poisson batches with q_i = B / |D_i|, every sample's
gradient clipped to the L2 norm C, Gaussian noise of standard deviation sigma C on the sum. Its messages follow from
these releases and from what it received, so its guarantee is that of T releases composed, however rounds divide them.

Clients of ALI-DPFL also send R estimates, one per round: rho_i, beta_i and xi_i. As published they have no noise. The
number of local iterations of the next round follows from them, and with it the variance of the models: neither the
estimates nor the models have an epsilon then.

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
  public and stay, so adding or removing a sample means zeroing its gradient (zero_out). Renyi DP as above is proven for
  zero_out, too: its pair of distributions is the same, and the reverse divergence is never larger (Mironov, Talwar,
  Zhang). It is given where delta is too small for a grid.

References:
    X. Ling, J. Fu, K. Wang, H. Liu, Z. Chen, "ALI-DPFL: Differentially Private Federated Learning with Adaptive Local
    Iterations", arXiv:2308.10457.
    I. Mironov, K. Talwar, L. Zhang, "Renyi Differential Privacy of the Sampled Gaussian Mechanism", arXiv:1908.10530.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from jaxfl.core import ArgumentError, check
from jaxfl.privacy import accountant as verbs
from jaxfl.privacy.accountant import Bound, Family
from jaxfl.privacy.clients.local_iterations import converted_epsilon, renyi_divergences
from jaxfl.privacy.clients.sampled_releases import SampledReleases, sampled_epsilon
from jaxfl.privacy.statements import Statement, drawn, rounded_up

ESTIMATES = ("none", "as_published", "private")
WITHOUT_NOISE = (
    "The next number of local iterations follows from estimates without noise, and the variance of the models tells it."
)
CLIENT_RELATIONS = {"published": ("add_or_remove_one",), "proven": ("zero_out", "replace_one")}
_SETTING = (
    "it holds against whoever sees all models and estimates that a client sends, and no losses or metrics",
    "each sample joins a batch independently with probability q_i = B / |D_i|, and which do stays secret",
    "a sample is held by one client, and where samples are placed (by label, say) does not depend on the changed one",
    "the client's number of samples |D_i|, batch sizes and weights in the average are public and fixed",
    "the numbers of iterations and of estimates count as fixed in advance; where they follow from what was released,"
    " the epsilon that holds is the one for the most that the run could make",
)


class ClientRelease(NamedTuple):
    """Releases of one client: T local iterations of DP-SGD, and estimates."""

    sampler: str  # of the batches: "poisson", since no other is accounted for
    num_samples: int  # |D_i|
    batch_size: int  # B, expected, of a Poisson batch
    clip_norm: float | None  # C, L2 norm of a sample's gradient; None: not clipped
    noise_multiplier: float  # sigma, standard deviation of the noise on the batch's sum, over C
    estimate_batch_size: int = 0  # m, expected samples of one private estimate; 0: none
    estimate_noise_multiplier: float = 0.0  # z_e, of one private estimate
    estimates: str = "none"  # "none", "as_published" (without noise) or "private"


class Account(NamedTuple):
    """Arguments that can be accounted for, as plain numbers."""

    release: ClientRelease
    num_iterations: int
    num_estimates: int
    dp_delta: float
    ran: tuple[int, int] | None = None  # iterations and estimates that ran, where the numbers above are a budget's


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
        num_estimates: R, estimates of the whole run, at least 0. Where they have no noise there is no epsilon.
        bound: "published" or "proven".
        dp_delta: in (0, 1).
        neighboring_relation: "add_or_remove_one" for the published bound, "zero_out" (default) or "replace_one" for the
            proven one.

    Raises:
        ArgumentError: an argument out of range, or a relation that the bound is not stated for.

    Guarantees:
        - the published epsilon is exactly that of local_iterations_epsilon.
        - more iterations or estimates never lower it.

    Examples:
        >>> release = ClientRelease("poisson", num_samples=5000, batch_size=75, clip_norm=0.1, noise_multiplier=1.1)
        >>> [round(epsilon(release, 317, bound=bound, dp_delta=1e-5), 3) for bound in ("published", "proven")]
        [2.005, 1.357]
    """
    account, relation = _account(release, num_iterations, num_estimates, dp_delta, bound, neighboring_relation)
    return verbs.epsilon(_SAMPLES, account, bound, relation)


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
        limit: largest number of iterations that is considered, at least 0.

    Returns:
        T, 0 ... limit; 0 where not one iteration fits, or where there is no such bound.

    Raises:
        ArgumentError: as for `epsilon`, or no client.

    Guarantees:
        - no client spends more than its budget, and one more iteration overspends, unless the limit is reached.

    Examples:
        >>> release = ClientRelease("poisson", num_samples=5000, batch_size=75, clip_norm=0.1, noise_multiplier=1.1)
        >>> budget = {"target_epsilon": 1.55, "dp_delta": 1e-5, "limit": 10_000}
        >>> [max_iterations([release] * 10, 50, bound=bound, **budget) for bound in ("published", "proven")]
        [78, 422]
    """
    target_epsilon = verbs.positive(target_epsilon=target_epsilon)
    check.at_least(0, num_rounds=num_rounds, limit=limit)
    costs = []
    # Descending rates: the smallest client pays most, but for others with less noise.
    for release in sorted(verbs.kinds(releases), key=lambda release: release.num_samples):
        num_estimates = num_rounds if release.estimates != "none" else 0
        account, relation = _account(release, 0, num_estimates, dp_delta, bound, neighboring_relation)
        # First without estimates: this allows no fewer iterations, and takes far less time to account for.
        costs += [_spent(each, bound, relation) for each in dict.fromkeys((account._replace(num_estimates=0), account))]
    return verbs.most_rounds(costs, target_epsilon, limit)


def calibrate_noise_multiplier(
    releases: Sequence[ClientRelease],
    num_iterations: int,
    num_estimates: int = 0,
    *,
    target_epsilon: float,
    bound: str,
    dp_delta: float,
    neighboring_relation: str | None = None,
) -> float:
    """Smallest noise multiplier of local iterations with which no client spends more than a budget, to 0.1 %.

    Args:
        releases: of each client; their noise_multiplier is ignored.
        num_iterations, num_estimates: T and R of the whole run, T at least 1.
        target_epsilon: above 0.
        bound, dp_delta, neighboring_relation: as for `epsilon`.

    Raises:
        ArgumentError: as for `epsilon`, or estimates that cost more than the budget.

    Guarantees:
        - never overspends: the epsilon of the result is at most target_epsilon, at every client.

    Examples:
        >>> release = ClientRelease("poisson", num_samples=5000, batch_size=75, clip_norm=0.1, noise_multiplier=0.0)
        >>> budget = {"target_epsilon": 2.0, "dp_delta": 1e-5}
        >>> round(calibrate_noise_multiplier([release] * 10, 317, bound="proven", **budget), 2)
        0.93
    """
    target_epsilon = verbs.positive(target_epsilon=target_epsilon)
    check.at_least(1, num_iterations=num_iterations)
    settings = {"bound": bound, "dp_delta": dp_delta, "neighboring_relation": neighboring_relation}
    searches, guesses = [], []
    for one in sorted(verbs.kinds(releases), key=lambda release: release.num_samples):
        estimates = num_estimates if one.estimates != "none" else 0
        if estimates and (alone := epsilon(one, 0, estimates, **settings)) > target_epsilon:
            requirement = f"must leave {estimates} estimates within {target_epsilon:g}"
            raise ArgumentError("estimate_noise_multiplier", requirement, f"they cost {alone:.4g}", "Pass more.")

        def epsilon_of(noise: float, one: ClientRelease = one, estimates: int = estimates) -> float:
            return epsilon(one._replace(noise_multiplier=noise), num_iterations, estimates, **settings)

        searches.append(epsilon_of)
        guesses.append(verbs.noise_guess(one.batch_size / one.num_samples, num_iterations, dp_delta, target_epsilon))
    return verbs.calibrate(searches, target_epsilon, guesses)


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
        num_clients: of one run; by default the number of releases.
        budgeted: most iterations and estimates that the run could have made, where those that it made follow from what
            was released (ALI-DPFL). The proven epsilon is then for these largest numbers: it holds whatever the run
            chose, while the numbers that it reached are themselves an outcome.

    Raises:
        ArgumentError: as for `epsilon`, or no client.

    Guarantees:
        - dp_epsilon is that of the client with the largest, node_epsilons those of all.
        - where nothing is clipped, no noise is added or estimates have no noise there is a reason and no epsilon.
        - beside estimates without noise a note has the cost of the iterations, had they been fixed in advance.
        - nothing is spent in 0 iterations.
        - of a run that chose its iterations, the proven epsilon is that of its budget.

    Examples:
        >>> release = ClientRelease("poisson", num_samples=5000, batch_size=75, clip_norm=0.1, noise_multiplier=1.1)
        >>> for stated in statements([release] * 10, 1585, dp_delta=1e-5):
        ...     print(stated.bound, stated.neighboring_relation, round(stated.dp_epsilon, 2))
        published add_or_remove_one 3.81
        proven zero_out 3.0
        proven replace_one 5.09
    """
    verbs.require_any(releases)
    num_clients = len(releases) if num_clients is None else num_clients
    check.at_least(1, num_clients=num_clients)
    accounts = [_account(release, num_iterations, num_estimates, dp_delta, "proven", None)[0] for release in releases]
    claims = {bound: [(bound, relation) for relation in relations] for bound, relations in CLIENT_RELATIONS.items()}
    proven = accounts
    if budgeted is not None and num_iterations and all(release.estimates == "private" for release in releases):
        most = {"num_iterations": budgeted[0], "num_estimates": budgeted[1]}
        proven = [account._replace(ran=(num_iterations, num_estimates), **most) for account in accounts]
    published = verbs.statements(_SAMPLES, accounts, claims["published"], num_clients)
    return published + verbs.statements(_SAMPLES, proven, claims["proven"], num_clients)


def _spent(account: Account, bound: str, relation: str) -> Callable[[int], float]:
    """Number of iterations -> epsilon."""
    return lambda num: verbs.epsilon(_SAMPLES, account._replace(num_iterations=num), bound, relation)


def _account(
    release: ClientRelease, num_iterations: int, num_estimates: int, dp_delta: Any, bound: str, asked: str | None
) -> tuple[Account, str]:
    """An account, and the relation; refuse what cannot be accounted for."""
    check.one_of(tuple(CLIENT_RELATIONS), bound=bound)
    check.one_of(ESTIMATES, estimates=release.estimates)
    if release.sampler != "poisson":
        remedy = "Draw the clients' batches by jaxfl.gradients.poisson."
        raise ArgumentError(
            "sampler", "must be 'poisson': no other is accounted for", f"got {release.sampler!r}", remedy
        )
    check.at_least(0, num_iterations=num_iterations, num_estimates=num_estimates)
    check.at_least(1, num_samples=release.num_samples, batch_size=release.batch_size)
    least = 1 if release.estimates == "private" else 0
    check.at_least(least, estimate_batch_size=release.estimate_batch_size)
    names = ("noise_multiplier", "estimate_noise_multiplier")
    noise = {name: verbs.number(**{name: getattr(release, name)}) for name in names}
    dp_delta = verbs.number(dp_delta=dp_delta)
    check.non_negative(**noise)
    clip_norm = None if release.clip_norm is None else verbs.positive(clip_norm=release.clip_norm)
    check.open_unit(dp_delta=dp_delta)
    for name in ("batch_size", "estimate_batch_size"):
        if getattr(release, name) > release.num_samples:
            found, remedy = f"got {getattr(release, name)} of {release.num_samples}", "Pass a smaller batch."
            raise ArgumentError(name, "must be at most the client's samples", found, remedy)
    if release.estimates != "private":
        for name in ("estimate_batch_size", "estimate_noise_multiplier"):
            if getattr(release, name):
                requirement, remedy = "must be 0 unless estimates are private", "Pass estimates='private'."
                raise ArgumentError(name, requirement, f"got {getattr(release, name):g}", remedy)
    if release.estimates == "none" and num_estimates:
        found, remedy = f"got {num_estimates}", "Say what estimates the release has."
        raise ArgumentError("num_estimates", "must be 0 without estimates", found, remedy)
    relation = verbs.chosen_relation(CLIENT_RELATIONS[bound], asked, f"the {bound} bound of clients", "|D_i| and B")
    release = release._replace(clip_norm=clip_norm, **noise)
    return Account(release, num_iterations, num_estimates, dp_delta), relation


def _reason(account: Account, _bound: str) -> str | None:
    """Why there is no epsilon, or None."""
    release = account.release
    if account.num_iterations and release.clip_norm is None:
        return verbs.UNCLIPPED
    if account.num_iterations and release.noise_multiplier == 0:
        return verbs.SILENT
    if account.num_estimates and release.estimates == "as_published":
        return WITHOUT_NOISE
    if account.num_estimates and release.estimates == "private" and release.estimate_noise_multiplier == 0:
        return "No noise is added to the estimates, so they are not private."
    return None


@lru_cache(maxsize=4096)
def _cost(account: Account, bound: str, relation: str) -> Bound:
    """The epsilon of a release; `_reason` of it is None."""
    release = account.release
    rate = release.batch_size / release.num_samples
    kinds = [SampledReleases(rate, release.noise_multiplier, account.num_iterations)]
    if release.estimates == "private":
        rate = release.estimate_batch_size / release.num_samples
        kinds.append(SampledReleases(rate, release.estimate_noise_multiplier, account.num_estimates))
    kinds = [kind for kind in kinds if kind.num_releases]
    if not kinds:
        return verbs.NOTHING
    counts = {"local iterations": account.num_iterations, "estimates": account.num_estimates}
    what = " and ".join(name for name, count in counts.items() if count)
    renyi = sum(kind.num_releases * _divergences(kind.sampling_rate, kind.noise_multiplier) for kind in kinds)
    how = f"Renyi DP of {what}, integer orders 2 to 64"
    converted = Bound(converted_epsilon(np.asarray(renyi), account.dp_delta), how)
    if bound == "published":
        return converted
    proven, secret = sampled_epsilon(kinds, account.dp_delta, exchange=relation == "replace_one")
    how = "Poisson-sampled Gaussian" if secret else "Gaussian"
    found = Bound(proven, f"privacy loss distribution of {how} releases: {what}")
    return converted if relation == "zero_out" and converted.dp_epsilon < proven else found


@lru_cache(maxsize=64)
def _divergences(sampling_rate: float, noise_multiplier: float) -> np.ndarray:
    return renyi_divergences(sampling_rate=sampling_rate, noise_multiplier=noise_multiplier)


def _words(accounts: Sequence[Account], account: Account, bound: str, relation: str, _found: Bound) -> dict[str, Any]:
    """Arguments of `statement`."""
    norms = sorted({account.release.clip_norm for account in accounts if account.release.clip_norm is not None})
    clipped = f"every sample's gradient is clipped to the L2 norm {' or '.join(f'{norm:g}' for norm in norms)}"
    release = account.release
    each = drawn("samples", release.sampler, release.batch_size / release.num_samples, release.noise_multiplier)
    if len({other.release.noise_multiplier for other in accounts}) > 1:
        each += " at the worst client; others have noise of their own"
    return {
        "gradients": clipped if all(account.release.clip_norm is not None for account in accounts) else None,
        "setting": _SETTING,
        "notes": _notes(accounts, account, bound, relation),
        "mechanism": f"{account.num_iterations} local iterations, {each}",
    }


def _notes(accounts: Sequence[Account], account: Account, bound: str, relation: str) -> list[str]:
    """List the assumptions of a statement that others do not make."""
    num_iterations, num_estimates, notes = account.num_iterations, account.num_estimates, []
    reasons = {_reason(each, bound) for each in accounts}
    if WITHOUT_NOISE in reasons and reasons <= {None, WITHOUT_NOISE}:
        fixed = max(verbs.epsilon(_SAMPLES, each._replace(num_estimates=0), bound, relation) for each in accounts)
        notes.append(f"{num_iterations} local iterations fixed in advance would cost epsilon {rounded_up(fixed, 4)}")
    private = next((each.release for each in accounts if each.release.estimates == "private"), None)
    if private is not None:
        notes.append(
            f"an estimate of rho, beta and xi has noise of {private.estimate_noise_multiplier:g} times its sensitivity,"
            f" drawn from {private.estimate_batch_size} samples in expectation"
        )
    if account.ran is not None:
        notes.append(
            f"stated for its budget of {num_iterations} local iterations; {account.ran[0]} ran: the run chose them by"
            f" what it released ({num_estimates} and {account.ran[1]} estimates)"
        )
    return notes


_SAMPLES = Family(_reason, _cost, _words, lambda account: account.release.num_samples)
