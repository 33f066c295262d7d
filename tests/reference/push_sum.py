"""PrivSGP and PrivSGP-VR, Algorithms 1 and 2 of arXiv:2405.02638, as a loop over nodes in float64."""

import numpy as np
from reference.network import add, zeros_like


def push_sum(x0, mixing_matrices, gradients, step_size, rounds, momentum=0.0):
    """Runs the iterations.

    Args:
        x0: list of n parameter dicts, float64.
        mixing_matrices: (period, n, n).
        gradients: list of n callables (z, entries) -> gradient.
        step_size: gamma.
        rounds: list of K pairs (entries of each node, noise of each node or None).
        momentum: beta; a node steps along v, v <- beta v + noisy gradient.

    Returns:
        (x, w, z): lists over nodes after K iterations.
    """
    n = len(x0)
    x, w, z, v = list(x0), [1.0] * n, list(x0), [zeros_like(one) for one in x0]
    for k, (entries, noise) in enumerate(rounds):
        matrix = mixing_matrices[k % len(mixing_matrices)]
        half = []
        for i in range(n):
            g = gradients[i](z[i], entries[i])
            if noise is not None:
                g = add(g, 1.0, noise[i])
            v[i] = add(g, momentum, v[i])
            half.append(add(x[i], -step_size, v[i]))
        new_x, new_w = [], []
        for i in range(n):
            total, weight = zeros_like(x[i]), 0.0
            for j in range(n):
                total = add(total, matrix[i, j], half[j])
                weight += matrix[i, j] * w[j]
            new_x.append(total)
            new_w.append(weight)
        x, w = new_x, new_w
        z = [add(zeros_like(x[i]), 1.0 / w[i], x[i]) for i in range(n)]
    return x, np.array(w), z
