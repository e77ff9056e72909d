"""One probe for each row of a backend table that two ranks can observe.

A probe is a body that both ranks run and a reading of what became of it. Both
ranks always hold different values, so that nothing comes out right by
symmetry. Where a row is about who waits for whom, one rank pauses, and the
other's clock tells whether it got ahead: a single time ahead proves that
nothing blocked, so a slow machine cannot turn "waits" into "does not wait",
and each attempt is repeated so that it hardly turns the other way round.
No probe rests on a behaviour that another row is about, as far as that can be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeproof.comm.capabilities import RowValue
from pipeproof.testing.endpoint import Array, Body, Endpoint, Handle, Outcome, array

Outcomes = tuple[Outcome, Outcome]

NUM_ATTEMPTS = 3
NUM_MESSAGES = 8
"""In the probe of buffering; a backend that holds more than this without a receiver counts as eager."""

STALE = -7.0
"""What a receive buffer holds before, where that matters."""


@dataclass(frozen=True, slots=True)
class Probe:
    """How one row is observed."""

    key: str
    body: Body
    read: Callable[[Outcomes], RowValue]


def disturbance(outcomes: Outcomes) -> str | None:
    """The worst that happened to a rank: ``died`` before ``raised`` before ``blocked``; None if both returned."""
    kinds = {outcome.kind for outcome in outcomes}
    return next((kind for kind in ("died", "raised", "blocked") if kind in kinds), None)


_UNEXPECTED = {"died": "abort", "raised": "error", "blocked": "hang"}


def _both(values: Callable[[Any, Any], RowValue], **disturbed: RowValue) -> Callable[[Outcomes], RowValue]:
    """Read both ranks' values, or, where a rank did not return, what that stands for in this row."""

    def read(outcomes: Outcomes) -> RowValue:
        worst = disturbance(outcomes)
        if worst is not None:
            return {**_UNEXPECTED, **disturbed}[worst]
        return values(outcomes[0].value, outcomes[1].value)

    return read


def _always(value: RowValue, **disturbed: RowValue) -> Callable[[Outcomes], RowValue]:
    """Read ``value`` wherever both ranks returned."""
    return _both(lambda *_: value, **disturbed)


def _received(
    expected: list[Any], if_so: RowValue, if_not: RowValue, **disturbed: RowValue
) -> Callable[[Outcomes], RowValue]:
    """Read whether rank 1 returned ``expected``."""
    return _both(lambda _, received: if_so if received == expected else if_not, **disturbed)


# --- who waits for whom ---------------------------------------------------------------------------------------


def _in_step(end: Endpoint) -> None:
    """Let the ranks start together, however far buffering let one get ahead: a message each way."""
    if end.rank == 0:
        end.send(array(0, 0), 1)
        end.recv(array(STALE, STALE), 1)
    else:
        end.recv(array(STALE, STALE), 0)
        end.send(array(0, 0), 0)


def _blocking_sends(end: Endpoint) -> list[list[int]] | list[int]:
    """Rank 0: when each send came back. Rank 1, late: when its first receive of each attempt began."""
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


def _buffering(returned: list[list[int]], began: list[int]) -> RowValue:
    num_ahead = max(
        sum(time < receiver for time in times) for times, receiver in zip(returned, began, strict=True)
    )
    return {0: "rendezvous", NUM_MESSAGES: "eager"}.get(num_ahead, "slots")


def _call_times(
    end: Endpoint, early: int, call: Callable[[], Handle], counterpart: Callable[[], object]
) -> list[int]:
    """On rank ``early``: when each call came back. On the other, late: when its counterpart began."""
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


def _isends(end: Endpoint) -> list[int]:
    return _call_times(end, 0, lambda: end.isend(array(1, 2), 1), lambda: end.recv(array(STALE, STALE), 0))


def _irecvs(end: Endpoint) -> list[int]:
    return _call_times(end, 1, lambda: end.irecv(array(STALE, STALE), 0), lambda: end.send(array(1, 2), 1))


def _posts(end: Endpoint) -> tuple[list[int], list[int]]:
    def send() -> Handle:
        return end.post_send(array(1, 2), "forward")

    def recv() -> Handle:
        return end.post_recv(array(STALE, STALE), "forward")

    return (
        _call_times(end, 0, send, lambda: recv().wait()),
        _call_times(end, 1, recv, lambda: send().wait()),
    )


def _always_late(returned: list[int], began: list[int]) -> bool:
    return all(time >= other for time, other in zip(returned, began, strict=True))


def _either_blocks(rank_0: tuple[list[int], list[int]], rank_1: tuple[list[int], list[int]]) -> bool:
    return _always_late(rank_0[0], rank_1[0]) or _always_late(rank_1[1], rank_0[1])


class _Beside(threading.Thread):
    """A transfer on a thread of its own, since posting it may block."""

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


def _crossing(end: Endpoint) -> bool:
    """Two edges the same way, then two opposite ones, each finished in an order that a shared queue forbids."""
    if end.rank == 0:
        first = _Beside(end, lambda: end.post_send(array(1, 2), "forward"))
        end.post_send(array(3, 4), "second").wait()
        first.wait()
        end.post_recv(array(STALE, STALE), "backward").wait()
        end.post_send(array(5, 6), "forward").wait()
    else:
        end.post_recv(array(STALE, STALE), "second").wait()
        end.post_recv(array(STALE, STALE), "forward").wait()
        last = _Beside(end, lambda: end.post_recv(array(STALE, STALE), "forward"))
        end.post_send(array(7, 8), "backward").wait()
        last.wait()
    return True


# --- what meets what ------------------------------------------------------------------------------------------


def _pairs_of_messages(end: Endpoint) -> list[list[float]]:
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


