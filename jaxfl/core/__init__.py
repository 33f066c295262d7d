"""Building blocks that all other packages use: tasks, data, algorithms, keys, trees, checks."""

from jaxfl.on_use import import_on_use

import_on_use(__name__)
