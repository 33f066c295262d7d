"""Small instances of algorithms on five nodes, from which tests build the rows of the registry.

What several examples have in common is here; what only one algorithm needs stands in its row. A new kind of algorithm
brings an `Example` of its own, and no test changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl import graphs
from jaxfl.algorithms.clients.client_sgd import client_sgd
from jaxfl.algorithms.clients.local_steps import local_steps
from jaxfl.algorithms.clients.uplink import uplink
from jaxfl.channel import LinkDraws, Links, uniform_quantizer
from jaxfl.core import Array, PyTree, Task
from jaxfl.gradients import GradientEstimator, fixed, mini_batch
from jaxfl.graphs import Graph
from jaxfl.privacy import gaussian
from jaxfl.privacy.tracking import TrackingSchedule

NODES = 5
TRACKER_MIXING = 0.25  # beta of the schedules
_WEAK = np.array([0, 1, 1, 0, 1])  # classes of clients; those of class 1 are too weak for the whole model
ALL = (1, 4)  # numbers of nodes of centralized runs
LOSSY = Links(success=0.6, quantizer=uniform_quantizer(2.0**-10), symmetric=False)

Arguments = dict[str, Any]
MakeTask = Callable[[int], Task]  # width of the hidden layer -> a task of at least two blocks
Refused = Sequence[tuple[Arguments, str]]


class Numbers(NamedTuple):
    """Numbers that an example is built on; an algorithm takes those that it has."""

    step_size: Any = 0.2  # a number, a traced scalar, or a schedule
    batch_size: int = 2  # of a node's gradients, or of a client's steps
    num_local_steps: int = 3  # of a client
    clip_norm: Any = None
    noise_scale: Any = 0.02  # () or (n,), standard deviation, or b of Laplace noise; None: no noise
    gradient: Callable[..., GradientEstimator] | None = None  # clip_norm -> estimator; None: a plain mini-batch


def relabeled_nodes(order: np.ndarray, state: Any, draws: Any) -> tuple[PyTree, PyTree]:
    """Reorder the nodes of a state and its draws.

    All arrays have the node axis first, and arrays of arrivals between nodes have it twice.
    """

    def relabeled(leaf):
        if isinstance(leaf, LinkDraws):
            return LinkDraws(
                arrived=jax.tree.map(lambda a: a[order][:, order] if a.ndim == 2 else a[order], leaf.arrived),
                rounding=relabeled_nodes(order, leaf.rounding, ())[0],
            )
        return leaf if leaf.ndim == 0 else leaf[order]

    return jax.tree.map(relabeled, (state, draws), is_leaf=lambda leaf: isinstance(leaf, LinkDraws))


def renamed(order: np.ndarray, nodes: Array) -> Array:
    """New numbers of nodes; -1, nobody, stays."""
    return jnp.asarray(np.append(np.argsort(order), -1), jnp.int32)[nodes]


class Example(NamedTuple):
    """An algorithm on five nodes.

    Attributes:
        tasks: "task" or "tasks".
        topology: who hears whom of what, as irregular as the algorithm allows.
        arguments: numbers -> the arguments that hold them.
        centralized: number of nodes -> changes with which a round on equal data, in one batch, is gradient descent.
        refused: changes with what the error says, beside those that are refused wherever such an argument is taken.
        conserved: sizes (n,) -> what nodes weigh in the sum of parameters that mixing preserves, (n,); None where a
            round is no single step of all nodes.
        resized: number of nodes, two or more -> what changes in `topology` where there are so many.
        permuted: order (n,) -> what changes in `topology` where new node i is old node order[i].
        relabeled: (order, state, draws) -> (state, draws) of the new nodes.
        over: links -> the arguments by which the algorithm's messages travel over them; None where it takes no links.
    """

    tasks: Arguments
    topology: Arguments
    arguments: Callable[[Numbers], Arguments]
    centralized: Mapping[int, Arguments]
    refused: Refused = ()
    conserved: Callable[[np.ndarray], np.ndarray] | None = None
    resized: Callable[[int], Arguments] = lambda nodes: {}
    permuted: Callable[[np.ndarray], Arguments] = lambda order: {}
    relabeled: Callable[[np.ndarray, Any, Any], tuple[PyTree, PyTree]] = relabeled_nodes
    over: Callable[[Links | None], Arguments] | None = None


def over_links(links: Links | None) -> Arguments:
    """Make the argument of algorithms whose nodes exchange messages."""
    return {"links": links}


def over_symmetric_links(links: Links | None) -> Arguments:
    """Make the argument of algorithms whose messages to each other two nodes must lose together."""
    return {"links": links and links._replace(symmetric=True)}


def over_uplink(links: Links | None) -> Arguments:
    """Make the argument of algorithms whose clients send updates."""
    return {"uplink": uplink(links=links)}


def exchange(make_task: MakeTask, graph: Graph, refused: Refused = (), **changes: Any) -> Example:
    """Nodes that exchange parameters with their neighbors; `changes` of the example's fields."""
    fields: dict[str, Any] = {
        "topology": {"graph": graph},
        "arguments": components,
        "centralized": {nodes: {"graph": graphs.complete(nodes)} for nodes in ALL},
        "conserved": np.ones_like,
        "resized": lambda nodes: {"graph": graphs.ring(nodes)},
        "permuted": lambda order: {"graph": graphs.permute(graph, order)},
    }
    return Example(tasks={"task": make_task(5)}, refused=refused, **{**fields, **changes})


