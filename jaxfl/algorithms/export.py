"""Types of states, infos and draws for `jax.export`, which knows none but dicts, lists and tuples."""

from __future__ import annotations

import ast
import contextlib
import importlib
import pkgutil
import sys

import jax

import jaxfl.algorithms
import jaxfl.gradients
from jaxfl.core.types import NodeNames, PoolParts


def register_for_export() -> None:
    """Let `jax.export` serialize rounds with the states, infos, draws and data of this library and optax's states.

    The process that deserializes calls it, too. A serialized name is that of the type with its module. Register
    types of your own by `jax.export.register_namedtuple_serialization`. Serializing needs the package flatbuffers.

    Guarantees:
        - a round that was exported and read again gives the same bits.
        - a second call changes nothing.
    """
    for package in (jaxfl.algorithms, jaxfl.gradients):
        for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(one.name)
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] in ("jaxfl", "optax")]
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    for kind in classes:
        if issubclass(kind, tuple) and hasattr(kind, "_fields") and kind.__module__.startswith(("jaxfl.", "optax.")):
            with contextlib.suppress(ValueError):  # it is registered
                jax.export.register_namedtuple_serialization(kind, serialized_name=_name(kind))
    for kind, field in ((NodeNames, "names"), (PoolParts, "count")):
        with contextlib.suppress(ValueError):
            jax.export.register_pytree_node_serialization(
                kind,
                serialized_name=_name(kind),
                serialize_auxdata=lambda mark, field=field: repr(getattr(mark, field)).encode(),
                deserialize_auxdata=lambda data, kind=kind: kind(ast.literal_eval(bytes(data).decode())),
            )


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
