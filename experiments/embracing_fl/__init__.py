"""EmbracingFL: weak clients train the output side of a model. Against width reduction and FedAvg without them.

    python -m experiments.embracing_fl                                              # digits, under a minute
    python -m experiments.embracing_fl --preset table3_small --case 7 --data-dir DIR    # a case of Table 3, reduced
    python -m experiments.embracing_fl --preset table3 --data-dir DIR               # a table of the paper
    python -m experiments.embracing_fl --grid case=7,9 --grid step_size=0.05,0.1    # a sweep
    python -m experiments.embracing_fl --preset sizes                               # Tables 1 and 10

Before it trains it prints the clients of each class, their capacity and the seconds that a round takes on a phone. It
leaves lines of measurements, summary.json (capacity, bits sent and received, rounds to a target beside the usual), and
a picture in the run directory. `python -m jaxfl report RUN RUN` sets several runs on one page.

Lee, Zhang, Prakash, Niu, Avestimehr, "Embracing Federated Learning: Enabling Weak Client Participation via Partial
Model Training".
"""

from jaxfl.frame import Experiment

from .defaults import BASELINES, DATASETS, DERIVED, name_of
from .methods import CLASSES
from .options import Configuration
from .prepare import finish, prepare, run_or_show
from .presets import PRESETS

EXPERIMENT = Experiment(
    name="embracing_fl",
    description="Weak clients train the output side of a model (EmbracingFL); against width reduction and FedAvg.",
    base=Configuration(),
    prepare=prepare,
    grid=({"method": ("embracing", "width_reduction", "fed_avg")},),
    datasets=DATASETS,
    presets=PRESETS,
    derived=DERIVED,
    rivals=((("case",), CLASSES), (("num_active",), ("participation_rate",))),
    name_of=name_of,
    aliases={
        "num_nodes": "nodes",
        "num_rounds": "rounds",
        "max_steps": "local_steps",
        "scheme": "partition",
        "client_class": "nodes",
        "widths": "resnet_widths",
        "blocks": "resnet_blocks",
    },
    finish=finish,
    baselines=BASELINES,
    columns=("test_accuracy", "test_loss", "train_loss", "rounds_to_target"),
    run=run_or_show,
)
