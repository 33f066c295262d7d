"""`python -m experiments.methods`."""

import sys

from jaxfl.frame import main

from . import EXPERIMENT

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
