"""3xx: members of a group issue the same collectives in the same order, and all ranks make the groups of the mesh.

Collectives of a group meet like messages: the k-th call of one member meets
the k-th call of every other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from pipeproof.comm.plan_context import Mesh
from pipeproof.diagnostics.finding import ExampleKind, Finding, RuleDoc
from pipeproof.schedule.derive import BoolColumn, look_up
from pipeproof.schedule.op_table import NONE, Group, IntColumn, OpGraph
from pipeproof.schedule.ops import AXES, COLLECTIVE_KINDS, GATHER_KINDS, KIND_CODE, SEND_KINDS, OpKind
from pipeproof.verify.fifo_matching import rank_of
from pipeproof.verify.subject import Rule, Subject, of_ranks, of_small_plan


class _Calls:
    """The collective calls on groups, in columns, and the members of the groups."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.row = np.flatnonzero(graph.is_kind(COLLECTIVE_KINDS) & (graph.group != NONE))
        self.group, self.rank = graph.group[self.row], graph.rank[self.row]
        self.leader = np.array([group.ranks[0] for group in graph.groups], dtype=np.int64)
        members = [(index, rank) for index, group in enumerate(graph.groups) for rank in group.ranks]
        self.member_group, self.member_rank = np.array(members, dtype=np.int64).reshape(-1, 2).T
        self._member_keys = np.sort(self._key(self.member_group, self.member_rank))

    def _key(self, group: IntColumn, rank: IntColumn) -> IntColumn:
        return group * self.graph.num_ranks + rank

    def by_members(self) -> BoolColumn:
        """Mask of the calls that come from a member of their group."""
        return np.isin(self._key(self.group, self.rank), self._member_keys)

    def leaders_call(self) -> IntColumn:
        """For each call, the call of the group's first rank at the same position, else ``NONE``."""
        led = np.flatnonzero(self.rank == self.leader[self.group])
        led = led[np.argsort(self.group[led], kind="stable")]
        starts = np.searchsorted(self.group[led], np.arange(len(self.graph.groups) + 1))
        position = self.graph.position[self.row]
        counts = np.diff(starts)[self.group]
        index = np.minimum(starts[self.group] + position, max(len(led) - 1, 0))
        return np.where(position < counts, self.row[led[index]] if len(led) else NONE, NONE)

    def count_of(self, group: IntColumn, rank: IntColumn) -> IntColumn:
        """Number of collectives of each (rank, group) pair."""
        keys, counts = np.unique(self._key(self.group, self.rank), return_counts=True)
        return look_up(keys, counts, self._key(group, rank), missing=0)

    def find(self, group: int, rank: int, position: int) -> int | None:
        """The call of a rank at a position in its group; None if it issues fewer."""
        selected = (self.group == group) & (self.rank == rank) & (self.graph.position[self.row] == position)
        rows = self.row[selected]
        return int(rows[0]) if len(rows) else None


_IN_LAYER = "0F0/0.ALL_REDUCE:tp{{group=0 range=0..{} reduction=sum}}"
_MAXIMUM = "0F0 0ALL_REDUCE0:tp{group=0 range=0..1 reduction=max}"
_SUM = "0F0 0ALL_REDUCE0:tp{group=0 range=0..8 reduction=sum}"

COLLECTIVE = RuleDoc(
    code="PP306",
    title="the members of a group issue different collectives",
    explanation=(
        "Every member of a group must issue the same sequence of collectives: the k-th call of one meets the "
        "k-th call of the others. A member that is missing hangs the group; one that differs in kind, size, dtype, "
        "reduction or root mixes up values or hangs."
    ),
    wrong=of_ranks("tp: 0 1", "0F0 " + _IN_LAYER.format(64), "0F0 " + _IN_LAYER.format(32)),
    right=of_ranks("tp: 0 1", "0F0 " + _IN_LAYER.format(64), "0F0 " + _IN_LAYER.format(64)),
)


