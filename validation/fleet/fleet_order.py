"""Order of Fleet's computations and messages: recorded on each rank, then compared with the plan.

Fleet knows its messages only by their order. The recorder knows each tensor that a forward or backward returns by the
object, so it can label a message with the computation that made it, and a computation with the messages it was given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from typing import Any

from pipeproof.diagnostics.finding import Finding
from pipeproof.schedule.ops import COMPUTE_KINDS, SEND_KINDS, Op, OpKind, parse_op
from pipeproof.verify.subject import Subject
from validation.fleet.fleet_codes import NOT_AS_PLANNED


@dataclass(slots=True)
class Message:
    """A tensor sent to ``peer`` or received from it, a global rank.

    ``label`` of a sent tensor is the operation that computed it, such as ``0F2``; empty where no stage did (Fleet's
    shape exchange).
    """

    sent: bool
    peer: int
    shape: tuple[int, ...]
    dtype: str
    num_slices: int
    label: str = ""


@dataclass(slots=True)
class Computation:
    """A forward or backward of a stage, such as ``1B0``, and the positions of the receives that it was given."""

    op: str
    receives: list[int] = field(default_factory=list)


@dataclass(slots=True)
class RankEvents:
    """One step of one rank. ``Computation.receives`` are positions among the received messages only."""

    messages: list[Message] = field(default_factory=list)
    computed: list[Computation] = field(default_factory=list)


class EventRecorder:
    """Recorder of a rank's events, step by step.

    ``pp_rank`` is this rank among the ``num_ranks`` pipeline ranks.
    """

    def __init__(self, pp_rank: int, num_ranks: int) -> None:
        self._pp_rank, self._num_ranks = pp_rank, num_ranks
        self.chunk_of: Callable[[], int] = lambda: 0
        """Function that returns Fleet's current virtual stage."""
        self._begin()

    def _begin(self) -> None:
        self._events, self._counts = RankEvents(), Counter[str]()
        self._num_received = 0
        self._computed: dict[int, tuple[Any, str]] = {}  # by id of the tensor; holding the tensor keeps the id unique
        self._received: dict[int, tuple[Any, int]] = {}

    def take(self) -> RankEvents:
        """Return the events of the step that ended, and begin the next."""
        events = self._events
        self._begin()
        return events

    def sends(self, tensor: Any, peer: int, num_slices: int) -> None:
        """Record the send of a tensor, or of this rank's slice of ``num_slices`` equal ones, to a global rank."""
        _, label = self._computed.pop(id(tensor), (None, ""))
        self._record_message(tensor, peer, num_slices, label, sent=True)

    def receives(self, tensor: Any, peer: int, num_slices: int) -> None:
        """Record the receive of a tensor or slice from a global rank."""
        self._received[id(tensor)] = tensor, self._num_received
        self._num_received += 1
        self._record_message(tensor, peer, num_slices, "", sent=False)

    def _record_message(self, tensor: Any, peer: int, num_slices: int, label: str, *, sent: bool) -> None:
        dtype = str(tensor.dtype).removeprefix("paddle.")
        self._events.messages.append(Message(sent, peer, tuple(tensor.shape), dtype, num_slices, label))

    def forward_begins(self, *, input_tensor: Any, **_: Any) -> None:
        """Fleet's hook before a forward."""
        self._begin_computation("F", input_tensor)

    def forward_ends(self, *, output_tensor: Any, **_: Any) -> None:
        """Fleet's hook after a forward."""
        self._end_computation(output_tensor)

    def backward_begins(self, *, output_tensor_grad: Any, **_: Any) -> None:
        """Fleet's hook before a backward."""
        self._begin_computation("B", output_tensor_grad)

    def backward_ends(self, *, input_tensor_grad: Any, **_: Any) -> None:
        """Fleet's hook after a backward."""
        self._end_computation(input_tensor_grad)

    def _begin_computation(self, kind: str, inputs: Any) -> None:
        stage = f"{self.chunk_of() * self._num_ranks + self._pp_rank}{kind}"
        op = f"{stage}{self._counts[stage]}"  # Fleet makes sure that each stage takes micro-batches in their order
        self._counts[stage] += 1
        receives = [self._received.pop(id(t))[1] for t in _tensors(inputs) if id(t) in self._received]
        self._events.computed.append(Computation(op, receives))

    def _end_computation(self, outputs: Any) -> None:
        for tensor in _tensors(outputs):
            self._computed[id(tensor)] = tensor, self._events.computed[-1].op


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif value is not None:
        yield value


Pair = tuple[int, int]
"""Source and destination rank of a message."""


def order_findings(subject: Subject, step: int, events: Sequence[RankEvents]) -> Iterator[Finding]:
    """Differences between a step of Fleet's and the plan; ``events`` are by rank.

    Each rank must run the plan's forwards and backwards in the plan's order. For each pair of ranks a receive of the
    same shape and type must match the k-th send, and activations and gradients must be the plan's, in its order. Every
    computation must get the result of the previous (or next) stage for the same micro-batch.
    """
    yield from _compare_computations(subject, step, events)
    sent, received = _by_pair(events, sent=True), _by_pair(events, sent=False)
    yield from _compare_ends(step, sent, received)
    yield from _compare_sends(subject, step, sent)
    yield from _compare_inputs(step, events, sent, len(subject.plan.stages))


