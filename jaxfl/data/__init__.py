"""Data on the host: named data sets, partitions over nodes, and the pool of samples that algorithms take."""

from jaxfl.on_use import import_on_use

import_on_use(__name__)
