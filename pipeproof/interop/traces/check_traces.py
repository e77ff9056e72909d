"""Check of the logs of a recorded program: the rules that check plans, and findings that only a log shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from pipeproof.comm.backend_rows import BackendTable, Queue
from pipeproof.comm.backends import table_named, with_queue
from pipeproof.diagnostics.finding import (
    Finding,
    Location,
    OpsWitness,
    RuleDoc,
    Severity,
    WitnessOp,
    code_order,
    relinked,
    shown_path,
)
from pipeproof.diagnostics.wait_graph import Wait, WaitGraph, absence_finding, cycle_finding
from pipeproof.interop.hang.hang_codes import HANG_CYCLE, NEVER_ISSUED
from pipeproof.interop.traces.compare_with_plan import plan_findings
from pipeproof.interop.traces.trace_codes import MISSING_LOG, NOT_WAITED, RAISED, SPLITS, UNFINISHED_LOG
from pipeproof.interop.traces.trace_graph import (
    IN_ORDER,
    call_text,
    channels_of,
    collectives_of,
    graph_of_logs,
    position_text,
    with_log_names,
)
from pipeproof.interop.traces.trace_log import LoggedCall, LoggedGroup, LoggedTensor, LoggedWait, RankLog, read_logs
from pipeproof.schedule.op_table import TensorSpec
from pipeproof.specs.load_plan import LoadedPlan
from pipeproof.verify.check_plan import OnProgress, Report, check_subject
from pipeproof.verify.lifetime.race_rules import NO_ORDER, USE_UNDER_RECEIVE, WRITE_UNDER_SEND
from pipeproof.verify.message_contents import MEMORY_ORDER, has_holes
from pipeproof.verify.registry import ALL_RULES, Selection
from pipeproof.verify.subject import graph_subject

# Memory order of recorded tensors (PP312): the two ends of a message, and the members of a collective in place.
# Backends read and write memory from the first element on, and ignore strides.
# Two tensors store their elements in one order if their sizes and
# strides are equal after adjacent contiguous dims have been joined; the
# shapes may differ.


_IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce"})
"""Collectives that use the caller's memory; for gathers and scatters the frameworks copy the tensor, or refuse it."""


def memory_order_findings(logs: Sequence[RankLog]) -> Iterator[Finding]:
    """Find PP312: messages and collectives whose ends store their elements in different orders, or with holes."""
    for channel in channels_of(logs):
        for send, receive in zip(channel.sends, channel.receives, strict=False):
            yield from _compare(send, receive)
    for members in collectives_of(logs).values():
        calls = [call for _, call in sorted(members.items()) if call.op in _IN_PLACE and call.outputs]
        for call in calls[1:] or calls:
            findings = list(_compare(calls[0], call))
            yield from findings
            if findings:
                break


def _compare(first: LoggedCall, second: LoggedCall) -> Iterator[Finding]:
    """Find the first tensors of two calls that do not store the same elements in one order."""
    for tensors in zip(first.inputs or first.outputs, second.inputs or second.outputs, strict=False):
        sizes, orders = {tensor.numel for tensor in tensors}, {_element_order(tensor) for tensor in tensors}
        holes = [_has_holes(tensor) for tensor in tensors]
        if len(sizes) > 1 or (len(orders) == 1 and not any(holes)):  # of two sizes: other rules report that
            continue
        calls = (first, second) if first is not second else (first,)
        stated = [
            f"rank {call.rank}: {call_text(call)}{position_text(call)} has shape {list(tensor.shape)} and strides "
            f"{list(tensor.strides)}{' with holes' if hole else ''}"
            for call, tensor, hole in zip(calls, tensors, holes, strict=False)
        ]
        yield MEMORY_ORDER.finding(
            "\n".join(stated), next(call.line for call, tensor in zip(calls, tensors, strict=False)
                                    if not _is_contiguous(tensor)),
            "call `.contiguous()` before the tensor is sent or reduced, and receive into a contiguous buffer",
            OpsWitness(tuple(WitnessOp(call.rank, call_text(call)) for call in calls)),
        )  # fmt: skip
        return


def _element_order(tensor: LoggedTensor) -> tuple[tuple[int, int], ...]:
    """Return (size, stride) of each dim with several elements; adjacent dims that are contiguous are one."""
    order: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape, tensor.strides, strict=True):
        if size == 1:
            continue
        if order and order[-1][1] == size * stride:
            order[-1] = order[-1][0] * size, stride
        else:
            order.append((size, stride))
    return tuple(order)


def _is_contiguous(tensor: LoggedTensor) -> bool:
    return _element_order(tensor) in ((), ((tensor.numel, 1),))


