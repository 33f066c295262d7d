"""Does a run keep the epsilon that it claims? An attack on canaries in one training run bounds epsilon from below.

    python -m experiments.audit                        # digits, 5 nodes: both methods keep what they claim
    python -m experiments.audit --noise-error 4        # a quarter of the noise that is claimed: caught
    python -m experiments.audit --no-clipping          # gradients that are not clipped: caught

A quarter of a minute on two cores. Calibrates each method's noise to `target_epsilon` by the proven bound, runs it on
real samples and canaries, guesses from its messages which canaries took part, prints one table, and leaves summary.json
and a picture in the run directory. Exit code 0 when no lower bound exceeds the claim, 1 when one does.

Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023, arXiv:2305.08846. Differences from
the paper: canaries are gradients of one coordinate each, on few real samples and in few rounds at a high sampling rate,
where what is proven is nearly what an attack can see.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from experiments.command_line import new_run_directory, run_command_line
from jaxfl import gradients, graphs, models, privacy
from jaxfl.algorithms import REGISTRY
from jaxfl.core import Algorithm, ArgumentError, FederatedData, Task, check
from jaxfl.data import Dataset, federate, load
from jaxfl.data.partition import iid
from jaxfl.privacy.accounting import Release, Statement, calibrate_noise_std, statements
from jaxfl.privacy.audit import AuditResult, Canaries, audit, require_jax_privacy, with_canaries
from jaxfl.privacy.proven import RELATIONS
from jaxfl.privacy.statements import rounded_down, rounded_up
from jaxfl.training import open_run

Method = Literal["PrivSGP", "PrivSGP-VR", "DP2-SGD", "A(DP)2SGD"]
ROWS = {"PrivSGP": "push_sum", "PrivSGP-VR": "push_sum", "DP2-SGD": "dp2_sgd", "A(DP)2SGD": "a_dp2_sgd"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Options."""

    dataset: str = "digits"
    """digits, mnist, fashion_mnist or cifar10."""
    data_dir: str | None = None
    """Folder with the data set's files as their authors publish them."""
    methods: tuple[Method, ...] = ("PrivSGP", "PrivSGP-VR")
    """What is audited. Of A(DP)2SGD only the sum over nodes is seen, which hides all but gross mistakes."""
    nodes: int = 5
    """Nodes n, an odd number: the messages of an even ring hide one combination of gradients."""
    samples: int = 200
    """Real samples of each node."""
    canaries: int = 5000
    """Canaries in all, as many at each node."""
    hidden: tuple[int, ...] = ()
    """Units of the hidden layers of the multilayer perceptron; none for a linear model."""
    iterations: int = 16
    """Iterations K."""
    sampling_rate: float = 0.9
    """Probability of a sample to be in a batch, below 1."""
    step_size: float = 0.1
    """Step size gamma."""
    clip_norm: float = 1.0
    """Bound on each sample's gradient in the L2 norm."""
    canary_strength: float = 4.0
    """Norm of a canary's gradient before clipping, in multiples of clip_norm; at least 1."""
    target_epsilon: float = 1.0
    """The claim: the noise is calibrated to it."""
    dp_delta: float = 1e-5
    """Delta of the claim."""
    significance: float = 0.05
    """Probability, at most, that any lower bound exceeds the true epsilon: each method gets an equal share."""
    noise_error: float = 1.0
    """Run with the claimed noise divided by this: a mistake for the audit to find."""
    no_clipping: bool = False
    """Run without the clipping that is claimed: another such mistake."""
    seed: int = 0
    """Of everything that is random."""
    out: str | None = None
    """The run directory itself; default runs/audit/NAME."""


class Audited(NamedTuple):
    """One method's claim and what the audit says of it."""

    method: Method
    claim: Statement
    noise_std: float  # that is claimed
    found: AuditResult
    seconds: float

    @property
    def violated(self) -> bool:
        """Whether the audit's lower bound exceeds the claimed epsilon."""
        assert self.claim.dp_epsilon is not None
        return self.found.dp_epsilon_lower_bound > self.claim.dp_epsilon

    @property
    def claimed(self) -> str:
        """The claimed epsilon for a table, rounded up."""
        assert self.claim.dp_epsilon is not None
        return rounded_up(self.claim.dp_epsilon, 3)


