"""Looking at what was learned: pictures of runs and of data."""

from jaxfl.on_use import import_on_use

import_on_use(__name__)
