"""`python -m experiments.embracing_fl`."""

import sys

from experiments.embracing_fl import EXPERIMENT
from jaxfl.frame import main

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
