"""Counts and memory of rounds on a GPU, read from programs that are compiled for an H200 on a machine without one.

Each row is a chunk of rounds as training runs it (`jaxfl.training.chunks.rounds_fn`, its state donated), compiled for
the device that h200.txtpb describes. Nothing runs: there are counts and no times, and no choice that the compiler makes
by timing. Numbers are of a round: those of the whole chunk over its rounds. They are those of the most expensive branch
wherever a round takes one; the spread says what they are with the cheapest.

| row | a round |
|---|---|
| privsgp_vr, privsgp | 64 nodes, exponential graph, 784-32-10, batch 32, clipped, noise; VR: a factored table |
| resnet20_float32, _bfloat16 | federated averaging of 32 clients, ResNet-20, one step of batch 32, all active |
| embracing_uniform, _stratified | EmbracingFL, ResNet-20, 32 of 128 clients, three classes, ten steps of batch 32 |
| tracking, ali_dpfl, dzofl | of the suites tracking, dp_clients (small CNN, private constants) and zero_order |

| number | what it is (rules: `experiments.bench.compiled_program`) |
|---|---|
| kernels | launches, copies and memsets among them |
| host_waits | of the host for a number that decides how the device goes on |
| bytes | read and written by all kernels |
| library_calls | kernels of cuBLAS, cuDNN and others |
| large_copies | copies of at least as many bytes as the largest array of the state has |
| temporaries, arguments | memory of the compiled chunk; donated arrays count once |

Where the chunk's length is an argument, its loop is counted at full length. A loop inside of it whose length only the
device knows counts one step. Needed are Python 3.12 and `pip install '.[gpu-program]'`; with `JAX_PLATFORMS=cpu`, JAX
does not look for a GPU.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.experimental import topologies

from experiments.bench import dp_clients, embracing, tracking, zero_order
from experiments.bench.compiled_program import Counts, count, read_program
from experiments.bench.setting import KEY, Network, Setting, learner, perceptron, random_data
from experiments.bench.timing import Measurement, Report
from jaxfl import gradients
from jaxfl.algorithms import embracing as embracing_fl
from jaxfl.algorithms import fed_avg, local_steps, output_side
from jaxfl.core import Algorithm
from jaxfl.core.platform import tracing_for
from jaxfl.models import classification, resnet20
from jaxfl.training.chunks import check_start, rounds_fn

TARGET = Path(__file__).with_name("h200.txtpb")
PLUGIN = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
COMPILER = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-runtime", "nvidia-cuda-nvrtc")

RESNET = Network(resnet20(), "ResNet-20", (32, 32, 3))
NODES = Setting(perceptron(784, 32, 10), 64, samples=937, rounds=50)
CLIENTS = Setting(RESNET, 32, samples=390, rounds=10)
CLASSES = Setting(RESNET, 128, samples=390, num_active=32, num_local_steps=10, rounds=10)
SETTINGS = {
    "privsgp_vr": NODES,
    "privsgp": NODES,
    "resnet20_float32": CLIENTS,
    "resnet20_bfloat16": CLIENTS,
    "embracing_uniform": CLASSES,
    "embracing_stratified": CLASSES,
    "tracking": tracking.SETTING,
    "ali_dpfl": dp_clients.SETTINGS["small_cnn"]._replace(rounds=10),
    "dzofl": zero_order.SETTINGS["rows"]._replace(rounds=10),
}

AT_MOST = {
    # A chunk's own ends: whether it is a whole one, whether that is done, and whether rounds of a part are left.
    **{f"gpu_program/{row}_host_waits": 3 / setting.rounds for row, setting in SETTINGS.items()},
    "gpu_program/embracing_uniform_host_waits": 6.3,  # a wave of each class, and that there is no other
    "gpu_program/privsgp_vr_kernels": 70.0,
    "gpu_program/resnet20_float32_bytes": 25.0,
    "gpu_program/resnet20_bfloat16_bytes": 13.0,
    "gpu_program/resnet20_float32_temporaries": 4.0,
    "gpu_program/resnet20_bfloat16_temporaries": 4.0,
    "gpu_program/embracing_uniform_vs_stratified": 1.5,
}
SAMPLINGS = ("uniform", "stratified")


class Chunk(NamedTuple):
    """Counts, memory and compile time of a compiled chunk of rounds."""

    counts: Counts  # of the whole chunk, by the most expensive branches
    least: Counts  # the same, by the cheapest branches
    temp_bytes: int
    argument_bytes: int
    compile_seconds: float


def missing() -> str | None:
    """Why no program can be compiled for a GPU here, in a sentence; None where it can."""
    versions = {}
    for name in ("jaxlib", *PLUGIN, *COMPILER):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{name} is not installed; on Python 3.12 or later, pip install '.[gpu-program]' brings it."
    for name in PLUGIN:
        if versions[name] != versions["jaxlib"]:
            return f"{name} is of version {versions[name]}, which jaxlib {versions['jaxlib']} does not load."
    return None


def push_sum(setting: Setting, *, table: bool) -> Algorithm:
    """PrivSGP, with a factored table PrivSGP-VR."""
    options = {"sampler": gradients.fixed(setting.batch_size), "clip_norm": setting.clip_norm}
    return learner(setting, gradients.saga(**options, table="factored") if table else gradients.mini_batch(**options))


def averaging(setting: Setting, compute_dtype: str) -> Algorithm:
    """Federated averaging of all clients."""
    task = classification(setting.network.model, compute_dtype=compute_dtype)
    return fed_avg(task, clients=_clients(setting), num_active=setting.active())


def layerwise(setting: Setting, *, stratified: bool) -> Algorithm:
    """EmbracingFL of strong, moderate and weak clients, a third each."""
    task, firsts = setting.task(), embracing.FIRST_BLOCKS.values()
    shares = [len(part) for part in np.array_split(np.arange(setting.active()), len(firsts))]
    return embracing_fl(
        task,
        clients=_clients(setting),
        trained_blocks=[output_side(task.blocks, first) for first in firsts],
        client_class=np.sort(np.arange(setting.num_nodes) % len(firsts)),
        num_active=shares if stratified else setting.active(),
    )


def _clients(setting: Setting):
    optimizer = optax.sgd(setting.step_size)
    return local_steps(setting.num_local_steps, batch_size=setting.batch_size, optimizer=optimizer)


ROWS: dict[str, Callable[[Setting], Algorithm]] = {
    "privsgp_vr": lambda setting: push_sum(setting, table=True),
    "privsgp": lambda setting: push_sum(setting, table=False),
    "resnet20_float32": lambda setting: averaging(setting, "float32"),
    "resnet20_bfloat16": lambda setting: averaging(setting, "bfloat16"),
    "embracing_uniform": lambda setting: layerwise(setting, stratified=False),
    "embracing_stratified": lambda setting: layerwise(setting, stratified=True),
    "tracking": lambda setting: tracking.tracking(setting, setting.task(), clip_norm=setting.clip_norm),
    "ali_dpfl": lambda setting: dp_clients.adaptive(setting, True),
    "dzofl": zero_order.learner,
}


def compile_chunk(row: str, setting: Setting) -> Chunk:
    """Compile a row's chunk of `setting.rounds` for the H200, and count."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=TARGET.read_text(),
        topology="1x1x1",  # one device
    )
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])
    start = time.perf_counter()
    with tracing_for("gpu"):
        algorithm, data = ROWS[row](setting), random_data(setting)
        state = check_start(algorithm, KEY, data)
        arguments = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
            (KEY, state, data, np.int32(setting.rounds)),
        )
        lowered = jax.jit(rounds_fn(algorithm, setting.rounds), donate_argnums=1).lower(*arguments)
    compiled = lowered.compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    largest = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    program, limits = read_program(text), {"open_trips": setting.rounds, "large_bytes": largest}
    return Chunk(
        counts=count(program, **limits),
        least=count(program, **limits, of_branches=min),
        temp_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        compile_seconds=time.perf_counter() - start,
    )


