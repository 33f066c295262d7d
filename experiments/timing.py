"""Timing: compile apart from the steady state, warm up, wait for results, repeat rivals in turns."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core import PyTree
from jaxfl.training.environment import git_revision


class Measurement(NamedTuple):
    """One line of a benchmark's report, under a name in the JSON file."""

    value: float  # in `unit`
    unit: str
    spread: tuple[float, float]  # lowest and highest over the repeats, in `unit`
    against: str  # what the value is relative to, with the shapes


class Runner(NamedTuple):
    """A compiled function that is ready to be called again and again."""

    call: Callable[[], float]  # runs once to the end; returns its wall-clock seconds
    compile_seconds: float  # tracing and compiling, apart from the first run
    temp_bytes: int  # temporary memory of the compiled program


def runner(fn: Callable[..., PyTree], state: PyTree, *args: PyTree) -> Runner:
    """Compile `fn(state, *args) -> state`, with `state` donated, and run it once to warm up.

    Args:
        fn: a traceable function whose result has the structure of `state`.
        state: arrays that change from call to call; copied first, since a donated array cannot be used again.
        args: arrays that stay.

    Example:
        >>> one = runner(lambda state: state + 1.0, jnp.zeros(3))
        >>> one.compile_seconds > 0, one.call() > 0
        (True, True)
    """
    held = jax.tree.map(jnp.copy, state)
    start = time.perf_counter()
    compiled = jax.jit(fn, donate_argnums=0).lower(held, *args).compile()
    compile_seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()  # of one device, and a CPU's devices share one memory
    devices = max((len(held.device_set) for held in jax.tree.leaves(compiled.input_shardings)), default=1)
    copies = devices if jax.default_backend() == "cpu" else 1

    def call():
        nonlocal held
        start = time.perf_counter()
        held = jax.block_until_ready(compiled(held, *args))
        return time.perf_counter() - start

    call()
    return Runner(call, compile_seconds, 0 if memory is None else copies * memory.temp_size_in_bytes)


def compile_times(suite: str, runners: dict[str, Runner], against: str) -> dict[str, Measurement]:
    """SUITE/compile_NAME of each runner, in seconds; compiled once, so without spread."""
    return {
        f"{suite}/compile_{name}": Measurement(
            one.compile_seconds, "s", (one.compile_seconds, one.compile_seconds), f"tracing and compiling; {against}"
        )
        for name, one in runners.items()
    }


def in_turns(calls: dict[str, Callable[[], float]], repeats: dict[str, int]) -> dict[str, list[float]]:
    """Seconds of each call, the rivals taking turns so that a drift of the machine's speed meets all of them.

    Args:
        calls: name -> function that runs once and returns its seconds.
        repeats: name -> how often; those with fewer repeats are spread evenly over the turns.

    Example:
        >>> seconds = in_turns({"a": lambda: 1.0, "b": lambda: 2.0}, {"a": 4, "b": 2})
        >>> seconds["a"], seconds["b"]
        ([1.0, 1.0, 1.0, 1.0], [2.0, 2.0])
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    most = max(repeats.values())
    for turn in range(most):
        for name, call in calls.items():
            if (turn + 1) * repeats[name] // most > turn * repeats[name] // most:
                seconds[name].append(call())
    return seconds


def ratio(top: list[float], bottom: list[float]) -> tuple[float, tuple[float, float]]:
    """Ratio of the medians of `top` and `bottom`, and the range of ratios when either is replaced by its extremes.

    Example:
        >>> ratio([2.0, 4.0, 6.0], [2.0])
        (2.0, (1.0, 3.0))
    """
    value = statistics.median(top) / statistics.median(bottom)
    return value, (min(top) / max(bottom), max(top) / min(bottom))


def gemm_call(size: int = 2048) -> Callable[[], float]:
    """A square float32 matrix product, the machine's yardstick: a function that runs it once; see `gemm_flops`."""
    factor = jax.random.normal(jax.random.key(0), (size, size), jnp.float32) / size
    return runner(lambda state, other: state @ other, factor, factor).call


def gemm_flops(size: int = 2048) -> int:
    """Floating-point operations of `gemm_call`."""
    return 2 * size**3


def environment() -> dict[str, Any]:
    """Where the numbers were taken."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "num_devices": jax.device_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "git_revision": git_revision(Path(__file__).parent),
    }
