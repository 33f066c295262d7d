"""The command line: python -m experiments.bench SUITE --json FILE [--against LIBRARY]; `all` runs every suite."""

import sys

import tyro

from experiments.bench.suites import SUITES, run
from jaxfl.core import ArgumentError

if __name__ == "__main__":
    lines = [f"{name}: {text}" for name, text in SUITES.items()]
    try:
        tyro.cli(run, description="\n\n".join(["Measure what the engine's formulations gain.", *lines]))
    except ArgumentError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
