"""FedAvg (arXiv:1602.05629, Algorithm 1) and FedAdam (arXiv:2003.00295, Algorithm 2) as loops over clients, float64."""

import numpy as np
from reference.network import add, loss_and_gradient, zeros_like


def client_update(x, samples, batches, *, step_size, momentum, weight_decay):
    """ClientUpdate, with momentum and weight decay.

    Args:
        x: the server's parameters.
        samples: the client's (input, label) pairs.
        batches: for each local step, positions in `samples`.

    Returns:
        (parameters, batch loss before each step).
    """
    velocity, losses = zeros_like(x), []
    for batch in batches:
        gradient, loss = add(zeros_like(x), weight_decay, x), 0.0
        for position in batch:
            one_loss, one_gradient = loss_and_gradient(x, *samples[position])
            gradient = add(gradient, 1.0 / len(batch), one_gradient)
            loss += one_loss / len(batch)
        velocity = add(gradient, momentum, velocity)
        x = add(x, -step_size, velocity)
        losses.append(loss)
    return x, losses


def fed_avg(x, samples, rounds, server, *, weighting="data", **local):
    """Runs the rounds.

    Args:
        x: the server's first parameters, float64.
        samples: each client's (input, label) pairs.
        rounds: list of lists of (client, batches), the active clients of each round.
        server: pseudo-gradient -> what to add to x.
        weighting: "data" or "uniform".
        local: of `client_update`; a step size may be a function of the round.

    Returns:
        (x after all rounds, weighted mean loss of each round).
    """
    losses, schedule = [], local.pop("step_size")
    for number, active in enumerate(rounds):
        total = sum(len(samples[client]) for client, _ in active)
        mean, loss = zeros_like(x), 0.0
        for client, batches in active:
            share = len(samples[client]) / total if weighting == "data" else 1.0 / len(active)
            actual, steps = client_update(x, samples[client], batches, step_size=schedule(number), **local)
            mean, loss = add(mean, share, actual), loss + share * np.mean(steps)
        x = add(x, 1.0, server(add(x, -1.0, mean)))
        losses.append(loss)
    return x, losses


class Adam:
    """Kingma and Ba's Algorithm 1 at the server, with their bias corrections."""

    def __init__(self, step_size, beta_1=0.9, beta_2=0.999, guard=1e-8):
        self.step_size, self.beta_1, self.beta_2, self.guard = step_size, beta_1, beta_2, guard
        self.first: dict | None = None
        self.second: dict | None = None
        self.count = 0

    def __call__(self, gradient):
        self.count += 1
        square = {name: {part: leaf**2 for part, leaf in layer.items()} for name, layer in gradient.items()}
        zero = zeros_like(gradient)
        self.first = add(add(zero, self.beta_1, self.first or zero), 1 - self.beta_1, gradient)
        self.second = add(add(zero, self.beta_2, self.second or zero), 1 - self.beta_2, square)
        update = {}
        for name, layer in gradient.items():
            update[name] = {}
            for part in layer:
                m = self.first[name][part] / (1 - self.beta_1**self.count)
                v = self.second[name][part] / (1 - self.beta_2**self.count)
                update[name][part] = -self.step_size * m / (np.sqrt(v) + self.guard)
        return update


def descend(gradient):
    """Server SGD of step size 1: the new model is the mean of the clients'."""
    return add(zeros_like(gradient), -1.0, gradient)
