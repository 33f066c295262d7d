"""Accounts of planned runs, by method: the answer of `jaxfl epsilon`.

Numbers come from the accountants that runs use: a run with the same settings states the same epsilon. Methods have the
names of the experiments. JAX is not imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxfl.core import ArgumentError, check
from jaxfl.core.vocabulary import flag
from jaxfl.privacy import clients, gossip, shared, tracking
from jaxfl.privacy.accountant import Account
from jaxfl.privacy.gossip.compared import without_theorem


class Method(NamedTuple):
    """Accounting of one method.

    Attributes:
        account: (options, noise multiplier) -> the account of a run.
        noise_on: what the noise is added to, in words.
        rounds: options -> rounds of the account.
        divisor: options -> number that the noise is divided by.
        of_clients: whole clients are protected, and neither samples nor batches count.
        noise: key, in JSON, of the noise multiplier times the clip norm over `divisor`.
    """

    account: Callable[[argparse.Namespace, float], Account]
    noise_on: str
    rounds: Callable[[argparse.Namespace], int] = lambda options: options.rounds
    divisor: Callable[[argparse.Namespace], int] = lambda options: 1
    of_clients: bool = False
    noise: str = "noise_std"


def _pairs(options: argparse.Namespace) -> tuple[float, shared.Secrets | None]:
    """Own over effective noise, and what protects shared noise; 1 and None where each site has noise of its own."""
    if not options.shared_ratio:
        return 1.0, None
    keys = shared.key_graph(options.key_graph, options.sites)
    return shared.calibrated(keys, ratio=options.shared_ratio, colluding=options.colluding)


def _gossip(accountant: gossip.Accountant) -> Method:
    """A method over a graph, in which a site releases a noisy mean gradient in every round."""

    def account(options: argparse.Namespace, noise: float) -> Account:
        sampler, batch, norm = options.sampler, options.batch, options.clip_norm
        estimator, std = accountant.estimator or "mini_batch", noise * norm / batch
        plain = gossip.Release(estimator, sampler, batch, 0, norm, std, secrets=_pairs(options)[1])
        releases = [plain._replace(num_entries=size) for size in _sizes(options)]
        return gossip.account(accountant, releases, dp_delta=options.delta)

    return Method(account, "a site's mean gradient", divisor=lambda options: options.batch)


def _local_steps(estimates: bool) -> Method:
    """A method with a server: clients make private local steps, and with ALI-DPFL estimates of constants, too."""

    def account(options: argparse.Namespace, noise: float) -> Account:
        def release(size: int) -> clients.ClientRelease:
            plain = clients.ClientRelease(options.sampler, size, options.batch, options.clip_norm, noise)
            if not estimates:
                return plain
            batch, multiplier = options.constants_batch or size, options.constants_noise
            return plain._replace(estimates="private", estimate_batch_size=batch, estimate_noise_multiplier=multiplier)

        most = options.rounds * options.local_steps, options.rounds * estimates
        settings = {"num_estimates": most[1], "budget": most, "dp_delta": options.delta}
        return clients.account([release(size) for size in _sizes(options)], **settings)

    return Method(account, "a client's sum of gradients", lambda options: options.rounds * options.local_steps)


def _updates() -> Method:
    """DP-FedAvg: a server adds noise to the sum of clients' clipped updates."""

    def account(options: argparse.Namespace, noise: float) -> Account:
        rate = (options.sites if options.active is None else options.active) / options.sites
        release = clients.UpdateRelease(options.sampler, rate, options.clip_norm, noise)
        return clients.client_level_account(release, num_clients=options.sites, dp_delta=options.delta)

    return Method(account, "the server's sum of updates", of_clients=True)


_MOST_ROUNDS = 10_000
_NOISES = ("noise_std", "noise_gain")
_TRACKING = "DP-GT"
# Options of some methods, and their defaults; the parser has none, so that they are refused with other methods.
IN_PAIRS = ("PrivSGP", "PrivSGP-VR", "DP2-SGD", "QG-DSGDm", "ED")
OWN: dict[str, tuple[tuple[str, ...], Any]] = {
    "local_steps": (("DPFL", "ALI-DPFL", "SCAFFOLD"), 1),
    "active": (("DP-FedAvg",), None),
    "constants_noise": (("ALI-DPFL",), 20.0),
    "constants_batch": (("ALI-DPFL",), None),
    "graph": ((_TRACKING,), "five_agents"),
    "scheme": ((_TRACKING,), "S1"),
    "step_size": ((_TRACKING,), None),
    "distribution": ((_TRACKING,), "laplace"),
    "trust": (IN_PAIRS, "everyone"),
    "key_graph": (IN_PAIRS, "exponential"),
    "shared_ratio": (IN_PAIRS, None),
    "colluding": (IN_PAIRS, 1),
}


