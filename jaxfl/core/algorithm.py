"""The one interface: an algorithm is a named tuple of pure functions.

    state        = algorithm.init(key, data)              # every array that changes, nothing else
    draws        = algorithm.draw(key, state, data)       # every random number of this round
    state, info  = algorithm.update(state, data, draws)   # deterministic
    state, info  = algorithm.round(key, state, data)      # update(state, data, draw(key, state, data))

`key` is the run's base key, the same in every call; `draw` folds in the round number that the state carries. Several
private runs on the same data need a key of their own each, made by `run_key`: runs that share their noise give each
other's gradients away.

Comments of states and infos say float32. With JAX_ENABLE_X64 a task may begin with params in float64. Results from them
are float64 then. Random numbers stay float32, and a message counts 32 bits a number. Algorithms with noise
refuse such params: the noise is float32.
"""

from __future__ import annotations

import functools
import inspect
import traceback
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from jaxfl.core import check
from jaxfl.core.calls import arguments
from jaxfl.core.check import ArgumentError
from jaxfl.core.devices import on_any_mesh
from jaxfl.core.info import Info
from jaxfl.core.keys import Key
from jaxfl.core.tree import number_type, with_own_buffers
from jaxfl.core.types import Array, FederatedData, PyTree

State = Any
Draws = Any
_P = ParamSpec("_P")
_T = TypeVar("_T")
_REMEDIES = {  # kind of an argument -> how to get one
    "Graph": "Pass jaxfl.graphs.from_networkx(graph), from_matrix(matrix) or ring(n), for instance.",
    "GradientEstimator": "Pass jaxfl.mini_batch() or jaxfl.saga(), called.",
    "GradientTransformation": "Pass optax.sgd(0.1), for instance, called.",
    "Links": "Pass jaxfl.links(...).",
    "LocalSteps": "Pass jaxfl.local_steps(...).",
    "NoiseMechanism": "Pass jaxfl.gaussian(0.1), for instance.",
    "Quantizer": "Pass a quantizer of jaxfl.channel.",
    "Sampler": "Pass jaxfl.gradients.fixed(32), for instance.",
    "Task": "Pass jaxfl.models.classification(model), jaxfl.from_flax(...) or jaxfl.from_functions(...).",
    "Uplink": "Pass jaxfl.uplink(...).",
}
_STEPS = (
    *("step_size=0.1", "optimizer=optax.sgd(0.1)", "clients=jaxfl.local_steps(..., optimizer=optax.sgd(0.1))"),
    "server_step_size=0.1",
)
_NOISE = "noise=jaxfl.gaussian(0.1)", "clients=jaxfl.local_steps(..., clip_norm=1.0, noise=jaxfl.gaussian(0.1))"
_MEANT = {  # what other libraries call an argument -> forms of it here
    **dict.fromkeys(("lr", "learning_rate", "step_size"), _STEPS),
    **dict.fromkeys(("epsilon", "noise_std", "noise_multiplier"), _NOISE),
}


_NO_DATA = FederatedData(*[None] * 4)  # pyright: ignore[reportArgumentType]


class Algorithm(NamedTuple):
    """A learning algorithm over n nodes.

    Attributes:
        init: (key, data) -> state.
        draw: (key, state, data) -> draws; all randomness of the round and nothing else.
        update: (state, data, draws) -> (state, info); all mathematics of the round, no key.
        round: (key, state, data) -> (state, info); what a caller jits, scans and vmaps.
        node_params: state -> pytree of (n, *leaf): the parameters that each node would use for prediction
            (for push-sum the de-biased ones).
        upkeep: (state, data, due () bool) -> state, where `due` without the rounding errors that have added up; None
            where none add up. `jaxfl.training` calls it every 100,000 rounds on accelerators, between calls of the
            compiled program: inside of a round the host would wait to know whether it is due.
        releases: samples of each node (n,) -> what each node releases (`jaxfl.privacy.releases.Releases`), for
            `jaxfl.privacy.statements(learner, ...)`; None where the algorithm does not say it.
        name: of the constructor, for people.

    Guarantees (tests/test_contract.py runs them for every row of tests/registry.py, the last
    tests/algorithms/test_float64.py):
        - state in and state out have the same structure, shapes and dtypes.
        - a round is a function of (key, round index, state, data) only.
        - no two leaves of a state share a buffer, so that its owner may donate it.
        - round equals update after draw.
        - with JAX_ENABLE_X64, params in float64 stay so and are not rounded to float32, or `init` refuses them.
    """

    init: Callable[[Key, FederatedData], State]
    draw: Callable[[Key, State, FederatedData], Draws]
    update: Callable[[State, FederatedData, Draws], tuple[State, Info]]
    round: Callable[[Key, State, FederatedData], tuple[State, Info]]
    node_params: Callable[[State], PyTree]
    upkeep: Callable[[State, FederatedData, Array], State] | None = None
    releases: Callable[[Sequence[int]], Any] | None = None
    name: str = ""

    def __repr__(self) -> str:
        name = self.name or getattr(self.update, "__qualname__", "").partition(".")[0]
        released = getattr(self.releases, "__qualname__", "not stated").partition(".")[0]
        return f"Algorithm({name}, releases={released})"


