"""Releases of one client of a server: checked, plain numbers, and the reasons why some of them have no epsilon."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxfl.core import ArgumentError, check

ESTIMATES = ("none", "as_published", "private")
WITHOUT_NOISE = (
    "The next number of local iterations follows from estimates without noise, and the variance of the models tells it."
)
CLIENT_RELATIONS = {"published": ("add_or_remove_one",), "proven": ("zero_out", "replace_one")}


class ClientRelease(NamedTuple):
    """Releases of one client: T local iterations of DP-SGD, and estimates."""

    sampler: str  # of the batches; "poisson", the only one whose batches are accounted for
    num_samples: int  # |D_i|
    batch_size: int  # B, expected, of a Poisson batch
    clip_norm: float | None  # C, L2 norm of a sample's gradient; None: not clipped
    noise_multiplier: float  # sigma, standard deviation of the noise on the batch's sum, over C
    estimate_batch_size: int = 0  # m, expected samples of one private estimate; 0: none
    estimate_noise_multiplier: float = 0.0  # z_e, of one private estimate
    estimates: str = "none"  # "none", "as_published" (without noise) or "private"


def checked(
    release: ClientRelease, num_iterations: int, num_estimates: int, bound: str, dp_delta: Any, asked: str | None
) -> tuple[ClientRelease, str]:
    """The release in plain numbers, and the relation.

    Args:
        release: of one client.
        num_iterations, num_estimates: of the whole run.
        bound: "published" or "proven".
        dp_delta: of the statement.
        asked: the relation that is asked for; None: the first that the bound is stated for.

    Raises:
        ArgumentError: what cannot be accounted for.
    """
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
    noise = {name: getattr(release, name) for name in ("noise_multiplier", "estimate_noise_multiplier")}
    check.scalar(dp_delta=dp_delta, clip_norm=release.clip_norm, **noise)
    check.non_negative(**noise)
    check.positive(clip_norm=release.clip_norm)
    check.open_unit(dp_delta=dp_delta)
    sizes = {name: getattr(release, name) for name in ("batch_size", "estimate_batch_size")}
    for name, size in sizes.items():
        if size > release.num_samples:
            found, remedy = f"got {size} of {release.num_samples}", "Pass a smaller batch."
            raise ArgumentError(name, "must be at most the client's samples", found, remedy)
    if release.estimates != "private":
        for name in ("estimate_batch_size", "estimate_noise_multiplier"):
            if getattr(release, name):
                requirement, remedy = "must be 0 but for private estimates", "Pass estimates='private'."
                raise ArgumentError(name, requirement, f"got {getattr(release, name):g}", remedy)
    if release.estimates == "none" and num_estimates:
        found, remedy = f"got {num_estimates}", "Say what estimates the release has."
        raise ArgumentError("num_estimates", "must be 0 without estimates", found, remedy)
    known = CLIENT_RELATIONS[bound]
    if asked is not None and asked not in known:
        remedy = "Choose another relation or bound."
        if asked == "add_or_remove_one":
            remedy = "|D_i| and B are public here, so that a missing sample is one whose gradient is 0: pass zero_out."
        requirement = f"must be {' or '.join(known)} for the {bound} bound of clients"
        raise ArgumentError("neighboring_relation", requirement, f"got {asked}", remedy)
    plain = {name: float(value) for name, value in noise.items()}
    clip_norm = None if release.clip_norm is None else float(release.clip_norm)
    return release._replace(clip_norm=clip_norm, **plain), known[0] if asked is None else asked


def no_epsilon(release: ClientRelease, num_iterations: int, num_estimates: int) -> str | None:
    """Why there is no epsilon, or None."""
    if num_iterations and release.clip_norm is None:
        return "Gradients are not clipped, so one sample can change a release by any amount."
    if num_iterations and release.noise_multiplier == 0:
        return "No noise is added, so the releases are not private."
    if num_estimates and release.estimates == "as_published":
        return WITHOUT_NOISE
    if num_estimates and release.estimates == "private" and release.estimate_noise_multiplier == 0:
        return "No noise is added to the estimates, so they are not private."
    return None
