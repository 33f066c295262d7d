"""Counts of a round in programs that are compiled for an H200 and for a TPU v5e, on a machine without either.

A row is training's own chunk (`jaxfl.training.chunks.rounds_fn`, its state donated) as the chip's compiler makes it.
Nothing runs: there are counts and no times. All but the temporaries are those of the loop's body, which is a round.

| row | a round |
|---|---|
| privsgp_vr_16, _64, _1024 | PrivSGP-VR of as many nodes, 784-32-10, batch 32, clipped, noise, a factored table |
| privsgp_64, _1024 | the same without a table |
| fed_avg_64, ali_dpfl_64 | three local steps of DP-SGD, and ALI-DPFL with private constants, of the same network |

| number | what it is |
|---|---|
| kernels | fusions, library calls and copies: launches of a GPU, steps of a TPU |
| calls, copies | kernels of libraries; kernels that only move an array |
| loops, branches | loops without a known length, and conditionals: a GPU's host waits for the device at each |
| bytes | read and written by kernels; of arrays that are sliced or updated in place, the slices and updates |
| temporaries | memory of the chunk beside its arguments and results |

A loop without a known length counts one step, and a conditional its dearest branch. 1,024 nodes are compiled for the
H200 only: the TPU's compiler takes longer than five minutes. Needed are the wheels that `CHIPS` names, in versions that
belong to JAX's (for 0.10.2: jax-cuda13 0.10.2, nvidia 13.0, libtpu 0.0.42.1), by `pip install --no-deps`, and
`JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1`: else JAX looks for the chips and for cuDNN.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies

from experiments.bench import dp_clients, peers
from experiments.bench.card_boxes import private_push_sum
from experiments.bench.setting import KEY, Setting, perceptron, random_data
from experiments.bench.timing import Measurement, Report
from jaxfl.core import Algorithm
from jaxfl.core.platform import tracing_for
from jaxfl.training.chunks import check_start, rounds_fn

CUDA = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-nvjitlink")
CHIPS = {  # name -> (platform of the traced form, wheels, arguments of `get_topology_desc`)
    "h200": ("gpu", (*CUDA, "nvidia-cuda-runtime", "nvidia-cuda-nvrtc"), {"platform": "cuda", "topology": "1x1x1"}),
    "v5e": ("tpu", ("libtpu",), {"platform": "tpu", "topology_name": "v5e:2x2"}),
}
NODES = Setting(perceptron(784, 32, 10), 64, samples=100, rounds=50, num_local_steps=3)
Row = tuple[Callable[[Setting], Algorithm], Setting]
ROWS: dict[str, Row] = {
    **{f"privsgp_vr_{n}": (partial(private_push_sum, table=True), NODES._replace(num_nodes=n)) for n in (16, 64, 1024)},
    **{f"privsgp_{n}": (partial(private_push_sum, table=False), NODES._replace(num_nodes=n)) for n in (64, 1024)},
    "fed_avg_64": (lambda setting: dp_clients.averaged(setting, **peers.dp_sgd(setting)), NODES),
    "ali_dpfl_64": (partial(dp_clients.adaptive, is_private=True), NODES),
}
BOUNDED = ("h200_{}_kernels", "h200_{}_bytes", "h200_{}_loops", "v5e_{}_kernels", "v5e_{}_bytes")
AT_MOST = {  # as counted, and 2 % more
    "privsgp_vr_16": (36, 31, 0, 137, 92),
    "privsgp_vr_64": (38, 118, 0, 159, 394),
    "privsgp_vr_1024": (39, 1880, 0),
    "privsgp_64": (35, 93, 0, 99, 279),
    "privsgp_1024": (35, 1485, 0),
    "fed_avg_64": (130, 234, 0, 304, 688),
    "ali_dpfl_64": (209, 594, 1, 415, 934),  # the device knows how many steps a round has
}
WANTED = {
    f"programs/{name.format(row)}": float(most)
    for row, bounds in AT_MOST.items()
    for name, most in zip(BOUNDED, bounds, strict=False)
}

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "iota"}
MOVES = {"copy", "copy-done", "slice-done", "reshape", "transpose"}
SLICES, UPDATES = {"slice", "dynamic-slice", "gather"}, {"dynamic-update-slice", "scatter"}
_COMPUTATION = re.compile(r"(?:ENTRY )?%(\S+) \(.*\{$")
_LINE = re.compile(r"\s+(ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][a-z\d\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)[a-z\d]*\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Line(NamedTuple):
    """An instruction of a compiled program."""

    name: str
    opcode: str
    elements: int  # of the result
    size: int  # its bytes
    operands: list[str]
    text: str  # behind the opcode
    is_root: bool

    def called(self, attribute: str) -> list[str]:
        """Names of computations that an attribute lists."""
        listed = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[\w.\-]+)", self.text)
        return re.findall(r"%([\w.\-]+)", listed[1]) if listed else []


Program = dict[str, dict[str, Line]]


def sizes_of(shape: str) -> tuple[int, int]:
    """Elements and bytes of the arrays in the text of a shape.

    Examples:
        >>> sizes_of("(f32[2,3]{1,0:T(8,128)}, /*index=1*/bf16[5]{0}, pred[])")
        (12, 35)
    """
    arrays = [
        (prod(map(int, filter(None, sizes.split(",")))), 8 if kind == "pred" else int(bits or 0))
        for kind, bits, sizes in _ARRAY.findall(shape)
    ]
    return sum(count for count, _ in arrays), sum(count * bits for count, bits in arrays) // 8


def read_program(text: str) -> Program:
    """Computation -> its instructions by name, of the text of a compiled program."""
    program: Program = {}
    held: dict[str, Line] = {}
    for text_line in text.splitlines():
        if opened := _COMPUTATION.match(text_line):
            program[opened[1]] = held = {}
        elif parsed := _LINE.match(text_line):
            root, name, shape, opcode, rest = parsed.groups()
            operands = re.findall(r"%([\w.\-]+)", rest.partition("), ")[0])
            held[name] = Line(name, opcode, *sizes_of(shape), operands, rest, bool(root))
    return program


def count_round(program: Program, rounds: int) -> Counter[str]:
    """Counts of a round: of the body of the loop that runs so often."""
    loops = [line for lines in program.values() for line in lines.values() if line.opcode == "while"]
    (body,) = {line.called("body")[0] for line in loops if _trips(program, line) == rounds}
    return _count(program, body)


def _trips(program: Program, loop: Line) -> int | None:
    """The known length of a loop; a TPU's program has it as the number that the loop's test compares with."""
    if known := _TRIPS.search(loop.text):
        return int(known[1])
    test = program[loop.called("condition")[0]]
    (root,) = (line for line in test.values() if line.is_root)
    ends = [test[name].text for name in root.operands if test[name].opcode == "constant"]
    return int(ends[0].partition(")")[0]) if ends and root.opcode == "compare" else None


def _count(program: Program, name: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for line in program[name].values():
        total.update(_count_line(program, program[name], line))
    return total


def _count_line(program: Program, lines: dict[str, Line], line: Line) -> Counter[str]:
    if line.opcode == "while":
        body, trips = _count(program, line.called("body")[0]), _trips(program, line)
        if trips is not None:
            return Counter({key: trips * value for key, value in body.items()})
        return body + _count(program, line.called("condition")[0]) + Counter(loops=1)
    if line.opcode == "conditional":
        attributes = ("branch_computations", "true_computation", "false_computation")
        branches = [_count(program, part) for kind in attributes for part in line.called(kind)]
        return max(branches, key=lambda branch: branch["kernels"]) + Counter(branches=1)
    if line.opcode in ("call", "async-start"):
        return _count(program, (line.called("to_apply") + line.called("calls"))[0])
    if line.opcode in MOVES:
        return Counter(kernels=1, copies=1, bytes=2 * line.size)
    is_call, is_fusion = line.opcode == "custom-call", line.opcode == "fusion"
    # A single number is computed beside the kernels, and a custom call to "ConcatBitcast" only names its operands.
    is_free = line.opcode in FREE or line.opcode.endswith(("-start", "-done")) or "Bitcast" in line.text
    if is_free or (line.elements == 1 and not is_call and not is_fusion):
        return Counter()
    moved, is_copy = line.size + sum(lines[operand].size for operand in line.operands), False
    if is_fusion:
        body = program[line.called("calls")[0]]
        share = _shares(body)
        moved = sum(int(part.size * share[part.name]) for part in body.values() if part.opcode == "parameter")
        moved += sum(_written(body, part) for part in body.values() if part.is_root)
        is_copy = {part.opcode for part in body.values()} - FREE <= MOVES
    return Counter(kernels=1, calls=int(is_call and "triton" not in line.text), copies=int(is_copy), bytes=moved)


def _shares(body: dict[str, Line]) -> dict[str, float]:
    """Share of each array of a fusion that is read: less than 1 where only slices go on."""
    share = {line.name: float(line.is_root) for line in body.values()}
    for user in reversed(body.values()):  # whose own users stand behind it
        for place, name in enumerate(dict.fromkeys(user.operands)):
            part = share[user.name]
            if place == 0 and user.opcode in SLICES:
                part = user.elements / body[name].elements
            elif place == 0 and user.opcode in UPDATES:
                part = 0.0
            share[name] = min(1.0, share[name] + part)
    return share


def _written(body: dict[str, Line], line: Line) -> int:
    """Bytes that a fusion writes for one of its results."""
    if line.opcode in ("tuple", "bitcast"):
        return sum(_written(body, body[operand]) for operand in line.operands)
    if line.opcode == "dynamic-update-slice":
        return body[line.operands[1]].size
    if line.opcode == "scatter":
        return sum(body[operand].size for operand in line.operands[len(line.operands) // 2 + 1 :])
    return line.size


def missing() -> str | None:
    """Say in a sentence why no program can be compiled for the chips here; None where it can."""
    for wheel in (wheel for _, wheels, _ in CHIPS.values() for wheel in wheels):
        try:
            found = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            return f"counting programs of an H200 and a TPU v5e needs {wheel}, which is not installed"
        if wheel.startswith("jax-") and found != jax.__version__:
            return f"counting programs of an H200 and a TPU v5e needs {wheel} {jax.__version__}; {found} is installed"
    return None


def compile_chunk(chip: str, row: Row) -> jax.stages.Compiled:
    """Compile a row's chunk for a chip."""
    platform, _, arguments = CHIPS[chip]
    if platform == "gpu":
        arguments = {**arguments, "target_config": Path(__file__).with_name("h200.txtpb").read_text()}
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu asks the cloud for its chips
    device = jax.sharding.SingleDeviceSharding(topologies.get_topology_desc(**arguments).devices[0])
    build, setting = row
    with tracing_for(platform):
        algorithm, data = build(setting), random_data(setting)
        given = KEY, check_start(algorithm, KEY, data), data, np.int32(setting.rounds)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), given)
        return jax.jit(rounds_fn(algorithm, setting.rounds), donate_argnums=1).lower(*shapes).compile()


def suite(rows: dict[str, Row] = ROWS) -> dict[str, Measurement]:
    """Measure; see the module's text. About five minutes on two cores."""
    report = Report("programs/", "")
    for chip in CHIPS:
        for name, row in rows.items():
            if chip == "v5e" and row[1].num_nodes > 64:
                continue
            compiled = compile_chunk(chip, row)
            counts = count_round(read_program(compiled.as_text() or ""), row[1].rounds)
            memory = compiled.memory_analysis()
            of = report.on(f"{row[1].layers()}; compiled for a {chip} without one, jax {jax.__version__}")
            for number in ("kernels", "calls", "copies", "loops", "branches"):
                of.median(f"{chip}_{name}_{number}", counts[number], "a round")
            of.median(f"{chip}_{name}_bytes", counts["bytes"] / 1e6, "MB/round")
            assert memory is not None
            of.median(f"{chip}_{name}_temporaries", memory.temp_size_in_bytes / 1e6, "MB")
    return report.measurements
