"""Check of a backend against its table: ``check_backend`` observes every row that two ranks can observe.

A probe of a row is a body for both ranks, and the reading of its outcome. For your own backend, write an ``Endpoint``
and a ``World`` (``pipeproof.testing.endpoint_protocol``), fill in a ``BackendTable`` and run::

    results = check_backend(my_table, make_my_world)
    assert all(result.ok for result in results), results
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, get_args

from pipeproof.comm.backend_rows import BackendTable, Queue, RowValue
from pipeproof.testing import probe_bodies as bodies
from pipeproof.testing.endpoint_protocol import Body, MakeWorld, Outcome, World

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
    return _both(lambda *_: value, **disturbed)


def _buffering(returned: list[list[int]], began: list[int]) -> RowValue:
    num_ahead = max(sum(time < receiver for time in times) for times, receiver in zip(returned, began, strict=True))
    return {0: "rendezvous", bodies.NUM_MESSAGES: "eager"}.get(num_ahead, "slots")


def _always_late(returned: list[int], began: list[int]) -> bool:
    return all(time >= other for time, other in zip(returned, began, strict=True))


def _either_blocks(rank_0: tuple[list[int], list[int]], rank_1: tuple[list[int], list[int]]) -> bool:
    return _always_late(rank_0[0], rank_1[0]) or _always_late(rank_1[1], rank_0[1])


def _order(_: object, received: list[list[float]]) -> RowValue:
    return "fifo" if received == _IN_ORDER else "other"


def _held(rank_0: list[tuple[int, int]], rank_1: list[tuple[int, int]]) -> RowValue:
    held = all(max(a[0], b[0]) <= min(a[1], b[1]) for a, b in zip(rank_0, rank_1, strict=True))
    return "works" if held else "wrong"


def _support(key: str, body: Body, values: Callable[[Any, Any], RowValue]) -> Probe:
    """Return the probe of an operation that works or fails."""
    return Probe(key, body, _both(values, died="aborts", raised="missing", blocked="hangs"))


_SHARED_QUEUES: frozenset[RowValue] = frozenset(get_args(Queue)) - {"directed_edge"}

_IN_ORDER = [[float(attempt), float(k)] for attempt in range(2 * bodies.NUM_ATTEMPTS) for k in (1, 2)]
_PUT_IN = [[1.0, 2.0, 3.0, 5.0], [11.0, 12.0, 13.0, 15.0]]

PROBES: tuple[Probe, ...] = (
    Probe("send_completes", bodies.blocking_sends, _both(_buffering)),
    Probe("host_blocks_on_post", bodies.posts, _both(_either_blocks)),
    Probe("queue", bodies.crossing, _always(value="directed_edge", blocked="pair"), look_alike=_SHARED_QUEUES),
    Probe("matching", bodies.pairs_of_messages, _both(_order)),
    _support("all_gather", bodies.all_gathered, lambda a, b: "works" if a == b == _PUT_IN else "wrong"),
    _support("barrier", bodies.barriers, _held),
)
"""Probes in the order of the table's rows."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """Result for one row: the table's value, the backend's, and the observation."""

    key: str
    expected: RowValue
    observed: RowValue
    ok: bool
    detail: str


def check_backend(
    table: BackendTable,
    make_world: MakeWorld,
    *,
    keys: Collection[str] | None = None,
    timeout_s: float = 2.0,
) -> list[RowResult]:
    """Observe each row and compare it with ``table``.

    One world serves all probes until a probe leaves it unusable (a rank
    blocked, died, or raised where the other did not); the next probe then gets
    a fresh one.

    Args:
        table: the expected behaviour of the backend.
        make_world: creates two connected ranks; see ``pipeproof.testing.endpoint_protocol.World``.
        keys: the rows to observe; all by default.
        timeout_s: after this long a rank counts as blocked. A probe that does
            not block takes a few pauses of the endpoint.

    Returns:
        One result for each row that is observed, in the order of the table.
        Rows that need more than two ranks are left out (``Row.probed``).

    Raises:
        ValueError: a key that no probe observes.
    """
    probes = _selected(keys)
    results = []
    with ExitStack() as stack:
        world: World | None = None
        for probe in probes:
            if world is None:
                world = stack.enter_context(make_world())
            outcomes = world.run(probe.body, timeout_s)
            results.append(_result(table, probe, outcomes))
            if {outcome.kind for outcome in outcomes} not in ({"returned"}, {"raised"}):
                stack.close()
                world = None
    return results


def _selected(keys: Collection[str] | None) -> list[Probe]:
    if keys is None:
        return list(PROBES)
    unknown = set(keys) - {probe.key for probe in PROBES}
    if unknown:
        choices = ", ".join(probe.key for probe in PROBES)
        raise ValueError(f"no probe observes {', '.join(sorted(unknown))}; probes observe {choices}")
    return [probe for probe in PROBES if probe.key in keys]


def _result(table: BackendTable, probe: Probe, outcomes: Outcomes) -> RowResult:
    expected, observed = table.value(probe.key), probe.read(outcomes)
    if expected in probe.look_alike and observed in probe.look_alike:
        observed = expected
    ok = table.allows(probe.key, observed)
    return RowResult(probe.key, expected, observed, ok, _detail(observed, outcomes))


def _detail(observed: RowValue, outcomes: Outcomes) -> str:
    """Describe ranks that did not return, and values without a name in the table."""
    values_matter = observed in ("wrong", "other")
    texts = {
        rank: _words(outcome) for rank, outcome in enumerate(outcomes) if outcome.kind != "returned" or values_matter
    }
    if len(texts) == 2 and texts[0] == texts[1]:
        return f"both ranks {texts[0]}"
    return "; ".join(f"rank {rank} {text}" for rank, text in texts.items())


def _words(outcome: Outcome) -> str:
    if outcome.kind == "returned":
        return f"returned {textwrap.shorten(str(outcome.value), 80)}"
    return f"{outcome.kind}: {outcome.detail}" if outcome.detail else outcome.kind
