"""Adapters that turn a user's model into a `Task`: plain functions, or a flax (nnx) module with a loss.

Also checks that refuse a task with batch statistics where each sample must have a loss of its own, and the calibration
of batch statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import check
from jaxfl.core.check import ArgumentError, is_traced
from jaxfl.core.keys import leaf_key
from jaxfl.core.tree import leaf_names, number_type, weighted_sum, with_new_arrays
from jaxfl.core.types import Array, FederatedData, Part, PyTree, Task, Variables

if TYPE_CHECKING:
    from flax import nnx


def scale_images(inputs: Array) -> Array:
    """uint8 images as float32 in [0, 1]; anything else unchanged."""
    return inputs.astype(jnp.float32) / 255.0 if inputs.dtype == jnp.uint8 else inputs


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Softmax cross entropy of each sample; logits (b, c) float32, labels (b,) int32; returns (b,).

    A label that is no class, negative or too large, gives NaN.
    """
    if not jnp.issubdtype(labels.dtype, jnp.integer) or labels.ndim != logits.ndim - 1:
        found = f"got {labels.dtype} of shape {labels.shape} for outputs of shape {logits.shape}"
        raise ArgumentError("labels", "must be one integer a sample, its class", found, "Pass labels.argmax(axis=-1).")
    import optax  # takes longer than the library

    # JAX counts a negative index from the end: class -1 would be the last class.
    classes = jnp.where(labels < 0, logits.shape[-1], labels)
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, classes)


def of_samples(name: str, values: Array, inputs: Array) -> Array:
    """Return `values`, losses or a metric of a task; refuse them unless there is one for each sample.

    Args:
        name: name of the values, for the error.
        values: (b,).
        inputs: (b, *sample).

    Raises:
        ArgumentError: the values have another shape. (A mean over the batch would count padding.)
    """
    if jnp.shape(values) != (len(inputs),):
        found = f"got shape {jnp.shape(values)} for {len(inputs)} samples"
        remedy = "Leave means over the batch to the engine: padding would count in them."
        raise ArgumentError(name, "must return one number for each sample, shape (b,)", found, remedy)
    return values


def sample_losses(task: Task, params: PyTree, inputs: Array, labels: Array) -> Array:
    """`task.loss` of a batch, (b,); ArgumentError when traced, if the task gives anything but a loss a sample."""
    return of_samples("task.loss", task.loss(params, inputs, labels), inputs)


def sample_metrics(task: Task, params: PyTree, inputs: Array, labels: Array) -> dict[str, Array]:
    """`task.metrics` of a batch, (b,) each; ArgumentError when traced, if one is anything but a number a sample."""
    numbers = task.metrics(params, inputs, labels)
    return {name: of_samples(f"task.metrics[{name!r}]", values, inputs) for name, values in numbers.items()}


def accuracy(logits: Array, labels: Array) -> Array:
    """1.0 where the largest logit is the label's, else 0.0, (b,) float32."""
    labels = jnp.asarray(labels)  # NumPy's int64 becomes JAX's integer without a warning
    return (jnp.argmax(logits, axis=-1).astype(labels.dtype) == labels).astype(jnp.float32)


