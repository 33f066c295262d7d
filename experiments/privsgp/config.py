"""Options of experiments.privsgp_vr, and the variants that they ask for."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal, NamedTuple

from experiments.problem import check_resnet_widths
from jaxfl.algorithms import theory_step_size
from jaxfl.core import ArgumentError, check
from jaxfl.privacy.accounting import C2_OF_THE_PAPER

Method = Literal["PrivSGP-VR", "PrivSGP", "DP2-SGD", "A(DP)2SGD"]
Bound = Literal["proven", "published"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Options; None stands for the default of the data set. Where several values are given, all are compared."""

    dataset: str = "digits"
    """digits, mnist, fashion_mnist or cifar10."""
    data_dir: str | None = None
    """Folder with the data set's files as their authors publish them."""
    num_train: int | None = None
    """Use only so many training samples, drawn at random."""
    num_test: int | None = None
    """Use only so many test samples, drawn at random."""
    methods: tuple[Method, ...] = ("PrivSGP-VR", "PrivSGP")
    """What is compared."""
    nodes: tuple[int, ...] | None = None
    """Nodes n (digits: 16, others: 50)."""
    graph: str = "exponential"
    """exponential, directed_ring, ring, complete, star, random (a random strongly connected digraph), or a .npy file
    with a column-stochastic mixing matrix of shape (n, n), or (period, n, n) for a time-varying graph; entry (i, j) is
    the share of j's value that i receives. DP2-SGD and A(DP)2SGD need an undirected one."""
    edge_probability: float | None = None
    """Of the random graph, and of no other (random: 0.2)."""
    max_delay: int | None = None
    """Of A(DP)2SGD: a gradient is taken at parameters up to so many events old (16)."""
    partition: str = "iid"
    """iid, dirichlet or shards."""
    alpha: float | None = None
    """Concentration of the dirichlet partition, which needs it."""
    shards_per_node: int | None = None
    """Shards a node of the shards partition, which needs it."""
    model: Literal["mlp", "cnn", "resnet18"] = "mlp"
    """Multilayer perceptron, small convolutional network, or ResNet-18 with group norm."""
    hidden: tuple[int, ...] | None = None
    """Units of the hidden layers of the mlp (32)."""
    activation: Literal["relu", "tanh"] | None = None
    """Activation of the hidden layers of the mlp (relu)."""
    resnet_widths: tuple[int, ...] | None = None
    """Channels of the stages of resnet18 (64 128 256 512), each at most 32 or a multiple of it."""
    node_loop: str = "auto"
    """How a round runs over nodes: vmap (all at once), map (one after the other), chunk:k (k at once), or auto: map for
    convolutions on a CPU, else vmap. Fewer at once take less memory. devices:map and the like share the nodes out over
    devices (JAX_NUM_CPU_DEVICES). Results agree to rounding."""
    iterations: tuple[int, ...] | Literal["auto"] | None = None
    """Iterations K (digits: 400, others: 2000). auto takes the K that equation (12) of the paper calls optimal for each
    target_epsilon, from constants of the problem that a short probing run estimates (on training data, without noise:
    no epsilon covers it). With a network's real constants that K is often far too small to train."""
    step_size: tuple[float, ...] | Literal["theory"] | None = None
    """Step size gamma, one for each batch size or one for all; theory = sqrt(n / K) (digits: 0.1, tuned with the noise
    of its budget; others: 0.5 times the batch size to the power 0.6, tuned without noise)."""
    batch_size: tuple[int, ...] | None = None
    """Expected samples a node and iteration, or table entries with a per_batch table (digits: 0.45 of a node's
    samples, others: 1 and 32)."""
    sampler: str = "poisson"
    """poisson, fixed (without replacement) or uniform (with replacement)."""
    clip_norm: float | None = 2.0
    """Bound on each sample's gradient in the L2 norm; None leaves gradients as they are."""
    gradient_bound: float | None = None
    """Without clipping: the bound G on per-sample gradients that the paper assumes; for the published epsilon only."""
    noise_std: tuple[float, ...] | None = None
    """Standard deviation of the noise on the mean gradient (digits: from target_epsilon, others: 0)."""
    target_epsilon: tuple[float, ...] | None = None
    """Privacy budget of every node. Without noise_std the noise is calibrated to it; with noise_std the run stops when
    it is spent (digits: 8)."""
    dp_delta: float = 1e-5
    """Delta of every epsilon."""
    bound: tuple[Bound, ...] = ("proven",)
    """Which bound holds the target: proven, or published, which is each paper's own formula."""
    c2: float = C2_OF_THE_PAPER
    """Constant of equations (11) and (12), which the paper does not give."""
    shared_noise: bool = False
    """Give all methods the calibrated noise of the one that needs most (digits without noise or budget: always)."""
    pair: tuple[str, ...] = ()
    """Of the options nodes, iterations, batch_size, noise_std and target_epsilon: those that are not combined, but go
    together value by value."""
    table: str = "factored"
    """How PrivSGP-VR keeps its gradients: dense, factored or per_batch."""
    entry_size: int | None = None
    """Samples of one entry of a per_batch table."""
    storage: str = "float32"
    """float32 or bfloat16 gradient table."""
    refresh_every: int = 1000
    """Rounds between exact recomputations of the table's mean."""
    seeds: tuple[int, ...] | None = None
    """One run each (digits: 0 1 2, others: 0)."""
    evaluate_every: int | None = None
    """Iterations between evaluations; default a fortieth of all."""
    checkpoint_every: int = 10
    """Evaluations between checkpoints."""
    out: str | None = None
    """The run directory itself; default runs/privsgp_vr/NAME."""
    resume: bool = False
    """Go on with an interrupted run."""
    quiet: bool = False
    """No progress."""


