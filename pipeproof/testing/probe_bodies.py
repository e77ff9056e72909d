"""Bodies of the probes on each rank: module-level functions, which a process can import by name.

Both ranks always have different values: no result is correct by
symmetry. For rows about waits, one rank pauses, and the clock shows if the
other got ahead: being ahead once proves that nothing blocked, so a slow machine
cannot turn "waits" into "does not wait"; repeated attempts make the opposite
error unlikely. A body relies on no behaviour of another row except plain
matching sends and receives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pipeproof.testing.endpoint_protocol import Array, Endpoint, Handle, array

NUM_ATTEMPTS = 3

NUM_MESSAGES = 8
"""Messages of the buffering probe; a backend that buffers this many without a receiver counts as eager."""

STALE = -7.0
"""Content of a receive buffer before the receive, if it matters."""


# --- who waits for whom ----------------------------------------------------------------------------------


def _in_step(end: Endpoint) -> None:
    """Let the ranks start together, however far buffering let one get ahead: a message each way."""
    if end.rank == 0:
        end.send(array(0, 0), 1)
        end.recv(array(STALE, STALE), 1)
    else:
        end.recv(array(STALE, STALE), 0)
        end.send(array(0, 0), 0)


def blocking_sends(end: Endpoint) -> list[list[int]] | list[int]:
    """Return on rank 0 when each send returned; on rank 1, late, when its first receive of each attempt began."""
    if end.rank == 0:
        returned: list[list[int]] = []
        for attempt in range(NUM_ATTEMPTS):
            _in_step(end)
            returned.append([])
            for message in range(NUM_MESSAGES):
                end.send(array(attempt, message), 1)
                returned[-1].append(end.clock_ns())
        return returned
    began = []
    for _ in range(NUM_ATTEMPTS):
        _in_step(end)
        end.pause()
        began.append(end.clock_ns())
        for _ in range(NUM_MESSAGES):
            end.recv(array(STALE, STALE), 0)
    return began


def _call_times(end: Endpoint, early: int, call: Callable[[], Handle], counterpart: Callable[[], object]) -> list[int]:
    """Return on rank ``early`` when each call returned; on the other, late, when its counterpart began."""
    times = []
    for _ in range(NUM_ATTEMPTS):
        _in_step(end)
        if end.rank == early:
            handle = call()
            times.append(end.clock_ns())
            handle.wait()
        else:
            end.pause()
            times.append(end.clock_ns())
            counterpart()
    return times


def posts(end: Endpoint) -> tuple[list[int], list[int]]:
    """Return when each post returned, and when its late counterpart began: of sends, then of receives."""

    def send() -> Handle:
        return end.post_send(array(1, 2), "forward")

    def recv() -> Handle:
        return end.post_recv(array(STALE, STALE), "forward")

    return (
        _call_times(end, 0, send, lambda: recv().wait()),
        _call_times(end, 1, recv, lambda: send().wait()),
    )


class _TransferThread(threading.Thread):
    """A transfer on its own thread, because posting it may block."""

    def __init__(self, end: Endpoint, post: Callable[[], Handle]) -> None:
        super().__init__(daemon=True)
        self._post = post
        self._error: BaseException | None = None
        self.start()
        end.pause()  # its post comes before any that follows

    def run(self) -> None:
        try:
            self._post().wait()
        except BaseException as error:  # noqa: BLE001 - raised again where the body waits
            self._error = error

    def wait(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error


def crossing(end: Endpoint) -> bool:
    """Two edges the same way, then two opposite ones, each finished in an order that a shared queue bars."""
    if end.rank == 0:
        first = _TransferThread(end, lambda: end.post_send(array(1, 2), "forward"))
        end.post_send(array(3, 4), "second").wait()
        first.wait()
        end.post_recv(array(STALE, STALE), "backward").wait()
        end.post_send(array(5, 6), "forward").wait()
    else:
        end.post_recv(array(STALE, STALE), "second").wait()
        end.post_recv(array(STALE, STALE), "forward").wait()
        last = _TransferThread(end, lambda: end.post_recv(array(STALE, STALE), "forward"))
        end.post_send(array(7, 8), "backward").wait()
        last.wait()
    return True


# --- what meets what -------------------------------------------------------------------------------------


def pairs_of_messages(end: Endpoint) -> list[list[float]]:
    """Two transfers posted before the first is waited for, with now one side late, now the other."""
    received = []
    for attempt in range(2 * NUM_ATTEMPTS):
        _in_step(end)
        if end.rank == attempt % 2:
            end.pause()
        if end.rank == 0:
            handles = [end.post_send(array(attempt, k), "forward") for k in (1, 2)]
        else:
            handles = [end.post_recv(array(STALE, STALE), "forward") for _ in (1, 2)]
        received += [handle.wait().tolist() for handle in handles]
    return received


# --- collectives -----------------------------------------------------------------------------------------


def _mine(end: Endpoint) -> Array:
    return array(10 * end.rank + 1, 10 * end.rank + 2, 10 * end.rank + 3, 10 * end.rank + 5)


def all_gathered(end: Endpoint) -> list[list[float]]:
    """An all-gather of four elements a rank."""
    return [part.tolist() for part in end.all_gather(_mine(end))]


def barriers(end: Endpoint) -> list[tuple[int, int]]:
    """Return when this rank reached and left each barrier; the ranks are late alternately."""
    times = []
    for attempt in range(2 * NUM_ATTEMPTS):
        if end.rank == attempt % 2:
            end.pause()
        came = end.clock_ns()
        end.barrier()
        times.append((came, end.clock_ns()))
    return times
