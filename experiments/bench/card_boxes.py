"""The boxes of `bench card`: each yields its numbers, as large as a card takes them or small enough for a CPU."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import gpu_program
from experiments.bench.card import BUFFERS, Number
from experiments.bench.setting import KEY, Network, Setting, perceptron, random_data
from experiments.bench.tracking import tracking
from jaxfl import gradients, graphs, privacy
from jaxfl.algorithms import push_sum
from jaxfl.core import Algorithm
from jaxfl.models import cnn, convolution_forms, resnet18, resnet20
from jaxfl.models.windows import geometry
from jaxfl.training.chunks import rounds_fn
from jaxfl.training.environment import describe_environment


def timed(fn: Callable[..., Any], *args: Any, repeats: int = 7) -> list[float]:
    """Seconds of calls of a function that is compiled here."""
    compiled = jax.jit(fn)
    jax.block_until_ready(compiled(*args))
    seconds, began = [], time.perf_counter()
    while len(seconds) < repeats and time.perf_counter() - began < 20:
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        seconds.append(time.perf_counter() - start)
    return seconds


def number(name: str, values: list[float], unit: str, **more: Any) -> Number:
    """The median of repeats and their extremes."""
    return {
        "name": name,
        "value": float(np.median(values)),
        "unit": unit,
        "low": min(values),
        "high": max(values),
    } | more


def chunk(name: str, algorithm: Algorithm, setting: Setting, **more: Any) -> Number:
    """Microseconds of a round in training's own chunk; what cannot run says why, and the next one may."""
    try:
        data, rounds = random_data(setting), setting.rounds
        state = jax.jit(algorithm.init)(KEY, data)
        start = time.perf_counter()
        run = jax.jit(rounds_fn(algorithm, rounds), donate_argnums=1)
        compiled = run.lower(KEY, state, data, np.int32(rounds)).compile()
        more |= {"compile_s": time.perf_counter() - start}
        memory = compiled.memory_analysis()
        if memory is not None:
            more |= {"temp_GB": memory.temp_size_in_bytes / 1e9, "args_GB": memory.argument_size_in_bytes / 1e9}
        seconds: list[float] = []
        while len(seconds) < 6 and sum(seconds) < 25:
            start = time.perf_counter()
            state = jax.block_until_ready(compiled(KEY, state, data, np.int32(rounds)))[0]
            seconds.append(time.perf_counter() - start)
        return number(name, [1e6 * one / rounds for one in seconds[1:] or seconds], "us/round", **more)
    except Exception as error:
        return {"name": name, "value": None, "unit": "us/round", "error": f"{type(error).__name__}: {error}"[:400]}


def ceilings(small: bool) -> Iterator[Number]:
    """Measure the card's ceilings: copies, products, launches."""
    yield {"name": "environment", "value": describe_environment(), "unit": ""}
    count, size, launches = (2**20, 512, 8) if small else (2**30, 8192, 1000)
    copies = timed(lambda x: x + 1, jnp.ones(count, jnp.float32))
    yield number("ceiling/copy", [8e-12 * count / one for one in copies], "TB/s")
    for name, dtype, precision in (
        ("bf16", jnp.bfloat16, None),
        ("tf32", jnp.float32, None),
        ("f32", jnp.float32, "highest"),
    ):
        factor = jax.random.normal(KEY, (size, size), dtype)
        seconds = timed(lambda a, precision=precision: jnp.matmul(a, a, precision=precision), factor)
        yield number(f"ceiling/{name}", [2e-12 * size**3 / one for one in seconds], "TFLOP/s")
    seconds = timed(
        lambda x: jax.lax.fori_loop(0, launches, lambda i, x: x.at[i % 128].add(1.0), x), jnp.ones(128, jnp.float32)
    )
    yield number("ceiling/launch", [1e6 * one / launches for one in seconds], "us a kernel in a loop of known length")


def _push_sum(num_nodes: int, batch_size: int, *, small: bool, table: bool) -> Number:
    setting = Setting(perceptron(784, 32, 10), num_nodes, batch_size, samples=200, rounds=4 if small else 50)
    name = f"push_sum/{'privsgp_vr' if table else 'privsgp'}_b{batch_size}_n{num_nodes}"
    return chunk(name, gpu_program.push_sum(setting, table=table), setting)


