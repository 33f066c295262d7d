"""Run by `tests/algorithms/test_float64.py` in a process with JAX_ENABLE_X64=1: prints its findings as JSON.

Types are looked at in traced rounds; only those that the float64 loops repeat are compiled.
"""

import functools
import json
import math

import conftest
import jax
import jax.numpy as jnp
import numpy as np
import optax
from examples import LOSSY
from problems import Problem, irregular_graph, small_task, statistics_task, uneven_data
from reference.dzofl import dzofl as reference_dzofl
from reference.embracing import embracing as reference_embracing
from reference.fed_avg import Adam
from reference.fed_avg import fed_avg as reference_fed_avg
from reference.gossip import d_psgd as reference_d_psgd
from reference.gradients import SagaGradient
from reference.partial_averaging import partial_averaging as reference_partial_averaging
from reference.push_sum import push_sum as reference_push_sum
from reference.runs import client_batches, each, entries, flat, node_samples, one_by_one, plain_gradients, stacked
from reference.width_reduction import width_reduction as reference_width_reduction
from registry import REGISTRY

import jaxfl
from jaxfl import ArgumentError
from jaxfl.algorithms import client_sgd
from jaxfl.algorithms.clients.bound_constants import private_constants
from jaxfl.core.tree import size
from jaxfl.gradients import fixed, saga, uniform
from jaxfl.models import classification, layers, sequential

KEY, ROUNDS = jax.random.key(5), 6
SIZES = (7, 4, 9, 5, 6)
SGD = jaxfl.local_steps(3, batch_size=3, optimizer=client_sgd(0.3, momentum=0.9, weight_decay=0.05))
REFERENCE_SGD = {"momentum": 0.9, "weight_decay": 0.05, "step_size": lambda r: 0.3}
STORES = {"dense": {}, "factored": {"table": "factored"}, "per batch": {"table": "per_batch", "entry_size": 2}}


def converted(task, dtype):
    """A task whose parameters, and whose model state, begin in this type."""

    def convert(tree):
        return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)

    init_state = task.init_state
    return task._replace(
        init=lambda key: convert(task.init(key)),
        init_state=None if init_state is None else lambda: convert(init_state()),
    )


def kinds(name, row, example):
    """Kinds of runs of a row, each with the options that it changes. Tables are tried with the first row that takes
    them."""
    silent = {"noise_scale": None}
    by_kind = {"noise": {"clip_norm": jnp.float64(0.7), "noise_scale": jnp.float64(0.02)}} if row.noise_draws else {}
    if row.special_case_of is None:
        by_kind["plain"] = silent
        if example.over is not None:
            by_kind["links"] = {**silent, **example.over(LOSSY)}
    if name == next(other for other, one in REGISTRY.items() if one.stateful_gradient):
        for storage in ("float32", "bfloat16", "float64"):
            for store, options in STORES.items():
                gradient = functools.partial(saga, sampler=uniform(3), storage=storage, **options)
                by_kind[f"saga {store} {storage}"] = {**silent, "gradient": gradient}
    return by_kind


def traced(algorithm, data):
    """The types of a state before and after two rounds, or why there are none."""
    try:
        first = jax.eval_shape(lambda key: algorithm.init(key, data), KEY)
    except ArgumentError as error:
        return {"refused": str(error)}
    except (TypeError, ValueError) as error:
        return {"failed": str(error)}
    try:
        return types_of_rounds(algorithm, data, first)
    except (TypeError, ValueError) as error:  # an ArgumentError, too, would come too late
        return {"failed": str(error)}


