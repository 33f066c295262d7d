"""Gossip over perturbed and quantised states as a loop over nodes in float64, from the comparison's lines."""

import numpy as np
from reference.network import add, zeros_like


def round_uniform(value, uniform, step, levels):
    """Stochastic rounding of one number to k * step, k in two's complement."""
    lowest, highest = -(levels // 2), levels - levels // 2 - 1
    k = int(np.floor(value / step))
    if uniform < value / step - k:
        k += 1
    return step * min(max(k, lowest), highest)


def round_ternary(value, uniform, threshold):
    """-threshold, 0 or threshold; NaN, the noise behind a schedule's end, stays."""
    if np.isnan(value):
        return value
    if uniform * threshold >= abs(value):
        return 0.0
    return threshold if value > 0 else -threshold


def perturbed_gossip(x0, matrix, gradients, steps, first, rounds, quantize, gradient_at, mixings=1):
    """Runs the iterations.

    Args:
        x0: list of n parameter dicts, float64.
        matrix: a, (n, n).
        gradients: list of n callables (x, entries) -> gradient.
        steps: (alpha, gamma).
        first: (zeta of each node, uniform numbers of each node) of iteration 0.
        rounds: list of (entries of each node for g_k, zeta_{k+1} of each node, uniform numbers_{k+1} of each node).
        quantize: (number, uniform number) -> number; None sends what it is given.
        gradient_at: "state" or "broadcast".
        mixings: M, exchanges of an iteration; those behind the first pass on mixtures of what was broadcast.

    Returns:
        (x, broadcast x): lists over nodes after all rounds.
    """
    alpha, gamma = steps
    n, x = len(x0), list(x0)

    def perturb(zeta, uniform):
        sent = [add(x[i], 1.0, zeta[i]) for i in range(n)]
        if quantize is None:
            return sent
        return [
            {
                name: {part: np.vectorize(quantize)(value, uniform[i][name][part]) for part, value in layer.items()}
                for name, layer in sent[i].items()
            }
            for i in range(n)
        ]

    x_sent = perturb(*first)
    for entries, *coming in rounds:
        new_x, mixture = [], x_sent
        for _ in range(mixings):
            old, mixture = mixture, []
            for i in range(n):
                received = zeros_like(x[i])
                for j in range(n):
                    received = add(received, matrix[i, j], old[j])
                mixture.append(received)
        for i in range(n):
            g = gradients[i](x[i] if gradient_at == "state" else x_sent[i], entries[i])
            kept = add(zeros_like(x[i]), 1.0 - alpha, x[i])
            new_x.append(add(add(kept, alpha, mixture[i]), -gamma, g))
        x = new_x
        x_sent = perturb(*coming)
    return x, x_sent
