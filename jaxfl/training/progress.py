"""Display of a run's progress for a person: a bar on a terminal or in a notebook, lines elsewhere, or nothing."""

from __future__ import annotations

import time

import rich.console
import rich.progress

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_BARS = 0.2  # of a notebook


class ProgressReport:
    """Progress of a whole run; a context manager. A notebook has one line that is written anew: its output keeps the
    last. Without notebook and terminal, plain lines name the case and the seed.

    Args:
        total_rounds: rounds of all lanes together.
        quiet: show nothing.
        console: where to write; default: standard output.
    """

    def __init__(self, total_rounds: int, *, quiet: bool = False, console: rich.console.Console | None = None):
        self._console = console or rich.console.Console(highlight=False)
        self._is_notebook = self._console.is_jupyter
        if self._is_notebook:  # rich makes an output block of each message there
            self._console = rich.console.Console(file=self._console.file, force_jupyter=False, highlight=False)
        self._width = 0  # of the notebook's line
        self._quiet = quiet
        self._total = total_rounds
        self._done_here = self._done_since = self._part_done = self._part_total = 0
        self._label, self._note, self._is_compiled = "", "", False
        self._first: tuple[float, int] | None = None  # when the first call ended, and its rounds
        self._began = self._last_line = time.perf_counter()
        self._bar: rich.progress.Progress | None = None
        if not quiet and self._console.is_terminal and not self._is_notebook:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.TextColumn("{task.completed}/{task.total} rounds"),
                rich.progress.TextColumn("{task.fields[state]}"),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=total_rounds, state="compiling")

    def __enter__(self) -> ProgressReport:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._width:
            self._console.file.write("\n")

    def announce(self, text: str) -> None:
        """Show a message on a line of its own."""
        if not self._quiet:
            self._console.file.write("\r" + " " * self._width + "\r" if self._width else "")
            self._console.print(text, soft_wrap=True, markup=False)

    def begin(self, label: str, num_rounds: int) -> None:
        """Tell that lanes with `num_rounds` rounds in all begin, or go on."""
        self._label, self._part_done, self._part_total, self._note = label, 0, num_rounds, ""
        self._is_compiled = False
        self._show(rounds=0)

    def skip(self, rounds: int) -> None:
        """Count rounds that need not be run: an earlier run did them, or a lane has ended."""
        self._total -= rounds
        self._part_done += rounds
        if self._bar is not None:
            self._bar.update(self._task, total=self._total)

    def compiled(self) -> None:
        """Tell that the rounds begin now: compiling does not count for the rate."""
        self._began, self._done_since, self._is_compiled = time.perf_counter(), 0, True
        self._first = None

    def advance(self, rounds: int) -> None:
        """Count rounds that have been run."""
        self._done_here += rounds
        self._done_since += rounds
        self._part_done += rounds
        self._show(rounds)
        if self._first is None:
            self._first = (time.perf_counter(), self._done_since)

    def note(self, text: str) -> None:
        """Keep the latest result, which the next line shows."""
        self._note = text

    def end(self) -> None:
        """Tell that these lanes have ended."""
        self._line()

    def _rate(self) -> str:
        """Rounds per second of these lanes, evaluations and checkpoints included, and the time left for them.

        Lanes of other programs that are still to come have rates of their own, and no time is said for these. Before
        the first rounds "compiling"; nothing while none has been timed, and where none is left.
        """
        elapsed = time.perf_counter() - self._began
        if self._done_since <= 0 or elapsed <= 0:
            return "" if self._is_compiled or 0 < self._part_total <= self._part_done else "compiling"
        rate, rounds_left = self._done_since / elapsed, self._part_total - self._part_done
        to_come = self._total - self._done_here > rounds_left
        ended, of_first = self._first or (self._began, self._done_since)
        is_known = self._done_since > of_first  # the first call, of one round mostly, loads what the others find loaded
        if is_known:
            rate = (self._done_since - of_first) / max(elapsed + self._began - ended, 1e-9)
        if (not is_known) if rounds_left > 0 else to_come:
            return f"{rate:.3g} rounds/s"
        left = round(rounds_left / rate)
        return f"{rate:.3g} rounds/s, {left // 60}:{left % 60:02d} left{' of these runs' * to_come}"

    def _show(self, rounds: int) -> None:
        if self._bar is not None:
            state = ", ".join(text for text in (self._note, self._rate()) if text)
            self._bar.update(self._task, advance=rounds, description=self._label, state=state)
            return
        seconds = _SECONDS_BETWEEN_BARS if self._is_notebook else _SECONDS_BETWEEN_LINES
        if time.perf_counter() - self._last_line > seconds:
            self._line()

    def _line(self) -> None:
        if self._quiet or self._bar is not None:
            return
        self._last_line = time.perf_counter()
        if self._is_notebook:
            filled = 30 * self._done_here // max(self._total, 1)
            state = f"{'━' * filled}{'╌' * (30 - filled)} {self._done_here}/{self._total} rounds"
            text = ", ".join(filter(None, [f"{self._label} {state}".strip(), self._note, self._rate()]))
            self._console.file.write("\r" + text.ljust(self._width))
            self._console.file.flush()
            self._width = len(text)
            return
        done = [f"round {self._part_done}/{self._part_total}"] if self._part_total else []
        text, rate = ", ".join([*done, *filter(None, [self._note])]), self._rate()
        rate = f" ({rate})" if text and rate else rate
        self._console.print(f"{self._label}: {text}{rate}", soft_wrap=True, markup=False)
