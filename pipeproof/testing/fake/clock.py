"""How long messages and collectives of fake ranks take: the links of a plan's ``cost.network``, or no time at all."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from pipeproof.comm.links.network import Network
from pipeproof.comm.links.times import NetworkTimes
from pipeproof.schedule.ops import OpKind
from pipeproof.specs.network import NetworkSpec


class FakeTimes(Protocol):
    """Times in microseconds."""

    def message_us(self, src: int, dst: int, num_bytes: int) -> Fraction:
        """From the moment a message is on its way until it has arrived."""

    def collective_us(self, kind: OpKind, ranks: tuple[int, ...], num_bytes: int) -> Fraction:
        """Of a collective into which each member puts so many bytes, from the last member's coming on."""


class NoTime:
    """Messages and collectives take none; only computations do."""

    def message_us(self, src: int, dst: int, num_bytes: int) -> Fraction:
        """Nothing."""
        return Fraction(0)

    def collective_us(self, kind: OpKind, ranks: tuple[int, ...], num_bytes: int) -> Fraction:
        """Nothing."""
        return Fraction(0)


class LinkedTimes:
    """Times by the links of a network, each message and collective with its links to itself."""

    def __init__(self, network: Network) -> None:
        self._times = NetworkTimes(network, "float32", "float32")

    def message_us(self, src: int, dst: int, num_bytes: int) -> Fraction:
        """By the link between the two ranks."""
        return self._times.message_us(np.array([[src, dst]], dtype=np.int64), num_bytes)

    def collective_us(self, kind: OpKind, ranks: tuple[int, ...], num_bytes: int) -> Fraction:
        """By the formulas of ``pipeproof.comm.links.network``."""
        return self._times.collective_us(kind, np.array([ranks], dtype=np.int64), num_bytes)


def times_of(network: Mapping[str, Any] | None) -> FakeTimes:
    """The times of a network with the keys of a plan's ``cost.network``; none without one.

    Raises:
        ValueError: a key is wrong or missing, or links are to be shared, which this clock does not do.
    """
    if network is None:
        return NoTime()
    spec = NetworkSpec.model_validate(dict(network))
    if spec.ranks_per_node is None or spec.node is None:
        raise ValueError("a network needs ranks_per_node and node: {bandwidth: GB/s, latency_us: ...}")
    if spec.contention:
        raise ValueError("contention: true is for `pipeproof simulate`; here each message has its links to itself")
    return LinkedTimes(Network.of_spec(spec))


def exact_us(value: float | Fraction) -> Fraction:
    """A time as the decimal that it prints as.

    Raises:
        ValueError: it is negative or no number.
    """
    time = value if isinstance(value, Fraction) else Fraction(str(value))
    if time < 0:
        raise ValueError(f"a computation takes at least 0 us, not {value}")
    return time
