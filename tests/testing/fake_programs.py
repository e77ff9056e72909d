"""Random programs for fake ranks, and the same programs as a graph that is written down independently of them."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from pipeproof.comm.channel_models import MODELS, QUEUES, ChannelModel
from pipeproof.schedule.op_table import NONE, Group, Row, TensorSpec, build_graph
from pipeproof.schedule.ops import parse_op

MOST_BYTES = 10

models = st.one_of(
    st.sampled_from(MODELS),
    st.builds(
        ChannelModel,
        queue=st.sampled_from(list(QUEUES)),
        completes=st.sampled_from(["rendezvous", "slots", "eager"]),
        slots=st.integers(0, 2),
        eager_bytes=st.sampled_from([None, 0, 4, 9, 40]),
        connections=st.sampled_from(["warm", "lazy"]),
        host_blocks=st.booleans(),
    ),
)


@dataclass(frozen=True)
class Action:
    """``what`` is send, recv, wait (for the k-th message's end of this rank), barrier or work."""

    what: str
    number: int = 0
    peer: int = NONE
    size: int = 0
    name: str = ""
    axis: str = ""
    batch: int = NONE


@dataclass
class Program:
    """What each rank does, and its groups."""

    ranks: list[list[Action]]
    groups: dict[str, list[list[int]]] = field(default_factory=dict)

    def graph(self):
        """As rows, with names of their own."""
        groups = [Group(axis, tuple(members)) for axis, all_members in self.groups.items() for members in all_members]
        index = {(group.axis, rank): i for i, group in enumerate(groups) for rank in group.ranks}
        rows = [[self._row(rank, action, index) for action in actions] for rank, actions in enumerate(self.ranks)]
        return build_graph(rows, [TensorSpec("t", (MOST_BYTES,), "int8", "replicated", "s")], groups)

    def _row(self, rank, action, index):
        match action.what:
            case "barrier":
                return Row(parse_op(f"0BARRIER:{action.axis}"), group=index[action.axis, rank])
            case "work":
                return Row(parse_op(f"{action.number}F0"))
            case "wait":
                return Row(parse_op(f"WAIT({action.name})"))
        op = parse_op(f"0{'SEND' if action.what == 'send' else 'RECV'}_F{action.number}")
        return Row(op, action.peer, 0, 0, action.size, communicator=action.name, batch=action.batch)

    def run_rank(self, rank):
        """The same as a rank program."""
        handles, actions = {}, iter(self.ranks[rank.rank])
        pending = next(actions, None)
        while pending is not None:
            if pending.batch == NONE:
                self._do(rank, pending, handles)
                pending = next(actions, None)
                continue
            batch = pending.batch
            with rank.batch():
                while pending is not None and pending.batch == batch:
                    self._do(rank, pending, handles)
                    pending = next(actions, None)
        return rank.rank

    def _do(self, rank, action, handles):
        match action.what:
            case "send":
                handles[f"0SEND_F{action.number}"] = rank.isend(
                    np.full(action.size, action.number, np.int8), action.peer, communicator=action.name
                )
            case "recv":
                handles[f"0RECV_F{action.number}"] = rank.irecv(action.peer, communicator=action.name)
            case "wait":
                handles[action.name].wait()
            case "barrier":
                rank.barrier(action.axis)
            case "work":
                rank.compute(action.size, name=f"{action.number}F0")


@st.composite
def programs(draw, *, balanced=True):
    """Two or three ranks with a few messages, barriers and computations; unbalanced ones lack some."""
    num_ranks = draw(st.integers(2, 3))
    groups = {"pp": [list(range(num_ranks))], "tp": [[0, 1]]}
    ranks = [[] for _ in range(num_ranks)]
    ends = st.integers(0, num_ranks - 1)
    for number in range(draw(st.integers(1, 7))):
        if draw(st.integers(0, 4)) == 0:
            axis = draw(st.sampled_from(["pp", "tp"]))
            parts = [(rank, Action("barrier", axis=axis)) for rank in groups[axis][0]]
        else:
            a, b = draw(ends), draw(ends)
            size = draw(st.sampled_from([0, 1, 4, 5, 9, MOST_BYTES]))
            name = draw(st.sampled_from(["forward", "forward", "x"]))
            parts = [(a, Action("send", number, b, size, name)), (b, Action("recv", number, a, size, name))]
        if not balanced and draw(st.integers(0, 3)) == 0:
            parts.pop(draw(st.integers(0, len(parts) - 1)))
        for rank, action in parts:
            where = draw(st.integers(0, len(ranks[rank])))
            ranks[rank].insert(where, action)
            if action.what != "barrier" and draw(st.booleans()):
                name = f"0{action.what.upper()}_F{number}"
                ranks[rank].insert(draw(st.integers(where + 1, len(ranks[rank]))), Action("wait", name=name))
    for rank, actions in enumerate(ranks):
        for number in range(draw(st.integers(0, 2))):
            where = draw(st.integers(0, len(actions)))
            actions.insert(where, Action("work", 10 * rank + number, size=draw(st.integers(0, 3))))
        ranks[rank] = _batched(draw, actions)
    return Program(ranks, groups)


def _batched(draw, actions):
    """The same with some neighbouring transfers as one call."""
    batched, number = [], 0
    for action in actions:
        before = batched[-1] if batched else Action("work")
        if action.what in ("send", "recv"):
            joins = before.batch != NONE and draw(st.booleans())
            starts = not joins and draw(st.integers(0, 3)) == 0
            number += starts
            if joins or starts:
                action = Action(action.what, action.number, action.peer, action.size, action.name, "", number)
        batched.append(action)
    return batched
