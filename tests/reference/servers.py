"""Methods with a server as loops over clients, in float64 on vectors, from the lines of their papers.

A problem is `gradient(client, y, batch) -> (d,)`. A round is a list of (client, batches); `state` maps names to arrays
and starts empty.
"""

import functools

import numpy as np


def _state(state, **at_start):
    for name, value in at_start.items():
        state.setdefault(name, np.array(value, np.float64))


def fed_avgm(x, active, gradient, state, p, *, num_clients, step, server_step_size=1.0, server_momentum=0.9):
    """arXiv:1909.06335."""
    _state(state, v=np.zeros_like(x))
    delta = sum(p_i * (_sgd(x, i, batches, gradient, step) - x) for p_i, (i, batches) in zip(p, active, strict=True))
    state["v"] = server_momentum * state["v"] + delta
    return x + server_step_size * state["v"]


def _adaptive(
    x,
    active,
    gradient,
    state,
    p,
    *,
    kind,
    num_clients,
    step,
    beta_1,
    server_step_size,
    tau,
    beta_2=0.99,
    first_square=None,
):
    """arXiv:2003.00295, Algorithm 2."""
    _state(state, m=np.zeros_like(x), v=np.full_like(x, tau**2 if first_square is None else first_square))
    delta = sum(p_i * (_sgd(x, i, batches, gradient, step) - x) for p_i, (i, batches) in zip(p, active, strict=True))
    state["m"] = beta_1 * state["m"] + (1 - beta_1) * delta
    v, square = state["v"], delta**2
    if kind == "adagrad":
        state["v"] = v + square
    elif kind == "yogi":
        state["v"] = v - (1 - beta_2) * square * np.sign(v - square)
    else:
        state["v"] = beta_2 * v + (1 - beta_2) * square
    return x + server_step_size * state["m"] / (np.sqrt(state["v"]) + tau)


fed_adagrad = functools.partial(_adaptive, kind="adagrad", beta_1=0.0)
fed_adam = functools.partial(_adaptive, kind="adam", beta_1=0.9)
fed_yogi = functools.partial(_adaptive, kind="yogi", beta_1=0.9)


def _sgd(x, client, batches, gradient, step, change=lambda g, y: g):
    """The model of a client after its steps."""
    y = x
    for batch in batches:
        y = y - step * change(gradient(client, y, batch), y)
    return y


def fed_prox(x, active, gradient, state, p, *, num_clients, step, proximal):
    """arXiv:1812.06127, Algorithm 2 with SGD."""
    models = [_sgd(x, i, batches, gradient, step, lambda g, y: g + proximal * (y - x)) for i, batches in active]
    return sum(p_i * y for p_i, y in zip(p, models, strict=True))


def scaffold(x, active, gradient, state, p, *, num_clients, step, server_step_size=1.0):
    """arXiv:1910.06378, Algorithm 1 with option II; both vectors are sent, as there."""
    _state(state, c=np.zeros_like(x), own=np.zeros((num_clients, len(x))))
    c, changes, turns = state["c"].copy(), [], []
    for i, batches in active:
        own = state["own"][i].copy()
        y = _sgd(x, i, batches, gradient, step, lambda g, y, own=own: g - own + c)
        new = own - c + (x - y) / (len(batches) * step)
        changes.append(y - x)
        turns.append(new - own)
        state["own"][i] = new
    state["c"] = c + sum(turns) / num_clients
    return x + server_step_size * np.mean(changes, axis=0)


def fed_nova(x, active, gradient, state, p, *, num_clients, step, num_steps, momentum=0.0):
    """arXiv:2007.07481, section 4, the norms of a_i in closed form."""
    total, effective = np.zeros_like(x), 0.0
    for p_i, (i, batches) in zip(p, active, strict=True):
        y, velocity, tau = x, np.zeros_like(x), num_steps[i]
        for batch in batches[:tau]:
            velocity = momentum * velocity + gradient(i, y, batch)
            y = y - step * velocity
        mass = (tau - momentum * (1 - momentum**tau) / (1 - momentum)) / (1 - momentum)
        total, effective = total + p_i * (x - y) / (step * mass), effective + p_i * mass
    return x - step * effective * total


def q_fed_avg(x, active, gradient, state, p, *, num_clients, step, fairness, loss):
    """arXiv:1905.10497, Algorithm 2 with L = 1 / step; `loss(client, x)` over all its samples."""
    total, mass = np.zeros_like(x), 0.0
    for p_i, (i, batches) in zip(p, active, strict=True):
        u, f = (x - _sgd(x, i, batches, gradient, step)) / step, loss(i, x) + 1e-10
        total = total + p_i * f**fairness * u
        mass += p_i * (fairness * f ** (fairness - 1) * float(u @ u) + f**fairness / step)
    return x - total / mass


