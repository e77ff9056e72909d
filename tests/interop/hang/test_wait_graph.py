"""The one wait graph: its cycles and ends against networkx's, and the sentences about them."""

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.diagnostics.wait_graph import (
    Wait,
    WaitGraph,
    cycle_headline,
    minority,
    ranks_text,
    shortest_cycle,
    wait_lines,
)

_EDGES = st.dictionaries(st.tuples(st.integers(0, 6), st.integers(0, 6)), st.booleans(), max_size=20)


def graph_of(edges):
    graph = WaitGraph(range(7))
    for (node, other), is_mutual in edges.items():
        graph.add(node, other, Wait(node, f"op of {node}", f"rank {other}", is_mutual=is_mutual))
    return graph


@settings(max_examples=300, deadline=None)
@given(_EDGES)
def test_the_cycle_is_the_shortest_one_with_a_wait_that_is_not_mutual(edges):
    cycles = [
        cycle
        for cycle in nx.simple_cycles(nx.DiGraph(list(edges)))
        if not all(edges[edge] for edge in zip(cycle, cycle[1:] + cycle[:1], strict=True))
    ]
    found = [node for node, _ in graph_of(edges).cycle()]
    assert len(found) == min(map(len, cycles), default=0)
    around = list(zip(found, found[1:] + found[:1], strict=True))
    assert not found or (set(around) <= set(edges) and len(set(found)) == len(found))
    assert not found or not all(edges[edge] for edge in around)


@settings(max_examples=300, deadline=None)
@given(_EDGES, st.lists(st.integers(0, 6), max_size=3))
def test_waits_end_at_what_reaches_only_what_reaches_it(edges, starts):
    of_nx = nx.DiGraph(list(edges))
    of_nx.add_nodes_from(range(7))
    reached = {node: {node, *nx.descendants(of_nx, node)} for node in range(7)}
    wanted = {
        tuple(sorted(reached[node]))
        for start in starts
        for node in reached[start]
        if all(node in reached[other] for other in reached[node])
    }
    ends = list(graph_of(edges).ends(starts))
    assert len(ends) == len(wanted)
    assert set(ends) == wanted


def test_of_several_waits_one_that_blocks_is_kept_and_then_the_oldest():
    graph = WaitGraph(range(2))
    for op, seconds, is_mutual in (("a", 9, True), ("b", 2, False), ("c", 5, False), ("d", 3, False)):
        graph.add(0, 1, Wait(0, op, "rank 1", seconds=seconds, is_mutual=is_mutual))
    assert graph.waits(0)[1].op == "c"
    graph.add(1, 0, Wait(1, "e", "rank 0", seconds=4))
    assert [wait.op for _, wait in graph.cycle(seconds=4)] == ["c", "e"]
    assert graph.cycle(seconds=4.5) == graph.cycle(among={0}) == []


def test_the_sentences():
    wait = Wait(3, "send 3->1 #2", "rank 1", "which has not issued its part", "train.py:7")
    assert wait.sentence == "rank 3 waits in send 3->1 #2 at train.py:7 for rank 1, which has not issued its part"
    assert cycle_headline([(1, Wait(1, "", "")), (0, Wait(0, "", ""))]) == "ranks 0, 1 wait for each other"
    assert cycle_headline([(1, Wait(1, "a", "")), (0, Wait(1, "b", ""))]) == "rank 1 waits for itself"
    assert ranks_text(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
    lines = wait_lines([Wait(rank, "", f"rank {rank + 1}") for rank in range(30)])
    assert lines[9:12] == ["rank 9 waits for rank 10", "and 10 more waits", "rank 20 waits for rank 21"]
    assert len(lines) == 21


def test_a_large_component_is_not_searched_for_ever():
    ring = {node: {(node + 1) % 3000: True} for node in range(3000)}
    assert len(shortest_cycle(ring)) == 3000


def test_the_minority_of_keys():
    assert minority({0: "a", 1: "b", 2: "a"}) == (1,)
    assert minority({0: "a", 1: "b"}) == ()
    assert minority({0: "a", 1: "a"}) == ()