@dataclasses.dataclass(frozen=True)
class Resolved(Config):
    """The options after `resolve`, which gives each of these a value: the empty ones here are never used."""

    nodes: tuple[int, ...] = ()
    max_delay: int = 0
    hidden: tuple[int, ...] = ()
    activation: Literal["relu", "tanh"] = "relu"
    resnet_widths: tuple[int, ...] = ()
    iterations: tuple[int, ...] | Literal["auto"] = ()
    batch_size: tuple[int, ...] = ()
    step_size: tuple[float, ...] | Literal["theory"] = ()
    seeds: tuple[int, ...] = ()


class Variant(NamedTuple):
    """The settings of one variant. iterations is 0 and step_size nan until they are known (`--iterations auto`)."""

    method: Method
    nodes: int
    batch_size: int
    iterations: int
    step_size: float
    noise_std: float | None  # None until it is calibrated
    target_epsilon: float | None
    bound: Bound


DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"nodes": (16,), "iterations": (400,), "seeds": (0, 1, 2)},
    "other": {"nodes": (50,), "iterations": (2000,), "batch_size": (1, 32), "seeds": (0,)},
}
NOISE_DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"target_epsilon": (8.0,), "shared_noise": True},
    "other": {"noise_std": (0.0,)},
}
# Option -> the model or method that it belongs to, and its value there.
OWNED: dict[str, tuple[str, str, Any]] = {
    "hidden": ("model", "mlp", (32,)),
    "activation": ("model", "mlp", "relu"),
    "resnet_widths": ("model", "resnet18", (64, 128, 256, 512)),
    "max_delay": ("methods", "A(DP)2SGD", 16),
}
AXES = ("batch_size", "nodes", "iterations", "noise_std", "target_epsilon", "bound")
_SUFFIX = {
    "batch_size": "batch {}",
    "nodes": "{} nodes",
    "iterations": "K = {}",
    "noise_std": "noise {:g}",
    "target_epsilon": "ε = {:g}",
    "bound": "{}",
}


