"""The platform that programs are traced for: JAX's own, or as told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl.core import ArgumentError
from jaxfl.core.platform import is_cpu, platform, tracing_for


def test_a_function_that_was_traced_for_another_platform_is_traced_anew():
    answers = jax.jit(lambda x: x + jnp.float32(is_cpu()))
    for _ in range(2):
        with tracing_for("cpu"):
            assert answers(jnp.float32(0)) == 1
        with tracing_for("gpu"):
            assert answers(jnp.float32(0)) == 0


def test_the_platform_is_that_of_the_default_device_unless_told():
    assert platform() == jax.default_backend()
    with jax.default_device(jax.devices("cpu")[0]):
        assert platform() == "cpu"
        with tracing_for("tpu"):
            assert platform() == "tpu"
        assert platform() == "cpu"


def test_an_exported_round_has_the_form_of_its_platform():
    def program(x):
        return x * 2 if is_cpu() else jnp.sin(x)

    shape = jax.ShapeDtypeStruct((), np.float32)
    with tracing_for("gpu"):
        exported = jax.export.export(jax.jit(program), platforms=["cuda"])(shape)
    assert "sine" in exported.mlir_module()
    assert "sine" not in jax.export.export(jax.jit(program), platforms=["cpu"])(shape).mlir_module()


def test_other_names_are_refused():
    with pytest.raises(ArgumentError, match="must be one of"):
        tracing_for("cuda")
