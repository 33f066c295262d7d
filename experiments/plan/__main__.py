"""`python -m experiments.plan`."""

import sys
from collections.abc import Sequence

from jaxfl.frame import main

from .request import PLAN, arguments_of


def run(argv: Sequence[str] | None = None) -> int:
    """Plan for the file that the first word names; returns the exit code."""
    return main(PLAN, arguments_of(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(run())
