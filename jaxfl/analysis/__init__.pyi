from jaxfl.analysis.plots import plot_run as plot_run
