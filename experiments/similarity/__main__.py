"""`python -m experiments.similarity`."""

import sys

from experiments.frame import main
from experiments.similarity import EXPERIMENT

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
