"""Where an iteration of private push-sum spends its time.

    python -m experiments.bench round --json bench.json

PrivSGP at 64 nodes over the exponential graph, 784-32-10, batch 32, clipped in L2 norm, Gaussian noise. Rows, which
take turns in one process, every one in a loop with its state donated:

| row | what one round does |
|---|---|
| iteration | `push_sum` with batches of fixed size, every `Info` kept, as training runs it |
| iteration_poisson | the same with Poisson batches, whose capacity is 89 slots |
| iteration_plain | as "iteration", without clipping and noise |
| without_info | as "iteration", with the infos dropped; the difference is the time of the infos |
| products | the bare matrix products of forward and backward pass, and a step along their gradient |
| gradients | clipped gradients on batches that lie ready, and a step along them; contains the products |
| noise | draws the noise and adds it to an array |
| drawing | draws the batches: which samples |
| gathering | collects a batch's samples from the pool |
| mixing | parameters and push-sum weights over the graph |
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.bench_clip import as_jaxfl, descent
from experiments.bench_saga import Setting as DataSetting
from experiments.bench_saga import random_data
from experiments.timing import Measurement, Runner, compile_times, in_turns, ratio, runner
from jaxfl import gradients, graphs, privacy
from jaxfl.algorithms import push_sum
from jaxfl.core import Algorithm, Array, FederatedData, Purpose, PyTree, purpose_key
from jaxfl.gradients import Sampler
from jaxfl.gradients.estimator import gather
from jaxfl.gradients.samplers import draw_batch
from jaxfl.models import classification, mlp


class Setting(NamedTuple):
    """Shapes and repeats of the suite."""

    num_nodes: int = 64
    widths: tuple[int, ...] = (784, 32, 10)
    samples: int = 937  # of each node
    batch_size: int = 32
    clip_norm: float = 1.0
    noise_std: float = 0.01
    step_size: float = 0.01
    rounds: int = 20  # in one call
    repeats: int = 9


KEY = jax.random.key(0)
RANDOM = ("noise", "drawing")


def learner(setting: Setting, sampler: Sampler, *, private: bool = True) -> Algorithm:
    """PrivSGP, or push-sum without clipping and noise."""
    return push_sum(
        classification(mlp(setting.widths)),
        graph=graphs.exponential(setting.num_nodes),
        gradient=gradients.mini_batch(sampler=sampler, clip_norm=setting.clip_norm if private else None),
        noise=privacy.gaussian(setting.noise_std) if private else None,
        step_size=setting.step_size,
    )


def iterations(algorithm: Algorithm, rounds: int) -> Callable[[tuple[PyTree, PyTree], FederatedData], PyTree]:
    """((state, infos of earlier rounds), data) -> the same after a call's rounds; infos are kept, as training does."""

    def loop(held, data):
        return jax.lax.scan(lambda state, _: algorithm.round(KEY, state, data), held[0], length=rounds)

    return loop


def without_info(algorithm: Algorithm, rounds: int) -> Callable[[PyTree, FederatedData], PyTree]:
    """(state, data) -> state; the compiler drops what only the infos need."""
    return lambda state, data: jax.lax.fori_loop(0, rounds, lambda _, s: algorithm.round(KEY, s, data)[0], state)


def no_infos(algorithm: Algorithm, state: PyTree, data: FederatedData, rounds: int) -> PyTree:
    """Zeros in the shapes of a call's infos."""
    info = jax.eval_shape(algorithm.round, KEY, state, data)[1]
    return jax.tree.map(lambda leaf: jnp.zeros((rounds, *leaf.shape), leaf.dtype), info)


def linear_gradient(params: PyTree, inputs: Array, labels: Array) -> PyTree:
    """Of half the squared output of the network's layers without biases and activations: its matrix products alone."""
    del labels

    def half_square(params):
        hidden = inputs
        for layer in sorted(params):
            hidden = hidden @ params[layer]["kernel"]
        return 0.5 * jnp.sum(hidden**2)

    return jax.grad(half_square)(params)


