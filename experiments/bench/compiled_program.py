"""Counts of a compiled GPU program, read from its text: kernels, waits of the host, bytes moved, library calls, copies.

The text is that of a compiled and scheduled module (`compiled.as_text()`). Its instructions outside of fusions run one
after the other, and are counted by these rules:

| instruction | counts as |
|---|---|
| fusion, copy, memset, library call | one kernel; a copy and a memset may be a transfer of the device instead |
| parameter, constant, tuple, bitcast | nothing |
| loop of a known length | its body, as often as it runs |
| loop of another length | body and condition as often as told, and a wait of the host for each look at the condition |
| branches in a loop | a wait of the host, and of each number the most (or the least) that a branch has |
| branches outside of loops | a wait of the host, and the branch with the fewest waits: that of a full chunk |
| call into Python | a kernel and a wait of the host |

Loops and branches are counted as XLA runs them by default, outside of command buffers. Bytes are those of the arrays
that a kernel reads and writes, once each, as if no cache held them. For an array that it only slices or gathers from,
the slices count; for an array that it updates in place, the updates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

FREE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"})
SLICING = frozenset({"slice", "dynamic-slice", "gather"})
UPDATING = frozenset({"dynamic-update-slice", "scatter"})  # their first operands are updated in place
COPYING = frozenset({"copy", "copy-start"})

_COMPUTATION = re.compile(r"(ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][a-z\d\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)[a-z\d]*\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_WORKSPACE = re.compile(r", [su]8\[\d*\](\{0\})?\)$")  # of a library call, which need not touch all of it
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


class Counts(NamedTuple):
    """Counts of one execution of a program."""

    kernels: int = 0  # launched, copies and memsets among them
    host_waits: int = 0  # of the host for a number on the device, by which it goes on
    bytes_moved: int = 0  # read and written by kernels
    library_calls: int = 0  # kernels of cuBLAS, cuDNN and others
    large_copies: int = 0  # of an array of at least as many bytes as told

    def plus(self, other: Counts) -> Counts:
        return Counts(*(mine + more for mine, more in zip(self, other, strict=True)))

    def times(self, trips: int) -> Counts:
        return Counts(*(trips * count for count in self))


class Instruction(NamedTuple):
    """A line of a computation."""

    name: str
    opcode: str
    num_bytes: int  # of the result, all arrays of a tuple together
    operands: tuple[str, ...]
    text: str  # of operands and attributes

    def computations(self, attribute: str) -> tuple[str, ...]:
        """Names of the computations that an attribute lists; empty without it."""
        listed = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[\w.\-]+)", self.text)
        return tuple(_NAME.findall(listed.group(1))) if listed else ()


class Computation(NamedTuple):
    """Instructions in the order in which they run."""

    instructions: dict[str, Instruction]
    root: str

    def users(self, name: str) -> list[Instruction]:
        return [instruction for instruction in self.instructions.values() if name in instruction.operands]


class Program(NamedTuple):
    """The computations of a module by name."""

    computations: dict[str, Computation]
    entry: str


def num_bytes(shape: str) -> int:
    """Number of bytes of all arrays in the text of a shape; what is no array has none.

    Example:
        >>> num_bytes("(f32[2,3]{1,0}, /*index=1*/bf16[5]{0}, pred[])")
        35
    """
    bits = 0
    for kind, width, sizes in _ARRAY.findall(shape):
        count = math.prod(int(size) for size in sizes.split(",") if size)
        bits += count * (8 if kind == "pred" else int(width or 0))
    return bits // 8


def read_program(text: str) -> Program:
    """Parse the text of a compiled module."""
    computations: dict[str, Computation] = {}
    entry = name = root = ""
    held: dict[str, Instruction] = {}
    for line in text.splitlines():
        if opened := _COMPUTATION.match(line):
            name, held = opened.group(2), {}
            entry = name if opened.group(1) else entry
        elif line == "}":
            computations[name] = Computation(held, root)
        elif parsed := _INSTRUCTION.match(line):
            is_root, label, shape, opcode, rest = parsed.groups()
            operands = tuple(_NAME.findall(rest[: _closing(rest)]))
            results = _WORKSPACE.sub(")", shape) if opcode == "custom-call" else shape
            held[label] = Instruction(label, opcode, num_bytes(results), operands, rest)
            root = label if is_root else root
    return Program(computations, entry)


def count(program: Program, *, open_trips: int, large_bytes: int, of_branches: Callable[..., int] = max) -> Counts:
    """Count what the program does in one run.

    Args:
        program: of `read_program`.
        open_trips: how often an outermost loop runs whose length is not known; one inside of another runs once. Where
            an outermost loop is made of a loop of just this length, a whole chunk, it runs once and the others never.
        large_bytes: from how many bytes on a copy is large.
        of_branches: `max` or `min`, by which a number of branches in a loop is made of theirs.

    Returns:
        The counts.

    Guarantees:
        - a loop of a known length makes its kernels as often as it runs, and no host wait.
        - a loop of another length waits once more than it runs.
        - a whole chunk in a loop around it counts once, and the loop over the rounds of a part of one not at all.
        - of branches in a loop the most expensive one counts, and one host wait.
        - of branches outside of loops the one with the fewest host waits counts, and one host wait.
        - an array that is updated in place counts by its updates, one that is sliced by its slices.
    """

    def is_chunk(instruction: Instruction) -> bool:
        if instruction.opcode != "while" or _TRIPS.search(instruction.text):
            return False
        inner = program.computations[instruction.computations("body")[0]].instructions.values()
        lengths = [_TRIPS.search(loop.text) for loop in inner if loop.opcode == "while"]
        return any(length is not None and int(length.group(1)) == open_trips for length in lengths)

    has_chunk = any(map(is_chunk, program.computations[program.entry].instructions.values()))

    def of_computation(name: str, in_loop: bool) -> Counts:
        total = Counts()
        for instruction in program.computations[name].instructions.values():
            total = total.plus(of_instruction(name, instruction, in_loop))
        return total

    def of_instruction(name: str, instruction: Instruction, in_loop: bool) -> Counts:
        if instruction.opcode in FREE or instruction.opcode.endswith("-done"):
            return Counts()
        if instruction.opcode == "while":
            once = in_loop or is_chunk(instruction)
            return of_loop(instruction, 1 if once else 0 if has_chunk else open_trips)
        if instruction.opcode == "conditional":
            attributes = ("branch_computations", "true_computation", "false_computation")
            branches = [of_computation(part, in_loop) for kind in attributes for part in instruction.computations(kind)]
            fewest = min(branches, key=lambda branch: (branch.host_waits, -branch.kernels))
            chosen = Counts(*map(of_branches, zip(*branches, strict=True))) if in_loop else fewest
            return Counts(host_waits=1).plus(chosen)
        if instruction.opcode in ("call", "async-start"):
            called = "to_apply" if instruction.opcode == "call" else "calls"
            return of_computation(instruction.computations(called)[0], in_loop)
        return of_kernel(program, program.computations[name], instruction, large_bytes)

    def of_loop(instruction: Instruction, trips: int) -> Counts:
        body, condition = (of_computation(instruction.computations(kind)[0], True) for kind in ("body", "condition"))
        if known := _TRIPS.search(instruction.text):
            return body.times(int(known.group(1)))
        return body.times(trips).plus(condition.plus(Counts(host_waits=1)).times(trips + 1))

    return of_computation(program.entry, False)


def of_kernel(program: Program, own: Computation, instruction: Instruction, large_bytes: int) -> Counts:
    """Counts of an instruction that launches something."""
    operands = [own.instructions[name].num_bytes for name in instruction.operands]
    moved, copied = sum(operands) + instruction.num_bytes, 0
    if instruction.opcode in COPYING:
        moved, copied = 2 * operands[0], operands[0]
    elif instruction.opcode == "fusion":
        body = program.computations[instruction.computations("calls")[0]]
        reads, moved = _reads(body), _written(body, body.root)
        moved += sum(reads)
        if {part.opcode for part in body.instructions.values()} - FREE == {"copy"}:
            copied = instruction.num_bytes
    target = _TARGET.search(instruction.text) if instruction.opcode == "custom-call" else None
    name = target.group(1) if target else ""
    return Counts(
        kernels=1,
        host_waits=int("callback" in name),
        bytes_moved=moved,
        library_calls=int(bool(name) and "triton" not in name and "callback" not in name),
        large_copies=int(copied >= large_bytes),
    )


def _reads(body: Computation) -> list[int]:
    """Bytes that a fusion reads of each parameter."""
    return [_read(body, instruction) for instruction in body.instructions.values() if instruction.opcode == "parameter"]


def _read(body: Computation, instruction: Instruction) -> int:
    """Bytes that a fusion reads of one of its arrays."""
    total, written = 0, _outputs(body)
    for user in body.users(instruction.name):
        only_first = user.operands[0] == instruction.name and user.operands.count(instruction.name) == 1
        if user.opcode == "bitcast" and user.name not in written:
            total += _read(body, user)
        elif user.opcode in SLICING and only_first:
            total += user.num_bytes
        elif not (user.opcode in UPDATING and only_first and user.name in written):
            return instruction.num_bytes
    return min(total, instruction.num_bytes)


def _outputs(body: Computation) -> set[str]:
    """Names of the instructions that a fusion writes, behind tuples and bitcasts."""
    names, waiting = set(), [body.root]
    while waiting:
        instruction = body.instructions[waiting.pop()]
        if instruction.opcode in ("tuple", "bitcast"):
            waiting += instruction.operands
        names.add(instruction.name)
    return names


def _written(body: Computation, name: str) -> int:
    """Bytes that a fusion writes for one of its results."""
    instruction = body.instructions[name]
    if instruction.opcode == "tuple":
        return sum(_written(body, part) for part in instruction.operands)
    if instruction.opcode == "bitcast":
        return _written(body, instruction.operands[0])
    if instruction.opcode in UPDATING:
        updates = (
            instruction.operands[1:2]
            if instruction.opcode == "dynamic-update-slice"
            else instruction.operands[len(instruction.operands) // 2 + 1 :]
        )
        return sum(body.instructions[part].num_bytes for part in updates)
    return instruction.num_bytes


def _closing(text: str) -> int:
    """Position of the parenthesis that closes the one opened before the text."""
    depth = 1
    for place, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return place
    return len(text)
