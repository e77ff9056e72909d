"""The graph of waits: cycles and ends of waits in runs, scripts, watched jobs, dumps and logs.

A node is a rank, or one operation of a rank. An edge is a wait. Sources add the known waits; this module finds the
cycle, the nodes at which waits end, and the ranks that differ from the majority.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import networkx as nx

from pipeproof.diagnostics.finding import (
    CycleWitness,
    Finding,
    Location,
    OpsWitness,
    ProgramExcerpt,
    RuleDoc,
    WitnessOp,
)

Node = TypeVar("Node", bound=Hashable)

_MOST_STEPS: Final = 100_000
"""Waits after which the search for a shorter cycle ends."""
_MOST_LINES: Final = 20
"""Waits that a message lists."""
_MOST_RANKS: Final = 8
"""Ranks that a message names."""
_ENOUGH: Final = 2
"""Number of different keys from which on ranks can differ from the majority."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait of a rank: the waiting operation, the line ``at`` that issued it, and the awaited operation.

    ``why`` is the reason why it does not come. ``tensor`` is the operation's shape and type, ``seconds`` its age.
    ``is_mutual`` is True between two issued parts of one operation: they wait for each other, which alone blocks
    nothing.
    """

    rank: int
    op: str
    awaited: str
    why: str = ""
    at: str = ""
    location: Location | None = None
    tensor: str = ""
    seconds: float = 0.0
    is_mutual: bool = False

    @property
    def text(self) -> str:
        """``rank 0 waits in send 0->1 #2 at train.py:7``."""
        return f"rank {self.rank} waits{self.op and f' in {self.op}'}{self.at and f' at {self.at}'}"

    @property
    def sentence(self) -> str:
        """The text with the awaited operation, and why it does not come."""
        return f"{self.text} for {self.awaited}{self.why and f', {self.why}'}"


