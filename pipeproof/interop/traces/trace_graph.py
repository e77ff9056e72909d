"""Op graph of the logs of all ranks, for the rules, and their findings in the terms of the logs.

A message is a send or a receive on the channel of its communicator. The marks
of its two ends give it its name in the graph: ends with equal marks, or where
one has no mark, share a number; ends with different marks do not, and PP302
reports that. A collective runs on a queue of its group. A wait blocks
everything that the rank issues later, and so does a blocking call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeproof.diagnostics.finding import CycleWitness, Finding, Location, OpsWitness, ProgramExcerpt, WitnessOp
from pipeproof.interop.traces.trace_log import LoggedCall, LoggedGroup, LoggedWait, Mark, RankLog
from pipeproof.schedule.columns import NONE, NameTable, Row
from pipeproof.schedule.op_table import Group, OpGraph, TensorSpec, build_graph
from pipeproof.schedule.ops import CHILD_KINDS, TRANSFER_KINDS, Op, OpKind, wait_for
from pipeproof.verify.declared_facts import Facts

IN_ORDER = ("nccl", "xccl", "hccl", "bkcl")
"""Backends without tags that execute the operations of a communicator in the order of issue."""


@dataclass(eq=False)
class Channel:
    """Messages from a rank to another on one communicator; the k-th send matches the k-th receive.

    Gloo matches by tags, so each tag is a channel. On NCCL a single message has
    a communicator of its pair of ranks, and a message in a batch uses its
    group's communicator. If the latter was created with the group, single
    messages use it, too.
    """

    group: LoggedGroup
    qualifier: str
    src: int
    dst: int
    sends: list[LoggedCall] = field(default_factory=list)
    receives: list[LoggedCall] = field(default_factory=list)
    first_number: int = 0

    @property
    def communicator(self) -> str:
        """Name of its communicator for messages."""
        return f"{self.group.title}{self.qualifier}"

    def names(self) -> Mapping[tuple[int, int], Name]:
        """Return the name in the graph of each end, by (rank, sequence number)."""
        base = self.first_number
        names = {}
        for position, send in enumerate(self.sends):
            names[send.rank, send.seq] = Name(self, position, base + position, OpKind.SEND_FORWARD, send.mark)
        longest = max(len(self.sends), len(self.receives))
        for position, receive in enumerate(self.receives):
            sent = self.sends[position].mark if position < len(self.sends) else None
            number = base + position if agree(sent, receive.mark) else base + longest + position
            names[receive.rank, receive.seq] = Name(self, position, number, OpKind.RECV_FORWARD, receive.mark)
        return names

    @property
    def num_numbers(self) -> int:
        """Number of numbers that its names may use."""
        return max(len(self.sends), len(self.receives)) + len(self.receives)


@dataclass(frozen=True)
class Name:
    """Name of one end of a message, in the graph and in messages."""

    channel: Channel
    position: int
    number: int
    kind: OpKind
    mark: Mark | None

    @property
    def op(self) -> Op:
        """The operation."""
        return Op(self.kind, 0 if self._is_send else 1, self.number)

    @property
    def text(self) -> str:
        """``send 0->1 #2 (F 3 of stage 0)``; counted from 0, like micro-batches."""
        channel = self.channel
        meaning = f" ({self.mark})" if self.mark is not None else ""
        if self._is_send:
            return f"send {channel.src}->{channel.dst} #{self.position}{meaning}"
        return f"recv {channel.dst}<-{channel.src} #{self.position}{meaning}"

    @property
    def partner(self) -> Op:
        """The other end that matches its mark, as an operation of the graph."""
        return Op(OpKind.RECV_FORWARD, 1, self.number) if self._is_send else Op(OpKind.SEND_FORWARD, 0, self.number)

    @property
    def partner_text(self) -> str:
        """Name of the other end in messages, for the case that no rank issues it."""
        meaning = "" if self.mark is None else f" ({_partner_mark(self.mark, is_send=self._is_send)})"
        channel = self.channel
        if self._is_send:
            return f"recv {channel.dst}<-{channel.src}{meaning or f' #{self.position}'}"
        return f"send {channel.src}->{channel.dst}{meaning or f' #{self.position}'}"

    @property
    def _is_send(self) -> bool:
        return self.kind is OpKind.SEND_FORWARD


