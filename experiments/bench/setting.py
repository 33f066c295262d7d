"""Common parts of the suites: networks, shapes and repeats, data of noise, push-sum, and rounds in a loop."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import DTypeLike

from experiments.bench.timing import Runner, runner
from jaxfl import graphs, privacy
from jaxfl.algorithms import local_steps, push_sum
from jaxfl.algorithms.clients.local_steps import LocalSteps
from jaxfl.core import Algorithm, Array, FederatedData, PyTree, Task, node_keys, update_over_nodes
from jaxfl.core.tree import size
from jaxfl.data import federate
from jaxfl.gradients import GradientEstimator
from jaxfl.models import Model, classification, mlp

KEY = jax.random.key(0)


class Network(NamedTuple):
    """A model, with the shape of its samples and its classes."""

    model: Model
    text: str
    sample_shape: tuple[int, ...] = (28, 28, 1)
    num_classes: int = 10

    def num_params(self) -> int:
        return size(jax.eval_shape(self.model.init, KEY))


def by(shape: Iterable[int]) -> str:
    """Say 28x28x1."""
    return "x".join(map(str, shape))


def perceptron(*widths: int) -> Network:
    """An MLP and flat samples."""
    return Network(mlp(widths), "-".join(map(str, widths)), widths[:1], widths[-1])


class Setting(NamedTuple):
    """Settings of a group of rows. A suite has a table of them, and uses the fields that its rows depend on."""

    network: Network
    num_nodes: int
    batch_size: int = 32
    samples: int = 600  # of each node
    method: str = "push_sum"
    num_active: int = 0  # nodes that take part in a round; 0: all
    num_local_steps: int = 1
    clip_norm: float = 1.0
    noise_std: float = 0.01
    step_size: float = 0.01
    rounds: int = 2  # in one call
    repeats: int = 7
    slow_rounds: int = 2  # of rows that take far longer
    slow_repeats: int = 3
    gemm_size: int = 2048  # of the matrix product that is the yardstick

    def task(self) -> Task:
        return classification(self.network.model)

    def active(self) -> int:
        return self.num_active or self.num_nodes

    def images(self) -> str:
        """Nodes, batch and shape of an image, in words."""
        return f"n = {self.num_nodes}, batch {self.batch_size}, {by(self.network.sample_shape)}"

    def layers(self) -> str:
        """Nodes, network and batch, in words."""
        return f"n = {self.num_nodes}, {self.network.text}, batch {self.batch_size}"


def random_data(setting: Setting, dtype: DTypeLike = np.uint8) -> FederatedData:
    """Images of noise, uint8 or float32, in one pool, node after node, equally many for every node."""
    rng = np.random.default_rng(0)
    count = setting.num_nodes * setting.samples
    shape = (count, *setting.network.sample_shape)
    inputs = rng.integers(0, 256, shape, np.uint8) if dtype == np.uint8 else rng.random(shape, np.float32)
    labels = rng.integers(0, setting.network.num_classes, count).astype(np.int32)
    return federate(inputs, labels, np.split(np.arange(count, dtype=np.int32), setting.num_nodes))


def node_batches(setting: Setting) -> tuple[Array, Array]:
    """Images of noise (n, b, *sample) and labels (n, b) of one batch at every node."""
    shape, network = (setting.num_nodes, setting.batch_size), setting.network
    inputs = jax.random.uniform(jax.random.fold_in(KEY, 1), (*shape, *network.sample_shape), jnp.float32)
    return inputs, jax.random.randint(jax.random.fold_in(KEY, 2), shape, 0, network.num_classes, jnp.int32)


def node_params(init: Callable[[Array], PyTree], num_nodes: int) -> PyTree:
    """Apply `init` to each node's key, leaves (n, *leaf)."""
    return jax.jit(jax.vmap(init))(node_keys(KEY, num_nodes))


def learner(setting: Setting, gradient: GradientEstimator, *, noise: bool = True) -> Algorithm:
    """Push-sum over the exponential graph; PrivSGP where gradients are clipped."""
    return push_sum(
        setting.task(),
        graph=graphs.exponential(setting.num_nodes),
        gradient=gradient,
        noise=privacy.gaussian(setting.noise_std) if noise else None,
        step_size=setting.step_size,
    )


def clients(setting: Setting, **options: Any) -> LocalSteps:
    """Local steps of SGD."""
    optimizer = optax.sgd(setting.step_size)
    return local_steps(setting.num_local_steps, batch_size=setting.batch_size, optimizer=optimizer, **options)


def layer_flops(network: Network) -> dict[str, tuple[tuple[int, ...], int]]:
    """Layer -> shape of its inputs, and floating-point operations of a step's products, both for one sample.

    Counted are the forward product and the gradients to weights and inputs; the first layer needs none to its inputs.
    """
    shape, passes, layers = network.sample_shape, 2, {}
    for name, layer in network.model.layers:
        part = Model(((name, layer),))
        params = jax.eval_shape(part.init, KEY)
        images, weights = (jax.ShapeDtypeStruct(leaf, jnp.float32) for leaf in ((1, *shape), (1,)))
        outputs, _ = jax.eval_shape(part.apply_train, params, part.init_state(), images, weights, KEY)
        kernels = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params) if leaf.ndim > 1)
        flops = 2 * passes * kernels * math.prod(outputs.shape[1:-1])
        layers[name] = (shape, flops)
        shape, passes = outputs.shape[1:], 3 if flops else passes
    return layers


def descend(params: PyTree, slopes: PyTree, step_size: float) -> PyTree:
    """A step against the slopes."""
    return jax.tree.map(lambda leaf, slope: leaf - step_size * slope, params, slopes)


def node_rounds(step: Callable[..., PyTree], node_loop: str, rounds: int) -> Callable[..., PyTree]:
    """(state, *batches) -> state after `rounds` of one node's `step` at every node, in a scan; one needs no loop."""
    one_round = update_over_nodes(step, node_loop)
    if rounds == 1:
        return one_round
    return lambda state, *batches: jax.lax.scan(
        lambda held, _: (one_round(held, *batches), None), state, length=rounds
    )[0]


def loop(algorithm: Algorithm, rounds: int, *, infos: bool = False) -> Callable[[PyTree, FederatedData], PyTree]:
    """(state, data) -> state after `rounds`; with infos, which training keeps, the same for (state, infos).

    Without infos, the compiler drops all computations that only they need.
    """
    if infos:
        return lambda held, data: jax.lax.scan(lambda s, _: algorithm.round(KEY, s, data), held[0], length=rounds)
    return lambda state, data: jax.lax.fori_loop(0, rounds, lambda _, s: algorithm.round(KEY, s, data)[0], state)


def training(algorithm: Algorithm, data: FederatedData, rounds: int, *, infos: bool = False) -> tuple[Runner, PyTree]:
    """The compiled `loop`, and the state that it starts from."""
    state = jax.jit(algorithm.init)(KEY, data)
    if not infos:
        return runner(loop(algorithm, rounds), state, data), state
    info = jax.eval_shape(algorithm.round, KEY, state, data)[1]
    zeros = jax.tree.map(lambda leaf: jnp.zeros((rounds, *leaf.shape), leaf.dtype), info)
    return runner(loop(algorithm, rounds, infos=True), (state, zeros), data), state