def count_messages(events: Sequence[RankEvents]) -> int:
    """Number of activations and gradients that were sent."""
    return sum(bool(message.label) for of_rank in events for message in of_rank.messages)


def _compare_computations(subject: Subject, step: int, events: Sequence[RankEvents]) -> Iterator[Finding]:
    graph = subject.graph
    for rank, of_rank in enumerate(events):
        planned = [str(graph.ops[i]) for i in graph.rank_ops(rank) if graph.ops[i].kind in COMPUTE_KINDS]
        executed = [computation.op for computation in of_rank.computed]
        yield from _first_difference(f"step {step}, rank {rank}", "computes", executed, planned)


def _compare_ends(
    step: int, sent: Mapping[Pair, Sequence[Message]], received: Mapping[Pair, Sequence[Message]]
) -> Iterator[Finding]:
    for pair in sorted({*sent, *received}):
        ends = zip_longest(map(_form, sent.get(pair, ())), map(_form, received.get(pair, ())), fillvalue="nothing")
        for position, (send, receive) in enumerate(ends):
            if send != receive:
                message = f"step {step}: message {position} from rank {pair[0]} to {pair[1]}"
                yield NOT_AS_PLANNED.finding(f"{message} is sent as {send} and received as {receive}")
                break


def _compare_sends(subject: Subject, step: int, sent: Mapping[Pair, Sequence[Message]]) -> Iterator[Finding]:
    graph = subject.graph
    planned: dict[tuple[int, int, OpKind], list[str]] = {}
    for op_id, op in enumerate(graph.ops):
        if op.kind in SEND_KINDS:
            made_by = Op(OpKind.FORWARD if op.is_forward else OpKind.BACKWARD, op.stage, op.micro_batch)
            channel = graph.channels[graph.channel[op_id]]
            planned.setdefault((channel.src, channel.dst, made_by.kind), []).append(str(made_by))
    executed: dict[tuple[int, int, OpKind], list[str]] = {}
    for (src, dst), messages in sent.items():
        for message in messages:
            if message.label:
                executed.setdefault((src, dst, parse_op(message.label).kind), []).append(message.label)
    for src, dst, kind in sorted({*planned, *executed}):
        tensors = "activations" if kind is OpKind.FORWARD else "gradients"
        ours, theirs = (_once(ops.get((src, dst, kind), [])) for ops in (planned, executed))
        yield from _first_difference(f"step {step}, rank {src}", f"sends to rank {dst}, of {tensors},", theirs, ours)


def _compare_inputs(
    step: int, events: Sequence[RankEvents], sent: Mapping[Pair, Sequence[Message]], num_stages: int
) -> Iterator[Finding]:
    for rank, of_rank in enumerate(events):
        labels = _received_labels(rank, of_rank, sent)
        for computation in of_rank.computed:
            op = parse_op(computation.op)
            source = op._replace(stage=op.stage + (-1 if op.kind is OpKind.FORWARD else 1))
            expected = [str(source)] if 0 <= source.stage < num_stages else []
            inputs = _once([labels[position] for position in computation.receives])
            if inputs != expected:
                ours, theirs = (", ".join(names) or "nothing" for names in (expected, inputs))
                yield NOT_AS_PLANNED.finding(
                    f"step {step}, rank {rank}: {op} was given the tensors of {theirs} in place of {ours}"
                )
                break


def _received_labels(rank: int, events: RankEvents, sent: Mapping[Pair, Sequence[Message]]) -> list[str]:
    """Labels of the messages that a rank received: the k-th receive from a peer is the k-th send of that peer to it."""
    sources = {peer: iter(messages) for (peer, dst), messages in sent.items() if dst == rank}
    sends = (next(sources.get(message.peer, iter(())), None) for message in events.messages if not message.sent)
    return ["a message that nobody sent" if send is None else send.label for send in sends]


def _by_pair(events: Sequence[RankEvents], *, sent: bool) -> dict[Pair, list[Message]]:
    messages: dict[Pair, list[Message]] = {}
    for rank, of_rank in enumerate(events):
        for message in of_rank.messages:
            if message.sent == sent:
                pair = (rank, message.peer) if sent else (message.peer, rank)
                messages.setdefault(pair, []).append(message)
    return messages


def _form(message: Message) -> str:
    part = f", one of {message.num_slices} slices" if message.num_slices > 1 else ""
    return f"{message.dtype} {list(message.shape or (1,))}{part}"  # Fleet sends a scalar and receives it as a vector


def _once(labels: Sequence[str]) -> list[str]:
    """Labels without repetitions: the tensors of a tuple follow each other under one label."""
    return [label for label, _ in groupby(labels)]


def _first_difference(where: str, verb: str, executed: Sequence[str], planned: Sequence[str]) -> Iterator[Finding]:
    for position, (theirs, ours) in enumerate(zip_longest(executed, planned, fillvalue="nothing")):
        if theirs != ours:
            yield NOT_AS_PLANNED.finding(
                f"{where}: Fleet {verb} {theirs} where the plan has {ours}, at position {position}"
            )
            return
