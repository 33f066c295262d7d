"""Noise on pytrees whose leaves carry the node axis first.

The scale is an absolute one (`noise_std`, in the units of the quantity that the noise is added to) and may differ per
node, for personalised privacy. This file adds the noise; `jaxfl.privacy.accountant` computes the epsilon.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import ArgumentError, Array, PyTree, Task, check, node_keys, one_kernel
from jaxfl.core.normals import normals
from jaxfl.core.reprs import short_repr
from jaxfl.core.tasks import check_sample_losses
from jaxfl.core.tree import copied, flattener, leaf_names, scale, size
from jaxfl.privacy.shared import Secrets


def add(values: PyTree, noise: PyTree) -> PyTree:
    """The values with the noise added."""
    return jax.tree.map(jnp.add, values, noise)


class NoiseMechanism(NamedTuple):
    """Noise, and how values are released with it.

    Attributes:
        distribution: "gaussian", "laplace", "grid_gaussian", "shared_gaussian", "shared_grid_gaussian" or
            "summed_gaussian".
        noise_scale: () or (n,), standard deviation (Gaussian) or scale b of density exp(-|x| / b) / (2 b) (Laplace).
        draw: (key, tree with leaves (n, *leaf), float32) -> noise of the same structure and shapes, float32, or int32
            for noise on a grid. It raises ArgumentError for other leaves: noise drawn in bfloat16 takes 128 values,
            and hides nothing between them.
        release: (values, noise) -> the released values, float32: values + noise, except for noise on a grid. Leaves
            have the node axis unless `noise_scale` is ().
        rescaled: noise_scale -> the same mechanism with that scale; None where it cannot be rescaled.
        grid_bits: of noise on a grid: the step is noise_scale 2^-grid_bits; None where there is no grid.
        secrets: of noise that pairs of nodes share, `noise_scale` being the effective one; None for noise of one's own.
        parts: of that noise, with one scale: own (n,) and shared (n, n) standard deviations in units of `noise_scale`.
    """

    distribution: str
    noise_scale: float | Array
    draw: Callable[[Array, PyTree], PyTree]
    release: Callable[[PyTree, PyTree], PyTree] = add
    rescaled: Callable[[Array], NoiseMechanism] | None = None
    grid_bits: int | None = None
    secrets: Secrets | None = None
    parts: tuple[np.ndarray, np.ndarray] | None = None

    __repr__ = short_repr


NO_NOISE = NoiseMechanism("none", 0.0, draw=lambda key, params: None)
"""The plain form, which draws nothing."""


def check_types(noise: NoiseMechanism, task: Task, params: PyTree) -> None:
    """Refuse a task and params, leaves (n, *leaf), to whose gradients noise cannot be added; nothing is computed."""
    jax.eval_shape(noise.draw, jax.eval_shape(lambda: jax.random.key(0)), params)
    if noise is not NO_NOISE:
        check_sample_losses(task)


def require_float_noise(missing: str, **distributions: str | None) -> None:
    """Refuse noise on a grid for algorithms whose accountants count no rounding: `missing` is what no bound says."""
    for name, distribution in distributions.items():
        if distribution in ("grid_gaussian", "shared_grid_gaussian"):
            requirement = f"must be drawn in float32 here: no bound says {missing}"
            remedy = "Pass gaussian; docs/finite_precision.md names the methods that have a grid."
            raise ArgumentError(name, requirement, f"got {distribution}", remedy)


def require_own_noise(reason: str, **distributions: str | None) -> None:
    """Refuse noise that pairs of nodes share, for a `reason`."""
    for name, distribution in distributions.items():
        if distribution in ("shared_gaussian", "shared_grid_gaussian", "summed_gaussian"):
            requirement = f"must be noise of a node's own here: {reason}"
            raise ArgumentError(name, requirement, f"got {distribution}", "Pass jaxfl.gaussian.")


def require_kept_sum(noise: NoiseMechanism, num_nodes: int, *, is_linear: bool, loses_sum: bool = False) -> None:
    """Refuse noise that pairs of nodes share where it would not cancel.

    Args:
        noise: shared or not.
        num_nodes: n of the network.
        is_linear: every node takes the same step along its noisy gradient. An optimizer does not say whether it is
            linear, so that all of them count as not.
        loses_sum: mixing changes the sum over nodes.
    """
    if noise.secrets is None:
        return
    if noise.distribution == "summed_gaussian":
        found, remedy = "got noise for a server of sums", "Pass jaxfl.shared_gaussian."
        raise ArgumentError("noise", "must not count on sums where neighbors see single messages", found, remedy)
    if noise.secrets.num_nodes != num_nodes:
        found, remedy = f"its key graph has {noise.secrets.num_nodes}", "Make the key graph for this network."
        raise ArgumentError("noise", f"must be shared among {num_nodes} nodes", found, remedy)
    if not is_linear:
        requirement = "must be None with shared noise: only equal steps along the gradients let it cancel"
        raise ArgumentError("optimizer", requirement, "got an optimizer", "Pass step_size.")
    if loses_sum:
        requirement = "must lose messages of two nodes together with shared noise, which else does not cancel"
        raise ArgumentError("links", requirement, "got losses by direction", "Pass links(..., symmetric=True).")


def require_rescaled(noise: NoiseMechanism) -> None:
    """Refuse scales per node of a mechanism that cannot take one node's scale."""
    if jnp.ndim(noise.noise_scale) and noise.rescaled is None:
        requirement = "must be a mechanism that can be rescaled where its scale is per node"
        remedy = "Pass jaxfl.gaussian, jaxfl.laplace or jaxfl.grid_gaussian, or one scale for all nodes."
        raise ArgumentError("noise", requirement, f"got {noise.distribution}, without `rescaled`", remedy)


