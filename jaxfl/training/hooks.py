"""Hooks: functions that `train` calls at every evaluation. Trackers, an early stop and a profile are hooks.

A hook is called on the host, after the line in metrics.jsonl is written; of several processes the first one calls it.
A resumed run may have other hooks. A hook sees the evaluations that its own process computes: a resumed run does not
call it for evaluations before the checkpoint that it goes on from. It calls it again for later evaluations, which the
interrupted process may have measured already.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxfl.core import ArgumentError
from jaxfl.core.check import at_least
from jaxfl.training.case import larger_is_worse
from jaxfl.training.run_directory import RunDirectory, slug


class Evaluation(NamedTuple):
    """One evaluation of one lane.

    Attributes:
        case, seed: of the lane.
        round_index: rounds completed.
        metrics: name -> value, the numbers of its line in metrics.jsonl. Numbers of rounds, such as `train_loss`, are
            missing in round 0.
    """

    case: str
    seed: int
    round_index: int
    metrics: dict[str, float]


Hook = Callable[[Evaluation], bool | None]
"""True asks to end the lane here, with the status "stopped_early"."""
TRACKERS = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # name -> package


def evaluation_of(line: Mapping[str, Any]) -> Evaluation:
    """The evaluation that a line of metrics.jsonl holds."""
    case, seed, round_index = (line[name] for name in ("case", "seed", "round"))
    numbers = {name: float(value) for name, value in [*line.items()][3:] if value is not None}
    return Evaluation(case, seed, round_index, numbers)


def all_of(hooks: Sequence[Hook]) -> Hook:
    """One hook that calls several in turn; it asks to end a lane if any of them does."""
    return lambda evaluation: any([bool(hook(evaluation)) for hook in hooks])


def early_stop(metric: str, patience: int) -> Hook:
    """A hook that ends a lane whose metric has not improved for some evaluations.

    The hook forgets its evaluations when the process ends: a resumed run begins to count anew. Privacy statements count
    the rounds that ran. They do not cover the choice of this number, which depends on the metric.

    Args:
        metric: its name in `Evaluation.metrics`; the smallest value is the best if `larger_is_worse`, else the largest.
        patience: evaluations without improvement, at least 1, after which the lane ends.

    Raises:
        ArgumentError: patience below 1; from the hook, a metric that is not measured.

    Examples:
        >>> hook = early_stop("test_loss", patience=2)
        >>> [hook(Evaluation("A", 0, k, {"test_loss": loss})) for k, loss in enumerate((3.0, 2.0, 2.5, 2.0))]
        [False, False, False, True]
    """
    at_least(1, patience=patience)
    sign = -1.0 if larger_is_worse(metric) else 1.0
    best: dict[tuple[str, int], tuple[float, int]] = {}  # lane -> best value, evaluations since

    def hook(evaluation: Evaluation) -> bool:
        if metric not in evaluation.metrics:
            if not evaluation.round_index:
                return False
            found = f"the run measures {', '.join(evaluation.metrics)}"
            raise ArgumentError("metric", "must be measured", found, "Choose one of these.")
        value, lane = sign * evaluation.metrics[metric], evaluation[:2]
        before, since = best.get(lane, (-float("inf"), 0))
        best[lane] = (value, 0) if value > before else (before, since + 1)
        return best[lane][1] >= patience

    return hook


def check_tracker(name: str) -> None:
    """Refuse a tracker whose package is not installed; the package is not imported yet."""
    if importlib.util.find_spec(TRACKERS[name]) is None:
        remedy = "Run pip install tensorboardX." if name == "tensorboard" else "Run pip install wandb."
        raise ArgumentError("track", f"needs {TRACKERS[name]}", "it is not installed", remedy)


@contextlib.contextmanager
def tracker(name: str, run: RunDirectory) -> Iterator[Hook]:
    """A hook that passes evaluations on to a tracker; nothing is opened before the first one.

    Args:
        name: "tensorboard" writes `<run>/tensorboard/<case>-seed-<s>`, a folder for each lane. A resumed run hides what
            the interrupted process wrote after the checkpoint. "wandb" makes one run of Weights & Biases for each
            process, in a group with the directory's name, with metrics "<case>, seed <s>/<metric>" against "round".
        run: from `open_run`.

    Raises:
        ArgumentError: its package is not installed.
    """
    check_tracker(name)
    with contextlib.ExitStack() as stack:
        yield (_tensorboard if name == "tensorboard" else _wandb)(run, stack)


def _tensorboard(run: RunDirectory, stack: contextlib.ExitStack) -> Hook:
    writers: dict[tuple[str, int], Any] = {}

    def hook(evaluation: Evaluation) -> None:
        case, seed, round_index, metrics = evaluation
        if (case, seed) not in writers:
            folder = run.path / "tensorboard" / f"{slug(case)}-seed-{seed}"
            name = f".{round_index}"  # two processes would otherwise write the same file within one second
            begun = importlib.import_module("tensorboardX").SummaryWriter
            writer = begun(str(folder), purge_step=round_index, filename_suffix=name)
            writers[case, seed] = stack.enter_context(writer)
        for name, value in metrics.items():
            writers[case, seed].add_scalar(name, value, round_index)
        writers[case, seed].flush()

    return hook


def _wandb(run: RunDirectory, stack: contextlib.ExitStack) -> Hook:
    session: list[Any] = []

    def hook(evaluation: Evaluation) -> None:
        case, seed, round_index, metrics = evaluation
        if not session:
            place = {"project": f"jaxfl-{run.config['experiment']}", "group": run.path.name, "dir": str(run.path)}
            begun = importlib.import_module("wandb").init(**place, config=run.config["config"])
            session.append(stack.enter_context(begun))
            begun.define_metric("round")
            begun.define_metric("*", step_metric="round")
        named = {f"{case}, seed {seed}/{name}": value for name, value in metrics.items()}
        session[0].log({"round": round_index, **named})

    return hook


@contextlib.contextmanager
def profile(folder: Path) -> Iterator[Hook]:
    """A hook that writes a JAX trace of the rounds between the first two evaluations, for xprof or Perfetto.

    Args:
        folder: for the trace. In a process with one evaluation alone, the trace has what ran after it.
    """
    first: list[int] = []
    with contextlib.ExitStack() as trace:

        def hook(evaluation: Evaluation) -> None:
            if not first:
                first.append(evaluation.round_index)
                trace.enter_context(jax.profiler.trace(folder))
            elif evaluation.round_index > first[0]:
                trace.close()

        yield hook
