"""The command `jaxfl`. `jaxfl epsilon` computes, without a run, a run's epsilon or the least noise for a budget.

Its numbers come from the accountants that runs use: a run with the same settings states the same epsilon. JAX is not
imported.

    jaxfl epsilon --sites 50 --samples 1200 --batch 64 --rounds 300 --noise-multiplier 1.1
    jaxfl epsilon --method privsgp-vr --sites 50 --samples 1200 --batch 64 --rounds 300 --target 3
    jaxfl epsilon --method privsgp --sites 9 --samples 90 --batch 9 --rounds 9 --target 1 --trust pairs --shared-ratio 2
    jaxfl epsilon --method dp-fedavg --sites 5000 --active 50 --rounds 1000 --noise-multiplier 1
    jaxfl epsilon --method gradient-tracking --sites 5 --samples 287 --batch 32 --rounds 400 --target 8
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jaxfl.core import ArgumentError, check
from jaxfl.privacy import clients, gossip, shared, tracking
from jaxfl.privacy.accountant import Account
from jaxfl.privacy.statements import RELATIONS, rounded_up, statement_text

_OPTIONS = {  # argument of the library -> option
    "batch_size": "--batch",
    "bound": "--bound",
    "clip_norm": "--clip-norm",
    "colluding": "--colluding",
    "dp_delta": "--delta",
    "estimate_batch_size": "--constants-batch",
    "estimate_noise_multiplier": "--constants-noise",
    "graph": "--graph",
    "neighboring_relation": "--relation",
    "noise_multiplier": "--noise-multiplier",
    "noise_std": "--noise-multiplier",
    "num_clients": "--sites",
    "num_entries": "--samples",
    "num_iterations": "--rounds",
    "num_local_samples": "--samples",
    "num_nodes": "--sites",
    "num_rounds": "--rounds",
    "num_samples": "--samples",
    "participation_rate": "--active",
    "sampler": "--sampler",
    "path": "--out",
    "run_dir": "RUN",
    "run_dirs": "RUN",
    "target_epsilon": "--target",
}


_ALSO = {  # names of the same options in experiments
    "--sites": ("--nodes", "--clients"),
    "--batch": ("--batch-size",),
    "--rounds": ("--iterations",),
    "--target": ("--target-epsilon",),
    "--delta": ("--dp-delta",),
    "--relation": ("--neighboring-relation",),
}


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
_TRACKING = "gradient-tracking"
# Options of some methods, and their defaults; argparse has none, so that they are refused when given with another one.
_IN_PAIRS = ("privsgp", "privsgp-vr", "dp2-sgd")
_OWN: dict[str, tuple[tuple[str, ...], Any]] = {
    "local_steps": (("fedavg", "ali-dpfl"), 1),
    "active": (("dp-fedavg",), None),
    "constants_noise": (("ali-dpfl",), 20.0),
    "constants_batch": (("ali-dpfl",), None),
    "graph": ((_TRACKING,), "five_agents"),
    "scheme": ((_TRACKING,), "S1"),
    "step_size": ((_TRACKING,), None),
    "distribution": ((_TRACKING,), "laplace"),
    "trust": (_IN_PAIRS, "everyone"),
    "key_graph": (_IN_PAIRS, "exponential"),
    "shared_ratio": (_IN_PAIRS, None),
    "colluding": (_IN_PAIRS, 1),
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
    "fedavg": _local_steps(estimates=False),
    "ali-dpfl": _local_steps(estimates=True),
    "dp-fedavg": _updates(),
    "privsgp": _gossip(gossip.PRIVSGP),
    "privsgp-vr": _gossip(gossip.PRIVSGP_VR),
    "dp2-sgd": _gossip(gossip.DP2_SGD),
    "a-dp2-sgd": _gossip(gossip.A_DP2_SGD),
    _TRACKING: _tracking(),
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jaxfl", description="Private decentralised and federated learning.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    page = "Write one HTML page, with no other files, about runs that have ended, or figures and a table for a paper."
    report = commands.add_parser("report", help=page, description=page, allow_abbrev=False)
    report.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run, as experiments leave it")
    forms = "write pictures one column wide and results.tex, a table of LaTeX, in place of the page"
    report.add_argument("--figures", choices=("pdf", "svg", "png"), help=forms)
    out = "the page, or the folder of figures (default RUN/report.html, RUN/figures; of several runs in this folder)"
    report.add_argument("--out", metavar="PATH", help=out)
    about = "Compute the epsilon of a planned run, or the least noise for a budget; published and proven bounds."
    epsilon = commands.add_parser("epsilon", help=about, description=about, allow_abbrev=False)

    def add(name: str, **settings: Any) -> None:
        epsilon.add_argument(name, *_ALSO.get(name, ()), **settings)

    add("--method", choices=METHODS, default="fedavg", help="method of the run; default fedavg: private local steps")
    add("--sites", type=int, required=True, metavar="N", help="number of clients, or of nodes of the graph")
    add("--samples", type=int, nargs="+", metavar="J", help="number of samples of each site, or one number for all")
    add("--batch", type=int, metavar="B", help="expected number of samples in a batch")
    add("--rounds", type=int, required=True, metavar="K", help="number of rounds; a round of a-dp2-sgd has N events")
    noise = epsilon.add_mutually_exclusive_group(required=True)
    multiplier = "standard deviation of the noise on a sum of clipped gradients or updates, over the clip norm"
    noise.add_argument("--noise-multiplier", type=float, metavar="Z", help=multiplier)
    budget = "epsilon for which to find the least noise"
    noise.add_argument("--target", *_ALSO["--target"], type=float, metavar="EPSILON", help=budget)
    add("--delta", type=float, default=1e-5, help="delta of every epsilon (default 1e-5)")
    add(
        "--clip-norm",
        type=float,
        default=1.0,
        metavar="C",
        help="L2 clip norm (default 1); epsilon does not depend on it",
    )
    add("--relation", choices=RELATIONS, help="neighboring relation (default: all; the first of them meets --target)")
    add("--bound", choices=("proven", "published"), default="proven", help="bound that meets --target")
    sampler = "how batches are drawn (default poisson; for gradient-tracking fixed)"
    add("--sampler", choices=("poisson", "fixed", "uniform"), help=sampler)
    add("--local-steps", type=int, metavar="TAU", help="fedavg, ali-dpfl: local steps a round (default 1)")
    add("--active", type=int, metavar="M", help="dp-fedavg: expected number of clients in a round (default all)")
    add("--constants-noise", type=float, metavar="Z", help="ali-dpfl: noise of estimates (default 20)")
    add("--constants-batch", type=int, metavar="M", help="ali-dpfl: samples in each estimate (default all)")
    add("--graph", help=f"gradient-tracking: matrices R and C, a name or .npy file (default {_OWN['graph'][1]})")
    add("--scheme", choices=tracking.SCHEMES, help="gradient-tracking: scheme of steps, mixing and noise (default S1)")
    add("--step-size", type=float, metavar="GAMMA", help="gradient-tracking: step size (default the scheme's)")
    add("--distribution", choices=("laplace", "gaussian"), help="gradient-tracking: kind of noise (default laplace)")
    methods, held = ", ".join(_IN_PAIRS), "epsilon holds against all other nodes, or sites share noise in pairs"
    add("--trust", choices=("everyone", "pairs"), help=f"{methods}: {held} (default everyone)")
    add("--key-graph", choices=shared.KEY_GRAPHS, help="pairs: which sites share noise (default exponential)")
    add("--shared-ratio", type=float, metavar="R", help="pairs: standard deviation of shared over own noise")
    add("--colluding", type=int, metavar="A", help="pairs: sites that share secrets with the observer (default 1)")
    add("--json", action="store_true", help="print JSON")
    return parser


def flags() -> dict[str, list[str]]:
    """Command -> its options, for a shell's completion."""
    commands = next(action for action in _parser()._actions if isinstance(action.choices, dict)).choices
    assert isinstance(commands, dict)
    return {name: [*one._option_string_actions] for name, one in commands.items()}


