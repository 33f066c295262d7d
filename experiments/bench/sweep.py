"""Gain of a sweep: a grid of PrivSGP-VR in one program, against one program per case, and against 48 commands.

6 step sizes x 8 seeds of the default run on digits: 16 nodes, exponential graph, 64-32-10, factored SAGA table, Poisson
batches, clipped gradients with noise. Everything that a user waits for counts: compiling, rounds, evaluations, lines,
checkpoints. The rival of `speedup_vs_train` compiles each case, and trains its seeds one after another, each with
calls, evaluations and a checkpoint of its own. The rival of `speedup_vs_commands` is a fresh
process for each configuration, with the interpreter's start and the pictures in it, measured on a few and scaled up,
against one command with the grid; no compiled program is kept.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.timing import Measurement, Report
from experiments.privsgp_vr import EXPERIMENT
from experiments.privsgp_vr.prepare import prepare
from jaxfl.frame.command_line import parse
from jaxfl.training import Case, open_run, test_scores, train
from jaxfl.training.checkpoint import Checkpoints
from jaxfl.training.chunks import first_state, info_fields, rounds_fn, summarize
from jaxfl.training.measures import flatten_scores
from jaxfl.training.pass_directory import PassDirectory

NOISE_STD = 0.2051  # gave epsilon 8 after 50 rounds by the bound of the first measurement
ALL_CORES = True
WANTED = {"sweep/speedup_vs_train": 2.5, "sweep/speedup_vs_commands": 10.0, "sweep/compiles": 1.0}


class Sweep(NamedTuple):
    """Size of the sweep."""

    step_sizes: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
    num_seeds: int = 8
    nodes: int = 16
    num_rounds: int = 50
    commands: int = 3  # fresh processes that are measured; 0 for no commands at all
    repeats: int = 2


SETTING = Sweep()


def suite(sweep: Sweep = SETTING) -> dict[str, Measurement]:
    """Measure; see the module's text. About five minutes on two cores."""
    configs = len(sweep.step_sizes) * sweep.num_seeds
    size = f"{len(sweep.step_sizes)} step sizes x {sweep.num_seeds} seeds, n = {sweep.nodes}, K = {sweep.num_rounds}"
    report = Report("sweep/", f"PrivSGP-VR on digits, {size}, {jax.local_device_count()} devices")
    grid = _arguments(sweep, sweep.step_sizes, range(sweep.num_seeds))
    prepared = prepare(parse(EXPERIMENT, grid)[0].rows).cases.items()
    cases = {name: case._replace(privacy=None) for name, case in prepared}  # which the rival does not state
    compiles, rows, running = [], {"sweep": [], "train": []}, {"sweep": [], "train": []}
    for _ in range(sweep.repeats):
        with tempfile.TemporaryDirectory() as folder:
            began, names = time.perf_counter(), []
            listener = partial(_note_compile, names)
            jax.monitoring.register_event_duration_secs_listener(listener)
            seconds = train(cases, run=open_run(folder, {}), quiet=True)["seconds"]
            jax.monitoring.unregister_event_duration_listener(listener)
            rows["sweep"].append(time.perf_counter() - began)
            running["sweep"].append(seconds["run"])
            compiles.append(sum("rounds" in name for name in names))
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            running["train"].append(_train_one_by_one(cases, Path(folder)))
            rows["train"].append(time.perf_counter() - began)
    rival = f"{len(sweep.step_sizes)} programs, {configs} runs one after another"
    report.ratio("speedup_vs_train", np.array(rows["train"]), np.array(rows["sweep"]), f"{rival} over one program")
    report.ratio("rounds_vs_train", np.array(running["train"]), np.array(running["sweep"]), f"rounds alone: {rival}")
    report.median("compiles", np.array(compiles, float), "programs of rounds", "compiled by one sweep")
    for name in rows:
        report.median(f"seconds_{name}", np.array(rows[name]), "s", "compiling, rounds, evaluations, checkpoints")
        report.median(f"rounds_{name}", np.array(running[name]), "s", "rounds alone")
    if sweep.commands:
        whole = _command(grid)
        seeds = range(min(sweep.commands, sweep.num_seeds))
        alone = [_command(_arguments(sweep, sweep.step_sizes[:1], [seed])) for seed in seeds]
        text = f"{configs} fresh processes over one, scaled up from {len(alone)}, no kept programs"
        report.ratio("speedup_vs_commands", configs * np.array(alone), np.array([whole]), text)
        report.median("seconds_command", np.array(alone), "s", "one configuration in a fresh process")
    return report.measurements


def _arguments(sweep: Sweep, step_sizes: Sequence[float], seeds: Sequence[int]) -> list[str]:
    """The command line of experiments.privsgp_vr that asks for these lanes."""
    options = {"iterations": sweep.num_rounds, "evaluate-every": max(1, sweep.num_rounds // 2), "nodes": sweep.nodes}
    options |= {"noise-std": NOISE_STD, "target-epsilon": "inf"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    grid = ["--grid", "method=PrivSGP-VR", "--grid", f"step_size={','.join(map(str, step_sizes))}"]
    return [*words, *grid, "--seeds", *map(str, seeds)]


def _train_one_by_one(cases: dict[str, Case], folder: Path) -> float:
    """All cases compiled first, then every seed by itself; returns the seconds of the rounds."""
    programs, seconds = {}, 0.0
    for name, case in cases.items():
        algorithm = case.algorithm({name: jnp.float32(value) for name, value in case.numbers.items()})
        key, data = jax.random.key(0), jax.device_put(case.data(0))
        init = jax.jit(partial(first_state, algorithm)).lower(key, data).compile()
        state = jax.eval_shape(partial(first_state, algorithm), key, data)
        rounds = jax.jit(rounds_fn(algorithm, case.rounds_per_call), donate_argnums=1)
        score = test_scores(case.task, case.test).compute
        params = algorithm.node_params
        evaluate = jax.jit(lambda state, test, score=score, params=params: score(params(state), test))
        compiled = rounds.lower(key, state, data, np.int32(0)).compile()
        programs[name] = init, compiled, evaluate.lower(state, case.test).compile()
    for name, case in cases.items():
        init, rounds, evaluate = programs[name]
        for seed in case.seeds:
            key, data = jax.random.key(seed), jax.device_put(case.data(seed))
            directory = PassDirectory(folder / f"{name} {seed}", [(name, seed)], "")
            checkpoints = Checkpoints(directory.path)
            state, infos = init(key, data), []
            for done in range(0, case.num_rounds + 1, case.evaluate_every):
                scores = flatten_scores(jax.device_get(evaluate(state, case.test)))
                directory.append([{"case": name, "seed": seed, "round": done, **scores, **summarize(infos)}])
                if done < case.num_rounds:
                    began = time.perf_counter()
                    state, buffers = jax.block_until_ready(rounds(key, state, data, np.int32(case.evaluate_every)))
                    seconds += time.perf_counter() - began
                    infos = [info_fields(jax.device_get(buffers))]
            checkpoints.save(case.num_rounds, state)
            checkpoints.close()
            directory.finish({(name, seed): {"round": case.num_rounds}})
    return seconds


def _command(arguments: list[str]) -> float:
    """Seconds of one command, to its end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "experiments.privsgp_vr", *arguments, "--quiet", "--out", f"{folder}/run"]
        began = time.perf_counter()
        subprocess.run([*command, "--compilation-cache", "off"], check=True, capture_output=True)
        return time.perf_counter() - began


def _note_compile(names: list[str], event: str, duration_secs: float, **facts: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        names.append(str(facts.get("fun_name", "")))
