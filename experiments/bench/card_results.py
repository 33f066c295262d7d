"""The published results that need a card: the boxes of `bench card results`, each a run of an experiment.

A run lies in runs/card/NAME. DIR/EXPERIMENT receives what a result page has, NAME_config.json, NAME_metrics.jsonl and,
when the run has ended, NAME_results.csv. The files are copied every few seconds, so that a box that is stopped leaves
its lines. The same call again goes on with `--resume`: a run that has ended trains nothing, and another one begins at
its last checkpoint. EmbracingFL saves every 50 rounds. The runs of figure 4 save at their end only: PrivSGP-VR's table
has 35 GB (16 nodes, 98 gradients of 11.2 million bfloat16 each).

EmbracingFL's case 7 (16 strong and 112 weak clients) is a row of Tables 3, 6 and 7. One seed each.
"""

import contextlib
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from experiments.bench.timing import Number
from jaxfl.core.lines import METRICS

CONFIG, RESULTS = "config.json", "results.csv"


class Result(NamedTuple):
    """A run of an experiment: its options, those that it has at full size only, and those for a CPU."""

    experiment: str
    options: str
    full: str
    small: str


def _case_7(method: str) -> Result:
    small = "--dataset digits --nodes 16 --rounds 4 --evaluate-every 2 --checkpoint-every 1"
    return Result("embracing_fl", f"--preset table7 --case 7 --target-accuracy 0.54 --method {method}", "", small)


def _figure_4(method: str) -> Result:
    saved = "--checkpoint-every 1000 --checkpoint-minutes None --no-keep-params"
    # 10 evaluations in place of 40: each runs 16 models of 11.2 million parameters on all 10,000 test images.
    full, small = "--evaluate-every 300", "--evaluate-every 2 --dataset digits --nodes 4 --model mlp"
    small += " --entry-size 4 --iterations 4"
    return Result("privsgp_vr", f"--preset fig4 --method {method} {saved}", full, small)


RUNS = {
    "table7_c7_embracing": _case_7("embracing"),
    "table7_c7_width_reduction": _case_7("width_reduction"),
    "fig4_privsgp_vr": _figure_4("PrivSGP-VR"),
    "fig4_privsgp": _figure_4("PrivSGP"),
}


def result(name: str, out: Path, data_dir: Path | None, *, small: bool) -> Iterator[Number]:
    """Run one of `RUNS`, or go on with it, and copy its files to `out`.

    Guarantees:
        - a run that has ended is not started again.
    """
    one, run = RUNS[name], Path("runs", "card_small" if small else "card", name)
    files, began, code, trained = out / one.experiment / name, time.perf_counter(), 0, not (run / RESULTS).exists()
    if trained:
        words = shlex.split(f"{one.options} {one.small if small else one.full} --seeds 0 --quiet --resume")
        words += ["--out", str(run), *([] if data_dir is None or small else ["--data-dir", str(data_dir)])]
        with subprocess.Popen([sys.executable, "-m", f"experiments.{one.experiment}", *words]) as process:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                copy_files(run, files)
            code = process.returncode
    lines = copy_files(run, files)
    number: Number = {"name": f"results/{name}", "value": time.perf_counter() - began, "unit": "s, the whole command"}
    yield number | {"lines": lines, "trained": trained} | ({"error": f"exit code {code}"} if code else {})


def copy_files(run: Path, files: Path) -> int:
    """Copy what is there of a run of one pass to FILES_config.json and so on; returns the number of complete lines."""
    files.parent.mkdir(parents=True, exist_ok=True)
    passes = sorted((run / "passes").glob(f"*/{METRICS}"))
    lines = b"".join(content[: content.rfind(b"\n") + 1] for content in map(Path.read_bytes, passes))
    sources = [(path.name, path.read_bytes()) for path in (run / CONFIG, run / RESULTS) if path.exists()]
    for name, content in [*sources, (METRICS, lines)]:
        files.with_name(f"{files.name}_{name}").write_bytes(content)
    return lines.count(b"\n")
