"""Measurements and counts of one round of an algorithm whose nodes exchange parameters over a graph."""

from __future__ import annotations

from typing import NamedTuple

from jaxfl.core import Array


class GossipInfo(NamedTuple):
    """Measurements and counts of one round. Each algorithm says where its loss is taken and what it sends."""

    loss: Array  # (n,), float32
    gradient_norm: Array  # (n,), float32, L2, before noise
    clipped_fraction: Array  # (n,), float32
    discarded_gradients: Array  # (n,), int32, not finite, and counted as zero under a clip norm
    consensus_distance: Array  # (), float32, after the round
    bits_sent: Array  # (n,), float32, to all neighbors
    bits_received: Array  # (n,), float32, what all neighbors sent to it, lost messages too
    gradient_evaluations: Array  # (n,), int32
    forward_evaluations: Array  # (n,), int32, samples run forward without a backward pass
    batch_overflow: Array  # (n,), int32, must be 0
    prefetch_misses: Array  # (n,), int32, must be 0
    lost_messages: Array | None = None  # (n,), int32, of those the node sent; None where none can be
    quantizer_overflow: Array | None = None  # (n,), int32, numbers beyond its quantizer's range; None without one