def channels_of(logs: Sequence[RankLog]) -> list[Channel]:
    """Return all channels between ranks that have logs, by first use, with numbers for the names of their messages."""
    logged_ranks = {log.rank for log in logs}
    channels: dict[tuple[LoggedGroup, str, int, int], Channel] = {}
    for log in logs:
        for call in log.calls:
            if not call.is_message or call.peer is None or call.peer not in logged_ranks or call.tensor is None:
                continue
            src, dst = (call.rank, call.peer) if call.op == "send" else (call.peer, call.rank)
            key = call.group, _qualifier(call), src, dst
            channel = channels.setdefault(key, Channel(*key))
            (channel.sends if call.op == "send" else channel.receives).append(call)
    base = 0
    for channel in channels.values():
        channel.first_number = base
        base += channel.num_numbers
    return list(channels.values())


def collectives_of(logs: Sequence[RankLog]) -> dict[tuple[LoggedGroup, int], dict[int, LoggedCall]]:
    """Return the calls of each collective by rank; a collective is its group and its position there."""
    calls: dict[tuple[LoggedGroup, int], dict[int, LoggedCall]] = {}
    for log in logs:
        counts: dict[LoggedGroup, int] = {}
        for call in log.calls:
            if not call.is_message:
                position = counts[call.group] = counts.get(call.group, -1) + 1
                calls.setdefault((call.group, position), {})[log.rank] = call
    return calls


def _qualifier(call: LoggedCall) -> str:
    if call.group.backend in IN_ORDER:
        return "" if call.batch is not None or call.group.opened else ", single messages"
    return f", tag {call.tag}" if call.tag else ""


def agree(sent: Mark | None, received: Mark | None) -> bool:
    """True if the marks of two ends do not contradict each other; unknown parts do not count."""
    if sent is None or received is None:
        return True
    expected = _partner_mark(sent, is_send=True)
    pairs = zip((expected.kind, expected.micro_batch, expected.stage),
                (received.kind, received.micro_batch, received.stage), strict=True)  # fmt: skip
    return all(wanted is None or actual is None or wanted == actual for wanted, actual in pairs)


def _partner_mark(mark: Mark, *, is_send: bool) -> Mark:
    """Return the mark of the other end: an activation goes to the next stage, a gradient to the previous one."""
    step = 1 if (mark.kind == "F") == is_send else -1
    return Mark(mark.kind, None if mark.stage is None else mark.stage + step, mark.micro_batch)


_KINDS = {
    "all_reduce": OpKind.ALL_REDUCE, "reduce": OpKind.ALL_REDUCE, "all_gather": OpKind.ALL_GATHER,
    "gather": OpKind.ALL_GATHER, "reduce_scatter": OpKind.REDUCE_SCATTER, "scatter": OpKind.REDUCE_SCATTER,
    "all_to_all": OpKind.ALL_TO_ALL, "broadcast": OpKind.BROADCAST, "barrier": OpKind.BARRIER,
}  # fmt: skip
"""Op kind of each call. Rooted collectives have no kind: their root is part of the reduction, which members share."""


@dataclass(frozen=True)
class RecordedGraph:
    """Graph of the issued operations; ``origins`` are log locations by the graph's ``origin`` column.

    ``calls`` has the call of each op id, also for the wait for it; ``texts`` has
    the names of the operations in messages, by their text form.
    """

    graph: OpGraph
    origins: tuple[Location, ...]
    calls: tuple[LoggedCall, ...]
    texts: Mapping[str, str]
    facts: Facts


def graph_of_logs(logs: Sequence[RankLog]) -> RecordedGraph:
    """Build the graph of all logged operations. Ranks without a log issue nothing, and nothing matches them."""
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
        created, order = self._creation(used)
        for name in self._names.values():
            self._texts.setdefault(str(name.partner), name.partner_text)
        self._texts |= {str(name.op): name.text for name in self._names.values()}
        graph = build_graph(rows, self._tensors, (*used, *created))
        return RecordedGraph(graph, tuple(self._origins), tuple(self._calls), self._texts, Facts(group_creation=order))

    def _rows(self, log: RankLog) -> list[Row]:
        rows: list[Row] = []
        ops: dict[int, Op] = {}
        by_seq = {call.seq: call for call in log.calls}
        counts: dict[LoggedGroup, int] = {}
        blocking: list[LoggedCall] = []
        for event in log.events:
            continues = isinstance(event, LoggedCall) and blocking and event.batch == blocking[0].batch is not None
            if blocking and not continues:
                rows += [self._wait(ops[call.seq], call, call.line) for call in blocking]
                blocking = []
            if isinstance(event, LoggedWait):
                rows += [self._wait(ops.pop(seq), by_seq[seq], event.line) for seq in event.of if seq in ops]
                continue
            row = self._message(event) if event.is_message else self._collective(event, counts)
            if row is None:
                continue
            self._calls.append(event)
            self._origins.append(event.line)
            rows.append(row)
            ops[event.seq] = row.op
            if event.blocks:
                blocking.append(event)
        return rows + [self._wait(ops[call.seq], call, call.line) for call in blocking]

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
        # One dim: a buffer of another shape with the same number of elements is allowed.
        spec = TensorSpec("message", (numel,), dtype, "", "flat")
        return self._tensors.setdefault(spec, len(self._tensors))

    def _collective(self, call: LoggedCall, counts: dict[LoggedGroup, int]) -> Row | None:
        group = call.group
        if sum(rank in self._known for rank in group.ranks) < 2:
            return None
        position = counts[group] = counts.get(group, -1) + 1
        number = self._number.code(f"{group.title} {group.ranks} {position}")
        op = Op(_KINDS[call.op], 0, number)
        self._texts.setdefault(str(op), f"{call.op} #{position} of {group.title}")
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
        """Return the groups created during the recording, and for each rank the groups that it created, in order."""
        numbers: dict[tuple[tuple[int, ...], int], int] = {}
        created: list[Group] = []
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
                    numbers[key] = len(used) + len(created)
                    created.append(Group("new group", members))
                order[log.rank].append(numbers[key])
        return created, tuple(map(tuple, order))