def fed_dyn(x, active, gradient, state, p, *, num_clients, step, proximal):
    """arXiv:2111.04263, Algorithm 1, with the parentheses of the sum in h."""
    _state(state, h=np.zeros_like(x), q=np.zeros((num_clients, len(x))))
    models = []
    for i, batches in active:
        q = state["q"][i].copy()
        y = _sgd(x, i, batches, gradient, step, lambda g, y, q=q: g - q + proximal * (y - x))
        state["q"][i] = q - proximal * (y - x)
        models.append(y)
    state["h"] = state["h"] - proximal / num_clients * sum(y - x for y in models)
    return np.mean(models, axis=0) - state["h"] / proximal


def apfl(x, active, gradient, state, p, *, num_clients, step, share, adapts):
    """arXiv:2003.13461, Algorithm 1; both gradients of a step on one batch."""
    _state(state, own=np.tile(x, (num_clients, 1)), share=np.full(num_clients, share))
    models = []
    for i, batches in active:
        w, v, a = x, state["own"][i].copy(), state["share"][i]
        for number, batch in enumerate(batches):
            slope = gradient(i, a * v + (1 - a) * w, batch)
            moved = np.clip(a - step * slope @ (v - w), 0, 1)
            w, v = w - step * gradient(i, w, batch), v - step * a * slope
            if adapts == "steps" or (adapts == "round" and number == 0):
                a = moved
        state["own"][i], state["share"][i] = v, a
        models.append(w)
    return sum(p_i * w for p_i, w in zip(p, models, strict=True))


def per_fed_avg(x, active, gradient, state, p, *, num_clients, step, inner_step_size, more, curvature, hessian=True):
    """arXiv:2002.07948, Algorithm 1; `more` are the batches of D and D'', `curvature(client, batch)` the Hessian."""
    models = []
    for place, (i, batches) in enumerate(active):
        w = x
        for number, batch in enumerate(batches):
            own = [of_all[place][1][number] for of_all in more]
            u = gradient(i, w - inner_step_size * gradient(i, w, own[0]), batch)
            w = w - step * (u - inner_step_size * curvature(i, own[1]) @ u if hessian else u)
        models.append(w)
    return sum(p_i * w for p_i, w in zip(p, models, strict=True))


class Feedback:
    """What clients send: arXiv:1809.07599; arXiv:2106.05203, Algorithm 2; a momentum. `kept` is e, g or m."""

    def __init__(self, num_clients, dim, kind, count, momentum):
        self.kept, self.server, self.kind = np.zeros((num_clients, dim)), np.zeros(dim), kind
        self.count, self.momentum = count, momentum

    def _compressed(self, vector, scores):
        places = np.argsort(-(np.abs(vector) if scores is None else scores), kind="stable")[: self.count]
        return np.where(np.isin(np.arange(len(vector)), places), vector, 0)

    def round(self, active, changes, scores):
        """The server's change; `scores` (c, d) say which numbers stay, None: the largest."""
        messages = []
        for place, (i, change) in enumerate(zip(active, changes, strict=True)):
            own = None if scores is None else scores[place]
            if self.kind == "error feedback":
                messages.append(self._compressed(self.kept[i] + change, own))
                self.kept[i] += change - messages[-1]
            elif self.kind == "ef21":
                messages.append(self._compressed(change - self.kept[i], own))
                self.kept[i] += messages[-1]
            else:
                self.kept[i] = self.momentum * self.kept[i] + (1 - self.momentum) * change
                messages.append(self.kept[i].copy())
        if self.kind == "ef21":
            self.server = self.server + np.sum(messages, axis=0) / len(self.kept)
            return self.server
        return np.mean(messages, axis=0)


def ditto(x, active, gradient, state, p, *, num_clients, step, proximal, own_batches):
    """arXiv:2012.04221, Algorithm 1; the own models come first here, which changes nothing."""
    _state(state, own=np.tile(x, (num_clients, 1)))
    for i, batches in own_batches:
        v = state["own"][i].copy()
        for batch in batches:
            v = v - step * (gradient(i, v, batch) + proximal * (v - x))
        state["own"][i] = v
    models = [_sgd(x, i, batches, gradient, step) for i, batches in active]
    return sum(p_i * y for p_i, y in zip(p, models, strict=True))