def from_functions(
    init: Callable[[Array], PyTree],
    loss: Callable[[PyTree, Array, Array], Array],
    metrics: Callable[[PyTree, Array, Array], dict[str, Array]] | None = None,
    *,
    node_loop: str = "vmap",
) -> Task:
    """A task from plain functions.

    Args:
        init: key -> params, a pytree of float32 arrays, of dictionaries or any registered class.
        loss: (params, inputs (b, *sample), labels (b, ...)) -> (b,) losses.
        metrics: the same arguments -> dict of (b,) numbers; "loss" is added. Default: the loss only.
        node_loop: see `jaxfl.core.node_loop`.

    Raises:
        ArgumentError: what is no such function; on use, params with a leaf that is no array, or a loss or metric that
            is not one number a sample.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> task = from_functions(lambda key: jnp.zeros(3), lambda w, x, y: (x @ w - y) ** 2)
        >>> task.loss(jnp.ones(3), jnp.ones((2, 3)), jnp.zeros(2)).tolist()
        [9.0, 9.0]
    """
    check.takes(1, init=init)
    check.takes(3, loss=loss)

    def params_of(key):
        params = init(key)
        for path, leaf in jax.tree.leaves_with_path(params):
            if not hasattr(leaf, "dtype"):
                found = f"{jax.tree_util.keystr(path) or 'init'} is {leaf!r}"
                raise ArgumentError("init", "must return arrays", found, "Use eqx.filter(module, eqx.is_array), say.")
        return with_new_arrays(params)

    def losses(params, inputs, labels):
        return of_samples("loss", loss(params, inputs, labels), inputs)

    def all_metrics(params, inputs, labels):
        numbers = {} if metrics is None else metrics(params, inputs, labels)
        by_sample = {name: of_samples(f"metrics[{name!r}]", values, inputs) for name, values in numbers.items()}
        return {"loss": losses(params, inputs, labels), **by_sample}

    return Task(init=params_of, loss=losses, metrics=all_metrics, node_loop=node_loop)


def from_flax(
    make_module: Callable[[nnx.Rngs], nnx.Module],
    *,
    loss: Callable[[Array, Array], Array] = cross_entropy,
    metrics: dict[str, Callable[[Array, Array], Array]] | None = None,
    preprocess: Callable[[Array], Array] = scale_images,
    trainable: Any = ...,
    node_loop: str = "vmap",
) -> Task:
    """A task from a flax nnx module.

    Args:
        make_module: rngs -> module, called as `module(inputs (b, *sample)) -> outputs (b, ...)`. Its `nnx.Param`s are
            trained. Beside them it may hold nnx.BatchNorm and dropout: the task then has `train_loss`, for `fed_avg`,
            `partial_averaging`, `push_sum` and `d_psgd` where nothing is clipped and no noise is added. It trains as by
            `module.train()` and evaluates as by `module.eval()`. Padding does not count in statistics.
        loss: (outputs, labels) -> (b,) losses.
        metrics: name -> (outputs, labels) -> (b,). Default: {"accuracy": accuracy}.
        preprocess: applied to the raw inputs first.
        trainable: nnx filter of the parameters that train: nnx.LoRAParam, or a function (path, value) -> bool. Default:
            all. The others, and a batch normalization of which none trains, are constants as `make_module(nnx.Rngs(0))`
            makes them. They are no part of the task's parameters: never clipped, perturbed, counted or sent.
        node_loop: see `jaxfl.core.node_loop`.

    Returns:
        A task whose params, those that train, are plain nested dicts. Its `blocks` are the module's attributes that
        hold some, in order of definition. Without batch normalization and dropout it has `part`, for `embracing`:
        frozen blocks are constants to the derivative, so that no backward pass runs in front of the first trained one.

    Raises:
        ArgumentError: a module with other state, whose attributes are named, or one of which nothing trains; on use, a
            loss or metric that is not one number a sample, or random numbers in evaluation.

    Examples:
        >>> import jax
        >>> from flax import nnx
        >>> task = from_flax(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
        >>> sorted(task.init(jax.random.key(0)))
        ['bias', 'kernel']
    """
    from flax import nnx  # takes half a second, for modules of flax only

    from jaxfl.core.flax_modules import functions_of

    fns = {"accuracy": accuracy} if metrics is None else metrics
    is_linen = hasattr(make_module, "init") and hasattr(make_module, "apply")
    if isinstance(make_module, nnx.Module) or is_linen or not callable(make_module):
        found = f"got {type(make_module).__name__}, a module of {'flax.linen' if is_linen else 'nnx'}"
        found = found if callable(make_module) else f"got {make_module!r}"
        remedy = "Pass lambda rngs: MyModule(..., rngs=rngs)"
        remedy = "Pass its init and apply to from_functions." if is_linen else f"{remedy}, which draws parameters anew."
        raise ArgumentError("make_module", "must be a function that makes an nnx module", found, remedy)
    check.takes(1, make_module=make_module)
    module = functions_of(make_module, trainable)

    def apply(variables, inputs):
        params, statistics = variables if module.modes else (variables, {})
        try:
            return module.evaluate(params, statistics, preprocess(inputs))
        except ValueError as error:
            if inputs.dtype != jnp.uint8 or preprocess is not scale_images or "integer" not in str(error):
                raise
        remedy = "Pass preprocess=lambda tokens: tokens, or tokens as int32."
        raise ArgumentError("inputs", "must not be tokens in uint8, which are scaled as images", "got uint8", remedy)

    def losses(params, inputs, labels):
        return of_samples("loss", loss(apply(params, inputs), labels), inputs)

    def all_metrics(params, inputs, labels):
        outputs = apply(params, inputs)
        numbers = {name: of_samples(f"metrics[{name!r}]", fn(outputs, labels), inputs) for name, fn in fns.items()}
        return {"loss": of_samples("loss", loss(outputs, labels), inputs), **numbers}

    logits = apply if loss is cross_entropy else None
    task = Task(
        init=module.init, loss=losses, metrics=all_metrics, blocks=module.blocks, node_loop=node_loop, logits=logits
    )
    if not module.modes:
        return task._replace(part=lambda names: _part(module.blocks, names, losses))

    def train_loss(params, model_state, inputs, labels, weights, key):
        outputs, new_state = module.train(params, model_state, preprocess(inputs), weights, key)
        return loss(outputs, labels), new_state

    return task._replace(init_state=module.init_state, train_loss=train_loss, modes=module.modes)


