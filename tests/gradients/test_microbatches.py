"""Gradients without factors on accelerators: samples in groups by memory, with the numbers of one after the other."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from helpers import assert_close, flat
from problems import linear_task

from jaxfl.core import from_functions
from jaxfl.core.platform import tracing_for
from jaxfl.gradients import memory, microbatches, per_example
from jaxfl.models import classification, resnet18

BATCH = 9
SIZES = {2: 2, 4: 3, 7: 5, 100: 9}  # samples that fit -> samples at once: 5 groups, 3, 2 and 1, the last ones short
CLIP_NORM = 0.8


def linear():
    """Least squares without factors, and a batch."""
    rng = np.random.default_rng(2)
    inputs = jnp.asarray(3 * rng.normal(size=(BATCH, 6)), jnp.float32)
    return linear_task(), inputs, jnp.asarray(rng.integers(0, 3, BATCH), jnp.int32)


def residual_network():
    """A residual network with group normalization, and a batch."""
    images = jnp.asarray(np.random.default_rng(2).normal(size=(BATCH, 6, 6, 1)), jnp.float32)
    model = resnet18((6, 6, 1), 3, widths=(4,), blocks=(1,), groups=2)
    return classification(model, node_loop="vmap"), images, jnp.arange(BATCH, dtype=jnp.int32) % 3


@pytest.fixture
def fitting(monkeypatch):
    """(case, number) -> as much memory as holds this many samples of it."""

    def of(case, number):
        task, inputs, labels = case
        params = jax.eval_shape(task.init, jax.random.key(0))
        with tracing_for("gpu"):
            held = microbatches.sample_bytes(task, params, inputs, labels)
        monkeypatch.setattr(memory, "total_bytes", lambda: 64 * held * number)

    return of


def weighted(case, clip_order=2, weights=None):
    """The clipped sum."""
    task, inputs, labels = case
    params = jax.jit(task.init)(jax.random.key(1))
    weights = jnp.linspace(0.0, 1.0, BATCH) if weights is None else weights
    options = {"clip_norm": CLIP_NORM, "clip_order": clip_order}
    return jax.jit(lambda *arguments: per_example.weighted_sum(task, *arguments, **options))(
        params, inputs, labels, weights
    )


def of_samples(case, clip_order=2):
    """The clipped gradients."""
    task, inputs, labels = case
    params = jax.jit(task.init)(jax.random.key(1))
    options = {"clip_norm": CLIP_NORM, "clip_order": clip_order}
    return jax.jit(lambda *arguments: per_example.per_sample(task, *arguments, **options))(params, inputs, labels)


@pytest.mark.parametrize(
    ("make", "clip_order", "number"), [(linear, 1, 2), (linear, 2, 7), (linear, 2, 100), (residual_network, 2, 4)]
)
@pytest.mark.quick_cases(1)
def test_samples_that_go_through_at_once_give_what_they_give_one_after_the_other(make, clip_order, number, fitting):
    case = make()
    expected = weighted(case, clip_order), of_samples(case, clip_order)
    assert 0 < float(expected[0].clipped.sum())
    fitting(case, number)
    with tracing_for("gpu"):
        assert microbatches.size_of(case[0], case[0].init(jax.random.key(0)), *case[1:]) == SIZES[number]
        measured = weighted(case, clip_order), of_samples(case, clip_order)
    assert_close(measured, expected)


@pytest.mark.slow
def test_over_nodes_too(fitting):
    case = task, inputs, labels = residual_network()
    params = jax.jit(task.init)(jax.random.key(1))
    weights = jnp.stack([jnp.ones(BATCH), jnp.linspace(0.0, 1.0, BATCH)])

    def both(*arguments):
        def of_node(*own):
            return per_example.weighted_sum(task, *own, clip_norm=CLIP_NORM).gradient

        return jax.jit(jax.vmap(of_node, in_axes=(0, None, None, 0)))(*arguments)

    arguments = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params), inputs, labels, weights
    expected = both(*arguments)
    fitting(case, 2)
    with tracing_for("gpu"):
        assert_close(both(*arguments), expected)


@pytest.mark.parametrize(("number", "place", "value"), [(2, BATCH - 1, np.nan), (4, 0, np.inf), (100, 0, 1e30)])
@pytest.mark.quick_cases(1)
def test_a_broken_sample_counts_as_zero_and_is_counted_once(number, place, value, fitting):
    """Also the last one, which is repeated where the last group is short."""
    task, inputs, labels = linear()
    fitting((task, inputs, labels), number)
    with tracing_for("gpu"):
        measured = weighted((task, inputs.at[place, 2].set(value), labels))
        without = weighted((task, inputs, labels), weights=jnp.linspace(0.0, 1.0, BATCH).at[place].set(0.0))
    np.testing.assert_allclose(flat(measured.gradient), flat(without.gradient), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(measured.discarded, np.arange(BATCH) == place)


@pytest.mark.parametrize("number", [2, 100])
@pytest.mark.quick_cases(1)
def test_a_sample_of_weight_0_contributes_exactly_zero(number, fitting):
    task, inputs, labels = linear()
    fitting((task, inputs, labels), number)
    weights = jnp.ones(BATCH).at[4].set(0.0).at[BATCH - 1].set(0.0)
    with tracing_for("gpu"):
        gradients = [
            weighted((task, x, labels), weights=weights).gradient
            for x in (inputs, inputs.at[4].set(17.0).at[-1].set(9))
        ]
    np.testing.assert_array_equal(flat(gradients[0]), flat(gradients[1]))


def test_the_samples_of_a_group_take_at_most_a_64th_of_the_memory(monkeypatch):
    """A sample of a sum of squares of d numbers keeps about as many, and its gradient has d."""
    task = from_functions(lambda key: jnp.zeros(1000), lambda w, x, y: jnp.sum((w[None] - x) ** 2, axis=1) - y)
    arguments = jnp.zeros(1000), jnp.zeros((40, 1000)), jnp.zeros(40)
    with tracing_for("gpu"):
        for allowed, most in ((1, 1), (8000, 1), (80_000, 10), (10**9, 40)):
            monkeypatch.setattr(memory, "total_bytes", lambda allowed=allowed: 64 * allowed)
            size = microbatches.size_of(task, *arguments)
            assert most / 3 <= size <= most
            assert size == 1 or size * 4000 <= allowed
    assert microbatches.size_of(task, *arguments) == 1, "on a CPU"


def test_groups_are_as_even_as_their_number_allows(fitting):
    case = linear()
    for number in range(1, 12):
        fitting(case, number)
        with tracing_for("gpu"):
            size = microbatches.size_of(case[0], case[0].init(jax.random.key(0)), *case[1:])
        groups = -(-BATCH // min(number, BATCH))
        assert size == -(-BATCH // groups)


@pytest.mark.slow
def test_what_is_repeated_is_dropped():
    assert not doctest.testmod(microbatches).failed
    for count in range(1, 8):
        for size in range(1, 8):
            leaves = {"a": jnp.arange(count), "b": jnp.arange(2.0 * count).reshape(count, 2)}
            groups = microbatches.grouped(leaves, size)
            assert {leaf.shape[:2] for leaf in groups.values()} == {(-(-count // size), size)}
            np.testing.assert_array_equal(groups["a"].reshape(-1)[count:], count - 1)
            jax.tree.map(np.testing.assert_array_equal, microbatches.joined(groups, count), leaves)


def test_on_a_cpu_the_memory_is_the_machines():
    assert memory.available_bytes() <= memory.total_bytes() == psutil.virtual_memory().total


CONTROL_GROUPS = {  # the lines of /proc/self/cgroup, files below /sys/fs/cgroup, what is left of the limits
    "version 2": (
        "0::/job/step",
        {
            "job/step": {"memory.max": "max", "memory.current": "1", "memory.stat": "anon 1"},
            "job": {"memory.max": "5000", "memory.current": "3000", "memory.stat": "anon 9\ninactive_file 700"},
        },
        [2700],
    ),
    "version 1": (
        "11:cpu:/\n4:memory:/job\n0::/",
        {
            "memory/job": {
                "memory.limit_in_bytes": "4000",
                "memory.usage_in_bytes": "1500",
                "memory.stat": "total_inactive_file 100",
            },
            "memory": {
                "memory.limit_in_bytes": str(2**63 - 4096),
                "memory.usage_in_bytes": "9",
                "memory.stat": "total_inactive_file 0",
            },
        },
        [2600],
    ),
    "of another name space": ("0::/elsewhere", {}, []),
}


@pytest.mark.parametrize(("lines", "files", "left"), CONTROL_GROUPS.values(), ids=CONTROL_GROUPS)
def test_limits_of_control_groups_count(lines, files, left, tmp_path, monkeypatch):
    """Containers and batch systems set such limits: a process beyond them is killed."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines + "\n")
    for folder, contents in files.items():
        (tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (tmp_path / "sys/fs/cgroup" / folder / name).write_text(text + "\n")
    assert memory.left_by_control_groups(tmp_path) == left
    monkeypatch.setattr(memory, "left_by_control_groups", lambda: left)
    assert memory.available_bytes() <= min(left, default=memory.total_bytes())
    assert memory.left_by_control_groups() == left


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_limits_of_the_process_count(kind):
    """As `ulimit -v` and `ulimit -d` set them."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(getattr(resource, kind))
    held = psutil.Process().memory_info()
    used = held.vms if kind == "RLIMIT_AS" else held.data
    try:
        resource.setrlimit(getattr(resource, kind), (used + 10**8, before[1]))
        assert memory.available_bytes() <= 1.1e8
    finally:
        resource.setrlimit(getattr(resource, kind), before)
