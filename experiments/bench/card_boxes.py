"""The boxes of `bench card`: each yields its numbers, as large as a card takes them or small enough for a CPU."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.setting import KEY, Setting, learner, perceptron, random_data
from experiments.bench.timing import Number, runner
from jaxfl import gradients, privacy
from jaxfl.core import Algorithm, Array
from jaxfl.models.kernels import forms, geometry, windows
from jaxfl.training.chunks import rounds_fn
from jaxfl.training.environment import describe_environment


def repeated(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of calls, at most `repeats` of them and about 20 s."""
    seconds: list[float] = []
    while len(seconds) < repeats and sum(seconds) < 20:
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return seconds


def number(name: str, unit: str, measure: Callable[[], tuple[list[float], Number]]) -> Number:
    """The median of repeats and their extremes; a failure says why, and the next number may succeed."""
    try:
        values, more = measure()
    except Exception as error:
        return {"name": name, "value": None, "unit": unit, "error": f"{type(error).__name__}: {error}"[:400]}
    return {
        "name": name,
        "value": float(np.median(values)),
        "unit": unit,
        "low": min(values),
        "high": max(values),
    } | more


def timed(name: str, unit: str, of_seconds: Callable[[float], float], fn: Callable[..., Array], *args: Array) -> Number:
    """Time a function in a loop of one program: 20 calls of it between two waits of the host."""

    def measure():
        calls = 20
        held = args, jnp.zeros_like(jax.eval_shape(fn, *args))
        run = runner(lambda held, zero: repeated_calls(fn, calls, held, zero), held, jnp.float32(0))
        return [of_seconds(one / calls) for one in repeated(run, 7)], {}

    return number(name, unit, measure)


def repeated_calls(fn: Callable[..., Array], calls: int, held: tuple[tuple[Array, ...], Array], zero: Array):
    """Call `fn` again and again, each call's arguments behind the result before: (arguments, result) of the last one.

    `zero` is 0, which the compiler does not know, so that it can neither leave a call out nor move it out of the loop.
    """

    def body(_, held):
        result = fn(*held[0])
        change = zero * result[(0,) * result.ndim].astype(jnp.float32)

        def changed(leaf):
            corner = leaf[(slice(0, 1),) * leaf.ndim]
            return jax.lax.dynamic_update_slice(leaf, corner + change.astype(leaf.dtype), (0,) * leaf.ndim)

        return tuple(map(changed, held[0])), result

    return jax.lax.fori_loop(0, calls, body, held)


def chunk(name: str, algorithm: Algorithm, setting: Setting, *, infos: bool) -> Number:
    """Microseconds of a round in training's own chunk; without infos in a loop that drops them."""

    def rounds(key, state, data, count):
        if infos:
            return rounds_fn(algorithm, setting.rounds)(key, state, data, count)
        return jax.lax.fori_loop(0, setting.rounds, lambda _, held: algorithm.round(key, held, data)[0], state), None

    def measure():
        data, count = random_data(setting), np.int32(setting.rounds)
        state = jax.jit(algorithm.init)(KEY, data)
        start = time.perf_counter()
        compiled = jax.jit(rounds, donate_argnums=1).lower(KEY, state, data, count).compile()
        facts = {"compile_s": time.perf_counter() - start}
        memory = compiled.memory_analysis()
        if memory is not None:
            facts |= {"temp_GB": memory.temp_size_in_bytes / 1e9, "args_GB": memory.argument_size_in_bytes / 1e9}

        def call():
            nonlocal state
            state, buffers = compiled(KEY, state, data, count)
            return state, buffers

        seconds = repeated(call, 6)
        return [1e6 * one / setting.rounds for one in seconds[1:] or seconds], facts

    return number(name, "us/round", measure)


