"""`python -m experiments.dp_gradient_tracking`."""

import sys

from experiments.dp_gradient_tracking import EXPERIMENT
from jaxfl.frame import main

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