def parts(setting: Setting, sampler: Sampler, data: FederatedData) -> dict[str, Runner]:
    """The parts of one iteration, each alone."""
    task, graph, rounds = classification(mlp(setting.widths)), graphs.exponential(setting.num_nodes), setting.rounds
    noise = privacy.gaussian(setting.noise_std)
    params = learner(setting, sampler).init(KEY, data).params
    batch = draw_batch(sampler, KEY, jnp.int32(0), data.sizes)
    inputs, labels = gather(data, batch.indices)
    floats = inputs.astype(jnp.float32) / 255
    kernels = {name: {"kernel": layer["kernel"]} for name, layer in params.items()}

    def repeat(one):
        return lambda state, *args: jax.lax.fori_loop(0, rounds, lambda k, held: one(k, held, *args), state)

    def add_noise(k, tree):
        return jax.tree.map(jnp.add, tree, noise.draw(purpose_key(KEY, Purpose.NOISE, k), tree))

    def collect(k, held, data, indices):
        del held
        return gather(data, (indices + k) % data.sizes[:, None])

    return {
        "products": runner(descent(linear_gradient, "vmap", rounds, 1e-6), kernels, floats, labels),
        "gradients": runner(
            descent(as_jaxfl(task, setting.clip_norm), task.node_loop, rounds, setting.step_size),
            params,
            inputs,
            labels,
        ),
        "noise": runner(repeat(add_noise), params),
        "drawing": runner(repeat(lambda k, _, sizes: draw_batch(sampler, KEY, k, sizes)), batch, data.sizes),
        "gathering": runner(repeat(collect), (inputs, labels), data, batch.indices),
        "mixing": runner(
            repeat(lambda k, held: graphs.mix(graph, held, k)), (params, jnp.ones(setting.num_nodes, jnp.float32))
        ),
    }


def suite(setting: Setting | None = None) -> dict[str, Measurement]:
    """Measure; see the module's text. About a minute on two cores."""
    setting = Setting() if setting is None else setting
    fixed, poisson = gradients.fixed(setting.batch_size), gradients.poisson(setting.batch_size)
    data = random_data(DataSetting(widths=setting.widths), setting.num_nodes, setting.samples)
    whole = learner(setting, fixed)
    rows = {}
    for name, algorithm in {
        "iteration": whole,
        "iteration_poisson": learner(setting, poisson),
        "iteration_plain": learner(setting, fixed, private=False),
    }.items():
        state = algorithm.init(KEY, data)
        infos = no_infos(algorithm, state, data, setting.rounds)
        rows[name] = runner(iterations(algorithm, setting.rounds), (state, infos), data)
    rows["without_info"] = runner(without_info(whole, setting.rounds), whole.init(KEY, data), data)
    rows |= parts(setting, fixed, data)
    return _report(setting, rows)


def _report(setting: Setting, rows: dict[str, Runner]) -> dict[str, Measurement]:
    """Run the rows in turns."""
    seconds = in_turns({name: row.call for name, row in rows.items()}, dict.fromkeys(rows, setting.repeats))
    shapes = f"n = {setting.num_nodes}, {'-'.join(map(str, setting.widths))}, batch {setting.batch_size}"
    report = {}
    whole = seconds["iteration"]
    inside = [sum(calls, start=0.0) for calls in zip(*(seconds[name] for name in ("products", *RANDOM)), strict=True)]
    share, (lowest, highest) = ratio(inside, whole)
    report["round/share_outside"] = Measurement(
        1 - share, "fraction", (1 - highest, 1 - lowest), f"outside matrix products and random numbers; {shapes}"
    )
    columns = (seconds[name] for name in ("gathering", "mixing", "iteration", "without_info"))
    parts = [
        gathered + mixed + with_info - without for gathered, mixed, with_info, without in zip(*columns, strict=True)
    ]
    share, spread = ratio(parts, whole)
    report["round/share_of_parts_outside"] = Measurement(
        share, "fraction", spread, f"gathering, mixing and infos, each alone; {shapes}"
    )
    for name in ("products", "gradients", "noise", "drawing", "gathering", "mixing"):
        value, spread = ratio(seconds[name], whole)
        report[f"round/share_{name}"] = Measurement(value, "fraction", spread, f"{name} over iteration; {shapes}")
    value, spread = ratio(seconds["without_info"], whole)
    report["round/share_info"] = Measurement(
        1 - value, "fraction", (1 - spread[1], 1 - spread[0]), f"saved by dropping the infos; {shapes}"
    )
    for name, calls in seconds.items():
        each = [1e3 * call / setting.rounds for call in calls]
        report[f"round/{name}"] = Measurement(statistics.median(each), "ms/round", (min(each), max(each)), shapes)
        if name.startswith("iteration"):
            rates = [setting.rounds / call for call in calls]
            report[f"round/rate_{name}"] = Measurement(
                statistics.median(rates), "iterations/s", (min(rates), max(rates)), shapes
            )
    return {**report, **compile_times("round", rows, shapes)}
