"""Does a run keep the epsilon that it claims? An attack on canaries in one training run bounds epsilon from below.

    python -m experiments.audit                                # digits, 5 nodes: both methods keep what they claim
    python -m experiments.audit --noise-error 4                # a quarter of the noise that is claimed: caught
    python -m experiments.audit --no-clipping                  # gradients that are not clipped: caught
    python -m experiments.audit --grid noise_error=1,2,4,8     # how large a mistake has to be

A quarter of a minute on two cores. Calibrates each line's noise to `target_epsilon` by the proven bound, runs it on
real samples and canaries, guesses from its messages which canaries took part, prints one table, and leaves
summary.json, results.csv and a picture in the run directory. Exit code 0 when no lower bound exceeds the claim, else 1.

Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023, arXiv:2305.08846. Differences from
the paper: canaries are gradients of one coordinate each, on few real samples and in few rounds at a high sampling rate,
where what is proven is nearly what an attack can see.
"""

from experiments.audit.attack import run
from experiments.audit.options import Point
from experiments.frame import Experiment

EXPERIMENT = Experiment(
    name="audit",
    description="An empirical lower bound on epsilon by canaries in one training run, held against what is claimed.",
    base=Point(),
    grid=({"method": ("PrivSGP", "PrivSGP-VR")},),
    labels={"method": "{}"},
    aliases={"batch_size": "sampling_rate", "num_canaries": "canaries", "noise_std": "noise_error"},
    run=run,
)