def _sizes(args: argparse.Namespace) -> list[int]:
    """Samples of every site."""
    return args.samples * args.sites if len(args.samples) == 1 else args.samples


def _check_pairs(args: argparse.Namespace) -> None:
    """Refuse options of shared noise without it, and numbers out of range."""
    in_pairs = args.trust == "pairs"
    for name in ("key_graph", "shared_ratio", "colluding"):
        if not in_pairs and getattr(args, name) is not None:
            option, remedy = f"--{name.replace('_', '-')}", "Leave it out, or pass --trust pairs."
            raise ArgumentError(option, "belongs to --trust pairs", f"got {getattr(args, name)} without it", remedy)
    if in_pairs:
        if args.shared_ratio is None:
            remedy = "Pass the ratio that the run prints, or jaxfl.privacy.best_ratio finds."
            raise ArgumentError("--shared-ratio", "must be given with --trust pairs", "got none", remedy)
        shared.check_ratio(**{"--shared-ratio": args.shared_ratio})
        shared.check_colluding(args.sites, 1 if args.colluding is None else args.colluding)


def _check(args: argparse.Namespace, method: Method) -> None:
    """Refuse values out of range, and options that the method does not have."""
    if args.method in _IN_PAIRS:
        _check_pairs(args)
    for name, (methods, default) in _OWN.items():
        value = getattr(args, name)
        if value is not None and args.method not in methods:
            option, whose = f"--{name.replace('_', '-')}", " and ".join(methods)
            raise ArgumentError(option, f"belongs to {whose}", f"got {value} for {args.method}", "Leave it out.")
        setattr(args, name, default if value is None else value)
    check.at_least(1, **{"--sites": args.sites, "--rounds": args.rounds, "--local-steps": args.local_steps})
    check.clip_norm(**{"--clip-norm": args.clip_norm})
    own = args.method == _TRACKING
    if own and args.rounds > _MOST_ROUNDS:
        requirement = f"must be at most {_MOST_ROUNDS:,} for gradient-tracking, where time grows with the square"
        raise ArgumentError("--rounds", requirement, f"got {args.rounds}", "Pass fewer.")
    sampler = "fixed" if own else "poisson"
    if own and args.sampler not in (None, sampler):
        raise ArgumentError("--sampler", "must be fixed for gradient-tracking", f"got {args.sampler}", "Leave it out.")
    args.sampler = args.sampler or sampler
    check.positive(**{"--step-size": args.step_size})
    check.open_unit(**{"--delta": args.delta})
    if args.target is not None:
        check.positive(**{"--target": args.target})
    else:
        check.in_float32(**{"--noise-multiplier": args.noise_multiplier})
    if args.active is not None:
        check.at_least(1, **{"--active": args.active})
        if args.active > args.sites:
            raise ArgumentError("--active", "must be at most --sites", f"got {args.active}", "Pass fewer.")
    for option, value in {"--samples": args.samples, "--batch": args.batch}.items():
        if method.of_clients and value is not None:
            remedy = "Leave it out: whole clients are protected."
            raise ArgumentError(option, f"does not count for {args.method}", f"got {value}", remedy)
        if not method.of_clients and value is None:
            raise ArgumentError(option, f"must be given for {args.method}", "got none", "Pass it.")
    if not method.of_clients:
        for size in args.samples:
            check.at_least(1, **{"--batch": args.batch, "--samples": size})
        if len(args.samples) not in (1, args.sites):
            found = f"got {len(args.samples)} numbers for {args.sites} sites"
            raise ArgumentError("--samples", "must be one number, or one a site", found, "Pass one of either.")


