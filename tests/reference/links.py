"""Algorithms over links that lose and round messages, message by message, in float64."""

import numpy as np
from reference.fed_avg import client_update
from reference.network import add, zeros_like


def quantized(tree, numbers, quantize):
    """One node's tree, each number rounded by `quantize` (number, uniform number); None sends it as it is."""
    if quantize is None:
        return tree
    return {
        name: {part: np.vectorize(quantize)(value, numbers[name][part]) for part, value in layer.items()}
        for name, layer in tree.items()
    }


def push_sum(x0, mixing_matrices, gradients, step_size, rounds, quantize, mixings=1):
    """PrivSGP where a sender gives away what is acknowledged, and nothing else.

    Args:
        x0, mixing_matrices, gradients, step_size: as for `reference.push_sum.push_sum`.
        rounds: list of (entries of each node, noise of each node, arrived (n, n), uniform numbers of each node). With
            several mixings the last two are lists of them, one for each.
        quantize: (number, uniform number) -> number; None sends what is there.
        mixings: M, exchanges of a round.

    Returns:
        (x, w, z): lists over nodes after all rounds.
    """
    n = len(x0)
    x, w, z = list(x0), [1.0] * n, list(x0)
    for k, (entries, noise, *draws) in enumerate(rounds):
        x = [add(x[i], -step_size, add(gradients[i](z[i], entries[i]), 1.0, noise[i])) for i in range(n)]
        for place, (arrived, numbers) in enumerate([draws] if mixings == 1 else zip(*draws, strict=True), mixings * k):
            matrix = mixing_matrices[place % len(mixing_matrices)]
            sent, sent_weight = [quantized(x[j], numbers[j], quantize) for j in range(n)], list(w)
            for j in range(n):
                for i in range(n):
                    if i != j and arrived[i, j]:
                        x[i], x[j] = add(x[i], matrix[i, j], sent[j]), add(x[j], -matrix[i, j], sent[j])
                        w[i], w[j] = w[i] + matrix[i, j] * sent_weight[j], w[j] - matrix[i, j] * sent_weight[j]
        z = [add(zeros_like(x[i]), 1.0 / w[i], x[i]) for i in range(n)]
    return x, np.array(w), z


def d_psgd(x0, mixing_matrices, gradients, step_size, rounds, quantize):
    """D-PSGD where a receiver moves towards what it hears; arguments as for `push_sum`, returns the nodes' x."""
    n, x = len(x0), list(x0)
    for k, (entries, noise, arrived, numbers) in enumerate(rounds):
        matrix = mixing_matrices[k % len(mixing_matrices)]
        sent, new = [quantized(x[j], numbers[j], quantize) for j in range(n)], []
        for i in range(n):
            moved = add(x[i], -step_size, add(gradients[i](x[i], entries[i]), 1.0, noise[i]))
            for j in range(n):
                if i != j and arrived[i, j]:
                    moved = add(add(moved, matrix[i, j], sent[j]), -matrix[i, j], sent[i])
            new.append(moved)
        x = new
    return x


def gradient_tracking(x0, state_weights, tracker_weights, gradients, steps, first, rounds, quantize):
    """Algorithm 1 of Chen, Wang, Zhang at the broadcast states, where states are heard and trackers handed over.

    Args:
        x0, state_weights, tracker_weights, gradients, steps: as for `reference.gradient_tracking`.
        first: (entries of each agent, zeta of each agent, its uniform numbers) of iteration 0.
        rounds: list of (entries for g_{k+1}, zeta_{k+1}, eta_k, arrived (n, n) in k, uniform numbers for x~_{k+1} and
            those for y~_k), each of each agent.
        quantize: as for `push_sum`.

    Returns:
        (x, broadcast x, y, g): lists over agents after all rounds.
    """
    (alpha, beta, gamma), n, (entries, zeta, numbers) = steps, len(x0), first
    x = list(x0)
    x_sent = [quantized(add(x[i], 1.0, zeta[i]), numbers[i], quantize) for i in range(n)]
    g = [gradients[i](x_sent[i], entries[i]) for i in range(n)]
    y = list(g)
    for entries, zeta, eta, arrived, of_states, of_trackers in rounds:
        y_sent = [quantized(add(y[i], 1.0, eta[i]), of_trackers[i], quantize) for i in range(n)]
        new_x = [add(x[i], -gamma, y[i]) for i in range(n)]
        y = list(y)
        for i in range(n):
            for j in range(n):
                if i == j or arrived[i, j]:
                    heard = add(x_sent[j], -1.0, x[i])
                    new_x[i] = add(new_x[i], alpha * state_weights[i, j], heard)
                    given = beta * tracker_weights[i, j]
                    y[i] = add(y[i], given, y_sent[j])
                    y[j] = add(y[j], -given, add(y_sent[j], -1.0, eta[j]))  # its noise it does not take from itself
        x = new_x
        x_sent = [quantized(add(x[i], 1.0, zeta[i]), of_states[i], quantize) for i in range(n)]
        new_g = [gradients[i](x_sent[i], entries[i]) for i in range(n)]
        y = [add(add(y[i], 1.0, new_g[i]), -1.0, g[i]) for i in range(n)]
        g = new_g
    return x, x_sent, y, g


def fed_avg(x, samples, rounds, server, quantize, **local):
    """FedAvg with weights by data, whose server hears from some of the active clients.

    Args:
        x, samples, server, local: as for `reference.fed_avg.fed_avg`, with a step size that stays.
        rounds: list of lists of (client, batches, whether it arrives, uniform numbers), the active of each round.
        quantize: as for `push_sum`.

    Returns:
        x after all rounds.
    """
    for active in rounds:
        heard = []
        for client, batches, arrives, numbers in active:
            trained, _ = client_update(x, samples[client], batches, **local)
            if arrives:
                heard.append((len(samples[client]), quantized(add(trained, -1.0, x), numbers, quantize)))
        if heard:
            total, moved = sum(count for count, _ in heard), zeros_like(x)
            for count, update in heard:
                moved = add(moved, count / total, update)
            x = add(x, 1.0, server(add(zeros_like(x), -1.0, moved)))
    return x