def types_of_rounds(algorithm, data, first):
    """Types in two rounds from a state of these shapes."""
    last, infos, draws = jax.eval_shape(
        lambda key, state: (
            *jax.lax.scan(lambda s, _: algorithm.round(key, s, data), state, length=2),
            algorithm.draw(key, state, data),
        ),
        KEY,
        first,
    )
    pairs = list(zip(jax.tree.leaves_with_path(first), jax.tree.leaves(last), strict=True))
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for (path, _), _ in pairs]
    return {
        "changed": [
            f"{name}: {old} to {new}"
            for name, ((_, old), new) in zip(names, pairs, strict=True)
            if (old.shape, old.dtype, old.weak_type) != (new.shape, new.dtype, new.weak_type)
        ],
        "weak": [name for name, ((_, old), _) in zip(names, pairs, strict=True) if old.weak_type],
        "types": {name: str(old.dtype) for name, ((_, old), _) in zip(names, pairs, strict=True)},
        "wide infos": [name for name, leaf in infos.named().items() if leaf.dtype in ("float64", "int64")],
        "noise": any(
            getattr(part, name, None) is not None
            for part in (draws, getattr(draws, "uplink", None))
            for name in ("noise", "state_noise")
        ),
    }


def types(dtype):
    """row -> kind -> what `traced` tells, with params of this type and hyper-parameters that are float64 arrays."""
    data = uneven_data()
    data = data._replace(inputs=data.inputs.astype(dtype))
    outcomes = {}
    for name, row in REGISTRY.items():
        example = row.example(lambda hidden: converted(small_task(hidden=hidden), dtype))
        problem = Problem(row, example, data)
        outcomes[name] = {
            kind: traced(problem.algorithm(**{"step_size": jnp.float64(0.2), **changes}), data)
            for kind, changes in kinds(name, row, example).items()
        }
    return outcomes


def clients(**options):
    rule = client_sgd(jnp.float64(0.2), momentum=jnp.float64(0.9), weight_decay=0.01)
    return jaxfl.local_steps(2, **{"batch_size": 3, "optimizer": rule, **options})


def with_statistics(dtype, *, state_dtype=None):
    """Linear tasks of two widths, and a network with batch normalization, of this type."""

    def batch_norm(width):
        parts = [
            ("dense_1", layers.dense(6, width)),
            ("norm", layers.batch_norm(width)),
            ("out", layers.dense(width, 3)),
        ]
        return classification(sequential(parts))

    def task(make, width):
        wide, own = converted(make(width), dtype), make(width)
        return wide if state_dtype is None else wide._replace(init_state=converted(own, state_dtype).init_state)

    makes = {"statistics": statistics_task, "batch norm": batch_norm}
    return {name: [task(make, width) for width in (6, 4)] for name, make in makes.items()}


def clients_types(dtype):
    """Types that `traced` finds for clients that clip, add noise, or keep batch statistics."""
    data = uneven_data()
    data = data._replace(inputs=data.inputs.astype(dtype))
    task, noise = converted(small_task(), dtype), jaxfl.gaussian(0.02)
    updates = jaxfl.private_updates(clip_norm=jnp.float64(1.0), noise=noise)
    limits = {"max_rounds": 6, "max_iterations": 20, "step_size": jnp.float64(0.2), "kappa": jnp.float64(1.0)}
    constants = private_constants(3, clip_norm=1.0, loss_bound=jnp.float64(1.0), noise_multiplier=jnp.float64(1.0))
    poisson = {"sampler": jaxfl.gradients.poisson}
    algorithms = {
        "clipped steps": jaxfl.fed_avg(task, clients=clients(clip_norm=jnp.float64(1.0), **poisson), num_active=3),
        "counted steps": jaxfl.fed_avg(task, clients=clients(num_steps=jnp.int32(1)), num_active=3),
        "noisy steps": jaxfl.fed_avg(task, clients=clients(clip_norm=1.0, noise=noise), num_active=3),
        "noisy updates": jaxfl.fed_avg(
            task, clients=clients(weighting="uniform"), num_active=3, uplink=jaxfl.uplink(updates=updates)
        ),
        "noisy constants": jaxfl.ali_dpfl(
            task,
            clients=clients(clip_norm=1.0, optimizer=optax.sgd(jnp.float64(0.2)), **poisson),
            constants=constants,
            **limits,
        ),
        "adam": jaxfl.fed_avg(
            task, clients=clients(optimizer=optax.adam(0.1)), num_active=3, server_optimizer=optax.adam(0.1)
        ),
    }
    for name, (wide, narrow) in with_statistics(dtype).items():
        algorithms[f"{name}, fed_avg"] = jaxfl.fed_avg(wide, clients=clients(), num_active=3)
        for dropout in (False, True):
            algorithms[f"{name}, width_reduction {dropout}"] = jaxfl.width_reduction(
                [wide, narrow], clients=clients(), client_class=[0, 1, 1, 0, 1], num_active=3, ordered_dropout=dropout
            )
    for name, (wide, _) in with_statistics(dtype, state_dtype=jnp.float32).items():
        algorithms[f"{name} in float32"] = jaxfl.fed_avg(wide, clients=clients(), num_active=3)
    return {name: traced(algorithm, data) for name, algorithm in algorithms.items()}


