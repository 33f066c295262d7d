"""Options of experiments.dp_gradient_tracking, and the variants that they ask for."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from experiments.problem import check_resnet_widths
from jaxfl.core import ArgumentError, check

Method = Literal[
    "DP-GT", "noisy-states", "noisy-quantized-states", "ternary-states", "quantized-states", "noisy-outputs"
]
Scheme = Literal["S1", "S2"]
Point = Literal["broadcast", "state"]


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
    shrink: int = 1
    """Average images over blocks of so many pixels a side."""
    methods: tuple[Method, ...] = ("DP-GT",)
    """DP-GT is gradient tracking. The others are distributed SGD on an undirected graph with the noise and the steps of
    the scheme, by the paper's reference numbers: noisy-states [46], noisy-quantized-states [47], ternary-states [41]
    and quantized-states [42] (quantization the only privacy source), noisy-outputs [38]."""
    scheme: tuple[Scheme, ...] = ("S1", "S2")
    """S1: steps that fall and noise that grows as powers of K and k; S2: constant steps, noise that falls as p^K."""
    noise_exponent: tuple[float, ...] = (0.09,)
    """Of S1: agent i of n gets noise scales (k + 1)^p with p this number plus 0.05 i / n."""
    noise_base: tuple[float, ...] = (0.99959,)
    """Of S2: agent i of n gets noise scales p^K with p this number plus 0.00005 i / n."""
    noise_gain: tuple[float, ...] | None = None
    """Factor on all noise scales; 1 is the paper's noise, at which a network learns nothing (digits: 0.003, others:
    0.01)."""
    gradient_at: tuple[Point, ...] = ("broadcast",)
    """Where gradients are taken: at the broadcast state, which has a proven epsilon, or at the agent's own state, as
    published, which has none."""
    graph: tuple[str, ...] = ("five_agents",)
    """Of DP-GT: five_agents, five_agents_self_loops, or both directed graphs alike: directed_ring, exponential (its
    rounds averaged), ring, complete, star; or a .npy file with the weights R and C, shape (2, n, n), entry (i, j) that
    of j at i."""
    nodes: int | None = None
    """Agents n (the named five agents, and without DP-GT: 5; other graphs need it)."""
    baseline_graph: str = "ring"
    """Of the other methods: ring, complete or star."""
    iterations: int | None = None
    """K, which fixes steps and samples of the schemes (digits: 400, others: 2000)."""
    state_mixing: float | None = None
    """alpha_K in place of the scheme's, for all of them."""
    tracker_mixing: float | None = None
    """beta_K in place of the scheme's."""
    step_size: float | None = None
    """gamma_K in place of the scheme's."""
    num_samples: int | None = None
    """m_K, samples of each gradient, in place of the scheme's (digits: 32)."""
    distribution: Literal["laplace", "gaussian"] = "laplace"
    """Of the noise. Gaussian noise has the scales as standard deviations, clipping in L2 norm, and a delta."""
    clip_norm: float | None = None
    """Bound on each sample's gradient, in L1 norm with Laplace noise, in L2 norm with Gaussian noise; C of the paper is
    twice as much (digits: 10, others: 20, with Gaussian noise 1)."""
    assume_bounded: bool = False
    """Do not clip: clip_norm is only assumed to bound the gradients. Nothing is proven then."""
    ternary_threshold: float = 1.0
    """Of ternary-states: what is sent is -1, 0 or 1 times this."""
    quantization_step: float = 0.1
    """Of noisy-quantized-states and quantized-states: distance of the values that are sent."""
    partition: str = "iid"
    """iid, dirichlet or shards."""
    alpha: float | None = None
    """Concentration of the dirichlet partition, which needs it."""
    shards_per_node: int | None = None
    """Shards a node of the shards partition, which needs it."""
    model: Literal["mlp", "cnn", "resnet18"] | None = None
    """Multilayer perceptron, small convolutional network without hidden dense layer, or ResNet-18 with group norm
    (digits: mlp, others: cnn)."""
    hidden: tuple[int, ...] | None = None
    """Units of the hidden layers of the mlp (none: multinomial regression)."""
    channels: tuple[int, ...] | None = None
    """Channels of the convolutions of the cnn (4 8)."""
    window: int | None = None
    """Height and width of the cnn's kernels (3)."""
    resnet_widths: tuple[int, ...] | None = None
    """Channels of the stages of resnet18 (64 128 256 512), each at most 32 or a multiple of it."""
    node_loop: str = "auto"
    """How a round runs over nodes: vmap (all at once), map (one after the other), chunk:k (k at once), or auto: map for
    convolutions on a CPU, else vmap. Fewer at once take less memory. devices:map and the like share the nodes out over
    devices (JAX_NUM_CPU_DEVICES). Results agree to rounding."""
    dp_delta: float = 1e-5
    """Delta of the bound that counts a sample's participations, and of Gaussian noise."""
    smoothness: float | None = None
    """L of the theorems' conditions; None estimates it by a probing run on training data (no epsilon covers it)."""
    gradient_dominance: float = 0.0
    """mu of the Polyak-Lojasiewicz inequality, for the conditions of S2; 0 where it is not assumed."""
    strict: bool = False
    """Refuse a configuration that breaks a condition of the theorems; otherwise it is reported before the run."""
    seeds: tuple[int, ...] | None = None
    """One run each (digits: 0 1 2, others: 0)."""
    evaluate_every: int | None = None
    """Iterations between evaluations; default a twentieth of all."""
    train_samples: int = 1000
    """Training samples of each agent on which an evaluation measures the average model."""
    checkpoint_every: int = 10
    """Evaluations between checkpoints."""
    out: str | None = None
    """The run directory itself; default runs/dp_gradient_tracking/NAME."""
    resume: bool = False
    """Go on with an interrupted run."""
    quiet: bool = False
    """No progress."""


