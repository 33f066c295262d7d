"""`python -m experiments.similarity`."""

import sys

from experiments.similarity import EXPERIMENT
from jaxfl.frame import main

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
