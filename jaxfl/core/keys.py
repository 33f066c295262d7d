"""Randomness: every key in the engine is derived here and nowhere else.

A run has one base key. A key for use is `fold_in(fold_in(base, purpose), round)`, then folded with the
node. The purpose comes first, so that the key of a purpose without rounds (initialisation) can never equal
the key of a round, and a round's numbers depend on (base key, round) only. Node i's stream does not
depend on how many nodes there are. No key is ever split.

Runs that are compared start from the same parameters, and have batches and noise of their own. Runs with the same noise
give each other's gradients away by subtraction. Runs with the same batches do not compose as independent ones do. So a
run takes a `RunKey` (`run_key`): its settings and its data are folded into the half that batches and noise are made of.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core.check import ArgumentError, at_least, is_traced
from jaxfl.core.platform import is_cpu
from jaxfl.core.threefry import fold_in, is_threefry
from jaxfl.core.types import Array, FederatedData, PyTree


class Purpose(enum.IntEnum):
    """Purpose of a key. Append only: a number, once used, is part of published results.

    The library keeps below 1,000. Numbers from 1,000 on are for algorithms of your own: `purpose_key(key, 1000, k)`.
    """

    INIT = 0
    BATCH = 1
    PARTICIPATION = 2
    NOISE = 3
    GRAPH = 4
    PARTITION = 5
    EVENT = 6
    ROUNDING = 7
    DROPOUT = 8
    PART = 9  # which part of the model a client trains
    CALIBRATION = 10
    RUN = 11  # the part of a `RunKey` that one run has for itself
    SERVER_NOISE = 12
    ESTIMATE = 13  # what clients measure between local steps
    ESTIMATE_NOISE = 14
    DIRECTION = 15  # of a zero-order estimate
    ARRIVAL = 16  # which messages arrive
    MESSAGE_ROUNDING = 17
    STREAM = 18  # another draw in the same round
    SHARED_NOISE = 19  # of pairs of nodes
    ATTACK = 20  # what attackers send
    ATTACKERS = 21  # who they are


SHARED = frozenset({Purpose.INIT, Purpose.GRAPH, Purpose.PARTITION, Purpose.CALIBRATION, Purpose.ATTACKERS})
"""Purposes whose numbers are the same in all runs of one base key."""


class RunKey(NamedTuple):
    """The base key of one run among several; every function that takes a base key takes it."""

    shared: Array  # (), typed: of `SHARED` purposes
    own: Array  # (), typed: of all others


Key = Array | RunKey


def digest(tree: PyTree, hashed: dict[tuple[int, ...], tuple[Any, list[Any]]] | None = None) -> str:
    """SHA-256 of a tree's arrays, their types and shapes, in hexadecimal.

    Args:
        tree: concrete arrays, such as `FederatedData`.
        hashed: hashes so far, for trees that begin with the same arrays, such as one pool; filled here, {} at first.

    Raises:
        ArgumentError: an array is traced.

    Examples:
        >>> digest(np.zeros(2)) == digest(jnp.zeros(2)), digest(np.zeros(2)) == digest(np.zeros((2, 1)))
        (False, False)
    """
    hashed, total, leaves = {} if hashed is None else hashed, hashlib.sha256(), jax.tree.leaves(tree)
    for count, leaf in enumerate(leaves, start=1):
        place = tuple(map(id, leaves[:count]))
        if place in hashed:
            total = hashed[place][0].copy()
            continue
        if is_traced(leaf):
            remedy = "Make the digest outside of jax.jit."
            raise ArgumentError("data", "must be concrete where a digest is made of them", "got a traced array", remedy)
        array = np.ascontiguousarray(leaf)
        total.update(f"{array.dtype}{array.shape}".encode())
        total.update(array.view(np.uint8).data if array.size else b"")
        hashed[place] = total.copy(), leaves  # which live as long as their numbers
    return total.hexdigest()


def keyed(plain: str, secret: Array | None) -> str:
    """A `digest` for a file: keyed (HMAC) by a typed key, shape (), so that it confirms no guess; else as it is.

    Whoever has all samples but one could try values of the last one against a plain digest.
    """
    if secret is None:
        return plain
    return hmac.digest(np.asarray(jax.random.key_data(secret), ">u4").tobytes(), plain.encode(), "sha256").hex()


def run_key(key: Array, settings: Mapping[str, Any], data: FederatedData | str) -> RunKey:
    """Make the key of one run from the base key of all runs, the settings that tell it from the others, and its data.

    Args:
        key: typed base key, shape (); may be traced.
        settings: name -> number, text, boolean, None, or lists and mappings of these; in any order. Pass everything in
            which runs on the same data differ: algorithm, step size, noise, clip norm, number of rounds.
        data: the data of all nodes, or their `digest`. Runs on data that differ in one sample must not share noise.

    Returns:
        A `RunKey`. Those of several runs may be stacked and vmapped over.

    Raises:
        ArgumentError: settings that JSON cannot hold, or data that are traced.

    Guarantees:
        - runs of the same base key start from the same parameters.
        - runs with different settings, or on different data, have independent batches and noise.
        - the order of settings does not matter.

    Examples:
        >>> key = jax.random.key(0)
        >>> data = jnp.zeros(3)
        >>> first, second = run_key(key, {"noise_std": 0.1}, data), run_key(key, {"noise_std": 0.2}, data)
        >>> bool(purpose_key(first, Purpose.INIT) == purpose_key(second, Purpose.INIT))
        True
        >>> bool(purpose_key(first, Purpose.NOISE, 3) == purpose_key(second, Purpose.NOISE, 3))
        False
    """
    own = purpose_key(key, Purpose.RUN)
    for word in run_words(settings, data).tolist():
        own = fold_in(own, word)
    return RunKey(shared=key, own=own)


def run_keys(keys: Array, words: np.ndarray) -> RunKey:
    """`run_key` of several runs in a few calls, from base keys (k,) and `run_words` (k, 4)."""
    own = keys
    for word in (np.full(len(words), int(Purpose.RUN)), np.zeros(len(words)), *words.T):
        own = _fold_each(own, word.astype(np.uint32))
    return RunKey(shared=keys, own=own)


_fold_each = jax.jit(jax.vmap(fold_in))


def settings_text(settings: Mapping[str, Any]) -> str:
    """The settings of a run as the text that `run_words` hashes."""
    try:
        return json.dumps(dict(settings), sort_keys=True, default=_plain)
    except (TypeError, ValueError) as error:
        remedy = "Pass numbers, texts, booleans, and lists or mappings of these."
        raise ArgumentError("settings", "must be values that JSON holds", str(error), remedy) from None


def run_words(settings: Mapping[str, Any] | str, data: FederatedData | str) -> np.ndarray:
    """The words that `run_key` folds into the key of all runs, (4,) uint32: a hash of its arguments."""
    text = settings if isinstance(settings, str) else settings_text(settings)
    text += data if isinstance(data, str) else digest(data)
    return np.frombuffer(hashlib.sha256(text.encode()).digest(), ">u4")[:4].astype(np.uint32)


def purpose_key(key: Key, purpose: Purpose | int, round_index: int | Array = 0, *, apart: bool = False) -> Array:
    """The key of one purpose in one round.

    Args:
        key: typed base key of the run, shape (), or the run's `RunKey`.
        purpose: what the numbers are for; a number from 1,000 on is yours.
        round_index: (), int32; leave out for purposes without rounds.
        apart: on a CPU compute the key in a kernel apart from those that use it; for keys of nodes from which keys of
            steps are made (`leaf_keys` says why). The key is the same.

    Returns:
        A typed key, shape ().

    Raises:
        ArgumentError: what is no single key, or a key of another generator than threefry.
    """
    if isinstance(key, RunKey):
        key = key.shared if purpose in SHARED else key.own
    shape = getattr(key, "shape", None)
    if shape is None or shape != (() if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else (2,)):
        found = f"got {key!r}" if shape is None else f"got an array of shape {shape}"
        raise ArgumentError("key", "must be one key", found, "Pass jax.random.key(0); vmap over several keys.")
    if not is_threefry(key):
        # Other generators give a vmapped draw other numbers than a single one, so that node streams would depend on n.
        found = f"got a {jax.random.key_impl(key)} key"
        raise ArgumentError("key", "must be a threefry key", found, "Make it with jax.random.key(seed).")
    fold_last = jax.random.fold_in if apart and is_cpu() else fold_in
    return fold_last(fold_in(key, int(purpose)), round_index)


def stream_key(key: Key, stream: int) -> Key:
    """The base key of another, independent draw of the same kind in the same rounds.

    Equal keys and equal rounds give equal draws: an algorithm that draws batches twice in a round gets the same batches
    twice, and the same noise. Its second draw takes `stream_key(key, 1)`.

    Args:
        key: the run's base key.
        stream: number of the draw, static, at least 0.

    Returns:
        `key` itself for stream 0. The `RunKey` of a run keeps its shared half.

    Guarantees:
        - draws of different streams are independent in every purpose that runs do not share.

    Examples:
        >>> key = jax.random.key(0)
        >>> first, second = (purpose_key(stream_key(key, stream), Purpose.BATCH, 3) for stream in (0, 1))
        >>> bool(first == purpose_key(key, Purpose.BATCH, 3)), bool(first == second)
        (True, False)
    """
    at_least(0, stream=stream)
    if stream == 0:
        return key
    own = purpose_key(key, Purpose.STREAM, stream)
    return key._replace(own=own) if isinstance(key, RunKey) else own


def _plain(value: Any) -> Any:
    """A path as text, an array or a NumPy scalar as numbers."""
    return os.fspath(value) if isinstance(value, os.PathLike) else np.asarray(value).tolist()


def node_keys(key: Array, num_nodes: int) -> Array:
    """One key for each node, shape (n,): entry i is `fold_in(key, i)` and does not depend on `num_nodes`.

    Guarantees:
        - node streams do not depend on the number of nodes.

    Examples:
        >>> key = jax.random.key(0)
        >>> bool((node_keys(key, 3) == node_keys(key, 8)[:3]).all())
        True
    """
    return jax.vmap(lambda node: fold_in(key, node))(jnp.arange(num_nodes, dtype=jnp.uint32))


def leaf_key(key: Array, leaf: int) -> Array:
    """The key of one leaf of a tree, numbered in `jax.tree.leaves` order."""
    return fold_in(key, leaf)


def leaf_keys(key: Array, num_leaves: int) -> Array:
    """`leaf_key` of the first leaves, shape (num_leaves,), each made once.

    Hashes that are written out fuse with all draws from their keys, and LLVM compiles such a kernel far more slowly
    than its parts: 1.0 s of a core for the parameters of an MLP, 4.4 s for ResNet-20. Nothing fuses across the loop
    here: 0.4 and 2.1 s.

    Guarantees:
        - entry i is `leaf_key(key, i)`.

    Examples:
        >>> key = jax.random.key(0)
        >>> bool((leaf_keys(key, 2)[1] == leaf_key(key, 1)).all())
        True
    """
    return _leaf_keys(key, num_leaves)


def _in_a_loop(key: Array, num_leaves: int) -> Array:
    return jax.lax.map(lambda leaf: jax.random.fold_in(key, leaf), jnp.arange(num_leaves, dtype=jnp.uint32))


# Compiled once where nothing else is compiled, and part of the caller elsewhere.
_leaf_keys = jax.jit(_in_a_loop, static_argnums=1, inline=True)
