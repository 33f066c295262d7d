"""`python -m experiments.audit`."""

import sys

from experiments.audit import EXPERIMENT
from jaxfl.frame import main

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