def _part(blocks: tuple[str, ...], names: tuple[str, ...], losses: Callable[..., Array]) -> Part:
    """The `Part` of any function of (params, inputs, labels): frozen blocks are arguments without a derivative."""

    def train_loss(own, others, model_state, inputs, labels, weights, key):
        return losses({**others, **own}, inputs, labels), model_state

    return Part(tuple(name for name in blocks if name in names), None, None, train_loss)


def evaluated(task: Task, params: PyTree, model_state: PyTree) -> PyTree:
    """The first argument of `task.loss`: `Variables` of a task with `train_loss`, else the parameters."""
    return params if task.train_loss is None else Variables(params, model_state)


def check_sample_losses(task: Task) -> None:
    """Refuse a task whose samples have no losses of their own in training.

    Args:
        task: of an algorithm that weighs, bounds or stores one sample's gradient.

    Raises:
        ArgumentError: the task has `train_loss`.
    """
    if task.train_loss is not None:
        where = "batch statistics or dropout" + (f" ({', '.join(task.modes[:4])})" if task.modes else "")
        raise ArgumentError(
            "task",
            "must give every sample a loss of its own: this algorithm bounds or stores single samples' gradients",
            f"got one that trains with {where}",
            "Use GroupNorm and no dropout, or neither clip nor add noise, in fed_avg, push_sum or d_psgd.",
        )


def check_task(task: Task, data: FederatedData) -> None:
    """Refuse parameters that are not float32 or float64, and a loss that mixes the samples of a batch.

    With clipping each sample is differentiated alone; without, padding would count in such a loss.

    Args:
        task: its loss is tried on two samples, unless it `is_by_sample`, as tasks of `jaxfl.models` are.
        data: where its arrays are traced the loss is not tried.

    Raises:
        ArgumentError: parameters of another type, an unknown label, or a loss that mixes samples.
    """
    shapes = jax.eval_shape(task.init, jax.eval_shape(lambda: jax.random.key(0)))
    for name, leaf in leaf_names(shapes).items():
        if leaf.dtype not in (jnp.float32, jnp.float64):
            remedy = "Keep counters out of the parameters; compute_dtype makes layers run in bfloat16."
            raise ArgumentError("params", "must be float32 or float64", f"{name} is {leaf.dtype}", remedy)
    if is_traced(data.inputs) or is_traced(data.labels):
        return
    if task.logits is not None:
        _check_labels(task, task.logits, shapes, data)
    if task.is_by_sample or task.train_loss is not None:
        return
    with jax.ensure_compile_time_eval():
        start = task.init(jax.random.key(0))
        if any(map(is_traced, jax.tree.leaves(start))):
            return
        params = jax.tree.map(_displace, start)  # at zero a loss may depend on no sample at all
        last = len(data.inputs) - 1
        batches = [np.array(rows) for rows in ([0, last], [0], [last])]
        losses = [sample_losses(task, params, data.inputs[rows], data.labels[rows]) for rows in batches]
    if any(map(is_traced, losses)):
        return
    both, alone = np.asarray(losses[0]), np.concatenate([np.asarray(one) for one in losses[1:]])
    if np.all(np.isfinite(both)) and not np.allclose(both, alone, rtol=1e-2, atol=1e-2 * np.abs(alone).max()):
        found = f"got losses {both.tolist()} of two samples together, and {alone.tolist()} of each alone"
        remedy = "Compute each sample's loss from that sample; make batch statistics with `train_loss`."
        raise ArgumentError("task.loss", "must not mix the samples of a batch", found, remedy)


