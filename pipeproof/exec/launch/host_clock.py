"""Clock of this host against that of rank 0's host, measured by the leader before the first and after each step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from pipeproof.exec.launch.meeting import Meeting
from pipeproof.exec.measure.clock_correction import (
    MAX_DRIFT_PPM,
    ClockCorrection,
    ClockDriftError,
    ClockExchange,
    correction_of,
    knot_of,
)
from pipeproof.exec.store.store import Store

# --- Clock offsets of hosts, measured through the key-value store that all ranks share ---
# One process per host, its leader, measures before the first and after each step; rank 0's process answers in a
# thread. A host that measures takes a *ticket*, the next number of a counter, and sends pings under it. The thread
# answers ticket after ticket, all pings of one before the next. So the first ping of a ticket waits in the queue of
# hosts, and its answer starts the turn; the other ``ROUNDS`` are exchanges with a thread that waits for nothing else.
# All of them give valid bounds (``clock_correction``), the first a wide one. - Keys are ``ping/<slot>`` with slot =
# ticket modulo the number of hosts, and ``pong/<host>``. Each has one reader, which removes a value once it is read,
# outside of the measured round trip. The store does not grow with steps. - Values begin with the ticket and the round.
# A late value of a host that lost its turn is recognized and dropped. - A host that ends or pauses in its turn loses
# it after ``TURN_S``. It keeps the exchanges that it has. No such loss makes a bound wrong. - The idle thread reads
# one counter every ``IDLE_S``, for any number of hosts. A wait in the store would not poll, but PyTorch prints a
# warning for each wait that times out. Operations on the store per measurement of a host: 1 for the ticket, then a
# ``set``, a ``get`` and a ``remove`` for each of ``1 + ROUNDS`` pings; the thread has as many. A ``get`` of PyTorch's
# store is two requests, so a measurement is 41 requests together.


ROUNDS = 4
"""Exchanges within the turn of a host."""
TURN_S = 1.0
"""Time that rank 0 gives a host to send its next ping."""
IDLE_S = 0.01
"""Time between two looks of rank 0 for new tickets."""
_TICKETS = "tickets"

ReadClock = Callable[[], int]


def exchange_clocks(
    store: Store, host: int, num_hosts: int, timeout_s: float, clock: ReadClock = time.monotonic_ns
) -> list[ClockExchange]:
    """Exchange readings of the host with this index with rank 0; empty if the turn did not come within ``timeout_s``.

    Raises:
        ConnectionError: the store has gone.
    """
    ticket = store.add(_TICKETS, 1) - 1
    slot, exchanges, limit_s = ticket % num_hosts, list[ClockExchange](), timeout_s
    for number in range(1 + ROUNDS):
        sent = clock()
        store.set(f"ping/{slot}", f"{ticket} {number} {host}")
        answer = _read(store, f"pong/{host}", ticket, number, limit_s, clock)
        if answer is None:
            break
        returned, (arrived, answered) = answer
        exchanges.append(ClockExchange(sent, arrived, answered, returned))
        limit_s = TURN_S
    return exchanges


class ClockResponder:
    """Rank 0's end: a thread that answers all hosts until ``close``; it also ends if the store has gone."""

    def __init__(self, store: Store, num_hosts: int, clock: ReadClock = time.monotonic_ns) -> None:
        self._store, self._num_hosts, self._clock = store, num_hosts, clock
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="clock offsets", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, at the latest after the current turn."""
        self._closed.set()
        self._thread.join()

    def _serve(self) -> None:
        ticket = 0
        try:
            while not self._closed.wait(IDLE_S):
                for number in range(ticket, self._store.add(_TICKETS)):
                    self._answer(number)
                    ticket = number + 1
        except ConnectionError:
            return  # the ranks report the loss of the store

    def _answer(self, ticket: int) -> None:
        """Answer the pings of a ticket until one does not come in time."""
        slot = ticket % self._num_hosts
        for number in range(1 + ROUNDS):
            ping = _read(self._store, f"ping/{slot}", ticket, number, TURN_S, self._clock)
            if ping is None:
                return  # its host has ended, or pauses
            arrived, (host,) = ping
            self._store.set(f"pong/{host}", f"{ticket} {number} {arrived} {self._clock()}")


def _read(
    store: Store, key: str, ticket: int, number: int, timeout_s: float, clock: ReadClock
) -> tuple[int, list[int]] | None:
    """Time of a value of this ticket and round, and the numbers after these two; None if it does not come in time.

    The key is empty afterwards: the other end may write the next value only after an answer to this one.
    """
    ends = time.monotonic() + timeout_s
    while (left_s := ends - time.monotonic()) > 0:
        try:
            text = store.get(key, left_s)
        except TimeoutError:
            return None
        read_ns = clock()
        store.remove(key)
        value_ticket, value_number, *readings = map(int, text.split())
        if (value_ticket, value_number) == (ticket, number):
            return read_ns, readings
    return None


_TURN_S = 10.0
"""Longest wait for the turn of this host."""
_PAUSE_S = 1.0
"""Shortest time between two measurements: quicker steps share one. Drift adds 200 us to the error in this time."""
_DRIFTS_PPM = (MAX_DRIFT_PPM, 1_000, 10_000, 100_000)
"""Assumed drifts, the first with which the measurements agree: a time service slews a clock by 500 ppm, or by more."""


def correction_by(measurements: Sequence[Sequence[ClockExchange]]) -> ClockCorrection:
    """Return the correction of a host's clock by all of its measurements, with the least drift that they allow.

    Raises:
        ClockDriftError: a clock was stepped.
    """
    for drift_ppm in _DRIFTS_PPM:
        try:
            return correction_of([knot_of(exchanges, drift_ppm) for exchanges in measurements], drift_ppm)
        except ClockDriftError:
            if drift_ppm == _DRIFTS_PPM[-1]:
                raise
    raise AssertionError("the last drift returns or raises")


class HostClock:
    """Measurements of one host, in a thread of its leader; on rank 0 the answers to the other leaders.

    The host of rank 0 has the right clock by definition. On one host nothing is measured.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._measurements: list[list[ClockExchange]] = []
        self._wanted, self._ended = threading.Event(), False
        self._responder: ClockResponder | None = None
        self._thread: threading.Thread | None = None
        if len(meeting.hosts) == 1 or not meeting.leads:
            return
        self._store = meeting.store.of_thread()
        if meeting.rank == 0:
            self._responder = ClockResponder(self._store, len(meeting.hosts))
        else:
            self._measure()
            self._thread = threading.Thread(target=self._run, name="clock", daemon=True)
            self._thread.start()

    @property
    def offset_ns(self) -> int:
        """Nanoseconds to add to a time of now, as far as it is known."""
        return knot_of(self._measurements[-1], _DRIFTS_PPM[-1]).offset_ns if self._measurements else 0

    def step_ended(self) -> None:
        """Measure soon."""
        self._wanted.set()

    def finish(self) -> ClockCorrection:
        """Measure a last time; return the correction of all times of this host.

        Raises:
            ClockDriftError: this host's clock, or rank 0's, was stepped.
            TimeoutError: rank 0 never answered.
        """
        if self._thread is None:
            return ClockCorrection()
        self._ended = True
        self._wanted.set()
        self._thread.join()
        if not self._measurements:
            raise TimeoutError("rank 0 did not answer the measurements of this host's clock")
        return correction_by(self._measurements)

    def close(self) -> None:
        """End the answers of rank 0, when all hosts have finished."""
        if self._responder is not None:
            self._responder.close()

    def _run(self) -> None:
        while not self._ended:
            self._wanted.wait()
            self._wanted.clear()
            try:
                self._measure()
            except ConnectionError:  # the watch finds this, too, and ends the process
                return
            if not self._ended:
                time.sleep(_PAUSE_S)

    def _measure(self) -> None:
        exchanges = exchange_clocks(self._store, self._meeting.index, len(self._meeting.hosts), _TURN_S)
        if exchanges:
            self._measurements.append(exchanges)
