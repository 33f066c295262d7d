"""Local steps of a client between two exchanges with its server.

A client starts from (x, s), parameters and model state, and a fresh optimizer. For t = 1, ..., tau

    g <- the gradient of the step's batch at x, x <- x + u, s <- the new model state,    u: the optimizer's update for g

g is the gradient of the batch's mean loss. With `clip_norm` it is (1/b) (sum of every sample's gradient, clipped), and
with `noise` it is released with noise: DP-SGD. The algorithm says what a step trains: the whole model, some blocks, or
a narrower model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl.algorithms.clients.shared_noise import check_shared, noise_keys, own_part
from jaxfl.algorithms.clients.step_types import check_types
from jaxfl.algorithms.clients.steps import (
    GradientOf,
    NoiseKeys,
    Step,
    StepDraws,
    StepGradient,
    batch_loss,
    by_backward,
    masked_mean,
    over_used_groups,
    samples_of,
)
from jaxfl.core import (
    ArgumentError,
    Array,
    FederatedData,
    Info,
    Purpose,
    PyTree,
    Task,
    check,
    node_keys,
    purpose_key,
    stream_key,
)
from jaxfl.core.algorithm import check_optimizer, constructor
from jaxfl.core.devices import varying_like
from jaxfl.core.info import Fatal
from jaxfl.core.platform import is_cpu
from jaxfl.core.reprs import short_repr
from jaxfl.core.tasks import check_sample_losses, check_task
from jaxfl.core.tree import number_type
from jaxfl.gradients import Sampler, fixed, per_example
from jaxfl.gradients.estimator import batch_sums
from jaxfl.gradients.samplers import BATCH_OVERFLOW, check_counts
from jaxfl.privacy.mechanisms import (
    NO_NOISE,
    NoiseMechanism,
    released,
    require_float_noise,
    require_rescaled,
)

Optimizer = optax.GradientTransformation | Callable[[Array], optax.GradientTransformation]


class LocalSteps(NamedTuple):
    """Local steps of clients between two exchanges with their server, made by `local_steps`.

    Attributes:
        max_steps: tau, the most steps of a round.
        is_private: whether samples' gradients are clipped, or noise is added to a step's.
        batch_size: b, samples of a step, expected ones where batches are Poisson.
        clip_norm: bound on the L2 norm of a sample's gradient; None: not clipped.
        noise: added to each step's mean gradient; None: none.
        num_steps: the argument of `local_steps`.
        differentiable: whether a round has a reverse derivative.
        sampler: "fixed", "uniform" or "poisson", how batches are drawn; a Poisson batch may exceed its slots.
        optimizer_at: round index () -> the optax optimizer of that round.
        weighting: "data" or "uniform", the rule of `weigh`.
        steps_at: round index () -> the steps that run in it, (), int32.
        check_data: (task, data) -> None; raises for data that `init` must refuse.
        draw: (key, round index, active (k,), data, task, number of steps or None, stream=0) -> `StepDraws`. A client's
            draws do not depend on who else is active. A second draw of a round takes another `stream`
            (`core.stream_key`).
        steps: (data, active (k,), draws) -> `Step` with leaves (k, tau, ...).
        mean: (losses (c,), mask (c,)) -> the mean loss of a step, ().
        gradient_of: (task, data) -> the gradient of a `Step` by the whole model of a task.
        run: (gradient of a step, params, model state, what each step gets (tau, ...), round index, number of steps or
            None) -> (params, model state, `Info`) after one client's steps: means over steps of measurements, sums of
            counts, each ().
        counts: (steps, draws, round index) -> `Info.counts` of the active clients' steps, (k,), int32.
        weigh: (data, active (k,)) -> the weights of the active clients, (k,), float32.
    """

    max_steps: int
    is_private: bool
    batch_size: int
    clip_norm: float | Array | None
    noise: NoiseMechanism | None
    num_steps: int | Array | Callable[[Array], Array] | None
    differentiable: bool
    sampler: str
    optimizer_at: Callable[[Array], optax.GradientTransformation]
    weighting: str
    steps_at: Callable[[Array], Array]
    check_data: Callable[[Task, FederatedData], None]
    draw: Callable[..., StepDraws]
    steps: Callable[[FederatedData, Array, StepDraws], Step]
    mean: Callable[[Array, Array], Array]
    gradient_of: Callable[[Task, FederatedData], GradientOf]
    run: Callable[..., tuple[PyTree, PyTree, Info]]
    counts: Callable[[Step, StepDraws, Array], dict[str, Any]]
    weigh: Callable[[FederatedData, Array], Array]
    __repr__ = short_repr

    @property
    def noise_std(self) -> float | Array:
        """Scale of the noise of one step on one coordinate, () or (n,), or 0."""
        return 0.0 if self.noise is None else self.noise.noise_scale


@constructor
def local_steps(
    max_steps: int,
    *,
    batch_size: int,
    optimizer: Optimizer,
    sampler: Callable[[int], Sampler] = fixed,
    clip_norm: float | Array | None = None,
    noise: NoiseMechanism | None = None,
    num_steps: int | Array | Callable[[Array], Array] | None = None,
    differentiable: bool = False,
    weighting: str = "data",
) -> LocalSteps:
    """Local steps of any optax optimizer.

    Args:
        max_steps: tau, static, the most steps of a round.
        batch_size: b, samples in a step; the batches of different steps are independent.
        optimizer: any optax optimizer, or a function of the round index that gives it (`client_sgd` does). Its state
            is reset every round: a schedule counts the steps of one round, and moments begin at 0. Pass a function of
            the round index for a schedule over rounds; moments that live through the run are the server's
            (`fed_avg(server_optimizer=...)`). Its numbers may be traced.
        sampler: batch size -> how a step's batch is drawn. `jaxfl.gradients.fixed`: without repetition; a client with
            fewer samples uses all of them, and the mean is over those used. `poisson` and `uniform`: the mean is the
            sum over b, and no client may hold fewer samples.
        clip_norm: bound on the L2 norm of each sample's gradient; the mean is then the sum over b, and no client may
            hold fewer samples than b. May be traced.
        noise: added to each step's mean gradient, with one scale, () or one for each client, (n,), which may be traced:
            `jaxfl.gaussian(sigma C / b)` is DP-SGD with noise multiplier sigma. `jaxfl.shared_gaussian` is shared by
            pairs of the round's active clients, its key graph being over their places among these. It cancels in the
            server's sum, and any number of steps is covered, even against a server that sees every update. It takes
            uniform weighting and an optimizer that is linear in the gradients (SGD, momentum).
        num_steps: the steps that run, at most `max_steps`: a number, a traced scalar or a function of the round index.
            Default: all. A new value of a traced number needs no new compilation.
        differentiable: loop form. True: `max_steps` steps under a mask, so that a round has a reverse
            derivative, which takes the memory of all of them. False: a loop of `num_steps` steps, of which JAX refuses
            the reverse derivative. In such a loop an accelerator's host waits once a step to learn whether another
            follows. A mask avoids this, but would compute the steps that are not taken, and ALI-DPFL takes few. On
            accelerators, clients of several classes that are drawn from all have a derivative only if True, too.
        weighting: "data", by the clients' numbers of samples, or "uniform".

    Raises:
        ArgumentError: an unusable number, optimizer, noise or weighting; from `check_data`, an unusable task or data.

    Guarantees:
        - `num_steps` steps equal a run whose `max_steps` is that number.
        - without noise and clipping it is the plain optimizer.
        - a client's draws do not depend on who else is active, nor on the number of steps.
        - equal scales of all clients give what one scale gives.
        - under a mask and as a loop, steps give the same parameters.

    Examples:
        >>> def gradient_of(x, model_state, target):
        ...     return StepGradient(x - target, model_state, Info(0.5 * (x - target) ** 2))
        >>> steps = local_steps(2, batch_size=1, optimizer=optax.sgd(0.5, momentum=0.5))
        >>> x, _, info = steps.run(gradient_of, jnp.float32(0.0), None, jnp.ones(2), jnp.int32(0))
        >>> float(x), float(info.loss)  # 0 -> 0.5, then v = 0.5 (-1) - 0.5; losses 1/2 and 1/8
        (1.0, 0.3125)
    """
    check.at_least(1, max_steps=max_steps, batch_size=batch_size)
    check.one_of(("data", "uniform"), weighting=weighting)
    per_example.check_clipping(clip_norm, 2)
    if num_steps is not None and not callable(num_steps):
        check.scalar(num_steps=num_steps)
        check.non_negative(num_steps=num_steps)
        check.whole(num_steps=num_steps)
        if not check.is_traced(num_steps) and num_steps > max_steps:
            remedy = "Pass fewer steps, or raise max_steps."
            raise ArgumentError("num_steps", f"must be at most max_steps, {max_steps}", f"got {num_steps}", remedy)
    missing = "how far one sample moves the sums of gradients that all local steps round to a grid"
    mechanism = noise or NO_NOISE
    require_float_noise(missing, noise=mechanism.distribution)
    require_rescaled(mechanism)
    own_scales = mechanism.noise_scale if jnp.ndim(mechanism.noise_scale) else None
    state_types = check_optimizer("optimizer", optimizer, by_round=True)
    check_shared(mechanism, weighting, state_types, max_steps)
    if "MultiStepsState" in state_types:
        requirement, remedy = "must keep no gradients for later: it starts anew in each round", "Raise batch_size."
        raise ArgumentError("optimizer", requirement, "got optax.MultiSteps", remedy)
    stays = max_steps == 1 or (isinstance(num_steps, int) and num_steps == 1)
    if stays and state_types & {"ScaleByScheduleState", "WrappedScheduleState"}:
        requirement = "must be a function of the round index for a schedule over rounds: it starts anew in each round"
        remedy = "Pass lambda k: optax.sgd(schedule(k)), or jaxfl.client_sgd(schedule)."
        raise ArgumentError("optimizer", requirement, "got a schedule that stays at its start", remedy)
    scheme, is_private = sampler(batch_size), clip_norm is not None or noise is not None
    by_count = scheme.name == "fixed" and not is_private  # the mean is over the samples used, not b

    def optimizer_at(round_index):
        # An optax transformation is a tuple; a function of the round index is not.
        return optimizer if isinstance(optimizer, optax.GradientTransformation) else optimizer(round_index)

    def count_at(round_index, count):
        return jnp.clip(jnp.asarray(count(round_index) if callable(count) else count, jnp.int32), 0, max_steps)

    def steps_at(round_index):
        return jnp.int32(max_steps) if num_steps is None else count_at(round_index, num_steps)

    def count_or_none(round_index, override):
        """The number of steps; None where all run."""
        count = num_steps if override is None else override
        return None if count is None else count_at(round_index, count)

    def check_data(task, data):
        if is_private:
            check_sample_losses(task)
        check_task(task, data)
        if not by_count:
            check_counts(scheme, data.sizes, data.names)
        check.per_node(data.num_nodes, noise=own_scales)
        check_types(task, data, own_part(mechanism))

    def draw(key, round_index, active, data, task, override=None, *, stream=0):
        key = stream_key(key, stream)
        sizes, count = data.sizes[active], count_or_none(round_index, override)

        def step_keys(purpose):
            """(k, tau): one key for each local step of the active clients, by the client's own number."""
            of_round = purpose_key(key, purpose, round_index, apart=True)
            clients = node_keys(of_round, data.num_nodes)[active]
            return jax.vmap(lambda client: node_keys(client, max_steps))(clients)

        def batch(step_key, size):
            indices, mask, overflow = scheme.draw_node(step_key, size)
            # The sampler `fixed` gives a slot without a sample the slot's own position, which is at least `size`.
            return jnp.where(mask, indices, size), overflow

        keys = step_keys(Purpose.BATCH)
        if count is None or not is_cpu():
            indices, overflow = jax.vmap(jax.vmap(batch, (0, None)))(keys, sizes)
            if count is not None:  # a loop of traced length would make the host wait in every iteration
                runs = jnp.arange(max_steps, dtype=jnp.int32) < count
                indices = jnp.where(runs[None, :, None], indices, sizes[:, None, None])
                overflow = jnp.where(runs[None], overflow, 0)
        else:
            k = len(active)
            empty = jnp.broadcast_to(sizes[:, None, None], (k, max_steps, scheme.capacity))

            def one_step(t, carry):
                indices, overflow = jax.vmap(batch)(keys[:, t], sizes)
                return carry[0].at[:, t].set(indices), carry[1].at[:, t].set(overflow)

            zero = jnp.zeros((k, max_steps), jnp.int32)
            indices, overflow = jax.lax.fori_loop(0, count, one_step, varying_like((empty, zero), keys, sizes))
        return StepDraws(
            batch_indices=indices,
            batch_overflow=overflow.sum(axis=1, dtype=jnp.int32),
            dropout_keys=None if task.train_loss is None else step_keys(Purpose.DROPOUT),
            noise=None if noise is None else noise_keys(mechanism, key, round_index, step_keys(Purpose.NOISE)),
        )

    def mean(losses, mask):
        return masked_mean(losses, mask) if by_count else jnp.sum(jnp.where(mask, losses, 0.0)) / batch_size

    def steps_of(data, active, draws):
        samples, mask = samples_of(data, active, draws.batch_indices)
        drawn = draws.noise
        if own_scales is not None and isinstance(drawn, NoiseKeys):
            check.per_node(data.num_nodes, noise=own_scales)  # a client beyond the last would have that one's scale
            scales = jnp.asarray(own_scales, jnp.float32)[active]
            drawn = drawn._replace(scales=jnp.broadcast_to(scales[:, None], drawn.keys.shape))
        return Step(samples=samples, mask=mask, dropout_key=draws.dropout_keys, noise=drawn)

    def gradient_of(task, data):
        if not is_private:
            return by_backward(batch_loss(task, data, mean))

        # Poisson batches leave about half of their slots empty. Nodes that run one after the other can skip these on a
        # CPU; an accelerator's host would have to wait for their number.
        may_skip = scheme.name == "poisson" and not differentiable and is_cpu()
        skips = may_skip and task.node_loop.removeprefix("devices:") == "map"

        def sums(params, step):
            weights = step.mask.astype(number_type(params)) / batch_size
            total = per_example.weighted_sum(
                task, params, data.inputs[step.samples], data.labels[step.samples], weights, clip_norm=clip_norm
            )
            return total.gradient, batch_sums(total, weights, step.mask)

        def private(params, model_state, step):
            gradient, info = over_used_groups(partial(sums, params), step) if skips else sums(params, step)
            noise_draw = None if step.noise is None else step.noise.draw(own_part(mechanism), gradient)  # pyright: ignore
            return StepGradient(released(mechanism, gradient, noise_draw), model_state, info)

        return private

    def run(gradient, params, model_state, steps, round_index, override=None):
        rule, count = optimizer_at(round_index), count_or_none(round_index, override)

        def step(carry, one_step):
            x, state, memory = carry
            result = gradient(x, state, one_step)
            updates, memory = rule.update(result.gradient, memory, x)
            return (optax.apply_updates(x, updates), result.model_state, memory), result.info

        # Over devices, optax's zeros_like of an earlier round's parameters asks for a sharding that fails here. Copies
        # carry no sharding. They cost nothing: the compiled program does not copy.
        params = jax.tree.map(jnp.copy, params)
        start = (params, model_state, rule.init(params))
        if count is None:
            (params, model_state, _), infos = jax.lax.scan(step, start, steps)
            return params, model_state, _summary(infos, jnp.mean)
        form = jax.eval_shape(step, start, jax.tree.map(lambda leaf: leaf[0], steps))[1]
        nothing = varying_like(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), form), start, steps)
        if differentiable:

            def masked(carry, item):
                number, one_step = item
                # A step that is not taken has no derivative, not even one of 0 times infinity.
                return jax.lax.cond(number < count, step, lambda carry, _: (carry, nothing), carry, one_step)

            numbers = jnp.arange(max_steps, dtype=jnp.int32)
            (params, model_state, _), infos = jax.lax.scan(masked, start, (numbers, steps))
        else:

            def body(number, both):
                carry, infos = both
                after, info = step(carry, jax.tree.map(lambda leaf: leaf[number], steps))
                return after, jax.tree.map(lambda sums, value: sums + value, infos, info)

            (params, model_state, _), infos = jax.lax.fori_loop(0, count, body, (start, nothing))
        steps_taken = jnp.maximum(count, 1).astype(jnp.float32)
        return params, model_state, _summary(infos, lambda values: values.sum() / steps_taken)

    def counts_of(steps, draws, round_index):
        """Count gradients, samples that found no slot in a Poisson batch, and the iterations that cost privacy."""
        counts: dict[str, Any] = {"gradient_evaluations": steps.mask.sum(axis=(1, 2), dtype=jnp.int32)}
        counts["forward_evaluations"] = jnp.zeros_like(counts["gradient_evaluations"])
        if scheme.name == "poisson":
            counts[BATCH_OVERFLOW] = Fatal(draws.batch_overflow)
        if is_private:
            counts["local_iterations"] = steps_at(round_index)  # (), of each client
        return counts

    def weigh(data, active):
        sizes = data.sizes[active]
        return (sizes if weighting == "data" else jnp.ones_like(sizes)).astype(jnp.float32)

    return LocalSteps(
        max_steps=max_steps,
        is_private=is_private,
        batch_size=batch_size,
        clip_norm=clip_norm,
        noise=noise,
        num_steps=num_steps,
        differentiable=differentiable,
        sampler=scheme.name,
        optimizer_at=optimizer_at,
        weighting=weighting,
        steps_at=steps_at,
        check_data=check_data,
        draw=draw,
        steps=steps_of,
        mean=mean,
        gradient_of=gradient_of,
        run=run,
        counts=counts_of,
        weigh=weigh,
    )


def require_plain(clients: LocalSteps) -> None:
    """Refuse clients that clip samples' gradients or add noise, where steps do not train the whole model."""
    if clients.is_private:
        requirement = "must neither clip samples' gradients nor add noise where clients train parts of a model"
        raise ArgumentError("clients", requirement, "got private local steps", "Leave clip_norm and noise out.")


def _summary(infos: Info, mean: Callable[[Array], Array]) -> Info:
    """Summarize the values of all steps, or their sums over steps: means of measurements, sums of counts."""
    means = jax.tree.map(mean, Info(infos.loss, infos.measurements))
    return means.plus(jax.tree.map(lambda counts: counts.sum(dtype=jnp.int32), infos.counts))
