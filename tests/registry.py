"""One row an algorithm: an example that makes it, and the facts that tests and tools need. They never test for a name
or a kind: what tells algorithms apart is in the row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import examples
import jax.numpy as jnp
import networkx as nx
import numpy as np
from examples import Example, MakeTask

from jaxfl import graphs
from jaxfl.algorithms.a_dp2_sgd import a_dp2_sgd
from jaxfl.algorithms.a_dp2_sgd import released_gradients as released_by_a_dp2_sgd
from jaxfl.algorithms.ab import ab
from jaxfl.algorithms.adaptive_servers import fed_adagrad, fed_adam, fed_avgm, fed_yogi
from jaxfl.algorithms.ali_dpfl import ali_dpfl
from jaxfl.algorithms.apfl import apfl
from jaxfl.algorithms.choco_sgd import choco_sgd
from jaxfl.algorithms.clients.bound_constants import published_constants
from jaxfl.algorithms.corrected_steps import ditto, fed_dyn, fed_prox, scaffold
from jaxfl.algorithms.d_psgd import d_psgd, dp2_sgd
from jaxfl.algorithms.d_psgd import released_gradients as released_by_d_psgd
from jaxfl.algorithms.dzofl import dzofl
from jaxfl.algorithms.embracing import embracing
from jaxfl.algorithms.exact_diffusion import exact_diffusion, extra, nids, prox_skip
from jaxfl.algorithms.fed_avg import fed_avg
from jaxfl.algorithms.fed_nova import fed_nova
from jaxfl.algorithms.gradient_tracking import gradient_tracking
from jaxfl.algorithms.k_gt import k_gt
from jaxfl.algorithms.momentum_gossip import d_sgdm, qg_dsgdm
from jaxfl.algorithms.output_perturbation import output_perturbation
from jaxfl.algorithms.partial_averaging import partial_averaging
from jaxfl.algorithms.per_fed_avg import per_fed_avg
from jaxfl.algorithms.perturbed_gossip import perturbed_gossip
from jaxfl.algorithms.push_sum import push_sum
from jaxfl.algorithms.push_sum import released_gradients as released_by_push_sum
from jaxfl.algorithms.q_fed_avg import q_fed_avg
from jaxfl.algorithms.tracking_over_graphs import atc_tracking, diging, gt_saga
from jaxfl.algorithms.width_reduction import width_reduction
from jaxfl.channel.compress import rand_k
from jaxfl.channel.links import links
from jaxfl.core import Algorithm, PyTree
from jaxfl.gradients import saga
from jaxfl.graphs.spectral import consensus_weights


class Row(NamedTuple):
    """One algorithm.

    Attributes:
        constructor: (task, keyword arguments) -> the algorithm.
        example: make_task -> the algorithm on five nodes.
        sends: what one node sends to one neighbor, or to the server, in one round.
        noise_draws: the fields of its draws that hold noise, "noise" where it is added to gradients; none where it is
            not private.
        released: (graph, step_size, state before, state after) -> what messages tell of gradients; None where there is
            no such function.
        releases_total: `released` tells the network's sum only.
        stateful_gradient: takes estimators that keep state, such as SAGA tables.
        special_case_of: the row whose rounds these are, on fewer arguments.
        num_gradients: gradients of a round over a graph, each with draws and noise of its own, (n, num_gradients, ...).
    """

    constructor: Callable[..., Algorithm]
    example: Callable[[MakeTask], Example]
    sends: str
    noise_draws: tuple[str, ...] = ()
    released: Callable[..., PyTree] | None = None
    releases_total: bool = False
    stateful_gradient: bool = False
    special_case_of: str | None = None
    num_gradients: int = 1


def _changing(weights: str) -> graphs.Graph:
    """A graph of period 2."""
    return graphs.sequence([graphs.star(examples.NODES, weights=weights), graphs.directed_ring(examples.NODES)])


def _push_sum(make_task: MakeTask) -> Example:
    rows_alone = graphs.from_matrix([[0.9, 0.1], [0.2, 0.8]])
    return examples.exchange(
        make_task, _changing("uniform"), [({"graph": rows_alone}, "graph: .*column")], over=examples.over_links
    )


def _d_psgd(make_task: MakeTask) -> Example:
    refused = examples.not_doubly_stochastic_refused()
    return examples.exchange(make_task, _changing("metropolis"), refused, over=examples.over_links)


def _with_momentum(make_task: MakeTask) -> Example:
    refused = [*examples.not_doubly_stochastic_refused(), ({"momentum": -0.1}, "momentum: must be non-negative")]
    of_one = {nodes: {"graph": graphs.complete(nodes), "momentum": 0.0} for nodes in examples.ALL}
    over = {"over": examples.over_links, "centralized": of_one}
    return examples.exchange(make_task, _changing("metropolis"), refused, **over)


def _exact(make_task: MakeTask) -> Example:
    one_way = ({"links": links(0.5)}, "links: .*duals sum to 0.*got losses that move the sum")
    refused = [one_way, *examples.not_doubly_stochastic_refused(), *examples.directed_refused()]
    graph = graphs.star(examples.NODES, weights="metropolis")
    return examples.exchange(make_task, graph, refused, over=examples.over_symmetric_links)


def _prox_skip(make_task: MakeTask) -> Example:
    example, name = _exact(make_task), "exchange_probability"
    refused = [*example.refused, ({name: 0.0}, f"{name}: must be positive"), ({name: 1.5}, f"{name}: must lie in")]
    return example._replace(topology=example.topology | {name: 0.6}, refused=refused)


def _choco_sgd(make_task: MakeTask) -> Example:
    refused = [*examples.not_doubly_stochastic_refused(), *examples.directed_refused()]
    refused += [({"consensus_step": 0.0}, "consensus_step: must be positive"), ({"order": "x"}, "order: must be one")]
    graph = graphs.star(examples.NODES, weights="metropolis")
    options = {"compressor": rand_k(0.3), "consensus_step": 0.5}  # top-k has no derivative where places change
    plain = {"compressor": rand_k(1.0), "consensus_step": 1.0}
    of_all = {nodes: {"graph": graphs.complete(nodes), **plain} for nodes in examples.ALL}
    changes = {"topology": {"graph": graph, **options}, "centralized": of_all}
    # Rounds of one draw would send the same places for ever; test_over_graphs.py follows the sum over 1,000 rounds.
    return examples.exchange(make_task, graph, refused, **changes, conserved=None)


def _tracked(make_task: MakeTask) -> Example:
    one_way = ({"links": links(0.5)}, "links: .*trackers sum to the gradients.*got losses that move the sum")
    refused, over = [one_way, *examples.not_doubly_stochastic_refused()], examples.over_symmetric_links
    graph = graphs.sequence([graphs.star(examples.NODES, weights="metropolis"), graphs.ring(examples.NODES)])
    return examples.exchange(make_task, graph, refused, over=over)


def _k_gt(make_task: MakeTask) -> Example:
    example, steps, outer = _tracked(make_task), "num_local_steps", "communication_step"
    one_way = ({"links": links(0.5)}, "links: .*corrections sum to 0.*got losses that move the sum")
    refused = [one_way, *examples.not_doubly_stochastic_refused(), ({steps: 0}, f"{steps}: must be an integer of at")]
    refused += [({outer: 0.0}, f"{outer}: must be positive")]
    return example._replace(
        topology=example.topology | {outer: 0.5},
        arguments=lambda numbers: examples.components(numbers) | {steps: numbers.num_local_steps},
        centralized={n: of_one | {steps: 1, outer: 1.0} for n, of_one in example.centralized.items()},
        refused=refused,
        conserved=None,
    )


def _dp2_sgd(make_task: MakeTask) -> Example:
    silent = ({"noise": None}, "noise: must be of type NoiseMechanism; got None")
    refused = [silent, *examples.not_doubly_stochastic_refused(), *examples.directed_refused()]
    return examples.exchange(make_task, graphs.ring(examples.NODES), refused)


def _a_dp2_sgd(make_task: MakeTask) -> Example:
    graph = graphs.ring(examples.NODES)
    stateful = ({"gradient": saga}, "gradient: must be an estimator without state; .* keeps a SagaState")

    def relabeled(order, state, draws):
        # Events are numbered by time; what is relabeled is the nodes that they name.
        nodes, neighbors = examples.renamed(order, draws.node), examples.renamed(order, draws.neighbor)
        (params, _), names = examples.relabeled_nodes(order, state.params, ()), state.log.nodes
        log = state.log._replace(nodes=examples.renamed(order, names))
        return state._replace(params=params, log=log), draws._replace(node=nodes, neighbor=neighbors)

    return examples.exchange(
        make_task,
        graph,
        [stateful, *examples.directed_refused()],
        topology={"graph": graph, "max_delay": 6},
        permuted=lambda order: {},  # the graph is met in `draw` only
        relabeled=relabeled,
        centralized={1: {"graph": graphs.complete(1), "max_delay": 0}},
        conserved=None,
    )


def _gradient_tracking(make_task: MakeTask) -> Example:
    pair = graphs.five_agents()._asdict()
    complete = {nodes: dict.fromkeys(pair, graphs.complete(nodes).mixing_matrix(0)) for nodes in examples.ALL}
    no_root = ({"state_weights": np.eye(examples.NODES)}, "tracker_weights: .*some node must reach all others")
    return examples.exchange(
        make_task,
        graphs.ring(examples.NODES),
        [no_root],
        topology=pair,
        arguments=examples.scheduled,
        permuted=lambda order: {name: weights[order][:, order] for name, weights in pair.items()},
        centralized=complete,
        conserved=lambda sizes: consensus_weights(pair["state_weights"]),
        resized=lambda nodes: dict.fromkeys(pair, graphs.ring(nodes).mixing_matrix(0)),
    )


def _ab(make_task: MakeTask) -> Example:
    graph = graphs.from_networkx(nx.DiGraph([*nx.cycle_graph(examples.NODES, nx.DiGraph).edges, (0, 2), (0, 3)]))
    edges = graph.adjacency(0)
    return examples.exchange(
        make_task,
        graph,
        [
            ({"graph": graphs.exponential(examples.NODES)}, "graph: must be the same in every round"),
            ({"graph": graphs.from_matrix(np.eye(examples.NODES))}, "graph: .*strongly connected"),
        ],
        arguments=lambda numbers: {"step_size": numbers.step_size, "batch_size": numbers.batch_size},
        conserved=lambda sizes: consensus_weights(edges / edges.sum(axis=1, keepdims=True)),
        over=examples.over_links,
    )


def _perturbed_gossip(make_task: MakeTask) -> Example:
    refused = [*examples.not_doubly_stochastic_refused(), *examples.directed_refused()]
    return examples.exchange(make_task, graphs.ring(examples.NODES), refused, arguments=examples.scheduled)


def _output_perturbation(make_task: MakeTask) -> Example:
    graph = graphs.ring(examples.NODES)

    def conserved(sizes):
        received = graph.adjacency(0) * sizes
        return consensus_weights(received / received.sum(axis=1, keepdims=True))

    refused, arguments = examples.directed_refused(), examples.scheduled
    return examples.exchange(make_task, graph, refused, arguments=arguments, conserved=conserved)


def _embracing(make_task: MakeTask) -> Example:
    task = make_task(5)
    trained = (task.blocks, task.blocks[-1:])
    return examples.clients({"task": task}, examples.CLASSES_REFUSED, trained_blocks=trained)


def _width_reduction(make_task: MakeTask) -> Example:
    return examples.clients({"tasks": (make_task(5), make_task(3))}, examples.CLASSES_REFUSED)


def _partial_averaging(make_task: MakeTask) -> Example:
    task = make_task(5)
    return Example(
        tasks={"task": task},
        topology={"synchronized": task.blocks[-1:]},
        arguments=examples.steps_of_clients,
        centralized={nodes: {"synchronized": "all", "num_local_steps": 1} for nodes in examples.ALL},
        over=examples.over_uplink,
    )


def _ali_dpfl(make_task: MakeTask) -> Example:
    def relabeled(order, state, draws):
        by_node, _ = examples.relabeled_nodes(order, (state.constants, draws), ())
        return state._replace(constants=by_node[0]), by_node[1]

    # With this kappa the next number of steps depends on the budget alone, and not on rounding.
    budget = {"max_rounds": 6, "max_iterations": 20, "kappa": 1e3}
    return Example(
        tasks={"task": make_task(5)},
        topology={"constants": published_constants(2), **budget},
        arguments=examples.clipped_steps,
        centralized={nodes: {"max_rounds": 99, "max_iterations": 99} for nodes in examples.ALL},  # one step a round
        refused=[({"max_rounds": 0}, "max_rounds: must be positive"), ({"kappa": 0.0}, "kappa: must be positive")],
        resized=lambda nodes: {"constants": published_constants()},  # over all samples, the default
        relabeled=relabeled,
        over=examples.over_uplink,
    )


def _dzofl(make_task: MakeTask) -> Example:
    def relabeled(order, state, draws):
        # What the server holds has no node axis, nor has the direction that all share.
        batch, arrived = examples.relabeled_nodes(order, draws.batch, draws.uplink.arrived)
        return state, draws._replace(batch=batch, uplink=draws.uplink._replace(arrived=arrived))

    return Example(
        tasks={"task": make_task(5)},
        topology={"uplink": links(0.6), "smoothing": 2.0, "num_directions": 2},
        arguments=lambda numbers: {"batch_size": numbers.batch_size, "step_size": numbers.step_size},
        centralized={},  # along random directions it descends, and not by gradients
        refused=[
            ({"smoothing": 0.0}, "smoothing: must be positive"),
            ({"num_directions": 0}, "num_directions: must be an integer of at least 1; got 0"),
            ({"direction": "uniform"}, "direction: must be one of rademacher, gaussian; got 'uniform'"),
            ({"uplink": links(jnp.ones((5, 5)))}, "success: must be by sender where a server receives"),
            ({"batch_size": 5}, "batch_size: must be at most the entries of the smallest node"),
        ],
        relabeled=relabeled,
    )


def _with_server(**changes: Any) -> Callable[[MakeTask], Example]:
    """An example of three of five clients without classes; `changes` are arguments, but for fields of the example."""
    fields = {name: changes.pop(name) for name in Example._fields if name in changes}

    def example(make_task):
        plain = examples.clients({"task": make_task(5)}, fields.get("refused", ()), classes=False, **changes)
        refused = [*plain.refused, *fields.get("refused", ())]
        return plain._replace(**{**fields, "refused": refused})

    return example


def _relabeled_memory(order: np.ndarray, state: Any, draws: Any) -> tuple[PyTree, PyTree]:
    """The clients' memory has a node axis, beside what the draws name."""
    memory, _ = examples.relabeled_nodes(order, state.memory, ())
    state, draws = examples.renamed_clients(order, state, draws)
    return state._replace(memory=memory), draws


