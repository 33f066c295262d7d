"""Training: cases, a loop for all lanes (a case with one seed) of a sweep, measures, checkpoints, files of a run."""

from jaxfl.on_use import import_on_use

import_on_use(__name__)
