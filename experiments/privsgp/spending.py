"""What a variant of experiments.privsgp_vr spends: noise for a budget, rounds for a noise, statements for a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.privsgp.build import samples_per_batch
from experiments.privsgp.config import Resolved, Variant, step_size_of
from jaxfl.core import ArgumentError
from jaxfl.privacy.accounting import Release, calibrate_noise_std, epsilon, max_rounds, statements
from jaxfl.privacy.published import ProblemConstants, optimal_iterations


def release_of(config: Resolved, variant: Variant, num_samples: int, *, assumed: bool = False) -> Release:
    """What a node with so many samples releases in every round.

    Args:
        config: the options.
        variant: its settings.
        num_samples: J of the node.
        assumed: take `gradient_bound` for the bound on unclipped gradients, as the paper's formula does.
    """
    bound = config.gradient_bound if assumed and config.clip_norm is None else config.clip_norm
    if variant.method == "PrivSGP-VR" and config.table == "per_batch":
        entries = -(-num_samples // (config.entry_size or 1))
        per_entry = None if bound is None else bound * entries / num_samples  # a sample's share of its entry
        batch_size, estimator = variant.batch_size, "saga"
    else:
        entries, per_entry, batch_size = num_samples, bound, samples_per_batch(config, variant)
        estimator = "saga" if variant.method == "PrivSGP-VR" else "mini_batch"
    return Release(
        estimator=estimator,
        sampler=config.sampler,
        batch_size=batch_size,
        num_entries=entries,
        clip_norm=per_entry,
        noise_std=variant.noise_std or 0.0,
        entry_size=(config.entry_size or 1) if estimator == "saga" else 1,
        storage=config.storage,
        assumed=assumed and config.clip_norm is None,
    )


def settle(
    config: Resolved,
    variants: dict[str, Variant],
    sizes: Mapping[int, Sequence[int]],
    constants: Callable[[int], ProblemConstants],
) -> dict[str, Variant]:
    """The variants with iterations, step size and noise known.

    Args:
        config: the options.
        variants: from `plan`.
        sizes: nodes -> samples of every node, over all seeds.
        constants: nodes -> the problem's constants; called for `--iterations auto` only.

    Raises:
        ArgumentError: a budget that no noise meets, or that does not pay for one round.
    """
    settled = {}
    for name, variant in variants.items():
        if not variant.iterations:
            assert variant.target_epsilon is not None  # `resolve` has seen to it
            found = optimal_iterations(
                constants(variant.nodes),
                dp_epsilon=variant.target_epsilon,
                dp_delta=config.dp_delta,
                c2=config.c2,
                num_nodes=variant.nodes,
            )
            variant = variant._replace(iterations=max(1, round(found)))
            step_size = step_size_of(config, variant.nodes, variant.batch_size, variant.iterations)
            variant = variant._replace(step_size=step_size)
        settled[name] = variant
    noise = {name: _noise(config, variant, sizes[variant.nodes]) for name, variant in settled.items()}
    if config.shared_noise:
        others = {
            name: [noise[other] for other, v in settled.items() if v._replace(method=variant.method) == variant]
            for name, variant in settled.items()
        }
        noise = {name: max(values) for name, values in others.items()}
    return {name: variant._replace(noise_std=noise[name]) for name, variant in settled.items()}


def _noise(config: Resolved, variant: Variant, sizes: Sequence[int]) -> float:
    """The noise that was asked for, or the least that meets the budget at every node."""
    if variant.noise_std is not None:
        return variant.noise_std
    assert variant.target_epsilon is not None
    options = _options(config, variant)
    noise = 0.0
    for size in sorted(set(sizes)):  # the smallest node mostly needs most; with a per_batch table another one may
        release = release_of(config, variant._replace(noise_std=noise), size, assumed=variant.bound == "published")
        if (
            noise == 0
            or epsilon(variant.method, variant.bound, release, variant.iterations, **options) > variant.target_epsilon
        ):
            found = calibrate_noise_std(
                variant.method,
                variant.bound,
                release,
                variant.iterations,
                target_epsilon=variant.target_epsilon,
                **options,
            )
            noise = max(noise, found)
    return noise


def _options(config: Resolved, variant: Variant) -> dict[str, Any]:
    """What every call of the accountant needs."""
    return {"dp_delta": config.dp_delta, "c2": config.c2, "num_nodes": variant.nodes}


def rounds_allowed(
    config: Resolved, variants: dict[str, Variant], sizes: Mapping[int, Sequence[int]]
) -> dict[str, int]:
    """Variant -> most rounds that its budget pays for at every node, where both noise and budget are given.

    Raises:
        ArgumentError: a budget that does not pay for one round.
    """
    if config.noise_std is None or config.target_epsilon is None:
        return {}
    allowed = {}
    for name, variant in variants.items():
        assert variant.target_epsilon is not None
        rounds, options = variant.iterations, _options(config, variant)
        for size in sorted(set(sizes[variant.nodes])):
            release = release_of(config, variant, size, assumed=variant.bound == "published")
            if epsilon(variant.method, variant.bound, release, rounds, **options) <= variant.target_epsilon:
                continue
            rounds = max_rounds(
                variant.method,
                variant.bound,
                release,
                target_epsilon=variant.target_epsilon,
                limit=rounds,
                **options,
            )
            if rounds < 1:
                first = epsilon(variant.method, variant.bound, release, 1, **options)
                cost = f"costs {first:.3g}" if math.isfinite(first) else "has no such bound"
                requirement = f"must pay for one round of {name} ({variant.bound} bound)"
                raise ArgumentError("target_epsilon", requirement, f"one round {cost}", "Pass more, or add more noise.")
        allowed[name] = rounds
    return allowed


def privacy_of(config: Resolved, variant: Variant, sizes: Sequence[int]) -> Callable[[int], list[dict[str, Any]]]:
    """Function from the rounds that really ran to the statements of summary.json.

    Args:
        config: the options.
        variant: settled.
        sizes: samples of every node; of several seeds with different partitions, of each seed's nodes.
    """

    def stated(rounds: int) -> list[dict[str, Any]]:
        assumed = config.clip_norm is None and config.gradient_bound is not None
        releases = [release_of(config, variant, size, assumed=assumed) for size in sizes]
        found = statements(variant.method, releases, rounds, **_options(config, variant))
        return [statement._asdict() for statement in found]

    return stated