def constructor(build: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap `build` so that it refuses an argument of another type than annotated, for the types in `_REMEDIES`."""

    @functools.cache
    def kinds() -> dict[str, tuple[type, ...]]:
        import optax  # which annotations name, and files import for type checkers only

        hints = typing.get_type_hints(build, localns={"optax": optax}).items()  # X or X | None
        options = {
            name: typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,) for name, hint in hints
        }
        named = {name: kind for name, kind in options.items() if getattr(kind[0], "__name__", "") in _REMEDIES}
        return {name: kind for name, kind in named.items() if not any(map(typing.get_origin, kind))}

    signature = inspect.signature(build)

    @functools.wraps(build)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        given = arguments(build, args, kwargs, _MEANT, signature=signature)
        for name, kind in kinds().items():
            if kind[0].__name__ == "GradientTransformation":
                if given.get(name) is not None:
                    check_optimizer(name, given[name])
            elif name in given and not isinstance(given[name], kind):
                wanted, found = kind[0].__name__, type(given[name]).__name__
                shown = repr(given[name]).partition("\n")[0][:40]
                shown = "a function" if inspect.isfunction(given[name]) else f"{shown}, of type {found}"
                raise ArgumentError(name, f"must be of type {wanted}", f"got {shown}", _REMEDIES[wanted])
        built = build(*args, **kwargs)
        return built._replace(name=build.__name__) if isinstance(built, Algorithm) else built

    return checked


def check_optimizer(name: str, optimizer: Any, *, by_round: bool = False) -> set[str]:
    """Names of the types in an optimizer's state; refuse what cannot update parameters from one gradient.

    Args:
        name: name of the argument.
        optimizer: optax optimizer. One made for a structure of parameters (`optax.masked`) is left to the first round.
        by_round: whether a function of the round index that gives one will do.

    Raises:
        ArgumentError: a number, a constructor that was not called, or an optimizer that asks for losses or samples.
    """
    import optax  # takes longer than the library

    rule, found, remedy = optimizer, f"got {optimizer!r}"[:60], _REMEDIES["GradientTransformation"]
    if hasattr(optimizer, "gradient_transformation"):  # optax.MultiSteps
        rule, remedy = optimizer.gradient_transformation() if by_round else None, "Pass its gradient_transformation()."
    elif callable(optimizer):
        is_constructor = next(iter(inspect.signature(optimizer).parameters), "") == "learning_rate"
        rule = optimizer(jnp.int32(0)) if by_round and not is_constructor else None
        found = "got a constructor" if is_constructor else "got a function"
    if not isinstance(rule, optax.GradientTransformation):
        requirement = "must be an optimizer of optax" + ", or a function of the round index" * by_round
        raise ArgumentError(name, requirement, found, remedy)
    gradient, types = jax.ShapeDtypeStruct((3,), jnp.float32), []

    def trial(params):
        state = rule.init(params)
        jax.tree.leaves(state, is_leaf=lambda node: types.append(type(node)) is not None)
        return rule.update(params, state, params)[0]

    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            shape = getattr(jax.eval_shape(trial, gradient), "shape", None)
        reason = "" if shape == gradient.shape else f"its update of shape {gradient.shape} has shape {shape}"
    except Exception as error:  # masks and labels of a user's own structure raise anything
        places = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        place = [one for one in places if not one.startswith("jax.")][-1]
        is_of_optax = place.startswith(("optax.", __name__)) and isinstance(error, TypeError | AttributeError)
        reason = str(error).partition("\n")[0] if is_of_optax else ""
    if reason:
        requirement = "must update parameters from one gradient, without losses or samples"
        raise ArgumentError(name, requirement, f"got an optimizer that cannot: {reason}", remedy)
    return {kind.__name__ for kind in types}


def algorithm(init, draw, update, node_params, upkeep=None, nodes=None, releases=None) -> Algorithm:
    """Join the parts of an algorithm; `round` is derived here, so that no file can get it wrong.

    All parts refuse the state of another algorithm, and data for other nodes than `nodes`, a graph's (number, names).
    """

    def round(key, state, data):
        return update(state, data, draw(key, state, data))

    def checked(part, text):
        names = text.split()

        def on_arguments(*args):
            by_name = dict(zip(names, args, strict=True))
            state = by_name.get("state")
            if nodes is not None and "data" in by_name:
                check_num_nodes(nodes[0], by_name["data"], nodes[1])
            try:
                result = part(*args)
                if part is init:
                    return with_own_buffers(result)
                if part not in (update, round):
                    return result
                if type(result[0]) is type(state):
                    return with_own_buffers(result[0]), result[1]
            except AttributeError as error:
                if "state" not in by_name or error.obj is not state:
                    raise
            found = f"got {type(state).__name__} of {type(state).__module__}"
            raise ArgumentError("state", "must be of this algorithm", found, "Pass what its own init returns.")

        over_mesh = on_any_mesh(on_arguments)

        @functools.wraps(part)
        def of_any(*args, **named):
            given = dict(zip(names, args, strict=False)) | named
            wrong = [name for name in names if name not in given] or [name for name in given if name not in names]
            if wrong or len(given) < len(args) + len(named):
                found = f"got {len(args)} arguments" + f" and {', '.join(named)}" * bool(named)
                raise ArgumentError((wrong or names)[0], f"takes {', '.join(names)}", found, "Pass each once.")
            if not isinstance(given.get("data", _NO_DATA), FederatedData):
                found = f"got {type(given['data']).__name__}"
                remedy = "Pass jaxfl.federate(inputs, labels, parts)."
                raise ArgumentError("data", "must be FederatedData", found, remedy)
            return over_mesh(*(given[name] for name in names))

        return of_any

    arguments = ("key data", "key state data", "state data draws", "key state data", "state")
    parts = map(checked, (init, draw, update, round, node_params), arguments)
    upkeep = None if upkeep is None else checked(upkeep, "state data due")
    return Algorithm(*parts, upkeep=upkeep, releases=releases)


def at_round(
    value: float | Array | Callable[[Array], Array], round_index: Array, params: PyTree | None = None
) -> Array:
    """A hyper-parameter in one round: the number itself, or what a schedule gives for the round index.

    Args:
        value: a number, a traced scalar, or a schedule, which may compute in any floating type.
        round_index: (), int32.
        params: what the number multiplies.

    Returns:
        (), float32, or float64 where `params` hold float64.

    Raises:
        ArgumentError: a schedule that gives several numbers, or a negative one.
    """
    if callable(value):
        value = value(round_index)
        check.scalar(schedule=value)
        check.non_negative(schedule=value)
    return jnp.asarray(value, number_type(params))


def check_num_nodes(num_nodes: int, data: FederatedData, names: Sequence[str] | None = None) -> None:
    """Refuse data that are cut for another number of nodes than the graph has, or for nodes of other names.

    Args:
        num_nodes: n, of the graph.
        data: the nodes' samples, with names of nodes or without.
        names: (n,), the graph's names of nodes; None where it has none.
    """
    if data.num_nodes != num_nodes:
        found = f"the graph has {num_nodes} nodes and the data {data.num_nodes}"
        raise ArgumentError("data", "must hold one row of indices per node of the graph", found, "Partition them anew.")
    if names is not None and data.names is not None and tuple(names) != data.names:
        node = next(i for i, (one, other) in enumerate(zip(names, data.names, strict=True)) if one != other)
        found = f"node {node} is {names[node]!r} in the graph and {data.names[node]!r} in the data"
        remedy = "Pass jaxfl.graphs.from_networkx(graph, names=data.names)."
        raise ArgumentError("data", "must name the nodes as the graph does, in its order", found, remedy)
