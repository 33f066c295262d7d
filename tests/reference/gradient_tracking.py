"""Algorithm 1 of Chen, Wang, Zhang (gradient tracking over two directed graphs), as a loop over agents in float64."""

from reference.network import add, zeros_like


def gradient_tracking(x0, state_weights, tracker_weights, gradients, steps, first, rounds, gradient_at):
    """Runs the iterations.

    Args:
        x0: list of n parameter dicts, float64.
        state_weights, tracker_weights: R and C, (n, n).
        gradients: list of n callables (x, entries) -> gradient.
        steps: (alpha, beta, gamma).
        first: (entries of each agent, zeta of each agent) of iteration 0.
        rounds: list of (entries of each agent for g_{k+1}, zeta_{k+1} of each agent, eta_k of each agent).
        gradient_at: "state", as published, or "broadcast".

    Returns:
        (x, broadcast x, y, g): lists over agents after all rounds.
    """
    alpha, beta, gamma = steps
    n, (entries, zeta) = len(x0), first
    x = list(x0)
    x_sent = [add(x[i], 1.0, zeta[i]) for i in range(n)]  # line 2, the half about states
    g = [gradients[i](x[i] if gradient_at == "state" else x_sent[i], entries[i]) for i in range(n)]  # line 1
    y = list(g)
    for entries, zeta, eta in rounds:
        y_sent = [add(y[i], 1.0, eta[i]) for i in range(n)]  # line 2
        new_x, new_g, new_y = [], [], []
        for i in range(n):  # line 5, equation (4)
            row_sum, received = 0.0, zeros_like(x[i])
            for j in range(n):
                row_sum += state_weights[i, j]
                received = add(received, state_weights[i, j], x_sent[j])
            kept = add(zeros_like(x[i]), 1.0 - alpha * row_sum, x[i])
            new_x.append(add(add(kept, alpha, received), -gamma, y[i]))
        x_sent = [add(new_x[i], 1.0, zeta[i]) for i in range(n)]
        for i in range(n):  # lines 6 and 7, equation (5)
            new_g.append(gradients[i](new_x[i] if gradient_at == "state" else x_sent[i], entries[i]))
        for i in range(n):  # line 8, equation (6)
            column_sum, received = 0.0, zeros_like(y[i])
            for j in range(n):
                column_sum += tracker_weights[j, i]
                received = add(received, tracker_weights[i, j], y_sent[j])
            kept = add(zeros_like(y[i]), 1.0 - beta * column_sum, y[i])
            new_y.append(add(add(add(kept, beta, received), 1.0, new_g[i]), -1.0, g[i]))
        x, y, g = new_x, new_y, new_g
    return x, x_sent, y, g
