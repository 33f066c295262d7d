"""Options of experiments.embracing_fl."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from experiments.partial import paper
from jaxfl.core import ArgumentError, check

Method = Literal["embracing", "width_reduction", "ordered_dropout", "first_half", "random_blocks", "fed_avg"]
BatchNorm = Literal["global", "static"]
ModelName = Literal["resnet20", "resnet8", "femnist_cnn", "bilstm", "mlp"]
CLASSES = ("strong", "moderate", "weak")


@dataclasses.dataclass(frozen=True)
class Config:
    """Options; None stands for the default of the data set. Where several values are given, all are compared."""

    dataset: str = "digits"
    """digits, mnist, fashion_mnist, cifar10, femnist or imdb."""
    data_dir: str | None = None
    """Folder with the data set's files as their authors publish them."""
    num_train: int | None = None
    """Use only so many training samples, drawn at random."""
    num_test: int | None = None
    """Use only so many test samples, drawn at random."""
    shrink: int = 1
    """Average images over blocks of so many pixels a side."""
    method: tuple[Method, ...] = ("embracing", "width_reduction", "fed_avg")
    """embracing: weaker clients train blocks of the output side. width_reduction (HeteroFL), ordered_dropout (FjORD):
    they train the first channels of every layer. first_half, random_blocks: as many blocks as embracing trains, from
    the input side or drawn anew each round. fed_avg: the strong clients alone, the others take no part."""
    cases: tuple[int, ...] | None = None
    """Cases 1 to 10 of Table 3: shares of strong, moderate and weak clients (9, where no counts are given)."""
    strong: tuple[int, ...] | None = None
    """Strong clients, in place of cases; one number, or one for each comparison."""
    moderate: tuple[int, ...] | None = None
    """Moderate clients, likewise (0)."""
    weak: tuple[int, ...] | None = None
    """Weak clients, likewise (0)."""
    nodes: int | None = None
    """Clients over which the data are partitioned (digits: 16, others: 128). Those beyond the counts take no part."""
    participation_rate: float | None = None
    """Share of the clients that is active in a round (0.25)."""
    num_active: int | None = None
    """Active clients in a round, in place of the rate."""
    sampling: Literal["uniform", "stratified"] = "uniform"
    """uniform: active clients are drawn among all, one trains after the other. stratified: as many of each class as its
    share, drawn within the class."""
    model: ModelName | None = None
    """resnet20, resnet8 (one block a stage), femnist_cnn (two convolutions, two dense layers), bilstm or mlp (digits:
    mlp, mnist, fashion_mnist, femnist: femnist_cnn, cifar10: resnet20, imdb: bilstm)."""
    resnet_widths: tuple[int, ...] | None = None
    """Channels of the stages of a resnet (16 32 64)."""
    resnet_blocks: tuple[int, ...] | None = None
    """Blocks of the stages of a resnet (resnet20: 3 3 3, resnet8: 1 1 1)."""
    channels: tuple[int, ...] | None = None
    """Channels of the convolutions of femnist_cnn (32 64)."""
    hidden: tuple[int, ...] | None = None
    """Units of the hidden layers of mlp (64 32), of the one of femnist_cnn (2048)."""
    embedding_features: int | None = None
    """Numbers that stand for a word in bilstm (256)."""
    units: int | None = None
    """Size of each direction's state in bilstm (256)."""
    dropout: float | None = None
    """Rate of the two dropouts of bilstm (0.3)."""
    frozen_words: int | None = None
    """Words that a weak client of embracing reads first, in each direction, without gradient, with bilstm (128)."""
    cut_moderate: str | None = None
    """First block that a moderate client trains (resnets: block_2_1, femnist_cnn: dense_1, bilstm: lstm, mlp: dense_2).
    """
    cut_weak: str | None = None
    """First block that a weak client trains (resnets: block_3_1, femnist_cnn: dense_2, bilstm: lstm, mlp: the last)."""
    width_moderate: float = 0.45
    """Share of every layer's channels that a moderate client of width_reduction and ordered_dropout has."""
    width_weak: float = 0.2
    """Share that a weak client has."""
    without_scaler: bool = False
    """Leave out HeteroFL's scaler, with which clients of width_reduction divide hidden activations by their width."""
    classifier: bool = False
    """In first_half train the last block, too, as InclusiveFL does."""
    batch_norm: tuple[BatchNorm, ...] | None = None
    """Of resnets. global: running statistics, averaged like parameters. static: none are tracked; they are measured on
    training samples before an evaluation (width_reduction, ordered_dropout: static, others: global)."""
    frozen_batch_norm: Literal["running", "batch"] | None = None
    """Statistics with which blocks in front of those that a client trains run (running; with static, which has none:
    batch)."""
    calibration_samples: int | None = None
    """Training samples on which static statistics are measured (500)."""
    local_steps: int | None = None
    """SGD steps of an active client in a round (10)."""
    batch_size: int = 32
    """Samples in a step."""
    step_size: float | None = None
    """Of the clients (digits: 0.1, cifar10: 0.4, imdb: 0.1, others: 0.04)."""
    decay_rounds: tuple[int, ...] | None = None
    """After each of these rounds the step size falls to a tenth (cifar10: 80 and 90 % of all rounds, imdb: 50 and 75
    %, others: never)."""
    momentum: float = 0.9
    """Of the clients; starts at zero in each round."""
    weight_decay: float = 1e-4
    """Of the clients."""
    weighting: Literal["uniform", "data"] = "uniform"
    """What the mean over clients weighs them by: all alike, or by their samples."""
    partition: str | None = None
    """dirichlet, iid or writers (femnist: writers, others: dirichlet)."""
    alpha: float | None = None
    """Concentration of the dirichlet partition (digits: 0.5, others: 0.1)."""
    writers_per_node: int | None = None
    """Writers a client of the writers partition (2)."""
    rounds: int | None = None
    """Communication rounds (digits: 150, cifar10: 1000, imdb: 400, others: 200)."""
    target_accuracy: tuple[float, ...] | None = None
    """Test accuracies in [0, 1], one or one for each case: summary.json says in which round each is reached."""
    seeds: tuple[int, ...] | None = None
    """One run each: model, partition, batches and participation differ (digits: 0 1 2, others: 0)."""
    node_loop: str = "auto"
    """How clients run that run together: vmap (all at once), map (one after the other), chunk:k (k at once), or auto;
    devices:map and the like share them out over devices (JAX_NUM_CPU_DEVICES).
    Under uniform sampling, clients of several classes run one after the other whatever it says."""
    evaluate_every: int | None = None
    """Rounds between evaluations; default a twentieth of all."""
    checkpoint_every: int = 10
    """Evaluations between checkpoints."""
    show: Literal["training", "sizes", "timing"] = "training"
    """sizes: print Tables 1 and 10 as counted here, timing: Table 8 for the device profile. Neither trains."""
    collect: tuple[str, ...] = ()
    """Train nothing: set these run directories beside the paper's numbers, in the directory of --out if it is given."""
    out: str | None = None
    """The run directory itself; default runs/embracing_fl/NAME."""
    resume: bool = False
    """Go on with an interrupted run."""
    quiet: bool = False
    """No progress."""


