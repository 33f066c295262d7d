"""The boxes of `bench card`: each yields its numbers, as large as a card takes them or small enough for a CPU."""

import functools
import importlib
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

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import dp_clients, embracing, tracking, zero_order
from experiments.bench.setting import KEY, Network, Setting, clients, learner, perceptron, random_data
from experiments.bench.timing import BUFFERS, Number
from jaxfl import gradients, graphs, privacy
from jaxfl.algorithms import fed_avg, push_sum
from jaxfl.core import Algorithm
from jaxfl.models import classification, cnn, resnet18, resnet20
from jaxfl.models.kernels import forms as gpu_forms
from jaxfl.models.kernels import geometry
from jaxfl.training.chunks import rounds_fn
from jaxfl.training.environment import describe_environment

RESNET = Network(resnet20(), "ResNet-20", (32, 32, 3))
TINY = {"batch_size": 2, "samples": 6, "rounds": 2}


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


def timed(name: str, unit: str, of_seconds: Callable[[float], float], fn: Callable[..., object], *args) -> Number:
    """Time a compiled function: 20 calls between two waits of the host, which would count."""

    def measure():
        compiled, calls = jax.jit(fn), 20

        def several():
            result = compiled(*args)
            for _ in range(calls - 1):
                result = compiled(*args)  # one result is held at a time
            return result

        jax.block_until_ready(several())
        return [of_seconds(one / calls) for one in repeated(several, 7)], {}

    return number(name, unit, measure)


def chunk(name: str, algorithm: Algorithm, setting: Setting, **more: object) -> Number:
    """Microseconds of a round in training's own chunk."""

    def measure():
        data, rounds = random_data(setting), np.int32(setting.rounds)
        state = jax.jit(algorithm.init)(KEY, data)
        start = time.perf_counter()
        run = jax.jit(rounds_fn(algorithm, setting.rounds), donate_argnums=1)
        compiled = run.lower(KEY, state, data, rounds).compile()
        facts = {"compile_s": time.perf_counter() - start} | more
        memory = compiled.memory_analysis()
        if memory is not None:
            facts |= {"temp_GB": memory.temp_size_in_bytes / 1e9, "args_GB": memory.argument_size_in_bytes / 1e9}

        def call():
            nonlocal state
            state, infos = compiled(KEY, state, data, rounds)
            return state, infos

        seconds = repeated(call, 6)
        return [1e6 * one / setting.rounds for one in seconds[1:] or seconds], facts

    return number(name, "us/round", measure)


def ceilings(small: bool) -> Iterator[Number]:
    """Measure the card's ceilings: copies, products, launches."""
    yield {"name": "environment", "value": describe_environment(), "unit": ""}
    count, size, launches = (2**20, 512, 8) if small else (2**30, 8192, 1000)
    copied = jnp.ones(count, jnp.float32)
    yield timed("ceiling/copy", "TB/s", lambda one: 8e-12 * count / one, lambda x: x + 1, copied)
    products = {"bf16": (jnp.bfloat16, None), "tf32": (jnp.float32, None), "f32": (jnp.float32, "highest")}
    for name, (dtype, precision) in products.items():
        factor, product = (
            jax.random.normal(KEY, (size, size), dtype),
            functools.partial(jnp.matmul, precision=precision),
        )
        yield timed(f"ceiling/{name}", "TFLOP/s", lambda one: 2e-12 * size**3 / one, product, factor, factor)

    def launch(x):
        return jax.lax.fori_loop(0, launches, lambda i, x: x.at[i % 128].add(1.0), x)

    unit = "us a kernel in a loop of known length"
    yield timed("ceiling/launch", unit, lambda one: 1e6 * one / launches, launch, jnp.ones(128, jnp.float32))


def private_push_sum(setting: Setting, *, table: bool) -> Algorithm:
    """PrivSGP, with a factored table PrivSGP-VR."""
    options = {"sampler": gradients.fixed(setting.batch_size), "clip_norm": setting.clip_norm}
    return learner(setting, gradients.saga(**options, table="factored") if table else gradients.mini_batch(**options))


