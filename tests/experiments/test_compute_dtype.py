"""--compute-dtype: it reaches the program of every experiment that has a model, and float32 changes nothing."""

import re

import jax
import jax.numpy as jnp
import pytest
from test_every_experiment import small

from experiments import EXPERIMENTS
from experiments.audit.methods import METHODS
from jaxfl.frame.experiment import identity, request
from jaxfl.frame.options import options

WITH_MODEL = [name for name in EXPERIMENTS if "hidden" in options(type(EXPERIMENTS[name].base))]
KEY = jax.random.key(0)


def query(name, **changes):
    """The first row's configuration of a small run."""
    return request(EXPERIMENTS[name], {**small(EXPERIMENTS[name]), **changes})


def round_of(name, dtype):
    """The lowered program of a round of the first line."""
    lines = query(name, compute_dtype=dtype).rows
    prepare = EXPERIMENTS[name].prepare
    if prepare is None:
        config = next(iter(lines.values())).config
        method = METHODS[config.learning.method]
        task, data, _ = method.add_canaries(config, *config.problem())
        algorithm = method.learner(config, task, config.used, 1.0).algorithm
    else:
        case = next(iter(prepare(lines).cases.values()))
        algorithm = case.algorithm({number: jnp.float32(value) for number, value in case.numbers.items()})
        data = case.data(case.seeds[0])
    state = jax.eval_shape(algorithm.init, KEY, data)
    return jax.jit(algorithm.round).lower(KEY, state, data).as_text()


def test_every_experiment_with_a_model_has_it():
    with_option = [name for name in EXPERIMENTS if "compute_dtype" in options(type(EXPERIMENTS[name].base))]
    assert with_option == WITH_MODEL
    assert set(EXPERIMENTS) - set(WITH_MODEL) == {"spanning_tree"}  # whose agents have quadratics


@pytest.mark.parametrize("name", WITH_MODEL)
@pytest.mark.quick_cases(1)
def test_it_reaches_the_program(name):
    of_bfloat16 = re.compile(r"stablehlo\.(dot_general|convolution).*: \(tensor<\S*bf16>, tensor<\S*bf16>\)")
    assert of_bfloat16.search(round_of(name, "bfloat16"))
    assert "bf16" not in round_of(name, "float32")


@pytest.mark.parametrize("name", [name for name in WITH_MODEL if EXPERIMENTS[name].prepare is not None])
def test_random_numbers_are_those_of_before_in_float32_and_others_in_bfloat16(name):
    """A difference of two published runs with the same noise would tell gradients without noise."""
    before, after = (identity(query(name, compute_dtype=dtype).config) for dtype in ("float32", "bfloat16"))
    assert "compute_dtype" not in before
    assert after == {**before, "compute_dtype": "bfloat16"}


@pytest.mark.parametrize("name", WITH_MODEL)
def test_both_types_make_two_lines_of_a_grid(name):
    kept = small(EXPERIMENTS[name])
    lines = request(EXPERIMENTS[name], kept, ({"compute_dtype": ("float32", "bfloat16")},)).rows
    assert {line.settings["compute_dtype"] for line in lines.values()} == {"float32", "bfloat16"}
