"""`python -m experiments.privsgp_vr`."""

import sys

from experiments.frame import main
from experiments.privsgp_vr import EXPERIMENT

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
