"""Releases of a server's clients, and their cost in privacy: samples of a client, and whole clients."""

from jaxfl.on_use import import_on_use

import_on_use(__name__)
