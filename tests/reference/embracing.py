"""EmbracingFL (Algorithms 1 and 2) as loops over clients and blocks, float64."""

import numpy as np
from reference.network import loss_and_gradient


def client_update(x, blocks, samples, batches, *, step_size, momentum, weight_decay):
    """Local updates of z, the client's `blocks`; y, the other blocks, is the server's in every step.

    Args:
        x: the server's parameters.
        blocks: names of the blocks that the client trains.
        samples: the client's (input, label) pairs.
        batches: for each local step, positions in `samples`.

    Returns:
        (z, batch loss before each step).
    """
    z = {name: dict(x[name]) for name in blocks}
    velocity = {name: {part: np.zeros_like(leaf) for part, leaf in z[name].items()} for name in blocks}
    losses = []
    for batch in batches:
        outcomes = [loss_and_gradient({**x, **z}, *samples[position]) for position in batch]
        losses.append(np.mean([loss for loss, _ in outcomes]))
        for name in blocks:
            for part in z[name]:
                gradient = np.mean([gradient[name][part] for _, gradient in outcomes], axis=0)
                velocity[name][part] = momentum * velocity[name][part] + gradient + weight_decay * z[name][part]
        for name in blocks:
            z[name] = {part: leaf - step_size * velocity[name][part] for part, leaf in z[name].items()}
    return z, losses


def embracing(x, samples, rounds, *, weighting="data", **local):
    """Runs the rounds.

    Args:
        x: the server's first parameters, float64.
        samples: each client's (input, label) pairs.
        rounds: list of lists of (client, its blocks, batches), the active clients of each round.
        weighting: "data" or "uniform".
        local: of `client_update`; the step size is a function of the round.

    Returns:
        (x after all rounds, weighted mean loss of each round).
    """
    losses, schedule = [], local.pop("step_size")
    for number, active in enumerate(rounds):
        trained = []
        for client, blocks, batches in active:
            weight = len(samples[client]) if weighting == "data" else 1
            z, steps = client_update(x, blocks, samples[client], batches, step_size=schedule(number), **local)
            trained.append((weight, z, np.mean(steps)))
        losses.append(sum(w * loss for w, _, loss in trained) / sum(w for w, _, _ in trained))
        new = {}
        for name, layer in x.items():
            of_block = [(w, z[name]) for w, z, _ in trained if name in z]
            total = sum(w for w, _ in of_block)
            new[name] = {
                part: sum(w / total * values[part] for w, values in of_block) if of_block else leaf
                for part, leaf in layer.items()
            }
        x = new
    return x, losses
