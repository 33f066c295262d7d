"""Queue of the device's work, with the next chunk sent off before the numbers of the last one are read.

While the host reads infos and scores, writes lines and waits for the disk, the device goes on. The state is donated to
the chunk that follows, so that nobody can have it once rounds of that have run. Whoever needs the state behind a chunk
therefore sends nothing off behind it, where that is known before. Whether a number is bad is not: the device decides
that, and where one is, the chunk that was sent off runs no round and gives the state back as it was.

A thread of its own sends it off. An accelerator's host may be busy with a chunk as long as that runs: it is asked at
every loop of traced length and at every branch. The host meanwhile reads the chunk before.

Times decide whether a chunk is sent off early, never what is computed.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfl.core import PyTree
from jaxfl.core.platform import is_cpu
from jaxfl.training.chunks import Infos, info_fields
from jaxfl.training.finite import rounds_if_good
from jaxfl.training.lanes import Lane, Tables
from jaxfl.training.processes import several
from jaxfl.training.program import Compiled

MOST_SECONDS = 1.0
"""What is sent off early takes less: a stop, or a checkpoint by the clock, that is asked for meanwhile waits for it."""

FEWEST_CHUNKS = 50
"""What is gained a chunk, some milliseconds, must make up for compiling what decides: about a tenth of a second."""


MOST_CPU_DEVICES = 1
"""A CPU's devices share its threads, and those of collectives wait for each other: there one program at a time is sent
off where more devices than this compute it."""


class Ahead(NamedTuple):
    """Work of the device behind a chunk, before the host has read that chunk."""

    num_rounds: int  # of the next chunk, at least 1
    evaluates: bool  # whether the state between the two is scored
    runs: np.ndarray | np.bool  # () or (num_slots,), lanes whose bad numbers keep the next chunk from running


class _Chunk(NamedTuple):
    """A chunk that was sent off."""

    state: PyTree
    buffers: Any
    num_rounds: int
    ended: Future[float]


class DeviceQueue:
    """Chunks and evaluations of one pass; a context manager that ends with what was sent off.

    Args:
        compiled: what runs.
        lanes, tables: as `Program` gives them.

    Guarantees:
        - a chunk that was sent off early has the same bits.
        - behind a bad number no round runs, and the state is that behind the chunk with it.
        - a state that is no longer there is refused.
        - seconds of chunks do not overlap.
    """

    def __init__(self, compiled: Compiled, lanes: Lane, tables: Tables):
        self._compiled, self._lanes, self._tables = compiled, lanes, tables
        self._place = compiled.rounds.input_shardings[0][3]  # of the number of rounds
        self._state: PyTree | None = None
        self._pays = False
        self._ahead: Future[_Chunk] | None = None
        self._measured: Any = None  # of the state behind the last chunk that was read
        self._began = 0.0  # of the chunk that was sent off early
        self._seconds_a_round, self._evaluation_seconds = math.inf, 0.0
        self._pool = ThreadPoolExecutor(2)  # to send off, and to note when a chunk ended

    def __enter__(self) -> DeviceQueue:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    @property
    def state(self) -> PyTree:
        """Behind the last chunk that was read.

        Raises:
            RuntimeError: later rounds have run.
        """
        if self._state is None:
            raise RuntimeError("the state behind the last chunk is gone: the next chunk was sent off")
        return self._state

    def begin(self, state: PyTree, num_chunks: int) -> None:
        """Take the state from which chunks are left to run, and their number."""
        self._state, self._pays = state, num_chunks >= FEWEST_CHUNKS

    @property
    def is_ahead(self) -> bool:
        """Whether rounds run, or have run, behind the last chunk that was read."""
        return self._ahead is not None

    def may_go_ahead(self, ahead: Ahead) -> bool:
        """Whether that pays, and takes so little time by what was measured that it may be sent off early.

        Never with several processes: their clocks differ, and all must send off the same.
        """
        devices = self._place.device_set
        if not self._pays or several() or (is_cpu() and len(devices) > MOST_CPU_DEVICES):
            return False
        seconds = self._seconds_a_round * ahead.num_rounds + self._evaluation_seconds * ahead.evaluates
        return seconds < MOST_SECONDS

    def run(self, num_rounds: int, ahead: Ahead | None = None) -> tuple[Infos, float]:
        """Run a chunk, or wait for the one that was sent off, and read it.

        Args:
            num_rounds: of it; where it was sent off, as many as were named then.
            ahead: what follows, to be sent off first.

        Returns:
            (field -> values with `chunk_rounds` rows, those behind `num_rounds` 0; seconds that the rounds took).
        """
        if self._ahead is None:
            self._began = time.perf_counter()
            chunk = self._send(self.state, np.int32(num_rounds), num_rounds)
        else:
            chunk, self._ahead = self._ahead.result(), None
        assert chunk.num_rounds == num_rounds
        self._state, self._measured = chunk.state, None
        may_run = None if ahead is None else self._send_ahead(chunk, ahead)
        ended = chunk.ended.result()
        seconds = max(0.0, ended - self._began)
        self._seconds_a_round = seconds / num_rounds
        infos = info_fields(jax.device_get(chunk.buffers))
        if ahead is not None and may_run is not None:
            nothing_runs = int(may_run) != ahead.num_rounds  # waits for the evaluation
            self._began = time.perf_counter()
            if ahead.evaluates:
                self._evaluation_seconds = self._began - ended
            if nothing_runs:
                self._take_back()
        return infos, seconds

    def scores(self) -> dict[str, Any]:
        """Return the results of the state's evaluation on the host. The evaluation may have been sent off before."""
        if self._measured is not None:
            return jax.device_get(self._measured)
        began = time.perf_counter()
        measured = jax.device_get(self._compiled.evaluate(self._lanes, self.state, self._tables.arrays))
        self._evaluation_seconds = time.perf_counter() - began
        return measured

    def _send(self, state: PyTree, allowed: Any, num_rounds: int) -> _Chunk:
        state, buffers = self._compiled.rounds(self._lanes, state, self._tables.data, allowed)
        # The host may come late to a chunk: a thread notes when it ended.
        return _Chunk(state, buffers, num_rounds, self._pool.submit(_end_of, buffers))

    def _send_ahead(self, chunk: _Chunk, ahead: Ahead) -> jax.Array:
        """Send off what follows a chunk; returns how many rounds of that may run, (), int32, on the device."""
        self._state = None
        if ahead.evaluates:
            self._measured = self._compiled.evaluate(self._lanes, chunk.state, self._tables.arrays)
        decide = _decide(self._place)
        may_run = decide(info_fields(chunk.buffers), self._measured, ahead.runs, np.int32(ahead.num_rounds))
        self._ahead = self._pool.submit(self._send, chunk.state, may_run, ahead.num_rounds)
        return may_run

    def _take_back(self) -> None:
        """The chunk that was sent off ran no round: its state is the one behind the chunk before."""
        assert self._ahead is not None
        self._state, self._ahead = self._ahead.result().state, None


@functools.cache
def _decide(sharding: jax.sharding.Sharding) -> Callable[..., jax.Array]:
    """`rounds_if_good`, its result where the compiled rounds take it."""
    return jax.jit(rounds_if_good, out_shardings=sharding)


def _end_of(buffers: Any) -> float:
    """When they were there."""
    jax.block_until_ready(buffers)
    return time.perf_counter()
