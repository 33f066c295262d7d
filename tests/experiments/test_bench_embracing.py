"""The suite on EmbracingFL: rounds of the classes that it says, and its numbers. Nothing here looks at a time."""

import jax
import numpy as np
import pytest

from experiments import bench_embracing

TINY = bench_embracing.Setting(
    sample_shape=(8, 8, 3),
    num_classes=3,
    widths=(4, 6, 8),
    blocks=(1, 1, 1),
    samples=4,
    batch_size=2,
    num_local_steps=2,
)


@pytest.mark.slow
def test_clients_of_each_class_train_their_blocks(monkeypatch):
    """A weak client alone leaves the front as it was; a strong one moves all."""
    trained, seen = {}, []
    monkeypatch.setattr(
        bench_embracing, "runner", lambda fn, state, data: seen.append((state, jax.jit(fn)(state, data)))
    )
    for counts in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        bench_embracing.rounds(TINY, bench_embracing.network(TINY), counts)
        before, after = seen.pop()
        changed = jax.tree.map(lambda new, old: bool(np.any(new != old)), after.params, before.params)
        trained[counts.index(1)] = [name for name, layer in changed.items() if any(jax.tree.leaves(layer))]
        assert int(after.round_index) == TINY.rounds
    blocks = ["block_1_1", "block_2_1", "block_3_1", "dense", "stem"]
    assert [sorted(trained[number]) for number in range(3)] == [blocks, blocks[1:4], blocks[2:4]]


@pytest.mark.slow
@pytest.mark.bench
def test_suite_names_its_numbers():
    report = bench_embracing.suite(TINY._replace(of_each_class=1, repeats=2))
    names = {"mixed_vs_strong", "weak_vs_strong", "mixed", "weak", "strong", "compile_mixed"}
    assert {f"embracing/{name}" for name in names} <= set(report)
    for of_what in ("step", "round"):
        weak, moderate, strong = (
            report[f"embracing/{of_what}_memory_{name}"].value for name in ("weak", "moderate", "strong")
        )
        assert weak < moderate < strong == 1
    for one in report.values():
        assert np.isfinite(one.value)
        assert one.spread[0] <= one.value <= one.spread[1]
