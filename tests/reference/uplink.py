"""The way of updates to a server, element by element in float64: lost, rounded, clipped, averaged, noise."""

from typing import Any

import numpy as np


def received(
    changes: Any,
    held: Any,
    weights: Any,
    arrives: Any,
    *,
    quantize: Any = None,
    numbers: Any = None,
    clip_norm: Any = None,
    expected: Any = None,
    noise: Any = None,
):
    """Change of the server's model, (d,).

    Args:
        changes: (c, d), of each client.
        held: (c, d), bool, what each client has.
        weights: (c,).
        arrives: (c,), bool.
        quantize: (number, uniform number) -> rounded; None does not round.
        numbers: (c, d), the uniform numbers.
        clip_norm: of an update; None: a weighted mean over the holders that arrive.
        expected: (d,), how many clients are expected to hold an element.
        noise: (d,), on the sum.
    """
    num_clients, num_elements = changes.shape
    messages = []
    for i in range(num_clients):
        message = [changes[i, e] if held[i, e] else 0.0 for e in range(num_elements)]
        if quantize is not None:
            message = [quantize(value, numbers[i, e]) for e, value in enumerate(message)]
        if clip_norm is not None:
            norm = np.sqrt(sum(value**2 for value in message))
            message = [value * min(1.0, clip_norm / max(norm, 1e-300)) for value in message]
        messages.append(message)
    added = np.zeros(num_elements)
    for e in range(num_elements):
        heard = [i for i in range(num_clients) if arrives[i] and held[i, e]]
        if clip_norm is not None:
            if expected[e] > 0:
                added[e] = (sum(messages[i][e] for i in heard) + noise[e]) / expected[e]
        elif heard:
            added[e] = sum(weights[i] * messages[i][e] for i in heard) / sum(weights[i] for i in heard)
    return added
