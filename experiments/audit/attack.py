"""Claim, run, attack, tell."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxfl.analysis.plots import new_figure, save_figure
from jaxfl.core.tree import num_bytes
from jaxfl.data.columns import short_name
from jaxfl.frame import Request, Row, override
from jaxfl.frame.options import text_of
from jaxfl.frame.run import new_run_directory, saved_options
from jaxfl.gradients.memory import require_fits
from jaxfl.privacy.audit import AuditResult, Canaries, audit, require_jax_privacy
from jaxfl.privacy.audit_mechanism import POWER, Check
from jaxfl.privacy.statements import RELATIONS, Statement, rounded_down, rounded_up
from jaxfl.training import RunDirectory, open_run
from jaxfl.training.chunks import check_start
from jaxfl.training.summary import write_results

from .methods import METHODS, claimed
from .options import SINGLE, Configuration, check_config


class Audited(NamedTuple):
    """A claim and the result of its audit."""

    row: Row  # its configuration with the seed
    claim: Statement
    noise_std: float  # claimed
    result: AuditResult
    canaries: Canaries
    seconds: float

    @property
    def violated(self) -> bool:
        """True where the audit's lower bound exceeds the claimed epsilon, or a check of the mechanism refuses it."""
        assert self.claim.dp_epsilon is not None
        exceeded = self.result.dp_epsilon_lower_bound > self.claim.dp_epsilon
        return exceeded or any(check.refuted for check in self.result.checks)

    @property
    def texts(self) -> tuple[str, str, str]:
        """The claimed epsilon, rounded up, the lower bound, rounded down, and the verdict."""
        assert self.claim.dp_epsilon is not None
        bound = rounded_down(self.result.dp_epsilon_lower_bound, 3)
        return rounded_up(self.claim.dp_epsilon, 3), bound, "VIOLATED" if self.violated else "not refuted"


class Ready(NamedTuple):
    """A claim that is about to be audited."""

    row: Row  # its configuration with the seed
    claim: Statement
    noise_std: float  # claimed
    seconds: float  # spent on the claim


def run(request: Request) -> int:
    """Audit all cases and seeds; returns the exit code: 1 for a violation."""
    for row in request.rows.values():
        check_config(row.config)
    require_jax_privacy()
    where: Configuration = request.config
    lanes = {}
    for name, row in request.rows.items():
        for seed in row.seeds:
            label = name if len(row.seeds) == 1 else f"{name}, seed {seed}"
            lanes[label] = ready(row._replace(config=override(row.config, {"seed": seed})))
    directory = new_run_directory(where.run.out, "audit", short_name(where.data.dataset), resume=False)
    records = open_run(directory, saved_options(request), experiment="audit", can_resume=False)
    try:
        return _attack(request, lanes, records)
    except BaseException:
        records.withdraw()
        raise


def _attack(request: Request, lanes: Mapping[str, Ready], records: RunDirectory) -> int:
    """Run the audits, write and print their results; returns the exit code."""
    directory, console = records.path, Console(markup=False)
    for description in dict.fromkeys(row.config.description for row in request.rows.values()):
        console.print(description)
    claims = [row.config.claim for row in request.rows.values()]
    errors = dict.fromkeys(claim.noise_error for claim in claims if claim.noise_error != 1)
    mistakes = [f"noise divided by {' or '.join(map(text_of, errors))}"] if errors else []
    mistakes += ["no clipping"] if any(claim.no_clipping for claim in claims) else []
    mistakes += ["more rounds"] if any(claim.rounds_error != 1 for claim in claims) else []
    mistakes += ["a larger sampling rate"] if any(claim.sampling_error != 1 for claim in claims) else []
    if mistakes:
        console.print(f"Run with a mistake that the claim does not include: {', '.join(mistakes)}.")
    audits = {name: measured(lane, len(lanes)) for name, lane in lanes.items()}
    records.write_summary(_summary(audits, records.config["environment"]))
    _write_results(audits, directory / "results.csv")
    console.print(_table(audits))
    console.print(_checks_table(audits))
    console.print(
        "A claim that is not refuted is not proven by that. Smallest error seen: the factor, on too small noise or too "
        f"large a signal, that a check finds with probability {POWER:.0%}."
    )
    picture = _plot(audits, directory / "plots" / "scores.png")
    console.print(f"Run: {directory}   Table: {directory / 'results.csv'}   Picture: {picture}", soft_wrap=True)
    return int(any(row.violated for row in audits.values()))


