"""Per-FedAvg: the common model is good after one more step of a client, not by itself.

Client i makes steps of w, from w = x, each on three batches D, D', D'' of its own:

    u = g_i(w - alpha g_i(w; D); D')
    w <- w - gamma (u - alpha H_i(w; D'') u)        H_i: the Hessian; without it "first order"

x is then the mean of the w, as in `jaxfl.fed_avg`. `after_own_step` gives the models to evaluate.

| symbol | here |
|---|---|
| x, alpha | `State.params`, `inner_step_size` |
| gamma, g_i, D' | `clients`: their optimizer, gradient and batches; D and D'' are drawn alike, each in its stream |

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach", NeurIPS 2020, arXiv:2002.07948, Algorithm 1.

Differences from the paper: those of `jaxfl.fed_avg`. The product H u is one derivative of the gradient along u, exact,
where the paper's variant "HF" takes a difference of two gradients.

Noisy local steps are refused: clipping does not bound a sample's part of the product. Private updates bound a client's
whole change, and their statement covers x.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.algorithms.clients.selection import own_loss
from jaxfl.algorithms.clients.steps import StepGradient
from jaxfl.algorithms.clients.uplink import Uplink
from jaxfl.algorithms.server_rounds import by_optimizer, server_rounds
from jaxfl.core import Algorithm, ArgumentError, Array, FederatedData, PyTree, Task, Variables, check, over_nodes
from jaxfl.core.algorithm import constructor
from jaxfl.core.tree import descend


@constructor
def per_fed_avg(
    task: Task,
    *,
    clients: LocalSteps,
    num_active: int,
    inner_step_size: float | Array,
    hessian: bool = True,
    uplink: Uplink | None = None,
) -> Algorithm:
    """Per-FedAvg.

    Args:
        task, num_active, uplink: as for `jaxfl.fed_avg`.
        clients: the outer steps, of 0.001 to 0.1, without clipping and noise. The loss of the info is that after the
            inner step.
        inner_step_size: alpha, at least 0, of the order of 0.01 to 0.1; may be traced.
        hessian: whether the outer step has its Hessian term, for a third batch and about two gradients more. Static.

    Guarantees:
        - with alpha = 0 it is fed_avg, bit for bit.
        - on full batches a step goes down the mean loss after one step.
    """
    check.scalar(inner_step_size=inner_step_size)
    check.non_negative(inner_step_size=inner_step_size)
    if clients.is_private:
        requirement = "must neither clip nor add noise: clipping does not bound a sample's part of H u"
        remedy = "Pass jaxfl.uplink(updates=jaxfl.private_updates(...)) for whole clients."
        raise ArgumentError("clients", requirement, "got private local steps", remedy)
    more = (clients,) * (2 if hessian else 1)

    def stepped(w, direction):
        return descend(w, jnp.asarray(inner_step_size), direction)

    def wrap(gradients):
        def gradient(w, model_state, batches):
            inner = gradients[1](w, model_state, batches[1]).gradient
            outer = gradients[0](stepped(w, inner), model_state, batches[0])
            if not hessian:
                return outer

            def slope(w):
                return gradients[2](w, model_state, batches[2]).gradient

            product = jax.jvp(slope, (w,), (outer.gradient,))[1]
            return StepGradient(stepped(outer.gradient, product), outer.model_state, outer.info)

        return gradient

    which = tuple(range(1 + len(more)))
    rule = by_optimizer(optax.sgd(1.0), train=lambda at: (at.run(wrap, which=which), ()), more=more)
    return server_rounds(task, clients=clients, num_active=num_active, uplink=uplink, rule=rule)


def after_own_step(task: Task, data: FederatedData, node_params: PyTree, *, inner_step_size: float | Array) -> PyTree:
    """Compute each node's model after one step along the mean gradient of all its samples, as `own_scores` takes it.

    Args:
        task, data: those of the run.
        node_params: what `Algorithm.node_params` gives; statistics stay.
        inner_step_size: alpha.

    Returns:
        Leaves (n, *leaf), as `Variables` where the task has statistics.

    Examples:
        >>> import numpy as np, jaxfl
        >>> task = jaxfl.from_functions(lambda key: jnp.zeros(1), lambda w, x, y: (x @ w - y) ** 2)
        >>> data = jaxfl.federate(np.ones((3, 1), "float32"), np.float32([0, 1, 3]), [[0], [1, 2]])
        >>> after_own_step(task, data, jnp.zeros((1, 1)), inner_step_size=0.25).tolist()  # 0.25 * 2 * mean label
        [[0.0], [1.0]]
    """

    def one(number):
        model = jax.tree.map(lambda leaf: leaf[0 if len(leaf) == 1 else number], node_params)
        model = model if task.train_loss is not None else Variables(model, None)
        slope = jax.grad(lambda params: own_loss(task, data, model._replace(params=params), number)[0])(model.params)
        params = descend(model.params, jnp.asarray(inner_step_size), slope)
        return params if task.train_loss is None else Variables(params, model.model_state)

    return over_nodes(one, task.node_loop)(jnp.arange(data.num_nodes, dtype=jnp.int32))
