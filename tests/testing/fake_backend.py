"""Backend in memory with the behaviour of a table, row by row, for two ranks on threads.

It serves to test code that uses a backend, and to test the conformance suite:
change one row, and the suite must report that row and no other::

    table = dataclasses.replace(backend_table("paddle", "cpu"), matching="other")
    with fake_world(table) as world:
        ...

All transfers live in one state behind one lock: ``_advance`` completes
all transfers that can be completed, and is called after every post.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from pipeproof.comm.backend_rows import BackendTable
from pipeproof.testing.endpoint_protocol import EDGES, Array, Body, Outcome

NUM_SLOTS = 4
"""Number of messages that a channel buffers if the table has ``slots``."""

_STILL_S = 0.3
"""Time for which every thread must sleep before its world counts as stuck; one may be about to post."""


class Killed(BaseException):
    """Ends a rank's thread as a signal would end its process: no ``except Exception`` stops it."""


class _Closed(SystemExit):
    """Ends a thread that would be blocked for ever once its world is closed; silently, as SystemExit does."""


@dataclass(frozen=True, slots=True)
class _Channel:
    """Channel of messages; its sends match its receives."""

    name: str
    src: int
    dst: int


@dataclass(eq=False, slots=True)
class _Transfer:
    rank: int
    channel: _Channel
    is_send: bool
    array: Array
    """Buffer that a send reads or a receive fills."""
    done: bool = False
    """Done for its rank: an eager send is done before it is delivered."""
    delivered: bool = False


