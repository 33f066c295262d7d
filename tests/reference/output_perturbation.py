"""Weighted output perturbation as a loop over nodes in float64, from the comparison's lines."""

from reference.network import add, zeros_like


def output_perturbation(x0, adjacency, sizes, gradients, step_size, rounds):
    """Runs the iterations.

    Args:
        x0: list of n parameter dicts, float64.
        adjacency: (n, n) bool, who hears whom; whether it says so of a node and itself does not matter.
        sizes: D, samples of each node.
        gradients: list of n callables (x, entries) -> gradient.
        step_size: gamma.
        rounds: list of (entries of each node, zeta of each node).

    Returns:
        The nodes' x after all rounds.
    """
    n, x = len(x0), list(x0)
    for entries, zeta in rounds:
        sent = [add(add(x[j], -step_size, gradients[j](x[j], entries[j])), 1.0, zeta[j]) for j in range(n)]
        x = []
        for i in range(n):
            heard = [j for j in range(n) if j == i or adjacency[i, j]]
            total = sum(int(sizes[j]) for j in heard)
            average = zeros_like(sent[i])
            for j in heard:
                average = add(average, int(sizes[j]) / total, sent[j])
            x.append(average)
    return x
