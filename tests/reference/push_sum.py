"""PrivSGP and PrivSGP-VR, Algorithms 1 and 2 of arXiv:2405.02638, as a loop over nodes in float64."""

import numpy as np
from reference.network import add, zeros_like


def push_sum(x0, mixing_matrices, gradients, step_size, rounds, momentum=0.0, mixings=1):
    """Runs the iterations.

    Args:
        x0: list of n parameter dicts, float64.
        mixing_matrices: (period, n, n).
        gradients: list of n callables (z, entries) -> gradient.
        step_size: gamma.
        rounds: list of K pairs (entries of each node, noise of each node or None).
        momentum: beta; a node steps along v, v <- beta v + noisy gradient.
        mixings: M, exchanges of an iteration.

    Returns:
        (x, w, z): lists over nodes after K iterations.
    """
    n = len(x0)
    x, w, z, v = list(x0), [1.0] * n, list(x0), [zeros_like(one) for one in x0]
    for k, (entries, noise) in enumerate(rounds):
        half = []
        for i in range(n):
            g = gradients[i](z[i], entries[i])
            if noise is not None:
                g = add(g, 1.0, noise[i])
            v[i] = add(g, momentum, v[i])
            half.append(add(x[i], -step_size, v[i]))
        x = half
        for place in range(mixings * k, mixings * (k + 1)):
            matrix, new_x, new_w = mixing_matrices[place % len(mixing_matrices)], [], []
            for i in range(n):
                total, weight = zeros_like(x[i]), 0.0
                for j in range(n):
                    total = add(total, matrix[i, j], x[j])
                    weight += matrix[i, j] * w[j]
                new_x.append(total)
                new_w.append(weight)
            x, w = new_x, new_w
        z = [add(zeros_like(x[i]), 1.0 / w[i], x[i]) for i in range(n)]
    return x, np.array(w), z
