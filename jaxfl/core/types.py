"""Tasks to learn (`Task`) and the data to learn them from (`FederatedData`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core.reprs import of_params, short, short_repr, some

Array = jax.Array
PyTree = Any


class FactoredLayer(NamedTuple):
    """Form of one layer's gradient for one sample as a function of two small arrays, its factors.

    For a dense layer these are the layer's input a and the error e at its output (the gradient of the sample's
    loss with respect to the pre-activation): the weight's gradient is the outer product a e^T. Everything
    below works on a batch of factors and never needs the (b, *leaf) gradients themselves.

    Attributes:
        name: key of this layer's parameters at the top level of the task's parameter dict.
        input_is_sample: True for a layer that reads the sample itself; its input need not be stored.
        is_outer_product: whether a sample's gradient is one outer product, so that it shrinks where a factor's entries
            do. False for a sum of such products (over a convolution's positions), which then may grow.
        squared_norm: (input (b, ...), error (b, ...)) -> (b,) float32, squared L2 norm of each sample's gradient. Where
            float32 sums cancel it is rounded up, so that clipping by it holds.
        absolute_norm: the same for the L1 norm.
        weighted_sum: (input, error, weight (b,)) -> the layer's gradient tree, summed over samples times weight.
        per_sample: (input, error) -> the layer's gradient tree with a leading batch axis (b, *leaf).
        kept: (input, error) -> (result of `squared_norm`, result of `per_sample`, with zeros for a sample whose norm is
            not finite), or None where making a batch's gradients twice is cheaper. None for a layer that keeps none.
    """

    name: str
    input_is_sample: bool
    is_outer_product: bool
    squared_norm: Callable[[Array, Array], Array]
    absolute_norm: Callable[[Array, Array], Array]
    weighted_sum: Callable[[Array, Array, Array], PyTree]
    per_sample: Callable[[Array, Array], PyTree]
    kept: Callable[[Array, Array], tuple[Array, PyTree] | None] | None = None

    __repr__ = short_repr


class Factors(NamedTuple):
    """The factors of one batch, one entry per layer in the order of `Task.layers`."""

    inputs: tuple[Array, ...]  # each (b, *layer input), float32
    errors: tuple[Array, ...]  # each (b, *layer output), float32


class Variables(NamedTuple):
    """Parameters and model state for the evaluation of a task, of one node or with the node axis first."""

    params: PyTree  # trained
    model_state: PyTree  # not trained: batch statistics


class Part(NamedTuple):
    """Training some blocks of a task while the others stay as they are; `Task.part` makes it.

    What lies in front of the first trained block is run forward only. Its outputs, the features, therefore do not
    change while the trained blocks do, and need to be computed once. A flax module has no place to cut: its part takes
    the inputs, and runs the whole module forward in each step.

    Attributes:
        trained: names of the trained blocks, input side first.
        features: (params, model_state, inputs (b, *sample)) -> (b, ...), float32 or the type that the task computes in:
            the input of the trained side, in evaluation mode (running statistics, no dropout). None where the first
            block is trained, or where there is no place to cut: then the features are the inputs themselves.
        features_train: (params, model_state, inputs, weights (b,), key) -> (b, ...): the same in training mode (the
            batch's statistics, dropout), which leaves the model state as it is. None with `features`.
        train_loss: (trained params, frozen params, model_state, features, labels, weights, key) -> (losses (b,), new
            model_state), in training mode, except that frozen blocks behind a trained one evaluate. Trained params are
            those of the blocks in `trained`, to be differentiated; frozen params are all others. Model state and key
            are None where the task has none; the state of frozen blocks is returned as it is. Given the features that
            `features_train` makes with the same key, each layer draws from a key of its own, as in `Task.train_loss`.
    """

    trained: tuple[str, ...]
    features: Callable[[PyTree, PyTree, Array], Array] | None
    features_train: Callable[[PyTree, PyTree, Array, Array, Array], Array] | None
    train_loss: Callable[[PyTree, PyTree, PyTree, Array, Array, Array, Any], tuple[Array, PyTree]]


class Task(NamedTuple):
    """Learning task, as pure functions of one node's parameters and one batch.

    Build it with `jaxfl.from_functions`, `jaxfl.from_flax` or `jaxfl.models.classification`.

    A task with batch normalization or dropout has `init_state` and `train_loss`. Its samples have no losses, and no
    gradients, of their own while it trains, so that algorithms which bound one sample's influence refuse it; the others
    keep its model state beside the parameters, train by `train_loss`, and give `Variables` as `node_params`.

    Attributes:
        init: key -> params, a pytree of float32 arrays without node axis.
        loss: (params, inputs (b, *sample), labels (b, ...)) -> (b,) float32, one loss per sample, no mean. For a task
            with model state the first argument is `Variables`, and layers run in evaluation mode.
        metrics: the same arguments -> dict of name to (b,) float32, one number per sample. Always holds "loss".
        blocks: names of the top-level groups of the parameters, input side first; empty when they have no order.
        layers: the layers in factored form, input side first; empty when the task has no such form (then clipped
            gradients fall back to one sample at a time).
        factors: (params, inputs, labels) -> (losses (b,), Factors), errors being those of the *summed* loss; None
            without layers. Inputs of Factors are finite: a sample with another input has a loss of NaN, and its
            gradient is discarded under a clip norm.
        node_loop: how the engine runs this task over nodes, "vmap", "map" or "chunk:k", or one of these behind
            "devices:" (see `core.node_loop`).
        init_state: () -> model state, a pytree of float32 arrays, empty for dropout only; None without `train_loss`.
        train_loss: (params, model_state, inputs, labels, weights (b,), key) -> (losses (b,), new model_state) in
            training mode. Samples of weight 0 are padding: they do not count in batch statistics. Without a model state
            (None) the new one is made of this batch only. The key is consumed by dropout. None where training needs
            neither.
        part: names of any blocks -> `Part`, how to train these and no others. None where there is no such way; then
            `params` is not necessarily a dict of blocks.
        logits: (params, inputs) -> (b, classes), where the labels are classes; None where they need not be.
        modes: names of the layers that train by batch statistics or with dropout, for errors.
        is_by_sample: whether each sample is known to have a loss of its own, as with layers of `jaxfl.models`; where it
            is not known, `check_task` tries it.
    """

    init: Callable[[Array], PyTree]
    loss: Callable[[PyTree, Array, Array], Array]
    metrics: Callable[[PyTree, Array, Array], dict[str, Array]]
    blocks: tuple[str, ...] = ()
    layers: tuple[FactoredLayer, ...] = ()
    factors: Callable[[PyTree, Array, Array], tuple[Array, Factors]] | None = None
    node_loop: str = "vmap"
    init_state: Callable[[], PyTree] | None = None
    train_loss: Callable[[PyTree, PyTree, Array, Array, Array, Array], tuple[Array, PyTree]] | None = None
    part: Callable[[tuple[str, ...]], Part] | None = None
    logits: Callable[[PyTree, Array], Array] | None = None
    modes: tuple[str, ...] = ()
    is_by_sample: bool = False

    def __repr__(self) -> str:
        blocks = f" in {some(self.blocks)}" if self.blocks else ""
        return f"Task({of_params(self.init)}{blocks}, loss={short(self.loss)}, node_loop={self.node_loop!r})"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PoolParts:
    """Mark of a pool of samples that is cut into parts by owner; static, without an array."""

    count: int
    """Equal parts of the pool, and equal groups of nodes, both in order. Each node's samples lie in the part of its
    group."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NodeNames:
    """Names of the nodes, as a static object without an array."""

    names: tuple[str, ...]
    """(n,), distinct."""


def node_text(node: int, names: Sequence[str] | None) -> str:
    """Number of a node for people, with its name where there are names.

    Examples:
        >>> node_text(1, None), node_text(1, ("north", "south"))
        ('node 1', "node 1 ('south')")
    """
    return f"node {node}" if names is None else f"node {node} ({names[node]!r})"


class FederatedData(NamedTuple):
    """One pool of samples and which of them each node holds.

    Uneven sizes are normal. Row i of `indices` is valid up to `sizes[i]`. Padding follows, which never trains and never
    counts. A node's j-th sample is `inputs[indices[i, j]]`.
    """

    inputs: Array  # (N, *sample), uint8 images or float32
    labels: Array  # (N, ...), int32 classes or float32 targets
    indices: Array  # (n, J_max), int32, in [0, N); padding is 0, or the first row of the node's part
    sizes: Array  # (n,), int32, samples of each node, at least 1
    parts: PoolParts | None = None  # None: any node's samples may lie anywhere in the pool
    node_names: NodeNames | None = None  # None: nodes are numbers

    __repr__ = short_repr

    @property
    def names(self) -> tuple[str, ...] | None:
        """(n,), names of the nodes; None where they are numbers."""
        return None if self.node_names is None else self.node_names.names

    @property
    def num_nodes(self) -> int:
        """n, static."""
        return self.indices.shape[0]

    @property
    def max_size(self) -> int:
        """J_max, static: the largest number of samples at a node."""
        return self.indices.shape[1]

    def places(self, positions: Array) -> Array:
        """Look up where in the pool samples of the nodes lie.

        Args:
            positions: (n, c), int32, among each node's samples; a node's size or more stands for its last sample.

        Returns:
            (n, c), int32, in [0, N).
        """
        # Positions under a mask, `where(mask, positions, 0)`, end the process on a CPU with AVX-512 where nodes have
        # two samples: a fault of XLA (docs/decisions/xla_gather.md).
        return jnp.take_along_axis(self.indices, jnp.minimum(positions, self.sizes[:, None] - 1), axis=1)