def clients(tasks: Arguments, refused: Refused, *, classes: bool = True, **topology: Any) -> Example:
    """Three of five clients of a server, of two classes or of none."""
    of_class = {"client_class": _WEAK} if classes else {}
    return Example(
        tasks=tasks,
        topology={"num_active": 3, **of_class, **topology},
        arguments=steps_of_clients,
        centralized={
            nodes: {"num_active": nodes, "num_local_steps": 1, **{name: np.zeros(nodes, int) for name in of_class}}
            for nodes in ALL
        },
        refused=[({"num_active": 6}, "num_active: .*number of clients.*; got 6"), *refused],
        resized=lambda nodes: {"num_active": 2, **{name: np.arange(nodes) % 2 for name in of_class}},
        permuted=lambda order: {name: value[order] for name, value in of_class.items()},
        # What the server holds has no node axis; the draws name the clients.
        relabeled=renamed_clients,
        over=over_uplink,
    )


def renamed_clients(order: np.ndarray, state: Any, draws: Any) -> tuple[PyTree, PyTree]:
    """Reorder the links of a server's draws, and name its clients anew; the state has no node axis."""
    links = jax.tree.map(lambda leaf: leaf[order], draws.uplink.links)
    return state, draws._replace(active=renamed(order, draws.active), uplink=draws.uplink._replace(links=links))


CLASSES_REFUSED: Refused = (
    ({"num_active": (1, 4)}, r"num_active: .*for each class at most its clients; got \(1, 4\)"),
    ({"client_class": [0, 1, 1, 0, 2]}, r"client_class: must lie in \[0, 2\); got 2 at position 4"),
)


def directed_refused() -> Refused:
    """Graphs whose edges have no reverse, or change."""
    return (
        ({"graph": graphs.directed_ring(NODES)}, "graph: .*(undirected|symmetric)"),
        ({"graph": graphs.exponential(NODES)}, "graph: .*same in every round"),
    )


def not_doubly_stochastic_refused() -> Refused:
    """A graph whose rows do not sum to 1."""
    return (({"graph": graphs.from_matrix([[0.9, 0.2], [0.1, 0.8]])}, "graph: .*(doubly|symmetric)"),)


def components(numbers: Numbers) -> Arguments:
    """Make the arguments of algorithms that take a gradient estimator and a noise mechanism."""
    estimator = numbers.gradient or functools.partial(mini_batch, sampler=fixed(numbers.batch_size))
    return {
        "gradient": estimator(clip_norm=numbers.clip_norm),
        "step_size": numbers.step_size,
        "noise": None if numbers.noise_scale is None else gaussian(numbers.noise_scale),
    }


def components_without_noise(numbers: Numbers) -> Arguments:
    """Make the arguments of algorithms that take a gradient estimator only, and clip nothing."""
    taken = components(numbers._replace(clip_norm=None, noise_scale=None))
    return {name: value for name, value in taken.items() if name != "noise"}


def scheduled(numbers: Numbers) -> Arguments:
    """Make the arguments of algorithms that take a schedule, here of 20 iterations."""
    noise_scale = 0.0 if numbers.noise_scale is None else numbers.noise_scale
    scales: Any = jnp.multiply.outer(jnp.asarray(noise_scale, jnp.float32), jnp.ones(20, jnp.float32))
    return {
        "schedule": TrackingSchedule(
            state_mixing=0.3,
            tracker_mixing=TRACKER_MIXING,
            step_size=numbers.step_size,
            num_samples=numbers.batch_size,
            state_noise_scale=scales,
            tracker_noise_scale=scales,
        ),
        "clip_norm": numbers.clip_norm,
    }


def steps_of_clients(numbers: Numbers, **options: Any) -> Arguments:
    """Make the arguments of algorithms whose clients train by themselves; `options` of their local steps."""
    optimizer = client_sgd(numbers.step_size)
    steps = local_steps(numbers.num_local_steps, batch_size=numbers.batch_size, optimizer=optimizer, **options)
    return {"clients": steps}


def clipped_steps(numbers: Numbers) -> Arguments:
    """Make the arguments of algorithms whose clients clip samples' gradients.

    The bound is so wide that nothing is clipped.
    """
    steps = {
        "batch_size": numbers.batch_size,
        "optimizer": client_sgd(numbers.step_size),
        "clip_norm": 1e3,
        "differentiable": True,
    }
    return {"clients": local_steps(numbers.num_local_steps, **steps), "step_size": numbers.step_size}
