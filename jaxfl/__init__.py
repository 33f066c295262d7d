"""JAX engine for decentralised and federated learning under limits of privacy, resources and communication."""
