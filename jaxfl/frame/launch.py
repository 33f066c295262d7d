"""Launchers that compute the programs of a grid: their options, and the executors that these describe."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any, ClassVar, Literal

from jaxfl.core import ArgumentError, check
from jaxfl.frame.choose import where
from jaxfl.frame.options import unsaved

_FOREVER = 10 * 365 * 24 * 60  # minutes: submitit ends a local job after two unless it is told otherwise
_MOST = {"jobs": 10_000, "gpus": 1_000}  # no grid has more configurations, and no machine more GPUs
_BOTH = ("local", "slurm")
_SLURM = ("slurm_partition", "slurm_account", "slurm_minutes", "slurm_cpus", "slurm_memory_gb")


@dataclasses.dataclass(frozen=True)
class Launch:
    """Place where the programs of a grid are computed; see docs/clusters.md."""

    COUNTS: ClassVar = (where("launcher", _BOTH, "jobs", "retries", "gpus"), where("launcher", ("slurm",), *_SLURM))
    launcher: Literal["inline", "local", "slurm"] = unsaved("inline")
    """inline: in this process. local: in other processes of this machine. slurm: in jobs of a Slurm cluster. A job
    computes one compiled program, or a share of its configurations."""
    jobs: int = unsaved(4)
    """Largest number of jobs at once."""
    retries: int = unsaved(3)
    """Number of times that a killed or preempted job is submitted again."""
    gpus: int = unsaved(0)
    """GPUs of a job; with 0 it computes on a CPU."""
    slurm_partition: str | None = unsaved(None)
    """Partition of the cluster to which jobs go; by default the cluster's own."""
    slurm_account: str | None = unsaved(None)
    """Account that pays for the jobs; by default the user's own."""
    slurm_minutes: int = unsaved(60)
    """Time limit of a job, in minutes. A job that reaches it saves and is queued again, --retries times at most."""
    slurm_cpus: int = unsaved(4)
    """CPU cores of a job."""
    slurm_memory_gb: float | None = unsaved(None)
    """Memory of a job, in GB; by default the partition's own."""

    @property
    def has_jobs(self) -> bool:
        """True if anything is computed elsewhere than in this process."""
        return self.launcher != "inline"

    def check(self) -> None:
        """Refuse numbers that no job can have, and a launcher that is not installed.

        Raises:
            ArgumentError: submitit is not installed, this is no machine of a Slurm cluster, a number is out of range.
        """
        if not self.has_jobs:
            return
        check.at_least(1, jobs=self.jobs, slurm_minutes=self.slurm_minutes, slurm_cpus=self.slurm_cpus)
        check.at_least(0, retries=self.retries, gpus=self.gpus)
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value > most:
                raise ArgumentError(name, f"must be at most {most:,}", f"got {value:,}", "Ask for fewer.")
        if self.slurm_memory_gb is not None:
            check.positive(slurm_memory_gb=self.slurm_memory_gb)
        _submitit()
        if self.launcher == "slurm" and shutil.which("srun") is None:
            remedy = "Start it on a machine of the cluster, or pass --launcher local."
            raise ArgumentError("launcher", "must find Slurm's commands", "there is no srun on the path", remedy)
        self.gpu_numbers()

    def executor(self, folder: Path, name: str) -> Any:
        """The submitit executor whose jobs keep their logs in a folder.

        Args:
            folder: that all machines of the jobs can reach; made if missing.
            name: of the jobs.
        """
        if self.launcher == "local":
            executor = _submitit().LocalExecutor(folder)
            executor.update_parameters(timeout_min=_FOREVER)
            return executor
        executor = _submitit().AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=self.retries)
        executor.update_parameters(**self.slurm_parameters(name))
        return executor

    def slurm_parameters(self, name: str) -> dict[str, Any]:
        """Parameters of submitit's executor, in its words; what is None is left to the cluster.

        Examples:
            >>> parameters = Launch("slurm", slurm_minutes=90, gpus=1).slurm_parameters("sweep")
            >>> parameters["timeout_min"], parameters["gpus_per_node"], "slurm_partition" in parameters
            (90, 1, False)
        """
        limits = {
            "name": name,
            "timeout_min": self.slurm_minutes,
            "cpus_per_task": self.slurm_cpus,
            "gpus_per_node": self.gpus or None,
            "mem_gb": self.slurm_memory_gb,
            "slurm_partition": self.slurm_partition,
            "slurm_account": self.slurm_account,
        }
        return {key: value for key, value in limits.items() if value is not None}

    def gpu_numbers(self) -> list[int]:
        """Numbers of the GPUs that local jobs share out: those that this process may use, or the first ones.

        Raises:
            ArgumentError: CUDA_VISIBLE_DEVICES does not list enough numbers.
        """
        needed = self.jobs * self.gpus
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        if self.launcher != "local" or listed is None:
            return list(range(needed))
        numbers = [int(word) for word in listed.split(",") if word.strip().isdigit()]
        if len(numbers) < needed:
            requirement = f"must be there for all jobs at once, {needed} together"
            remedy = "Ask for fewer jobs or GPUs, or list numbers in that variable."
            raise ArgumentError("gpus", requirement, f"CUDA_VISIBLE_DEVICES is {listed!r}", remedy)
        return numbers[:needed]


def _submitit() -> Any:
    """The package, which only launchers need."""
    try:
        import submitit
    except ImportError:
        remedy = "Run pip install submitit."
        raise ArgumentError("launcher", "needs submitit", "it is not installed", remedy) from None
    return submitit
