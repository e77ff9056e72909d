"""Running digest of each group's collectives: two members whose sequences differ are found without the operations.

The digest of a group at position p covers its collectives 0 to p - 1: the operation, elements and type of each. For
each power of four, a ring keeps the digests at the last two multiples of it. So of two ranks that are d collectives
apart there is always a position at most 8 d back at which both have one, however many records are overwritten.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from pipeproof.interop.hang.recorder_names import UNEVEN, num_elements

FACTOR: Final = 0x9E3779B97F4A7C15
"""An odd number without a pattern in its bits."""


class SequenceDigest:
    """Digest of a group's collectives until now; ``slot`` is its position in the ring."""

    __slots__ = ("position", "slot", "value")

    def __init__(self, slot: int) -> None:
        self.slot, self.position, self.value = slot, 0, 0

    def add(self, op: str, num_inputs: int, num_outputs: int, dtype: str) -> None:
        """Add the next collective."""
        self.position += 1
        value = (self.value ^ _signature(op, num_inputs, num_outputs, dtype)) * FACTOR & 0xFFFFFFFFFFFFFFFF
        self.value = value ^ value >> 32


@lru_cache(maxsize=4096)
def _signature(op: str, num_inputs: int, num_outputs: int, dtype: str) -> int:
    """Return a number of what the members of a collective must have in common."""
    return _hash(repr((op,) if op in UNEVEN else (op, dtype, num_elements(op, num_inputs, num_outputs))))


@lru_cache(maxsize=4096)
def group_key(text: str) -> int:
    """Return the key of a group's digests, not 0, from its text in the ring."""
    return _hash(text) | 1


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Divergence:
    """Members of a group whose collectives differ: they agree before ``agreed``, and differ before ``different``."""

    key: int
    agreed: int
    different: int
    digests: Mapping[int, int]
    """By rank, at ``different``."""


def divergences(digests: Iterable[tuple[int, Mapping[int, Mapping[int, int]]]]) -> Iterator[Divergence]:
    """Find the groups whose members have issued different collectives.

    Args:
        digests: each rank with its digests, by the key of a group and the position.
    """
    groups: dict[int, dict[int, dict[int, int]]] = {}
    for rank, by_key in digests:
        for key, by_position in by_key.items():
            for position, value in by_position.items():
                groups.setdefault(key, {}).setdefault(position, {})[rank] = value
    for key, positions in groups.items():
        different = min((each for each, values in positions.items() if len(set(values.values())) > 1), default=None)
        if different is not None:
            ranks = positions[different].keys()
            agreed = max(
                (each for each in positions if each < different and positions[each].keys() >= ranks), default=0
            )
            yield Divergence(key, agreed, different, positions[different])