def resolve(config: Config) -> Resolved:
    """The configuration with the data set's defaults filled in.

    Raises:
        ArgumentError: a value out of range, or options that do not go together.
    """
    values = dataclasses.asdict(config)
    kind = config.dataset if config.dataset in DEFAULTS else "other"
    defaults = dict(DEFAULTS[kind])
    if values["noise_std"] is None and values["target_epsilon"] is None:
        defaults |= NOISE_DEFAULTS[kind]
    for name, default in defaults.items():
        if values[name] is None or values[name] is False:
            values[name] = default
    _refuse_repeats("nodes", values["nodes"], distinct="nodes" not in config.pair)
    check.at_least(1, nodes=min(values["nodes"]))
    if values["batch_size"] is None:
        values["batch_size"] = (max(1, 646 // max(values["nodes"])),)
    for name in ("methods", "batch_size", "noise_std", "target_epsilon", "bound", "seeds", "iterations"):
        given = values[name]
        if given is not None and given != "auto":
            _refuse_repeats(name, given, distinct=name not in config.pair)
    check.at_least(1, batch_size=min(values["batch_size"]), checkpoint_every=values["checkpoint_every"])
    for name in ("evaluate_every", "num_train", "num_test"):
        if values[name] is not None:
            check.at_least(1, **{name: values[name]})
    if values["iterations"] == "auto":
        if values["target_epsilon"] is None:
            remedy = "Pass --target-epsilon, or a number of iterations."
            raise ArgumentError("iterations", "auto needs a privacy budget", "got no target_epsilon", remedy)
    else:
        check.at_least(1, iterations=min(values["iterations"]))
    for name in ("noise_std", "target_epsilon"):
        for value in values[name] or ():
            (check.non_negative if name == "noise_std" else check.positive)(**{name: value})
    check.open_unit(dp_delta=values["dp_delta"])
    check.positive(c2=values["c2"])
    if values["gradient_bound"] is not None:
        check.positive(gradient_bound=values["gradient_bound"])
        if values["clip_norm"] is not None:
            found = f"got clip_norm {values['clip_norm']}"
            remedy = "Leave it out: what is clipped is bounded by the clip norm."
            raise ArgumentError("gradient_bound", "belongs to unclipped gradients", found, remedy)
    for name, (option, owner, default) in OWNED.items():
        used = owner in values["methods"] if option == "methods" else values[option] == owner
        if values[name] is not None and not used:
            remedy = f"Leave it out, or pass --{option} {owner}."
            raise ArgumentError(name, f"belongs to {owner}", f"got {values[name]} without it", remedy)
        if values[name] is None:
            values[name] = default
    check.at_least(0, max_delay=values["max_delay"])
    check_resnet_widths(values["resnet_widths"])
    if values["graph"] == "random" and values["edge_probability"] is None:
        values["edge_probability"] = 0.2
    if values["noise_std"] is not None and values["shared_noise"]:
        remedy = "Leave it out: given noise is the same for all methods."
        raise ArgumentError("shared_noise", "belongs to noise that is calibrated", "got noise_std", remedy)
    if values["target_epsilon"] is None and len(values["bound"]) > 1:
        remedy = "Name one: each run states both bounds."
        raise ArgumentError("bound", "decides how a budget is held", "got no target_epsilon", remedy)
    values["step_size"] = _step_sizes(values)
    for seed in values["seeds"]:
        if not 0 <= seed < 2**32:  # a larger seed would lose its upper bits
            raise ArgumentError("seeds", "must lie in [0, 2^32)", f"got {seed}", "Pass e.g. 0 1 2.")
    resolved = Resolved(**values)
    plan(resolved)
    return resolved


def _refuse_repeats(name: str, values: tuple[Any, ...], *, distinct: bool) -> None:
    if not values or (distinct and len(set(values)) != len(values)):
        raise ArgumentError(name, "must be distinct and at least one", f"got {list(values)}", "List each once.")


def _step_sizes(values: dict[str, Any]) -> tuple[float, ...] | Literal["theory"]:
    """One step size for each batch size, or the word theory."""
    given, batches = values["step_size"], values["batch_size"]
    if given == "theory":
        return given
    if given is None:
        return tuple(0.1 if values["dataset"] == "digits" else round(0.5 * batch**0.6, 3) for batch in batches)
    if len(given) not in (1, len(batches)):
        found = f"got {len(given)} for {len(batches)} batch sizes"
        raise ArgumentError("step_size", "must be one number, or one for each batch size", found, "Pass as many.")
    if len(given) > 1 and len(set(batches)) < len(batches):
        found = f"got {' '.join(map(str, given))} for batch sizes {' '.join(map(str, batches))}"
        requirement = "must be one for all where batch sizes repeat"
        raise ArgumentError("step_size", requirement, found, "Pass one number.")
    return tuple(given) * (len(batches) // len(given))


def plan(config: Resolved) -> dict[str, Variant]:
    """Name -> settings of every variant: each method in each combination of values.

    Raises:
        ArgumentError: paired options with different numbers of values, or values that differ in no printed digit.
    """
    values: dict[str, tuple[Any, ...]] = {}
    for name in AXES:
        given = getattr(config, name)
        values[name] = (None,) if given is None or given == "auto" else tuple(given)
    paired = tuple(name for name in AXES if name in config.pair)
    for name in config.pair:
        if name not in AXES or name == "bound":
            known = ", ".join(axis for axis in AXES if axis != "bound")
            remedy = "Name two of them or more."
            raise ArgumentError("pair", f"must name options among {known}", f"got {name!r}", remedy)
        if len(values[name]) != len(values[paired[0]]):
            found = f"{paired[0]} has {len(values[paired[0]])}, {name} has {len(values[name])}"
            raise ArgumentError("pair", "must name options with equally many values", found, "Give each as many.")
    if len(paired) == 1:
        raise ArgumentError("pair", "must name at least two options", f"got {paired[0]}", "Name two, or leave it out.")
    # Every axis is a list of {option: value}; paired options share one.
    axes = [[{name: value} for value in values[name]] for name in AXES if name not in paired]
    if paired:
        rows = zip(*(values[name] for name in paired), strict=True)
        axes.append([dict(zip(paired, row, strict=True)) for row in rows])
    variants: dict[str, Variant] = {}
    for combination in itertools.product(*axes):
        chosen = {name: value for part in combination for name, value in part.items()}
        suffixes = [_SUFFIX[name].format(chosen[name]) for name in AXES if len(set(values[name])) > 1]
        for method in config.methods:
            name = ", ".join([method, *suffixes])
            if name in variants:
                argument = next(axis for axis in AXES if _alike(axis, values[axis]))
                found = f"got {' '.join(map(str, values[argument]))}"
                raise ArgumentError(argument, "must differ in six digits", found, "Compare values further apart.")
            variants[name] = Variant(
                method=method,
                nodes=chosen["nodes"],
                batch_size=chosen["batch_size"],
                iterations=chosen["iterations"] or 0,
                step_size=step_size_of(config, chosen["nodes"], chosen["batch_size"], chosen["iterations"] or 0),
                noise_std=chosen["noise_std"],
                target_epsilon=chosen["target_epsilon"],
                bound=chosen["bound"],
            )
    return variants


def _alike(axis: str, values: tuple[Any, ...]) -> bool:
    """Whether two values of an axis are printed alike."""
    return len({_SUFFIX[axis].format(value) for value in values if value is not None}) < len(values) > 1


def step_size_of(config: Resolved, nodes: int, batch_size: int, iterations: int) -> float:
    """The step size of one variant; nan for theory while the iterations are not known."""
    if config.step_size == "theory":
        return theory_step_size(nodes, iterations) if iterations else float("nan")
    return config.step_size[config.batch_size.index(batch_size)]
