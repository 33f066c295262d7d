"""Benchmarks: what the engine gains, each ratio inside one process; see `python -m experiments.bench --help`."""
