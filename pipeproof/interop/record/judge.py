"""From the logs of a recorded program to a report: the rules that judge plans, and what only a log shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from pipeproof.comm.backends import table_named
from pipeproof.comm.capabilities import BackendTable, Queue
from pipeproof.interop.record.against_plan import plan_findings
from pipeproof.interop.record.channels import IN_ORDER
from pipeproof.interop.record.codes import MISSING_LOG, RAISED, SPLITS, UNFINISHED_LOG
from pipeproof.interop.record.graph import graph_of_logs
from pipeproof.interop.record.lifetimes import lifetime_findings
from pipeproof.interop.record.log import LoggedCall, LoggedGroup, RankLog
from pipeproof.interop.record.read import read_logs
from pipeproof.interop.record.stuck import stuck_findings
from pipeproof.interop.record.words import call_text, place_text, retell
from pipeproof.specs.finding import Finding, Location, OpsWitness, Severity, WitnessOp
from pipeproof.specs.load import LoadedPlan
from pipeproof.verify.check import Report, check_subject
from pipeproof.verify.selection import ALL_RULES, Selection
from pipeproof.verify.subject import graph_subject

_OF_PAIRS = ("PP302", "PP303", "PP304")
"""Rules about what has met: they hold however much of a log there is."""
_OF_ALL = ("PP301", "PP306", "PP308", "PP310", "PP401", "PP402", "PP411", "PP412")
"""Rules about all that a program issues. A log has no computations, so that no others apply."""
_IF_ORDERED = ("PP413",)
"""For backends that open connections at first use."""


def judge_log(
    directory: Path,
    *,
    plan: LoadedPlan | None = None,
    channels: Queue | None = None,
    selection: Selection = ALL_RULES,
) -> Report:
    """Judge the logs of all ranks in a directory.

    Args:
        directory: has a file ``rank_N.jsonl`` of each rank.
        plan: what the program should do; its messages are compared with it.
        channels: which messages of a rank wait for each other, one of
            ``comm.channel_models.QUEUES``; without it, as the recorded backend
            has it: on gloo each end of a channel alone, on NCCL all messages
            of a communicator.
        selection: the codes to report.

    Raises:
        PlanFileError: PP940, a log cannot be read; or the plan cannot be lowered.
        ValueError: no queue has the name ``channels``.
    """
    logs = read_logs(directory)
    recorded = graph_of_logs(logs)
    table = _table(logs, channels)
    subject = graph_subject(recorded.graph, backend=table, origins=recorded.origins, facts=recorded.facts)
    whole = all(log.ended for log in logs)
    applying = (*_OF_PAIRS, *_OF_ALL, *(_IF_ORDERED if _in_order(logs) else ()))
    run = tuple(code for code in (applying if whole else _OF_PAIRS) if selection.picks(code))
    report = check_subject(subject, Selection(select=run or ("none",)))
    found = [_of_program(retell(finding, recorded)) for finding in report.findings]
    found += [finding for finding in _seen(logs, plan, whole=whole) if selection.picks(finding.code)]
    ordered = tuple(sorted(found, key=lambda finding: finding.code))
    return replace(report, findings=ordered, not_run=tuple(sorted(set(applying) - set(run))))


def _seen(logs: Sequence[RankLog], plan: LoadedPlan | None, *, whole: bool) -> Iterator[Finding]:
    """What only logs show."""
    yield from _state_of_logs(logs)
    for log in logs:
        yield from lifetime_findings(log)
    yield from _splits(logs)
    if not whole:
        yield from stuck_findings(logs)
    if plan is not None:
        yield from plan_findings(logs, plan)


def _table(logs: Sequence[RankLog], channels: Queue | None) -> BackendTable:
    if channels is not None and channels not in get_args(Queue):
        raise ValueError(f"no queue is called {channels!r}; there are {', '.join(get_args(Queue))}")
    in_order = _in_order(logs)
    framework = logs[0].framework.partition(" ")[0]
    table = table_named(f"{framework}-{'nccl' if in_order else 'gloo'}")
    queue: Queue = channels or ("communicator" if in_order else table.queue)
    if queue == table.queue:
        return table
    return replace(table, name=f"{table.name} with one FIFO per {queue.replace('_', ' ')}", queue=queue)


def _in_order(logs: Sequence[RankLog]) -> bool:
    return any(group.backend in IN_ORDER for log in logs for group in log.groups.values())


def _of_program(finding: Finding) -> Finding:
    """The rules speak of plans."""
    message = finding.message.replace("the plan is safe", "the program is safe")
    mend = finding.help
    if mend is not None:
        mend = mend.replace("the plan changed so", "the program changed so").partition(". `transport.queue`")[0]
    return replace(finding, message=message, help=mend)


def _state_of_logs(logs: Sequence[RankLog]) -> Iterator[Finding]:
    known = {log.rank for log in logs}
    missing = [rank for rank in range(logs[0].num_ranks) if rank not in known]
    if missing:
        ranks = ", ".join(map(str, missing[:8])) + (", .." if len(missing) > 8 else "")
        message = f"{len(missing)} of {logs[0].num_ranks} ranks have no log: {ranks}"
        place = Location(str(Path(logs[0].file).parent), 1, 1)
        yield Finding(MISSING_LOG.code, Severity.WARNING, message, place, "copy the logs of all ranks to one place")
    for log in logs:
        if not log.ended:
            held = [call for call in log.calls if call.seq in log.held_by]
            where = f"; its host waits in {call_text(held[0])}{place_text(held[0])}" if held else ""
            last = log.events[-1].line if log.events else Location(log.file, 1, 1)
            yield Finding(UNFINISHED_LOG.code, Severity.WARNING, f"the log of rank {log.rank} has no end{where}", last)
        if log.error is not None:
            yield Finding(RAISED.code, Severity.WARNING, f"rank {log.rank} {log.error}", log.error_line)


def _splits(logs: Sequence[RankLog]) -> Iterator[Finding]:
    """PP945 for the first pair of members of each all-to-all that disagree."""
    calls: dict[tuple[LoggedGroup, int], dict[int, LoggedCall]] = {}
    for log in logs:
        counts: dict[LoggedGroup, int] = {}
        for call in log.calls:
            if not call.is_message:
                place = counts[call.group] = counts.get(call.group, -1) + 1
                calls.setdefault((call.group, place), {})[log.rank] = call
    for (group, place), members in calls.items():
        for i, rank in enumerate(group.ranks):
            differing = next((j for j, other in enumerate(group.ranks) if _differ(members, rank, i, other, j)), None)
            if differing is None:
                continue
            sender, receiver = members[rank], members[group.ranks[differing]]
            sent, taken = _parts(sender, sender.sent_splits, group), _parts(receiver, receiver.received_splits, group)
            yield Finding(
                SPLITS.code, Severity.ERROR,
                f"all_to_all #{place} of {group.title}: rank {rank} sends {sent[differing]} elements to rank "
                f"{receiver.rank}{place_text(sender)}, which receives {taken[i]} from it{place_text(receiver)}",
                sender.line, "exchange the counts first, and take what they announce",
                OpsWitness((WitnessOp(rank, call_text(sender)), WitnessOp(receiver.rank, call_text(receiver)))),
            )  # fmt: skip
            break


def _differ(members: dict[int, LoggedCall], rank: int, i: int, other: int, j: int) -> bool:
    sender, receiver = members.get(rank), members.get(other)
    if sender is None or receiver is None or sender.op != "all_to_all" or receiver.op != "all_to_all":
        return False
    sent = _parts(sender, sender.sent_splits, sender.group)
    taken = _parts(receiver, receiver.received_splits, receiver.group)
    return bool(sent and taken) and sent[j] != taken[i]


def _parts(call: LoggedCall, splits: Sequence[int], group: LoggedGroup) -> Sequence[int]:
    """Elements for each member: as the splits say, else the tensors of a list, else equal parts."""
    tensors = call.inputs if splits is call.sent_splits else call.outputs
    if splits:
        return splits if len(splits) == len(group.ranks) else ()
    if len(tensors) == len(group.ranks) > 1:
        return [tensor.numel for tensor in tensors]
    return [tensors[0].numel // len(group.ranks)] * len(group.ranks) if tensors else ()
