"""The only place that configures JAX for the tests."""

import collections
import contextlib
import ctypes
import gc
import os
import platform
import resource
import signal
import sys
import zlib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The files that take longest, started first: otherwise one process has nothing to do while the other ends the last one.
DEAREST = (
    "tests/test_contract.py",
    "tests/algorithms/test_over_links.py",
    "tests/algorithms/clients/test_local_steps.py",
    "tests/algorithms/test_embracing.py",
    "tests/gradients/test_saga.py",
    "tests/algorithms/test_dzofl.py",
    "tests/algorithms/test_ali_dpfl.py",
    "tests/experiments/test_ali_dpfl_command.py",
    "tests/experiments/test_every_experiment.py",
    "tests/training/test_sweep.py",
    "tests/training/test_train.py",
    "tests/algorithms/clients/test_private_updates.py",
    "tests/privacy/test_grid_noise.py",
    "tests/privacy/test_audit.py",
    "tests/experiments/test_audit_command.py",
    "tests/training/test_passes.py",
    "tests/training/test_released.py",
    "tests/gradients/test_zero_order_estimates.py",
    "tests/experiments/test_dp_gradient_tracking.py",
    "tests/experiments/test_dzofl_command.py",
    "tests/experiments/test_embracing_fl.py",
)


def _machine():
    """A name that machines share whose processors run each other's programs."""
    lines = [platform.machine()]
    with contextlib.suppress(OSError):
        message = Path("/proc/cpuinfo").read_text().splitlines()
        lines += sorted({line for line in message if line.startswith(("model name", "flags", "Features", "CPU "))})
    return f"{zlib.crc32(chr(10).join(lines).encode()):08x}"


def _version(name):
    return tuple(int(part) for part in version(name).split(".")[:3])


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # from a shell's "&"; commands that tests interrupt inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes may share one GPU
# Of this process and of those that tests start: no test reads or fills the user's cache of compiled programs. The tests
# keep their own in the checkout, with which a second run takes half of the processor time; JAXFL_TESTS_CACHE=0 turns
# it off, and a folder is taken in its place. (Before jaxlib 0.10.2, XLA logs an error for every program that it reads.)
_KEPT = os.environ.get("JAXFL_TESTS_CACHE", "1")
CACHE = (ROOT / ".pytest_cache" / "xla" if _KEPT in ("0", "1") else Path(_KEPT)) / _machine()
MAX_CACHE_BYTES = 10**9
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
if _KEPT != "0" and _version("jaxlib") >= (0, 10, 2):
    os.environ |= {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(CACHE),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
if os.environ.get("JAXFL_TESTS_OPTIMIZED", "0") != "1":
    # The tests spend their time compiling small programs once. Without LLVM's expensive passes that takes a third, and
    # with XLA's older way to write a loop 0.6 of that; what is in place and what is copied stays the same. A program
    # whose code one thread makes takes 7 % less. (XLA ends the process at an option that it does not know, so other
    # versions do without.)
    # They are for the time of tests, and they hide what only optimized code does: rounding of fused loops, copies that
    # LLVM takes away, and programs that crash or compute something else because XLA or LLVM compiled them wrongly
    # (docs/decisions/xla_gather.md). Users have none of these settings. A step of the gate (tests/optimized) runs every
    # algorithm, table of gradients and default command as users do, in processes whose death is a failure.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    if _version("jaxlib")[:2] == (0, 10):
        options = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {options}"

import jax  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Tracing makes many objects that live long: at Python's own thresholds, looking for cycles takes a tenth of the time.
gc.set_threshold(50_000, 10, 10)


def pytest_configure(config):
    """Forgets what was read longest ago of the kept programs."""
    if hasattr(config, "workerinput"):  # one process of those that share them
        return
    kept = sorted(((path.stat(), path) for path in CACHE.glob("*-cache")), key=lambda entry: -entry[0].st_atime)
    total = 0
    for status, path in kept:
        total += status.st_size
        if total > MAX_CACHE_BYTES:
            path.unlink(missing_ok=True)


@pytest.fixture(autouse=True, scope="module")
def _programs_of_this_file_alone():
    """Compiled programs are dropped behind every file: kept, those of all files take 7 GB a process."""
    yield
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux":  # glibc keeps what was freed
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)


_PEAKS = {}  # process -> the most memory that it held, bytes
# Reasons for which tests may be skipped: the gate's machine may lack these, and no package gives them. The gate sets
# JAXFL_TESTS_NO_SKIP to 1, or to one more reason. Without it, tests of extras that are not installed are skipped.
MAY_SKIP = (
    "no real files in",
    "mounting a small disk is not allowed here",
    "it compiled faster than that",
    "needs a browser that prints PDFs",
    "needs a machine without a GPU",
    "needs Linux",
    "needs the compilers of an H200 and a TPU v5e",
    "needs decent-bench, and so Python 3.13",
)
_NO_SKIP = os.environ.get("JAXFL_TESTS_NO_SKIP", "0")
if _NO_SKIP not in ("0", "1"):
    MAY_SKIP += (_NO_SKIP,)


def pytest_sessionfinish(session):
    """A process of several tells the one that prints what it held at most; that one looks at what was skipped."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak"] = peak
        return
    _PEAKS.setdefault("main", peak)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if _NO_SKIP != "0" and reporter is not None:  # of tests and of whole files
        reasons = {report.longrepr[2] for report in reporter.stats.get("skipped", [])}
        for reason in sorted(r for r in reasons if not any(word in r for word in MAY_SKIP)):
            reporter.write_line(f"\nskipped, and not for a reason of tests/conftest.py: {reason}", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    _PEAKS[node.gateway.id] = getattr(node, "workeroutput", {}).get("peak", 0)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line("peak memory: " + ", ".join(f"{k} {v / 1e9:.2f} GB" for k, v in sorted(_PEAKS.items())))


def pytest_collection_finish():
    """Exempt objects that live until the end from the search for cycles."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(items):
    """Marks cases behind the quick ones, and puts the dearest files first."""
    cases = collections.Counter()
    for item in items:
        if (mark := item.get_closest_marker("quick_cases")) is not None:
            name = item.nodeid.partition("[")[0]
            cases[name] += 1
            if cases[name] > mark.args[0]:
                item.add_marker("slow")
    if gone := [name for name in DEAREST if not (ROOT / name).exists()]:
        raise pytest.UsageError(f"tests/conftest.py names files that do not exist: {gone}")
    places = {name: place for place, name in enumerate(DEAREST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))
