"""hypothesis strategies that several tests share."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp


@st.composite
def column_stochastic(draw, max_nodes=7, max_period=3):
    """(period, n, n) float64: random patterns and weights, positive diagonals, every column summing to 1."""
    num_nodes = draw(st.integers(1, max_nodes))
    shape = (draw(st.integers(1, max_period)), num_nodes, num_nodes)
    edges = draw(hnp.arrays(bool, shape)) | np.eye(num_nodes, dtype=bool)
    weights = draw(hnp.arrays(np.float64, shape, elements=st.floats(0.125, 1.0, width=32)))
    raw = np.where(edges, weights, 0.0)
    return raw / raw.sum(axis=1, keepdims=True)


@st.composite
def doubly_stochastic(draw, max_nodes=7, max_period=3):
    """(period, n, n) float64: convex combinations of the identity and up to three permutations."""
    num_nodes = draw(st.integers(1, max_nodes))
    rounds = []
    for _ in range(draw(st.integers(1, max_period))):
        permutations = draw(st.lists(st.permutations(range(num_nodes)), min_size=0, max_size=3))
        parts = [np.eye(num_nodes), *(np.eye(num_nodes)[list(order)] for order in permutations)]
        shares = np.array([draw(st.floats(0.125, 1.0)) for _ in parts])
        rounds.append(np.einsum("s,sij->ij", shares / shares.sum(), np.stack(parts)))
    return np.stack(rounds)


def connected(matrices):
    """Column-stochastic matrices plus a directed ring in the first round, so that the period connects all nodes."""
    first = 0.5 * matrices[0] + 0.5 * np.roll(np.eye(matrices.shape[-1]), 1, axis=0)
    return np.concatenate([first[None], matrices[1:]])
