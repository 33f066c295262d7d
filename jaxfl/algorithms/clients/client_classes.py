"""Clients of several capacity classes: who takes part in a round, and how each class runs its own function.

A class's function has static shapes of its own. Where the number of active clients of each class is fixed (stratified
sampling) they are grouped by class, and each group is one `over_nodes` call.

Where the active clients are drawn from all, the number of each class is random. On an accelerator they are grouped all
the same: a class runs in waves, each with slots for a few more clients than come on average (`slots_at_once`), and
there are as many waves as its clients need. What an empty slot computes is dropped. Clients that run one after the
other would take tens of thousands of small kernels a round there.

On a CPU clients run one after the other (`lax.map`) and each takes the branch of its class (`lax.switch`), so that a
weak client really costs less and an empty slot costs nothing. Under `vmap` a switch runs every branch for every client.
Clients of several classes are therefore mapped on a CPU, whatever the task's `node_loop` says; a `vmap` over the whole
round, for instance over seeds, still costs all branches. Both ways give the same numbers, up to rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.algorithms.clients import server
from jaxfl.core import ArgumentError, Array, FederatedData, Key, Purpose, PyTree, check, node_keys, purpose_key
from jaxfl.core.devices import varying_like
from jaxfl.core.platform import is_cpu


class Group(NamedTuple):
    """Results of some of the active clients.

    Attributes:
        rows: positions of the group's clients in `Draws.active`: a slice, or (c,), int32. An empty slot has k, the
            number of active clients, as its position and zeros as its results.
        number: their class; None for clients of any class, in the common form.
        results: leaves (clients in the group, ...).
    """

    rows: slice | Array
    number: int | None
    results: Any

    def take(self, values: Array) -> Array:
        """Select this group's entries of an array (k,) over the active clients. Empty slots get 0."""
        if isinstance(self.rows, slice):
            return values[self.rows]
        return values.at[self.rows].get(mode="fill", fill_value=0)


def in_order(groups: Sequence[Group], values: Sequence[PyTree], num_active: int) -> PyTree:
    """Put numbers of each group's clients, leaves (c,), in the order of `Draws.active`, (k,)."""

    def joined(*of_groups):
        together = jnp.concatenate(of_groups)
        if all(isinstance(group.rows, slice) for group in groups):
            return together
        rows = jnp.concatenate([group.rows for group in groups])  # pyright: ignore[reportArgumentType]
        return jnp.zeros((num_active, *together.shape[1:]), together.dtype).at[rows].set(together, mode="drop")

    return jax.tree.map(joined, *values)