def ready(row: Row) -> Ready:
    """The claim of one audit, without running it; an audit that cannot run is refused."""
    start, config = time.perf_counter(), row.config
    method = METHODS[config.learning.method]
    task, data, _ = method.add_canaries(config, *config.problem())
    noise_std, statement = claimed(config, task, data)
    learner = method.learner(config, task, config.used, config.used_noise_std(noise_std))
    start_state = check_start(learner.algorithm, jax.random.key(config.run.seed), data)
    noise = learner.num_rounds * num_bytes(jax.eval_shape(learner.released, start_state, start_state))
    # The noise of every message is kept, in float64, and transformed.
    needed, remedy = num_bytes(start_state) + 12 * noise, "Take a smaller model, fewer canaries, or fewer iterations."
    require_fits("hidden", needed, {}, remedy=remedy)
    return Ready(row, statement, noise_std, time.perf_counter() - start)


def measured(lane: Ready, num_audits: int) -> Audited:
    """Run and attack; all audits share the significance, so that a false alarm in any is as unlikely as requested."""
    start, (row, statement, noise_std, _) = time.perf_counter() - lane.seconds, lane
    config = row.config
    assert statement.dp_epsilon is not None
    method = METHODS[config.learning.method]
    task, data, canaries = method.add_canaries(config, *config.problem())
    learner, silent = (
        method.learner(config, task, config.used, std) for std in (config.used_noise_std(noise_std), 0.0)
    )
    key = jax.random.key(config.run.seed)
    result = audit(
        learner.algorithm,
        silent.algorithm,
        learner.released,
        data,
        canaries,
        key,
        learner.num_rounds,
        config.claim.dp_delta,
        dp_epsilon=statement.dp_epsilon,
        claimed=config.mechanism(noise_std, stored=method.stored, releases_total=method.releases_total),
        significance=config.claim.significance / num_audits,
        neighboring_relation=statement.neighboring_relation,
        num_releases=learner.num_releases,
        releases_total=method.releases_total,
        in_sequence=method.releases_total or config.learning.method in SINGLE,
        covariance=method.learner(config, task, config.claimed, noise_std).covariance,
    )
    return Audited(row, statement, noise_std, result, canaries, time.perf_counter() - start)


def _summary(audits: Mapping[str, Audited], environment: Any) -> dict[str, Any]:
    """Content of summary.json."""
    cases = {}
    for name, one in audits.items():
        config = one.row.config
        result = {key: value for key, value in one.result._asdict().items() if key != "scores"}
        result["checks"] = [check._asdict() for check in one.result.checks]
        cases[name] = {
            "settings": one.row.settings,
            "rounds": config.rounds,
            "rounds_claimed": config.learning.iterations,
            "privacy": [one.claim._asdict()],
            "noise_std_claimed": one.noise_std,
            "noise_std_used": config.used_noise_std(one.noise_std),
            "batch_size_claimed": config.claimed_batch_size,
            "batch_size_used": config.batch_size,
            "clip_norm_used": config.used.clip_norm,
            "audit": {**result, "num_canaries": config.data.canaries, "violated": one.violated},
        }
    return {
        "experiment": "audit",
        "preset": None,
        "status": "finished",
        "seeds": list(dict.fromkeys(one.row.config.run.seed for one in audits.values())),
        "cases": cases,
        "seconds": {name: one.seconds for name, one in audits.items()},
        "environment": environment,
    }


def _write_results(audits: Mapping[str, Audited], path: Path) -> None:
    """One row for each audit: the options that vary, the lower bound, the claim."""
    lanes, lines = {}, {}
    for name, one in audits.items():
        lane = {"case": name, "seed": one.row.config.run.seed, "round": one.row.config.rounds}
        status = {"status": "finished", "until": lane["round"], "reason": None, "seconds": {"run": one.seconds}}
        lanes[name, lane["seed"]] = status
        numbers = {key: getattr(one.result, key) for key in ("dp_epsilon_lower_bound", "num_correct", "num_guesses")}
        ratios = {f"{check.name}, measured over claimed": _ratio(check) for check in one.result.checks}
        lines[name, lane["seed"]] = {**lane, **numbers, **ratios, "violated": one.violated}
    claims = {name: lambda _, claim=one.claim: [claim._asdict()] for name, one in audits.items()}
    write_results(path, lanes, lines, {name: one.row.settings for name, one in audits.items()}, claims)


