"""`python -m experiments.dzofl`."""

import sys

from experiments.dzofl import EXPERIMENT
from jaxfl.frame import main

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
