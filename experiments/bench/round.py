"""Breakdown of the time of one iteration of private push-sum.

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

import jax
import jax.numpy as jnp

from experiments.bench.clip import as_jaxfl, descent
from experiments.bench.setting import KEY, Setting, learner, perceptron, random_data, training
from experiments.bench.timing import Measurement, Report, Runner, in_turns, runner
from jaxfl import gradients, graphs, privacy
from jaxfl.core import Algorithm, Array, FederatedData, Purpose, PyTree, purpose_key
from jaxfl.gradients import Sampler
from jaxfl.gradients.estimator import gather
from jaxfl.gradients.samplers import draw_batch

SETTING = Setting(perceptron(784, 32, 10), 64, samples=937, rounds=20, repeats=9)


def private(setting: Setting, sampler: Sampler) -> Algorithm:
    """PrivSGP."""
    return learner(setting, gradients.mini_batch(sampler=sampler, clip_norm=setting.clip_norm))


def linear_gradient(params: PyTree, inputs: Array, labels: Array) -> PyTree:
    """Gradient of half the squared output of the network's layers without biases and activations: its matrix products
    only."""
    del labels

    def half_square(params):
        hidden = inputs
        for layer in sorted(params):
            hidden = hidden @ params[layer]["kernel"]
        return 0.5 * jnp.sum(hidden**2)

    return jax.grad(half_square)(params)


def parts(setting: Setting, sampler: Sampler, data: FederatedData, params: PyTree) -> dict[str, Runner]:
    """The parts of one iteration, each alone; `params` have leaves (n, *leaf)."""
    task, graph, rounds = setting.task(), graphs.exponential(setting.num_nodes), setting.rounds
    noise = privacy.gaussian(setting.noise_std)
    batch = draw_batch(sampler, KEY, jnp.int32(0), data.sizes)
    inputs, labels = gather(data, batch.indices)
    floats = inputs.astype(jnp.float32) / 255
    kernels = {name: {"kernel": layer["kernel"]} for name, layer in params.items()}
    clip = descent(as_jaxfl(task, setting.clip_norm), task.node_loop, rounds, setting.step_size)

    def repeat(one):
        return lambda state, *args: jax.lax.fori_loop(0, rounds, lambda k, held: one(k, held, *args), state)

    def add_noise(k, tree):
        return jax.tree.map(jnp.add, tree, noise.draw(purpose_key(KEY, Purpose.NOISE, k), tree))

    def collect(k, held, data, indices):
        del held
        return gather(data, (indices + k) % data.sizes[:, None])

    return {
        "products": runner(descent(linear_gradient, "vmap", rounds, 1e-6), kernels, floats, labels),
        "gradients": runner(clip, params, inputs, labels),
        "noise": runner(repeat(add_noise), params),
        "drawing": runner(repeat(lambda k, _, sizes: draw_batch(sampler, KEY, k, sizes)), batch, data.sizes),
        "gathering": runner(repeat(collect), (inputs, labels), data, batch.indices),
        "mixing": runner(
            repeat(lambda k, held: graphs.mix(graph, held, k)), (params, jnp.ones(setting.num_nodes, jnp.float32))
        ),
    }


def suite(setting: Setting = SETTING) -> dict[str, Measurement]:
    """Measure; see the module's text. About a minute on two cores."""
    fixed, poisson = gradients.fixed(setting.batch_size), gradients.poisson(setting.batch_size)
    data, whole, rounds = random_data(setting), private(setting, fixed), setting.rounds
    iterations = {
        "iteration": whole,
        "iteration_poisson": private(setting, poisson),
        "iteration_plain": learner(setting, gradients.mini_batch(sampler=fixed), noise=False),
    }
    rows = {name: training(one, data, rounds, infos=True)[0] for name, one in iterations.items()}
    rows["without_info"], state = training(whole, data, rounds)
    return shares(setting, rows | parts(setting, fixed, data, state.params))


def shares(setting: Setting, rows: dict[str, Runner]) -> dict[str, Measurement]:
    """Run the rows in turns: their times, and the parts' shares of an iteration."""
    times, report = in_turns(rows, setting.repeats, setting.rounds), Report("round/", setting.layers())
    whole, info = times["iteration"], times["iteration"] - times["without_info"]

    def rest(name, part, text):
        report.ratio(name, part, whole, text, "fraction")
        value, unit, (low, high), _ = report.measurements[f"round/{name}"]
        report.add(name, 1 - value, (1 - high, 1 - low), unit, text)

    inside = times["products"] + times["noise"] + times["drawing"]
    rest("share_outside", inside, "outside matrix products and random numbers")
    outside = times["gathering"] + times["mixing"] + info
    report.ratio("share_of_parts_outside", outside, whole, "gathering, mixing and infos, each alone", "fraction")
    for name in ("products", "gradients", "noise", "drawing", "gathering", "mixing"):
        report.ratio(f"share_{name}", times[name], whole, f"{name} over iteration", "fraction")
    rest("share_info", times["without_info"], "saved by dropping the infos")
    report.times(times)
    for name in [name for name in rows if name.startswith("iteration")]:
        report.median(f"rate_{name}", 1 / times[name], "iterations/s")
    report.compile_times(rows)
    return report.measurements
