"""Memory that a program will need: predicted before it runs, refused where it is not there, and told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.stages import Compiled as Executable

from jaxfl.core import PyTree, Task
from jaxfl.core.check import bytes_text
from jaxfl.core.platform import is_cpu
from jaxfl.core.tree import num_bytes
from jaxfl.gradients import memory

CHECKPOINT_SHARE = 3.0  # of the state, needed to write a checkpoint: measured 2.09 to 2.51, the most on busy processors


class PeakMemory(NamedTuple):
    """Bytes on the device at the worst moment of one program."""

    inputs: int  # training data, test set and data of other measures, there all the time
    state: int
    working: int  # temporaries and results of the most demanding program, or a checkpoint's copy

    @property
    def total(self) -> int:
        """All bytes."""
        return self.inputs + self.state + self.working


def predicted_peak(
    inputs: PyTree,
    state: PyTree,
    init: Executable,
    programs: Sequence[Executable],
    *,
    num_copies: int = 1,
    divided: bool = False,
) -> PeakMemory:
    """Predict the peak memory of a program from XLA's numbers for its compiled programs, before they run.

    Args:
        inputs: arrays, or their shapes, that stay on the device all the time.
        state: the state, or its shapes; `init` makes it, and `programs` run while it is there.
        num_copies: devices that share one memory; each holds inputs and state and runs the programs.
        divided: whether each of these devices holds only its share of the state.

    Returns:
        The prediction. It counts arrays and temporaries, and on a CPU a checkpoint's copy. The interpreter, the
        executables, the data set as it was read and scratch memory of a backend's libraries come on top.

    Guarantees:
        - a state that is updated in place counts once.
    """
    held = num_bytes(state) // (num_copies if divided else 1)  # by each of the devices
    first = _working_bytes(init) - held  # without its result, the state
    saving = int(CHECKPOINT_SHARE * num_bytes(state)) if is_cpu() else 0
    running = (num_copies * working for working in (first, *map(_working_bytes, programs)))
    return PeakMemory(num_copies * num_bytes(inputs), num_copies * held, max(0, saving, *running))


def _working_bytes(program: Executable) -> int:
    """Temporaries, and results that are not written over a donated argument."""
    analysis = program.memory_analysis()
    if analysis is None:  # a backend that does not report it
        return 0
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes


def require_memory(case: str, peak: PeakMemory, state: PyTree, task: Task) -> None:
    """Raise ArgumentError where state and working memory of a case exceed what is free.

    Args:
        case, state: its name, and the state of one lane or its shapes; the largest leaf is named.
        peak: the predicted memory; its inputs are on the device already.
        task: its `node_loop` decides which remedies the error names.
    """
    remedies = ['node_loop "map" or "chunk:k"'] if task.node_loop != "map" else []
    remedies += ["a smaller batch", "fewer nodes", "a factored or bfloat16 gradient table", "a smaller model"]
    path, _ = max(jax.tree_util.tree_leaves_with_path(state), key=lambda leaf: num_bytes(leaf[1]))
    largest = f", most in {jax.tree_util.keystr(path, simple=True, separator='.')}" if path else ""
    parts = f"{bytes_text(peak.state)} of state{largest}; {bytes_text(peak.working)} to compute and save it"
    memory.require_fits(
        "cases",
        peak.state + peak.working,
        {},
        what=f"{case} ({parts})",
        remedy=f"Take {', '.join(remedies[:-1])} or {remedies[-1]}.",
    )


def peak_text(peaks: dict[str, PeakMemory]) -> str:
    """One line for the screen: the largest prediction of all cases, in bytes that are held now and bytes to come.

    On a CPU the process's own memory counts: what it has loaded and compiled is most of the peak of a small run.
    """
    case, largest = max(peaks.items(), key=lambda item: item[1].total)
    held, more = max(largest.inputs, memory.resident_bytes()), largest.state + largest.working
    free = bytes_text(memory.available_bytes())
    whose = f" ({case})" if len(peaks) > 1 else ""
    parts = f"{bytes_text(held)} held, {bytes_text(more)} more of {free} free"
    return f"predicted peak memory {bytes_text(held + more)}: {parts}{whose}"
