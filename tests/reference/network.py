"""A two-layer network with its gradients by hand: one sample at a time, float64."""

import numpy as np


def as_float64(params, node):
    """One node's parameters of an engine tree {"dense_1", "dense_2"} as float64 arrays."""
    return {
        name: {part: np.asarray(leaf[node], np.float64) for part, leaf in layer.items()}
        for name, layer in params.items()
    }


def zeros_like(params):
    """The same structure, filled with zeros."""
    return {name: {part: np.zeros_like(leaf) for part, leaf in layer.items()} for name, layer in params.items()}


def add(a, scale, b):
    """a + scale * b."""
    return {name: {part: a[name][part] + scale * b[name][part] for part in a[name]} for name in a}


def loss_and_gradient(params, x, label):
    """Softmax cross entropy of one sample through tanh(x W1 + b1) W2 + b2, and its gradient."""
    x = np.asarray(x, np.float64).reshape(-1)
    hidden = np.tanh(x @ params["dense_1"]["kernel"] + params["dense_1"]["bias"])
    logits = hidden @ params["dense_2"]["kernel"] + params["dense_2"]["bias"]
    shifted = np.exp(logits - logits.max())
    probabilities = shifted / shifted.sum()
    loss = -np.log(probabilities[label])
    error2 = probabilities.copy()
    error2[label] -= 1.0
    error1 = (params["dense_2"]["kernel"] @ error2) * (1.0 - hidden**2)
    return loss, {
        "dense_1": {"kernel": np.outer(x, error1), "bias": error1},
        "dense_2": {"kernel": np.outer(hidden, error2), "bias": error2},
    }


def norm(gradient, order=2):
    """Norm over all parameters of one gradient."""
    return np.linalg.norm(np.concatenate([x.reshape(-1) for layer in gradient.values() for x in layer.values()]), order)


def clip(gradient, clip_norm, clip_order):
    """The gradient scaled so that its norm over all parameters is at most clip_norm."""
    if clip_norm is None:
        return gradient
    actual = norm(gradient, clip_order)
    return add(zeros_like(gradient), min(1.0, clip_norm / actual) if actual > 0 else 1.0, gradient)
