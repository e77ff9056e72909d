"""Durations of messages and collectives of fake ranks: by the links of a plan's ``cost.network``, or zero."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from pipeproof.cost.network_times import Network
from pipeproof.cost.transfer_times import NetworkTimes
from pipeproof.schedule.ops import OpKind
from pipeproof.specs.cost import NetworkSpec


class FakeTimes:
    """Times in microseconds by the links of a network, without contention; zero without a network."""

    def __init__(self, network: Network | None) -> None:
        self._times = None if network is None else NetworkTimes(network, "float32", "float32")

    def message_us(self, src: int, dst: int, num_bytes: int) -> Fraction:
        """Return the time from the start of a message until it has arrived."""
        if self._times is None:
            return Fraction(0)
        return self._times.message_us(np.array([[src, dst]], dtype=np.int64), num_bytes)

    def collective_us(self, kind: OpKind, ranks: tuple[int, ...], num_bytes: int) -> Fraction:
        """Return the time of a collective with so many bytes of each member, from the arrival of the last member.

        It is computed by the formulas of ``pipeproof.cost.network_times``.
        """
        if self._times is None:
            return Fraction(0)
        return self._times.collective_us(kind, np.array([ranks], dtype=np.int64), num_bytes)


def times_of(network: Mapping[str, Any] | None) -> FakeTimes:
    """Return the times of a network with the keys of a plan's ``cost.network``; zero without one.

    Raises:
        ValueError: a key is wrong or missing, or links are shared, which this clock does not support.
    """
    if network is None:
        return FakeTimes(None)
    spec = NetworkSpec.model_validate(dict(network))
    if spec.ranks_per_node is None or spec.node is None:
        raise ValueError("a network needs ranks_per_node and node: {bandwidth: GB/s, latency_us: ...}")
    if spec.contention:
        raise ValueError("contention: true is for `pipeproof simulate`; here each message has its links to itself")
    return FakeTimes(Network.of_spec(spec))


def exact_us(value: float | Fraction) -> Fraction:
    """Return a time as the exact fraction of its decimal text.

    Raises:
        ValueError: it is negative or no number.
    """
    time = value if isinstance(value, Fraction) else Fraction(str(value))
    if time < 0:
        raise ValueError(f"a computation takes at least 0 us, not {value}")
    return time