class ClientClasses(NamedTuple):
    """Each client's class, and how many clients take part in a round; made by `client_classes`.

    Attributes:
        of_client: (n,), int32, the class of each client, on the host.
        num_classes: how many there are; some may have no clients.
        num_active: clients in a round of any class (uniform sampling), or of each class (stratified).
    """

    of_client: np.ndarray
    num_classes: int
    num_active: int | tuple[int, ...]

    def check_data(self, data: FederatedData) -> None:
        """Refuse data of another number of clients."""
        n = len(self.of_client)
        if data.num_nodes != n:
            found = f"got {n} for data of {data.num_nodes}"
            raise ArgumentError("client_class", "must hold the class of each client", found, "Pass one class a client.")

    def check_expected(self, is_private: bool) -> None:
        """Refuse a count for each class where clients are drawn independently."""
        if is_private and not isinstance(self.num_active, int):
            requirement, found = "must be one int for all classes where updates are private", f"got {self.num_active}"
            raise ArgumentError("num_active", requirement, found, "Pass how many clients are expected.")

    def draw_active(self, key: Key, round_index: Array) -> Array:
        """Draw the clients of one round, uniformly without replacement, among all or class by class.

        Args:
            key: the run's base key.
            round_index: (), int32.

        Returns:
            (k,), int32, ascending; if stratified, ascending within each class, class after class.
        """
        if isinstance(self.num_active, int):
            return server.draw_active(key, round_index, self.num_active, len(self.of_client))
        class_keys = node_keys(purpose_key(key, Purpose.PARTICIPATION, round_index), self.num_classes)
        groups = []
        for number, count in enumerate(self.num_active):
            if count > 0:
                members = jnp.asarray(np.flatnonzero(self.of_client == number), jnp.int32)
                groups.append(jnp.sort(jax.random.choice(class_keys[number], members, (count,), replace=False)))
        return jnp.concatenate(groups)

    def of(self, active: Array) -> Array:
        """The classes of the active clients, (k,), int32."""
        return jnp.asarray(self.of_client)[active]

    def run(
        self,
        clients: Sequence[Callable[..., Any]],
        in_common_form: Callable[[int, Any], Any],
        node_loop: str,
        active: Array,
        arguments: tuple[Any, ...],
        is_active: Array | None = None,
        differentiable: bool = False,
    ) -> list[Group]:
        """Run every active client's function, by its class.

        Args:
            clients: each class's function of one client's arguments.
            in_common_form: (class, result of its function) -> the same structure and shapes for all classes; used where
                they run in one loop.
            node_loop: how clients of one class run, see `jaxfl.core.node_loop`.
            active: (k,), int32, as `draw_active` orders them.
            arguments: leaves (k, ...).
            is_active: (k,), bool, False for an empty slot, whose results are zeros; None where there is none.
            differentiable: whether the results have a reverse derivative on accelerators, too: a class then has one
                wave, with slots for all that may come.

        Guarantees:
            - waves of slots and clients one after the other give the same.
            - what an empty slot computes changes nothing.
        """
        present, groups, start = np.unique(self.of_client), [], 0
        if isinstance(self.num_active, int) and len(present) > 1:
            if not is_cpu():
                return self._by_class(clients, node_loop, active, arguments, is_active, differentiable)
            one_by_one = self._one_by_one(clients, in_common_form, active, arguments, is_active)
            return [Group(slice(None), None, one_by_one)]
        counts = (
            {int(present[0]): len(active)} if isinstance(self.num_active, int) else dict(enumerate(self.num_active))
        )
        for number, count in counts.items():
            if count > 0:
                rows = slice(start, start + count)
                class_arguments = jax.tree.map(lambda leaf, rows=rows: leaf[rows], (is_active, *arguments))
                groups.append(Group(rows, number, server.over_slots(clients[number], node_loop)(*class_arguments)))
                start += count
        return groups

    def _by_class(self, clients, node_loop, active, arguments, is_active, differentiable):
        """Run class after class, each in waves."""
        members, k = np.bincount(self.of_client, minlength=self.num_classes), len(active)
        groups = []
        for number in np.flatnonzero(members).tolist():
            most = int(members[number]) if is_active is not None else min(int(members[number]), k)
            usual = slots_at_once(members[number] / members.sum(), self.num_active)  # pyright: ignore
            slots = most if differentiable else min(most, usual)
            is_own = self.of(active) == number
            (rows,) = jnp.nonzero(is_own if is_active is None else is_own & is_active, size=most, fill_value=k)
            rows, over_class = rows.astype(jnp.int32), server.over_slots(clients[number], node_loop)
            results = _in_waves(over_class, rows, slots, k, arguments)
            groups.append(Group(rows, number, results))
        return groups

    def _one_by_one(self, clients, in_common_form, active, arguments, is_active):
        """One client after the other, each by the branch of its class; classes without clients have none."""
        present, branch_of_client = np.unique(self.of_client, return_inverse=True)

        def branch(number):
            return lambda *args: in_common_form(number, clients[number](*args))

        branches = [branch(int(number)) for number in present]
        branch_numbers = jnp.asarray(branch_of_client, jnp.int32)[active]
        one_of_class = server.over_slots(lambda number, *own: jax.lax.switch(number, branches, *own), "map")
        return one_of_class(is_active, branch_numbers, *arguments)


