"""Memory of messages that was used again while they were under way, and requests that nothing waited for.

The addresses of every tensor are in the log, and of each operation that was
waited for, whether its memory was written in between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from pipeproof.interop.record.channels import IN_ORDER
from pipeproof.interop.record.codes import NOT_WAITED
from pipeproof.interop.record.log import LoggedCall, LoggedTensor, LoggedWait, RankLog
from pipeproof.interop.record.words import call_text, place_text
from pipeproof.specs.finding import Finding, OpsWitness, Severity, WitnessOp
from pipeproof.verify.lifetime.race_rules import NO_ORDER, USE_UNDER_RECEIVE, WRITE_UNDER_SEND

_MOST = 8
"""Findings of a kind about one rank; more would be of one cause."""


def lifetime_findings(log: RankLog) -> Iterator[Finding]:
    """PP501, PP502, PP507 and PP946 of one rank."""
    pending: dict[int, LoggedCall] = {}
    regions, using = _regions(log), defaultdict[int, dict[int, LoggedCall]](dict)
    races: list[Finding] = []
    for event in log.events:
        if isinstance(event, LoggedWait):
            races += [_written(pending[seq], event) for seq in event.changed if seq in pending]
            for call in [pending.pop(seq) for seq in event.of if seq in pending]:
                for tensor in (*call.inputs, *call.outputs):
                    using[regions[tensor]].pop(call.seq, None)
            continue
        mine = {regions[tensor] for tensor in (*event.inputs, *event.outputs)}
        near = {seq: call for region in mine for seq, call in using[region].items()}
        races += [_clash(call, event) for _, call in sorted(near.items()) if _clashes(call, event)]
        if not event.blocks:
            pending[event.seq] = event
            for region in mine:
                using[region][event.seq] = event
    yield from races[:_MOST]
    if log.ended and log.error is None:
        yield from [_not_waited(call) for call in pending.values()][:_MOST]


def _regions(log: RankLog) -> dict[LoggedTensor, int]:
    """A number for each tensor that all tensors share which overlap it, and those that overlap them."""
    tensors = {tensor for call in log.calls for tensor in (*call.inputs, *call.outputs)}
    found: dict[LoggedTensor, int] = {}
    region, stop = 0, 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        if tensor.start >= stop:
            region += 1
        stop = max(stop, tensor.stop)
        found[tensor] = region
    return found


def _clashes(call: LoggedCall, later: LoggedCall) -> bool:
    """Whether one of two operations, both under way, writes what the other uses."""
    if call.group == later.group and call.group.backend in IN_ORDER and call.batch != later.batch:
        return False  # one after the other, on the stream of their communicator
    return _overlap(_writes(call), (*later.inputs, *later.outputs)) or _overlap(_writes(later), call.inputs)


def _writes(call: LoggedCall) -> tuple[LoggedTensor, ...]:
    is_source = call.op == "broadcast" and call.peer == call.rank
    return () if is_source else call.outputs


def _overlap(some: Sequence[LoggedTensor], others: Sequence[LoggedTensor]) -> bool:
    return any(one.start < other.stop and other.start < one.stop for one in some for other in others)


def _clash(call: LoggedCall, later: LoggedCall) -> Finding:
    doc = WRITE_UNDER_SEND if call.op == "send" else USE_UNDER_RECEIVE if call.op == "recv" else NO_ORDER
    does = "writes" if _overlap(_writes(later), (*call.inputs, *call.outputs)) else "reads"
    uses = "reading" if call.op == "send" else "writing"
    return Finding(
        doc.code, Severity.ERROR,
        f"rank {call.rank}: {call_text(later)}{place_text(later)} {does} memory that {call_text(call)}"
        f"{place_text(call)} may still be {uses}: nothing waited for that yet",
        later.line, "wait for the first before the second is issued, or give it a tensor of its own",
        OpsWitness((WitnessOp(call.rank, call_text(call)), WitnessOp(call.rank, call_text(later)))),
    )  # fmt: skip


def _written(call: LoggedCall, wait: LoggedWait) -> Finding:
    doc = WRITE_UNDER_SEND if call.op == "send" else USE_UNDER_RECEIVE if call.op == "recv" else NO_ORDER
    return Finding(
        doc.code, Severity.ERROR,
        f"rank {call.rank}: the tensor of {call_text(call)}{place_text(call)} was written in place after the call and "
        f"before the wait for it{f' at {wait.at}' if wait.at else ''}: what arrives may be either",
        call.line, "write to the tensor after the wait, or send a copy",
        OpsWitness((WitnessOp(call.rank, call_text(call)),)),
    )  # fmt: skip


def _not_waited(call: LoggedCall) -> Finding:
    return Finding(
        NOT_WAITED.code, Severity.WARNING,
        f"rank {call.rank}: nothing waited for {call_text(call)}{place_text(call)} before the recording ended",
        call.line, "wait for its request, or let the recording go on until that is done",
        OpsWitness((WitnessOp(call.rank, call_text(call)),)),
    )  # fmt: skip
