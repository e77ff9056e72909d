"""Flows that share links fairly: max-min rates by progressive filling, in exact arithmetic.

All rates grow equally until a link is full; the rates on it stay fixed and
the others keep growing (Bertsekas and Gallager, Data Networks, second edition,
section 6.5.2). When a flow starts or ends, rates change for the
flows that share links with it, directly or through other flows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

import simpy

Link = Hashable
"""The name of a link in one direction."""

_ZERO = Fraction(0)


def fair_rates(paths: Mapping[int, Iterable[Link]], capacity: Callable[[Link], Fraction]) -> dict[int, Fraction]:
    """The max-min fair rate of each flow, from the links of its path, at least one.

    Linear in links times distinct rates.
    """
    on_link: dict[Link, set[int]] = defaultdict(set)
    for flow, path in paths.items():
        for link in path:
            on_link[link].add(flow)
    room = {link: capacity(link) for link in on_link}
    rates: dict[int, Fraction] = {}
    while on_link:
        shares = {link: room[link] / len(flows) for link, flows in on_link.items()}
        least = min(shares.values())
        full = [link for link, share in shares.items() if share == least]
        for flow in sorted({flow for link in full for flow in on_link[link]}):
            rates[flow] = least
            for link in paths[flow]:
                on_link[link].discard(flow)
                room[link] -= least
        on_link = {link: flows for link, flows in on_link.items() if flows}
    return rates


@dataclass(slots=True, eq=False)
class _Flow:
    """A running flow: remaining bytes ``left`` at time ``since``, and the rate in bytes per tick from then on."""

    path: tuple[Link, ...]
    left: Fraction
    since: int
    done: simpy.Event
    rate: Fraction = _ZERO
    ends_at: int = -1


class FairShares:
    """Flows over links with ``capacity(link)`` bytes per tick. A flow ends on the tick of its last byte.

    ``watch``, if given, is called with the time and the rates by path after
    each change of rates, for tests and link figures.
    """

    def __init__(
        self,
        env: simpy.Environment,
        capacity: Callable[[Link], Fraction],
        watch: Callable[[int, list[tuple[tuple[Link, ...], Fraction]]], None] | None = None,
    ) -> None:
        self._env, self._capacity, self._watch = env, capacity, watch
        self._flows: dict[int, _Flow] = {}
        self._on_link: dict[Link, set[int]] = defaultdict(set)
        self._num_flows = 0
        self._changed: set[Link] = set()

    def start(self, path: tuple[Link, ...], num_bytes: Fraction) -> simpy.Event:
        """Send ``num_bytes`` over all links of ``path`` from now; return the event of the arrival of the last byte."""
        done = self._env.event()
        if not num_bytes:
            return done.succeed()
        number = self._num_flows
        self._num_flows += 1
        self._flows[number] = _Flow(path, num_bytes, int(self._env.now), done)
        for link in path:
            self._on_link[link].add(number)
        self._change(path)
        return done

    def _change(self, links: Iterable[Link]) -> None:
        """Recompute rates, once for all flows that start and end at the same time."""
        if not self._changed:
            self._env.timeout(0).callbacks.append(self._share)  # after everything already due at this time
        self._changed.update(links)

    def _share(self, _: Any) -> None:
        now = int(self._env.now)
        paths = {number: self._flows[number].path for number in self._reached(self._changed)}
        self._changed.clear()
        for number, rate in fair_rates(paths, self._capacity).items():
            flow = self._flows[number]
            if rate == flow.rate:
                continue
            flow.left = max(_ZERO, flow.left - flow.rate * (now - flow.since))
            flow.rate, flow.since = rate, now
            self._aim(number, now + ceil(flow.left / rate))
        if self._watch is not None:
            self._watch(now, [(flow.path, flow.rate) for flow in self._flows.values()])

    def _reached(self, links: Iterable[Link]) -> list[int]:
        """Numbers of the flows on these links and of all flows connected to them by shared links, sorted."""
        ahead, seen, connected = list(links), set(links), set[int]()
        while ahead:
            for number in self._on_link[ahead.pop()] - connected:
                connected.add(number)
                new = [link for link in self._flows[number].path if link not in seen]
                seen.update(new)
                ahead += new
        return sorted(connected)

    def _aim(self, number: int, ends_at: int) -> None:
        """Schedule the end of a flow; a change of its rate before then replaces it."""
        self._flows[number].ends_at = ends_at

        def over(_: Any) -> None:
            flow = self._flows.get(number)
            if flow is None or flow.ends_at != int(self._env.now):
                return
            del self._flows[number]
            for link in flow.path:
                self._on_link[link].discard(number)
            flow.done.succeed()
            self._change(flow.path)

        self._env.timeout(ends_at - int(self._env.now)).callbacks.append(over)
