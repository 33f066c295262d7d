"""Cost of a round of EmbracingFL in which some clients train a part of the network.

ResNet-20 of "Embracing Federated Learning" on images of 32x32x3, and the paper's clients: ten local steps of batch 32,
390 samples each (50,000 over 128). Six clients, all active: all strong, two of each class, all weak. Rows take turns in
one process and walk on from round to round. A moderate client trains from `block_2_1` on, a weak one from `block_3_1`
on. Memory is that of the compiled round of one client alone, beside the model and the data: of one step, and of all
steps, for which a weak client keeps features.
"""

import numpy as np

from experiments.bench.setting import Network, Setting, clients, random_data, training
from experiments.bench.timing import Measurement, Report, Runner, in_turns
from jaxfl.algorithms import embracing, output_side
from jaxfl.core import Algorithm, Task
from jaxfl.models import classification, resnet20

FIRST_BLOCKS = {"strong": "stem", "moderate": "block_2_1", "weak": "block_3_1"}  # that a class trains
SETTING = Setting(Network(resnet20(), "ResNet-20", (32, 32, 3)), 6, samples=390, num_local_steps=10, rounds=1)


def learner(setting: Setting, task: Task, counts: dict[str, int], num_active: int | list[int]) -> Algorithm:
    """EmbracingFL with these numbers of clients by class. `num_active` take part in a round, in all or by class."""
    return embracing(
        task,
        clients=clients(setting),
        trained_blocks=[output_side(task.blocks, FIRST_BLOCKS[name]) for name in counts],
        client_class=np.repeat(np.arange(len(counts)), list(counts.values())),
        num_active=num_active,
    )


def rounds(setting: Setting, task: Task, counts: dict[str, int]) -> Runner:
    """A call's rounds of clients by class, all of them active."""
    data = random_data(setting._replace(num_nodes=sum(counts.values())), np.float32)
    return training(learner(setting, task, counts, list(counts.values())), data, setting.rounds)[0]


def suite(setting: Setting = SETTING) -> dict[str, Measurement]:
    """Measure; see the module's text. About seven minutes on two cores."""
    task, everybody, each = setting.task(), setting.num_nodes, setting.num_nodes // len(FIRST_BLOCKS)
    kinds = {"strong": {"strong": everybody}, "mixed": dict.fromkeys(FIRST_BLOCKS, each), "weak": {"weak": everybody}}
    rows = {name: rounds(setting, task, counts) for name, counts in kinds.items()}
    seconds = in_turns(rows, setting.repeats, setting.rounds)
    batches = f"steps of batch {setting.batch_size}"
    size = f"{setting.network.text}, {everybody} clients, {setting.num_local_steps} {batches}"
    report = Report("embracing/", f"{size}, node_loop {task.node_loop}")
    for name, text in {"mixed": f"{each} clients of each class", "weak": "all weak"}.items():
        report.ratio(f"{name}_vs_strong", seconds[name], seconds["strong"], f"{text}, over all strong")
    for name, times in seconds.items():
        report.median(name, times, "s/round")
    alone = classification(setting.network.model, node_loop="map")  # not each of several devices the one client
    for kind, steps in {"step": 1, "round": setting.num_local_steps}.items():
        shorter = setting._replace(num_local_steps=steps)
        held = {name: rounds(shorter, alone, {name: 1}).temp_bytes for name in FIRST_BLOCKS}
        for name, count in held.items():
            text = f"temporaries of one {name} client's round ({count / 1e6:.1f} MB) over a strong one's, "
            share = count / max(1, held["strong"])
            report.on(f"{text}{steps} {batches}").median(f"{kind}_memory_{name}", share, "x")
    report.compile_times(rows)
    return report.measurements