def refuse_impossible(config: Config, dataset: Dataset) -> None:
    """Say what is wrong with an option before any work."""
    for name in ("samples", "canaries", "iterations"):
        check.at_least(1, **{name: getattr(config, name)})
    for name in ("step_size", "clip_norm", "target_epsilon", "noise_error"):
        check.positive(**{name: getattr(config, name)})
    if config.nodes < 3 or config.nodes % 2 == 0:
        raise ArgumentError("nodes", "must be odd and at least 3", f"got {config.nodes}", "Pass e.g. 5.")
    if config.canaries % config.nodes:
        requirement = f"must be a multiple of the {config.nodes} nodes, so that all have the same claim"
        raise ArgumentError("canaries", requirement, f"got {config.canaries}", "Pass e.g. 1000 for each node.")
    available = len(dataset.train_labels)
    if config.nodes * config.samples > available:
        found = f"{config.nodes} nodes with {config.samples} need {config.nodes * config.samples:,} of {available:,}"
        raise ArgumentError("samples", "must be there in the data set", found, "Pass fewer.")
    for name in ("sampling_rate", "dp_delta", "significance"):
        check.open_unit(**{name: getattr(config, name)})
    if not config.canary_strength >= 1:
        remedy = "Pass 1 or more: a weaker canary does not reach what is claimed."
        raise ArgumentError("canary_strength", "must be at least 1", f"got {config.canary_strength}", remedy)
    if not config.methods or len(set(config.methods)) != len(config.methods):
        raise ArgumentError("methods", "must be distinct and at least one", f"got {config.methods}", "List each once.")
    if not 0 <= config.seed < 2**32:
        raise ArgumentError("seed", "must lie in [0, 2^32)", f"got {config.seed}", "Pass e.g. 0.")
    require_jax_privacy()


def batch_size_of(config: Config) -> int:
    """b, the nearest to the sampling rate that leaves a chance to be left out."""
    size = config.samples + config.canaries // config.nodes
    return min(max(1, round(config.sampling_rate * size)), size - 1)


def claim_of(config: Config, method: Method) -> tuple[float, Statement]:
    """(noise standard deviation, statement) of what is claimed for every node.

    The claim is for zero_out, or add_or_remove_one with J and b fixed, which is the same: a missing sample is one whose
    gradient is 0.
    """
    release = Release(
        estimator="saga" if method == "PrivSGP-VR" else "mini_batch",
        sampler="poisson",
        batch_size=batch_size_of(config),
        num_entries=config.samples + config.canaries // config.nodes,
        clip_norm=config.clip_norm,
        noise_std=0.0,
    )
    noise_std = calibrate_noise_std(
        method,
        "proven",
        release,
        config.iterations,
        target_epsilon=config.target_epsilon,
        dp_delta=config.dp_delta,
        num_nodes=config.nodes,
    )
    claimed = [release._replace(noise_std=noise_std)] * config.nodes
    stated = statements(method, claimed, config.iterations, dp_delta=config.dp_delta)
    (claim,) = (s for s in stated if s.bound == "proven" and s.neighboring_relation != "replace_one")
    return noise_std, claim


def make_data(config: Config, dataset: Dataset) -> FederatedData:
    """The nodes' real samples, dealt at random, as many at each."""
    parts = iid(len(dataset.train_labels), config.nodes, config.seed, sizes=[config.samples] * config.nodes)
    return federate(dataset.train_inputs, dataset.train_labels, parts)


def make_algorithm(config: Config, method: Method, task: Task, noise_std: float) -> tuple[Algorithm, Any]:
    """What is really run, with the mistakes that were asked for, and (before, after) -> what its messages tell."""
    row = REGISTRY[ROWS[method]]
    assert row.released is not None, "an audit needs to know what messages tell"
    graph = (graphs.directed_ring if row.mixing == "column" else graphs.ring)(config.nodes)
    sampler = gradients.poisson(batch_size_of(config), num_draws=config.nodes * config.iterations)
    estimator = gradients.saga if method == "PrivSGP-VR" else gradients.mini_batch
    learner = row.constructor(
        task,
        graph=graph,
        step_size=config.step_size,
        gradient=estimator(sampler=sampler, clip_norm=None if config.no_clipping else config.clip_norm),
        noise=privacy.gaussian(noise_std / config.noise_error),
    )
    return learner, functools.partial(row.released, graph, config.step_size)


def audit_method(config: Config, method: Method, dataset: Dataset, data: FederatedData) -> tuple[Audited, Canaries]:
    """Claim, run, attack."""
    start = time.perf_counter()
    widths = (int(dataset.train_inputs[0].size), *config.hidden, dataset.num_classes)
    task, data, canaries = with_canaries(
        models.classification(models.mlp(widths)),
        data,
        config.canaries,
        strength=config.canary_strength * config.clip_norm,
        seed=config.seed,
        shared_coordinates=REGISTRY[ROWS[method]].synchronous,
    )
    noise_std, claim = claim_of(config, method)
    learner, released = make_algorithm(config, method, task, noise_std)
    key = jax.random.key(config.seed)
    share = config.significance / len(config.methods)  # so that any violation at all is as unlikely as was asked for
    found = audit(learner, released, data, canaries, key, config.iterations, config.dp_delta, significance=share)
    return Audited(method, claim, noise_std, found, time.perf_counter() - start), canaries


def summary_of(config: Config, preset: str | None, audited: Sequence[Audited], environment: Any) -> dict[str, Any]:
    """Content of summary.json."""
    return {
        "experiment": "audit",
        "preset": preset,
        "status": "finished",
        "seeds": [config.seed],
        "variants": {
            one.method: {
                "rounds": config.iterations,
                "privacy": [one.claim._asdict()],
                "noise_std_claimed": one.noise_std,
                "noise_std_used": one.noise_std / config.noise_error,
                "clip_norm_used": None if config.no_clipping else config.clip_norm,
                "audit": {
                    **{name: value for name, value in one.found._asdict().items() if name != "scores"},
                    "num_canaries": config.canaries,
                    "violated": one.violated,
                },
            }
            for one in audited
        },
        "seconds": {one.method: one.seconds for one in audited},
        "environment": environment,
    }


