"""Privacy of agents in gradient tracking with noise, and in the methods that it is compared with."""

from jaxfl.on_use import import_on_use

import_on_use(__name__)
