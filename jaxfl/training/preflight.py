"""A run's memory preflight: compiled programs say what they will take, and one that cannot fit is refused unrun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tree
from jax.stages import Compiled

from jaxfl.core import PyTree, Task
from jaxfl.core.check import bytes_text
from jaxfl.core.platform import is_cpu
from jaxfl.core.tree import num_bytes
from jaxfl.gradients import memory

CHECKPOINT_SHARE = 2.5  # of the state, taken while one is written: measured 2.09 to 2.29, the most on busy processors


class PeakMemory(NamedTuple):
    """Bytes on the device at the worst moment of one program."""

    inputs: int  # training data, test set and what is measured on, there all the time
    state: int
    working: int  # temporaries and results of the program that needs most of them, or a checkpoint's copy

    @property
    def total(self) -> int:
        """All of them."""
        return self.inputs + self.state + self.working


def predicted_peak(
    inputs: PyTree,
    state: PyTree,
    init: Compiled,
    programs: Sequence[Compiled],
    *,
    num_copies: int = 1,
    divided: bool = False,
) -> PeakMemory:
    """Predict the peak memory of a program from XLA's numbers for its compiled programs, before they run.

    Args:
        inputs: arrays, or their shapes, that are there all the time.
        state: the state, or its shapes; `init` makes it, and `programs` run while it is there.
        num_copies: devices in one memory that each hold inputs and state and run the programs.
        divided: whether these devices share the state out, in place of holding all of it.

    Returns:
        The prediction. It counts arrays and temporaries alone, and on a CPU a checkpoint. The interpreter, the
        executables, the data set as it was read and scratch memory of a backend's libraries come on top.

    Guarantees:
        - a state that is updated in place counts once.
    """
    held = num_bytes(state) // (num_copies if divided else 1)  # by each of the devices
    first = _working_bytes(init) - held  # its result is the state
    saving = int(CHECKPOINT_SHARE * num_bytes(state)) if is_cpu() else 0
    running = (num_copies * working for working in (first, *map(_working_bytes, programs)))
    return PeakMemory(num_copies * num_bytes(inputs), num_copies * held, max(0, saving, *running))


def _working_bytes(program: Compiled) -> int:
    """Temporaries, and results that are not written over a donated argument."""
    found = program.memory_analysis()
    if found is None:  # a backend that does not tell
        return 0
    return found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes


def require_memory(case: str, peak: PeakMemory, state: PyTree, task: Task) -> None:
    """Raise ArgumentError where state and working memory of a case exceed what is free.

    Args:
        case, state: its name, and the state of one lane or its shapes; the largest leaf is named.
        peak: its prediction, the inputs of which are on the device already.
        task: whose `node_loop` says what there is to choose.
    """
    remedies = ['node_loop "map" or "chunk:k"'] if task.node_loop != "map" else []
    remedies += ["a smaller batch", "fewer nodes", "a factored or bfloat16 gradient table", "a smaller model"]
    path, _ = max(tree.flatten_with_path(state), key=lambda leaf: num_bytes(leaf[1]))
    largest = f", most in {'.'.join(map(str, path))}" if path else ""
    parts = f"{bytes_text(peak.state)} of state{largest}; {bytes_text(peak.working)} to compute and save it"
    memory.require_fits(
        "cases",
        peak.state + peak.working,
        {},
        what=f"{case} ({parts})",
        remedy=f"Take {', '.join(remedies[:-1])} or {remedies[-1]}.",
    )


def peak_text(peaks: dict[str, PeakMemory]) -> str:
    """One line for people: of all cases the largest prediction, and what is free, the inputs counted as free."""
    case, largest = max(peaks.items(), key=lambda item: item[1].total)
    free = bytes_text(memory.available_bytes() + largest.inputs)
    whose = f" ({case})" if len(peaks) > 1 else ""
    return f"predicted peak memory {bytes_text(largest.total)} of {free} free{whose}"