@dataclasses.dataclass(frozen=True)
class Resolved(Config):
    """The options after `resolve`, which gives each of these a value: the empty ones here are never used."""

    nodes: int = 0
    model: ModelName = "mlp"
    resnet_widths: tuple[int, ...] = ()
    resnet_blocks: tuple[int, ...] = ()
    channels: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    embedding_features: int = 0
    units: int = 0
    dropout: float = 0.0
    frozen_words: int = 0
    cut_moderate: str = ""
    cut_weak: str = ""
    calibration_samples: int = 0
    local_steps: int = 0
    step_size: float = 0.0
    decay_rounds: tuple[int, ...] = ()
    partition: str = ""
    rounds: int = 0
    seeds: tuple[int, ...] = ()
    evaluate_every: int = 0


DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"nodes": 16, "model": "mlp", "rounds": 150, "step_size": 0.1, "seeds": (0, 1, 2)},
    "cifar10": {"model": "resnet20", "rounds": 1000, "step_size": 0.4},
    "imdb": {"model": "bilstm", "rounds": 400, "step_size": 0.1},
    "femnist": {"partition": "writers"},
    "other": {
        "nodes": 128,
        "model": "femnist_cnn",
        "rounds": 200,
        "step_size": 0.04,
        "seeds": (0,),
        "partition": "dirichlet",
        "local_steps": 10,
    },
}
_ALPHAS = {"digits": 0.5}  # at 0.1 its two strong clients know a class or two
_DECAYS = {"cifar10": (0.8, 0.9), "imdb": (0.5, 0.75)}  # shares of all rounds
MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    "resnet20": {"resnet_blocks": (3, 3, 3), "cut_moderate": "block_2_1", "cut_weak": "block_3_1"},
    "resnet8": {"resnet_blocks": (1, 1, 1), "cut_moderate": "block_2_1", "cut_weak": "block_3_1"},
    "femnist_cnn": {"hidden": (2048,), "cut_moderate": "dense_1", "cut_weak": "dense_2"},
    "bilstm": {"cut_moderate": "lstm", "cut_weak": "lstm", "frozen_words": 128},
    "mlp": {"hidden": (64, 32)},
    "any": {
        "resnet_widths": (16, 32, 64),
        "resnet_blocks": (),
        "channels": (32, 64),
        "hidden": (),
        "embedding_features": 256,
        "units": 256,
        "dropout": 0.3,
        "frozen_words": 0,
        "calibration_samples": 500,
    },
}
RESNETS = ("resnet20", "resnet8")
NARROW = ("width_reduction", "ordered_dropout")
CUT = ("embracing", "first_half", "random_blocks")
# Option -> for each option that decides whether it counts the values with which it does.
OWNED: dict[str, dict[str, tuple[str, ...]]] = {
    "resnet_widths": {"model": RESNETS},
    "resnet_blocks": {"model": RESNETS},
    "channels": {"model": ("femnist_cnn",)},
    "hidden": {"model": ("mlp", "femnist_cnn")},
    "embedding_features": {"model": ("bilstm",)},
    "units": {"model": ("bilstm",)},
    "dropout": {"model": ("bilstm",)},
    "frozen_words": {"model": ("bilstm",), "method": ("embracing",)},
    "cut_moderate": {"method": CUT},
    "cut_weak": {"method": CUT},
    "width_moderate": {"method": NARROW},
    "width_weak": {"method": NARROW},
    "without_scaler": {"method": ("width_reduction",)},
    "classifier": {"method": ("first_half",)},
    "batch_norm": {"model": RESNETS},
    "frozen_batch_norm": {"model": (*RESNETS, "bilstm"), "method": ("embracing",)},
    "alpha": {"partition": ("dirichlet",)},
    "writers_per_node": {"partition": ("writers",)},
}


