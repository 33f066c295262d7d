"""A grid in jobs: its passes (parts of the grid) are submitted by submitit, and again where a job is killed.

    RUN/passes/<number>/     results and checkpoints of a job, from which another job continues
    RUN/jobs/                submitit's files of every job

Only the directory of a pass decides whether the pass is done, never the report of a job.
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxfl.core import ArgumentError, Array
from jaxfl.frame.launch import Launch
from jaxfl.training import Case, RunDirectory, Stop, Stopped, divide_run
from jaxfl.training.pass_directory import METRICS, PassDirectory, newest_round
from jaxfl.training.progress import ProgressReport
from jaxfl.training.run_directory import held

JOBS = "jobs"
_POLL_SECONDS = {"local": 0.2, "slurm": 10.0}
_LISTEN_SECONDS = 0.2  # after which a job has heard a signal
_LOOK_SECONDS = 2.0  # between two looks at how far jobs are

Work = Callable[[int, Stop], object]
"""Trains a pass of a run, from its last checkpoint. Pickled, and called in another process."""


class JobsStopped(Exception):
    """This process was asked to stop, and has made its jobs save and stop."""


class Ending(NamedTuple):
    """Ending of a job, as the job reports it; a job that was killed reports nothing."""

    how: str  # "finished", "stopped" (preempted), "busy" (another job is at work on it), "refused", "failed"
    words: tuple[str, ...] = ()  # parts of an ArgumentError, or the failure


class Job:
    """Job that submitit pickles and calls.

    SIGTERM lets it finish its chunk of rounds and save. So does the signal that submitit has Slurm send before the time
    limit and on preemption; submitit then queues the job again.

    Guarantees:
        - a job hears a signal that another thread receives.
    """

    def __init__(self, work: Work, path: Path, number: int):
        self._spec = work, path, number

    def __call__(self) -> Ending:
        """Train in a second thread, so that the main thread hears signals during a long chunk, too."""
        self._stop = Stop()
        signal.signal(signal.SIGTERM, lambda *_: self._stop.request())
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            self._training = pool.submit(self._train)
            # Python's handlers run in the main thread alone, and a signal to another thread does not wake it.
            while not concurrent.futures.wait([self._training], timeout=_LISTEN_SECONDS).done:
                pass
            return self._training.result()

    def checkpoint(self) -> Any:
        """Submission that submitit queues in place of this job, once the state is saved."""
        from submitit.helpers import DelayedSubmission  # which called this

        self._stop.request()
        concurrent.futures.wait([self._training])
        return DelayedSubmission(Job(*self._spec))

    def _train(self) -> Ending:
        work, path, number = self._spec
        try:
            with held(path):
                pass
        except ArgumentError:
            return Ending("busy")
        try:
            work(number, self._stop)
        except ArgumentError as error:
            return Ending("refused", (error.argument, error.requirement, error.found, error.remedy))
        except Stopped:
            return Ending("stopped")
        except Exception as error:
            traceback.print_exc()
            return Ending("failed", (f"{type(error).__name__}: {error}",))
        return Ending("finished")


def run_in_jobs(
    work: Work,
    run: RunDirectory,
    cases: Mapping[str, Case],
    launch: Launch,
    *,
    key: Array | None = None,
    stop: Stop | None = None,
    quiet: bool = False,
) -> None:
    """Train all passes of a run in jobs.

    Args:
        work: what a job does.
        run: from `open_run`. Of a resumed one, passes that have ended are not submitted.
        cases: as `jaxfl.training.train` takes them.
        launch: the launcher, and the number of jobs at once.
        key: as `train` takes it.
        stop: through which a signal asks to stop: the jobs save then.
        quiet: show neither how far the jobs are nor how they end.

    Raises:
        ArgumentError: jobs refuse their configurations, or another process is at work on this run.
        ChildProcessError: jobs failed, or were killed too often; the others have ended.
        JobsStopped: `stop` asked for it.

    Guarantees:
        - a grid in jobs leaves the same lines and results.csv as in one process.
        - a job that was killed goes on from its last checkpoint.
        - a pass that has ended is not submitted again.
        - an error of one job does not end the others.
    """
    launch.check()
    stop = Stop() if stop is None else stop
    with held(run.path):
        try:
            divide_run(cases, launch.jobs, run=run, key=key)
        except ArgumentError:
            run.withdraw()
            raise
        passes = run.passes
        if all(one.end() is not None for one in passes):
            return
        rounds = [[cases[name].last_round for name, _ in one.lanes] for one in passes]
        with ProgressReport(sum(map(sum, rounds)), quiet=quiet) as progress:
            with stop.heeded():
                failed = _Crew(work, run.path.absolute() / JOBS, passes, launch, rounds, progress).work(stop)
            if failed:
                _raise(failed, run, passes)
            progress.announce(f"{len(passes)} of {len(passes)} jobs have ended")
    run.resumed = True  # from here on there is something to go on with, and nothing to withdraw
    begun = passes[0].begun()
    if begun is not None:
        run.record_environment(begun["environment"])


class _Crew:
    """The jobs of one run.

    Args:
        work, launch: as in `run_in_jobs`.
        folder: of the logs.
        passes: of the run.
        rounds: rounds of each lane, pass by pass.
        progress: of all rounds.
    """

    def __init__(
        self,
        work: Work,
        folder: Path,
        passes: Sequence[PassDirectory],
        launch: Launch,
        rounds: Sequence[Sequence[int]],
        progress: ProgressReport,
    ):
        self._work, self._passes, self._launch = work, passes, launch
        self._rounds, self._progress, self._looked, self._is_starting = rounds, progress, 0.0, True
        self._executor = launch.executor(folder, f"jaxfl-{folder.parent.name}")
        self._free = launch.gpu_numbers()
        self._running: dict[int, tuple[Any, list[int]]] = {}  # pass -> its job, and the GPUs that it was given
        self._submissions = [0] * len(passes)

    def work(self, stop: Stop) -> dict[int, Ending]:
        """Submit and wait until no pass is left; return the endings of passes that failed."""
        waiting = [number for number, one in enumerate(self._passes) if one.end() is None]
        self._ended = {*range(len(self._passes))} - {*waiting}
        text = f"{len(self._passes)} jobs, at most {self._launch.jobs} at once, {len(waiting)} to run"
        self._progress.announce(text)
        self._done = self._rounds_done()
        self._progress.begin("jobs", sum(map(sum, self._rounds)))
        self._progress.skip(self._done)
        failed: dict[int, Ending] = {}
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self._launch.jobs:
                    self._submit(waiting.pop(0))
                time.sleep(_POLL_SECONDS[self._launch.launcher])
                if stop.requested:
                    raise JobsStopped
                for number in [number for number, (job, _) in self._running.items() if job.done()]:
                    ending = self._collect(number)
                    if ending.how == "finished":
                        continue
                    if ending.how in ("refused", "failed") or self._submissions[number] > self._launch.retries:
                        failed[number] = ending
                    else:
                        waiting.append(number)
                self._look()
        finally:
            self._dismiss()
        return failed

    def _look(self) -> None:
        """Show how far the jobs are, now and then."""
        if time.perf_counter() - self._looked < _LOOK_SECONDS:
            return
        self._looked, done = time.perf_counter(), self._rounds_done()
        ended = sum(len(self._passes[number].lanes) for number in self._ended)
        self._progress.note(f"{ended} of {sum(map(len, self._rounds))} runs ended")
        if self._is_starting and done > self._done:  # the first rounds took the start and the compiling, too
            self._progress.skip(done - self._done)
            self._progress.compiled()
            self._is_starting, self._done = False, done
        self._progress.advance(done - self._done)  # a job that was killed goes back to its checkpoint
        self._done = done

    def _rounds_done(self) -> int:
        """Rounds of all lanes, by the newest line of each pass: its lanes are in lockstep."""
        done = 0
        for number, rounds in enumerate(self._rounds):
            most = max(rounds) if number in self._ended else newest_round(self._passes[number].path / METRICS)
            done += sum(min(most, last) for last in rounds)
        return done

    def _submit(self, number: int) -> None:
        devices = [self._free.pop(0) for _ in range(self._launch.gpus)]
        if self._launch.launcher == "local":
            self._executor.update_parameters(gpus_per_node=self._launch.gpus, visible_gpus=devices)
        job = self._executor.submit(Job(self._work, self._passes[number].path, number))
        self._running[number] = job, devices
        self._submissions[number] += 1

    def _collect(self, number: int) -> Ending:
        """Remove a job that has ended, and return its ending."""
        job, devices = self._running.pop(number)
        self._free += devices
        done = self._passes[number].end() is not None
        ending = Ending("finished") if done else _told(job, self._launch)
        self._ended |= {number} if done else set()
        if ending.how == "finished" and not done:
            ending = Ending("failed", ("it reports that it has finished, but some lanes have not",))
        if ending.how == "busy":  # an older job, whose submitting process has ended, still works on it
            self._submissions[number] -= 1
        lanes = self._passes[number].lanes
        more = f" and {len(lanes) - 1} more" if lanes[1:] else ""
        self._progress.announce(f"job {number} ({lanes[0][0]}, seed {lanes[0][1]}{more}): {ending.how}")
        return ending

    def _dismiss(self) -> None:
        """End the jobs that still run; local jobs save first, and are waited for."""
        for job, _ in self._running.values():
            if self._launch.launcher == "slurm":
                job.cancel(check=False)
            elif not job.done():
                os.kill(int(job.job_id), signal.SIGTERM)  # its controller passes it on
        while self._launch.launcher == "local" and not all(job.done() for job, _ in self._running.values()):
            time.sleep(_POLL_SECONDS["local"])


def _told(job: Any, launch: Launch) -> Ending:
    """Ending that a job left as its result; "killed" if it left none."""
    from submitit.core.utils import FailedJobError, UncompletedJobError  # an executor is there

    if launch.launcher == "local" and not job.paths.result_pickle.exists():  # on this machine no file is late
        return Ending("killed")
    try:
        return job.result()
    except FailedJobError as error:
        return Ending(
            "failed", (f"it did not begin, or ended outside training; see {job.paths.stderr}: {error}"[:400],)
        )
    except UncompletedJobError:
        return Ending("killed")


def _raise(failed: Mapping[int, Ending], run: RunDirectory, passes: Sequence[PassDirectory]) -> None:
    """Raise the first refusal, or else the first failure."""
    refused = [ending for ending in failed.values() if ending.how == "refused"]
    if refused:
        if not any((one.path / METRICS).exists() for one in passes) and not run.resumed:
            shutil.rmtree(run.path / JOBS, ignore_errors=True)
            run.withdraw()
        raise ArgumentError(*refused[0].words)
    number = min(failed)
    reason = failed[number].words[0] if failed[number].words else f"{failed[number].how} too often"
    counted = f"{len(failed)} of {len(passes)} jobs did not end"
    raise ChildProcessError(f"{counted}: job {number}: {reason}; its output lies in {run.path.absolute() / JOBS}")
