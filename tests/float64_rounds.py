"""Run by `tests/algorithms/test_float64.py` in a process with JAX_ENABLE_X64=1: prints its findings as JSON.

Rounds are traced; only those of push-sum are compiled.
"""

import functools
import json

import conftest
import jax
import jax.numpy as jnp
import optax
from examples import LOSSY
from helpers import equations
from jax.interpreters.partial_eval import dce_jaxpr
from problems import Problem, irregular_graph, small_task, statistics_task, uneven_data
from reference.gradients import SagaGradient
from reference.push_sum import push_sum
from reference.runs import each, entries, node_samples, one_by_one, relative_error
from registry import REGISTRY

import jaxfl
from jaxfl import ArgumentError
from jaxfl.algorithms import centered_clipping, client_momentum, client_sgd, ef21
from jaxfl.algorithms.clients.bound_constants import private_constants
from jaxfl.channel import rand_k
from jaxfl.gradients import saga, uniform
from jaxfl.models import classification, layers, sequential

KEY = jax.random.key(5)
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
        if row.noise_draws:
            by_kind["clipped"] = {**silent, "clip_norm": jnp.float64(0.7)}
        if example.over is not None:
            by_kind["links"] = {**silent, **example.over(LOSSY)}
    if name == next(other for other, one in REGISTRY.items() if one.stateful_gradient):
        for storage in ("float32", "bfloat16", "float64"):
            for store, options in STORES.items():
                gradient = functools.partial(saga, sampler=uniform(3), refresh_every=4, storage=storage, **options)
                by_kind[f"saga {store} {storage}"] = {**silent, "clip_norm": jnp.float64(0.7), "gradient": gradient}
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


def below_float64(algorithm, data, first):
    """List operations in less than float64 on which the next state depends, but for whole numbers."""
    program = jax.make_jaxpr(lambda state: algorithm.round(KEY, state, data)[0])(first).jaxpr
    used, _ = dce_jaxpr(program, [True] * len(program.outvars))

    def floating(atoms):
        types = {str(getattr(atom.aval, "dtype", "")) for atom in atoms}
        return {name for name in types if name.startswith(("float", "bfloat"))}

    return [
        f"{equation.primitive} of {equation.outvars[0].aval}"
        for equation in equations(used)
        if floating(equation.outvars) - {"float64"}
        and not (equation.primitive.name == "convert_element_type" and not floating(equation.invars))
    ]


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
        "narrow": below_float64(algorithm, data, first),
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
    robust = {"aggregate": centered_clipping(jnp.float64(1.0)), "feedback": client_momentum(jnp.float64(0.9))}
    algorithms = {
        "clipped steps": jaxfl.fed_avg(task, clients=clients(clip_norm=jnp.float64(1.0), **poisson), num_active=3),
        "counted steps": jaxfl.fed_avg(task, clients=clients(num_steps=jnp.int32(1)), num_active=3),
        "noisy steps": jaxfl.fed_avg(task, clients=clients(clip_norm=1.0, noise=noise), num_active=3),
        "noisy updates": jaxfl.fed_avg(
            task, clients=clients(weighting="uniform"), num_active=3, uplink=jaxfl.uplink(updates=updates)
        ),
        "compressed updates": jaxfl.fed_avg(
            task, clients=clients(weighting="uniform"), num_active=3, uplink=jaxfl.uplink(feedback=ef21(rand_k(0.5)))
        ),
        "clipped momentum": jaxfl.fed_avg(
            task, clients=clients(weighting="uniform"), num_active=3, uplink=jaxfl.uplink(**robust)
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


def error_of_push_sum():
    """|engine - loop| / |loop| of push-sum with a table, the largest over nodes: what the host computes enters, too."""
    data, task, graph = uneven_data(), converted(small_task(), jnp.float64), irregular_graph()
    data = data._replace(inputs=data.inputs.astype(jnp.float64))  # a sample's own norm is taken in its own type
    gradient = saga(sampler=uniform(3), storage="float64", clip_norm=0.7, refresh_every=4)
    run = one_by_one(jaxfl.push_sum(task, graph=graph, gradient=gradient, step_size=0.3), KEY, data, 6)
    x0, rounds = each(run.states[0].params), [(entries(draws.gradient), None) for draws in run.draws]
    references = [SagaGradient(own, 3, 0.7, 2, x) for own, x in zip(node_samples(data), x0, strict=True)]
    x, _, _ = push_sum(x0, graph.mixing_matrices, references, 0.3, rounds)
    return relative_error(run.states[-1].params, x)


if __name__ == "__main__":
    assert conftest
    assert jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    # Of float32 and float64 strict promotion makes nothing, so that no number of a user's widens params in float32.
    narrow = {"float32": types(jnp.float32)}
    with jax.numpy_dtype_promotion("standard"):
        optax_too = {name: clients_types(dtype) for name, dtype in (("float32", jnp.float32), ("float64", jnp.float64))}
        report = {
            "types": {**narrow, "float64": types(jnp.float64)},
            "clients": optax_too,
            "error": error_of_push_sum(),
        }
    print(json.dumps(report))