def suite(settings: dict[str, Setting] = SETTINGS) -> dict[str, Measurement]:
    """Measure; see the module's text. Half an hour on two cores, most of it ResNets."""
    report = Report("gpu_program/", "")
    for row, setting in settings.items():
        numbers_of(report, row, setting, compile_chunk(row, setting))
    if {"embracing_uniform", "embracing_stratified"} <= set(settings):
        uniform, stratified = (report.measurements[f"gpu_program/embracing_{name}_kernels"] for name in SAMPLINGS)
        extremes = uniform.spread[0] / stratified.spread[1], uniform.spread[1] / stratified.spread[0]
        text, shapes = "kernels of a round", settings["embracing_uniform"].layers()
        report.on(shapes).add("embracing_uniform_vs_stratified", uniform.value / stratified.value, extremes, "x", text)
    return report.measurements


def numbers_of(report: Report, row: str, setting: Setting, chunk: Chunk) -> None:
    """Add a row's numbers to the report."""
    compiler = f"compiled for an H200 without one, jax {jax.__version__}, {setting.rounds} rounds"
    of, rounds = report.on(f"{setting.layers()}; {compiler}"), setting.rounds
    pairs = zip(Counts._fields, chunk.counts, chunk.least, strict=True)
    for name, most, least in pairs:
        label, scale, unit = ("bytes", 1e9, "GB/round") if name == "bytes_moved" else (name, 1, "a round")
        high, low = (number / scale / rounds for number in (most, least))
        of.add(f"{row}_{label}", high, (low, high), unit)
    of.median(f"{row}_temporaries", chunk.temp_bytes / 1e9, "GB")
    of.median(f"{row}_arguments", chunk.argument_bytes / 1e9, "GB")
    of.median(f"compile_{row}", chunk.compile_seconds, "s", "tracing and compiling")
