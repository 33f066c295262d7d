"""One row an algorithm, with the facts that tests and tools need. Tests read the row; they never test for a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxfl.algorithms import asynchronous_gossip, gossip
from jaxfl.algorithms.embracing import embracing
from jaxfl.algorithms.fed_avg import fed_avg
from jaxfl.algorithms.gradient_tracking import gradient_tracking
from jaxfl.algorithms.output_perturbation import output_perturbation
from jaxfl.algorithms.partial_averaging import partial_averaging
from jaxfl.algorithms.perturbed_gossip import perturbed_gossip
from jaxfl.algorithms.push_sum import push_sum
from jaxfl.algorithms.push_sum import released_gradients as released_by_push_sum
from jaxfl.algorithms.width_reduction import width_reduction
from jaxfl.core import Algorithm, PyTree


class Row(NamedTuple):
    """Facts about one algorithm.

    Attributes:
        constructor: (task, keyword arguments) -> the algorithm.
        topology: "graph" for peer to peer, "server" for a server and its clients: then `num_active`, `num_local_steps`
            and `batch_size` take the place of `graph`, `gradient` and `noise`; "average" for nodes that keep models of
            their own, of which a part is averaged over all of them: then `synchronized` says which, in the place of
            `num_active`.
        mixing: what `graph` must be: "column" or "doubly" (stochastic), "any" where only edges count, "sizes" where
            only edges count and nodes weigh by their data; "rooted" where two matrices of any weights take its place,
            `state_weights` and `tracker_weights`, with a common root; "none" without a graph.
        schedule: takes a `schedule` of all step sizes, noise scales and sample counts, and a `clip_norm`, instead of
            `step_size`, a `noise` mechanism and a `gradient` estimator.
        noise_draws: the fields of its draws that hold noise; none where it is not private.
        sends: what one node sends to one neighbor in one round.
        released: (graph, step_size, state before, state after) -> what messages tell of gradients; None where there is
            no such function.
        undirected: refuses a graph that changes over time or has an edge without its reverse.
        requires_noise: refuses to run without a noise mechanism.
        stateful_gradient: takes estimators that keep state, such as SAGA tables.
        synchronous: all nodes act at once in a round; else it is n events of random nodes, and `max_delay` is taken.
        classes: "none", or what tells its clients' capacity classes apart, and then it takes `client_class`: "blocks",
            the `trained_blocks` of each; "widths", the width of each one's model, so that `tasks` take the place of
            `task`.
        special_case_of: the row whose rounds these are, on fewer arguments.
    """

    constructor: Callable[..., Algorithm]
    topology: str
    mixing: str
    schedule: bool
    noise_draws: tuple[str, ...]
    sends: str
    released: Callable[..., PyTree] | None
    undirected: bool
    requires_noise: bool
    stateful_gradient: bool
    synchronous: bool
    classes: str = "none"
    special_case_of: str | None = None


REGISTRY: dict[str, Row] = {
    "push_sum": Row(
        constructor=push_sum,
        topology="graph",
        mixing="column",
        schedule=False,
        noise_draws=("noise",),
        sends="params and push_sum_weight",
        released=released_by_push_sum,
        undirected=False,
        requires_noise=False,
        stateful_gradient=True,
        synchronous=True,
    ),
    "d_psgd": Row(
        constructor=gossip.d_psgd,
        topology="graph",
        mixing="doubly",
        schedule=False,
        noise_draws=("noise",),
        sends="params",
        released=gossip.released_gradients,
        undirected=False,
        requires_noise=False,
        stateful_gradient=True,
        synchronous=True,
    ),
    "dp2_sgd": Row(
        constructor=gossip.dp2_sgd,
        topology="graph",
        mixing="doubly",
        schedule=False,
        noise_draws=("noise",),
        sends="params",
        released=gossip.released_gradients,
        undirected=True,
        requires_noise=True,
        stateful_gradient=True,
        synchronous=True,
        special_case_of="d_psgd",
    ),
    "a_dp2_sgd": Row(
        constructor=asynchronous_gossip.a_dp2_sgd,
        topology="graph",
        mixing="any",
        schedule=False,
        noise_draws=("noise",),
        sends="params",
        released=asynchronous_gossip.released_gradients,
        undirected=True,
        requires_noise=False,
        stateful_gradient=False,
        synchronous=False,
    ),
    "gradient_tracking": Row(
        constructor=gradient_tracking,
        topology="graph",
        mixing="rooted",
        schedule=True,
        noise_draws=("state_noise", "tracker_noise"),
        sends="broadcast_params, and gradient_tracker with its noise",
        released=None,
        undirected=False,
        requires_noise=False,
        stateful_gradient=False,
        synchronous=True,
    ),
    "perturbed_gossip": Row(
        constructor=perturbed_gossip,
        topology="graph",
        mixing="doubly",
        schedule=True,
        noise_draws=("state_noise",),
        sends="broadcast_params",
        released=None,
        undirected=True,
        requires_noise=False,
        stateful_gradient=False,
        synchronous=True,
    ),
    "output_perturbation": Row(
        constructor=output_perturbation,
        topology="graph",
        mixing="sizes",
        schedule=True,
        noise_draws=("state_noise",),
        sends="params after a step, with noise",
        released=None,
        undirected=True,
        requires_noise=False,
        stateful_gradient=False,
        synchronous=True,
    ),
    "fed_avg": Row(
        constructor=fed_avg,
        topology="server",
        mixing="none",
        schedule=False,
        noise_draws=(),
        sends="params and batch statistics, to the server",
        released=None,
        undirected=False,
        requires_noise=False,
        stateful_gradient=False,
        synchronous=True,
    ),
    "embracing": Row(
        constructor=embracing,
        topology="server",
        mixing="none",
        schedule=False,
        noise_draws=(),
        sends="params and batch statistics of the blocks it trained, to the server",
        released=None,
        undirected=False,
        requires_noise=False,
        stateful_gradient=False,
        synchronous=True,
        classes="blocks",
    ),
    "width_reduction": Row(
        constructor=width_reduction,
        topology="server",
        mixing="none",
        schedule=False,
        noise_draws=(),
        sends="params and batch statistics of its slice, to the server",
        released=None,
        undirected=False,
        requires_noise=False,
        stateful_gradient=False,
        synchronous=True,
        classes="widths",
    ),
    "partial_averaging": Row(
        constructor=partial_averaging,
        topology="average",
        mixing="none",
        schedule=False,
        noise_draws=(),
        sends="params and batch statistics of the synchronized part, to whoever averages",
        released=None,
        undirected=False,
        requires_noise=False,
        stateful_gradient=False,
        synchronous=True,
    ),
}
