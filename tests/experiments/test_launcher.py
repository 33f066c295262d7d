"""Grids in jobs: what they leave, what happens to jobs that are killed, and what is refused."""

import builtins
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import disturbed_job
import jax
import numpy as np
import pytest
from run_files import run_bytes

import experiments
from experiments import EXPERIMENTS
from jaxfl.core import ArgumentError
from jaxfl.frame import main
from jaxfl.frame import run as frame_run
from jaxfl.frame.command_line import parse
from jaxfl.frame.launch import Launch
from jaxfl.frame.launcher import Job, JobsStopped
from jaxfl.training import Stop, read_results, read_run
from jaxfl.training.pass_directory import newest_round
from jaxfl.training.run_directory import held

pytest.importorskip("submitit", reason="needs submitit: pip install submitit")
EXPERIMENT = EXPERIMENTS["privsgp_vr"]
ROOT = Path(next(iter(experiments.__path__))).parent
GRID = "--nodes 4 --hidden 8 --evaluate-every 10 --batch-size 2 --noise-std 0.1 --method PrivSGP --quiet".split()
GRID += "--seeds 0 1 --grid step_size=0.1,0.3".split()
SHORT, LONG, LONGER = (
    [*GRID, "--iterations", iterations, "--checkpoint-every", "1"] for iterations in ("20", "400", "2000")
)
JOBS = ["--launcher", "local", "--jobs", "2"]
LANES = [(f"PrivSGP, step size {step_size}", seed) for step_size in (0.1, 0.3) for seed in (0, 1)]


class Here:
    """An executor whose jobs run at once in this process; those whose turn is in `killed` do not run at all."""

    def __init__(self, killed=()):
        self.killed, self.jobs, self.told = killed, [], []

    def update_parameters(self, **parameters):
        self.told.append(parameters)

    def submit(self, job):
        turn = len(self.jobs)
        self.jobs.append(job)
        result = None if turn in self.killed else job()
        path = SimpleNamespace(exists=lambda: result is not None)
        paths = SimpleNamespace(result_pickle=path, stderr="none")
        return SimpleNamespace(done=lambda: True, result=lambda: result, paths=paths)

    @property
    def passes(self):
        """Number of the pass of every job, in the order of submission."""
        return [job._spec[2] for job in self.jobs]


@pytest.fixture
def here(monkeypatch):
    """Jobs run in this process, whose signals stay as they are."""
    before, executor = signal.getsignal(signal.SIGTERM), Here()
    monkeypatch.setattr(Launch, "executor", lambda launch, folder, name: executor)
    yield executor
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def inline(tmp_path_factory):
    """The directory of a run in one process."""
    out = tmp_path_factory.mktemp("inline") / "run"
    assert main(EXPERIMENT, [*SHORT, "--out", str(out)]) == 0
    return out


def same_end(out, whole):
    """The same bytes of lines and results, less seconds, and a summary with the same numbers."""
    assert sorted(run_bytes(out).splitlines()) == sorted(run_bytes(whole).splitlines())
    tables = [
        [line.rpartition(",")[0] for line in (path / "results.csv").read_text().splitlines()] for path in (out, whole)
    ]
    assert tables[0] == tables[1]
    assert read_run(out).read_summary()["cases"] == read_run(whole).read_summary()["cases"]


def test_a_grid_in_jobs_leaves_the_same_metrics_and_results_as_in_one_process(inline, here, tmp_path):
    assert main(EXPERIMENT, [*SHORT, "--out", str(tmp_path / "run"), *JOBS]) == 0
    same_end(tmp_path / "run", inline)
    assert here.passes == [0, 1]
    assert (tmp_path / "run" / "plots" / "training.png").exists()


def test_how_far_the_jobs_are_is_shown(here, tmp_path, monkeypatch, capsys):
    """Rounds and runs, after the first job has ended and the second was killed, and at the end."""
    monkeypatch.setattr("jaxfl.frame.launcher._LOOK_SECONDS", 0.0)
    monkeypatch.setattr("jaxfl.training.progress._SECONDS_BETWEEN_LINES", -1.0)
    here.killed = (1,)
    command = [word for word in SHORT if word != "--quiet"]
    assert main(EXPERIMENT, [*command, "--out", str(tmp_path / "run"), *JOBS]) == 0
    shown = re.findall(
        r"^jobs: round (\d+)/80, (\d) of 4 runs ended(?: \(.*, \d+:\d\d left\))?$",
        capsys.readouterr().out,
        re.M,
    )
    assert shown == [("40", "2"), ("80", "4")]


