"""Small learning problems that several tests share."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxfl
from jaxfl import graphs
from jaxfl.algorithms.registry import REGISTRY, Row
from jaxfl.gradients import fixed, mini_batch
from jaxfl.graphs.spectral import consensus_weights
from jaxfl.models import classification, mlp
from jaxfl.privacy.tracking import TrackingSchedule

UNEVEN_SIZES = (7, 4, 9, 5, 6)
STATE_MIXING, TRACKER_MIXING = 0.3, 0.25  # alpha and beta of the schedules


def uneven_data(sizes=UNEVEN_SIZES, features=6, classes=3, seed=0):
    """Random samples in unequal parts, the pool shuffled so that a node's index is not its position."""
    rng = np.random.default_rng(seed)
    count = sum(sizes)
    inputs = rng.normal(size=(count, features)).astype(np.float32)
    labels = rng.integers(0, classes, count).astype(np.int32)
    parts = np.split(rng.permutation(count), np.cumsum(sizes)[:-1])
    return jaxfl.federate(inputs, labels, parts)


def small_task(features=6, hidden=5, classes=3):
    """A smooth two-layer classifier, so that float32 and float64 never part at a kink."""
    return classification(mlp((features, hidden, classes), activation="tanh"))


def linear_task(features=6):
    """Least squares by plain functions: a task without factored layers."""
    return jaxfl.from_functions(
        lambda key: {"w": 0.1 * jax.random.normal(key, (features,), jnp.float32), "b": jnp.float32(0.0)},
        lambda params, x, y: (x @ params["w"] + params["b"] - y.astype(jnp.float32)) ** 2,
    )


def irregular_graph():
    """A directed graph over five nodes on which the push-sum weights move, with period 2."""
    first = np.array(
        [
            [1 / 3, 0, 0, 1 / 2, 0],
            [1 / 3, 1 / 2, 0, 0, 0],
            [1 / 3, 1 / 2, 1 / 2, 0, 0],
            [0, 0, 1 / 2, 1 / 2, 0],
            [0, 0, 0, 0, 1],
        ]
    )
    second = np.array(
        [
            [1 / 2, 0, 0, 0, 1 / 2],
            [0, 1, 0, 0, 0],
            [0, 0, 1 / 2, 0, 0],
            [0, 0, 0, 1 / 4, 0],
            [1 / 2, 0, 1 / 2, 3 / 4, 1 / 2],
        ]
    )
    return graphs.from_matrix(np.stack([first, second]))


def start(algorithm, key, data):
    """The first state, compiled as a whole, with the sizes concrete so that `init` can check them."""
    sizes = data.sizes
    return jax.jit(lambda key, data: algorithm.init(key, data._replace(sizes=sizes)))(key, data)


def run(algorithm, key, data, num_rounds, state=None):
    """State after some rounds, in one compiled scan, with the stacked infos."""

    @jax.jit
    def rounds(key, state, data):
        return jax.lax.scan(lambda s, _: algorithm.round(key, s, data), state, None, length=num_rounds)

    return rounds(key, start(algorithm, key, data) if state is None else state, data)


class Problem(NamedTuple):
    """One row of the registry on a small problem that fits it."""

    row: Row
    topology: dict[str, Any]  # the arguments that say who hears whom of what: a graph, two matrices, ...
    data: jaxfl.FederatedData

    def algorithm(
        self,
        gradient: Any = None,
        *,
        batch_size=2,
        clip_norm: Any = None,
        step_size: Any = 0.2,
        noise_scale: Any = 0.02,
        **changes,
    ):
        """The algorithm, on other arguments where told.

        Args:
            gradient: clip_norm -> the gradient estimator, of rows that take one; default: a plain mini-batch.
            batch_size: of that mini-batch, of the gradients of a row that takes a schedule, or of a client's steps.
            clip_norm: of rows that are private.
            noise_scale: () or (n,): a standard deviation, or the b of Laplace noise where a schedule says so; of rows
                that are private.
            changes: any arguments of the constructor.
        """
        tasks = {"task": small_task()}
        if self.row.classes == "widths":
            tasks = {"tasks": (small_task(), small_task(hidden=3))}
        if self.row.topology in ("server", "average"):
            arguments = {"batch_size": batch_size, "step_size": step_size}
        elif self.row.schedule:
            scales: Any = jnp.multiply.outer(jnp.asarray(noise_scale, jnp.float32), jnp.ones(20))
            schedule = TrackingSchedule(STATE_MIXING, TRACKER_MIXING, step_size, batch_size, scales, scales)
            arguments = {"schedule": schedule, "clip_norm": clip_norm}
        else:
            estimator = functools.partial(mini_batch, sampler=fixed(batch_size)) if gradient is None else gradient
            noise = None if noise_scale is None else jaxfl.gaussian(noise_scale)
            arguments = {"gradient": estimator(clip_norm=clip_norm), "step_size": step_size, "noise": noise}
        delay = {} if self.row.synchronous else {"max_delay": 6}
        return self.row.constructor(**{**tasks, **self.topology, **arguments, **delay, **changes})

    def preserved(self):
        """What nodes weigh, (n,), in the sum of parameters that averaging preserves."""
        if self.row.mixing == "rooted":
            return consensus_weights(self.topology["state_weights"])
        if self.row.mixing == "sizes":
            received = self.topology["graph"].adjacency(0) * np.asarray(self.data.sizes)
            return consensus_weights(received / received.sum(axis=1, keepdims=True))
        return np.ones(self.data.num_nodes)

    def permuted(self, order) -> dict[str, Any]:
        """The topology with its nodes relabeled: new node i is old node order[i]."""

        def permute(name, one):
            if name == "graph":
                return graphs.permute(one, order)
            if name == "client_class":
                return one[order]
            return one[order][:, order] if self.row.mixing == "rooted" else one

        return {name: permute(name, one) for name, one in self.topology.items()}

    def complete(self, num_nodes) -> dict[str, Any]:
        """The topology in which everybody hears everything of everybody in a round, or after one local step."""
        if self.row.topology == "server":
            everybody = {"num_active": num_nodes, "num_local_steps": 1}
            return everybody | ({} if self.row.classes == "none" else {"client_class": np.zeros(num_nodes, int)})
        if self.row.topology == "average":
            return {"synchronized": "all", "num_local_steps": 1}
        graph = graphs.complete(num_nodes)
        return {name: graph if name == "graph" else graph.mixing_matrix(0) for name in self.topology}


def problem(name):
    """Five nodes with uneven data, on a graph as irregular as the row allows; three of five clients of a server; five
    that average their last layer.

    Where clients are of classes, those of class 1 are too weak for the whole model.
    """
    row = REGISTRY[name]
    if row.topology == "server":
        classes = {} if row.classes == "none" else {"client_class": np.array([0, 1, 1, 0, 1])}
        blocks = {"trained_blocks": (("dense_1", "dense_2"), ("dense_2",))} if row.classes == "blocks" else {}
        return Problem(row, {"num_active": 3, "num_local_steps": 3, **classes, **blocks}, uneven_data())
    if row.topology == "average":
        return Problem(row, {"synchronized": ("dense_2",), "num_local_steps": 3}, uneven_data())
    if row.mixing == "rooted":
        return Problem(row, graphs.five_agents()._asdict(), uneven_data())
    return Problem(row, {"graph": irregular_graph() if row.mixing == "column" else graphs.ring(5)}, uneven_data())
