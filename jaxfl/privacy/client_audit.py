"""Canaries that are whole clients, for an audit of what a server releases (`jaxfl.privacy.audit`).

A canary client holds one Dirac sample: its gradient is `strength` in one coordinate of its own and zero elsewhere, or
zero everywhere when a fair coin leaves the client out. The tau local steps of a round, plain SGD with step size gamma,
move that coordinate by gamma tau strength, and nothing else. Choose a strength that puts this above the clip norm S of
updates: what the client adds to the sum is then S, the most that a client may add.

A client that is left out stays among the clients, with an update of zero. Where clients take part independently of each
other, and the sum is divided by a public constant, the server then releases what it would release without that
client: the coin decides between two data sets of the relation zero_out_client.

    x - w = (1 / E) (sum of clipped updates + noise)    E: clients expected in a round, noise of z S on the sum

shows an included canary by q S / E = S / n on average (q: a client's chance to take part), under noise of standard
deviation z S / E. The server's release has one row; all canaries are in it, told apart by their coordinates.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxfl.core import FederatedData, Task
from jaxfl.privacy.audit import Canaries, with_canaries


def with_client_canaries(
    task: Task, data: FederatedData, num_canaries: int, *, strength: float, seed: int
) -> tuple[Task, FederatedData, Canaries]:
    """A task and its data with canary clients added behind the real clients.

    Args:
        task: what is learned.
        data: of the n real clients.
        num_canaries: m, at least 1.
        strength: norm of an included canary's gradient. By tau steps of plain SGD its update is gamma tau times that.
        seed: of the coins.

    Returns:
        (task, data, canaries): the task of `with_canaries` with a coordinate for each canary; data of n + m clients;
        canaries that are all shown by row 0 of what the server releases.

    Raises:
        ArgumentError: as `with_canaries`.

    Guarantees:
        - an included canary client's update lies in its own coordinate, an excluded one's is zero.
        - real clients keep their samples.
        - the clients' sizes do not depend on the coins.

    Examples:
        >>> task = Task(lambda key: jnp.zeros(2), lambda w, x, y: x @ w, lambda w, x, y: {"loss": x @ w})
        >>> data = FederatedData(jnp.ones((4, 2)), jnp.zeros(4, jnp.int32), jnp.arange(4).reshape(2, 2), jnp.full(2, 2))
        >>> _, more, canaries = with_client_canaries(task, data, 3, strength=3.0, seed=0)
        >>> more.sizes.tolist(), more.indices[:, 0].tolist(), canaries.coordinates.tolist()
        ([2, 2, 1, 1, 1], [0, 2, 4, 5, 6], [0, 1, 2])
    """
    wrapped, pool, canaries = with_canaries(
        task, data, num_canaries, strength=strength, seed=seed, shared_coordinates=False
    )
    real, sizes = np.asarray(data.indices), np.asarray(data.sizes)
    own = np.zeros((num_canaries, real.shape[1]), real.dtype)
    own[:, 0] = len(data.inputs) + np.arange(num_canaries)
    alone = np.ones(num_canaries, sizes.dtype)
    with_them = FederatedData(
        inputs=pool.inputs,
        labels=pool.labels,
        indices=jnp.asarray(np.concatenate([real, own])),
        sizes=jnp.asarray(np.concatenate([sizes, alone])),
    )
    return wrapped, with_them, canaries._replace(nodes=np.zeros_like(canaries.nodes))
