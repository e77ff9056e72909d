"""One probe for each row that two ranks can observe: a body for both, and the reading of its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from pipeproof.comm.backend_rows import Queue, RowValue
from pipeproof.testing import probe_bodies as bodies
from pipeproof.testing.endpoint_protocol import Body, Outcome

Outcomes = tuple[Outcome, Outcome]


@dataclass(frozen=True, slots=True)
class Probe:
    """Observation of one row; two ranks cannot distinguish values that ``look_alike``."""

    key: str
    body: Body
    read: Callable[[Outcomes], RowValue]
    look_alike: frozenset[RowValue] = frozenset()


def disturbance(outcomes: Outcomes) -> str | None:
    """Return the worst outcome of a rank: ``died`` before ``raised`` before ``blocked``; None if both returned."""
    kinds = {outcome.kind for outcome in outcomes}
    return next((kind for kind in ("died", "raised", "blocked") if kind in kinds), None)


_UNEXPECTED = {"died": "abort", "raised": "error", "blocked": "hang"}


def _both(values: Callable[[Any, Any], RowValue], **disturbed: RowValue) -> Callable[[Outcomes], RowValue]:
    """Read both ranks' values, or, if a rank did not return, the meaning of that in this row."""

    def read(outcomes: Outcomes) -> RowValue:
        worst = disturbance(outcomes)
        if worst is not None:
            return {**_UNEXPECTED, **disturbed}[worst]
        return values(outcomes[0].value, outcomes[1].value)

    return read


def _always(*, value: RowValue, **disturbed: RowValue) -> Callable[[Outcomes], RowValue]:
    """Read ``value`` wherever both ranks returned."""
    return _both(lambda *_: value, **disturbed)


def _received(
    expected: list[Any], if_so: RowValue, if_not: RowValue, **disturbed: RowValue
) -> Callable[[Outcomes], RowValue]:
    """Read whether rank 1 returned ``expected``."""
    return _both(lambda _, received: if_so if received == expected else if_not, **disturbed)


def _buffering(returned: list[list[int]], began: list[int]) -> RowValue:
    num_ahead = max(sum(time < receiver for time in times) for times, receiver in zip(returned, began, strict=True))
    return {0: "rendezvous", bodies.NUM_MESSAGES: "eager"}.get(num_ahead, "slots")


def _always_late(returned: list[int], began: list[int]) -> bool:
    return all(time >= other for time, other in zip(returned, began, strict=True))


def _either_blocks(rank_0: tuple[list[int], list[int]], rank_1: tuple[list[int], list[int]]) -> bool:
    return _always_late(rank_0[0], rank_1[0]) or _always_late(rank_1[1], rank_0[1])


def _held(rank_0: list[tuple[int, int]], rank_1: list[tuple[int, int]]) -> RowValue:
    held = all(max(a[0], b[0]) <= min(a[1], b[1]) for a, b in zip(rank_0, rank_1, strict=True))
    return "works" if held else "wrong"


def _support(key: str, body: Body, values: Callable[[Any, Any], RowValue]) -> Probe:
    """Return the probe of an operation that works or fails."""
    return Probe(key, body, _both(values, died="aborts", raised="missing", blocked="hangs"))


def _returns(key: str, body: Body, rank_0: list[Any], rank_1: list[Any]) -> Probe:
    """Return the probe of an operation that works if the ranks return these values."""
    return _support(key, body, lambda a, b: "works" if (a, b) == (rank_0, rank_1) else "wrong")


_SHARED_QUEUES: frozenset[RowValue] = frozenset(get_args(Queue)) - {"directed_edge"}

_IN_ORDER = [[float(attempt), float(k)] for attempt in range(2 * bodies.NUM_ATTEMPTS) for k in (1, 2)]
_STALE_REST = [1.0, 2.0, bodies.STALE, bodies.STALE]
_PUT_IN = [[1.0, 2.0, 3.0, 5.0], [11.0, 12.0, 13.0, 15.0]]
_SUM = [12.0, 14.0, 16.0, 20.0]

PROBES: tuple[Probe, ...] = (
    Probe("send_completes", bodies.blocking_sends, _both(_buffering)),
    Probe("host_blocks_on_post", bodies.posts, _both(_either_blocks)),
    Probe("queue", bodies.crossing, _always(value="directed_edge", blocked="pair"), look_alike=_SHARED_QUEUES),
    Probe("isend_blocks_host", bodies.isends, _both(_always_late)),
    Probe("irecv_blocks_host", bodies.irecvs, _both(lambda sender, receiver: _always_late(receiver, sender))),
    Probe("matching", bodies.pairs_of_messages, _received(_IN_ORDER, "fifo", "other")),
    Probe("tags", bodies.tagged, _always(value=True, raised=False)),
    Probe("longer_message", bodies.longer, _received([1.0, 2.0], "truncate", "other")),
    Probe("shorter_message", bodies.shorter, _received(_STALE_REST, "stale_rest", "other")),
    Probe(
        "dtype_checked",
        bodies.other_dtype,
        _received(bodies.BITS.view(np.int32).tolist(), if_so=False, if_not="converted", raised=True),
    ),
    _returns("all_gather", bodies.all_gathered, _PUT_IN, _PUT_IN),
    _returns("all_reduce", bodies.all_reduced, _SUM, _SUM),
    _returns("broadcast", bodies.broadcasts, _PUT_IN, _PUT_IN),
    _support("barrier", bodies.barriers, _held),
    _returns("reduce_scatter", bodies.reduce_scattered, _SUM[:2], _SUM[2:]),
    _returns("all_to_all", bodies.exchanged, [[1.0, 2.0], [11.0, 12.0]], [[3.0, 5.0], [13.0, 15.0]]),
    _returns("partial_send_recv", bodies.partial, [], [bodies.STALE, bodies.STALE, 3.0, 4.0]),
    _returns("all_reduce_float16", bodies.all_reduced_float16, _SUM, _SUM),
)
"""Probes in the order of the table's rows."""
