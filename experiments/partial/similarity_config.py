"""Options and presets of experiments.partial.similarity."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from experiments.command_line import Preset
from jaxfl.core import ArgumentError, check

Scheme = Literal["nothing", "output_side", "input_side", "channels", "everything"]
SCHEMES: tuple[str, ...] = get_args(Scheme)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options."""

    dataset: str = "digits"
    """digits, mnist, fashion_mnist or cifar10."""
    data_dir: str | None = None
    """Folder with the data set's files as their authors publish them."""
    num_train: int | None = None
    """Use only so many training samples, drawn at random."""
    num_test: int | None = None
    """Use only so many test samples, drawn at random."""
    shrink: int = 1
    """Average images over blocks of so many pixels a side."""
    schemes: tuple[Scheme, ...] = ("nothing", "output_side", "channels", "input_side")
    """What is averaged over all clients in every round: nothing (figure 1), the blocks from first_shared on, the blocks
    before it, the first channels of every layer (figure 3), or everything."""
    first_shared: str | None = None
    """First block of the output side; default: the first of the second half of all blocks, which has one more if their
    number is odd."""
    channel_share: float = 0.5
    """Share of every layer's channels that the channels scheme averages."""
    clients: int = 8
    """Clients over which the training data are partitioned; all of them train in every round."""
    alpha: float = 0.1
    """Concentration of the Dirichlet distribution by which each class is split over clients."""
    model: Literal["mlp", "resnet"] | None = None
    """Multilayer perceptron, or residual network with batch normalization (digits: mlp, others: resnet)."""
    hidden: tuple[int, ...] | None = None
    """Units of the hidden layers of mlp (64 48 32)."""
    resnet_widths: tuple[int, ...] | None = None
    """Channels of the stages of resnet (16 32 64, those of resnet20)."""
    resnet_blocks: tuple[int, ...] | None = None
    """Basic blocks of its stages (3 3 3, those of resnet20; 1 1 1 is resnet8)."""
    layers: tuple[str, ...] | None = None
    """Layers whose outputs are compared. mlp: dense_1, relu_1, ... (all dense ones); resnet: stem, block_1_1 (stage,
    position), ..., dense (the stem and the last block of each stage)."""
    rounds: int = 20
    """Rounds; all schemes, nothing among them, restart momentum in each."""
    local_steps: int = 10
    """SGD steps of each client in a round."""
    batch_size: int = 32
    """Samples in a step."""
    step_size: float = 0.1
    """Of the clients."""
    momentum: float = 0.9
    """Of the clients; starts at zero in each round."""
    weight_decay: float = 1e-4
    """Of the clients."""
    num_directions: int = 4
    """Singular directions of a layer's outputs that are compared."""
    similarity_batches: int = 2
    """Batches of test samples of which similarities are averaged, as decompositions of all samples are large."""
    similarity_batch_size: int = 64
    """Test samples in each."""
    evaluate_every: int = 2
    """Rounds between measurements."""
    seeds: tuple[int, ...] = (0,)
    """One run each: model, partition and batches differ."""
    node_loop: str = "auto"
    """How a round runs over clients: vmap (all at once), map (one by one), chunk:k (k at once), or auto: map for
    convolutions on a CPU, else vmap. devices:map and the like share them out over devices (JAX_NUM_CPU_DEVICES)."""
    out: str | None = None
    """The run directory itself; default runs/similarity/NAME."""
    resume: bool = False
    """Go on with an interrupted run: what is finished stays, the scheme and seed it stopped in begin anew."""
    quiet: bool = False
    """No progress."""


NOT_SAVED = ("data_dir", "out", "quiet", "resume")  # options that do not decide the results