def _table(audits: Mapping[str, Audited]) -> Table:
    """The closing table."""
    table, numbers = Table(title="audit", caption=_caption(audits)), ("audit:\nε ≥", "right\nguesses")
    for heading in ("case", "claim", *numbers, "verdict"):
        table.add_column(heading, justify="right" if heading in numbers else "left")
    for name, one in audits.items():
        epsilon, bound, verdict = one.texts
        claim = f"ε = {epsilon}, {one.claim.bound},\n{RELATIONS[one.claim.neighboring_relation]}"
        guesses = f"{one.result.num_correct} of {one.result.num_guesses}"
        table.add_row(name, claim, bound, guesses, verdict)
    return table


def _caption(audits: Mapping[str, Audited]) -> str:
    """Delta and confidence."""
    deltas = ", ".join(f"{delta:g}" for delta in dict.fromkeys(one.claim.dp_delta for one in audits.values()))
    confidence = 1 - max(one.row.config.claim.significance for one in audits.values())
    return f"δ = {deltas}; all lower bounds hold with confidence {confidence:.0%}"


def _ratio(check: Check) -> float:
    """Measured over claimed."""
    return check.measured / check.claimed


def _checks_table(audits: Mapping[str, Audited]) -> Table:
    """Table of each mechanism's measured values, and of the smallest error that a check would have seen."""
    caption = "limit: the end of the confidence interval that is nearer to 1; noise and batches are refuted if 1 lies"
    caption += (
        " outside of it, all else if the limit lies above 1; in brackets: the place that is farthest from the claim"
    )
    table = Table(title="mechanism: measured over claimed", caption=caption)
    numbers = ("measured /\nclaimed", "limit", "smallest\nerror seen")
    for heading in ("case", "check", *numbers[:2], "verdict", numbers[2]):
        table.add_column(heading, justify="right" if heading in numbers else "left")
    for name, one in audits.items():
        excess = one.result.dp_epsilon_lower_bound / _claimed_epsilon(one)
        rows: list[tuple[str, float | None, float, bool, float]] = [
            ("ε of the guesses", None, excess, excess > 1, one.result.smallest_error)
        ]
        rows += [(c.name, _ratio(c), c.limit / c.claimed, c.refuted, c.smallest_error) for c in one.result.checks]
        for i, (label, ratio, limit, fails, smallest) in enumerate(rows):
            two_sided = label.startswith(("noise", "repeated", "shape", "batches"))
            limit_text = (rounded_up if two_sided and limit < 1 else rounded_down)(limit, 3)
            cells = ("" if ratio is None else f"{ratio:.3f}", limit_text, "REFUTED" if fails else "passed")
            table.add_row(name if i == 0 else "", label, *cells, rounded_up(smallest, 3) if smallest < 100 else "none")
    return table


def _claimed_epsilon(one: Audited) -> float:
    """The claimed epsilon."""
    assert one.claim.dp_epsilon is not None
    return one.claim.dp_epsilon


def _plot(audits: Mapping[str, Audited], path: Path) -> Path:
    """Histograms of the scores of included and left-out canaries, one row for each audit."""
    figure = new_figure(7, 0.8 + 2.4 * len(audits))
    rows = np.ravel(figure.subplots(len(audits), 1, squeeze=False))
    for axes, (name, one) in zip(rows, audits.items(), strict=True):
        scores, is_included = one.result.scores, one.canaries.included
        bins = np.histogram_bin_edges(scores, 60).tolist()
        for mask, label, color in ((~is_included, "left out", "#0072B2"), (is_included, "included", "#D55E00")):
            axes.hist(scores[mask], bins, alpha=0.55, color=color, label=f"{label} ({mask.sum():,})")
        epsilon, bound, verdict = one.texts
        axes.set_title(f"{name}: claimed ε = {epsilon}, audit ε ≥ {bound}, {verdict}", fontsize=10, loc="left")
        for edge in np.median(scores) + one.result.guess_threshold * np.array([-1, 1]):
            axes.axvline(edge, color="0.3", linewidth=1, linestyle="--")
        axes.set_ylabel("canaries")
        axes.spines[["top", "right"]].set_visible(False)
    rows[0].legend(loc="upper right", frameon=False, fontsize=9)
    relations = ", ".join(dict.fromkeys(RELATIONS[one.claim.neighboring_relation] for one in audits.values()))
    rows[-1].set_xlabel(
        "released in the canary's coordinate, summed over rounds\n(only what lies outside the dashed lines is guessed)"
        f"\n{relations}; {_caption(audits)}"
    )
    return save_figure(figure, path)
