"""What the constructors of the registry refuse, row by row."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import problem, uneven_data, with_clients

from jaxfl import ArgumentError, graphs
from jaxfl.algorithms import REGISTRY

KEY = jax.random.key(7)
COUNT = "must be an integer of at least 1; got 0"
REFUSED = [  # of every row
    ({"step_size": 0.0}, "step_size: must be positive"),
    ({"step_size": jnp.ones(5)}, r"step_size: must be a single number; got shape \(5,\)"),
    ({"batch_size": 0}, "batch_size: "),
]
PRIVATE_REFUSED = [
    (
        {"noise_scale": np.ones(3)},
        "(state_noise_scale: .* 5 nodes|noise: must be a scalar or hold one number per node)",
    ),
    ({"noise_scale": -1.0}, "(state_noise_scale|noise_std): must be non-negative"),
    ({"clip_norm": 0.0}, "clip_norm: must be positive"),
    ({"batch_size": 5}, "batch_size: "),  # more than the smallest node holds; without privacy it uses all that it has
]
OF_ARGUMENT = {  # where the constructor takes it
    "graph": (graphs.from_matrix(np.eye(2)), "graph: .*strongly connected"),
    "num_active": (0, f"num_active: {COUNT}"),
    "distribution": ("uniform", "distribution: must be one of laplace, gaussian; got 'uniform'"),
    "gradient_at": ("tracker", "gradient_at: must be one of .*; got 'tracker'"),
}
OF_NUMBER = {  # which the example puts into this argument, where the constructor takes it
    "clients": ({"num_local_steps": 0}, f"max_steps: {COUNT}"),
}
CLIENTS = {"num_local_steps": 2, "batch_size": 1, "step_size": 0.1}
CLIENTS_REFUSED = [
    ({"step_size": -1.0}, "step_size: must be positive and finite; got -1.0"),
    ({"momentum": -0.1}, "momentum: must be non-negative"),
    ({"momentum": jnp.ones(3)}, r"momentum: must be a single number; got shape \(3,\)"),
    ({"weight_decay": -0.1}, "weight_decay: must be non-negative"),
    ({"weight_decay": jnp.ones(2)}, r"weight_decay: must be a single number; got shape \(2,\)"),
    ({"weighting": "size"}, "weighting: must be one of data, uniform; got 'size'"),
]


@pytest.mark.parametrize(("changes", "message"), CLIENTS_REFUSED)
def test_what_clients_refuse(changes, message):
    """Before any algorithm has them."""
    with_clients(**CLIENTS)
    with pytest.raises(ArgumentError, match=f"^{message}"):
        with_clients(**{**CLIENTS, **changes})


@pytest.mark.parametrize("name", REGISTRY)
def test_what_a_constructor_refuses(name):
    p = problem(name)
    taken = inspect.signature(p.row.constructor).parameters
    of_arguments = [({key: value}, text) for key, (value, text) in OF_ARGUMENT.items() if key in taken]
    of_numbers = [refused for key, refused in OF_NUMBER.items() if key in taken]
    private = PRIVATE_REFUSED if p.row.noise_draws else []
    for changes, message in [*REFUSED, *private, *of_arguments, *of_numbers, *p.example.refused]:
        with pytest.raises(ArgumentError, match=f"^{message}"):
            p.algorithm(**changes).init(KEY, p.data)


@pytest.mark.parametrize("name", REGISTRY)
def test_an_algorithm_of_five_nodes_does_not_run_on_two(name):
    """Unless nothing in it counts nodes: then it is one of two."""
    algorithm = problem(name).algorithm()
    try:
        models = algorithm.node_params(algorithm.init(KEY, uneven_data(sizes=(3, 4))))
        outcome = f"{len(jax.tree.leaves(models)[0])} models"
    except ArgumentError as refusal:
        outcome = str(refusal)
    assert re.match("(data|client_class|num_active): .* 2|[12] models", outcome)
