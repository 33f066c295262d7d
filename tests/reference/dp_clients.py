"""DP-SGD at clients, and clients whose updates are clipped (arXiv:1710.06963, Algorithm 1), as loops, float64."""

import numpy as np
from reference.embracing import client_update as train_blocks
from reference.network import add, clip, loss_and_gradient, norm, zeros_like


def private_steps(x, samples, batches, noises, *, step_size, batch_size, clip_norm):
    """A client's steps: x <- x - gamma (1/b sum over the batch of clipped gradients + noise).

    Args:
        x: the server's parameters.
        samples: the client's (input, label) pairs.
        batches: for each step, positions in `samples`.
        noises: for each step, a tree like x.

    Returns:
        (parameters, for each step the batch's sum of losses over b, for each step the scaled gradients over b).
    """
    losses, clipped = [], []
    for batch, noise in zip(batches, noises, strict=True):
        total, loss, above = zeros_like(x), 0.0, 0
        for position in batch:
            one_loss, gradient = loss_and_gradient(x, *samples[position])
            total = add(total, 1.0, clip(gradient, clip_norm, 2))
            loss, above = loss + one_loss, above + (norm(gradient) > clip_norm)
        x = add(x, -step_size, add(noise, 1.0 / batch_size, total))
        losses.append(loss / batch_size)
        clipped.append(above / batch_size)
    return x, losses, clipped


def dp_fed_avg(x, samples, rounds, *, weighting="data", updates=None, **local):
    """Federated averaging of clients that make private steps.

    Args:
        x: the server's first parameters, float64.
        samples: each client's (input, label) pairs.
        rounds: for each round (list of (client, batches, noises), noise at the server).
        weighting: "data" or "uniform", where updates are not private.
        updates: of private updates (clip norm, how many clients are expected); None without.
        local: of `private_steps`.

    Returns:
        (x after all rounds, for each round its loss, for each round client -> clipped fraction, for each round the
        clients whose update was scaled).
    """
    losses, fractions, scaled = [], [], []
    for active, server_noise in rounds:
        moved, weights, means, of_client = [], [], [], {}
        for client, batches, noises in active:
            after, steps, clipped = private_steps(x, samples[client], batches, noises, **local)
            moved.append(add(after, -1.0, x))
            weights.append(len(samples[client]) if weighting == "data" else 1.0)
            means.append(np.mean(steps))
            of_client[client] = np.mean(clipped)
        if updates is None:
            shares = np.array(weights) / np.sum(weights)
            for share, change in zip(shares, moved, strict=True):
                x = add(x, share, change)
            losses.append(shares @ means)
            scaled.append([])
        else:
            clip_norm, expected = updates
            x = release(x, moved, server_noise, clip_norm, dict.fromkeys(x, expected))
            losses.append(np.sum(means) / expected)
            scaled.append([one[0] for one, change in zip(active, moved, strict=True) if norm(change) > clip_norm])
        fractions.append(of_client)
    return x, losses, fractions, scaled


def release(x, changes, noise, clip_norm, expected):
    """x + (sum of the clipped changes + noise) / expected, layer by layer; it stays where 0 are expected."""
    total = noise
    for change in changes:
        total = add(total, 1.0, clip(change, clip_norm, 2))
    return {
        name: {part: leaf + total[name][part] / expected[name] for part, leaf in layer.items()}
        if expected[name] > 0
        else layer
        for name, layer in x.items()
    }


def dp_embracing(x, samples, rounds, *, clip_norm, expected, **local):
    """Partial training whose updates are private.

    Args:
        x: the server's first parameters, float64.
        samples: each client's (input, label) pairs.
        rounds: for each round (list of (client, its blocks, batches), noise at the server).
        clip_norm: on a client's change of all its blocks.
        expected: block -> how many clients are expected to train it.
        local: step size, momentum and weight decay of the clients.

    Returns:
        (x after all rounds, for each round its sum of the clients' mean losses).
    """
    losses = []
    for active, noise in rounds:
        changes, total = [], 0.0
        for client, blocks, batches in active:
            z, steps = train_blocks(x, blocks, samples[client], batches, **local)
            changes.append(add({**x, **z}, -1.0, x))
            total += np.mean(steps)
        x = release(x, changes, noise, clip_norm, expected)
        losses.append(total)
    return x, losses