def table_of(config: Config, audited: Sequence[Audited]) -> Table:
    """The closing table."""
    table = Table(
        title="audit",
        caption=f"δ = {config.dp_delta:g}; all lower bounds hold with confidence {1 - config.significance:.0%}",
    )
    numbers = ("audit:\nε ≥", "right\nguesses")
    for heading in ("method", "claim", *numbers, "verdict"):
        table.add_column(heading, justify="right" if heading in numbers else "left")
    for one in audited:
        table.add_row(
            one.method,
            f"ε = {one.claimed}, {one.claim.bound},\n{RELATIONS[one.claim.neighboring_relation]}",
            rounded_down(one.found.dp_epsilon_lower_bound, 3),
            f"{one.found.num_correct} of {one.found.num_guesses}",
            verdict(one),
        )
    return table


def verdict(one: Audited) -> str:
    """In two words."""
    return "VIOLATED" if one.violated else "not refuted"


def plot(audited: Sequence[Audited], canaries: Sequence[Canaries], path: Path) -> Path:
    """Histograms of the scores of included and left-out canaries, a row a method."""
    figure = Figure(figsize=(7, 0.6 + 2.4 * len(audited)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = np.ravel(figure.subplots(len(audited), 1, squeeze=False))
    for axes, one, where in zip(rows, audited, canaries, strict=True):
        bins = np.histogram_bin_edges(one.found.scores, 60).tolist()
        for chosen, name, color in ((~where.included, "left out", "#0072B2"), (where.included, "included", "#D55E00")):
            axes.hist(one.found.scores[chosen], bins, alpha=0.55, color=color, label=f"{name} ({chosen.sum():,})")
        axes.set_title(
            f"{one.method}: claimed ε = {one.claimed}, "
            f"audit ε ≥ {rounded_down(one.found.dp_epsilon_lower_bound, 3)}, {verdict(one)}",
            fontsize=10,
            loc="left",
        )
        median = np.median(one.found.scores)
        for edge in (median - one.found.guess_threshold, median + one.found.guess_threshold):
            axes.axvline(edge, color="0.3", linewidth=1, linestyle="--")
        axes.set_ylabel("canaries")
        axes.spines[["top", "right"]].set_visible(False)
    rows[0].legend(loc="upper right", frameon=False, fontsize=9)
    rows[-1].set_xlabel(
        "released in the canary's coordinate, summed over rounds\n(only what lies outside the dashed lines is guessed)"
    )
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def run(config: Config, preset: str | None = None) -> dict[str, Any]:
    """Run the experiment; returns the content of summary.json."""
    dataset = load(config.dataset, config.data_dir)
    refuse_impossible(config, dataset)
    data = make_data(config, dataset)
    directory = new_run_directory(config.out, "audit", config.dataset, resume=False)
    saved = {k: v for k, v in dataclasses.asdict(config).items() if k not in ("data_dir", "out")}
    run_directory = open_run(directory, saved, experiment="audit", preset=preset)
    console = Console()
    console.print(
        f"{dataset.name}: {config.samples} samples and {config.canaries // config.nodes} canaries at each of "
        f"{config.nodes} nodes, {config.iterations} iterations, Poisson batches of {batch_size_of(config)}"
    )
    mistakes = [f"noise divided by {config.noise_error:g}"] if config.noise_error != 1 else []
    mistakes += ["no clipping"] if config.no_clipping else []
    if mistakes:
        console.print(f"Run with a mistake that the claim does not know of: {', '.join(mistakes)}.")
    pairs = [audit_method(config, method, dataset, data) for method in config.methods]
    audited = [one for one, _ in pairs]
    summary = summary_of(config, preset, audited, run_directory.config["environment"])
    run_directory.write_summary(summary)
    console.print(table_of(config, audited))
    console.print("A claim that is not refuted is not proven by that: the attack sees large mistakes only.")
    picture = plot(audited, [canaries for _, canaries in pairs], directory / "plots" / "scores.png")
    console.print(f"Run: {directory}   Picture: {picture}", soft_wrap=True)
    return summary


ALIASES = {"batch_size": "sampling_rate", "num_canaries": "canaries", "noise_std": "noise_error"}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 1 for a violation."""
    violated = []

    def run_and_judge(config: Config, preset: str | None) -> None:
        rows = run(config, preset)["variants"].values()
        violated.extend(row["audit"]["violated"] for row in rows)

    code = run_command_line(
        run_and_judge,
        Config,
        {},
        prog="python -m experiments.audit",
        description=(__doc__ or "").split("\n")[0],
        argv=argv,
        aliases=ALIASES,
    )
    return code or int(any(violated))


if __name__ == "__main__":
    sys.exit(main())