def ceilings(small: bool) -> Iterator[Number]:
    """Measure the card's ceilings: copies, products, launches, and normal numbers that are added to an array."""
    yield {"name": "environment", "value": describe_environment(), "unit": ""}
    count, size, launches = (2**20, 512, 8) if small else (2**30, 8192, 1000)
    copied = jnp.ones(count, jnp.float32)
    yield timed("ceiling/copy", "TB/s", lambda one: 8e-12 * count / one, lambda x: x + 1, copied)
    products = {"bf16": (jnp.bfloat16, None), "tf32": (jnp.float32, None), "f32": (jnp.float32, "highest")}
    for name, (dtype, precision) in products.items():
        factor, product = jax.random.normal(KEY, (size, size), dtype), partial(jnp.matmul, precision=precision)
        yield timed(f"ceiling/{name}", "TFLOP/s", lambda one: 2e-12 * size**3 / one, product, factor, factor)

    def launch(x):
        return jax.lax.fori_loop(0, launches, lambda i, x: x.at[i % 128].add(1.0), x)

    unit = "us a kernel in a loop of known length"
    yield timed("ceiling/launch", unit, lambda one: 1e6 * one / launches, launch, jnp.ones(128, jnp.float32))
    numbers, drawn = jnp.zeros((8, 100) if small else (1024, 25_450), jnp.float32), privacy.gaussian(1.0)
    ways = {
        "shipped": lambda key, x: x + drawn.draw(jax.random.wrap_key_data(key), x),
        "hardware": lambda key, x: x + jax.random.normal(jax.random.wrap_key_data(key, impl="unsafe_rbg"), x.shape),
    }
    for (name, fn), words in zip(ways.items(), (2, 4), strict=True):
        key = jnp.arange(words, dtype=jnp.uint32)
        yield timed(f"noise/{name}", "ns a number", lambda one: 1e9 * one / numbers.size, fn, key, numbers)


def private_push_sum(setting: Setting, *, table: bool) -> Algorithm:
    """PrivSGP, with a factored table PrivSGP-VR."""
    options = {"sampler": gradients.fixed(setting.batch_size), "clip_norm": setting.clip_norm}
    return learner(setting, gradients.saga(**options, table="factored") if table else gradients.mini_batch(**options))


def rounds(small: bool) -> Iterator[Number]:
    """PrivSGP-VR with a factored table, and PrivSGP: each with the infos that training keeps, and without."""
    for table, num_nodes in itertools.product((True, False), (8, 16) if small else (64, 16, 1024)):
        setting = Setting(perceptron(784, 32, 10), num_nodes, samples=200, rounds=4 if small else 50)
        for infos in (True, False):
            name = f"round/{'privsgp_vr' if table else 'privsgp'}_n{num_nodes}{'' if infos else '_without_infos'}"
            yield chunk(name, private_push_sum(setting, table=table), setting, infos=infos)


def convolutions(small: bool) -> Iterator[Number]:
    """Gradient to the kernel of a first layer, whose images have 3 channels: BlazeFL's CNN and ResNet-20."""
    large = (100, 50, 32, 5, 6), (32, 32, 32, 3, 16)
    for num_nodes, batch, size, window, features in [(3, 4, 8, 3, 4)] if small else large:
        for dtype, (form, fn) in itertools.product((jnp.float32, jnp.bfloat16), first_kernel_forms(window).items()):
            inputs = jax.random.normal(KEY, (num_nodes, batch, size, size, 3), dtype)
            error = jax.random.normal(KEY, (num_nodes, batch, size, size, features), dtype)
            name = f"conv/first_kernel_{form}_{window}x{window}x{features}_n{num_nodes}_{jnp.dtype(dtype).name}"
            one = timed(name, "ms", lambda one: 1e3 * one, fn, inputs, error)
            flops = 2 * error.size * window * window * 3
            yield one if "error" in one else one | {"TFLOPs": 1e-9 * flops / one["low"]}