def _check_collectives(subject: Subject) -> Iterator[Finding]:
    graph, calls = subject.graph, _Calls(subject.graph)
    theirs = calls.leaders_call()
    member = calls.by_members()
    differs = member & ((theirs == NONE) | ~_same_call(subject, calls.row, theirs))
    first: dict[tuple[int, int], int] = {}
    wrong = np.flatnonzero(differs)
    where = zip(calls.group[wrong].tolist(), calls.rank[wrong].tolist(), strict=True)
    for key, position in zip(where, graph.position[calls.row[wrong]].tolist(), strict=True):
        first[key] = min(position, first.get(key, position))
    selected = calls.count_of(calls.member_group, calls.member_rank)
    of_leader = calls.count_of(calls.member_group, calls.leader[calls.member_group])
    for member_index in np.flatnonzero(selected < of_leader).tolist():
        key = int(calls.member_group[member_index]), int(calls.member_rank[member_index])
        first[key] = min(int(selected[member_index]), first.get(key, int(selected[member_index])))
    for index, rank in sorted(first):
        position = first[index, rank]
        group, leader = graph.groups[index], int(calls.leader[index])
        ends = [calls.find(index, one, position) for one in (leader, rank)]
        yield COLLECTIVE.finding(
            f"collective {position} of {group.axis} group {[graph.global_rank[r] for r in group.ranks]} is "
            f"{_describe(graph, ends[0])} on rank {graph.global_rank[leader]} but {_describe(graph, ends[1])} "
            f"on rank {graph.global_rank[rank]}",
            help="issue the same collectives in the same order on every member of the group",
            witness=subject.witness(*(o for o in ends if o is not None)),
        )


def _same_call(subject: Subject, ours: IntColumn, theirs: IntColumn) -> BoolColumn:
    """Return True if two calls are the same collective. Members along ``pp`` have different stages, others one.

    A call that names no tensor moves activations; in a graph alone, their type is unknown.
    """
    graph = subject.graph
    same = np.ones(len(ours), dtype=bool)
    for column in (graph.kind, graph.work_item, graph.target_kind, graph.index, graph.axis, graph.reduction):
        same &= column[ours] == column[theirs]
    length = graph.stop - graph.start
    same &= length[ours] == length[theirs]
    across_stages = graph.axis == AXES.index("pp")
    same &= (graph.stage[ours] == graph.stage[theirs]) | across_stages[ours]
    has_root = graph.kind == KIND_CODE[OpKind.BROADCAST]
    same &= (graph.peer[ours] == graph.peer[theirs]) | ~has_root[ours]
    own = None if subject.lowered is None else subject.lowered.spec.run.dtype
    dtypes = sorted({tensor.dtype for tensor in graph.tensors} | ({own} if own else set()))
    unnamed = NONE if own is None else dtypes.index(own)
    dtype = np.array([*(dtypes.index(tensor.dtype) for tensor in graph.tensors), unnamed])[graph.tensor]
    same &= (dtype[ours] == dtype[theirs]) | (dtype[ours] == NONE) | (dtype[theirs] == NONE)
    return same


def _describe(graph: OpGraph, op_id: int | None) -> str:
    if op_id is None:
        return "missing"
    length = int(graph.stop[op_id] - graph.start[op_id])
    parts = [f"{graph.ops[op_id]} of {length} elements"]
    if graph.tensor[op_id] != NONE:
        parts.append(f"in {graph.tensors[int(graph.tensor[op_id])].dtype}")
    if name := graph.reduction_names[int(graph.reduction[op_id])]:
        parts.append(f"({name})")
    if graph.peer[op_id] != NONE:
        parts.append(f"from rank {graph.global_rank[int(graph.peer[op_id])]}")
    return " ".join(parts)


OTHER_AXIS = RuleDoc(
    code="PP307",
    title="a collective runs on a group of another axis",
    explanation=(
        "The operation is meant for one mesh axis and is issued on a group of another: a statistic of one stage "
        "that goes over the default group mixes the values of all stages, and hangs where stages differ in the "
        "number of calls. All members may agree, and nothing fails."
    ),
    wrong=of_ranks("pp: 0 1", _MAXIMUM, _MAXIMUM),
    right=of_ranks("tp: 0 1", _MAXIMUM, _MAXIMUM),
)


def _check_axis(subject: Subject) -> Iterator[Finding]:
    graph, calls = subject.graph, _Calls(subject.graph)
    axis_of_group = np.array(
        [AXES.index(group.axis) if group.axis in AXES else len(AXES) for group in graph.groups], dtype=np.int64
    )
    gathers = graph.is_kind(GATHER_KINDS)[calls.row]  # of the partial transport: they name no axis and mean tp
    axis = np.where(gathers, AXES.index("tp"), graph.axis[calls.row])
    other = calls.row[(axis != NONE) & (axis != axis_of_group[calls.group])]
    _, some, count = np.unique(graph.group[other], return_index=True, return_counts=True)
    for op_id, times in zip(other[some].tolist(), count.tolist(), strict=True):
        group = graph.groups[int(graph.group[op_id])]
        more = f", and {times - 1} more there" if times > 1 else ""
        yield OTHER_AXIS.finding(
            f"rank {rank_of(graph, op_id)} issues {graph.ops[op_id]} on the {group.axis} group "
            f"{[graph.global_rank[r] for r in group.ranks]}{more}",
            help=f"issue it on the rank's {graph.ops[op_id].axis} group",
            witness=subject.witness(op_id),
        )


