"""DZOFL (Mhanna and Assaad 2024, Algorithm 1) as loops over devices, float64, and two-point estimates."""

import numpy as np
from reference.network import add, loss_and_gradient, zeros_like


def batch_loss(x, samples, batch, batch_size):
    """Sum of the losses of a batch over its size."""
    return sum(loss_and_gradient(x, *samples[position])[0] for position in batch) / batch_size


def estimate(x, samples, batch, directions, *, smoothing, batch_size):
    """1/q sum_r d / (2 gamma) (f(x + gamma Phi_r) - f(x - gamma Phi_r)) Phi_r, and the mean loss of all passes."""
    size = sum(leaf.size for layer in x.values() for leaf in layer.values())
    total, loss = zeros_like(x), 0.0
    for direction in directions:
        above = batch_loss(add(x, smoothing, direction), samples, batch, batch_size)
        below = batch_loss(add(x, -smoothing, direction), samples, batch, batch_size)
        total = add(total, size * (above - below) / (2 * smoothing * len(directions)), direction)
        loss += (above + below) / (2 * len(directions))
    return total, loss


def round_to_small_float(value, uniform, *, exponent_bits, mantissa_bits):
    """Q of line 3: one of the two neighbors in the format, the upper one in magnitude with the probability of how far
    the value is on the way to it."""
    bias = 2 ** (exponent_bits - 1) - 1
    exponent = max(np.floor(np.log2(abs(value))), 1 - bias) if value else 1 - bias
    step = 2.0 ** (exponent - mantissa_bits)
    below = np.floor(abs(value) / step)
    return np.copysign(step * (below + (uniform < abs(value) / step - below)), value)


def dzofl(x, samples, rounds, *, batch_size, uplink, downlink):
    """Runs the rounds.

    Args:
        x: the first model, float64.
        samples: each device's (input, label) pairs.
        rounds: for each round a dict of its "step_size", "smoothing", "directions" (trees like x, scaled), "batches"
            (device that sends -> positions), "arrived" (n,), and the uniform numbers of "uplink" (n, q) and "downlink"
            (q,).
        uplink, downlink: (number, uniform number) -> number.

    Returns:
        (the models after each round, for each round its mean loss, the numbers that the server broadcasts).
    """
    models, losses, broadcasts = [], [], []
    for one in rounds:
        # Line 2: differences of the two queries of every device.
        differences, loss = np.zeros((len(samples), len(one["directions"]))), 0.0
        for device, batch in one["batches"].items():
            for r, direction in enumerate(one["directions"]):
                queries = [
                    batch_loss(add(x, sign * one["smoothing"], direction), samples[device], batch, batch_size)
                    for sign in (1, -1)
                ]
                differences[device, r] = queries[0] - queries[1]
                loss += sum(queries) / (2 * len(one["directions"]) * len(one["batches"]))
        # Lines 3 to 5, and equation (3).
        received = [device for device in one["batches"] if one["arrived"][device]]
        broadcast = np.zeros(len(one["directions"]))
        for r in range(len(broadcast)):
            total = sum(uplink(differences[device, r], one["uplink"][device, r]) for device in received)
            broadcast[r] = downlink(len(samples) / len(received) * total, one["downlink"][r]) if received else 0.0
        # Line 6, and equation (4).
        for r, direction in enumerate(one["directions"]):
            x = add(x, -one["step_size"] * broadcast[r] / len(broadcast), direction)
        models.append(x)
        losses.append(loss)
        broadcasts.append(broadcast)
    return models, losses, broadcasts
