"""ALI-DPFL, Algorithm 2, in float64: loops over clients, iterations and samples, and the search of equation (13)."""

import math
from typing import NamedTuple

import numpy as np
from reference.network import add, clip, loss_and_gradient, norm, zeros_like


class Server(NamedTuple):
    """Between two rounds."""

    w: dict
    tau: int
    spent: int  # local iterations
    rho: list
    beta: list


def h(x, xi, beta, eta, d, sigma_c_over_b):
    """Equation (11), with the bracket of its first term in the second, too."""
    spread = xi + 2 * math.sqrt(d) * sigma_c_over_b
    return spread / beta * ((eta * beta + 1) ** x - 1) - eta * spread * x


def bound(tau, total, rho, xi, beta, eta, d, sigma_c_over_b, kappa):
    """G of equation (13) at lambda = 1, phi = kappa; None where its bracket is not positive."""
    bracket = eta * kappa - rho * h(tau, xi, beta, eta, d, sigma_c_over_b) / tau
    return 1 / (total * bracket) + math.sqrt(3) / 3 if bracket > 0 else None


def search(tau, rounds_left, iterations_left, largest, **constants):
    """Line 22: traverse tau to minimize (13)."""
    if rounds_left <= 0 or iterations_left <= 0:
        return 0
    best, least = 1, math.inf
    for candidate in range(1, min(2 * tau, largest) + 1):
        total = min(candidate * rounds_left, iterations_left)
        value = bound(candidate, total, **constants)
        if value is not None and value < least:
            best, least = candidate, value
    return min(best, iterations_left)


def mean_gradient(w, samples, positions, clip_norm):
    """Mean loss and mean (clipped) gradient of some samples."""
    loss, gradient = 0.0, zeros_like(w)
    for position in positions:
        one_loss, one_gradient = loss_and_gradient(w, *samples[position])
        loss, gradient = loss + one_loss, add(gradient, 1.0, clip(one_gradient, clip_norm, 2))
    count = len(positions)
    return loss / count, add(zeros_like(w), 1.0 / count, gradient)


def local_iterations(w, samples, batches, noises, *, eta, clip_norm, batch_size, step_std):
    """Lines 5 to 14 of one client."""
    for batch, noise in zip(batches, noises, strict=True):
        g = zeros_like(w)
        for position in batch:
            g = add(g, 1.0 / batch_size, clip(loss_and_gradient(w, *samples[position])[1], clip_norm, 2))
        w = add(w, -eta, add(g, 1.0, noise))
    return w


def published(server, clients, w, samples, positions, shares):
    """rho, beta and xi of every client, as section IV-B has them."""
    rho, beta, gradients = [], [], []
    for i, (own, at) in enumerate(zip(clients, positions, strict=True)):
        before_loss, before = mean_gradient(own, samples[i], at, None)
        loss, gradient = mean_gradient(w, samples[i], at, None)
        distance = norm(add(own, -1.0, w))
        rho.append(abs(before_loss - loss) / distance)
        beta.append(norm(add(before, -1.0, gradient)) / distance)
        gradients.append(gradient)
    mean = zeros_like(w)
    for share, gradient in zip(shares, gradients, strict=True):
        mean = add(mean, share, gradient)
    return rho, beta, [norm(add(gradient, -1.0, mean)) for gradient in gradients]


def private(server, clients, w, samples, positions, shares, noises, *, eta, size, clip_norm, loss_bound, z, step_std):
    """rho, beta and xi from three noisy numbers of every client; `noises` are standard normal."""
    rho, beta, xi = [], [], []
    v = add(zeros_like(w), 1.0 / (eta * server.tau), add(server.w, -1.0, w))
    in_v = sum(part.size for layer in w.values() for part in layer.values()) * step_std**2
    in_v *= sum(share**2 for share in shares) / server.tau
    for i, (own, at) in enumerate(zip(clients, positions, strict=True)):
        a, b, c = 0.0, zeros_like(w), zeros_like(w)
        for position in at:
            before_loss, before = loss_and_gradient(own, *samples[i][position])
            loss, gradient = loss_and_gradient(w, *samples[i][position])
            a += min(max(before_loss - loss, -loss_bound), loss_bound) / size
            b = add(b, 1.0 / size, clip(before, clip_norm, 2))
            b = add(b, -1.0 / size, clip(gradient, clip_norm, 2))
            c = add(c, 1.0 / size, clip(gradient, clip_norm, 2))
        std = [z * math.sqrt(3) * most / size for most in (loss_bound, 2 * clip_norm, clip_norm)]
        a = a + std[0] * noises[i][0]
        b = max(norm(b) + std[1] * noises[i][1], 0.0)
        c = max(norm(add(c, -1.0, v)) + std[2] * noises[i][2], 0.0)
        distance = norm(add(own, -1.0, w))
        rho.append(abs(a) / distance)
        beta.append(b / distance)
        xi.append(math.sqrt(max(c**2 - in_v, 0.0)))
    return rho, beta, xi


def ali_round(server, samples, batches, noises, estimate, *, number, eta, kappa, largest, rounds, iterations, **steps):
    """Lines 3 to 24 of round `number`, counted from 0."""
    total = sum(map(len, samples))
    shares = [len(own) / total for own in samples]
    clients = [
        local_iterations(server.w, own, batches[i][: server.tau], noises[i][: server.tau], eta=eta, **steps)
        for i, own in enumerate(samples)
    ]
    w = zeros_like(server.w)
    for share, own in zip(shares, clients, strict=True):
        w = add(w, share, own)
    rho, beta, xi = estimate(server, clients, w, samples, shares=shares)
    spent = server.spent + server.tau
    means = {name: float(np.dot(shares, values)) for name, values in (("rho", rho), ("beta", beta), ("xi", xi))}
    tau = search(
        server.tau,
        rounds - number - 1,
        iterations - spent,
        largest,
        eta=eta,
        kappa=kappa,
        d=sum(part.size for layer in w.values() for part in layer.values()),
        sigma_c_over_b=steps["step_std"],
        **means,
    )
    return Server(w, tau, spent, rho, beta), means
