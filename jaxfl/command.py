"""The command `jaxfl`. `jaxfl epsilon` computes, without a run, a run's epsilon or the least noise for a budget.

Its numbers come from the accountants that runs use (`jaxfl.planned_runs`). JAX is not imported.

    jaxfl epsilon --sites 50 --samples 1200 --batch 64 --rounds 300 --noise-multiplier 1.1
    jaxfl epsilon --method PrivSGP-VR --sites 50 --samples 1200 --batch 64 --rounds 300 --epsilon 3
    jaxfl epsilon --method PrivSGP --sites 9 --samples 90 --batch 9 --rounds 9 --target 1 --trust pairs --shared-ratio 2
    jaxfl epsilon --method DP-FedAvg --sites 5000 --active 50 --rounds 1000 --noise-multiplier 1
    jaxfl epsilon --method DP-GT --sites 5 --samples 287 --batch 32 --rounds 400 --epsilon 8
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxfl.core import ArgumentError
from jaxfl.core.parser import OneOf, Parser
from jaxfl.core.vocabulary import names, typed
from jaxfl.planned_runs import IN_PAIRS, METHODS, OWN, answer
from jaxfl.privacy import shared, tracking
from jaxfl.privacy.statements import RELATIONS, neighbors, noise_text, statement_text

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
    "target_epsilon": "--epsilon",
}
_METHOD = OneOf(
    METHODS,
    "Runs of other methods state their epsilon themselves (docs/epsilon.md).",
    {"fedavg": "DPFL", "dpsgd": "DPFL"},
)
_REPORT = "Write one HTML page, with no other files, about runs that have ended, or figures and a table for a paper."
_EPSILON = "Compute the epsilon of a planned run, or the least noise for a budget; published and proven bounds."


def _report_parser() -> Parser:
    parser = Parser("report", _REPORT)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run, as experiments leave it")
    forms = "write pictures one column wide and results.tex, a table of LaTeX, in place of the page"
    parser.add_argument("--figures", choices=("pdf", "svg", "png"), help=forms)
    out = "the page, or the folder of figures (default RUN/report.html, RUN/figures; of several runs in this folder)"
    parser.add_argument("--out", metavar="PATH", help=out)
    return parser


def _epsilon_parser() -> Parser:
    parser = Parser("epsilon", _EPSILON)

    def add(name: str, **settings: Any) -> None:
        parser.add_argument(*names(name), **settings)

    def choice(name: str, known: Sequence[str], text: str) -> None:
        add(name, type=OneOf(known), help=f"{text}: {', '.join(known)}")

    listed = "private local steps, DPFL, by default; or " + ", ".join(name for name in METHODS if name != "DPFL")
    add("--method", type=_METHOD, default="DPFL", help=f"method of the run: {listed}")
    add("--sites", type=int, metavar="N", help="number of clients, or of nodes of the graph")
    add("--samples", type=int, nargs="+", metavar="J", help="number of samples of each site, or one number for all")
    add("--batch", type=int, metavar="B", help="expected number of samples in a batch")
    add("--rounds", type=int, metavar="K", help="number of rounds; a round of A(DP)2SGD has N events")
    noise = parser.add_mutually_exclusive_group()
    of_noise = {
        "--noise-multiplier": "standard deviation of the noise on a sum of gradients or updates, over the clip norm",
        "--noise-std": "in its place the noise itself: on a mean gradient over a graph, on a sum with a server",
        "--noise-gain": "DP-GT: in its place the factor on all noise scales",
    }
    for name, text in of_noise.items():
        noise.add_argument(name, type=float, metavar="Z", help=text)
    target = "epsilon for which to find the least noise"
    noise.add_argument(*names("--epsilon"), type=float, metavar="EPSILON", help=target)
    add("--delta", type=float, default=1e-5, help="delta of every epsilon (default 1e-5)")
    norm = "clip norm; --noise-std and --noise-gain need it (default 1: with a multiplier it does not change epsilon)"
    add("--clip-norm", type=float, metavar="C", help=norm)
    choice("--relation", [*RELATIONS], "neighboring relation (default all; the first of them meets --epsilon)")
    bound = "bound that meets --epsilon: proven (default) or published"
    add("--bound", type=OneOf(("proven", "published")), default="proven", help=bound)
    choice("--sampler", ("poisson", "fixed", "uniform"), "how batches are drawn (default poisson; for DP-GT fixed)")
    add("--local-steps", type=int, metavar="TAU", help="DPFL, ALI-DPFL: local steps a round (default 1)")
    add("--active", type=int, metavar="M", help="DP-FedAvg: expected number of clients in a round (default all)")
    add("--constants-noise", type=float, metavar="Z", help="ALI-DPFL: noise of estimates (default 20)")
    add("--constants-batch", type=int, metavar="M", help="ALI-DPFL: samples in each estimate (default all)")
    add("--graph", help=f"DP-GT: matrices R and C, a name or .npy file (default {OWN['graph'][1]})")
    choice("--scheme", [*tracking.SCHEMES], "DP-GT: scheme of steps, mixing and noise (default S1)")
    add("--step-size", type=float, metavar="GAMMA", help="DP-GT: step size (default the scheme's)")
    choice("--distribution", ("laplace", "gaussian"), "DP-GT: kind of noise (default laplace)")
    held = "epsilon holds against all other nodes, or sites share noise in pairs (default everyone)"
    choice("--trust", ("everyone", "pairs"), f"{', '.join(IN_PAIRS)}: {held}")
    choice("--key-graph", [*shared.KEY_GRAPHS], "pairs: which sites share noise (default exponential)")
    add("--shared-ratio", type=float, metavar="R", help="pairs: standard deviation of shared over own noise")
    add("--colluding", type=int, metavar="A", help="pairs: sites that share secrets with the observer (default 1)")
    add("--json", action="store_true", help="print JSON")
    return parser


_PARSERS: dict[str, Callable[[], Parser]] = {"epsilon": _epsilon_parser, "report": _report_parser}


def flags() -> dict[str, dict[str, list[str]]]:
    """Command -> its options, each with the words that it chooses from, for a shell's completion."""
    return {name: make().flags() for name, make in _PARSERS.items()}


