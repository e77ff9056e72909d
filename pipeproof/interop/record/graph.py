"""From the logs of all ranks to the op graph that the rules judge.

A message is a send or a receive on the channel of its communicator, and what
two ends say of it gives it its name in the graph: ends that are known to mean
the same, or of which one says nothing, share a number; ends that say different
things do not, which is what PP302 looks for. A collective runs on a queue of
its group. A wait holds everything that the rank issues later, and so does a
call that returns only when it has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeproof.interop.record.channels import channels_of
from pipeproof.interop.record.log import LoggedCall, LoggedGroup, LoggedWait, RankLog
from pipeproof.schedule.build import build_graph
from pipeproof.schedule.columns import NONE, NameTable, Row
from pipeproof.schedule.ops import Op, OpKind, wait_for
from pipeproof.schedule.optable import Group, OpGraph, TensorSpec
from pipeproof.specs.finding import Location
from pipeproof.verify.facts import Facts

_KINDS = {
    "all_reduce": OpKind.ALL_REDUCE, "reduce": OpKind.ALL_REDUCE, "all_gather": OpKind.ALL_GATHER,
    "gather": OpKind.ALL_GATHER, "reduce_scatter": OpKind.REDUCE_SCATTER, "scatter": OpKind.REDUCE_SCATTER,
    "all_to_all": OpKind.ALL_TO_ALL, "broadcast": OpKind.BROADCAST, "barrier": OpKind.BARRIER,
}  # fmt: skip
"""Rooted collectives have no kind of their own: their root stands in the reduction, which members must share."""


@dataclass(frozen=True)
class RecordedGraph:
    """The graph of what was issued; ``origins`` are places in the logs by the graph's ``origin`` column.

    ``calls`` has the call of each op id, also of a wait for it; ``texts`` the
    words for operations of the graph by their text form.
    """

    graph: OpGraph
    origins: tuple[Location, ...]
    calls: tuple[LoggedCall, ...]
    texts: Mapping[str, str]
    facts: Facts


def graph_of_logs(logs: Sequence[RankLog]) -> RecordedGraph:
    """The graph of all that the logs have. Ranks without a log issue nothing, and nothing is matched with them."""
    return _Writer(logs).write()


class _Writer:
    def __init__(self, logs: Sequence[RankLog]) -> None:
        self._logs = logs
        self._known = frozenset(log.rank for log in logs)
        self._names = {end: name for channel in channels_of(logs) for end, name in channel.names().items()}
        self._tensors: dict[TensorSpec, int] = {}
        self._groups: dict[LoggedGroup, int] = {}
        self._number = NameTable()
        self._texts: dict[str, str] = {}
        self._origins: list[Location] = []
        self._calls: list[LoggedCall] = []

    def write(self) -> RecordedGraph:
        rows: list[list[Row]] = [[] for _ in range(self._logs[0].num_ranks)]
        for log in self._logs:
            rows[log.rank] = self._rows(log)
        used = [
            Group(group.title, tuple(rank for rank in group.ranks if rank in self._known)) for group in self._groups
        ]
        made, order = self._creation(used)
        for name in self._names.values():
            self._texts.setdefault(str(name.partner), name.partner_text)
        self._texts |= {str(name.op): name.text for name in self._names.values()}
        graph = build_graph(rows, self._tensors, (*used, *made))
        return RecordedGraph(graph, tuple(self._origins), tuple(self._calls), self._texts, Facts(group_creation=order))

    def _rows(self, log: RankLog) -> list[Row]:
        found: list[Row] = []
        ops: dict[int, Op] = {}
        by_seq = {call.seq: call for call in log.calls}
        counts: dict[LoggedGroup, int] = {}
        blocking: list[LoggedCall] = []
        for event in log.events:
            goes_on = isinstance(event, LoggedCall) and blocking and event.batch == blocking[0].batch is not None
            if blocking and not goes_on:
                found += [self._wait(ops[call.seq], call, call.line) for call in blocking]
                blocking = []
            if isinstance(event, LoggedWait):
                found += [self._wait(ops.pop(seq), by_seq[seq], event.line) for seq in event.of if seq in ops]
                continue
            row = self._message(event) if event.is_message else self._collective(event, counts)
            if row is None:
                continue
            self._calls.append(event)
            self._origins.append(event.line)
            found.append(row)
            ops[event.seq] = row.op
            if event.blocks:
                blocking.append(event)
        return found + [self._wait(ops[call.seq], call, call.line) for call in blocking]

    def _wait(self, op: Op, call: LoggedCall, line: Location) -> Row:
        self._calls.append(call)
        self._origins.append(line)
        return Row(wait_for(op), queue="host", origin=len(self._origins) - 1)

    def _message(self, call: LoggedCall) -> Row | None:
        name, tensor = self._names.get((call.rank, call.seq)), call.tensor
        if name is None or tensor is None or call.peer is None:
            return None
        return Row(
            name.op, peer=call.peer, tensor=self._tensor(tensor.numel, tensor.dtype), stop=tensor.numel,
            communicator=name.channel.communicator, batch=NONE if call.batch is None else call.batch,
            origin=len(self._origins),
        )  # fmt: skip

    def _tensor(self, numel: int, dtype: str) -> int:
        # One dim: a buffer of another shape with as many elements is the program's own affair.
        spec = TensorSpec("message", (numel,), dtype, "", "flat")
        return self._tensors.setdefault(spec, len(self._tensors))

    def _collective(self, call: LoggedCall, counts: dict[LoggedGroup, int]) -> Row | None:
        group = call.group
        if sum(rank in self._known for rank in group.ranks) < 2:
            return None
        place = counts[group] = counts.get(group, -1) + 1
        number = self._number.code(f"{group.title} {group.ranks} {place}")
        op = Op(_KINDS[call.op], 0, number)
        self._texts.setdefault(str(op), f"{call.op} #{place} of {group.title}")
        tensor, size = call.tensor, _size(call)
        rooted = call.op in ("reduce", "gather", "scatter")
        return Row(
            op, peer=call.peer if call.op == "broadcast" and call.peer in self._known else NONE,
            tensor=NONE if tensor is None else self._tensor(size, tensor.dtype), stop=size,
            group=self._groups.setdefault(group, len(self._groups)),
            reduction=f"{call.op} {call.reduction} with rank {call.peer}" if rooted else call.reduction,
            queue=f"collectives of {group.title}", batch=NONE if call.batch is None else call.batch,
            origin=len(self._origins),
        )  # fmt: skip

    def _creation(self, used: Sequence[Group]) -> tuple[list[Group], tuple[tuple[int, ...], ...]]:
        """Groups that were made while the logs were written, and which of all groups each rank made, in order."""
        numbers: dict[tuple[tuple[int, ...], int], int] = {}
        made: list[Group] = []
        order = [[i for i, group in enumerate(used) if rank in group.ranks] for rank in range(self._logs[0].num_ranks)]
        for log in self._logs:
            times: dict[tuple[int, ...], int] = {}
            for ranks in log.created:
                times[ranks] = times.get(ranks, 0) + 1
                members = tuple(rank for rank in ranks if rank in self._known)
                if log.rank not in members:
                    continue
                key = ranks, times[ranks]
                if key not in numbers:
                    numbers[key] = len(used) + len(made)
                    made.append(Group("new group", members))
                order[log.rank].append(numbers[key])
        return made, tuple(map(tuple, order))


def _size(call: LoggedCall) -> int:
    """Elements that every member must name alike; 0 where members may differ."""
    if call.op == "barrier" or call.sent_splits or call.received_splits:
        return 0
    if call.op == "scatter":
        return sum(tensor.numel for tensor in call.outputs)
    if call.op == "all_to_all" and len({tensor.numel for tensor in (*call.inputs, *call.outputs)}) > 1:
        return 0 if len(call.inputs) > 1 else call.inputs[0].numel
    if len({tensor.numel for tensor in call.outputs}) > 1:
        return 0
    return sum(tensor.numel for tensor in call.inputs)
