"""Communication graphs (which node sends to which), and the mixing step x <- P x."""

from jaxfl.on_use import import_on_use

import_on_use(__name__)