def push_sums(small: bool) -> Iterator[Number]:
    """PrivSGP-VR and PrivSGP; the first number of nodes is that of the runs with other flags."""
    sizes = (8, 16) if small else (64, 16, 1024)
    for num_nodes in sizes[:1] if BUFFERS in os.environ.get("XLA_FLAGS", "") else sizes:
        yield from (_push_sum(num_nodes, 32, small=small, table=table) for table in (True, False))
    yield _push_sum(sizes[0], 1, small=small, table=True)


def convolutions(small: bool) -> Iterator[Number]:
    """Each product of one layer by itself: patches, grouped, and a loop over the nodes."""
    layers = (
        [(8, 4, 4)] if small else [(32, 16, 32), (16, 32, 32), (8, 64, 32), (4, 512, 32), (8, 64, 100), (32, 16, 100)]
    )
    for size, channels, num_nodes in layers:
        geom = geometry((size, size), (3, 3))
        forms = {
            "patches": lambda x, k, geom=geom: jnp.matmul(
                convolution_forms._rows(x, geom), k.reshape(len(k), -1, k.shape[-1])
            ).reshape(x.shape),
            "grouped": lambda x, k, geom=geom: convolution_forms._grouped(x, k, geom),
            "each": lambda x, k: jax.lax.map(lambda both: _convolution(*both), (x, k)),
        }
        for dtype in (jnp.float32, jnp.bfloat16):
            batch = 4 if small else 32
            inputs = jax.random.normal(KEY, (num_nodes, batch, size, size, channels), dtype)
            kernel = jax.random.normal(KEY, (num_nodes, 3, 3, channels, channels), dtype)
            for form, fn in forms.items():
                products = {
                    "forward": fn,
                    "kernel": lambda x, k, fn=fn: jax.vjp(lambda k: fn(x, k), k)[1](x)[0],
                    "input": lambda x, k, fn=fn: jax.vjp(lambda x: fn(x, k), x)[1](x)[0],
                }
                for product, of in products.items():
                    name = f"conv/{product}_{form}_{size}x{size}x{channels}_n{num_nodes}_{jnp.dtype(dtype).name}"
                    try:
                        seconds = timed(of, inputs, kernel, repeats=5)
                    except Exception as error:
                        yield {"name": name, "value": None, "unit": "ms", "error": str(error)[:200]}
                        continue
                    flops = 18 * inputs.size * channels
                    yield number(name, [1e3 * one for one in seconds], "ms", TFLOPs=1e-12 * flops / min(seconds))


def _convolution(inputs, kernel):
    return jax.lax.conv_general_dilated(inputs, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def resnets(small: bool) -> Iterator[Number]:
    """Federated averaging of ResNet-20 by the forms that are shipped, by patches alone, and grouped alone."""
    setting = gpu_program.CLIENTS._replace(
        **({"num_nodes": 2, "batch_size": 4, "samples": 8, "rounds": 2} if small else {})
    )
    shipped = dict(convolution_forms._GPU_THRESHOLDS)
    for form, limits in (
        ("shipped", shipped),
        ("patches", dict.fromkeys(shipped, math.inf)),
        ("grouped", dict.fromkeys(shipped, 0.0)),
    ):
        convolution_forms._GPU_THRESHOLDS.update(limits)
        for dtype in ("float32", "bfloat16"):
            name = f"resnet20/{form}_{dtype}_n{setting.num_nodes}"
            yield chunk(name, gpu_program.averaging(setting, dtype), setting)
    convolution_forms._GPU_THRESHOLDS.update(shipped)


def blazefl(small: bool, *, resnet: bool) -> Iterator[Number]:
    """A round of BlazeFL's cases (arXiv:2604.03606): 100 clients, CIFAR-10's shapes, five epochs of 500 samples."""
    model = resnet18() if resnet else cnn((32, 32, 3), channels=(6, 16), window=5, hidden=120)
    steps = 10 if resnet else 50
    note = "ten of the 50 steps of a round; the stem is not torchvision's" if resnet else "the case has five rounds"
    setting = Setting(
        Network(model, "", (32, 32, 3)), 100, batch_size=50, samples=500, num_local_steps=steps, rounds=1, step_size=0.1
    )
    if small:
        setting = setting._replace(num_nodes=2, batch_size=4, samples=8, num_local_steps=2)
    for dtype in ("float32", "bfloat16"):
        name = f"blazefl/{'resnet18_10_steps' if resnet else 'cnn'}_{dtype}"
        yield chunk(name, gpu_program.averaging(setting, dtype), setting, note=note)


def blazefl_torch(small: bool) -> Iterator[Number]:
    """The CNN's round by a plain loop in PyTorch, one client after the other."""
    name, unit = "blazefl/torch_round", "s, one client after the other"
    if importlib.util.find_spec("torch") is None:
        yield {"name": name, "value": None, "unit": unit, "missing": "PyTorch is not installed"}
        return
    torch = importlib.import_module("torch")
    nn, device = torch.nn, "cuda" if torch.cuda.is_available() else "cpu"
    num_clients, steps = (2, 5) if small else (100, 50)
    layers = [nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 10)).to(device)
    loss, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1)
    inputs = torch.randn(500, 3, 32, 32, device=device)
    labels = torch.randint(0, 10, (500,), device=device)

    def client():
        for step in range(steps):
            at = step % 10 * 50
            optimizer.zero_grad()
            loss(model(inputs[at : at + 50]), labels[at : at + 50]).backward()
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    client()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(num_clients):
            client()
        seconds.append(time.perf_counter() - start)
    yield number(name, seconds, unit, device=device)


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "experiments.privsgp_vr", "--method", "PrivSGP-VR", "--quiet", *arguments]


