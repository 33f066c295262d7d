"""`python -m experiments.embracing_fl`."""

import sys

from experiments.embracing_fl import EXPERIMENT
from experiments.frame import main

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