def _size(call: LoggedCall) -> int:
    """Return the number of elements that all members must agree on; 0 if members may differ."""
    if call.op == "barrier" or call.sent_splits or call.received_splits:
        return 0
    if call.op == "scatter":
        return sum(tensor.numel for tensor in call.outputs)
    if call.op == "all_to_all" and len({tensor.numel for tensor in (*call.inputs, *call.outputs)}) > 1:
        return 0 if len(call.inputs) > 1 else call.inputs[0].numel
    if len({tensor.numel for tensor in call.outputs}) > 1:
        return 0
    return sum(tensor.numel for tensor in call.inputs)


# --- Texts of the rules' findings in the terms of the log: the operations that the program issued, and their lines ---


_NAMES = "|".join(sorted((str(kind) for kind in TRANSFER_KINDS | CHILD_KINDS), key=len, reverse=True))
_OP = re.compile(rf"(WAIT\()?(?<![\w.])(\d+(?:{_NAMES})\d+)(\))?")


def call_text(call: LoggedCall) -> str:
    """Return an operation with its peers and tensors."""
    if call.is_message:
        arrow = f"{call.rank}->{call.peer}" if call.op == "send" else f"{call.rank}<-{call.peer}"
        meaning = f" ({call.mark})" if call.mark is not None else ""
        return f"{call.op} {arrow}{meaning} of {call.tensors_text}"
    tensors = f" of {call.tensors_text}" if call.tensors_text else ""
    return f"{call.op} on {call.group.title} {list(call.group.ranks)}{tensors}"


def position_text(call: LoggedCall) -> str:
    """Return the position in the user's code, as `` at train.py:31``; empty if it is unknown."""
    return f" at {call.at}" if call.at else ""


def with_log_names(finding: Finding, recorded: RecordedGraph) -> Finding:
    """Return a rule's finding about the graph with the log's names of its operations."""
    witness = finding.witness
    message = translate(finding.message, recorded.texts)
    if isinstance(witness, OpsWitness | CycleWitness):
        calls = [recorded.calls[op.op_id] for op in witness.ops if op.op_id is not None]
        positions = dict.fromkeys(
            f"rank {call.rank} issued {call_text(call)}{position_text(call)}" for call in calls if call.at
        )
        message = "\n".join((message, *positions))
        ops = tuple(replace(op, op=translate(op.op, recorded.texts)) for op in witness.ops)
        witness = _with_ops(witness, ops, recorded.texts)
    suggested_fix = None if finding.help is None else translate(finding.help, recorded.texts)
    return replace(finding, message=message, help=suggested_fix, witness=witness)


def _with_ops(
    witness: OpsWitness | CycleWitness, ops: tuple[WitnessOp, ...], texts: Mapping[str, str]
) -> OpsWitness | CycleWitness:
    if isinstance(witness, OpsWitness):
        return OpsWitness(ops)
    programs = tuple(
        ProgramExcerpt(program.rank, tuple(translate(op, texts) for op in program.ops), program.numbers)
        for program in witness.programs
    )
    return CycleWitness(ops, programs)


def translate(text: str, texts: Mapping[str, str]) -> str:
    """Replace each operation of the graph in a text by its name in the log."""

    def replacement(match: re.Match[str]) -> str:
        name = texts.get(match[2])
        if name is None:
            return match[0]
        return f"wait for {name}" if match[1] else name + (match[3] or "")

    return _OP.sub(replacement, text)