STRANGER = RuleDoc(
    code="PP308",
    title="a rank issues a collective on a group that it does not belong to",
    explanation=(
        "Only members can take part: elsewhere the call is refused, does nothing, or falls back to the default "
        "group, depending on the framework, and the members never notice the additional rank."
    ),
    wrong=of_ranks("tp: 0 1", _SUM, _SUM, _SUM),
    right=of_ranks("tp: 0 1 2", _SUM, _SUM, _SUM),
)


def _check_stranger(subject: Subject) -> Iterator[Finding]:
    graph, calls = subject.graph, _Calls(subject.graph)
    outside = calls.row[~calls.by_members()]
    alone = np.flatnonzero(graph.is_kind(COLLECTIVE_KINDS) & (graph.group == NONE))
    if subject.lowered is None:  # a graph alone may leave out on which group a collective runs
        alone = alone[:0]
    for rows, on_group in ((outside, True), (alone, False)):
        keys = graph.group[rows] * graph.num_ranks + graph.rank[rows]
        _, some, count = np.unique(keys, return_index=True, return_counts=True)
        for op_id, times in zip(rows[some].tolist(), count.tolist(), strict=True):
            where = "no group"
            if on_group:
                group = graph.groups[int(graph.group[op_id])]
                where = f"the {group.axis} group {[graph.global_rank[r] for r in group.ranks]}, which lacks it"
            more = f", and {times - 1} more" if times > 1 else ""
            yield STRANGER.finding(
                f"rank {rank_of(graph, op_id)} issues {graph.ops[op_id]} on {where}{more}",
                help="issue it on the rank's own group of that axis, or make the rank a member",
                witness=subject.witness(op_id),
            )


MEMBERS = RuleDoc(
    code="PP309",
    title="a group does not hold the ranks of its axis",
    explanation=(
        "The members of a group along an axis differ in their coordinate on that axis and in no other, and all of "
        "them are in it. A group made with a wrong size or from permuted axes reduces over unrelated ranks, leaves "
        "members out, or joins ranks of different stages. Along pp a group may hold some of the ranks (the two owners "
        "of a tied weight). Without a plan there is no mesh: then the members must at least compute the same stages."
    ),
    wrong=of_ranks("tp: 0 1", "0F0 " + _IN_LAYER.format(8), "1F0 " + _IN_LAYER.format(8)),
    right=of_ranks("tp: 0 1", "0F0 " + _IN_LAYER.format(8), "0F0 " + _IN_LAYER.format(8)),
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
    along = [mesh.rank({**first, group.axis: coord}) for coord in range(mesh.size(group.axis))]
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
        "All members must take part in making a communicator. Ranks that make the same groups in another "
        "order wait for each other before training has begun, or confuse each other's communicators. "
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
    if cycle:
        parts = [
            f"rank {graph.global_rank[rank]} makes {_name(graph, first)} before {_name(graph, second)}"
            for rank, first, second in cycle
        ]
        yield CREATION.finding(
            f"the orders do not fit into one: {'; '.join(parts)}",
            help="make the groups in one order on all ranks, for instance sorted",
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


def _cycle(order: tuple[tuple[int, ...], ...]) -> list[tuple[int, int, int]]:
    """A shortest cycle of (rank, group, next group), each group made before the next; empty if one order fits all."""
    from pipeproof.diagnostics.wait_graph import shortest_cycle

    rank_of: dict[int, dict[int, int]] = {group: {} for group in sorted({group for made in order for group in made})}
    for rank, indices in enumerate(order):
        for first, second in pairwise(dict.fromkeys(indices)):
            rank_of[first].setdefault(second, rank)
    cycle = shortest_cycle({first: dict.fromkeys(after, True) for first, after in rank_of.items()})
    return [(rank_of[first][second], first, second) for first, second in zip(cycle, cycle[1:] + cycle[:1], strict=True)]


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
        "nothing to another. Sizes and names agree, and nothing fails; the usual cause is a rank computed with "
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


RULES: tuple[Rule, ...] = (
    Rule(MEMBERS, _check_members),
    Rule(CREATION, _check_creation),
    Rule(REPLICAS, _check_replicas, needs_plan=True),
    Rule(COLLECTIVE, _check_collectives),
    Rule(OTHER_AXIS, _check_axis),
    Rule(STRANGER, _check_stranger),
)
