"""Options of a run that several processes train together, and how a process joins the others."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import jax

from jaxfl.core import ArgumentError, check
from jaxfl.frame.options import unsaved
from jaxfl.frame.partners import HEARTBEAT_SECONDS, tell_of_partners
from jaxfl.training.processes import is_first, of_another_process

PLACE = ("coordinator", "num_processes", "process_id")


@dataclasses.dataclass(frozen=True)
class Distributed:
    """Processes that train together; see docs/devices.md."""

    distributed: bool = unsaved(False)
    """Train in several processes: start each with this same command. They share all their devices, and process 0
    writes. Slurm, MPI and TPU pods tell JAX which process is which; elsewhere pass --coordinator, --num-processes and
    --process-id."""
    coordinator: str | None = unsaved(None)
    """HOST:PORT on which process 0 waits for the others."""
    num_processes: int | None = unsaved(None)
    """Number of processes of the run."""
    process_id: int | None = unsaved(None)
    """Number of this process, from 0."""

    def check_place(self) -> None:
        """Refuse some of the three options that place a process without the others, and numbers out of range.

        Raises:
            ArgumentError: naming the option.
        """
        given = [name for name in PLACE if getattr(self, name) is not None]
        if given and len(given) < len(PLACE):
            missing = next(name for name in PLACE if name not in given)
            remedy = "Give all three, or none where Slurm, MPI or a TPU pod starts the processes."
            raise ArgumentError(missing, f"belongs to {' and '.join(given)}", "it is missing", remedy)
        if self.coordinator is None or self.num_processes is None or self.process_id is None:
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16:
            remedy = "Write e.g. --coordinator localhost:12345."
            raise ArgumentError("coordinator", "must be HOST:PORT", f"got {self.coordinator!r}", remedy)
        check.at_least(1, num_processes=self.num_processes)
        if not 0 <= self.process_id < self.num_processes:
            requirement, found = f"must lie in [0, {self.num_processes})", f"got {self.process_id}"
            raise ArgumentError("process_id", requirement, found, "Number the processes from 0.")

    def join(self) -> None:
        """Meet the other processes, before JAX computes anything. If one dies later, standard error says so in a line.

        Raises:
            ArgumentError: the number of this process is unknown, or the others do not come.
        """
        self.check_place()
        try:
            place = self.coordinator, self.num_processes, self.process_id
            jax.distributed.initialize(*place, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
        except (ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            remedy = "Start all processes, by srun or mpirun, or with --coordinator, --num-processes and --process-id."
            raise ArgumentError("distributed", "needs the other processes", reason, remedy) from None
        tell_of_partners()


@contextlib.contextmanager
def silent_but_first() -> Iterator[None]:
    """Only process 0 writes to standard output."""
    if is_first():
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nothing, contextlib.redirect_stdout(nothing):
        yield


def tells(error: BaseException) -> bool:
    """True if this process prints an error that ends it: its own; of an error that all have, only process 0's."""
    elsewhere = of_another_process(error)
    if elsewhere is not None:
        return not elsewhere
    return is_first() or isinstance(error, MemoryError | OSError | jax.errors.JaxRuntimeError)
