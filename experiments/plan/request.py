"""The plan as an experiment: experiments.privsgp_vr with budgets and a ladder of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxfl.core import ArgumentError
from jaxfl.data.columns import is_file
from jaxfl.frame import Prepared, Row, override
from jaxfl.frame.experiment import BASELINES

from .. import privsgp_vr
from .table import COLUMNS, OWN, tell

BESIDE = privsgp_vr.EXPERIMENT.baselines
_NO_FILE = (
    "No file goes first, so that this plans for the data set {}. For a table of your own: jaxfl plan FILE.csv"
    " --label-column LABEL --site-column SITE"
)
STEPS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def arguments_of(words: Sequence[str]) -> list[str]:
    """The words of `jaxfl plan` as options of the experiment.

    Examples:
        >>> arguments_of(["a.csv", "--epsilon", "1", "3", "--baselines", "alone"])
        ['--dataset', 'a.csv', '--epsilon', '1', '3', '--baselines', 'alone']
        >>> arguments_of(["--private-selection=geometric"])
        ['--private-selection=geometric', '--sample', 'step_size=log:0.01:3', '--seeds', '0']
    """
    said = {word.partition("=")[0] for word in words}
    if "--private-selection" in said:  # it pays for the choice of a step, and nothing else may vary
        own = {"--sample": [f"step_size=log:{STEPS[0]:g}:{STEPS[-1]:g}"], "--seeds": ["0"]}
    else:
        own = {"--baselines": [*BASELINES]}
    file = ["--dataset"] if words and not words[0].startswith("-") else []
    return [*file, *words, *(word for name in own if name not in said for word in (name, *own[name]))]


def prepare(rows: Mapping[str, Row]) -> Prepared:
    """The cases of experiments.privsgp_vr, and a word where they are not of a file of one's own."""
    config = next(iter(rows.values())).config
    dataset, x = config.data.dataset, config.run.x
    if x != "rounds":
        raise ArgumentError("x", "must be left out of a plan, which draws no curves", f"got {x}", "Leave it out.")
    assert privsgp_vr.EXPERIMENT.prepare is not None
    prepared = privsgp_vr.EXPERIMENT.prepare(rows)
    said = [] if is_file(dataset) else [_NO_FILE.format(dataset)]
    return prepared._replace(description=[*said, *prepared.description])


PLAN = privsgp_vr.EXPERIMENT._replace(
    name="plan",
    description="What accuracy would my sites have, and what does each risk? FILE goes first, then options.",
    base=override(privsgp_vr.EXPERIMENT.base, OWN),
    prepare=prepare,
    grid=({"target_epsilon": (1.0, 3.0, 8.0)}, {"step_size": STEPS}, {"seed": (0, 1, 2)}),
    datasets={},
    presets={},
    # A site that sends nothing needs no noise.
    baselines={**BESIDE, "alone": lambda row: {**(BESIDE["without_noise"](row) or {}), **(BESIDE["alone"](row) or {})}},
    derived={
        **privsgp_vr.EXPERIMENT.derived,
        # Only the end counts. 0 until K is known.
        "evaluate_every": lambda options, names: 0 if options["iterations"] == "auto" else options["iterations"],
    },
    labels={"method": "{}", "target_epsilon": "ε = {}", "step_size": "step {}"},
    finish=None,
    columns=COLUMNS,
    tell=tell,
)
