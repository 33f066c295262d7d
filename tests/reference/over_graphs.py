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


def exact_diffusion(x, W, g, gamma, rounds, share, mixes_first=True):
    """arXiv:1702.05122 and Algorithm 1 of arXiv:1803.07068; NIDS (arXiv:1704.07807) does not mix in its first round."""
    V = (1 - share) * np.eye(len(x)) + share * W(0)
    old, slope = x, g(0, x)
    x = old - gamma * slope
    x = V @ x if mixes_first else x
    for k in range(1, rounds):
        new = g(k, x)
        old, x, slope = x, V @ (2 * x - old - gamma * new + gamma * slope), new
    return x


def extra(x, W, g, gamma, rounds):
    """Recursion (2.13) of arXiv:1404.6264 with (I + W) / 2."""
    half = (np.eye(len(x)) + W(0)) / 2
    old, slope = x, g(0, x)
    x = W(0) @ old - gamma * slope
    for k in range(1, rounds):
        new = g(k, x)
        old, x, slope = x, x + W(0) @ x - half @ old - gamma * (new - slope), new
    return x


def tracking(x, W, g, gamma, rounds, mixes_after=True):
    """DIGing (Algorithm 1 of arXiv:1607.03218), or with x mixed after its step."""
    slope = y = g(0, x)
    for k in range(rounds):
        x = W(k) @ (x - gamma * y) if mixes_after else W(k) @ x - gamma * y
        new = g(k + 1, x) if k + 1 < rounds else slope  # the last y is not used
        y, slope = W(k) @ y + new - slope, new
    return x


def aug_dgm(x, W, g, gamma, rounds):
    """Xu et al., CDC 2015: the change of the gradients is mixed, too."""
    slope = y = g(0, x)
    for k in range(rounds):
        x = W(k) @ (x - gamma * y)
        if k + 1 < rounds:
            new = g(k + 1, x)
            y, slope = W(k + 1) @ (y + new - slope), new
    return x


def gt_saga(x, W, g, gamma, rounds):
    """Algorithm 1 of arXiv:2011.03853, its gradients given."""
    y, slope = np.zeros_like(x), np.zeros_like(x)
    for k in range(rounds):
        new = g(k, x)
        y = W(k) @ (y + new - slope)
        x, slope = W(k) @ (x - gamma * y), new
    return x


def k_gt(x, W, g, gamma, rounds, num_steps, outer):
    """Algorithm 1 of arXiv:2301.01313 from c = 0; step t of round k takes g(k K + t)."""
    c = np.zeros_like(x)
    for k in range(rounds):
        v = x
        for t in range(num_steps):
            v = v - gamma * (g(k * num_steps + t, v) + c)
        z = (x - v) / (num_steps * gamma)
        c = c - z + W(k) @ z
        x = W(k) @ (x - num_steps * outer * gamma * z)
    return x


def choco_sgd(x, W, g, gamma, rounds, compress, zeta, order, drawn):
    """Algorithm 2 of arXiv:1902.00340, or the order of arXiv:1907.09356; `compress` (n, d) by what a round draws."""
    copy = np.zeros_like(x)
    for k in range(rounds):
        z = x - gamma * g(k, x)
        if order == "iclr":
            x = z + zeta * (W(k) @ copy - copy)
            copy = copy + compress(x - copy, drawn(k))
        else:
            copy = copy + compress(z - copy, drawn(k))
            x = z + zeta * (W(k) @ copy - copy)
    return x


def kept(values, scores, count):
    """The `count` numbers of each row (n, d) with the largest scores, the first of equal ones; others are 0."""
    ranks = np.argsort(np.argsort(-scores, axis=1, kind="stable"), axis=1)
    return np.where(ranks < count, values, 0)


def prox_skip(x, W, g, gamma, rounds, probability, drawn):
    """Algorithm 5 of arXiv:2202.09357 with V = (I + W) / 2; a round draws a number on [0, 1)."""
    V, h = (np.eye(len(x)) + W(0)) / 2, np.zeros_like(x)
    for k in range(rounds):
        z = x - gamma * (g(k, x) - h)
        x = V @ z if drawn(k) < probability else z
        h = h + probability / gamma * (x - z)
    return x