def _check_labels(task: Task, logits: Callable[[PyTree, Array], Array], params: PyTree, data: FederatedData) -> None:
    """Refuse a label without a logit: under a clip norm its sample would count as zero in every round."""
    variables = params if task.init_state is None else Variables(params, task.init_state())
    num_classes = jax.eval_shape(logits, variables, data.inputs[:1]).shape[-1]
    with jax.ensure_compile_time_eval():
        low, high = int(jnp.min(data.labels)), int(jnp.max(data.labels))
    if low < 0 or high >= num_classes:
        found = f"got labels {low} to {high} for {num_classes} logits"
        remedy = "Count classes from 0, and give the model a logit for each."
        raise ArgumentError("labels", "must be classes from 0 to the number of logits less 1", found, remedy)


def _displace(leaf: Array) -> Array:
    """Parameters a little away from their start."""
    return leaf + 0.1 * np.cos(np.arange(leaf.size)).reshape(leaf.shape).astype(leaf.dtype)


def calibrated_state(task: Task, params: PyTree, inputs: Array, labels: Array, weights: Array, key: Array) -> PyTree:
    """Model state made of given samples: the mean over batches of each batch's own statistics, in training mode.

    Static batch normalization, which tracks no statistics in training, is evaluated with them; any other may be, too.

    Args:
        task: one with `train_loss`.
        params: of one node.
        inputs: (m, b, *sample): m batches.
        labels: (m, b, ...).
        weights: (m, b), float32, 0 for padding. A batch counts in proportion to its sum, of which one must be above 0.
        key: typed, consumed; for dropout.

    Returns:
        Model state.

    Guarantees:
        - of one batch: the statistics with which the task trains on it.
        - padding never counts.

    Examples:
        >>> from jaxfl.models import classification, sequential
        >>> from jaxfl.models.layers import batch_norm
        >>> task = classification(sequential([("norm", batch_norm(1, tracked=False))]))
        >>> key, inputs, labels = jax.random.key(0), jnp.array([[[1.0], [3.0]]]), jnp.zeros((1, 2), jnp.int32)
        >>> calibrated_state(task, task.init(key), inputs, labels, jnp.ones((1, 2)), key)["norm"]["mean"].tolist()
        [2.0]

    References:
        Diao, Ding, Tarokh: "HeteroFL", ICLR 2021, arXiv:2010.01264, section 3.
    """
    if task.train_loss is None:
        raise ArgumentError("task", "must have model state", "got one without `train_loss`", "Add batch normalization.")
    train_loss = task.train_loss

    def statistics(batch):
        position, batch_inputs, batch_labels, batch_weights = batch
        return train_loss(params, None, batch_inputs, batch_labels, batch_weights, leaf_key(key, position))[1]

    weights = weights.astype(number_type(params))
    positions = jnp.arange(weights.shape[0], dtype=jnp.uint32)
    of_batches = jax.lax.map(statistics, (positions, inputs, labels, weights))
    return weighted_sum(weights.sum(axis=1) / weights.sum(), of_batches)