def text(found: dict[str, Any]) -> str:
    """The answer for people: noise, a line for each statement, and what the last one with an epsilon rests on."""
    name = METHODS[found["method"]].noise
    size, multiplier = noise_text(found[name]), noise_text(found["noise_multiplier"])
    what = "standard deviation" if name == "noise_std" else "factor"
    noise = f"noise multiplier {multiplier} at clip norm {found['clip_norm']:g}: {what} {size} on {found['noise_on']}"
    if "own_noise_std" in found:
        own, both = (noise_text(found[f"{part}_noise_std"]) for part in ("own", "shared"))
        noise += f", which is effective: {own} of a site's own and {both} with each site that it shares noise with"
    counted = f"{found['method']}: {found['sites']} sites, {found['rounds']} rounds, {noise}"
    claims = [statement_text(one) for one in found["statements"]]
    lines = [*textwrap.wrap(counted, 100), "", *claims]
    lines += [line for text in neighbors(found["statements"]) for line in ["", *textwrap.wrap(f"{text}.", 100)]]
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


def main(argv: Sequence[str]) -> int:
    """Answer on standard output; returns the exit code, 2 for a wrong value, which gets one sentence.

    Args:
        argv: a command, epsilon or report, and its words.
    """
    command, *words = argv
    args = _PARSERS[command]().parse_args(words)
    try:
        if command == "report":
            print(*_report(args), sep="\n")
            return 0
        answers = answer(args)
    except ArgumentError as error:
        name = typed(_OPTIONS.get(error.argument, error.argument), words)
        print(f"error: {name}: {error.requirement}; {error.found}. {error.remedy}", file=sys.stderr)
        return 2
    print(json.dumps(answers, indent=2) if args.json else text(answers))
    if not args.json and sys.stdout.isatty() and text(answers).count("\n") >= shutil.get_terminal_size().lines:
        print("", *map(statement_text, answers["statements"]), sep="\n")  # the answer is out of sight
    return 0