def first_kernel_forms(window: int) -> dict[str, Callable[[Array, Array], Array]]:
    """Form -> (inputs (n, b, H, W, 3), errors (n, b, H, W, o)) -> gradient to the kernels (n, window, window, 3, o).

    grouped: the form that is shipped. patches: a product a node. patches_of_images: a product an image, then a sum.
    filled: grouped, with channels of zeros up to 16 bytes a pixel.
    """

    def grouped(inputs, error):
        geom = geometry(inputs.shape[2:4], (window, window))
        shape = (len(inputs), window, window, inputs.shape[-1], error.shape[-1])
        kernel = jax.ShapeDtypeStruct(shape, inputs.dtype)
        return jax.linear_transpose(lambda kernel: forms._group_convolution(inputs, kernel, geom), kernel)(error)[0]

    def patches(inputs, error, product="nbpk,nbpo->nko"):
        geom = geometry(inputs.shape[2:4], (window, window))
        rows = windows.patches(inputs, geom)
        flat = error.reshape(*rows.shape[:3], error.shape[-1])
        kernels = jnp.einsum(product, rows, flat, preferred_element_type=jnp.float32)
        kernels = (kernels if kernels.ndim == 3 else kernels.sum(axis=1)).astype(inputs.dtype)
        return kernels.reshape(len(inputs), window, window, inputs.shape[-1], error.shape[-1])

    def filled(inputs, error):
        added = 16 // inputs.dtype.itemsize - 3
        return grouped(jnp.pad(inputs, [(0, 0)] * 4 + [(0, added)]), error)[..., :3, :]

    of_images = partial(patches, product="nbpk,nbpo->nbko")
    return {"grouped": grouped, "patches": patches, "patches_of_images": of_images, "filled": filled}


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, check=False)


def sweeps(small: bool) -> Iterator[Number]:
    """Whole commands: grids of digits as one program."""
    iterations = "20" if small else "500"
    for num_steps, num_seeds in ((2, 2),) if small else ((6, 8), (6, 80), (60, 80)):
        steps, seeds = np.linspace(0.05, 0.5, num_steps), map(str, range(num_seeds))
        with tempfile.TemporaryDirectory() as folder:
            options = ["--grid", f"step_size={','.join(f'{step:.4f}' for step in steps)}", "--seeds", *seeds]
            options += ["--iterations", iterations, "--evaluate-every", iterations, "--noise-std", "0.2", "--quiet"]
            options += ["--method", "PrivSGP-VR", "--target-epsilon", "inf", "--compilation-cache", "off"]
            start = time.perf_counter()
            done = _run("experiments.privsgp_vr", *options, "--out", f"{folder}/run")
            seconds, more = [time.perf_counter() - start], {"error": done.stderr[-600:]}
            if not done.returncode:
                more = {"seconds": json.loads(Path(folder, "run/summary.json").read_text())["seconds"]}
            name = f"sweep/{num_steps * num_seeds}_lanes"
            yield number(name, "s, the whole command", lambda one=seconds, more=more: (one, more))


def tests(small: bool) -> Iterator[Number]:
    """The tests that failed on a card; products in TF32 differ by more than they allow."""
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    paths = ["tests/core/test_tree.py"] if small else ["tests/models/test_convolution.py", "tests/core/test_normals.py"]
    done = _run("pytest", "-q", "-p", "no:benchmark", "--maxfail=20", "-n", "1" if small else "8", *paths)
    more: Number = {"error": done.stdout[-1500:]} if done.returncode else {"tail": done.stdout[-100:]}
    yield {"name": "tests", "value": done.returncode, "unit": "exit code", **more}


def fails(small: bool) -> Iterator[Number]:
    """A benchmark that does so, for tests of the harness."""
    yield {"name": "fails", "value": 1, "unit": "before it fails"}
    raise RuntimeError("on purpose")


def hangs(small: bool) -> Iterator[Number]:
    """A benchmark that does so, for tests of the harness."""
    yield {"name": "hangs", "value": 1, "unit": "before it hangs"}
    time.sleep(1000)


BOXES: dict[str, Callable[[bool], Iterator[Number]]] = {
    "sweeps": sweeps,
    "rounds": rounds,
    "convolutions": convolutions,
    "tests": tests,
    "ceilings": ceilings,
    "fails": fails,
    "hangs": hangs,
}