def gossip_run(algorithm, data):
    """(parameters of all nodes before and after, entries of each round) of a run without noise."""
    run = one_by_one(algorithm, KEY, data, ROUNDS)
    return each(run.states[0].params), run.states[-1], [(entries(draws.gradient), None) for draws in run.draws]


def saga_error(store, data, task):
    """Push-sum with tables of float64, refreshed in between."""
    sampler = fixed(3) if store == "factored" else uniform(3)
    gradient = saga(sampler=sampler, storage="float64", clip_norm=0.7, refresh_every=4, **STORES[store])
    graph = irregular_graph()
    x0, last, rounds = gossip_run(jaxfl.push_sum(task, graph=graph, gradient=gradient, step_size=0.3), data)
    entry_size = STORES[store].get("entry_size", 1)
    samples = zip(node_samples(data), x0, strict=True)
    references = [SagaGradient(own, 3, 0.7, 2, x, entry_size) for own, x in samples]
    x, _, _ = reference_push_sum(x0, graph.mixing_matrices, references, 0.3, rounds)
    return error(last.params, stacked(x))


def mini_batch_error(data, task):
    """D-PSGD."""
    graph = jaxfl.graphs.exponential(5)
    gradient = jaxfl.mini_batch(sampler=fixed(3), clip_norm=0.7)
    x0, last, rounds = gossip_run(jaxfl.d_psgd(task, graph=graph, gradient=gradient, step_size=0.3), data)
    x = reference_d_psgd(x0, graph.mixing_matrices, plain_gradients(data, 3, 0.7, 2), 0.3, rounds)
    return error(last.params, stacked(x))


def fed_avg_error(data, task):
    algorithm = jaxfl.fed_avg(task, clients=SGD, num_active=3, server_optimizer=optax.adam(0.03))
    run = one_by_one(algorithm, KEY, data, ROUNDS)
    rounds = [client_batches(draws.active.tolist(), draws.steps.batch_indices.tolist(), SIZES) for draws in run.draws]
    x, _ = reference_fed_avg(model(run.states[0]), node_samples(data), rounds, Adam(0.03), **REFERENCE_SGD)
    return error(run.states[-1].params, flat(x)[None])


def width_reduction_error(data, _):
    """FjORD."""
    widths, of_client = (5, 3), (0, 1, 1, 0, 1)
    algorithm = jaxfl.width_reduction(
        [converted(small_task(hidden=width), jnp.float64) for width in widths],
        clients=SGD,
        client_class=of_client,
        num_active=3,
        ordered_dropout=True,
    )
    run, rounds = one_by_one(algorithm, KEY, data, ROUNDS), []
    for draws in run.draws:
        batches = client_batches(draws.active.tolist(), draws.steps.batch_indices.tolist(), SIZES)
        trained = [[widths[number] for number in row] for row in draws.widths.tolist()]
        rounds.append(
            [(client, list(zip(own, row, strict=True))) for (client, own), row in zip(batches, trained, strict=True)]
        )
    held = [widths[number] for number in of_client]
    x, _ = reference_width_reduction(model(run.states[0]), node_samples(data), held, rounds, **REFERENCE_SGD)
    return error(run.states[-1].params, flat(x)[None])


def embracing_error(data, task):
    of_client, blocks = (0, 1, 1, 0, 1), (task.blocks, task.blocks[-1:])
    algorithm = jaxfl.embracing(task, clients=SGD, client_class=of_client, num_active=3, trained_blocks=blocks)
    run, rounds = one_by_one(algorithm, KEY, data, ROUNDS), []
    for draws in run.draws:
        batches = client_batches(draws.active.tolist(), draws.steps.batch_indices.tolist(), SIZES)
        rounds.append([(client, blocks[of_client[client]], own) for client, own in batches])
    x, _ = reference_embracing(model(run.states[0]), node_samples(data), rounds, **REFERENCE_SGD)
    return error(run.states[-1].params, flat(x)[None])