def push_sums(small: bool) -> Iterator[Number]:
    """PrivSGP-VR and PrivSGP; the first number of nodes is that of the runs with other flags."""
    sizes = (8, 16) if small else (64, 16, 1024)
    rows = [(n, 32, table) for n in sizes for table in (True, False)]
    if BUFFERS in os.environ.get("XLA_FLAGS", ""):
        rows = rows[:2]
    for num_nodes, batch_size, table in [*rows, (sizes[0], 1, True)]:
        setting = Setting(perceptron(784, 32, 10), num_nodes, batch_size, samples=200, rounds=4 if small else 50)
        name = f"push_sum/{'privsgp_vr' if table else 'privsgp'}_b{batch_size}_n{num_nodes}"
        yield chunk(name, private_push_sum(setting, table=table), setting)


def convolutions(small: bool) -> Iterator[Number]:
    """Each product of one layer by itself: patches, grouped, and a loop over the nodes."""
    large, batch = (
        [(32, 16, 32), (16, 32, 32), (8, 128, 32), (8, 256, 32), (4, 512, 32), (32, 16, 100)],
        4 if small else 32,
    )
    for size, channels, num_nodes in [(8, 4, 4)] if small else large:
        geom = geometry((size, size), (3, 3))
        forms = {
            "patches": lambda x, k, geom=geom: jnp.matmul(
                gpu_forms._rows(x, geom), k.reshape(len(k), -1, k.shape[-1])
            ).reshape(x.shape),
            "grouped": lambda x, k, geom=geom: gpu_forms._group_convolution(x, k, geom),
            "each": lambda x, k: jax.lax.map(lambda both: _convolution(*both), (x, k)),
        }
        for dtype, (form, fn) in ((dtype, one) for dtype in (jnp.float32, jnp.bfloat16) for one in forms.items()):
            inputs = jax.random.normal(KEY, (num_nodes, batch, size, size, channels), dtype)
            kernel = jax.random.normal(KEY, (num_nodes, 3, 3, channels, channels), dtype)
            products = {
                "forward": fn,
                "kernel": lambda x, k, fn=fn: jax.vjp(lambda k: fn(x, k), k)[1](x)[0],
                "input": lambda x, k, fn=fn: jax.vjp(lambda x: fn(x, k), x)[1](x)[0],
            }
            for product, run in products.items():
                name = f"conv/{product}_{form}_{size}x{size}x{channels}_n{num_nodes}_{jnp.dtype(dtype).name}"
                one = timed(name, "ms", lambda one: 1e3 * one, run, inputs, kernel)
                yield one if "error" in one else one | {"TFLOPs": 18e-9 * inputs.size * channels / one["low"]}