def _has_holes(tensor: LoggedTensor) -> bool:
    return has_holes(TensorSpec("message", tensor.shape, tensor.dtype, "", "", strides=tensor.strides))


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


_PAIR_RULES = ("PP302", "PP303", "PP304")
"""Rules about matched ends: they apply to incomplete logs, too."""
_WHOLE_LOG_RULES = ("PP301", "PP306", "PP308", "PP310", "PP401", "PP402", "PP411", "PP412")
"""Rules about everything that a program issues. A log has no computations, so no other rules apply."""
_IN_ORDER_RULES = ("PP413",)
"""Rules for backends that open connections at first use."""


def check_log(
    directory: Path,
    *,
    plan: LoadedPlan | None = None,
    queue: Queue | None = None,
    selection: Selection = ALL_RULES,
    on_progress: OnProgress | None = None,
) -> Report:
    """Check the logs of all ranks in a directory.

    Args:
        directory: directory with a file ``rank_N.jsonl`` of each rank.
        plan: plan that the program should execute; its messages are compared with the log.
        queue: messages of a rank that share one FIFO, one of
            ``comm.channel_models.QUEUES``. The default depends on the recorded
            backend: on gloo each end of a channel alone, on NCCL all messages
            of a communicator.
        selection: the codes to report.
        on_progress: callback for progress.

    Raises:
        PlanFileError: PP940, a log cannot be read; or the plan cannot be lowered.
        ValueError: no queue has the name ``queue``.
    """
    logs = read_logs(directory)
    recorded = graph_of_logs(logs)
    table = _table(logs, queue)
    subject = graph_subject(recorded.graph, backend=table, origins=recorded.origins, facts=recorded.facts)
    whole = all(log.ended and not log.waiting_for for log in logs)
    rules = (*_PAIR_RULES, *_WHOLE_LOG_RULES, *(_IN_ORDER_RULES if _in_order(logs) else ()))
    rules_run = tuple(code for code in (rules if whole else _PAIR_RULES) if selection.picks(code))
    report = check_subject(subject, Selection(select=rules_run or ("none",)), on_progress)
    named = [_about_program(with_log_names(finding, recorded)) for finding in report.findings]
    findings = relinked(report.findings, named)
    findings += [finding for finding in _log_findings(logs, plan, whole=whole) if selection.picks(finding.code)]
    ordered = tuple(sorted(findings, key=code_order))
    has_error = any(finding.severity is Severity.ERROR for finding in ordered)
    gaps = () if has_error else tuple(finding.message for finding in ordered if finding.code == MISSING_LOG.code)
    return replace(report, findings=ordered, not_run=tuple(sorted(set(rules) - set(rules_run))), undecided=gaps)


def _log_findings(logs: Sequence[RankLog], plan: LoadedPlan | None, *, whole: bool) -> Iterator[Finding]:
    """Findings that only logs show."""
    yield from _state_of_logs(logs)
    for log in logs:
        yield from lifetime_findings(log)
    yield from _splits(logs)
    yield from memory_order_findings(logs)
    if not whole:
        yield from stuck_findings(logs)
    if plan is not None:
        yield from plan_findings(logs, plan)


def _table(logs: Sequence[RankLog], queue: Queue | None) -> BackendTable:
    if queue is not None and queue not in get_args(Queue):
        raise ValueError(f"no queue is called {queue!r}; there are {', '.join(get_args(Queue))}")
    in_order = _in_order(logs)
    framework = logs[0].framework.partition(" ")[0]
    table = table_named(f"{framework}-{'nccl' if in_order else 'gloo'}")
    return with_queue(table, queue or ("communicator" if in_order else None))


def _in_order(logs: Sequence[RankLog]) -> bool:
    return any(group.backend in IN_ORDER for log in logs for group in log.groups.values())


def _about_program(finding: Finding) -> Finding:
    """Replace "plan" by "program" in the texts of the plan rules."""
    if finding.help is None:
        return finding
    return replace(finding, help=finding.help.replace("the plan changed so", "the program changed so"))


def _state_of_logs(logs: Sequence[RankLog]) -> Iterator[Finding]:
    logged_ranks = {log.rank for log in logs}
    missing = [rank for rank in range(logs[0].num_ranks) if rank not in logged_ranks]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        ranks, files = (", ".join(f"{name}{rank}{end}" for rank in missing[:8]) + more
                        for name, end in (("", ""), ("rank_", ".jsonl")))  # fmt: skip
        message = f"{len(missing)} of {logs[0].num_ranks} ranks have no log: {ranks}"
        directory = Path(logs[0].file).parent
        yield MISSING_LOG.finding(message, Location(str(directory)), f"copy {files} to {shown_path(str(directory))}")
    for log in logs:
        if not log.ended:
            waiting = [call for call in log.calls if call.seq in log.waiting_for]
            where = f"; its host waits in {call_text(waiting[0])}{position_text(waiting[0])}" if waiting else ""
            last = log.events[-1].line if log.events else Location(log.file)
            yield UNFINISHED_LOG.finding(f"the log of rank {log.rank} has no end{where}", last)
        if log.error is not None:
            yield RAISED.finding(f"rank {log.rank} {log.error}", log.error_line)