def _uniform_steps(numbers: examples.Numbers) -> examples.Arguments:
    return examples.steps_of_clients(numbers, weighting="uniform")


def _fed_nova(make_task: MakeTask) -> Example:
    own = np.array([3, 1, 2, 3, 2])
    one_step = {
        nodes: {"num_active": nodes, "num_local_steps": 1, "num_steps": np.ones(nodes, int)} for nodes in (1, 4)
    }
    return _with_server(
        num_steps=own,
        arguments=lambda numbers: examples.steps_of_clients(numbers, differentiable=True),
        centralized=one_step,
        resized=lambda nodes: {"num_active": 2, "num_steps": 1 + np.arange(nodes) % 3},
        permuted=lambda order: {"num_steps": own[order]},
        refused=[
            ({"num_steps": np.array([1, 2, 3, 4, 1])}, "num_steps: must hold one integer from 1 to max_steps, 3"),
            ({"num_steps": np.ones(4, int)}, "num_steps: must be a scalar or hold one number per node"),
        ],
    )(make_task)


def _with_own_steps(numbers: examples.Numbers) -> examples.Arguments:
    arguments = examples.steps_of_clients(numbers)
    return {**arguments, "own": arguments["clients"]}


_SUMS_REFUSED: examples.Refused = (
    ({"uplink": examples.over_uplink(examples.LOSSY)["uplink"]}, "links: must lose and round nothing"),
)
_ADAPTIVE: dict[str, Any] = {
    "server_step_size": 3.0,
    "tau": 0.5,  # far from the corner of m / sqrt(v)
    "centralized": {},
    "refused": [({"tau": 0.0}, "tau: must be positive")],
}
_TO_SERVER = "params and batch statistics, to the server"
_GOSSIP: dict[str, Any] = {"sends": "params", "noise_draws": ("noise",)}
_TRACKING: dict[str, Any] = _GOSSIP | {"sends": "params and a gradient tracker"}
REGISTRY: dict[str, Row] = {
    "push_sum": Row(
        push_sum,
        _push_sum,
        sends="params and push_sum_weight",
        noise_draws=("noise",),
        released=released_by_push_sum,
        stateful_gradient=True,
    ),
    "d_psgd": Row(d_psgd, _d_psgd, **_GOSSIP, released=released_by_d_psgd, stateful_gradient=True),
    "dp2_sgd": Row(
        dp2_sgd,
        _dp2_sgd,
        **_GOSSIP,
        released=released_by_d_psgd,
        stateful_gradient=True,
        special_case_of="d_psgd",
    ),
    "d_sgdm": Row(d_sgdm, _with_momentum, **_GOSSIP, stateful_gradient=True),
    "qg_dsgdm": Row(qg_dsgdm, _with_momentum, **_GOSSIP, stateful_gradient=True),
    "exact_diffusion": Row(exact_diffusion, _exact, **_GOSSIP, stateful_gradient=True),
    "extra": Row(extra, _exact, **_GOSSIP, stateful_gradient=True),
    "nids": Row(nids, _exact, **_GOSSIP, stateful_gradient=True),
    "prox_skip": Row(prox_skip, _prox_skip, **_GOSSIP, stateful_gradient=True),
    "choco_sgd": Row(
        choco_sgd, _choco_sgd, sends="a compressed difference", noise_draws=("noise",), stateful_gradient=True
    ),
    "diging": Row(diging, _tracked, **_TRACKING, stateful_gradient=True),
    "atc_tracking": Row(atc_tracking, _tracked, **_TRACKING, stateful_gradient=True),
    "gt_saga": Row(gt_saga, _tracked, **_TRACKING, stateful_gradient=True),
    "k_gt": Row(
        k_gt,
        _k_gt,
        sends="params and the mean of its directions",
        noise_draws=("noise",),
        stateful_gradient=True,
        num_gradients=examples.Numbers().num_local_steps,
    ),
    "a_dp2_sgd": Row(
        a_dp2_sgd,
        _a_dp2_sgd,
        **_GOSSIP,
        released=released_by_a_dp2_sgd,
        releases_total=True,
    ),
    "gradient_tracking": Row(
        gradient_tracking,
        _gradient_tracking,
        sends="broadcast_params, and gradient_tracker with its noise",
        noise_draws=("state_noise", "tracker_noise"),
    ),
    "ab": Row(ab, _ab, sends="params and gradient_tracker"),
    "perturbed_gossip": Row(
        perturbed_gossip, _perturbed_gossip, sends="broadcast_params", noise_draws=("state_noise",)
    ),
    "output_perturbation": Row(
        output_perturbation, _output_perturbation, sends="params after a step, with noise", noise_draws=("state_noise",)
    ),
    "fed_avg": Row(
        fed_avg,
        lambda make_task: examples.clients({"task": make_task(5)}, (), classes=False),
        sends="params and batch statistics, to the server",
    ),
    "fed_avgm": Row(fed_avgm, _with_server(server_momentum=0.5, centralized={}), sends=_TO_SERVER),
    "fed_adagrad": Row(fed_adagrad, _with_server(**_ADAPTIVE), sends=_TO_SERVER),
    "fed_adam": Row(fed_adam, _with_server(**_ADAPTIVE), sends=_TO_SERVER),
    "fed_yogi": Row(fed_yogi, _with_server(**_ADAPTIVE), sends=_TO_SERVER),
    "fed_prox": Row(
        fed_prox,
        _with_server(proximal=0.1, refused=[({"proximal": -0.1}, "proximal: must be non-negative")]),
        sends=_TO_SERVER,
    ),
    "scaffold": Row(
        scaffold,
        _with_server(arguments=_uniform_steps, over=None, refused=_SUMS_REFUSED, relabeled=_relabeled_memory),
        sends=_TO_SERVER,
    ),
    "fed_nova": Row(fed_nova, _fed_nova, sends=_TO_SERVER),
    "q_fed_avg": Row(
        q_fed_avg,
        _with_server(
            fairness=0.1,
            centralized={n: {"num_active": n, "num_local_steps": 1, "fairness": 0.0} for n in examples.ALL},
            refused=[({"fairness": -0.1}, "fairness: must be non-negative")],
        ),
        sends="params, batch statistics and two numbers, to the server",
    ),
    "fed_dyn": Row(
        fed_dyn,
        _with_server(
            proximal=0.1,
            arguments=_uniform_steps,
            centralized={},  # h doubles the first step
            over=None,
            refused=_SUMS_REFUSED,
            relabeled=_relabeled_memory,
        ),
        sends=_TO_SERVER,
    ),
    "ditto": Row(
        ditto, _with_server(proximal=0.1, arguments=_with_own_steps, relabeled=_relabeled_memory), sends=_TO_SERVER
    ),
    "apfl": Row(
        apfl,
        _with_server(
            share=0.4,
            centralized={
                n: {"num_active": n, "num_local_steps": 1, "share": 0.0, "adapts": "never"} for n in examples.ALL
            },
            relabeled=_relabeled_memory,
            refused=[({"adapts": "rounds"}, "adapts: must be one of steps")],
        ),
        sends=_TO_SERVER,
    ),
    "per_fed_avg": Row(
        per_fed_avg,
        _with_server(
            inner_step_size=0.1,
            centralized={n: {"num_active": n, "num_local_steps": 1, "inner_step_size": 0.0} for n in examples.ALL},
            refused=[({"inner_step_size": -0.1}, "inner_step_size: must be non-negative")],
        ),
        sends=_TO_SERVER,
    ),
    "ali_dpfl": Row(ali_dpfl, _ali_dpfl, sends="params, a gradient and two numbers, to the server"),
    "embracing": Row(
        embracing, _embracing, sends="params and batch statistics of the blocks it trained, to the server"
    ),
    "width_reduction": Row(
        width_reduction, _width_reduction, sends="params and batch statistics of its slice, to the server"
    ),
    "partial_averaging": Row(
        partial_averaging,
        _partial_averaging,
        sends="params and batch statistics of the synchronized part, to whoever averages",
    ),
    "dzofl": Row(dzofl, _dzofl, sends="one number for each direction, to the server"),
}
