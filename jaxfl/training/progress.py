"""Display of a run's progress for a person: a bar on a terminal, occasional lines elsewhere, or nothing."""

from __future__ import annotations

import time

import rich.console
import rich.progress

_SECONDS_BETWEEN_LINES = 10.0


class ProgressReport:
    """Progress of a whole run; a context manager. Without a terminal, plain lines name the case and the seed.

    Args:
        total_rounds: rounds of all lanes together.
        quiet: show nothing.
        console: where to write; default: standard output.
    """

    def __init__(self, total_rounds: int, *, quiet: bool = False, console: rich.console.Console | None = None):
        self._console = console or rich.console.Console(highlight=False)
        self._quiet = quiet
        self._total = total_rounds
        self._done_here = self._done_since = self._part_done = self._part_total = 0
        self._label, self._note, self._is_compiled = "", "", False
        self._began = self._last_line = time.perf_counter()
        self._bar: rich.progress.Progress | None = None
        if not quiet and self._console.is_terminal:
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

    def announce(self, text: str) -> None:
        """Show a message on a line of its own."""
        if not self._quiet:
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

    def advance(self, rounds: int) -> None:
        """Count rounds that have been run."""
        self._done_here += rounds
        self._done_since += rounds
        self._part_done += rounds
        self._show(rounds)

    def note(self, text: str) -> None:
        """Keep the latest result, which the next line shows."""
        self._note = text

    def end(self) -> None:
        """Tell that these lanes have ended."""
        self._line()

    def _rate(self) -> str:
        """Rounds per second of these lanes, evaluations and checkpoints included; time left for the whole run.

        Before the first rounds "compiling"; nothing while none has been timed, and where none is left.
        """
        elapsed = time.perf_counter() - self._began
        if self._done_since <= 0 or elapsed <= 0:
            return "" if self._is_compiled or 0 < self._part_total <= self._part_done else "compiling"
        rate = self._done_since / elapsed
        left = round((self._total - self._done_here) / rate)
        return f"{rate:.3g} rounds/s, {left // 60}:{left % 60:02d} left"

    def _show(self, rounds: int) -> None:
        if self._bar is not None:
            state = ", ".join(text for text in (self._note, self._rate()) if text)
            self._bar.update(self._task, advance=rounds, description=self._label, state=state)
        elif time.perf_counter() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._line()

    def _line(self) -> None:
        if self._quiet or self._bar is not None:
            return
        self._last_line = time.perf_counter()
        done = [f"round {self._part_done}/{self._part_total}"] if self._part_total else []
        text, rate = ", ".join([*done, *filter(None, [self._note])]), self._rate()
        rate = f" ({rate})" if text and rate else rate
        self._console.print(f"{self._label}: {text}{rate}", soft_wrap=True, markup=False)
