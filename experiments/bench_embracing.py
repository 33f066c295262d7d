"""What a round of EmbracingFL costs where some of its clients train a part of the network.

    python -m experiments.bench embracing --json bench.json

ResNet-20 of "Embracing Federated Learning" on images of 32x32x3, and the paper's clients: ten local steps of batch 32,
390 samples each (50,000 over 128). Six clients, all active: all strong, two of each class, all weak. Rows take turns in
one process and walk on from round to round. A moderate client trains from `block_2_1` on, a weak one from `block_3_1`
on. Memory is that of the compiled round of one client alone, beside the model and the data: of one step, and of all
steps, for which a weak client keeps features.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

import jax
import numpy as np

from experiments.bench_round import KEY, without_info
from experiments.timing import Measurement, Runner, compile_times, in_turns, ratio, runner
from jaxfl.algorithms import embracing, output_side
from jaxfl.core import Task
from jaxfl.data import federate
from jaxfl.models import classification, resnet20

CLASSES = ("strong", "moderate", "weak")
FIRST_BLOCKS = (None, "block_2_1", "block_3_1")  # None: all blocks


class Setting(NamedTuple):
    """Shapes and repeats of the suite."""

    sample_shape: tuple[int, int, int] = (32, 32, 3)
    num_classes: int = 10
    widths: tuple[int, ...] = (16, 32, 64)
    blocks: tuple[int, ...] = (3, 3, 3)
    samples: int = 390  # of each client
    batch_size: int = 32
    num_local_steps: int = 10
    of_each_class: int = 2
    rounds: int = 1  # in one call
    repeats: int = 7


def network(setting: Setting, node_loop: str | None = None) -> Task:
    """The task of the full network."""
    model = resnet20(setting.sample_shape, setting.num_classes, widths=setting.widths, blocks=setting.blocks)
    return classification(model, node_loop=node_loop)


def rounds(setting: Setting, task: Task, counts: tuple[int, ...]) -> Runner:
    """A call's rounds of so many clients of each class, all of them active."""
    parts = [task.blocks if first is None else output_side(task.blocks, first) for first in FIRST_BLOCKS]
    present = [number for number, count in enumerate(counts) if count]
    algorithm = embracing(
        task,
        trained_blocks=[parts[number] for number in present],
        client_class=np.repeat(np.arange(len(present)), [counts[number] for number in present]),
        num_active=[counts[number] for number in present],
        num_local_steps=setting.num_local_steps,
        batch_size=setting.batch_size,
        step_size=0.01,
    )
    rng, total = np.random.default_rng(0), sum(counts) * setting.samples
    images = rng.random((total, *setting.sample_shape), np.float32)
    labels = rng.integers(0, setting.num_classes, total).astype(np.int32)
    data = federate(images, labels, np.split(np.arange(total), sum(counts)))
    return runner(without_info(algorithm, setting.rounds), jax.jit(algorithm.init)(KEY, data), data)


def suite(setting: Setting | None = None) -> dict[str, Measurement]:
    """Measure; see the module's text. About seven minutes on two cores."""
    setting = Setting() if setting is None else setting
    task, each = network(setting), setting.of_each_class
    everybody = {"strong": (3 * each, 0, 0), "mixed": (each, each, each), "weak": (0, 0, 3 * each)}
    rows = {name: rounds(setting, task, counts) for name, counts in everybody.items()}
    seconds = in_turns({name: row.call for name, row in rows.items()}, dict.fromkeys(rows, setting.repeats))
    shapes = f"ResNet-20, {3 * each} clients, {setting.num_local_steps} steps of batch {setting.batch_size}"
    shapes += f", node_loop {task.node_loop}"
    report = {}
    for name, against in {"mixed": f"{each} clients of each class", "weak": "all weak"}.items():
        value, spread = ratio(seconds[name], seconds["strong"])
        report[f"embracing/{name}_vs_strong"] = Measurement(value, "x", spread, f"{against}, over all strong; {shapes}")
    for name, calls in seconds.items():
        times = [call / setting.rounds for call in calls]
        report[f"embracing/{name}"] = Measurement(statistics.median(times), "s/round", (min(times), max(times)), shapes)
    alone = network(setting, "map")  # where several devices took part, each would train the one client
    for of_what, steps in {"step": 1, "round": setting.num_local_steps}.items():
        shorter = setting._replace(num_local_steps=steps)
        temps = {
            name: rounds(shorter, alone, tuple(np.eye(3, dtype=int)[place])).temp_bytes
            for place, name in enumerate(CLASSES)
        }
        for name, held in temps.items():
            share = held / max(1, temps["strong"])
            text = f"temporaries of one {name} client's round ({held / 1e6:.1f} MB) over a strong one's, "
            text += f"{steps} steps of batch {setting.batch_size}"
            report[f"embracing/{of_what}_memory_{name}"] = Measurement(share, "x", (share, share), text)
    return report | compile_times("embracing", rows, shapes)
