"""What the constructors of the registry refuse, row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import problem, uneven_data

from jaxfl import ArgumentError, graphs
from jaxfl.algorithms import REGISTRY
from jaxfl.gradients import saga

KEY = jax.random.key(7)
UNFIT = {  # row stochastic where columns must sum to 1, column stochastic where both must; no root
    "column": ({"graph": graphs.from_matrix([[0.9, 0.1], [0.2, 0.8]])}, "graph", "column"),
    "doubly": ({"graph": graphs.from_matrix([[0.9, 0.2], [0.1, 0.8]])}, "graph", "doubly|symmetric"),
    "rooted": ({"state_weights": np.eye(5)}, "tracker_weights", "some node must reach all others"),
}


@pytest.mark.parametrize("name", REGISTRY)
def test_what_a_constructor_refuses(name):
    p = problem(name)
    unfit = [UNFIT[p.row.mixing]] if p.row.mixing in UNFIT else []
    if "graph" in p.topology:
        unfit.append(({"graph": graphs.from_matrix(np.eye(2))}, "graph", "strongly connected"))
    if p.row.undirected:
        unfit.append(({"graph": graphs.directed_ring(5)}, "graph", "undirected|symmetric"))
        unfit.append(({"graph": graphs.exponential(5)}, "graph", "same in every round"))
    for topology, argument, message in unfit:
        with pytest.raises(ArgumentError, match=rf"^{argument}: .*({message})"):
            p.algorithm(**topology)
    if p.row.requires_noise:
        with pytest.raises(ArgumentError, match=r"^noise: must be a noise mechanism; got None"):
            p.algorithm(noise_scale=None)
    if p.row.topology == "graph" and not p.row.stateful_gradient and not p.row.schedule:
        with pytest.raises(ArgumentError, match=r"^gradient: must be an estimator without state; .* keeps a SagaState"):
            p.algorithm(saga).init(KEY, p.data)
    with pytest.raises(ArgumentError, match=r"^step_size: must be positive"):
        p.algorithm(step_size=0.0)
    with pytest.raises(ArgumentError, match=r"^step_size: must be a single number; got shape \(5,\)"):
        p.algorithm(step_size=jnp.ones(5))
    if p.row.noise_draws:
        misfit = (
            "state_noise_scale: .* 5 nodes" if p.row.schedule else "noise: must be a scalar or hold one number per node"
        )
        with pytest.raises(ArgumentError, match=rf"^{misfit}"):
            p.algorithm(noise_scale=np.ones(3))
        with pytest.raises(ArgumentError, match=r"^clip_norm: must be positive"):
            p.algorithm(clip_norm=0.0)
    for count in {"num_active", "num_local_steps"} & p.topology.keys():
        with pytest.raises(ArgumentError, match=rf"^{count}: must be an integer of at least 1; got 0"):
            p.algorithm(**{count: 0})
    two_nodes = uneven_data(sizes=(3, 4))
    if p.row.topology == "server":
        misfit = "num_active: .*number of clients in the data; got 3, and the data 2"
        if p.row.classes != "none":
            misfit = "client_class: must hold the class of each client; got 5 for data of 2"
            with pytest.raises(ArgumentError, match=r"^num_active: .*number of clients.*; got 6"):
                p.algorithm(num_active=6)
            with pytest.raises(ArgumentError, match=r"^num_active: .*for each class at most its clients; got \(1, 4\)"):
                p.algorithm(num_active=(1, 4))
            with pytest.raises(ArgumentError, match=r"^client_class: must lie in \[0, 2\); got 2 at position 4"):
                p.algorithm(client_class=[0, 1, 1, 0, 2])
        with pytest.raises(ArgumentError, match=rf"^{misfit}"):
            p.algorithm().init(KEY, two_nodes)
    elif p.row.topology == "graph":
        with pytest.raises(ArgumentError, match=r"^data: .*the graph has 5 nodes and the data 2"):
            p.algorithm().init(KEY, two_nodes)
    # Without a graph, a node whose samples do not fill a batch uses them all.
    with pytest.raises(ArgumentError, match=r"^batch_size: "):
        p.algorithm(batch_size=5 if p.row.topology == "graph" else 0).init(KEY, p.data)
