"""Does a run keep the epsilon that it claims? An audit compares its noise, its signal and an attack with the claim.

    python -m experiments.audit                                # digits, 5 nodes: two methods keep what they claim
    python -m experiments.audit --noise-error 1.25             # less noise than is claimed: refused
    python -m experiments.audit --no-clipping                  # gradients that are not clipped: refused
    python -m experiments.audit --rounds-error 2               # twice the iterations: refused
    python -m experiments.audit --sampling-error 2 --method PrivSGP    # twice the sampling rate: refused
    python -m experiments.audit --method ALI-DPFL              # one client: its local iterations
    python -m experiments.audit --method DP-FedAvg             # a server: whole clients
    python -m experiments.audit --grid noise_error=1,1.25,2,4  # how large a mistake has to be

It takes half a minute on two cores. It calibrates each case's noise to `target_epsilon` by the proven bound, runs it,
and leaves summary.json, results.csv and a picture in the run directory. All methods run on real samples and canaries
(made-up samples; for DP-FedAvg whole clients). Their messages show which canaries took part, how large the noise is,
and how much a sample adds. The tables compare measurements with the claim, and name the smallest error that each check
sees. Exit code 0 when no lower bound exceeds the claim and no check refuses it,
else 1. See docs/audit.md.

Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023, arXiv:2305.08846. Differences from
the paper: canaries are gradients of one coordinate each, on few real samples and in few rounds at a high sampling rate,
where what is proven is nearly what an attack can see.
"""

from jaxfl.frame import Experiment

from .attack import run
from .options import Configuration

EXPERIMENT = Experiment(
    name="audit",
    description="Checks of a run's claimed epsilon, by its noise, its signal and an attack on its messages.",
    base=Configuration(),
    grid=({"method": ("PrivSGP", "PrivSGP-VR")},),
    labels={"method": "{}"},
    aliases={
        "batch_size": "sampling_rate",
        "num_canaries": "canaries",
        "strength": "canary_strength",
        "noise_std": "noise_error",
    },
    run=run,
)