class WaitGraph(Generic[Node]):
    """Waits between nodes. Results follow the order in which nodes were added."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self._waits: dict[Node, dict[Node, Wait]] = {node: {} for node in nodes}

    def __iter__(self) -> Iterator[Node]:
        """Iterate over the nodes."""
        return iter(self._waits)

    def add(self, node: Node, other: Node, wait: Wait) -> None:
        """Add a wait of a node for another one; of several, the longest blocking wait is kept."""
        self._waits.setdefault(other, {})
        waits = self._waits.setdefault(node, {})
        earlier = waits.get(other)
        weight = not wait.is_mutual, wait.seconds
        if earlier is None or weight > (not earlier.is_mutual, earlier.seconds):
            waits[other] = wait

    def waits(self, node: Node) -> Mapping[Node, Wait]:
        """Return the waits of a node, by the node that it waits for."""
        return self._waits[node]

    def waiters(self, node: Node) -> dict[Node, Wait]:
        """Return the waits for a node, by the node that waits."""
        return {other: waits[node] for other, waits in self._waits.items() if node in waits}

    def ends(self, starts: Iterable[Node] | None = None) -> Iterator[tuple[Node, ...]]:
        """Yield the sets of nodes that no wait leaves: one node without waits, or nodes that wait for each other.

        They come in the order in which waits from ``starts``, by default all nodes, lead there.
        """
        numbers = {node: number for number, node in enumerate(self._waits)}
        condensed = nx.condensation(self._nx())
        seen: set[int] = set()
        for start in self._waits if starts is None else starts:
            first = condensed.graph["mapping"][start]
            reached = {first, *nx.descendants(condensed, first)} - seen
            seen |= reached
            members = [condensed.nodes[end]["members"] for end in reached if not condensed[end]]
            ends = [sorted(each, key=numbers.__getitem__) for each in members]
            yield from map(tuple, sorted(ends, key=lambda end: numbers[end[0]]))

    def cycle(self, among: Collection[Node] | None = None, seconds: float = 0.0) -> list[tuple[Node, Wait]]:
        """Return a shortest cycle of waits that are ``seconds`` old, not all mutual; empty if there is none.

        Args:
            among: the nodes of the cycle; by default all.
            seconds: least age of each wait.
        """
        nodes = self._waits if among is None else [node for node in self._waits if node in among]
        inside = {
            node: {
                other: not wait.is_mutual
                for other, wait in self._waits[node].items()
                if wait.seconds >= seconds and (among is None or other in among)
            }
            for node in nodes
        }
        cycle = shortest_cycle(inside)
        return [(node, self._waits[node][other]) for node, other in zip(cycle, cycle[1:] + cycle[:1], strict=True)]

    def chain(self, start: Node) -> Iterator[Wait]:
        """Yield the first wait of each node from ``start`` to one that waits for nobody. The graph has no cycle."""
        while waits := self._waits[start]:
            start, wait = next(iter(waits.items()))
            yield wait

    def _nx(self) -> nx.DiGraph[Node]:
        graph: nx.DiGraph[Node] = nx.DiGraph()
        graph.add_nodes_from(self._waits)
        graph.add_edges_from((node, other) for node, waits in self._waits.items() for other in waits)
        return graph


def shortest_cycle(successors: Mapping[Node, Mapping[Node, bool]]) -> list[Node]:
    """Return the first of the shortest cycles with an edge that counts; empty if there is none.

    ``successors`` has for each node its edges, and whether each of them counts. In a large component the search ends
    with the shortest cycle so far.
    """
    numbers = {node: number for number, node in enumerate(successors)}
    graph: nx.DiGraph[Node] = nx.DiGraph((node, other) for node, others in successors.items() for other in others)
    component = {node: number for number, nodes in enumerate(nx.strongly_connected_components(graph)) for node in nodes}
    inside = {
        node: sorted((other for other in others if component[other] == component[node]), key=numbers.__getitem__)
        for node, others in successors.items()
    }
    best: list[Node] = []
    num_steps = 0
    for start in numbers:
        # only a cycle that is shorter than the best one helps; the smallest has one node
        came_from: dict[tuple[Node, bool], tuple[Node, bool]] = {}
        queue = deque([(start, False)] if inside[start] else ())
        while queue and (start, True) not in came_from:
            node, counts = queue.popleft()
            num_steps += 1
            for other in inside[node]:
                after = other, counts or successors[node][other]
                if after not in came_from and after != (start, False):
                    came_from[after] = node, counts
                    queue.append(after)
        if (start, True) in came_from:
            back = [came_from[start, True]]
            while back[-1] != (start, False):
                back.append(came_from[back[-1]])
            if not best or len(back) < len(best):
                best = [node for node, _ in reversed(back)]
        if best and num_steps > _MOST_STEPS:
            break
    return best


def minority(keys: Mapping[int, object]) -> tuple[int, ...]:
    """Return the ranks whose key is not the most frequent one; none without a single most frequent key."""
    counts = Counter(keys.values()).most_common()
    if len(counts) < _ENOUGH or counts[0][1] == counts[1][1]:
        return ()
    return tuple(sorted(rank for rank, key in keys.items() if key != counts[0][0]))


def ranks_text(ranks: Collection[int]) -> str:
    """Return ``rank 3``, or ``ranks 0, 1, 2``, shortened if there are many."""
    shown = ", ".join(map(str, sorted(ranks)[:_MOST_RANKS]))
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def cycle_headline(cycle: Sequence[tuple[Node, Wait]]) -> str:
    """Return which ranks wait for each other."""
    ranks = {wait.rank for _, wait in cycle}
    return f"{ranks_text(ranks)} wait for each other" if len(ranks) > 1 else f"{ranks_text(ranks)} waits for itself"


def wait_lines(waits: Sequence[Wait]) -> list[str]:
    """Return a sentence for each wait; of many, the first and the last."""
    lines = [wait.sentence for wait in waits[: _MOST_LINES // 2]]
    rest = waits[len(lines) :]
    left_out = len(rest) - _MOST_LINES // 2
    if left_out > 0:
        lines.append(f"and {left_out} more waits")
    return lines + [wait.sentence for wait in rest[max(left_out, 0) :]]


def cycle_finding(
    code: RuleDoc, cycle: Sequence[tuple[Node, Wait]], help: str, programs: tuple[ProgramExcerpt, ...] = ()
) -> Finding:
    """Return the finding about a cycle of waits; ``programs`` are excerpts of the programs of its ranks."""
    waits = [wait for _, wait in cycle]
    message = "\n".join((f"{cycle_headline(cycle)}, and none of them continues", *wait_lines(waits)))
    location = next((wait.location for wait in waits if wait.location is not None), None)
    witness = CycleWitness(tuple(WitnessOp(wait.rank, wait.op) for wait in waits), programs)
    return code.finding(message, location, help, witness)


def absence_finding(
    code: RuleDoc, graph: WaitGraph[Node], absent: Mapping[int, Node], what: str, lines: Sequence[str] = ()
) -> Finding:
    """Return the finding about ranks, each with its node, that never reached an operation in which others wait.

    Args:
        code: its code.
        graph: the graph with the waits for these nodes.
        absent: the ranks that never reached it.
        what: the fault, as text before the operation.
        lines: known facts about these ranks.
    """
    waits = list({wait.text: wait for node in absent.values() for wait in graph.waiters(node).values()}.values())
    witness = OpsWitness(
        tuple(WitnessOp(wait.rank, f"{wait.op}: {wait.tensor}" if wait.tensor else wait.op) for wait in waits)
    )
    message = "\n".join((f"{what} {waits[0].op}", *(wait.text for wait in waits[:_MOST_LINES]), *lines))
    return code.finding(message, waits[0].location, witness=witness)