_PAPER: dict[str, Any] = {
    "dataset": "cifar10",
    "clients": 128,
    # Conv 1, 3, 7, 15, 19: a block ends behind its second convolution.
    "layers": ("stem", "block_1_1", "block_1_3", "block_3_1", "block_3_3"),
    "rounds": 100,
    "step_size": 0.4,
    "similarity_batches": 4,
    "evaluate_every": 5,
}
_SMALL: dict[str, Any] = {
    "dataset": "cifar10",
    "num_train": 8000,
    "num_test": 1000,
    "shrink": 2,
    "clients": 12,
    "resnet_widths": (8, 16, 32),
    "resnet_blocks": (1, 1, 1),
    "step_size": 0.1,
    "similarity_batch_size": 128,
}
_FIGURE_3 = ("output_side", "channels", "input_side")
_GPU = "for an accelerator, not measured; tried at reduced size"
PRESETS: dict[str, Preset] = {
    "fig1": Preset("CIFAR-10, ResNet-20, 128 independent clients", _GPU, {**_PAPER, "schemes": ("nothing",)}),
    "fig3": Preset(
        "the same with half of the model averaged, by three schemes", _GPU, {**_PAPER, "schemes": _FIGURE_3}
    ),
    "fig1_small": Preset(
        "8,000 images of 16x16, ResNet-8 of half the channels, 12 independent clients, 1,000 iterations",
        "5 minutes of one core's time, beside other work",
        {**_SMALL, "schemes": ("nothing",), "rounds": 100, "evaluate_every": 10},
    ),
    "fig3_small": Preset(
        "the same with half of the model averaged, by three schemes, 500 iterations",
        "8 minutes of one core's time, beside other work",
        {**_SMALL, "schemes": _FIGURE_3, "rounds": 50, "evaluate_every": 5},
    ),
}


@dataclasses.dataclass(frozen=True)
class Resolved(Config):
    """The options after `resolve`, which gives each of these a value: the empty ones here are never used."""

    model: Literal["mlp", "resnet"] = "mlp"
    hidden: tuple[int, ...] = ()
    resnet_widths: tuple[int, ...] = ()
    resnet_blocks: tuple[int, ...] = ()


_DEFAULTS: dict[str, tuple[int, ...]] = {
    "hidden": (64, 48, 32),
    "resnet_widths": (16, 32, 64),
    "resnet_blocks": (3, 3, 3),
}
_OWNERS = {"hidden": "mlp", "resnet_widths": "resnet", "resnet_blocks": "resnet"}


def resolve(config: Config) -> Resolved:
    """The configuration with the model's defaults filled in.

    What building blocks refuse by themselves is left to them.

    Raises:
        ArgumentError: a value out of range, or an option that would change nothing.
    """
    for name in ("schemes", "seeds", "layers"):
        listed = getattr(config, name)
        if listed is not None and (not listed or len(set(listed)) != len(listed)):
            raise ArgumentError(name, "must be distinct and at least one", f"got {list(listed)}", "List each once.")
    for name in ("num_train", "num_test", "rounds", "similarity_batches", "similarity_batch_size", "evaluate_every"):
        if getattr(config, name) is not None:
            check.at_least(1, **{name: getattr(config, name)})
    check.at_least(2, clients=config.clients)
    check.at_least(1, num_directions=config.num_directions)
    if config.num_directions >= config.similarity_batch_size - 1:
        requirement = f"must be below similarity_batch_size - 1, which is {config.similarity_batch_size - 1}"
        remedy = "Pass fewer: of so many directions any two subspaces are equal."
        raise ArgumentError("num_directions", requirement, f"got {config.num_directions}", remedy)
    if not 0 < config.channel_share < 1:
        found = f"got {config.channel_share}"
        raise ArgumentError("channel_share", "must lie in (0, 1)", found, "Pass a share, 0.5 for instance.")
    for seed in config.seeds:
        if not 0 <= seed < 2**32:  # a larger seed would lose its upper bits
            raise ArgumentError("seeds", "must lie in [0, 2^32)", f"got {seed}", "Pass e.g. 0 1 2.")
    of_schemes = {"first_shared": ("output_side", "input_side"), "channel_share": ("channels",)}
    for name, schemes in of_schemes.items():
        if getattr(config, name) != getattr(Config(), name) and not set(schemes) & set(config.schemes):
            found, remedy = f"got {getattr(config, name)} without it", f"Leave it out, or add --schemes {schemes[0]}."
            raise ArgumentError(name, f"belongs to the scheme {' or '.join(schemes)}", found, remedy)
    model = config.model or ("mlp" if config.dataset == "digits" else "resnet")
    values = {**dataclasses.asdict(config), "model": model}
    for name, default in _DEFAULTS.items():
        if values[name] is None:
            values[name] = default
        elif _OWNERS[name] != model:
            remedy = f"Leave it out, or pass --model {_OWNERS[name]}."
            raise ArgumentError(name, f"belongs to {_OWNERS[name]}", f"got it for {model}", remedy)
        for number in values[name]:
            check.at_least(1, **{name: number})
    if len(values["resnet_blocks"]) != len(values["resnet_widths"]):
        found = f"got {len(values['resnet_blocks'])} for {len(values['resnet_widths'])} widths"
        raise ArgumentError("resnet_blocks", "must hold one number for each stage", found, "Pass as many as widths.")
    return Resolved(**values)
