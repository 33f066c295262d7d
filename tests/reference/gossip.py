"""D-PSGD, Algorithm 1 of arXiv:1705.09056, as a loop over nodes in float64."""

from reference.network import add, zeros_like


def d_psgd(x0, mixing_matrices, gradients, step_size, rounds):
    """Runs the iterations; arguments as for `reference.push_sum.push_sum`. Returns the nodes' x."""
    n = len(x0)
    x = list(x0)
    for k, (entries, noise) in enumerate(rounds):
        matrix = mixing_matrices[k % len(mixing_matrices)]
        new = []
        for i in range(n):
            g = gradients[i](x[i], entries[i])
            if noise is not None:
                g = add(g, 1.0, noise[i])
            total = zeros_like(x[i])
            for j in range(n):
                total = add(total, matrix[i, j], x[j])
            new.append(add(total, -step_size, g))
        x = new
    return x
