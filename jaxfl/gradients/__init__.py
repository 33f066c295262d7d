"""Gradients of every node: mini-batch means, clipped or not, SAGA tables, and differences of losses."""

from jaxfl.on_use import import_on_use

import_on_use(__name__)