def released(noise: NoiseMechanism, values: PyTree, drawn: PyTree | None) -> PyTree:
    """Release values, leaves (n, *leaf), with the noise that was drawn; without noise where nothing was."""
    return values if drawn is None else noise.release(values, drawn)


def gaussian(noise_std: float | Array, generator: str = "pairs") -> NoiseMechanism:
    """Independent Normal(0, noise_std^2) on every coordinate. Without a clip norm beside it it protects nothing.

    Args:
        noise_std: () or (n,), at least 0; may be traced.
        generator: the way to normal numbers. "pairs" makes two of 64 random bits, up to 6.7 noise_std (Box-Muller).
            "inverse" is `jax.random.normal`, each of 23 bits and up to 5.4 noise_std: the numbers of jaxfl 0.3.

    Guarantees:
        - every coordinate has standard deviation noise_std of its node.
        - noise_std 0 adds exactly zero.

    Examples:
        >>> import jax
        >>> noise = gaussian(jnp.array([0.0, 2.0])).draw(jax.random.key(0), jnp.zeros((2, 10_000)))
        >>> [round(float(s), 1) for s in noise.std(axis=1)]
        [0.0, 2.0]
    """
    check.non_negative(noise_std=noise_std)
    check.in_float32(noise_std=noise_std)
    check.one_of(tuple(_NORMALS), generator=generator)
    return _mechanism("gaussian", noise_std, _NORMALS[generator], partial(gaussian, generator=generator))


def laplace(noise_scale: float | Array) -> NoiseMechanism:
    """Independent Laplace noise of scale b on every coordinate: density exp(-|x| / b) / (2 b), standard deviation
    sqrt(2) b. Without a clip norm beside it it protects nothing.

    Args:
        noise_scale: b, () or (n,), at least 0; may be traced.

    Guarantees:
        - every coordinate has mean absolute value noise_scale of its node.
        - noise_scale 0 adds exactly zero.
    """
    check.non_negative(noise_scale=noise_scale)
    check.in_float32(noise_scale=noise_scale)
    return _mechanism("laplace", noise_scale, _of_jax(jax.random.laplace), laplace)


def _of_jax(sample: Callable[..., Array]) -> Callable[[Array, int], Array]:
    return lambda key, size: sample(key, (size,), jnp.float32)


_NORMALS = {"pairs": normals, "inverse": _of_jax(jax.random.normal)}


def _mechanism(
    distribution: str,
    noise_scale: float | Array,
    sample: Callable[[Array, int], Array],
    rescaled: Callable[[Array], NoiseMechanism],
) -> NoiseMechanism:
    noise_scale = copied(noise_scale)

    def draw(key, params):
        return scale(jnp.asarray(noise_scale, jnp.float32), standard_noise(key, params, sample))

    return NoiseMechanism(distribution, noise_scale, draw, rescaled=rescaled)


def standard_noise(key: Array, params: PyTree, sample: Callable[[Array, int], Array]) -> PyTree:
    """Noise of every node, leaves (n, *leaf), from `sample`: (key of a node, d) -> (d,).

    Raises:
        ArgumentError: `params` that are not float32.
    """
    num_nodes = _num_nodes(params)
    one_node = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params)
    _, unflatten = flattener(one_node)
    # One call for all leaves: a sampler for each leaf multiplies the size of the program and the time to compile it.
    keys = one_kernel(node_keys(key, num_nodes))
    return unflatten(jax.vmap(lambda node_key: sample(node_key, size(one_node)))(keys))


def _num_nodes(params: PyTree) -> int:
    """n of a tree of float32 leaves; ArgumentError for another type."""
    leaves = leaf_names(params)
    for name, leaf in leaves.items():
        if leaf.dtype != jnp.float32:
            remedy = "Keep parameters in float32; compute_dtype makes the layers run in bfloat16."
            raise ArgumentError("params", "must be float32 where noise is added", f"{name} is {leaf.dtype}", remedy)
    return next(iter(leaves.values())).shape[0]
