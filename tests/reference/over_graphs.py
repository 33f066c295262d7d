"""Methods over a graph in the lines of their papers, float64: all nodes at once, x of shape (n, d).

`g(k, x)` gives the noisy gradients of all nodes in round k at x, (n, d); W(k) is the mixing matrix of round k.
"""

import numpy as np


def d_sgdm(x, W, g, gamma, rounds, momentum, mixes_momentum=False):
    """D-SGDm; with `mixes_momentum` as in its paper."""
    m = np.zeros_like(x)
    for k in range(rounds):
        m = momentum * m + g(k, x)
        x = W(k) @ (x - gamma * m)
        m = W(k) @ m if mixes_momentum else m
    return x


def qg_dsgdm(x, W, g, gamma, rounds, momentum, memory_decay):
    """Algorithm 1 of arXiv:2102.04761."""
    q = np.zeros_like(x)
    for k in range(rounds):
        new = W(k) @ (x - gamma * (momentum * q + g(k, x)))
        q = memory_decay * q + (1 - memory_decay) * (x - new) / gamma
        x = new
    return x
