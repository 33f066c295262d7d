"""Training: cases, a loop for all lanes (a case with one seed) of a sweep, measures, checkpoints, files of a run."""

from jaxfl.core.info import FatalCount
from jaxfl.training.case import Case, EvaluationSet, Measure
from jaxfl.training.chunks import Diverged
from jaxfl.training.final_params import load_params
from jaxfl.training.hooks import Evaluation, early_stop, profile, tracker
from jaxfl.training.loop import train
from jaxfl.training.measures import calibrated_scores, evaluation_set, own_scores, stationarity, test_scores
from jaxfl.training.passes import divide_run
from jaxfl.training.publish import publish, restore_state, secret_key
from jaxfl.training.run_directory import RunDirectory, open_run, read_run
from jaxfl.training.sharding import Placement
from jaxfl.training.signals import Stop, Stopped, stop_at_sigterm
from jaxfl.training.summary import read_results, summary_table

__all__ = [
    "Case",
    "Diverged",
    "Evaluation",
    "EvaluationSet",
    "FatalCount",
    "Measure",
    "Placement",
    "RunDirectory",
    "Stop",
    "Stopped",
    "calibrated_scores",
    "divide_run",
    "early_stop",
    "evaluation_set",
    "load_params",
    "open_run",
    "own_scores",
    "profile",
    "publish",
    "read_results",
    "read_run",
    "restore_state",
    "secret_key",
    "stationarity",
    "stop_at_sigterm",
    "summary_table",
    "test_scores",
    "tracker",
    "train",
]