@dataclasses.dataclass(frozen=True)
class Resolved(Config):
    """The options after `resolve`, which gives each of these a value: the empty ones here are never used."""

    nodes: int = 0
    noise_gain: tuple[float, ...] = ()
    iterations: int = 0
    clip_norm: float = 0.0
    model: Literal["mlp", "cnn", "resnet18"] = "mlp"
    hidden: tuple[int, ...] = ()
    channels: tuple[int, ...] = ()
    window: int = 0
    resnet_widths: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    evaluate_every: int = 0


class Variant(NamedTuple):
    """The settings of one variant."""

    method: Method
    scheme: Scheme
    noise: float  # p of the scheme, before what is added for each agent
    noise_gain: float
    gradient_at: Point
    graph: str


DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {
        "iterations": 400,
        "num_samples": 32,
        "noise_gain": (0.003,),
        "clip_norm": 10.0,
        "model": "mlp",
        "seeds": (0, 1, 2),
    },
    "other": {"iterations": 2000, "noise_gain": (0.01,), "clip_norm": 20.0, "model": "cnn", "seeds": (0,)},
}
MODEL_DEFAULTS: dict[str, Any] = {
    "hidden": (),
    "channels": (4, 8),
    "window": 3,
    "resnet_widths": (64, 128, 256, 512),
}
METHODS: tuple[str, ...] = get_args(Method)
QUANTIZED = ("ternary-states", "quantized-states")  # without noise
_NOISY = tuple(method for method in METHODS if method not in QUANTIZED)
_PERTURBING_STATES = tuple(method for method in METHODS if method != "noisy-outputs")
# Option -> for each option that decides whether it counts the values with which it does.
OWNED: dict[str, dict[str, tuple[str, ...]]] = {
    "hidden": {"model": ("mlp",)},
    "channels": {"model": ("cnn",)},
    "window": {"model": ("cnn",)},
    "resnet_widths": {"model": ("resnet18",)},
    "noise_exponent": {"scheme": ("S1",), "methods": _NOISY},
    "noise_base": {"scheme": ("S2",), "methods": _NOISY},
    "noise_gain": {"methods": _NOISY},
    "gradient_at": {"methods": _PERTURBING_STATES},
    "graph": {"methods": ("DP-GT",)},
    "baseline_graph": {"methods": METHODS[1:]},
    "state_mixing": {"methods": _PERTURBING_STATES},
    "tracker_mixing": {"methods": ("DP-GT",)},
    "ternary_threshold": {"methods": ("ternary-states",)},
    "quantization_step": {"methods": ("noisy-quantized-states", "quantized-states")},
    "smoothness": {"methods": ("DP-GT",)},
    "gradient_dominance": {"methods": ("DP-GT",), "scheme": ("S2",)},
    "strict": {"methods": ("DP-GT",)},
}
NAMED_PAIRS = ("five_agents", "five_agents_self_loops")