def _tracking() -> Method:
    """Gradient tracking: agents broadcast noisy states and trackers, with the numbers of a scheme of the paper."""

    def account(options: argparse.Namespace, noise: float) -> Account:
        from jaxfl.graphs.files import tracking_pair  # takes scipy.sparse

        schedule = tracking.paper_schedule(options.scheme, options.rounds, options.sites)
        pair = tracking_pair(options.graph, options.sites)
        schedule = schedule._replace(
            num_samples=options.batch,
            step_size=schedule.step_size if options.step_size is None else options.step_size,
            state_noise_scale=noise * options.clip_norm * schedule.state_noise_scale,
            tracker_noise_scale=noise * options.clip_norm * schedule.tracker_noise_scale,
        )
        return tracking.gradient_tracking_account(
            schedule,
            tracking.TrackingRelease(clip_norm=options.clip_norm, distribution=options.distribution),
            num_local_samples=_sizes(options),
            dp_delta=options.delta,
            state_in_weights=pair.state_weights.sum(axis=1),
            tracker_out_weights=pair.tracker_weights.sum(axis=0),
        )

    return Method(account, "the scheme's noise scales (--noise-gain of the experiment)", noise="noise_gain")


METHODS = {
    "DPFL": _local_steps(estimates=False),
    "ALI-DPFL": _local_steps(estimates=True),
    "SCAFFOLD": _local_steps(estimates=False),
    "DP-FedAvg": _updates(),
    "PrivSGP": _gossip(gossip.PRIVSGP),
    "PrivSGP-VR": _gossip(gossip.PRIVSGP_VR),
    "DP2-SGD": _gossip(gossip.DP2_SGD),
    "A(DP)2SGD": _gossip(gossip.A_DP2_SGD),
    "QG-DSGDm": _gossip(without_theorem("QG-DSGDm")),
    "ED": _gossip(without_theorem("exact diffusion")),
    _TRACKING: _tracking(),
}


def _sizes(args: argparse.Namespace) -> list[int]:
    """Samples of every site."""
    return args.samples * args.sites if len(args.samples) == 1 else args.samples


def _check_pairs(args: argparse.Namespace) -> None:
    """Refuse options of shared noise without it, and numbers out of range."""
    in_pairs = args.trust == "pairs"
    for name in ("key_graph", "shared_ratio", "colluding"):
        if not in_pairs and getattr(args, name) is not None:
            found, remedy = f"got {getattr(args, name)} without it", "Leave it out, or pass --trust pairs."
            raise ArgumentError(flag(name), "belongs to --trust pairs", found, remedy)
    if in_pairs:
        if args.shared_ratio is None:
            remedy = "Pass the ratio that the run prints, or jaxfl.privacy.best_ratio finds."
            raise ArgumentError("--shared-ratio", "must be given with --trust pairs", "got none", remedy)
        shared.check_ratio(**{"--shared-ratio": args.shared_ratio})
        shared.check_colluding(args.sites, 1 if args.colluding is None else args.colluding)


