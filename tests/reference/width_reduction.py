"""HeteroFL (arXiv:2010.01264, Algorithm 1) and FjORD (arXiv:2102.13451, Algorithm 1) as loops over clients, float64.

Of the two-layer network of `reference.network`; a width is its number of hidden units.
"""

import numpy as np
from reference.network import add, loss_and_gradient, zeros_like


def first_units(x, width):
    """The model of the first hidden units."""
    return {
        "dense_1": {"kernel": x["dense_1"]["kernel"][:, :width].copy(), "bias": x["dense_1"]["bias"][:width].copy()},
        "dense_2": {"kernel": x["dense_2"]["kernel"][:width].copy(), "bias": x["dense_2"]["bias"].copy()},
    }


def add_to_first_units(x, scale, narrow):
    """x plus scale times a narrow model, element by element; x is changed."""
    for name, layer in narrow.items():
        for part, leaf in layer.items():
            for position in np.ndindex(leaf.shape):
                x[name][part][position] += scale * leaf[position]


def client_update(x, samples, steps, *, step_size, momentum, weight_decay):
    """A client's steps.

    Args:
        x: its model.
        samples: its (input, label) pairs.
        steps: for each step, (positions in `samples`, width that is trained).

    Returns:
        (its model, batch loss before each step).
    """
    velocity, losses = zeros_like(x), []
    for batch, width in steps:
        narrow, gradient, loss = first_units(x, width), add(zeros_like(x), weight_decay, x), 0.0
        for position in batch:
            one_loss, one_gradient = loss_and_gradient(narrow, *samples[position])
            add_to_first_units(gradient, 1.0 / len(batch), one_gradient)
            loss += one_loss / len(batch)
        velocity = add(gradient, momentum, velocity)
        x = add(x, -step_size, velocity)
        losses.append(loss)
    return x, losses


def width_reduction(x, samples, widths, rounds, *, weighting="data", **options):
    """Runs the rounds.

    Args:
        x: the full model, float64.
        samples: each client's (input, label) pairs.
        widths: of each client's model.
        rounds: list of lists of (client, steps), the active clients of each round.
        weighting: "data" or "uniform".
        options: of `client_update`; a step size is a function of the round.

    Returns:
        (x after all rounds, weighted mean loss of each round).
    """
    losses, schedule = [], options.pop("step_size")
    for number, active in enumerate(rounds):
        total, holders, loss, weights = zeros_like(x), zeros_like(x), 0.0, 0.0
        for client, steps in active:
            weight = len(samples[client]) if weighting == "data" else 1.0
            start = first_units(x, widths[client])
            trained, actual = client_update(start, samples[client], steps, step_size=schedule(number), **options)
            add_to_first_units(total, weight, trained)
            ones = {name: {part: np.ones_like(leaf) for part, leaf in layer.items()} for name, layer in start.items()}
            add_to_first_units(holders, weight, ones)
            loss, weights = loss + weight * np.mean(actual), weights + weight
        for name, layer in x.items():
            for part, leaf in layer.items():
                for position in np.ndindex(leaf.shape):
                    if holders[name][part][position] > 0:
                        leaf[position] = total[name][part][position] / holders[name][part][position]
        losses.append(loss / weights)
    return x, losses
