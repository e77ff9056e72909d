"""Check of a backend against its table: ``check_backend`` observes every row that two ranks can observe.

For your own backend, write an ``Endpoint`` and a ``World``
(``pipeproof.testing.endpoint_protocol``), fill in a ``BackendTable`` and run::

    results = check_backend(my_table, make_my_world)
    assert all(result.ok for result in results), results
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass

from pipeproof.comm.backend_rows import BackendTable, RowValue
from pipeproof.testing.endpoint_protocol import MakeWorld, Outcome, World
from pipeproof.testing.probes import PROBES, Outcomes, Probe


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
            if not _usable_after(outcomes):
                stack.close()
                world = None
    return results


def _selected(keys: Collection[str] | None) -> list[Probe]:
    if keys is None:
        return list(PROBES)
    unknown = set(keys) - {probe.key for probe in PROBES}
    if unknown:
        known = ", ".join(probe.key for probe in PROBES)
        raise ValueError(f"no probe observes {', '.join(sorted(unknown))}; probes observe {known}")
    return [probe for probe in PROBES if probe.key in keys]


def _usable_after(outcomes: Outcomes) -> bool:
    return {outcome.kind for outcome in outcomes} in ({"returned"}, {"raised"})


def _result(table: BackendTable, probe: Probe, outcomes: Outcomes) -> RowResult:
    expected, observed = table.value(probe.key), probe.read(outcomes)
    if expected in probe.look_alike and observed in probe.look_alike:
        observed = expected
    ok = table.allows(probe.key, observed)
    return RowResult(probe.key, expected, observed, ok, _detail(observed, outcomes))


def _detail(observed: RowValue, outcomes: Outcomes) -> str:
    """Describe ranks that did not return, and values without a name in the table."""
    values_matter = observed in ("wrong", "other", "converted")
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
