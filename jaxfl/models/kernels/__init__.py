"""Products of layers in the forms that suit a processor, and norms of per-sample gradients, below all layers."""

from jaxfl.on_use import import_on_use

import_on_use(__name__)
