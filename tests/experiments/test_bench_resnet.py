"""The suite on ResNet-20: both rows train the same network, stages are the whole and are counted right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import bench_resnet
from jaxfl.core import node_keys

TINY = bench_resnet.Setting(
    num_nodes=2,
    batch_size=3,
    sample_shape=(6, 8, 3),
    widths=(4, 6),
    blocks=(1, 2),
    num_classes=3,
    rounds=2,
    repeats=2,
    flax_repeats=1,
    stage_nodes=1,
    stage_rounds=2,
    gemm_size=8,
)


def as_flax(params):
    """One node's or all nodes' parameters of jaxfl under flax's names."""
    blocks = [params[name] for name in sorted(params) if name.startswith("block_")]
    return {
        "stem": params["stem"]["conv"],
        "norm": params["stem"]["norm"],
        "blocks": dict(enumerate(blocks)),
        "dense": params["dense"],
    }


@pytest.mark.slow
def test_both_rows_train_the_same_network():
    rows, batches = bench_resnet.rows(TINY), bench_resnet.node_batches(TINY, 2)
    start = {name: jax.jit(jax.vmap(row.init))(node_keys(jax.random.key(0), 2)) for name, row in rows.items()}
    params, statistics = start["jaxfl"]
    start["flax"] = (as_flax(params), start["flax"][1])
    after = {
        name: jax.jit(bench_resnet.sgd_rounds(row, 2, step_size=0.1))(start[name], *batches)
        for name, row in rows.items()
    }
    ours, theirs = as_flax(after["jaxfl"][0]), after["flax"][0]
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for mine, other, first in zip(*map(jax.tree.leaves, (ours, theirs, as_flax(params))), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
        assert np.abs(mine - first).max() > 1e-4
    moved = zip(*map(jax.tree.leaves, (after["jaxfl"][1], statistics)), strict=True)
    assert all(np.abs(new - old).max() > 0 for new, old in moved)


def test_stages_are_the_network_and_their_products_are_counted():
    """Forward, and back to kernels and inputs; the images have no gradient."""
    found = bench_resnet.stages(TINY)
    assert [(part.name, part.input_shape) for part in found] == [
        ("stem", (6, 8, 3)),
        ("stage_1", (6, 8, 4)),
        ("stage_2", (6, 8, 4)),
    ]
    first, large, small = 6 * 8 * 9 * 3 * 4, 6 * 8 * 9 * 4 * 4, 3 * 4 * 9 * 6 * 6
    assert [part.flops for part in found] == [
        2 * 2 * first,
        2 * 3 * 2 * large,
        2 * 3 * (3 * 4 * 9 * 4 * 6 + 3 * small),
    ]


@pytest.mark.parametrize("number", [0, 1])
def test_a_stage_is_trained_and_its_inputs_get_a_gradient_but_for_the_images(number):
    part = bench_resnet.stages(TINY)[number]
    train, state, inputs = bench_resnet.stage_rounds(TINY, part, 1)
    (params, statistics), pulled = jax.jit(train)(state, inputs)
    assert any(jnp.any(new != old) for new, old in zip(*map(jax.tree.leaves, (params, state[0][0])), strict=True))
    assert any(jnp.any(new != old) for new, old in zip(*map(jax.tree.leaves, (statistics, state[0][1])), strict=True))
    assert bool(jnp.any(pulled != 0)) == (part.name != "stem")


@pytest.mark.slow
@pytest.mark.bench
def test_suite_names_its_numbers():
    report = bench_resnet.suite(TINY)
    shares = {f"resnet/{name}_share_of_gemm" for name in ("stem", "stage_1", "stage_2")}
    assert {"resnet/speedup_vs_flax_vmap_in_scan", "resnet/rounds_per_second", "resnet/temp_memory"} | shares <= set(
        report
    )
    for one in report.values():
        assert np.isfinite(one.value)
        assert one.spread[0] <= one.value <= one.spread[1]
