"""Common parts of all experiments: records of options, choices by name, presets, grids, one command line."""

from jaxfl.on_use import import_on_use

import_on_use(__name__)