def sweeps(small: bool) -> Iterator[Number]:
    """Whole commands: grids of digits as one program."""
    iterations = "20" if small else "500"
    for lanes, seeds in ((4, 2),) if small else ((48, 8), (480, 80)):
        steps = ",".join(f"{0.05 + 0.07 * point:.3f}" for point in range(lanes // seeds))
        with tempfile.TemporaryDirectory() as folder:
            options = ["--grid", f"step_size={steps}", "--seeds", *map(str, range(seeds)), "--iterations", iterations]
            options += ["--evaluate-every", iterations, "--noise-std", "0.2", "--target-epsilon", "inf"]
            start = time.perf_counter()
            done = _run(_command(*options, "--compilation-cache", "off", "--out", f"{folder}/run"))
            more: Number = {"error": done.stderr[-600:]} if done.returncode else {}
            if not done.returncode:
                more["seconds"] = json.loads(Path(folder, "run/summary.json").read_text())["seconds"]
            yield number(f"sweep/{lanes}_lanes", [time.perf_counter() - start], "s, the whole command", **more)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def tests(small: bool) -> Iterator[Number]:
    """The quick tests of what depends on the device most."""
    paths = ["tests/core/test_tree.py"] if small else ["tests/core", "tests/graphs", "tests/models", "tests/gradients"]
    done = _run([sys.executable, "-m", "pytest", "-q", "--maxfail=20", "-n", "1" if small else "4", *paths])
    more: Number = {"error": done.stdout[-1500:]} if done.returncode else {"tail": done.stdout[-100:]}
    yield {"name": "tests", "value": done.returncode, "unit": "exit code", **more}


def other_rounds(small: bool) -> Iterator[Number]:
    """A chunk of each other system, as `gpu_program` counts them, and gradient tracking of ResNet-20."""
    tiny = {"batch_size": 2, "samples": 6, "rounds": 2} if small else {}
    few = {"num_nodes": 6, "num_active": 3, "num_local_steps": 2} if small else {}
    for row in ("tracking", "dzofl", "ali_dpfl", "embracing_stratified", "embracing_uniform"):
        setting = gpu_program.SETTINGS[row]._replace(**tiny, **(few if row.startswith("embracing") else {}))
        yield chunk(f"rounds/{row}", gpu_program.ROWS[row](setting), setting)
    network = Network(resnet20(norm="group"), "", (32, 32, 3))
    setting = Setting(network, 5, batch_size=53, samples=2000, rounds=10)._replace(**tiny)
    yield chunk("rounds/tracking_resnet20", tracking(setting, setting.task(), clip_norm=1.0), setting)


def noise(small: bool) -> Iterator[Number]:
    """Normal numbers: threefry as shipped, the hardware's generator, and the copy that is the least."""
    num_nodes, size = (8, 100) if small else (1024, 25_450)
    tree, drawn = jnp.zeros((num_nodes, size), jnp.float32), privacy.gaussian(1.0)
    ways = {
        "shipped": lambda key, tree: tree + drawn.draw(key, tree),
        "hardware": lambda key, tree: tree + jax.random.normal(jax.random.key(0, impl="unsafe_rbg"), tree.shape),
        "copy": lambda key, tree: tree + 1.0,
    }
    for name, fn in ways.items():
        seconds = timed(fn, KEY, tree)
        yield number(f"noise/{name}", [1e9 * one / tree.size for one in seconds], "ns a number")


def nodes(small: bool) -> Iterator[Number]:
    """PrivSGP on many nodes, and on a random digraph."""
    rounds = 2 if small else 20
    for num_nodes, widths in (
        ((16, (64, 32, 10)),) if small else ((1024, (784, 32, 10)), (10_000, (64, 32, 10)), (10_000, (784, 32, 10)))
    ):
        setting = Setting(perceptron(*widths), num_nodes, 8, samples=16, rounds=rounds)
        yield chunk(f"nodes/exponential_{widths[0]}_n{num_nodes}", gpu_program.push_sum(setting, table=False), setting)
    setting = Setting(perceptron(784, 32, 10), 16 if small else 1024, 32, samples=100, rounds=rounds)
    graph = graphs.random_digraph(
        setting.num_nodes, min(1.0, 2 * math.log(setting.num_nodes) / setting.num_nodes), key=0
    )
    batches = gradients.mini_batch(sampler=gradients.fixed(32), clip_norm=1.0)
    algorithm = push_sum(setting.task(), graph=graph, gradient=batches, noise=privacy.gaussian(0.1), step_size=0.1)
    yield chunk(f"nodes/random_n{setting.num_nodes}", algorithm, setting)


def resume(small: bool) -> Iterator[Number]:
    """Killed and resumed, the cache of programs off and on: are the lines the same?"""
    options = [
        "--iterations",
        "100" if small else "400",
        "--evaluate-every",
        "20",
        "--checkpoint-every",
        "1",
        "--seeds",
        "0",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name, cache in (("cache_off", "off"), ("cache_on", f"{folder}/cache")):
            one, other = (f"{folder}/{name}_{which}" for which in "ab")
            command = _command(*options, "--compilation-cache", cache, "--out")
            whole = _run([*command, one])
            process = subprocess.Popen([*command, other], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            lines = Path(other, "metrics.jsonl")
            while process.poll() is None and not (lines.exists() and lines.read_text().count("\n") >= 3):
                time.sleep(0.05)
            process.kill()
            killed = process.wait() == -signal.SIGKILL
            again = _run([*command, other, "--resume"])
            more: Number = {"was_killed": killed}
            if whole.returncode or again.returncode:
                more["error"] = (whole.stderr + again.stderr)[-600:]
                same = None
            else:
                sums = [hashlib.sha256(Path(out, "metrics.jsonl").read_bytes()).hexdigest() for out in (one, other)]
                same = sums[0] == sums[1]
            yield {"name": f"resume/{name}", "value": same, "unit": "metrics.jsonl has the same bytes", **more}


def fails(small: bool) -> Iterator[Number]:
    """For the harness."""
    yield {"name": "fails", "value": 1, "unit": "before it fails"}
    raise RuntimeError("on purpose")


def hangs(small: bool) -> Iterator[Number]:
    """For the harness."""
    yield {"name": "hangs", "value": 1, "unit": "before it hangs"}
    time.sleep(1000)


BOXES: dict[str, Callable[[bool], Iterator[Number]]] = {
    "ceilings": ceilings,
    "push_sum": push_sums,
    "convolutions": convolutions,
    "resnet20": resnets,
    "blazefl_cnn": functools.partial(blazefl, resnet=False),
    "blazefl_resnet18": functools.partial(blazefl, resnet=True),
    "blazefl_torch": blazefl_torch,
    "sweeps": sweeps,
    "tests": tests,
    "rounds": other_rounds,
    "noise": noise,
    "nodes": nodes,
    "resume": resume,
    "fails": fails,
    "hangs": hangs,
}
