"""`python -m experiments.spanning_tree`."""

import sys

from experiments.spanning_tree import EXPERIMENT
from jaxfl.frame import main

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
