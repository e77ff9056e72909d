"""Check of the logs of a recorded program: the rules that check plans, and findings that only a log shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from pipeproof.comm.backend_rows import BackendTable, Queue
from pipeproof.comm.backends import table_named, with_queue
from pipeproof.diagnostics.finding import Finding, Location, OpsWitness, WitnessOp, code_order, relinked
from pipeproof.interop.traces.compare_with_plan import plan_findings
from pipeproof.interop.traces.stalled_ranks import stuck_findings
from pipeproof.interop.traces.trace_codes import MISSING_LOG, RAISED, SPLITS, UNFINISHED_LOG
from pipeproof.interop.traces.trace_graph import IN_ORDER, collectives_of, graph_of_logs
from pipeproof.interop.traces.trace_lifetimes import lifetime_findings
from pipeproof.interop.traces.trace_log import LoggedCall, LoggedGroup, RankLog, read_logs
from pipeproof.interop.traces.trace_memory_order import memory_order_findings
from pipeproof.interop.traces.trace_text import call_text, position_text, with_log_names
from pipeproof.specs.load_plan import LoadedPlan
from pipeproof.verify.check_plan import OnProgress, Report, check_subject
from pipeproof.verify.selection import ALL_RULES, Selection
from pipeproof.verify.subject import graph_subject

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
            ``comm.channel_models.QUEUES``. The default is that of the recorded
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
    whole = all(log.ended for log in logs)
    rules = (*_PAIR_RULES, *_WHOLE_LOG_RULES, *(_IN_ORDER_RULES if _in_order(logs) else ()))
    rules_run = tuple(code for code in (rules if whole else _PAIR_RULES) if selection.picks(code))
    report = check_subject(subject, Selection(select=rules_run or ("none",)), on_progress)
    named = [_about_program(with_log_names(finding, recorded)) for finding in report.findings]
    findings = relinked(report.findings, named)
    findings += [finding for finding in _log_findings(logs, plan, whole=whole) if selection.picks(finding.code)]
    ordered = tuple(sorted(findings, key=code_order))
    return replace(report, findings=ordered, not_run=tuple(sorted(set(rules) - set(rules_run))))


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
    known = {log.rank for log in logs}
    missing = [rank for rank in range(logs[0].num_ranks) if rank not in known]
    if missing:
        ranks = ", ".join(map(str, missing[:8])) + (", .." if len(missing) > 8 else "")
        message = f"{len(missing)} of {logs[0].num_ranks} ranks have no log: {ranks}"
        location = Location(str(Path(logs[0].file).parent))
        yield MISSING_LOG.finding(message, location, "copy the logs of all ranks to one directory")
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
