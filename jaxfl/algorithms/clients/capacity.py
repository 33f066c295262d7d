"""Training memory of a client, and its share of a strong client's: the capacity. EmbracingFL, sections 4 and 6.2.

Reference: EmbracingFL (`jaxfl.embracing`), Tables 1 and 10, without the optimizer's state.
"""

from __future__ import annotations

from jaxfl.channel import Counts
from jaxfl.core import check

_BYTES = 4  # of a float32


def training_bytes(counts: Counts, batch_size: int) -> int:
    """Bytes of parameters, activations of a batch, and a gradient for each: 2 p + 2 a numbers.

    Args:
        counts: of the trained layers, from `jaxfl.channel.total`.
        batch_size: samples in memory at once, with their activations. Table 1 has 32 for ResNet-20 and 1 for the
            others.

    Raises:
        ArgumentError: a batch size that is not an integer of at least 1.
    """
    check.at_least(1, batch_size=batch_size)
    return 2 * _BYTES * (counts.parameters + batch_size * counts.activations)


def capacity(part: Counts, whole: Counts, *, batch_size: int = 1) -> float:
    """(2 p_w + 2 a_w) / (2 p + 2 a): the `training_bytes` of a part, as a share of the full model's.

    Examples:
        >>> from jaxfl.channel import count, total
        >>> from jaxfl.models import mlp
        >>> layers = count(mlp((784, 32, 10)), (28, 28))
        >>> part, whole = total(layers, trained_from="dense_2"), total(layers)
        >>> training_bytes(whole, 32), round(capacity(part, whole, batch_size=32), 5)
        (214352, 0.02426)
    """
    return training_bytes(part, batch_size) / training_bytes(whole, batch_size)
