"""`python -m experiments.privsgp_vr`."""

import sys

from experiments.privsgp_vr import EXPERIMENT
from jaxfl.frame import main

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