def test_the_newest_line_of_a_file_that_is_being_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert newest_round(path) == 0
    for content, expected in (('{"rou', 0), ('{"round": 7}\n', 7), ('{"round": 7}\n{"round": 9}\n{"round": 12', 9)):
        path.write_text(content)
        assert newest_round(path) == expected
    path.write_text("".join(f'{{"round": {k}}}\n' for k in range(9000)))
    assert newest_round(path) == 8999


@pytest.mark.slow
def test_what_has_ended_is_not_submitted_again(inline, here, tmp_path, capsys):
    here.killed = (1, 2)
    command = [*SHORT, "--out", str(tmp_path / "run"), *JOBS, "--retries", "1"]
    assert main(EXPERIMENT, command) == 1
    sentence = "stopped: 1 of 2 jobs did not end: job 1: killed too often; its output lies in "
    assert capsys.readouterr().err.startswith(sentence)
    assert here.passes == [0, 1, 1]
    here.killed = ()
    assert main(EXPERIMENT, [*command, "--resume"]) == 0
    assert here.passes[3:] == [1]
    same_end(tmp_path / "run", inline)
    assert main(EXPERIMENT, [*command, "--resume"]) == 0
    assert len(here.jobs) == 4


@pytest.mark.slow
def test_a_job_that_fails_stops_no_other(here, tmp_path, monkeypatch, capsys):
    train = frame_run.train

    def failing(cases, **rest):
        if rest.get("only") == 0:
            raise OSError("the disk is away")
        return train(cases, **rest)

    monkeypatch.setattr(frame_run, "train", failing)
    command = [*SHORT, "--out", str(tmp_path / "run"), "--launcher", "local", "--jobs", "4"]
    assert main(EXPERIMENT, command) == 1
    assert "1 of 4 jobs did not end: job 0: OSError: the disk is away" in capsys.readouterr().err
    assert here.passes == [0, 1, 2, 3]


def test_what_jobs_refuse_is_refused_and_leaves_nothing(here, tmp_path, monkeypatch, capsys):
    def refusing(cases, **rest):
        raise ArgumentError("cases", "must fit in memory", "they do not", "Take fewer nodes.")

    monkeypatch.setattr(frame_run, "train", refusing)
    assert main(EXPERIMENT, [*SHORT, "--out", str(tmp_path / "run"), *JOBS]) == 2
    assert capsys.readouterr().err == "error: cases: must fit in memory; they do not. Take fewer nodes.\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_lone_run_that_diverges_has_exit_code_1(here, tmp_path, capsys):
    lone = "--nodes 4 --method PrivSGP --clip-norm None --noise-std 0 --step-size 1e30 --iterations 20".split()
    lone += ["--seeds", "0", "--quiet"]
    endings = []
    for out, more in (("inline", []), ("jobs", JOBS)):
        assert main(EXPERIMENT, [*lone, "--out", str(tmp_path / out), *more]) == 1
        endings.append(capsys.readouterr().err)
        assert read_run(tmp_path / out).read_summary()["status"] == "diverged"
    assert endings[0] == endings[1]
    assert endings[0].startswith("stopped: ")
    assert "must stay finite" in endings[0]


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_tells_its_jobs(here, tmp_path, monkeypatch):
    """And goes on where they have saved."""
    stop = Stop()
    submit = here.submit

    def asked_meanwhile(job):
        stop.request()
        return submit(job)

    monkeypatch.setattr(here, "submit", asked_meanwhile)
    query = parse(EXPERIMENT, [*SHORT, "--out", str(tmp_path / "run"), *JOBS])[0]
    with pytest.raises(JobsStopped):
        frame_run.run(query._replace(stop=stop))
    assert (tmp_path / "run" / "config.json").exists()
    query = parse(EXPERIMENT, [*SHORT, "--out", str(tmp_path / "run"), *JOBS, "--resume"])[0]
    assert frame_run.run(query) == 0


@pytest.mark.slow
def test_a_directory_with_another_job_at_work_is_waited_for(inline, here, tmp_path, monkeypatch):
    """It does not count as a retry."""
    out, submit, turns = tmp_path / "run", here.submit, []

    def busy_at_first(job):
        turns.append(job)
        if len(turns) > 2:
            return submit(job)
        for one in read_run(out).passes:
            one.path.mkdir(parents=True, exist_ok=True)
        with held(out / "passes" / "0"), held(out / "passes" / "1"):
            return submit(job)

    monkeypatch.setattr(here, "submit", busy_at_first)
    assert main(EXPERIMENT, [*SHORT, "--out", str(out), *JOBS, "--retries", "0"]) == 0
    assert len(turns) == 4
    same_end(out, inline)


