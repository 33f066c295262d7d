"""The only place that configures JAX for the tests."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes may share one GPU
# Of this process and of those that tests start: no test reads or fills the user's cache of compiled programs.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# The tests spend their time compiling many small programs once. Without LLVM's expensive passes that takes a third;
# what XLA does to the program, and so what is in place and what is copied, stays the same.
jax.config.update("jax_disable_most_optimizations", os.environ.get("JAXFL_TESTS_OPTIMIZED", "0") != "1")