def _check(args: argparse.Namespace, method: Method) -> None:
    """Refuse values out of range, and options that the method does not have."""
    needed = ("sites", "rounds") if method.of_clients else ("sites", "samples", "batch", "rounds")
    if missing := [flag(name) for name in needed if getattr(args, name) is None]:
        found = f"got none for {args.method}"
        raise ArgumentError(", ".join(missing), "must be given", found, "jaxfl epsilon --help says what they are.")
    if args.method in IN_PAIRS:
        _check_pairs(args)
    for name, (methods, default) in OWN.items():
        value = getattr(args, name)
        if value is not None and args.method not in methods:
            found, whose = f"got {value} for {args.method}", " and ".join(methods)
            raise ArgumentError(flag(name), f"belongs to {whose}", found, "Leave it out.")
        setattr(args, name, default if value is None else value)
    check.at_least(1, **{"--sites": args.sites, "--rounds": args.rounds, "--local-steps": args.local_steps})
    if args.clip_norm is None and getattr(args, method.noise) is not None:
        remedy = "Pass that of the run, which its config.json has, or pass --noise-multiplier."
        raise ArgumentError("--clip-norm", f"must be given with {flag(method.noise)}", "got none", remedy)
    args.clip_norm = 1.0 if args.clip_norm is None else args.clip_norm
    check.clip_norm(**{"--clip-norm": args.clip_norm})
    own = args.method == _TRACKING
    if own and args.rounds > _MOST_ROUNDS:
        requirement = f"must be at most {_MOST_ROUNDS:,} for {_TRACKING}, where time grows with the square"
        raise ArgumentError("--rounds", requirement, f"got {args.rounds}", "Pass fewer.")
    sampler = "fixed" if own else "poisson"
    if own and args.sampler not in (None, sampler):
        raise ArgumentError("--sampler", f"must be fixed for {_TRACKING}", f"got {args.sampler}", "Leave it out.")
    args.sampler = args.sampler or sampler
    check.positive(**{"--step-size": args.step_size})
    check.open_unit(**{"--delta": args.delta})
    if args.active is not None:
        check.at_least(1, **{"--active": args.active})
        if args.active > args.sites:
            raise ArgumentError("--active", "must be at most --sites", f"got {args.active}", "Pass fewer.")
    if method.of_clients:
        for name in ("samples", "batch"):
            if getattr(args, name) is not None:
                found, remedy = f"got {getattr(args, name)}", "Leave it out: whole clients are protected."
                raise ArgumentError(flag(name), f"does not count for {args.method}", found, remedy)
    else:
        for size in args.samples:
            check.at_least(1, **{"--batch": args.batch, "--samples": size})
        if len(args.samples) not in (1, args.sites):
            found = f"got {len(args.samples)} numbers for {args.sites} sites"
            raise ArgumentError("--samples", "must be one number, or one a site", found, "Pass one of either.")


def _noise_multiplier(args: argparse.Namespace, method: Method) -> float | None:
    """The noise multiplier that is given, or follows from the noise itself; None where an epsilon asks for it."""
    given = [name for name in ("noise_multiplier", *_NOISES, "epsilon") if getattr(args, name) is not None]
    if not given:
        remedy = "Pass the run's noise, or an epsilon for which to find the least noise."
        raise ArgumentError("--noise-multiplier", "or --epsilon must be given", "got neither", remedy)
    (name,), (value,) = given, [getattr(args, name) for name in given]
    if name == "epsilon":
        check.positive(**{"--epsilon": value})
        return None
    if name in _NOISES and name != method.noise:
        found, remedy = f"got {flag(name)} {value}", f"Pass {flag(method.noise)} or --noise-multiplier."
        raise ArgumentError(flag(name), f"must be the noise that {args.method} has", found, remedy)
    check.non_negative(**{flag(name): value})
    check.in_float32(**{flag(name): value})
    return value if name == "noise_multiplier" else value * method.divisor(args) / args.clip_norm


def answer(args: argparse.Namespace) -> dict[str, Any]:
    """Statements at the noise that is given, or at the least that meets the target, with the noise."""
    method = METHODS[args.method]
    _check(args, method)
    noise, rounds, unit = _noise_multiplier(args, method), method.rounds(args), method.account(args, 1.0)
    known = dict.fromkeys(claim.relation for claim in unit.claims)
    if args.relation not in (None, *known):
        requirement = f"must be {' or '.join(known)} for {args.method}"
        raise ArgumentError("--relation", requirement, f"got {args.relation}", "Pass one.")
    if noise is None:
        noise = unit.calibrate(rounds, args.epsilon, args.bound, args.relation)
        noise *= 1 + 1e-12  # what dividing by batch and clip norm rounds away
    stated = method.account(args, noise).statements(rounds)
    stated = [one for one in stated if args.relation in (None, one.neighboring_relation)]
    return {
        "method": args.method,
        "sites": args.sites,
        "rounds": args.rounds,
        "clip_norm": args.clip_norm,
        "noise_multiplier": noise,
        method.noise: (size := noise * args.clip_norm / method.divisor(args)),
        **({} if args.trust == "everyone" else _parts(args, size)),
        "noise_on": method.noise_on,
        "statements": [one._asdict() for one in stated],
    }


def _parts(args: argparse.Namespace, noise_std: float) -> dict[str, float]:
    """Own and shared standard deviation of an effective one."""
    own = _pairs(args)[0] * noise_std
    return {"own_noise_std": own, "shared_noise_std": args.shared_ratio * own}