class FakeBackend:
    """State that both ranks share."""

    def __init__(self, table: BackendTable) -> None:
        self.table = table
        self._changed = threading.Condition()
        self._closed = False
        self._queues: dict[object, list[_Transfer]] = defaultdict(list)
        """Transfers that wait for each other, those not done, oldest first."""
        self._in_flight: dict[_Channel, list[_Transfer]] = defaultdict(list)
        """Sends that reached their channel and were not delivered, oldest first."""
        self._meetings: dict[tuple[str, int], dict[int, list[Array]]] = defaultdict(dict)
        """Inputs of the ranks, for every collective call that a rank has reached."""
        self._asleep: set[threading.Thread] = set()
        """Threads that have had nothing to do since the last change."""
        self._changed_s = time.monotonic()

    def begin(self) -> None:
        """Start to count the time without events."""
        with self._changed:
            self._wake()

    def is_stuck(self, ranks: Sequence[threading.Thread], timeout_s: float) -> bool:
        """Return True if no event can happen: all ``ranks`` sleep, or nothing changed for ``timeout_s``.

        The second is for a rank that waits elsewhere, for example for its own thread. Time alone would report a slow
        machine as a hang.
        """
        with self._changed:
            still_s = time.monotonic() - self._changed_s
            asleep = all(rank in self._asleep for rank in ranks if rank.is_alive())
            return still_s > (_STILL_S if asleep else timeout_s)

    def close(self) -> None:
        """Free every thread that is blocked in this backend."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def post(self, transfer: _Transfer, queue: object) -> None:
        """Put a transfer into its queue and complete all transfers that can complete."""
        with self._changed:
            self._queues[queue].append(transfer)
            self._advance()
            self._wake()

    def wait(self, transfer: _Transfer, *, delivered: bool = False) -> Array:
        """Block until a transfer is done, or delivered."""
        with self._changed:
            while not (transfer.delivered if delivered else transfer.done):
                self._sleep()
            return transfer.array

    def meet(self, call: tuple[str, int], rank: int, parts: list[Array]) -> list[list[Array]]:
        """Block until both ranks reach a call; return their inputs, in rank order."""
        with self._changed:
            meeting = self._meetings[call]
            meeting[rank] = parts
            self._wake()
            while len(meeting) < 2:
                self._sleep()
            return [meeting[0], meeting[1]]

    def hang(self) -> None:
        """Block until the world is closed."""
        with self._changed:
            while True:
                self._sleep()

    def _wake(self) -> None:
        self._asleep.clear()
        self._changed_s = time.monotonic()
        self._changed.notify_all()

    def _sleep(self) -> None:
        if self._closed:
            raise _Closed
        if threading.current_thread() not in self._asleep:
            self._asleep.add(threading.current_thread())
            self._changed_s = time.monotonic()
        self._changed.wait()

    def _advance(self) -> None:
        progress = True
        while progress:
            progress = False
            for transfer in [self._head(queue) for queue in self._queues.values() if queue]:
                if not transfer.done:  # done: with a head before it
                    progress |= self._try(transfer)
            for queue in self._queues.values():
                queue[:] = [transfer for transfer in queue if not transfer.done]

    def _head(self, queue: list[_Transfer]) -> _Transfer:
        return queue[0] if self.table.matching == "fifo" else queue[-1]

    def _try(self, transfer: _Transfer) -> bool:
        """Execute the next step of the transfer at the head of a queue; return False if there is none."""
        waiting = self._in_flight[transfer.channel]
        if transfer.is_send:
            fresh = transfer not in waiting
            if fresh:
                waiting.append(transfer)
            room = {"rendezvous": 0, "slots": NUM_SLOTS, "eager": len(waiting)}[self.table.send_completes]
            transfer.done = waiting.index(transfer) < room
            return fresh or transfer.done
        if not waiting:
            return False
        self._deliver(waiting.pop(0), transfer)
        return True

    def _deliver(self, message: _Transfer, into: _Transfer) -> None:
        into.array[:] = message.array
        for transfer in (message, into):
            transfer.done = transfer.delivered = True


@dataclass(frozen=True, slots=True)
class _FakeHandle:
    backend: FakeBackend
    transfer: _Transfer

    def wait(self) -> Array:
        return self.backend.wait(self.transfer)


class FakeEndpoint:
    """One rank of a ``FakeBackend``; a ``pipeproof.testing.endpoint_protocol.Endpoint``."""

    def __init__(self, backend: FakeBackend, rank: int, pause_s: float) -> None:
        self.rank = rank
        self._backend = backend
        self._table = backend.table
        self._pause_s = pause_s
        self._num_calls: dict[str, int] = defaultdict(int)

    def clock_ns(self) -> int:
        return time.monotonic_ns()

    def pause(self) -> None:
        time.sleep(self._pause_s)

    def send(self, array: Array, peer: int) -> None:
        self._call(array, peer, is_send=True).wait()

    def recv(self, into: Array, peer: int) -> Array:
        return self._call(into, peer, is_send=False).wait()

    def post_send(self, array: Array, edge: str) -> _FakeHandle:
        return self._post(array, edge, is_send=True)

    def post_recv(self, into: Array, edge: str) -> _FakeHandle:
        return self._post(into, edge, is_send=False)

    def barrier(self) -> None:
        if self._table.barrier != "wrong":
            self._meet("barrier", self._table.barrier, [])

    def all_gather(self, array: Array) -> list[Array]:
        parts = [a for (a,) in self._meet("all_gather", self._table.all_gather, [array])]
        return parts if self._table.all_gather == "works" else [np.zeros_like(a) for a in parts]

    def _call(self, array: Array, peer: int, *, is_send: bool) -> _FakeHandle:
        src, dst = (self.rank, peer) if is_send else (peer, self.rank)
        transfer = _Transfer(self.rank, _Channel("call", src, dst), is_send, array.copy())
        self._backend.post(transfer, (transfer.channel, self.rank))
        return _FakeHandle(self._backend, transfer)

    def _post(self, array: Array, edge: str, *, is_send: bool) -> _FakeHandle:
        transfer = _Transfer(self.rank, _Channel(edge, *EDGES[edge]), is_send, array.copy())
        queue = (transfer.channel, self.rank) if self._table.queue == "directed_edge" else self.rank
        self._backend.post(transfer, queue)
        if self._table.host_blocks_on_post:
            self._backend.wait(transfer, delivered=True)
        return _FakeHandle(self._backend, transfer)

    def _meet(self, operation: str, support: str, parts: list[Array]) -> list[list[Array]]:
        if support == "missing":
            raise NotImplementedError(f"{operation} is not implemented")
        if support == "aborts":
            raise Killed(operation)
        if support == "hangs":
            self._backend.hang()
        self._num_calls[operation] += 1
        return self._backend.meet((operation, self._num_calls[operation]), self.rank, parts)


class FakeWorld:
    """Runs bodies on a thread for each rank."""

    def __init__(self, backend: FakeBackend, pause_s: float) -> None:
        self._backend = backend
        self._endpoints = [FakeEndpoint(backend, rank, pause_s) for rank in (0, 1)]

    def run(self, body: Body, timeout_s: float) -> tuple[Outcome, Outcome]:
        """Run ``body`` on both ranks; see ``pipeproof.testing.endpoint_protocol.World.run``."""
        outcomes = [Outcome("blocked"), Outcome("blocked")]

        def run_rank(endpoint: FakeEndpoint) -> None:
            try:
                outcomes[endpoint.rank] = Outcome("returned", body(endpoint))
            except _Closed:
                pass
            except Killed as signal:
                outcomes[endpoint.rank] = Outcome("died", detail=str(signal))
            except Exception as error:  # noqa: BLE001 - any error of the body is its outcome
                outcomes[endpoint.rank] = Outcome("raised", detail=f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=run_rank, args=(end,), daemon=True) for end in self._endpoints]
        self._backend.begin()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not self._backend.is_stuck(threads, timeout_s):
            for thread in threads:
                thread.join(_STILL_S / 30)
        return outcomes[0], outcomes[1]


@contextmanager
def fake_world(table: BackendTable, pause_s: float = 0.02) -> Iterator[FakeWorld]:
    """Create two connected ranks with the behaviour of ``table``; blocked ones are freed at the end."""
    backend = FakeBackend(table)
    try:
        yield FakeWorld(backend, pause_s)
    finally:
        backend.close()
