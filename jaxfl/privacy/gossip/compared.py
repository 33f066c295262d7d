"""DP2-SGD and A(DP)2SGD, which PrivSGP-VR's paper compares with: their own accounting, as that paper names it.

The originals' formulas could not be retrieved. Both are for plain mini-batches that hold a sample at most once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from jaxfl.privacy.accountant import Bound
from jaxfl.privacy.dominating_pairs import gaussian_epsilon
from jaxfl.privacy.gossip.accountant import Accountant, Published
from jaxfl.privacy.gossip.proven import Release, sensitivities
from jaxfl.privacy.statements import AT_EXPECTED_WAKING

_RECONSTRUCTED = "formula reconstructed: the original's could not be retrieved"
_EXPECTED_WAKING = f"counted {AT_EXPECTED_WAKING}: no bound for a node that wakes more often"


def _basic_composition(release: Release, relation: str, num_rounds: int, dp_delta: float, _c2: float) -> Bound:
    """epsilon by adding up (epsilon, delta) of single releases: how DP2-SGD bounds its privacy loss.

    Each release is a Gaussian mechanism amplified by sampling, (log(1 + q (exp(e) - 1)), q d), and K of them cost K
    times that. PrivSGP-VR's paper says "basic composition theorem" and no more, and the original's formula could not be
    retrieved; so each release is given the exact Gaussian curve and the amplification, the strongest reading. It is a
    valid bound, but a loose one. (The classical Gaussian bound without amplification asks for sigma = 13,083 G at
    epsilon 3, delta 1e-5, K = 3,120, where this asks for 5.54 G.)
    """
    name = "basic composition of Gaussian releases amplified by sampling"
    sampling_rate = release.batch_size / release.num_entries
    release_delta = dp_delta / (num_rounds * sampling_rate)
    if release_delta >= 1:
        return Bound(0.0, name)
    once = gaussian_epsilon(sensitivities(release, relation).present / release.noise_std, release_delta)
    if sampling_rate < 1:
        once = max(0.0, np.logaddexp(math.log1p(-sampling_rate), math.log(sampling_rate) + once))
    return Bound(float(num_rounds * once), name)


def _renyi(release: Release, relation: str, num_rounds: int, dp_delta: float, _c2: float) -> Bound:
    """epsilon by Renyi accounting of the sampled Gaussian: how A(DP)2SGD bounds its privacy loss.

    PrivSGP-VR's paper says "in the sense of Renyi differential privacy", and the original's formula could not be
    retrieved; this is the Renyi accountant of dp-accounting over the expected number of a node's releases, K. In
    batches of fixed size under replace_one the sum of clipped gradients changes by up to 2 G.
    """
    import dp_accounting  # takes a second
    from dp_accounting.rdp import RdpAccountant

    assert release.clip_norm is not None
    multiplier = release.noise_std * release.batch_size / release.clip_norm
    b, entries, gaussian = release.batch_size, release.num_entries, dp_accounting.GaussianDpEvent
    if relation == "zero_out":
        accountant = RdpAccountant()
        event = dp_accounting.PoissonSampledDpEvent(b / entries, gaussian(multiplier))
    else:
        accountant = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
        event = dp_accounting.SampledWithoutReplacementDpEvent(entries, b, gaussian(multiplier / 2))
    with np.errstate(all="ignore"):  # orders that overflow count as infinite
        dp_epsilon = float(accountant.compose(event, num_rounds).get_epsilon(dp_delta))
    return Bound(dp_epsilon, "Renyi accounting of the sampled Gaussian")


def _published(label: str, bound: Callable[..., Bound], *notes: str) -> Published:
    """Make the `Published` of either paper from the parts that both share."""

    def reason(release: Release) -> str | None:
        if release.estimator == "saga":
            return f"{label} is published for plain mini-batch gradients, not for a table of stored ones."
        if release.sampler == "uniform" and release.batch_size > 1:
            return f"The accounting of {label} is known here only for batches that hold a sample at most once."
        return None

    return Published(
        bound=bound,
        relation=lambda release: "zero_out" if release.sampler == "poisson" else "replace_one",
        notes=lambda *_: (_RECONSTRUCTED, *notes),
        reason=reason,
        bound_name="reconstructed",
    )


def without_theorem(label: str, num_steps: int = 1) -> Accountant:
    """The accountant of a method whose nodes release `num_steps` noisy gradients a round, and whose paper has none."""
    return Accountant(label=label, published=f"The paper of {label} states no privacy.", releases_per_round=num_steps)


D_PSGD = without_theorem("D-PSGD")
DP2_SGD = Accountant(label="DP2-SGD", published=_published("DP2-SGD", _basic_composition))
A_DP2_SGD = Accountant(
    label="A(DP)2SGD",
    published=_published("A(DP)2SGD", _renyi, _EXPECTED_WAKING),
    wakes_at_random=True,
)