def partial_averaging_error(data, task):
    algorithm = jaxfl.partial_averaging(task, clients=SGD, synchronized=task.blocks[-1:])
    run = one_by_one(algorithm, KEY, data, ROUNDS)
    everybody = range(len(SIZES))
    rounds = [
        [own for _, own in client_batches(everybody, draws.steps.batch_indices.tolist(), SIZES)] for draws in run.draws
    ]
    models, _ = reference_partial_averaging(
        each(run.states[0].params),
        node_samples(data),
        rounds,
        lambda layer, *_: layer == task.blocks[-1],
        weighting="data",
        **REFERENCE_SGD,
    )
    return error(run.states[-1].params, stacked(models))


def dzofl_error(data, task):
    """With links that lose."""
    uplink = jaxfl.links(0.6)
    algorithm = jaxfl.dzofl(task, batch_size=3, step_size=0.3, smoothing=0.7, num_directions=2, uplink=uplink)
    run, rounds = one_by_one(algorithm, KEY, data, ROUNDS), []
    leaves, structure = jax.tree.flatten(run.states[0].params)
    for draws in run.draws:
        used = zip(np.asarray(draws.batch.indices), np.asarray(draws.batch.mask), strict=True)
        numbers = [[draws.directions.numbers(r, i, leaf) for i, leaf in enumerate(leaves)] for r in range(2)]
        scaled = [[np.asarray(leaf, np.float64) / math.sqrt(size(leaves)) for leaf in one] for one in numbers]
        rounds.append(
            {
                "step_size": 0.3,
                "smoothing": 0.7,
                "directions": [structure.unflatten(one) for one in scaled],
                "batches": dict(enumerate(own[mask] for own, mask in used)),
                "arrived": np.asarray(draws.uplink.arrived),
                "uplink": np.zeros((5, 2)),
                "downlink": np.zeros(2),
            }
        )
    unrounded = {"uplink": lambda value, _: value, "downlink": lambda value, _: value}
    models, *_ = reference_dzofl(model(run.states[0]), node_samples(data), rounds, batch_size=3, **unrounded)
    return error(run.states[-1].params, flat(models[-1])[None])


def model(state):
    """Model that the server holds, as the references take it."""
    return jax.tree.map(np.array, state.params)


def error(params, expected):
    """|engine - reference| / |reference|, the largest over nodes; parameters must be float64."""
    assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(params))
    reached = np.concatenate([np.asarray(leaf).reshape(len(expected), -1) for leaf in jax.tree.leaves(params)], axis=1)
    return float((np.linalg.norm(reached - expected, axis=1) / np.linalg.norm(expected, axis=1)).max())


def errors():
    """Case -> how far parameters are from the float64 loop."""
    data, task = uneven_data(SIZES), converted(small_task(), jnp.float64)
    data = data._replace(inputs=data.inputs.astype(jnp.float64))  # a sample's own norm is taken in its own type
    cases = {f"saga {store}": functools.partial(saga_error, store) for store in STORES}
    cases |= {"mini_batch": mini_batch_error, "fed_avg": fed_avg_error, "width_reduction": width_reduction_error}
    cases |= {"embracing": embracing_error, "partial_averaging": partial_averaging_error, "dzofl": dzofl_error}
    return {name: run(data, task) for name, run in cases.items()}


if __name__ == "__main__":
    assert conftest
    assert jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    # Of float32 and float64 strict promotion makes nothing, so that no number of a user's widens params in float32.
    narrow = {"float32": types(jnp.float32)}
    with jax.numpy_dtype_promotion("standard"):
        optax_too = {name: clients_types(dtype) for name, dtype in (("float32", jnp.float32), ("float64", jnp.float64))}
        report = {"types": {**narrow, "float64": types(jnp.float64)}, "clients": optax_too, "errors": errors()}
    print(json.dumps(report))
