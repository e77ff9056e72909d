"""Clock of this host against that of rank 0's host, measured by the leader before the first and after each step."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from pipeproof.exec.launch.clock_offsets import ClockResponder, exchange_clocks
from pipeproof.exec.launch.meeting import Meeting
from pipeproof.exec.measure.clock_correction import (
    MAX_DRIFT_PPM,
    ClockCorrection,
    ClockDriftError,
    ClockExchange,
    correction_of,
    knot_of,
)

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
