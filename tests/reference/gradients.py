"""Gradients that a node computes in a round, from the paper's lines: plain mini-batch and SAGA, float64."""

import numpy as np
from reference.network import add, clip, loss_and_gradient, norm, zeros_like


class PlainGradient:
    """PrivSGP, Algorithm 2, line 3: mean of the batch's clipped gradients, divided by the expected batch size."""

    def __init__(self, samples, batch_size, clip_norm, clip_order):
        self.samples, self.batch_size, self.clipping = samples, batch_size, (clip_norm, clip_order)

    def __call__(self, z, entries):
        total, self.loss = zeros_like(z), 0.0
        for entry in entries:
            loss, gradient = loss_and_gradient(z, *self.samples[entry])
            total = add(total, 1.0 / self.batch_size, clip(gradient, *self.clipping))
            self.loss += loss / self.batch_size
        self.norm = norm(total)
        return total


class SagaGradient:
    """PrivSGP-VR, Algorithm 1: lines 1-3 (table at x^0), 6 (corrected gradient) and 7 (table update).

    An entry is `entry_size` consecutive samples; its gradient is scaled so that the mean over the node's entries is
    the full gradient although the last entry may be short.
    """

    def __init__(self, samples, batch_size, clip_norm, clip_order, x0, entry_size=1):
        self.samples, self.batch_size, self.clipping = samples, batch_size, (clip_norm, clip_order)
        self.entries = [samples[start : start + entry_size] for start in range(0, len(samples), entry_size)]
        self.table = [self.entry_gradient(x0, entry) for entry in range(len(self.entries))]

    def entry_gradient(self, z, entry):
        total = zeros_like(z)
        for sample in self.entries[entry]:
            scale = len(self.entries) / len(self.samples)
            total = add(total, scale, clip(loss_and_gradient(z, *sample)[1], *self.clipping))
        return total

    def __call__(self, z, entries):
        g = zeros_like(z)
        for stored in self.table:
            g = add(g, 1.0 / len(self.table), stored)
        fresh = {entry: self.entry_gradient(z, entry) for entry in set(entries)}
        for entry in entries:
            g = add(add(g, 1.0 / self.batch_size, fresh[entry]), -1.0 / self.batch_size, self.table[entry])
        for entry, gradient in fresh.items():
            self.table[entry] = gradient
        share = len(self.entries) / len(self.samples) / self.batch_size
        self.loss = share * sum(loss_and_gradient(z, *s)[0] for entry in entries for s in self.entries[entry])
        self.norm = norm(g)
        return g


def batch_entries(batch, node):
    """The entries of one node's batch, in order, with repetition."""
    return [
        int(e) for e, used in zip(np.asarray(batch.indices)[node], np.asarray(batch.mask)[node], strict=True) if used
    ]