def test_jobs_have_the_secret_key_of_the_run(here, tmp_path, monkeypatch):
    keys = []

    def failing(cases, *, key, **rest):
        keys.append(np.asarray(jax.random.key_data(key), ">u4").tobytes().hex())
        raise OSError("enough")

    monkeypatch.setattr(frame_run, "train", failing)
    assert main(EXPERIMENT, [*SHORT, "--seed-from-os", "--out", str(tmp_path), *JOBS]) == 1
    (kept,) = tmp_path.rglob("key")  # none of them keeps a copy
    assert kept.parent.name == "private"
    assert {*keys} == {kept.read_text().strip()}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--jobs 2", "--jobs: belongs to local, slurm; got 2 without it. Leave it out, or pass --launcher local."),
        ("--retries 2", "--retries: belongs to local, slurm; "),
        ("--gpus 1", "--gpus: belongs to local, slurm; "),
        ("--launcher local --slurm-partition long", "--slurm-partition: belongs to slurm; got long without it. "),
        ("--launcher local --slurm-minutes 5", "--slurm-minutes: belongs to slurm; "),
        ("--launcher local --jobs 0", "--jobs: must be an integer of at least 1; got 0. "),
        ("--launcher local --retries -1", "--retries: must be an integer of at least 0; got -1. "),
        ("--launcher local --jobs 2147483647", "--jobs: must be at most 10,000; got 2,147,483,647. Ask for fewer."),
        ("--launcher local --gpus 2147483647", "--gpus: must be at most 1,000; got 2,147,483,647. Ask for fewer."),
        ("--launcher pbs", "--launcher: must be inline or local or slurm; got 'pbs'. "),
    ],
)
def test_options_of_another_launcher_are_refused(arguments, sentence, tmp_path, capsys):
    assert main(EXPERIMENT, [*SHORT, "--out", str(tmp_path / "run"), *arguments.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence}")
    assert not (tmp_path / "run").exists()


def test_without_submitit_the_remedy_is_named(monkeypatch, capsys, tmp_path):
    load = builtins.__import__

    def without(name, *rest, **more):
        if name.startswith("submitit"):
            raise ModuleNotFoundError(name)
        return load(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(EXPERIMENT, [*SHORT, "--out", str(tmp_path / "run"), *JOBS]) == 2
    sentence = "error: --launcher: needs submitit; it is not installed. Run pip install submitit.\n"
    assert capsys.readouterr().err == sentence
    assert not (tmp_path / "run").exists()


class TestSlurm:
    """No cluster is there: what submitit would hand to one."""

    def test_without_its_commands_it_is_refused(self, monkeypatch, capsys, tmp_path):
        monkeypatch.setenv("PATH", "")
        assert main(EXPERIMENT, [*SHORT, "--out", str(tmp_path / "run"), "--launcher", "slurm"]) == 2
        assert "--launcher: must find Slurm's commands; there is no srun on the path. " in capsys.readouterr().err

    def test_the_batch_file_has_all_options(self, monkeypatch, tmp_path):
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
        query = {"partition": "long", "account": "lab", "minutes": 90, "cpus": 6, "memory_gb": 24.0}
        launch = Launch("slurm", gpus=2, **{f"slurm_{name}": value for name, value in query.items()})
        launch.check()
        executor = launch.executor(tmp_path, "jaxfl-fig7")._executor
        text = executor._make_submission_file_text("true", "0")
        wanted = {"partition=long", "account=lab", "time=90", "cpus-per-task=6", "gpus-per-node=2", "mem=24GB"}
        wanted |= {"job-name=jaxfl-fig7"}
        assert wanted <= {line.removeprefix("#SBATCH --") for line in text.splitlines()}
        assert executor.max_num_timeout == launch.retries

    def test_what_is_not_given_is_left_to_the_cluster(self, monkeypatch, tmp_path):
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
        text = Launch("slurm").executor(tmp_path, "run")._executor._make_submission_file_text("true", "0")
        assert not any(word in text for word in ("partition", "account", "gpus", "mem="))


class TestDevices:
    """GPUs of local jobs."""

    def test_jobs_at_the_same_time_have_gpus_of_their_own(self, here, tmp_path, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
        monkeypatch.setattr(Job, "__call__", lambda job: None)
        command = [*SHORT, "--out", str(tmp_path / "run"), *JOBS, "--gpus", "2", "--retries", "0"]
        assert main(EXPERIMENT, command) == 1
        assert [message["visible_gpus"] for message in here.told] == [[3, 5], [6, 7]]

    def test_a_gpu_is_given_again_when_its_job_has_ended(self, here, tmp_path, monkeypatch):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(Job, "__call__", lambda job: None)
        command = [*SHORT, "--out", str(tmp_path / "run"), *JOBS, "--gpus", "1", "--retries", "1"]
        assert main(EXPERIMENT, command) == 1
        assert sorted(message["visible_gpus"] for message in here.told) == [[0], [0], [1], [1]]

    @pytest.mark.parametrize("listed", ["0", "", "GPU-1f2e,GPU-77aa"])
    def test_fewer_than_the_jobs_need_are_refused(self, listed, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        with pytest.raises(ArgumentError, match=r"^gpus: must be there for all jobs at once, 2 together; CUDA_VIS"):
            Launch("local", jobs=2, gpus=1).check()

    @pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="needs a machine without a GPU")
    def test_a_job_without_the_gpus_that_it_asked_for_refuses(self, here, tmp_path, capsys):
        assert main(EXPERIMENT, [*SHORT, "--out", str(tmp_path / "run"), *JOBS, "--gpus", "1"]) == 2
        assert capsys.readouterr().err.startswith("error: --gpus: must be there for every job; ")


@pytest.mark.usefixtures("here")
def test_a_job_hears_a_signal_that_another_thread_receives(tmp_path):
    """Which thread does is the kernel's choice; Python's handlers run in the main thread, once that is awake."""
    heard = []

    def work(number, stop):
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        began = time.monotonic()
        while not stop.requested and time.monotonic() - began < 20:
            time.sleep(0.01)
        heard.append(stop.requested)

    assert Job(work, tmp_path / "0", 0)().how == "finished"
    assert heard == [True]


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """The directory of a run of one process that nothing stops."""
    out = tmp_path_factory.mktemp("long") / "run"
    assert main(EXPERIMENT, [*LONG, "--out", str(out)]) == 0
    return out


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR2])
def test_a_job_that_was_killed_or_preempted_goes_on_from_its_last_checkpoint(signum, long, tmp_path, monkeypatch):
    """SIGUSR2 is how Slurm, by submitit, tells of a time limit; the other job is submitted once."""
    out = tmp_path / "run"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(Path(disturbed_job.__file__).parent)]))
    monkeypatch.setenv(disturbed_job.SIGNAL, str(int(signum)))
    monkeypatch.setattr(frame_run, "run_pass", disturbed_job.run_pass)
    assert main(EXPERIMENT, [*LONG, "--out", str(out), *JOBS]) == 0
    same_end(out, long)
    ends = read_run(out).ended()
    timed = [ends[lane]["seconds"]["timed_rounds"] for lane in LANES]
    assert max(timed[:2]) < 400 == min(timed[2:]), "it goes on, and does not begin again"
    submitted = list((out / "jobs").glob("*_submitted.pkl"))
    assert len(submitted) == (2 if signum == signal.SIGUSR2 else 3)
    if signum == signal.SIGUSR2:
        assert any("Requeued job" in path.read_text() for path in (out / "jobs").glob("*_log.*"))


@pytest.mark.slow
def test_a_launcher_that_is_terminated_ends_its_jobs_and_is_resumed(tmp_path):
    """Exit code 143; each job has saved."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "experiments.privsgp_vr", *LONGER, "--out", str(out), *JOBS]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as child:
        began = time.monotonic()
        while not all((out / "passes" / number / "metrics.jsonl").exists() for number in "01"):
            assert time.monotonic() - began < 200
            time.sleep(0.05)
        child.send_signal(signal.SIGTERM)
        _, message = child.communicate(timeout=200)
    assert (child.returncode, message) == (
        143,
        "terminated: the same command with --resume goes on from the last checkpoints\n",
    )
    for number in "01":
        assert not (out / "passes" / number / "lock").exists(), "no process is at work there"
        assert any(path.is_dir() for path in (out / "passes" / number / "checkpoints").glob("[1-9]*"))
    done = subprocess.run([*command, "--resume"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert [row["status"] for row in read_results(out)] == ["finished"] * 4
