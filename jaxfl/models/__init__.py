"""Models made of layers, fast with own parameters at every node; most give gradients as factors (`layers`)."""

from jaxfl.on_use import import_on_use

import_on_use(__name__)
