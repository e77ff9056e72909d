"""Times of messages and collectives of a plan, from a network or from a profile."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

from pipeproof.cost.network_times import Link, Network, Shape
from pipeproof.schedule.columns import IntColumn
from pipeproof.schedule.ops import OpKind

if TYPE_CHECKING:
    from pipeproof.cost.measured_profile import ProfileTimes


@dataclass(frozen=True)
class NetworkTimes:
    """Times by the links of a network, cached."""

    network: Network
    dtype: str
    gradient_dtype: str
    _shapes: dict[tuple[int, bytes], frozenset[Shape]] = field(default_factory=dict, repr=False, compare=False)
    _times: dict[tuple[OpKind, Shape, int], Fraction] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def _edges(self) -> dict[tuple[int, int], Link]:
        return dict(self.network.edges)

    def message_us(self, pairs: IntColumn, num_bytes: int) -> Fraction:
        """Time of the slowest of these messages."""
        edges = [self._edges.get((a, b)) for a, b in pairs.tolist()] if self._edges else [None] * len(pairs)
        crosses = (pairs[:, 0] // self.network.ranks_per_node != pairs[:, 1] // self.network.ranks_per_node).tolist()
        ways = {edge or between for edge, between in zip(edges, crosses, strict=True)}
        size = Fraction(num_bytes)
        return max(
            way.message_us(size) if isinstance(way, Link) else self.network.message_us(size, crosses=way)
            for way in ways
        )

    def collective_us(self, kind: OpKind, groups: IntColumn, num_bytes: int) -> Fraction:
        """Time in the slowest of these groups."""
        key = groups.shape[1], groups.tobytes()
        if key not in self._shapes:
            self._shapes[key] = self.network.shapes(groups)
        return max(self._of_shape(kind, shape, num_bytes) for shape in self._shapes[key])

    def _of_shape(self, kind: OpKind, shape: Shape, num_bytes: int) -> Fraction:
        key = kind, shape, num_bytes
        if key not in self._times:
            self._times[key] = self.network.collective_us(kind, shape, Fraction(num_bytes))
        return self._times[key]


@dataclass(frozen=True)
class MeasuredLinks:
    """Times by the curves of a profile, which has sizes but no ranks."""

    profile: ProfileTimes
    dtype: str
    gradient_dtype: str

    def message_us(self, pairs: IntColumn, num_bytes: int) -> Fraction:
        """The measured time of a message.

        Raises:
            BadPlanAtError: PP161, the profile has no message.
        """
        return self.profile.message_us(num_bytes)

    def collective_us(self, kind: OpKind, groups: IntColumn, num_bytes: int) -> Fraction:
        """The measured time of a collective among as many ranks.

        Raises:
            BadPlanAtError: PP161, the profile has none.
        """
        return self.profile.collective_us(kind, groups.shape[1], num_bytes)


LinkTimes = NetworkTimes | MeasuredLinks
"""Times of messages and collectives in exact microseconds, each with its links to itself, of activations in ``dtype``.

Gradients of weights are reduced in ``gradient_dtype``. ``pairs`` has the global ranks (sender, receiver) of every
instance, shape [instances, 2], ``groups`` the members, shape [instances, members]: a rank of a folded graph represents
many, and the slowest counts. A collective takes its time from the arrival of its last member on.
"""
