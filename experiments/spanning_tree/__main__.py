"""`python -m experiments.spanning_tree`."""

import sys

from experiments.frame import main
from experiments.spanning_tree import EXPERIMENT

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
