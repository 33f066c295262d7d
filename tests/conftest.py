"""The only place that configures JAX for the tests."""

import gc
import os
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes may share one GPU
# Of this process and of those that tests start: no test reads or fills the user's cache of compiled programs.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
if os.environ.get("JAXFL_TESTS_CACHE", "0") == "1":  # for who runs the tests again and again: a third of the time
    os.environ |= {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parents[1] / ".pytest_cache" / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
if os.environ.get("JAXFL_TESTS_OPTIMIZED", "0") != "1":
    # The tests spend their time compiling small programs once. Without LLVM's expensive passes that takes a third, and
    # with XLA's older way to write a loop 0.6 of that; what is in place and what is copied stays the same. A program
    # whose code one thread makes takes 7 % less. (XLA ends the process at an option that it does not know, so other
    # versions do without.)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    if version("jaxlib").startswith("0.10."):
        options = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {options}"

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Tracing makes many objects that live long: at Python's own thresholds, looking for cycles takes a tenth of the time.
gc.set_threshold(50_000, 10, 10)