def slots_at_once(share: float, num_active: int) -> int:
    """Number of slots of a wave: a class's active clients on average and a standard deviation more.

    Args:
        share: of the class among all clients.
        num_active: clients in a round, exactly or on average.

    Examples:
        >>> slots_at_once(1 / 3, 32), slots_at_once(1 / 128, 1)
        (14, 1)
    """
    return math.ceil(num_active * share + math.sqrt(num_active * share * (1 - share)))


def _in_waves(over_class: Callable[..., Any], rows: Array, slots: int, k: int, arguments: tuple[Any, ...]) -> Any:
    """Run a class's clients in waves of `slots`. `rows` (most,): their positions among the k active, k if empty."""
    most = len(rows)

    def wave(start):
        places = jax.lax.dynamic_slice_in_dim(rows, start, slots)
        # An empty slot computes with the last client's arguments.
        return over_class(places < k, *jax.tree.map(lambda leaf: leaf[jnp.minimum(places, k - 1)], arguments))

    def following(w, results):
        start = jnp.minimum(w * slots, most - slots)  # the last wave repeats some of the one before
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return jax.tree.map(write, results, wave_fn(start, *constants))

    if slots == most:
        return wave(0)
    wave_fn, constants = jax.closure_convert(wave, jnp.int32(0))  # once, for the results' shapes and for the loop
    form = jax.eval_shape(wave_fn, jnp.int32(0), *constants)
    nothing = jax.tree.map(lambda leaf: jnp.zeros((most, *leaf.shape[1:]), leaf.dtype), form)
    waves = (jnp.sum(rows < k, dtype=jnp.int32) + slots - 1) // slots
    return jax.lax.fori_loop(0, waves, following, varying_like(nothing, rows, arguments))


def client_classes(
    client_class: Sequence[int] | np.ndarray, num_active: int | Sequence[int], num_classes: int
) -> ClientClasses:
    """Check the class of every client and how many clients take part.

    Args:
        client_class: (n,), int, the class of each client, in [0, num_classes); on the host.
        num_active: clients in a round: an int, uniform over all clients, so that each class's count is random; or one
            int a class, uniform over its clients, at least one in all.
        num_classes: how many classes there are.

    Raises:
        ArgumentError: an unknown class, or counts that do not fit the classes.

    Examples:
        >>> classes = client_classes([0, 1, 1, 0], num_active=(1, 2), num_classes=2)
        >>> classes.draw_active(jax.random.key(0), jnp.int32(0))[1:].tolist()
        [1, 2]
    """
    if check.is_traced(client_class):
        raise ArgumentError("client_class", "must be known on the host", "got a traced value", "Pass integers.")
    of_client = np.asarray(client_class)
    if of_client.ndim != 1 or not np.issubdtype(of_client.dtype, np.integer):
        found = f"got {of_client.dtype} of shape {of_client.shape}"
        raise ArgumentError("client_class", "must hold one integer for each client", found, "Pass a class a client.")
    wrong = np.flatnonzero((of_client < 0) | (of_client >= num_classes))
    if len(wrong):
        found = f"got {of_client[wrong[0]]} at position {wrong[0]}"
        raise ArgumentError("client_class", f"must lie in [0, {num_classes})", found, "Count classes from 0.")
    of_client = of_client.astype(np.int32)
    if np.ndim(num_active) == 0:
        check.at_least(1, num_active=num_active)
        server.check_num_active(int(num_active), len(of_client))  # pyright: ignore[reportArgumentType]
        return ClientClasses(of_client, num_classes, int(num_active))  # pyright: ignore[reportArgumentType]
    counts = tuple(num_active)  # pyright: ignore[reportArgumentType]
    check.at_least(0, **{f"num_active[{number}]": count for number, count in enumerate(counts)})
    members = np.bincount(of_client, minlength=num_classes)
    if len(counts) != num_classes or sum(counts) < 1 or any(np.asarray(counts) > members):
        requirement = "must be at least 1 in all, and for each class at most its clients"
        found = f"got {counts} for classes of {tuple(members.tolist())} clients"
        raise ArgumentError("num_active", requirement, found, "Pass one count a class, or one int for all.")
    return ClientClasses(of_client, num_classes, tuple(int(count) for count in counts))