def answer(args: argparse.Namespace) -> dict[str, Any]:
    """Statements at the noise that is given, or at the least that meets the target, with the noise."""
    method = METHODS[args.method]
    _check(args, method)
    noise, rounds, unit = args.noise_multiplier, method.rounds(args), method.account(args, 1.0)
    known = dict.fromkeys(claim.relation for claim in unit.claims)
    if args.relation not in (None, *known):
        requirement = f"must be {' or '.join(known)} for {args.method}"
        raise ArgumentError("--relation", requirement, f"got {args.relation}", "Pass one.")
    if noise is None:
        noise = unit.calibrate(rounds, args.target, args.bound, args.relation)
        noise *= 1 + 1e-12  # what dividing by batch and clip norm rounds away
    stated = method.account(args, noise).statements(rounds)
    stated = [one for one in stated if args.relation in (None, one.neighboring_relation)]
    return {
        "method": args.method,
        "sites": args.sites,
        "rounds": args.rounds,
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


def text(found: dict[str, Any]) -> str:
    """The answer for people: noise, a line for each statement, and what the last one with an epsilon rests on."""
    name = METHODS[found["method"]].noise
    size, multiplier = rounded_up(found[name], 4), rounded_up(found["noise_multiplier"], 4)
    what = "standard deviation" if name == "noise_std" else "factor"
    noise = f"noise of {multiplier} times the clip norm: {what} {size} on {found['noise_on']}"
    if "own_noise_std" in found:
        own, both = (rounded_up(found[f"{part}_noise_std"], 4) for part in ("own", "shared"))
        noise += f", which is effective: {own} of a site's own and {both} with each site that it shares noise with"
    counted = f"{found['method']}: {found['sites']} sites, {found['rounds']} rounds, {noise}"
    claims = [statement_text(one) for one in found["statements"]]
    lines = [*textwrap.wrap(counted, 100), "", *claims]
    for last in [one for one in found["statements"] if one["dp_epsilon"] is not None][-1:]:
        rests = f"The {last['bound']} statement rests on this: {'; '.join(last['assumptions'])}."
        lines += ["", *textwrap.wrap(rests, 100)]
    return "\n".join(lines)


def _report(args: argparse.Namespace) -> list[Path]:
    """Write the page or the figures; without --out in the run, or of several runs in this folder, if none is there."""
    from jaxfl.analysis import figures, report  # and matplotlib

    name = "report.html" if args.figures is None else "figures"
    path = Path(args.out or Path(args.runs[0] if len(args.runs) == 1 else ".") / name)
    if not args.out and len(args.runs) > 1 and path.exists():
        raise ArgumentError("path", f"must be given where ./{name} is there", "got none", f"Pass --out {path}.")
    if args.figures is not None:
        return figures.write_figures(args.runs, path, args.figures)
    return [report.write_report(args.runs, path)]


def main(argv: Sequence[str] | None = None) -> int:
    """Answer on standard output; returns the exit code, 2 for a wrong value, which gets one sentence."""
    args = _parser().parse_args(argv)
    try:
        if args.command == "report":
            print(*_report(args), sep="\n")
            return 0
        answers = answer(args)
    except ArgumentError as error:
        name = _OPTIONS.get(error.argument, error.argument)
        print(f"error: {name}: {error.requirement}; {error.found}. {error.remedy}", file=sys.stderr)
        return 2
    print(json.dumps(answers, indent=2) if args.json else text(answers))
    return 0
