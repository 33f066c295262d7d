"""The algorithms, one file each."""

from jaxfl.on_use import import_on_use

import_on_use(__name__)
