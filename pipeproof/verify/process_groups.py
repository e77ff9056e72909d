"""3xx: the groups are those of the mesh, and all ranks make them in one order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from pipeproof.comm.mesh import Mesh
from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.rule_doc import ExampleKind, RuleDoc
from pipeproof.schedule.op_table import NONE, Group, OpGraph
from pipeproof.schedule.ops import AXES, SEND_KINDS
from pipeproof.verify.subject import Rule, Subject, of_small_plan

MEMBERS = RuleDoc(
    code="PP309",
    title="a group does not hold the ranks of its axis",
    explanation=(
        "The members of a group along an axis differ in their coordinate on that axis and in no other, and all of "
        "them are in it. A group made with a wrong size or from permuted axes reduces over strangers, leaves "
        "members out, or joins ranks of unlike stages. Along pp a group may hold some of the ranks (the two owners "
        "of a tied weight). Without a plan there is no mesh: then the members must at least compute the same stages."
    ),
    wrong=(
        "group tp: 0 1\n"
        "rank 0: 0F0 0F0/0.ALL_REDUCE:tp{group=0 range=0..8 reduction=sum}\n"
        "rank 1: 1F0 0F0/0.ALL_REDUCE:tp{group=0 range=0..8 reduction=sum}"
    ),
    right=(
        "group tp: 0 1\n"
        "rank 0: 0F0 0F0/0.ALL_REDUCE:tp{group=0 range=0..8 reduction=sum}\n"
        "rank 1: 0F0 0F0/0.ALL_REDUCE:tp{group=0 range=0..8 reduction=sum}"
    ),
)


def _check_members(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    stages_of: dict[int, set[int]] = {}
    for stage, ranks in subject.stage_owners.items():
        for rank in ranks:
            stages_of.setdefault(rank, set()).add(stage)
    for index, group in enumerate(graph.groups):
        if group.axis not in AXES:
            continue
        if subject.lowered is not None:
            wrong = _not_of_mesh(group, graph.global_rank, subject.lowered.mesh)
        else:
            wrong = _across_stages(group, stages_of)
        if wrong is not None:
            users = np.flatnonzero(graph.group == index)[:2].tolist()
            yield MEMBERS.finding(
                f"the {group.axis} group {[graph.global_rank[rank] for rank in group.ranks]} {wrong}",
                help=f"make each {group.axis} group of the ranks that differ in their {group.axis} coordinate alone",
                witness=subject.witness(*users) if users else None,
            )


def _not_of_mesh(group: Group, global_rank: tuple[int, ...], mesh: Mesh) -> str | None:
    ranks = [global_rank[rank] for rank in group.ranks]
    first = mesh.coords(ranks[0])
    along = [mesh.rank({**first, group.axis: place}) for place in range(mesh.size(group.axis))]
    if group.size != len(along) and group.axis != "pp":
        return f"has {group.size} members, and the mesh has {len(along)} ranks along {group.axis}: {along}"
    if ranks != [rank for rank in along if rank in ranks]:
        return f"is not the ranks along {group.axis} in their order, which are {along}"
    return None


def _across_stages(group: Group, stages_of: dict[int, set[int]]) -> str | None:
    if group.axis == "pp" or not all(rank in stages_of for rank in group.ranks):
        return None
    first = group.ranks[0]
    for rank in group.ranks[1:]:
        if stages_of[rank] != stages_of[first]:
            selected, theirs = sorted(stages_of[first]), sorted(stages_of[rank])
            return f"joins unlike stages: rank {first} computes stages {selected}, rank {rank} stages {theirs}"
    return None


def _creation(order: str) -> str:
    return (
        "from pipeproof.verify.declared_facts import Facts\n"
        "from pipeproof.verify.subject import program_subject\n\n"
        f"facts = Facts(group_creation={order})\n"
        "text = 'group tp: 0 1\\ngroup dp: 0 1\\nrank 0: 0F0\\nrank 1: 0F0'\n"
        "subject = program_subject(text, facts=facts)"
    )


CREATION = RuleDoc(
    code="PP310",
    title="ranks make their groups in different orders",
    explanation=(
        "Making a communicator is itself a meeting of all its members. Ranks that make the same groups in another "
        "order wait for each other before training has begun, or take each other's communicators for their own. "
        "The orders of all ranks must fit into one, and every member must take part. The order in which the graph "
        "lists its groups holds for ranks without an order of their own."
    ),
    wrong=_creation("((0, 1), (1, 0))"),
    right=_creation("((0, 1), (0, 1))"),
    kind=ExampleKind.PYTHON,
)


def _check_creation(subject: Subject) -> Iterator[Finding]:
    order = subject.facts.group_creation
    if order is None:
        return
    graph = subject.graph
    _require_known(order, graph)
    for index, group in enumerate(graph.groups):
        for rank in group.ranks:
            times = order[rank].count(index)
            if times != 1:
                yield CREATION.finding(
                    f"rank {graph.global_rank[rank]} is a member of {_name(graph, index)} and makes it "
                    f"{'never' if times == 0 else f'{times} times'}",
                    help="make every group once on each of its members",
                )
    cycle = _cycle(order)
    if cycle is not None:
        parts = [
            f"rank {graph.global_rank[rank]} makes {_name(graph, first)} before {_name(graph, second)}"
            for rank, first, second in cycle
        ]
        yield CREATION.finding(
            f"the orders do not fit into one: {'; '.join(parts)}",
            help="make the groups in one order on all ranks, for instance that of a sorted list",
        )


def _require_known(order: tuple[tuple[int, ...], ...], graph: OpGraph) -> None:
    if len(order) != graph.num_ranks:
        raise ValueError(f"group_creation is of {len(order)} ranks, and the graph has {graph.num_ranks}")
    for rank, indices in enumerate(order):
        for index in indices:
            if not 0 <= index < len(graph.groups):
                raise ValueError(f"group_creation of rank {rank}: group {index}, but there are {len(graph.groups)}")


def _name(graph: OpGraph, index: int) -> str:
    group = graph.groups[index]
    return f"group {index} ({group.axis} {[graph.global_rank[rank] for rank in group.ranks]})"


def _cycle(order: tuple[tuple[int, ...], ...]) -> list[tuple[int, int, int]] | None:
    """A shortest circle of (rank, group, next group), each group made before the next; None if one order fits all."""
    import networkx as nx

    before: nx.DiGraph[int] = nx.DiGraph()
    for rank, indices in enumerate(order):
        for first, second in pairwise(dict.fromkeys(indices)):
            before.add_edge(first, second, rank=before.get_edge_data(first, second, {"rank": rank})["rank"])
    best: list[int] | None = None
    for component in nx.strongly_connected_components(before):
        for start in sorted(component) if len(component) > 1 else []:
            inside = before.subgraph(component)
            ways = [nx.shortest_path(inside, after, start) for after in inside.successors(start)]
            best = min([*ways, *([best] if best else [])], key=lambda way: (len(way), way))
    if best is None:
        return None
    circle = [best[-1], *best]
    return [(before.edges[first, second]["rank"], first, second) for first, second in pairwise(circle)]


def _with_peers(peers: str) -> str:
    return of_small_plan(
        "{'pp': 2, 'dp': 2}",
        f"peers = {peers}",
        "for rank, of_rank in enumerate(rows):",
        "    rows[rank] = [replace(row, peer=peers[rank]) if row.peer >= 0 else row for row in of_rank]",
    )


REPLICAS = RuleDoc(
    code="PP311",
    title="a message crosses from one replica to another",
    explanation=(
        "Ranks that differ in dp, cp or ep work on other sequences or other parts of them: a tensor of one means "
        "nothing to another. Sizes and names agree, so that nothing fails; the usual cause is a rank computed with "
        "another order of the mesh axes. Between tp ranks a message may cross: that is a change of layout, which "
        "the rules on transports check."
    ),
    wrong=_with_peers("{0: 3, 1: 2, 2: 1, 3: 0}"),
    right=_with_peers("{0: 2, 1: 3, 2: 0, 3: 1}"),
    kind=ExampleKind.PYTHON,
)


def _check_replicas(subject: Subject) -> Iterator[Finding]:
    graph, mesh = subject.graph, subject.plan.mesh
    axes = [axis for axis in ("dp", "cp", "ep") if mesh.size(axis) > 1]
    coords = [mesh.coords(rank) for rank in graph.global_rank] if axes else []
    for index, channel in enumerate(graph.channels if axes else ()):
        crossed = [axis for axis in axes if coords[channel.src][axis] != coords[channel.dst][axis]]
        if crossed:
            rows = np.flatnonzero(graph.channel == index)
            sends = rows[graph.is_kind(SEND_KINDS)[rows]]
            ends = [int(rows[0])] if not len(sends) else [int(sends[0]), int(graph.match[sends[0]])]
            yield REPLICAS.finding(
                f"{graph.ops[ends[0]]} goes from {subject.coords_text(channel.src)} to "
                f"{subject.coords_text(channel.dst)}: {' and '.join(crossed)} differ",
                help=f"send to the rank with the same coordinates on {' and '.join(crossed)}",
                witness=subject.witness(*(i for i in ends if i != NONE)),
            )


RULES = (
    Rule(MEMBERS, _check_members),
    Rule(CREATION, _check_creation),
    Rule(REPLICAS, _check_replicas, needs_plan=True),
)
