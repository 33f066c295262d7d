"""A hundred thousand rounds with evaluations and checkpoints: memory and open files stay as they are."""

import os
import sys

import numpy as np
import psutil
import pytest
from toy_problem import toy_case, train_toy

ROUNDS, EVERY = 100_000, 200
MOST_GROWTH = 50.0  # bytes a round, 4 MB in all; measured 5.5. The infos of rounds, if kept, would take 100


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_a_hundred_thousand_rounds_take_no_more_memory_or_files_than_the_first_ones(tmp_path):
    """500 evaluations, 100 checkpoints; the slope of memory over the last four fifths, in bytes a round."""
    process, seen = psutil.Process(), []

    def watch(evaluation):
        files = len(os.listdir("/proc/self/fd"))
        seen.append((evaluation.round_index, process.memory_info().rss, files))

    case = toy_case(num_rounds=ROUNDS, evaluate_every=EVERY, chunk_rounds=EVERY, seeds=(0,))
    train_toy(tmp_path / "run", {"A": case}, checkpoint_every=5, hook=watch)
    rounds, resident, files = np.array(seen).T
    assert (rounds[-1], len(rounds)) == (ROUNDS, ROUNDS // EVERY + 1)
    late = rounds > ROUNDS // 5
    slope = np.polyfit(rounds[late], resident[late], 1)[0]
    print(f"{slope:.1f} bytes a round, {resident.max() / 1e6:.0f} MB, files {files[~late].max()}, {files[late].max()}")
    assert slope < MOST_GROWTH
    assert files[late].max() <= files[~late].max() + 2
