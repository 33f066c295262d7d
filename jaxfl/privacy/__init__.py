"""Noise mechanisms, the epsilon that they cost (as published and as proven), and audits of that epsilon."""

from jaxfl.on_use import import_on_use

import_on_use(__name__)
