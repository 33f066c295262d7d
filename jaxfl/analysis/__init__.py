"""Looking at what was learned: pictures of runs and of data."""

from jaxfl.analysis.plots import plot_run

__all__ = ["plot_run"]