def _convolution(inputs, kernel):
    return jax.lax.conv_general_dilated(inputs, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def averaging(setting: Setting, compute_dtype: str) -> Algorithm:
    """Federated averaging of all clients."""
    task = classification(setting.network.model, compute_dtype=compute_dtype)
    return fed_avg(task, clients=clients(setting), num_active=setting.active())


def resnets(small: bool) -> Iterator[Number]:
    """Federated averaging of ResNet-20 by the forms that are shipped, by patches only, and grouped only."""
    setting = Setting(RESNET, 32, samples=390, rounds=10)
    if small:
        setting = setting._replace(num_nodes=2, batch_size=4, samples=8, rounds=2)
    shipped = dict(gpu_forms._GPU_THRESHOLDS)
    forms = {"shipped": shipped, "patches": dict.fromkeys(shipped, math.inf), "grouped": dict.fromkeys(shipped, 0.0)}
    for form, limits in forms.items():
        gpu_forms._GPU_THRESHOLDS.update(limits)
        for dtype in ("float32", "bfloat16"):
            yield chunk(f"resnet20/{form}_{dtype}_n{setting.num_nodes}", averaging(setting, dtype), setting)
    gpu_forms._GPU_THRESHOLDS.update(shipped)


def blazefl(small: bool, *, resnet: bool) -> Iterator[Number]:
    """A round of BlazeFL's cases (arXiv:2604.03606): 100 clients, CIFAR-10's shapes, five epochs of 500 samples."""
    model = resnet18() if resnet else cnn((32, 32, 3), channels=(6, 16), window=5, hidden=120)
    note = "ten of the 50 steps of a round; the stem is not torchvision's" if resnet else "the case has five rounds"
    setting = Setting(Network(model, "", (32, 32, 3)), 100, batch_size=50, samples=500, rounds=1, step_size=0.1)
    setting = setting._replace(num_local_steps=10 if resnet else 50)
    if small:
        setting = setting._replace(num_nodes=2, batch_size=4, samples=8, num_local_steps=2)
    for dtype in ("float32", "bfloat16"):
        name = f"blazefl/{'resnet18_10_steps' if resnet else 'cnn'}_{dtype}"
        yield chunk(name, averaging(setting, dtype), setting, note=note)


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

    def train(num_clients):
        for step in range(num_clients * steps):
            at = step % 10 * 50
            optimizer.zero_grad()
            loss(model(inputs[at : at + 50]), labels[at : at + 50]).backward()
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    train(1)
    yield number(name, unit, lambda: (repeated(lambda: train(num_clients), 3), {"device": device}))


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, check=False)


VR = ("experiments.privsgp_vr", "--method", "PrivSGP-VR", "--quiet")


