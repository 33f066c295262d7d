"""Child process of test_ahead.py: runs over several devices, with chunks that are sent off early and without.

    python ahead_over_devices.py OUT

It prints, as JSON, how many chunks were sent off early in each kind of run, and whether lines and ends are the same.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from toy_problem import compiled_once, toy_variant, toy_with_numbers, train_toy

from jaxfl.training import Placement, ahead, read_run, restore_state
from jaxfl.training.ahead import DeviceQueue


def variants(placement: Placement | None, seeds: tuple[int, ...]) -> dict:
    """A variant that goes on to the end; with several seeds one that diverges in round 8 as well."""
    numbers = {"step_size": 0.2, "bad_round": 1e6}
    fields = {"num_rounds": 22, "evaluate_every": 5, "chunk_rounds": 3, "seeds": seeds, "placement": placement}
    good = toy_variant(toy_with_numbers, numbers=numbers, **fields)
    wild = {"Wild": good._replace(numbers={**numbers, "bad_round": 7.0}, seeds=seeds[:1])}
    return {"Good": good, **(wild if len(seeds) > 1 else {})}


def compare(out: Path, runs: dict) -> dict:
    """Compare a run that sends chunks off early with one that does not."""
    sent, send, kept = [], DeviceQueue._send_ahead, []

    def counting(self, chunk, ahead):
        sent.append(ahead)
        return send(self, chunk, ahead)

    DeviceQueue._send_ahead = counting
    try:
        for seconds in (0.0, float("inf")):
            assert not sent
            ahead.MOST_SECONDS = seconds
            train_toy(out / str(seconds), runs, checkpoint_every=100)
            ends = [restore_state(read_run(out / str(seconds)), *lane) for lane in lanes(runs)]
            kept.append(((out / str(seconds) / "metrics.jsonl").read_bytes(), [rounds for rounds, _ in ends], ends))
    finally:
        DeviceQueue._send_ahead = send
    leaves = [[np.asarray(leaf) for leaf in jax.tree.leaves(ends)] for *_, ends in kept]
    same = all(np.array_equal(*pair) for pair in zip(*leaves, strict=True))
    return {"sent off early": len(sent), "same": same and kept[0][:2] == kept[1][:2], "rounds": kept[1][1]}


def lanes(runs: dict) -> list[tuple]:
    return [(name, variant, seed) for name, variant in runs.items() for seed in variant.seeds]


def main(out: Path) -> None:
    ahead.FEWEST_CHUNKS, ahead.MOST_CPU_DEVICES = 0, 8
    kinds = {
        "nodes": (Placement(4), (0,)),
        "lanes over nodes": (Placement(4), (0, 1)),
        "lanes over points": (Placement(3, "points"), (0, 1, 2)),
        "devices of a CPU": (None, (0, 1, 2)),
    }
    with compiled_once():
        print(json.dumps({name: compare(out / name, variants(*kind)) for name, kind in kinds.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
