"""`python -m experiments.ali_dpfl`."""

import sys

from experiments.ali_dpfl import EXPERIMENT
from jaxfl.frame import main

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