def sweeps(small: bool) -> Iterator[Number]:
    """Whole commands: grids of digits as one program."""
    iterations = "20" if small else "500"
    for lanes, seeds in ((4, 2),) if small else ((48, 8), (480, 80)):
        steps = ",".join(f"{0.05 + 0.07 * point:.3f}" for point in range(lanes // seeds))
        with tempfile.TemporaryDirectory() as folder:
            options = ["--grid", f"step_size={steps}", "--seeds", *map(str, range(seeds)), "--iterations", iterations]
            options += ["--evaluate-every", iterations, "--noise-std", "0.2", "--target-epsilon", "inf"]
            start = time.perf_counter()
            done = _run(*VR, *options, "--compilation-cache", "off", "--out", f"{folder}/run")
            more: Number = {"error": done.stderr[-600:]} if done.returncode else {}
            if not done.returncode:
                more["seconds"] = json.loads(Path(folder, "run/summary.json").read_text())["seconds"]
            seconds = [time.perf_counter() - start]
            yield number(f"sweep/{lanes}_lanes", "s, the whole command", lambda one=seconds, more=more: (one, more))


def tests(small: bool) -> Iterator[Number]:
    """The quick tests of what depends on the device most; products in TF32 differ by more than they allow."""
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    paths = ["tests/core/test_tree.py"] if small else ["tests/core", "tests/graphs", "tests/models", "tests/gradients"]
    done = _run("pytest", "-q", "-p", "no:benchmark", "--maxfail=20", "-n", "1" if small else "4", *paths)
    more: Number = {"error": done.stdout[-1500:]} if done.returncode else {"tail": done.stdout[-100:]}
    yield {"name": "tests", "value": done.returncode, "unit": "exit code", **more}


def other_rounds(small: bool) -> Iterator[Number]:
    """A chunk of each other system, as in the suites, and gradient tracking of ResNet-20."""
    tiny = TINY if small else {}
    few = {**TINY, "num_nodes": 6, "num_active": 3, "num_local_steps": 2} if small else {}
    agents = tracking.SETTING._replace(**tiny)
    yield chunk("rounds/tracking", tracking.tracking(agents, agents.task(), clip_norm=agents.clip_norm), agents)
    devices = zero_order.SETTINGS["rows"]._replace(rounds=10)._replace(**tiny)
    yield chunk("rounds/dzofl", zero_order.learner(devices), devices)
    adaptive = dp_clients.SETTINGS["small_cnn"]._replace(rounds=10)._replace(**tiny)
    yield chunk("rounds/ali_dpfl", dp_clients.adaptive(adaptive, True), adaptive)
    classes = Setting(RESNET, 128, samples=390, num_active=32, num_local_steps=10, rounds=10)._replace(**few)
    shares, counts = (
        [len(part) for part in np.array_split(np.arange(count), len(embracing.FIRST_BLOCKS))]
        for count in (classes.active(), classes.num_nodes)
    )
    third = dict(zip(embracing.FIRST_BLOCKS, counts, strict=True))
    for sampling, num_active in {"stratified": shares, "uniform": classes.active()}.items():
        layerwise = embracing.learner(classes, classes.task(), third, num_active)
        yield chunk(f"rounds/embracing_{sampling}", layerwise, classes)
    setting = Setting(Network(resnet20(norm="group"), "", (32, 32, 3)), 5, batch_size=53, samples=2000, rounds=10)
    setting = setting._replace(**tiny)
    yield chunk("rounds/tracking_resnet20", tracking.tracking(setting, setting.task(), clip_norm=1.0), setting)


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
        yield timed(f"noise/{name}", "ns a number", lambda one: 1e9 * one / tree.size, fn, KEY, tree)


def nodes(small: bool) -> Iterator[Number]:
    """PrivSGP on many nodes, and on a random digraph."""
    rounds = 2 if small else 20
    large = (1024, (784, 32, 10)), (10_000, (64, 32, 10)), (10_000, (784, 32, 10))
    for num_nodes, widths in ((16, (64, 32, 10)),) if small else large:
        setting = Setting(perceptron(*widths), num_nodes, 8, samples=16, rounds=rounds)
        name = f"nodes/exponential_{widths[0]}_n{num_nodes}"
        yield chunk(name, private_push_sum(setting, table=False), setting)
    n = 16 if small else 1024
    setting = Setting(perceptron(784, 32, 10), n, 32, samples=100, rounds=rounds)
    graph = graphs.random_digraph(n, min(1.0, 2 * math.log(n) / n), key=0)
    batches = gradients.mini_batch(sampler=gradients.fixed(32), clip_norm=1.0)
    algorithm = push_sum(setting.task(), graph=graph, gradient=batches, noise=privacy.gaussian(0.1), step_size=0.1)
    yield chunk(f"nodes/random_n{n}", algorithm, setting)


def resume(small: bool) -> Iterator[Number]:
    """Killed and resumed, the cache of programs off and on: are the lines the same?"""
    options = f"--iterations {100 if small else 400} --evaluate-every 20 --checkpoint-every 1 --seeds 0".split()
    with tempfile.TemporaryDirectory() as folder:
        for name, cache in (("cache_off", "off"), ("cache_on", f"{folder}/cache")):
            one, other = (f"{folder}/{name}_{which}" for which in "ab")
            command = (*VR, *options, "--compilation-cache", cache, "--out")
            whole, lines = _run(*command, one), Path(other, "passes/0/metrics.jsonl")
            silent, words = subprocess.DEVNULL, [sys.executable, "-m", *command, other]
            process = subprocess.Popen(words, stdout=silent, stderr=silent)
            while process.poll() is None and not (lines.exists() and lines.read_text().count("\n") >= 3):
                time.sleep(0.05)
            process.kill()
            more: Number = {"was_killed": process.wait() == -signal.SIGKILL}
            again = _run(*command, other, "--resume")
            if whole.returncode or again.returncode:
                more["error"] = (whole.stderr + again.stderr)[-600:]
            same = None if "error" in more else lines.read_bytes() == Path(one, "passes/0/metrics.jsonl").read_bytes()
            yield {"name": f"resume/{name}", "value": same, "unit": "metrics.jsonl has the same bytes", **more}


def fails(small: bool) -> Iterator[Number]:
    """A benchmark that does so, for tests of the harness."""
    yield {"name": "fails", "value": 1, "unit": "before it fails"}
    raise RuntimeError("on purpose")


def hangs(small: bool) -> Iterator[Number]:
    """A benchmark that does so, for tests of the harness."""
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
