"""Releases of nodes that exchange parameters after clipped, noisy gradient steps: PrivSGP(-VR), DP2-SGD, A(DP)2SGD."""

from jaxfl.on_use import import_on_use

import_on_use(__name__)
