"""How the members of a group lie on nodes and network cards: all that the time of a collective asks of its ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Self

import numpy as np

from pipeproof.schedule.columns import IntColumn


@dataclass(frozen=True, slots=True)
class Shape:
    """``on_nodes`` are the members on each node that has some; ``on_cards`` for each card (its members, its node's)."""

    num_ranks: int
    on_nodes: tuple[int, ...]
    on_cards: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, ranks: list[int], ranks_per_node: int, ranks_per_nic: int) -> Self:
        """The shape of a group of global ranks. Node k has the ranks from k * ``ranks_per_node`` on; cards alike."""
        nodes = Counter(rank // ranks_per_node for rank in ranks)
        cards = Counter(rank // ranks_per_nic for rank in ranks)
        on_cards = sorted((count, nodes[card * ranks_per_nic // ranks_per_node]) for card, count in cards.items())
        return cls(len(ranks), tuple(sorted(nodes.values())), tuple(on_cards))

    @property
    def crosses(self) -> bool:
        """Whether the group lies on several nodes."""
        return len(self.on_nodes) > 1

    @property
    def has_neighbours(self) -> bool:
        """Whether some of its members share a node."""
        return self.on_nodes[-1] > 1


def shapes_of(groups: IntColumn, ranks_per_node: int, ranks_per_nic: int) -> frozenset[Shape]:
    """The shapes among ``groups``, global ranks of shape [groups, members]; linear, but for sorting."""
    places = np.concatenate([groups // ranks_per_node, groups // ranks_per_nic], axis=1)
    members = groups.shape[1]
    first = np.repeat(places[:, [0, members]], members, axis=1)
    _, examples = np.unique(places - first, axis=0, return_index=True)
    return frozenset(Shape.of(ranks, ranks_per_node, ranks_per_nic) for ranks in groups[examples].tolist())
