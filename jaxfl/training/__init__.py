"""Training: chunks of rounds, evaluation, checkpoints, and what a run leaves on disk."""

from jaxfl.training.checkpoint import Checkpoints, DamagedCheckpoint
from jaxfl.training.chunks import COSTS, FATAL_COUNTS, Diverged, FatalCount, chunk_fn
from jaxfl.training.evaluate import evaluate_fn, evaluation_set
from jaxfl.training.loop import restore_state, train
from jaxfl.training.records import RunDirectory, open_run, read_run
from jaxfl.training.summary import summary_table

__all__ = [
    "COSTS",
    "FATAL_COUNTS",
    "Checkpoints",
    "DamagedCheckpoint",
    "Diverged",
    "FatalCount",
    "RunDirectory",
    "chunk_fn",
    "evaluate_fn",
    "evaluation_set",
    "open_run",
    "read_run",
    "restore_state",
    "summary_table",
    "train",
]