# Option -> the class of clients that it is about, by its place in CLASSES.
_OF_CLASS = {"cut_moderate": 1, "width_moderate": 1, "cut_weak": 2, "width_weak": 2, "frozen_words": 2}


def resolve(config: Config, defaults: Config | None = None) -> Resolved:
    """The configuration with the data set's and the model's defaults filled in.

    Args:
        config: the options.
        defaults: those of the preset, if there is one. What differs from it was asked for, and has to count.

    Raises:
        ArgumentError: a value out of range, or options that do not go together.
    """
    values = dataclasses.asdict(config)
    unasked = dataclasses.asdict(defaults or Config())
    given = [name for name, value in values.items() if value != unasked[name]]
    _replace_unasked(values, given)
    _fill(values, {**DEFAULTS["other"], **DEFAULTS.get(config.dataset, {})})
    _fill(values, {**MODEL_DEFAULTS["any"], **MODEL_DEFAULTS[values["model"]]})
    if values["model"] == "mlp":
        last = f"dense_{len(values['hidden']) + 1}"
        _fill(values, {"cut_moderate": "dense_2" if values["hidden"] else last, "cut_weak": last})
    rounds = values["rounds"]
    decays = {round(share * rounds) for share in _DECAYS.get(config.dataset, ())}  # a few rounds have fewer
    _fill(values, {"decay_rounds": tuple(sorted(number for number in decays if 0 < number < rounds))})
    _fill(values, {"evaluate_every": max(1, rounds // 20)})
    for name in ("method", "cases", "batch_norm", "seeds"):
        listed = values[name]
        if listed is not None and (not listed or len(set(listed)) != len(listed)):
            raise ArgumentError(name, "must be distinct and at least one", f"got {list(listed)}", "List each once.")
    _refuse_idle(values, given)
    _check_numbers(values)
    _refuse_without_clients(values, given)
    _check_together(values)
    if values["partition"] == "dirichlet":
        _fill(values, {"alpha": _ALPHAS.get(config.dataset, 0.1)})
    if values["partition"] == "writers":
        _fill(values, {"writers_per_node": 2})
    if values["num_active"] is None:
        _fill(values, {"participation_rate": 0.25})
    return Resolved(**values)


def _replace_unasked(values: dict[str, Any], given: Sequence[str]) -> None:
    """Where options take each other's place, one that was given goes before one of the preset."""
    for names, others in ((("cases",), CLASSES), (CLASSES, ("cases",)), (("num_active",), ("participation_rate",))):
        if set(names) & set(given) and not set(others) & set(given):
            values.update(dict.fromkeys(others))


def _fill(values: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Put defaults where nothing is."""
    values.update({name: default for name, default in defaults.items() if values[name] is None})


def _refuse_idle(values: dict[str, Any], given: Sequence[str]) -> None:
    """Refuse options that were given and would change nothing."""
    for name in given:
        for option, choices in OWNED.get(name, {}).items():
            chosen = values[option] if option == "method" else (values[option],)
            if not set(choices) & set(chosen):
                shown = " ".join(map(str, values[name])) if isinstance(values[name], tuple) else values[name]
                remedy = f"Leave it out, or pass --{option} {choices[0]}."
                raise ArgumentError(name, f"belongs to {', '.join(choices)}", f"got {shown} without it", remedy)
    if "frozen_words" in given and values["cut_weak"] == "dense":
        found = f"got {values['frozen_words']} beside --cut-weak dense"
        raise ArgumentError(
            "frozen_words", "belongs to clients that train the LSTM", found, "Leave one of the two out."
        )
    statistics = values["batch_norm"] or ("static" if set(values["method"]) & set(NARROW) else "global",)
    if "calibration_samples" in given and (values["model"] not in RESNETS or "static" not in statistics):
        found = f"got {values['calibration_samples']} without it"
        raise ArgumentError("calibration_samples", "belongs to static batch normalization", found, "Leave it out.")


def _refuse_without_clients(values: dict[str, Any], given: Sequence[str]) -> None:
    """Refuse options that were given for a class of which no client takes part."""
    for name, number in _OF_CLASS.items():
        if any(values[label] is not None for label in CLASSES):
            takes_part = any(values[CLASSES[number]] or ())
        else:
            takes_part = any(paper.CASES[case][number] for case in values["cases"] or (9,))
        if name in given and not takes_part:
            label = CLASSES[number]
            found = f"got {values[name]}, and none takes part"
            raise ArgumentError(name, f"belongs to {label} clients", found, f"Leave it out, or have {label} clients.")


def _check_numbers(values: dict[str, Any]) -> None:
    """Each option by itself."""
    for name in ("num_train", "num_test", "shrink", "nodes", "rounds", "local_steps", "batch_size", "num_active"):
        if values[name] is not None:
            check.at_least(1, **{name: values[name]})
    for name in ("evaluate_every", "checkpoint_every", "calibration_samples", "embedding_features", "units"):
        check.at_least(1, **{name: values[name]})
    for name in ("resnet_widths", "resnet_blocks", "channels", "hidden"):
        for number in values[name]:
            check.at_least(1, **{name: number})
    check.at_least(0, frozen_words=values["frozen_words"])
    check.positive(step_size=values["step_size"])
    check.non_negative(momentum=values["momentum"], weight_decay=values["weight_decay"])
    for name in ("participation_rate", "width_moderate", "width_weak"):
        if values[name] is not None and not 0 < values[name] <= 1:
            raise ArgumentError(name, "must lie in (0, 1]", f"got {values[name]}", "Pass a share, 0.25 for instance.")
    for target in values["target_accuracy"] or ():
        if not 0 < target <= 1:
            raise ArgumentError("target_accuracy", "must lie in (0, 1]", f"got {target}", "Pass a share, 0.8 not 80.")
    for case in values["cases"] or ():
        check.one_of(tuple(paper.CASES), cases=case)
    for seed in values["seeds"]:
        if not 0 <= seed < 2**32:  # a larger seed would lose its upper bits
            raise ArgumentError("seeds", "must lie in [0, 2^32)", f"got {seed}", "Pass e.g. 0 1 2.")
    listed = values["decay_rounds"]
    if list(listed) != sorted(set(listed)) or any(not 0 < number < values["rounds"] for number in listed):
        requirement = f"must be ascending and above 0, below the {values['rounds']} rounds"
        raise ArgumentError("decay_rounds", requirement, f"got {list(listed)}", "Leave it out, or change the rounds.")


def _check_together(values: dict[str, Any]) -> None:
    """Options that exclude or need each other."""
    counts = [name for name in CLASSES if values[name] is not None]
    if values["cases"] is not None and counts:
        found = f"got --{counts[0]} beside them"
        raise ArgumentError("cases", "must be left out where clients are counted", found, "Leave one of the two out.")
    if values["num_active"] is not None and values["participation_rate"] is not None:
        found = f"got {values['participation_rate']} beside --num-active {values['num_active']}"
        raise ArgumentError("participation_rate", "must be left out with a number", found, "Leave one of the two out.")
    if values["partition"] not in ("dirichlet", "iid", "writers"):
        found = f"got {values['partition']!r}"
        raise ArgumentError("partition", "must be dirichlet, iid or writers", found, "Choose one of these.")
    if values["partition"] == "writers" and values["num_train"] is not None:
        found = f"got {values['num_train']}"
        remedy = "Leave it out, or take fewer nodes."
        raise ArgumentError("num_train", "must be left out where whole writers are dealt", found, remedy)
    if values["model"] == "femnist_cnn" and len(values["hidden"]) != 1:
        found = f"got {len(values['hidden'])}"
        raise ArgumentError("hidden", "must be one number for femnist_cnn", found, "Pass 2048, for instance.")
    if values["width_weak"] > values["width_moderate"]:
        found = f"got {values['width_weak']} beside {values['width_moderate']}"
        raise ArgumentError("width_weak", "must not exceed the moderate clients' width", found, "Exchange the two.")
    if "static" in (values["batch_norm"] or ()):
        if "first_half" in values["method"]:
            found = "got static for first_half, whose last blocks evaluate"
            raise ArgumentError("batch_norm", "must have statistics where blocks evaluate", found, "Pass global.")
        if values["frozen_batch_norm"] == "running":
            found = "got running with static"
            raise ArgumentError("frozen_batch_norm", "must be batch without running statistics", found, "Pass batch.")
