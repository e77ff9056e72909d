"""Memory of messages that was used again while they were in flight, and requests that nothing waited for.

The log has the addresses of every tensor. For each operation with a wait it
also shows whether the memory was written between call and wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from pipeproof.diagnostics.finding import Finding, OpsWitness, WitnessOp
from pipeproof.diagnostics.rule_doc import RuleDoc
from pipeproof.interop.traces.trace_codes import NOT_WAITED
from pipeproof.interop.traces.trace_graph import IN_ORDER
from pipeproof.interop.traces.trace_log import LoggedCall, LoggedTensor, LoggedWait, RankLog
from pipeproof.interop.traces.trace_text import call_text, position_text
from pipeproof.verify.lifetime.race_rules import NO_ORDER, USE_UNDER_RECEIVE, WRITE_UNDER_SEND

_MAX_FINDINGS = 8
"""Number of findings of a kind for one rank; more would have the same cause."""


def lifetime_findings(log: RankLog) -> Iterator[Finding]:
    """Find PP501, PP502, PP507 and PP946 of one rank."""
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
        event_regions = {regions[tensor] for tensor in (*event.inputs, *event.outputs)}
        overlapping = {seq: call for region in event_regions for seq, call in using[region].items()}
        races += [_clash(call, event) for _, call in sorted(overlapping.items()) if _clashes(call, event)]
        if not event.blocks:
            pending[event.seq] = event
            for region in event_regions:
                using[region][event.seq] = event
    yield from races[:_MAX_FINDINGS]
    if log.ended and log.error is None:
        yield from [_not_waited(call) for call in pending.values()][:_MAX_FINDINGS]


def _regions(log: RankLog) -> dict[LoggedTensor, int]:
    """Return a region number for each tensor; tensors that overlap, directly or through others, share it."""
    tensors = {tensor for call in log.calls for tensor in (*call.inputs, *call.outputs)}
    regions: dict[LoggedTensor, int] = {}
    region, stop = 0, 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        if tensor.start >= stop:
            region += 1
        stop = max(stop, tensor.stop)
        regions[tensor] = region
    return regions


def _clashes(call: LoggedCall, later: LoggedCall) -> bool:
    """True if one of two operations in flight writes memory that the other uses."""
    if call.group == later.group and call.group.backend in IN_ORDER and call.batch != later.batch:
        return False  # in order, on the stream of their communicator
    return _overlap(_writes(call), (*later.inputs, *later.outputs)) or _overlap(_writes(later), call.inputs)


def _writes(call: LoggedCall) -> tuple[LoggedTensor, ...]:
    is_source = call.op == "broadcast" and call.peer == call.rank
    return () if is_source else call.outputs


def _overlap(first: Sequence[LoggedTensor], second: Sequence[LoggedTensor]) -> bool:
    return any(a.start < b.stop and b.start < a.stop for a in first for b in second)


def _code(call: LoggedCall) -> RuleDoc:
    return {"send": WRITE_UNDER_SEND, "recv": USE_UNDER_RECEIVE}.get(call.op, NO_ORDER)


def _clash(call: LoggedCall, later: LoggedCall) -> Finding:
    access = "writes" if _overlap(_writes(later), (*call.inputs, *call.outputs)) else "reads"
    earlier_access = "reading" if call.op == "send" else "writing"
    return _code(call).finding(
        f"rank {call.rank}: {call_text(later)}{position_text(later)} {access} memory that {call_text(call)}"
        f"{position_text(call)} may still be {earlier_access}: nothing waited for it yet",
        later.line, "wait for the first before the second is issued, or use another tensor",
        OpsWitness((WitnessOp(call.rank, call_text(call)), WitnessOp(call.rank, call_text(later)))),
    )  # fmt: skip


def _written(call: LoggedCall, wait: LoggedWait) -> Finding:
    return _code(call).finding(
        f"rank {call.rank}: the tensor of {call_text(call)}{position_text(call)} was written in place after the call "
        f"and before the wait{f' at {wait.at}' if wait.at else ''}: either value may arrive",
        call.line, "write to the tensor after the wait, or send a copy",
        OpsWitness((WitnessOp(call.rank, call_text(call)),)),
    )  # fmt: skip


def _not_waited(call: LoggedCall) -> Finding:
    return NOT_WAITED.finding(
        f"rank {call.rank}: nothing waited for {call_text(call)}{position_text(call)} before the recording ended",
        call.line, "wait for its request, or record until that is done",
        OpsWitness((WitnessOp(call.rank, call_text(call)),)),
    )  # fmt: skip
