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
from jaxfl.core.calls import by_name
from jaxfl.privacy import accountant as verbs
from jaxfl.privacy.accountant import Account, Bound, Claim, Family
from jaxfl.privacy.clients.local_iterations import converted_epsilon, renyi_divergences
from jaxfl.privacy.clients.sampled_releases import SampledReleases, sampled_epsilon
from jaxfl.privacy.shared import Secrets
from jaxfl.privacy.statements import NO_NOISE, drawn, rounded_up

ESTIMATES = ("none", "as_published", "private")
WITHOUT_NOISE = (
    "The next number of local iterations follows from estimates without noise, and the variance of the models tells it."
)
CLIENT_RELATIONS = {"published": ("add_or_remove_one",), "proven": ("zero_out", "replace_one")}
_SETTING = (
    "the server and the other clients see all models and estimates that a client sends, and know data, batches and"
    " noise of each other; nobody sees losses or metrics",
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
    secrets: Secrets | None = None  # of noise that pairs of clients share; None: noise is a client's own


class Plan(NamedTuple):
    """Releases of one client, as plain numbers."""

    release: ClientRelease
    dp_delta: float
    counts: Callable[[int], tuple[int, int]]
    budget: tuple[int, int] | None  # iterations and estimates that count in place of those that ran


class Spent(NamedTuple):
    """Releases of one client in some rounds."""

    release: ClientRelease
    num_iterations: int
    num_estimates: int
    dp_delta: float
    ran: tuple[int, int] | None = None  # iterations and estimates that ran, where the numbers above are a budget's


@by_name
def account(
    releases: ClientRelease | Sequence[ClientRelease],
    *,
    dp_delta: float,
    num_estimates: int = 0,
    counts: Callable[[int], tuple[int, int]] | None = None,
    budget: tuple[int, int] | None = None,
    num_clients: int | None = None,
) -> Account:
    """Account for the samples of clients: published (add_or_remove_one), then proven (zero_out, replace_one).

    Args:
        releases: of each client, or of the clients of several runs, or one client's.
        dp_delta: in (0, 1).
        num_estimates: R, estimates of the whole run. Where they have no noise there is no epsilon.
        counts: number of rounds of the account -> (T, R), local iterations and estimates in them. By default a round
            is one local iteration, and `num_estimates` are made in any number of them.
        budget: most iterations and estimates that the run could have made, where those that it made follow from what
            was released (ALI-DPFL). The proven epsilon is then for these largest numbers: it holds whatever the run
            chose, while the numbers that it reached are themselves an outcome.
        num_clients: of one run; by default the number of releases.

    Returns:
        An account whose noise is that of local iterations; the noise of estimates stays.

    Raises:
        ArgumentError: an argument out of range.

    Guarantees:
        - the published epsilon is exactly that of local_iterations_epsilon.
        - beside estimates without noise a note has the cost of the iterations, had they been fixed in advance.
        - of a run that chose its iterations, the proven epsilon is that of its budget.

    Examples:
        >>> release = ClientRelease("poisson", num_samples=5000, batch_size=75, clip_norm=0.1, noise_multiplier=1.0)
        >>> clients = account([release] * 10, dp_delta=1e-5)
        >>> [round(clients.calibrate(317, 2.0, bound), 2) for bound in ("published", "proven")]
        [1.1, 0.93]
        >>> louder = account([release._replace(noise_multiplier=1.1)] * 10, dp_delta=1e-5)
        >>> for one in louder.statements(1585):
        ...     print(one.bound, one.neighboring_relation, round(one.dp_epsilon, 2))
        published add_or_remove_one 3.81
        proven zero_out 3.0
        proven replace_one 5.09
        >>> [louder.most_rounds(1.55, 10_000, bound) for bound in ("published", "proven")]
        [78, 422]
    """
    listed = verbs.plain(releases)
    num_clients = len(listed) if num_clients is None else num_clients
    check.at_least(1, num_clients=num_clients)
    dp_delta = verbs.number(dp_delta=dp_delta)
    check.open_unit(dp_delta=dp_delta)
    counts = (lambda num_rounds: (num_rounds, num_estimates)) if counts is None else counts
    plans = [Plan(_checked(release), dp_delta, counts, None) for release in listed]
    proven = plans
    if budget is not None and all(release.estimates == "private" for release in listed):
        proven = [plan._replace(budget=budget) for plan in plans]
    by_bound = {"published": plans, "proven": proven}
    claims = [Claim(bound, relation, by_bound[bound]) for bound in by_bound for relation in CLIENT_RELATIONS[bound]]
    return Account(_SAMPLES, tuple(claims), num_clients)


def _checked(release: ClientRelease) -> ClientRelease:
    """Refuse a release that cannot be accounted for."""
    check.one_of(ESTIMATES, estimates=release.estimates)
    is_silent = release.noise_multiplier == 0 and release.estimates == "none"  # `_reason` says it, whatever the draw
    if release.sampler != "poisson" and not is_silent:
        remedy = "Draw the clients' batches by jaxfl.gradients.poisson."
        requirement = "must be 'poisson': no other is accounted for"
        raise ArgumentError("sampler", requirement, f"got {release.sampler!r}", remedy)
    check.at_least(1, num_samples=release.num_samples, batch_size=release.batch_size)
    least = 1 if release.estimates == "private" else 0
    check.at_least(least, estimate_batch_size=release.estimate_batch_size)
    names = ("noise_multiplier", "estimate_noise_multiplier")
    noise = {name: verbs.number(**{name: getattr(release, name)}) for name in names}
    check.non_negative(**noise)
    clip_norm = None if release.clip_norm is None else verbs.positive(clip_norm=release.clip_norm)
    for name in ("batch_size", "estimate_batch_size"):
        if getattr(release, name) > release.num_samples:
            found, remedy = f"got {getattr(release, name)} of {release.num_samples}", "Pass a smaller batch."
            raise ArgumentError(name, "must be at most the client's samples", found, remedy)
    if release.estimates != "private":
        for name in ("estimate_batch_size", "estimate_noise_multiplier"):
            if getattr(release, name):
                requirement, remedy = "must be 0 unless estimates are private", "Pass estimates='private'."
                raise ArgumentError(name, requirement, f"got {getattr(release, name):g}", remedy)
    return release._replace(clip_norm=clip_norm, **noise)


def _spent(plan: Plan, num_rounds: int, factor: float) -> Spent:
    """A client after some rounds, with a factor on the noise of its iterations."""
    ran = plan.counts(num_rounds)
    check.at_least(0, num_iterations=ran[0], num_estimates=ran[1])
    if plan.release.estimates == "none" and ran[1]:
        found, remedy = f"got {ran[1]}", "Say what estimates the release has."
        raise ArgumentError("num_estimates", "must be 0 without estimates", found, remedy)
    release = plan.release._replace(noise_multiplier=factor * plan.release.noise_multiplier)
    if plan.budget is None or not ran[0]:
        return Spent(release, *ran, plan.dp_delta)
    return Spent(release, max(plan.budget[0], ran[0]), max(plan.budget[1], ran[1]), plan.dp_delta, ran)


def _search(
    spent: Callable[[float], Spent], bound: str, relation: str, target_epsilon: float
) -> tuple[Callable[[float], float], float]:
    """(factor -> epsilon, a guess of the factor that meets the target); refused where estimates cost more."""
    one = spent(1.0)
    alone = _SAMPLES.epsilon(one._replace(num_iterations=0), bound, relation)
    if alone > target_epsilon:
        requirement = f"must leave {one.num_estimates} estimates within {target_epsilon:g}"
        raise ArgumentError("estimate_noise_multiplier", requirement, f"they cost {alone:.4g}", "Pass more.")
    rate = one.release.batch_size / one.release.num_samples
    guess = verbs.noise_guess(rate, one.num_iterations, one.dp_delta, target_epsilon) / one.release.noise_multiplier
    return lambda factor: _SAMPLES.epsilon(spent(factor), bound, relation), guess


def _reason(spent: Spent, _bound: str) -> str | None:
    """Why there is no epsilon, or None."""
    release = spent.release
    if spent.num_iterations and release.clip_norm is None:
        return verbs.UNCLIPPED
    if spent.num_iterations and release.noise_multiplier == 0:
        return verbs.SILENT
    if spent.num_estimates and release.estimates == "as_published":
        return WITHOUT_NOISE
    if spent.num_estimates and release.estimates == "private" and release.estimate_noise_multiplier == 0:
        return f"{NO_NOISE} to the estimates, so they are not private."
    return None


@lru_cache(maxsize=4096)
def _cost(spent: Spent, bound: str, relation: str) -> Bound:
    """The epsilon of a release; `_reason` of it is None."""
    kinds = kinds_of(spent)
    if not kinds:
        return verbs.NOTHING
    counts = {"local iterations": spent.num_iterations, "estimates": spent.num_estimates}
    what = " and ".join(name for name, count in counts.items() if count)
    renyi = sum(kind.num_releases * _divergences(kind.sampling_rate, kind.noise_multiplier) for kind in kinds)
    how = f"Renyi DP of {what}, integer orders 2 to 64"
    converted = Bound(converted_epsilon(np.asarray(renyi), spent.dp_delta), how)
    if bound == "published":
        return converted
    proven, secret = sampled_epsilon(kinds, spent.dp_delta, exchange=relation == "replace_one")
    how = "Poisson-sampled Gaussian" if secret else "Gaussian"
    exact = Bound(proven, f"privacy loss distribution of {how} releases: {what}")
    return converted if relation == "zero_out" and converted.dp_epsilon < proven else exact


def kinds_of(spent: Spent) -> list[SampledReleases]:
    """List the releases of a client: of its iterations, and of its private estimates."""
    release = spent.release
    rate = release.batch_size / release.num_samples
    kinds = [SampledReleases(rate, release.noise_multiplier, spent.num_iterations)]
    if release.estimates == "private":
        rate = release.estimate_batch_size / release.num_samples
        kinds.append(SampledReleases(rate, release.estimate_noise_multiplier, spent.num_estimates))
    return [kind for kind in kinds if kind.num_releases]


@lru_cache(maxsize=64)
def _divergences(sampling_rate: float, noise_multiplier: float) -> np.ndarray:
    return renyi_divergences(sampling_rate=sampling_rate, noise_multiplier=noise_multiplier)


def _words(clients: Sequence[Spent], spent: Spent, bound: str, relation: str, _epsilon: Bound) -> dict[str, Any]:
    """Arguments of `statement`."""
    norms = sorted({one.release.clip_norm for one in clients if one.release.clip_norm is not None})
    clipped = f"every sample's gradient is clipped to the L2 norm {' or '.join(f'{norm:g}' for norm in norms)}"
    release, secrets = spent.release, spent.release.secrets
    each = drawn("samples", release.sampler, release.batch_size / release.num_samples, release.noise_multiplier)
    if len({other.release.noise_multiplier for other in clients}) > 1:
        each += " at the worst client; others have noise of their own"
    return {
        "gradients": clipped if all(one.release.clip_norm is not None for one in clients) else None,
        "observer": "the server and all other clients" if secrets is None else secrets.with_server[0],
        "setting": _SETTING if secrets is None else (*secrets.with_server[1], *_SETTING[1:]),
        "notes": _notes(clients, spent, bound, relation),
        "mechanism": f"{spent.num_iterations} local iterations, {each}",
    }


def _notes(clients: Sequence[Spent], spent: Spent, bound: str, relation: str) -> list[str]:
    """List the assumptions of a statement that others do not make."""
    num_iterations, num_estimates, notes = spent.num_iterations, spent.num_estimates, []
    reasons = {_reason(each, bound) for each in clients}
    if WITHOUT_NOISE in reasons and reasons <= {None, WITHOUT_NOISE}:
        fixed = max(_SAMPLES.epsilon(each._replace(num_estimates=0), bound, relation) for each in clients)
        notes.append(f"{num_iterations} local iterations fixed in advance would cost epsilon {rounded_up(fixed, 4)}")
    private = next((each.release for each in clients if each.release.estimates == "private"), None)
    if private is not None:
        notes.append(
            f"an estimate of rho, beta and xi has noise of {private.estimate_noise_multiplier:g} times its sensitivity,"
            f" drawn from {private.estimate_batch_size} samples in expectation"
        )
    if spent.ran is not None:
        notes.append(
            f"stated for its budget of {num_iterations} local iterations; {spent.ran[0]} ran: the run chose them by"
            f" what it released ({num_estimates} and {spent.ran[1]} estimates)"
        )
    return notes


_SAMPLES = Family(_spent, _reason, _cost, _words, lambda spent: spent.release.num_samples, _search)