def _splits(logs: Sequence[RankLog]) -> Iterator[Finding]:
    """Find PP945: the first pair of members of each all-to-all that disagree."""
    for (group, index), members in collectives_of(logs).items():
        for i, rank in enumerate(group.ranks):
            differing = next((j for j, other in enumerate(group.ranks) if _differ(members, rank, i, other, j)), None)
            if differing is None:
                continue
            sender, receiver = members[rank], members[group.ranks[differing]]
            sent = _split_sizes(sender, sender.sent_splits, group)
            received = _split_sizes(receiver, receiver.received_splits, group)
            yield SPLITS.finding(
                f"all_to_all #{index} of {group.title}: rank {rank} sends {sent[differing]} elements to "
                f"rank {receiver.rank}{position_text(sender)}, which receives {received[i]} from it"
                f"{position_text(receiver)}",
                sender.line, "exchange the counts first, and receive as many elements as they state",
                OpsWitness((WitnessOp(rank, call_text(sender)), WitnessOp(receiver.rank, call_text(receiver)))),
            )  # fmt: skip
            break


def _differ(members: dict[int, LoggedCall], rank: int, i: int, other: int, j: int) -> bool:
    sender, receiver = members.get(rank), members.get(other)
    if sender is None or receiver is None or sender.op != "all_to_all" or receiver.op != "all_to_all":
        return False
    sent = _split_sizes(sender, sender.sent_splits, sender.group)
    received = _split_sizes(receiver, receiver.received_splits, receiver.group)
    return bool(sent and received) and sent[j] != received[i]


def _split_sizes(call: LoggedCall, splits: Sequence[int], group: LoggedGroup) -> Sequence[int]:
    """Return the number of elements for each member: the splits, else the tensors of a list, else equal parts."""
    tensors = call.inputs if splits is call.sent_splits else call.outputs
    if splits:
        return splits if len(splits) == len(group.ranks) else ()
    if len(tensors) == len(group.ranks) > 1:
        return [tensor.numel for tensor in tensors]
    return [tensors[0].numel // len(group.ranks)] * len(group.ranks) if tensors else ()


def stuck_findings(logs: Sequence[RankLog]) -> Iterator[Finding]:
    """Find PP931, a cycle of ranks that wait for each other, or else PP933, operations that were never issued.

    A rank waits for another rank if the operation that blocks its host needs an
    operation that the other rank has not issued.
    """
    graph = _waits(logs)
    if cycle := graph.cycle():
        suggested_fix = "let one of them issue the operation that the other waits for before it waits itself"
        yield cycle_finding(HANG_CYCLE, cycle, suggested_fix + ", or issue both ends in one batch" * _in_order(logs))
        return
    by_rank = {log.rank: log for log in logs}
    for (rank,) in graph.ends():
        if graph.waiters(rank):
            last = by_rank[rank].calls[-1:]
            last_text = f"ends after {call_text(last[0])}" if last else "has no operation"
            what, lines = f"rank {rank} never issued its part of", (f"the log of rank {rank} {last_text}",)
            yield absence_finding(NEVER_ISSUED, graph, {rank: rank}, what, lines)


def _waits(logs: Sequence[RankLog]) -> WaitGraph[int]:
    logged_ranks = {log.rank for log in logs}
    graph = WaitGraph(sorted(logged_ranks))
    blocking = {(log.rank, seq) for log in logs for seq in log.waiting_for}
    for channel in channels_of(logs):
        matched = min(len(channel.sends), len(channel.receives))
        for call in (*channel.sends[matched:], *channel.receives[matched:]):
            other = channel.dst if call.rank == channel.src else channel.src
            _add(graph, call, other, blocking)
    for (group, _), calls in collectives_of(logs).items():
        for call in calls.values():
            for member in sorted(logged_ranks & set(group.ranks) - calls.keys()):
                _add(graph, call, member, blocking)
    return graph


def _add(graph: WaitGraph[int], call: LoggedCall, other: int, blocking: set[tuple[int, int]]) -> None:
    if (call.rank, call.seq) in blocking:
        why = "which has not issued its part"
        graph.add(call.rank, other, Wait(call.rank, call_text(call), f"rank {other}", why, call.at, call.line))
