"""D-PSGD, DP2-SGD and A(DP)2SGD as loops over nodes or events in float64."""

from reference.network import add, zeros_like


def d_psgd(x0, mixing_matrices, gradients, step_size, rounds, momentum=0.0, mixings=1):
    """Algorithm 1 of arXiv:1705.09056; with noise and one symmetric matrix it is DP2-SGD.

    Runs the iterations; arguments as for `reference.push_sum.push_sum`. Returns the nodes' x.
    """
    n = len(x0)
    x, v = list(x0), [zeros_like(one) for one in x0]
    for k, (entries, noise) in enumerate(rounds):
        mixture = x
        for place in range(mixings * k, mixings * (k + 1)):
            matrix, old, mixture = mixing_matrices[place % len(mixing_matrices)], mixture, []
            for i in range(n):
                total = zeros_like(x[i])
                for j in range(n):
                    total = add(total, matrix[i, j], old[j])
                mixture.append(total)
        new = []
        for i in range(n):
            g = gradients[i](x[i], entries[i])
            if noise is not None:
                g = add(g, 1.0, noise[i])
            v[i] = add(g, momentum, v[i])
            new.append(add(mixture[i], -step_size, v[i]))
        x = new
    return x


def a_dp2_sgd(x0, gradients, step_size, events):
    """AD-PSGD, Algorithm 1 of arXiv:1710.06952, with the noise of A(DP)2SGD and pairwise averaging.

    Args:
        x0: list of n parameter dicts, float64.
        gradients: list of n callables (x, entries) -> gradient, with the loss and the norm of the last call.
        step_size: gamma.
        events: list of (waking node, neighbor, delay, entries, noise), in the order in which they happen.

    Returns:
        (x, seen): the nodes' x after all events, and of each event a dict of "loss", "norm" and the "noisy" gradient.
    """
    history, seen = [list(x0)], []  # history[t]: everybody's parameters before event t
    for t, (node, neighbor, delay, entries, noise) in enumerate(events):
        now, then = history[t], history[max(t - delay, 0)]
        noisy = add(gradients[node](then[node], entries), 1.0, noise)
        seen.append({"loss": gradients[node].loss, "norm": gradients[node].norm, "noisy": noisy})
        average = add(add(zeros_like(now[node]), 0.5, now[node]), 0.5, now[neighbor])
        after = list(now)
        after[neighbor] = average
        after[node] = add(average, -step_size, noisy)
        history.append(after)
    return history[-1], seen