def resolve(config: Config, defaults: Config | None = None) -> Resolved:
    """The configuration with the data set's defaults filled in.

    Args:
        config: the options.
        defaults: those of the preset, if there is one. What differs from it was asked for, and has to count.

    Raises:
        ArgumentError: a value out of range, or options that do not go together.
    """
    values = dataclasses.asdict(config)
    unasked = dataclasses.asdict(defaults or Config())
    given = [name for name, value in values.items() if value != unasked[name]]
    of_dataset = dict(DEFAULTS[config.dataset if config.dataset in DEFAULTS else "other"])
    if config.distribution == "gaussian":
        of_dataset["clip_norm"] = 1.0
    for name, default in {**of_dataset, **MODEL_DEFAULTS}.items():
        if values[name] is None:
            values[name] = default
    for name in ("methods", "scheme", "noise_exponent", "noise_base", "noise_gain", "gradient_at", "graph", "seeds"):
        listed = values[name]
        if not listed or len(set(listed)) != len(listed):
            raise ArgumentError(name, "must be distinct and at least one", f"got {list(listed)}", "List each once.")
    _refuse_idle(values, given)
    _fill_nodes(values)
    check.at_least(1, iterations=values["iterations"], checkpoint_every=values["checkpoint_every"])
    if values["evaluate_every"] is None:
        values["evaluate_every"] = max(1, values["iterations"] // 20)
    for name in ("num_train", "num_test", "num_samples", "evaluate_every", "train_samples"):
        if values[name] is not None:
            check.at_least(1, **{name: values[name]})
    for name in ("state_mixing", "tracker_mixing", "step_size", "smoothness"):
        if values[name] is not None:
            check.positive(**{name: values[name]})
    for name in ("noise_base", "clip_norm", "ternary_threshold", "quantization_step"):
        check.positive(**{name: values[name]})
    check.non_negative(noise_gain=values["noise_gain"], gradient_dominance=values["gradient_dominance"])
    check.open_unit(dp_delta=values["dp_delta"])
    for name in ("noise_exponent", "noise_base", "noise_gain"):
        shown = [f"{value:g}" for value in values[name]]
        if not np.isfinite(values[name]).all() or len(set(shown)) != len(shown):
            requirement = "must be finite, and distinct in the six digits that name variants"
            raise ArgumentError(name, requirement, f"got {list(values[name])}", "Pass numbers further apart.")
    check.at_least(1, window=values["window"])
    for units in values["channels"]:
        check.at_least(1, channels=units)
    check_resnet_widths(values["resnet_widths"])
    for seed in values["seeds"]:
        if not 0 <= seed < 2**32:  # a larger seed would lose its upper bits
            raise ArgumentError("seeds", "must lie in [0, 2^32)", f"got {seed}", "Pass e.g. 0 1 2.")
    if config.distribution == "gaussian" and set(QUANTIZED) & set(config.methods):
        remedy = "Leave these methods out, or take Laplace noise."
        raise ArgumentError("distribution", "must be laplace: theirs is an L1 argument", "got gaussian", remedy)
    return Resolved(**values)


def _refuse_idle(values: dict[str, Any], given: Sequence[str]) -> None:
    """Refuse options that were given and would change nothing."""
    needed = {name: OWNED[name] for name in given if name in OWNED}
    if "dp_delta" in given and values["distribution"] == "laplace":
        needed["dp_delta"] = {"methods": ("DP-GT",)}
    for name, owners in needed.items():
        for option, choices in owners.items():
            chosen = (values[option],) if option == "model" else values[option]
            if not set(choices) & set(chosen):
                shown = " ".join(map(str, values[name])) if isinstance(values[name], tuple) else values[name]
                remedy = f"Leave it out, or pass --{option} {choices[0]}."
                found = f"got {shown} without it"
                raise ArgumentError(name, f"belongs to {', '.join(choices)}", found, remedy)


def _fill_nodes(values: dict[str, Any]) -> None:
    """Five agents for the named pairs, and where there is no DP-GT; a number for all other graphs."""
    tracking = "DP-GT" in values["methods"]
    named = [graph for graph in values["graph"] if tracking and graph in NAMED_PAIRS]
    if values["nodes"] is None:
        if tracking and not named:
            raise ArgumentError("nodes", "must be given for this graph", "got none", "Pass --nodes 8, for instance.")
        values["nodes"] = 5
    check.at_least(2, nodes=values["nodes"])
    if named and values["nodes"] != 5:
        raise ArgumentError("nodes", f"must be 5 for {named[0]}", f"got {values['nodes']}", "Leave it out.")


def plan(config: Resolved) -> dict[str, Variant]:
    """Name -> settings of every variant.

    A method other than DP-GT has no directed graph, and one that sends quantized states alone has no noise; what it
    does not have makes no further variants of it.
    """
    variants: dict[str, Variant] = {}
    several = {name: len(getattr(config, name)) > 1 for name in ("scheme", "noise_gain", "gradient_at", "graph")}
    for method, scheme, gradient_at in itertools.product(config.methods, config.scheme, config.gradient_at):
        levels = config.noise_exponent if scheme == "S1" else config.noise_base
        noisy = method not in QUANTIZED
        for noise, gain, graph in itertools.product(
            levels if noisy else levels[:1],
            config.noise_gain if noisy else (0.0,),
            config.graph if method == "DP-GT" else (config.baseline_graph,),
        ):
            parts = [
                method,
                scheme if several["scheme"] else "",
                f"p = {noise:g}" if noisy and len(levels) > 1 else "",
                f"noise x {gain:g}" if noisy and several["noise_gain"] else "",
                f"gradient at {gradient_at}" if several["gradient_at"] and method != "noisy-outputs" else "",
                graph if method == "DP-GT" and several["graph"] else "",
            ]
            name = ", ".join(part for part in parts if part)
            # Only noisy-outputs comes by one name twice: it takes its gradients at a state that everyone knows.
            variants.setdefault(name, Variant(method, scheme, noise, gain, gradient_at, graph))
    return variants