_IN_ORDER = [[float(attempt), float(k)] for attempt in range(2 * NUM_ATTEMPTS) for k in (1, 2)]


def _tagged(end: Endpoint) -> None:
    if end.rank == 0:
        end.send(array(1, 2), 1, tag=7)
    else:
        end.recv(array(STALE, STALE), 0, tag=7)


def _longer(end: Endpoint) -> list[float]:
    if end.rank == 0:
        end.send(array(1, 2, 3, 4), 1)
        return []
    received: list[float] = end.recv(array(STALE, STALE), 0).tolist()
    return received


def _shorter(end: Endpoint) -> list[float]:
    if end.rank == 0:
        end.send(array(1, 2), 1)
        return []
    received: list[float] = end.recv(array(STALE, STALE, STALE, STALE), 0).tolist()
    return received


_BITS = np.array([1.5, -2.25, 3.0, 4.0], np.float32)


def _other_dtype(end: Endpoint) -> list[int]:
    if end.rank == 0:
        end.send(_BITS, 1)
        return []
    received: list[int] = end.recv(np.zeros(4, np.int32), 0).tolist()
    return received


# --- collectives and partial transfers ------------------------------------------------------------------------


def _mine(end: Endpoint) -> Array:
    return array(10 * end.rank + 1, 10 * end.rank + 2, 10 * end.rank + 3, 10 * end.rank + 5)


def _all_gathered(end: Endpoint) -> list[list[float]]:
    return [part.tolist() for part in end.all_gather(_mine(end))]


def _all_reduced(end: Endpoint) -> list[float]:
    total: list[float] = end.all_reduce(_mine(end)).tolist()
    return total


def _all_reduced_float16(end: Endpoint) -> list[float]:
    total: list[float] = end.all_reduce(_mine(end).astype(np.float16)).tolist()
    return total


def _broadcasts(end: Endpoint) -> list[list[float]]:
    return [end.broadcast(_mine(end), root).tolist() for root in (0, 1)]


def _reduce_scattered(end: Endpoint) -> list[float]:
    half: list[float] = end.reduce_scatter(_mine(end)).tolist()
    return half


def _exchanged(end: Endpoint) -> list[list[float]]:
    mine = _mine(end)
    return [part.tolist() for part in end.all_to_all([mine[:2], mine[2:]])]


def _partial(end: Endpoint) -> list[float]:
    if end.rank == 0:
        end.partial_send(array(1, 2, 3, 4), 1, 2, 1)
        return []
    received: list[float] = end.partial_recv(array(STALE, STALE, STALE, STALE), 0, 2, 1).tolist()
    return received


def _barriers(end: Endpoint) -> list[tuple[int, int]]:
    """When this rank came to each barrier and when it left it, with now one rank late, now the other."""
    times = []
    for attempt in range(2 * NUM_ATTEMPTS):
        if end.rank == attempt % 2:
            end.pause()
        came = end.clock_ns()
        end.barrier()
        times.append((came, end.clock_ns()))
    return times


def _held(rank_0: list[tuple[int, int]], rank_1: list[tuple[int, int]]) -> RowValue:
    held = all(max(a[0], b[0]) <= min(a[1], b[1]) for a, b in zip(rank_0, rank_1, strict=True))
    return "works" if held else "wrong"


def _support(key: str, body: Body, values: Callable[[Any, Any], RowValue]) -> Probe:
    """The probe of an operation that works, or does not in one way or another."""
    return Probe(key, body, _both(values, died="aborts", raised="missing", blocked="hangs"))


def _returns(key: str, body: Body, rank_0: list[Any], rank_1: list[Any]) -> Probe:
    """The probe of an operation that works if the ranks return these values."""
    return _support(key, body, lambda a, b: "works" if (a, b) == (rank_0, rank_1) else "wrong")


_PUT_IN = [[1.0, 2.0, 3.0, 5.0], [11.0, 12.0, 13.0, 15.0]]
_SUM = [12.0, 14.0, 16.0, 20.0]

PROBES: tuple[Probe, ...] = (
    Probe("send_completes", _blocking_sends, _both(_buffering)),
    Probe("host_blocks_on_post", _posts, _both(_either_blocks)),
    Probe("queue", _crossing, _always("directed_edge", blocked="pair")),
    Probe("isend_blocks_host", _isends, _both(_always_late)),
    Probe("irecv_blocks_host", _irecvs, _both(lambda sender, receiver: _always_late(receiver, sender))),
    Probe("matching", _pairs_of_messages, _received(_IN_ORDER, "fifo", "other")),
    Probe("tags", _tagged, _always(True, raised=False)),
    Probe("longer_message", _longer, _received([1.0, 2.0], "truncate", "other")),
    Probe("shorter_message", _shorter, _received([1.0, 2.0, STALE, STALE], "stale_rest", "other")),
    Probe(
        "dtype_checked",
        _other_dtype,
        _received(_BITS.view(np.int32).tolist(), if_so=False, if_not="converted", raised=True),
    ),
    _returns("all_gather", _all_gathered, _PUT_IN, _PUT_IN),
    _returns("all_reduce", _all_reduced, _SUM, _SUM),
    _returns("broadcast", _broadcasts, _PUT_IN, _PUT_IN),
    _support("barrier", _barriers, _held),
    _returns("reduce_scatter", _reduce_scattered, _SUM[:2], _SUM[2:]),
    _returns("all_to_all", _exchanged, [[1.0, 2.0], [11.0, 12.0]], [[3.0, 5.0], [13.0, 15.0]]),
    _returns("partial_send_recv", _partial, [], [STALE, STALE, 3.0, 4.0]),
    _returns("all_reduce_float16", _all_reduced_float16, _SUM, _SUM),
)
"""In the order of the table's rows."""
