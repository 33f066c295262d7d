"""Releases that algorithms have in common, as `jaxfl.privacy.account(learner, ...)` asks for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import ArgumentError, Array, Task, check
from jaxfl.core.check import is_traced
from jaxfl.core.tree import size
from jaxfl.gradients import GradientEstimator
from jaxfl.privacy import Account, NoiseMechanism, gossip
from jaxfl.privacy import clients as accounting
from jaxfl.privacy.clients import ClientRelease, UpdateRelease
from jaxfl.privacy.grid import Grid
from jaxfl.privacy.releases import Releases
from jaxfl.privacy.tracking import TrackingRelease, TrackingSchedule

if TYPE_CHECKING:
    from jaxfl.algorithms.clients.bound_constants import BoundConstants
    from jaxfl.algorithms.clients.local_steps import LocalSteps
    from jaxfl.algorithms.clients.private_updates import PrivateUpdates


def known(**arguments: Any) -> None:
    """Refuse traced numbers: what a program releases follows from numbers that are there before it runs."""
    for name, value in arguments.items():
        if any(is_traced(leaf) or callable(leaf) for leaf in jax.tree.leaves(value)):
            remedy = "Build the learner with numbers, outside of jit and vmap, and ask that one."
            raise ArgumentError(name, "must be a number where releases are asked for", "got a traced one", remedy)


def per_node(num_nodes: int, sizes: Sequence[int], values: Any) -> list[float]:
    """The values of all nodes, one or (n,), as floats; sizes of another number of nodes are refused."""
    if len(sizes) != num_nodes:
        requirement, remedy = f"must hold one number for each of {num_nodes} nodes", "Pass the data of the run."
        raise ArgumentError("sizes", requirement, f"got {len(sizes)}", remedy)
    return np.broadcast_to(np.asarray(values, np.float64), (num_nodes,)).tolist()


def of_noisy_gradients(
    accountant: gossip.Accountant,
    task: Task,
    num_nodes: int,
    estimator: GradientEstimator,
    noise: NoiseMechanism,
) -> Callable[[Sequence[int]], Releases]:
    """Make `Algorithm.releases` where every message follows from noisy gradients: one a node and round."""

    def releases(sizes):
        what = estimator.sampling
        if what is None:
            remedy = "Pass jaxfl.mini_batch(...) or jaxfl.saga(...), or account for the plan by hand."
            raise ArgumentError("gradient", "must say which samples it takes", "got an estimator without it", remedy)
        known(clip_norm=what.clip_norm, noise=noise.noise_scale)
        known_noise = ("gaussian", "grid_gaussian", "shared_gaussian", "shared_grid_gaussian", "none")
        check.one_of(known_noise, noise=noise.distribution)
        grid = None
        if noise.grid_bits is not None:
            sharing = 1 if noise.secrets is None else num_nodes
            grid = Grid(noise.grid_bits, size(jax.eval_shape(task.init, jax.random.key(0))), sharing)
        scales = per_node(num_nodes, sizes, noise.noise_scale)

        def one(count: int, noise_std: float) -> gossip.Release:
            entries = -(-count // what.entry_size)
            # A sample's share of its entry: the mean over entries is that over samples.
            bound = None if what.clip_norm is None else float(what.clip_norm) * (entries / count)
            return gossip.Release(
                estimator=what.estimator,
                sampler=what.sampler,
                batch_size=what.batch_size,
                num_entries=entries,
                clip_norm=bound,
                noise_std=noise_std,
                entry_size=what.entry_size,
                storage=what.storage,
                grid=grid,
                secrets=noise.secrets,
            )

        each = tuple(map(one, sizes, scales))
        return Releases(each, functools.partial(gossip.account, accountant, num_nodes=num_nodes))

    return releases


def of_noisy_states(
    account: Callable[..., Account],
    nodes: int,
    schedule: TrackingSchedule,
    clip_norm: float | Array | None,
    distribution: str,
    gradient_at: str,
    **settings: Any,
) -> Callable[[Sequence[int]], Releases]:
    """Make `Algorithm.releases` of gradient tracking and of the methods with noise on states or outputs.

    Args:
        account: the account of the method, of `jaxfl.privacy.tracking`.
        nodes: n.
        schedule: of the run.
        clip_norm, distribution, gradient_at: as for `gradient_tracking`.
        settings: arguments of `account` that the algorithm knows; arrays hold one number a node.
    """

    def releases(sizes):
        known(clip_norm=clip_norm, schedule=tuple(schedule), **settings)
        norm = None if clip_norm is None else float(clip_norm)
        per_node(nodes, sizes, 0.0)  # which refuses other numbers of nodes

        def of_nodes(each, *, agents: Sequence[int] = range(nodes), **options):
            """Account for some agents, by default all."""
            if len(each) > nodes:
                remedy = "Pass the smallest sizes: a sample takes part most often there."
                raise ArgumentError("sizes", "must be of one run", f"got {len(each) // nodes}", remedy)
            own = {
                name: np.asarray(value)[list(agents)] if np.ndim(value) else value for name, value in settings.items()
            }
            names = ("state_noise_scale", "tracker_noise_scale")
            scales = {name: np.asarray(getattr(schedule, name)) for name in names}
            scales = {name: value[list(agents)] if value.ndim == 2 else value for name, value in scales.items()}
            if "state_in_weights" not in own:
                own["num_nodes"] = len(agents)
            own["num_local_samples"] = [sizes[agent] for agent in agents]
            return account(schedule._replace(**scales), each[0], **own, **options)

        release = TrackingRelease(norm, gradient_at=gradient_at, distribution=distribution)
        return Releases((release,) * nodes, of_nodes)

    return releases


def of_local_steps(clients: LocalSteps, sizes: Sequence[int]) -> list[ClientRelease]:
    """List what one private step of each client releases, `sizes` samples each."""
    known(clip_norm=clients.clip_norm, noise=clients.noise_std)
    if clients.noise is not None:
        check.one_of(("gaussian", "shared_gaussian", "summed_gaussian"), noise=clients.noise.distribution)
    norm = None if clients.clip_norm is None else float(clients.clip_norm)
    scales = per_node(len(sizes), sizes, clients.noise_std)
    secrets = None if clients.noise is None else clients.noise.secrets
    multipliers = [0.0 if norm is None else std * clients.batch_size / norm for std in scales]
    return [
        ClientRelease(clients.sampler, count, clients.batch_size, norm, multiplier, secrets=secrets)
        for count, multiplier in zip(sizes, multipliers, strict=True)
    ]


def of_clients(
    clients: LocalSteps, num_active: int | None, updates: PrivateUpdates | None
) -> Callable[[Sequence[int]], Releases]:
    """Make `Algorithm.releases` of federated averaging: of whole clients, or of their samples.

    Without private updates a client's samples count. It makes all steps of all rounds then, whoever is active; the
    account takes `local_iterations` where they are known. Without `num_active` all clients are active.
    """

    def of_updates(sizes, private):
        known(clip_norm=private.clip_norm, noise=private.noise.noise_scale)
        check.one_of(("gaussian", "shared_gaussian", "summed_gaussian"), noise=private.noise.distribution)
        private.check_participation(len(sizes) if num_active is None else num_active, len(sizes))
        norm, rate = float(private.clip_norm), 1.0 if num_active is None else num_active / len(sizes)
        release = UpdateRelease("poisson", rate, norm, float(private.noise.noise_scale) / norm, private.noise.secrets)
        account = functools.partial(accounting.client_level_account, num_clients=len(sizes))
        return Releases((release,) * len(sizes), account)

    def releases(sizes):
        if updates is not None:
            return of_updates(sizes, updates)
        if not callable(clients.num_steps):
            known(num_steps=clients.num_steps)

        def account(each, *, local_iterations: int | None = None, **options):
            def counts(num_rounds):
                if local_iterations is not None:
                    return local_iterations, 0
                return int(jax.vmap(clients.steps_at)(jnp.arange(num_rounds, dtype=jnp.int32)).sum()), 0

            return accounting.account(each, counts=counts, num_clients=len(sizes), **options)

        return Releases(tuple(of_local_steps(clients, sizes)), account)

    return releases


def of_chosen_steps(
    clients: LocalSteps, constants: BoundConstants, max_rounds: Any, max_iterations: Any
) -> Callable[[Sequence[int]], Releases]:
    """Make `Algorithm.releases` of ALI-DPFL: iterations that the run chooses by what it releases, and estimates.

    The proven claims are those of the budget. Those on what ran take `local_iterations`, by default the most that the
    rounds can make.
    """

    def releases(sizes):
        known(max_rounds=max_rounds, max_iterations=max_iterations, noise_multiplier=constants.noise_multiplier)
        each, most = of_local_steps(clients, sizes), (int(max_iterations), int(max_rounds))
        if constants.is_private:
            noise = {"estimates": "private", "estimate_noise_multiplier": float(constants.noise_multiplier)}
            each = [one._replace(estimate_batch_size=constants.batch_size or one.num_samples, **noise) for one in each]
        else:
            each = [one._replace(estimates="as_published") for one in each]

        def account(each, *, local_iterations: int | None = None, **options):
            def counts(num_rounds):
                ran = min(most[0], num_rounds * clients.max_steps) if local_iterations is None else local_iterations
                return ran, min(num_rounds, most[1])

            return accounting.account(each, counts=counts, budget=most, num_clients=len(sizes), **options)

        return Releases(tuple(each), account)

    return releases
