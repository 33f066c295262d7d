"""The algorithm that each method is, and what belongs to some of them: graphs, rules of servers, compressors, sleep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from jaxfl import algorithms, channel, gradients, graphs
from jaxfl.core import Algorithm, Task
from jaxfl.frame.choose import Choice

if TYPE_CHECKING:
    from .options import Learning

GRAPHS: Mapping[str, Callable[[int], graphs.Graph]] = {
    **{name: getattr(graphs, name) for name in ("exponential", "directed_ring", "ring", "complete", "star")},
    "base": lambda nodes: graphs.base(nodes, 1),
}


class At(NamedTuple):
    """Task and arguments that a method gets beside its own numbers."""

    task: Task
    common: Mapping[str, Any]  # arguments of all methods of its kind
    learning: Learning
    nodes: int

    def __call__(self, constructor: Callable[..., Algorithm], **own: Any) -> Algorithm:
        """The method with its own numbers."""
        return constructor(self.task, **{**self.common, **own})


def _uneven(at: At) -> Algorithm:
    """FedNova whose clients make 1, 2, ..., local_steps, 1, ... steps."""
    return at(algorithms.fed_nova, num_steps=1 + np.arange(at.nodes) % at.learning.local_steps)


def _adaptive(constructor: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
    return lambda at, *, adaptive_step_size: at(constructor, server_step_size=adaptive_step_size)


def _avgm(at: At, *, server_step_size: Any, momentum: Any) -> Algorithm:
    return at(algorithms.fed_avgm, server_step_size=server_step_size, server_momentum=momentum)


def _partial(shared: Callable[[Task], Any]) -> Callable[..., Algorithm]:
    """Averaging of the blocks that `shared` selects; all clients take part, and weigh alike."""
    return lambda at: algorithms.partial_averaging(at.task, clients=at.common["clients"], synchronized=shared(at.task))


def _head_first(at: At) -> Algorithm:
    """FedRep: one step of the body behind steps of the head, the last block."""

    def step_size(is_body):
        return lambda step: jnp.where((step == at.learning.local_steps - 1) == is_body, at.learning.step_size, 0.0)

    def parts_of(params):
        return {name: name == at.task.blocks[-1] for name in params}

    phases = optax.multi_transform({is_head: optax.sgd(step_size(not is_head)) for is_head in (True, False)}, parts_of)
    body = _partial(lambda task: task.blocks[:-1])
    return body(at._replace(common={"clients": at.learning.clients(optimizer=phases)}))


def _saga(at: At) -> Algorithm:
    sampler = gradients.uniform(at.learning.batch_size)
    return at(algorithms.gt_saga, gradient=gradients.saga(sampler=sampler, table="factored"))


STEPS: Mapping[str, Callable[..., Algorithm]] = {
    "FedAvg": lambda at: at(algorithms.fed_avg),
    "FedProx": lambda at, *, proximal: at(algorithms.fed_prox, proximal=proximal),
    "SCAFFOLD": lambda at, *, server_step_size: at(algorithms.scaffold, server_step_size=server_step_size),
    "FedNova": _uneven,
    "FedDyn": lambda at, *, proximal: at(algorithms.fed_dyn, proximal=proximal),
    "q-FedAvg": lambda at, *, fairness: at(algorithms.q_fed_avg, fairness=fairness),
}
SERVER_STEPS: Mapping[str, Callable[..., Algorithm]] = {
    "FedAvgM": _avgm,
    "FedAdam": _adaptive(algorithms.fed_adam),
    "FedYogi": _adaptive(algorithms.fed_yogi),
    "FedAdagrad": _adaptive(algorithms.fed_adagrad),
}
PARTIAL: Mapping[str, Callable[..., Algorithm]] = {
    "FedPer": _partial(lambda task: task.blocks[:-1]),
    "FedRep": _head_first,
    "alone": _partial(lambda task: ()),
}
PERSONAL: Mapping[str, Callable[..., Algorithm]] = {  # judged by each client's own model on its own test samples
    "Ditto": lambda at, *, proximal: at(algorithms.ditto, own=at.common["clients"], proximal=proximal),
    "APFL": lambda at, *, own_share: at(algorithms.apfl, share=own_share),
    "Per-FedAvg": lambda at, *, inner_step_size: at(algorithms.per_fed_avg, inner_step_size=inner_step_size),
    **PARTIAL,
}
GOSSIP: Mapping[str, Callable[..., Algorithm]] = {
    "D-PSGD": lambda at: at(algorithms.d_psgd, num_final_mixings=1),  # its round ends with each node's own step
    "SGP": lambda at: at(algorithms.push_sum),
    "D-SGDm": lambda at, *, momentum: at(algorithms.d_sgdm, momentum=momentum),
    "QG-DSGDm": lambda at, *, momentum: at(algorithms.qg_dsgdm, momentum=momentum),
    "CHOCO-SGD": lambda at, *, consensus_step: at(
        algorithms.choco_sgd, compressor=at.learning.compress(), consensus_step=consensus_step
    ),
}
CORRECTED: Mapping[str, Callable[..., Algorithm]] = {
    "ED": lambda at: at(algorithms.exact_diffusion),
    "NIDS": lambda at: at(algorithms.nids),
    "EXTRA": lambda at: at(algorithms.extra),
    "ProxSkip": lambda at, *, exchange_probability: at(algorithms.prox_skip, exchange_probability=exchange_probability),
    "DIGing": lambda at: at(algorithms.diging),
    "NEXT": lambda at: at(algorithms.atc_tracking),
    "Aug-DGM": lambda at: at(algorithms.atc_tracking, variant="aug_dgm"),
    "GT-SAGA": _saga,
    "K-GT": lambda at, *, communication_step: at(
        algorithms.k_gt, num_local_steps=at.learning.local_steps, communication_step=communication_step
    ),
}
KINDS = {
    "steps of clients": STEPS,
    "steps of the server": SERVER_STEPS,
    "models of clients": PERSONAL,
    "over a graph": GOSSIP,
    "over a graph, corrected": CORRECTED,
}
SERVER, GRAPH = {**STEPS, **SERVER_STEPS, **PERSONAL}, {**GOSSIP, **CORRECTED}
METHODS = {**SERVER, **GRAPH}
CHOICE = Choice("method", METHODS)
COMPARED = tuple(name for name in METHODS if name not in PERSONAL)
UNDIRECTED = ("ED", "NIDS", "EXTRA", "ProxSkip", "CHOCO-SGD")  # which need one symmetric matrix
AVERAGED = ("FedAvg", "FedProx", "FedNova", *SERVER_STEPS)  # by any rule
DRAWN = tuple(name for name in SERVER if name not in PARTIAL)  # whose clients may be a part of all
SLEEPERS = ("D-PSGD", "SGP", "D-SGDm", "QG-DSGDm")
AGGREGATES: Mapping[str, Callable[[int, int], Any]] = {  # by the numbers of attackers and of clients of a round
    "median": lambda f, active: algorithms.coordinate_median(),
    "trimmed_mean": lambda f, active: algorithms.trimmed_mean(f),
    "krum": lambda f, active: algorithms.krum(f),
    "multi_krum": lambda f, active: algorithms.multi_krum(f, num_kept=active - 2 * f - 3),
    "geometric_median": lambda f, active: algorithms.geometric_median(),
    "centered_clipping": lambda f, active: algorithms.centered_clipping(1.0),
}
SPARED = {
    "trimmed_mean": 1,
    "krum": 3,
    "multi_krum": 4,
}  # clients of a round that are needed beside twice the attackers
ATTACKS: Mapping[str, Callable[..., Any]] = {
    "sign_flip": lambda numbers, active: algorithms.sign_flip(numbers, scale=3.0),
    "random": lambda numbers, active: algorithms.random_updates(numbers, std=1.0),
    "alie": lambda numbers, active: algorithms.alie(numbers, num_active=active),
}
COMPRESSORS = {"top_k": channel.top_k, "rand_k": channel.rand_k}
FEEDBACK = Choice(
    "feedback",
    {
        "none": lambda learning: None,
        "error_feedback": lambda learning: algorithms.error_feedback(learning.compress()),
        "ef21": lambda learning: algorithms.ef21(learning.compress()),
        "client_momentum": lambda learning, *, client_momentum: algorithms.client_momentum(client_momentum),
    },
)
SELECTION = Choice(
    "selection",
    {
        "uniform": lambda: None,
        "by_size": algorithms.by_size,
        "by_loss": lambda *, num_candidates: algorithms.by_loss(num_candidates),
    },
)
SLEEP = Choice(
    "sleep",
    {
        "none": lambda: None,
        "random": lambda *, awake_rate: algorithms.random_activation(awake_rate),
        "markov": lambda *, awake_rate, wake_rate: algorithms.random_activation(awake_rate, wake_rate=wake_rate),
        "cyclic": lambda *, sleep_period, num_awake: algorithms.cyclic_activation(sleep_period, num_awake),
    },
)


def compresses(options: Mapping[str, Any]) -> bool:
    """True where messages are compressed."""
    averaged = options["method"] in AVERAGED and options["feedback"] in ("error_feedback", "ef21")
    return averaged or options["method"] == "CHOCO-SGD"
