"""JAX engine for decentralised and federated learning under limits of privacy, resources and communication."""

from jaxfl.on_use import import_on_use

__version__ = "0.4.0"
import_on_use(__name__)
