"""Check of a watched job: which rank is the cause of a hang, and which ranks wait because of it.

Following the waits from the ranks that have waited longest leads to the cause: a rank that waits for nobody, or a
cycle. In a cycle, and for a collective that only some members issued, the probable cause is the rank that left the
common order. Three things show this: its own earlier steps, the lines of the other ranks, and the number of ranks on
its side.

A slow job looks like a hang for a while. So a verdict needs patience with its own operations, and not with others that
wait longer: for that time, nothing has happened to any part of them, and a host that should issue a part has issued
nothing. An operation that all its ranks have issued gets the longer time: a network moves a large message slowly, and a
first call makes connections.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.problems import grouped
from pipeproof.diagnostics.units import time_text
from pipeproof.diagnostics.wait_graph import WaitGraph, absence_finding, cycle_finding, minority, ranks_text
from pipeproof.exec.monitor.job import JobNow, ProcessState, RankNow
from pipeproof.exec.monitor.monitor_codes import RANK_FAILED, RANK_STOPPED, SLOW_RANK
from pipeproof.exec.monitor.ring import Divergence, OpState, RingOp, divergences, group_key, group_text
from pipeproof.exec.monitor.verdict import MOST_WAITS, PATIENCE_S, SLOW_S, BlockedRank, Kind, Status, Verdict
from pipeproof.exec.monitor.waits import Analysis, analyse, at_text, location_of, ring_entry, waits_of
from pipeproof.interop.hang.collective_matches import Disagreement, disagreements
from pipeproof.interop.hang.flight_recorder import Entry, State
from pipeproof.interop.hang.hang_codes import DISAGREEMENT, HANG_CYCLE, NEVER_ISSUED, NOT_FINISHED

# --- Failures that are found without following waits: an error, a process that does not run, a mismatch ---
# Three of them need no patience, because waiting cannot help: the program of a rank noted the error that ended it, a
# process is gone that noted no end, and members of a group issued different collectives. The short grace only settles
# their order: the first of several errors is the cause.


_FAILURE_GRACE_S: Final = 1.0


@dataclass(frozen=True)
class Failure:
    """Kind of a hang, its causes, the findings about it, and the reasons for the causes."""

    kind: Kind
    causes: tuple[int, ...]
    findings: Sequence[Finding]
    reasons: tuple[str, ...] = ()
    status: Status = Status.HANG


def certain_failure(analysis: Analysis, patience_s: float, is_waiting: bool) -> Failure | None:
    """Return a failure that is found without following waits: a mismatch, an error, a process that does not run.

    Collectives that differ need not block a rank: NCCL may let them pass, and the numbers are wrong.
    """
    job = analysis.job
    raised = [rank for rank in job.ranks if rank.state is ProcessState.RAISED]
    in_call = [rank for rank in raised if any(op.state is OpState.FAILED for op in rank.ring.ops[-2:])]
    own = sorted((rank for rank in raised if rank not in in_call), key=lambda rank: rank.ring.header.end_ns)
    gone = [rank for rank in job.ranks if rank.state is ProcessState.GONE and (in_call or _is_old(rank, job))]
    if own and (in_call or is_waiting or _is_old(own[0], job)):
        crossed = _crossed_before(analysis, own)
        if crossed is not None:
            return crossed
        header = own[0].ring.header
        message = f"rank {header.rank} raised {header.error}"
        return Failure(Kind.RAISED, (header.rank,), [_rank_failed(own[0], message)])
    has_failed = bool(in_call or gone) or job.is_over
    mismatch = _mismatch(analysis, 0 if has_failed else patience_s)
    if mismatch is not None:
        ranks, finding = mismatch
        status = Status.HANG if has_failed or is_waiting else Status.ERROR
        return Failure(Kind.MISMATCH, ranks, [finding], reasons_for(analysis, ranks), status)
    if gone:
        message = f"the process of rank {gone[0].rank} (PID {gone[0].ring.header.pid}) is gone and noted no end"
        ranks = tuple(rank.rank for rank in gone)
        return Failure(Kind.KILLED, ranks, [_rank_failed(rank, message) for rank in gone[:1]])
    halted = [
        rank
        for rank in job.ranks
        if rank.state is ProcessState.STOPPED and seconds_since_heartbeat(rank, job) >= min(patience_s, PATIENCE_S)
    ]
    if halted:
        ranks = tuple(rank.rank for rank in halted)
        return Failure(Kind.STOPPED, ranks, [stopped(rank, job, "is stopped (state T)") for rank in halted])
    if in_call and all(_is_old(rank, job) for rank in in_call):
        ended = _ended_before(analysis, in_call)
        if ended is not None:
            return ended
        first = min(in_call, key=lambda rank: rank.ring.header.end_ns)
        message = f"rank {first.rank} raised {first.ring.header.error} in {last_text(first)}, before any other rank"
        return Failure(Kind.RAISED, (first.rank,), [_rank_failed(first, message)])
    return None


def _killed_together(analysis: Analysis) -> Failure:
    """Return the failure of a job whose processes are all gone: after one failure a launcher ends the others.

    The cause is a rank that others lacked in operations that they had issued, if it lacked no rank itself. The
    operation that blocked them is unknown, because a device's last ends are not noted.
    """
    graph: WaitGraph[int] = WaitGraph(analysis.job.by_rank)
    for (rank, index), others in analysis.matches.missing.items():
        entry = analysis.entries[rank, index]
        for other in others if entry.state is not State.COMPLETED else ():
            graph.add(rank, other, analysis.wait(entry, other))
    gone = {now.rank: now for now in analysis.job.ranks if now.state is ProcessState.RUNNING}
    ends = (end for end in graph.ends() if len(end) == 1 and end[0] in gone and graph.waiters(end[0]))
    ranks = tuple(sorted(rank for (rank,) in ends)) or tuple(gone)
    message = f"the processes of {ranks_text(gone)} are gone and noted no end"
    if len(ranks) < len(gone):
        waiters = ranks_text(tuple(graph.waiters(ranks[0])))
        message += f"; {waiters} waited for rank {ranks[0]} (PID {gone[ranks[0]].ring.header.pid}) then"
    return Failure(Kind.KILLED, ranks, [_rank_failed(gone[ranks[0]], message)])


def _crossed_before(analysis: Analysis, raised: Sequence[RankNow]) -> Failure | None:
    """Return the failure of operations that wait for each other and that a device ended by an error; else None.

    NCCL may fault in a send without a receive, and the host raises the device's error at any later call.
    """
    ranks = {now.rank for now in raised if any(op.state is OpState.QUEUED for op in now.blocking)}
    for component in analysis.graph.ends(sorted(ranks)):
        failure = _cycle(analysis, component, 0) if len(component) > 1 and ranks.issuperset(component) else None
        if failure is not None:
            errors = [_rank_failed(now, f"rank {now.rank} raised {now.ring.header.error}") for now in raised]
            return replace(failure, findings=(*failure.findings, *errors))
    return None


def _ended_before(analysis: Analysis, in_call: Sequence[RankNow]) -> Failure | None:
    """Return the failure of calls that failed because a rank had ended before its part; None without one."""
    ranks = {now.rank for now in in_call}
    for (rank, index), others in analysis.matches.missing.items():
        left = [other for other in others if other in analysis.job.by_rank and analysis.job.by_rank[other].has_left]
        if left and rank in ranks and analysis.ops[rank, index].state is OpState.FAILED:
            entry = analysis.entries[rank, index]
            last = last_text(analysis.job.by_rank[left[0]])
            message = (
                f"{ranks_text(left)} ended without a part in {entry.text}, which failed on rank {rank}"
                f"{at_text(analysis.op(entry))}; the last operation of rank {left[0]} is {last}"
            )
            return Failure(Kind.ENDED, tuple(left), [NEVER_ISSUED.finding(message, entry.location)])
    return None


def _is_old(rank: RankNow, job: JobNow) -> bool:
    header = rank.ring.header
    return (job.now_ns - max(header.heartbeat_ns, header.end_ns)) / 1e9 > _FAILURE_GRACE_S


def seconds_since_heartbeat(rank: RankNow, job: JobNow) -> float:
    """Return the age of the last heartbeat of a rank."""
    return (job.now_ns - rank.ring.header.heartbeat_ns) / 1e9


def _rank_failed(rank: RankNow, message: str) -> Finding:
    last = rank.last
    lines = [message, f"its last operation is {last_text(rank)}"]
    suggested_fix = "look at the end of its own log first; the errors of the other ranks follow from it"
    if rank.state is not ProcessState.RAISED:
        suggested_fix = "look at the kernel's log (`dmesg -T | grep -i kill`) and at the scheduler's for PID "
        suggested_fix += str(rank.ring.header.pid)
    return RANK_FAILED.finding("\n".join(lines), None if last is None else location_of(last.at), suggested_fix)


def last_text(rank: RankNow) -> str:
    """Return the last operation of a rank, with its line."""
    op = rank.last
    if op is None:
        return "none"
    return f"{ring_entry(rank.rank, 0, op).text}{' at ' + op.at if op.at else ''}"


def stopped(rank: RankNow, job: JobNow, what: str) -> Finding:
    """Return finding PP954 about a rank that does not run."""
    header = rank.ring.header
    seconds = seconds_since_heartbeat(rank, job)
    return RANK_STOPPED.finding(
        f"rank {rank.rank} (PID {header.pid} on {header.host}) {what}; its last heartbeat is "
        f"{time_text(seconds * 1e6)} old\nits last operation is {last_text(rank)}",
        None if rank.last is None else location_of(rank.last.at),
        f"if nobody debugs it: kill -CONT {header.pid}",
    )


def _mismatch(analysis: Analysis, patience_s: float) -> tuple[tuple[int, ...], Finding] | None:
    """Return the ranks that differ, and the finding, of the first mismatch.

    Messages, and totals of an all-to-all, are compared if an end is not done and nothing has happened to any part for
    ``patience_s``: their positions are certain only at the end of a ring. If the first collective that differs has left
    the rings, the digests show since when.
    """
    mismatches: list[Disagreement] = [
        disagreement
        for disagreement in disagreements(analysis.matches)
        if _is_certain(disagreement)
        or (
            any(entry.state is not State.COMPLETED for entry in disagreement.entries)
            and all(analysis.seconds(entry) >= patience_s for entry in disagreement.entries)
        )
    ]
    earlier = [
        each
        for each in divergences((rank.rank, rank.ring.header.digests) for rank in analysis.job.ranks)
        if not any(_has(analysis, each, disagreement) for disagreement in mismatches)
    ]
    if earlier:
        return _digests_differ(analysis, earlier[0])
    if not mismatches:
        return None
    first = min(mismatches, key=lambda each: min(analysis.op(entry).issued_ns for entry in each.entries))
    forms = {entry.rank: (entry.op, entry.num_elements, entry.dtypes) for entry in first.entries}
    ranks = minority(forms) or _unusual(analysis, first.entries) or tuple(sorted(forms))
    if len(ranks) > 1:
        ranks = most_suspect(analysis, ranks)
    finding = first.finding
    lines = [f"rank {entry.rank} issued {entry.text} of {entry.tensor_text}{at_text(analysis.op(entry))}"
             for entry in first.entries[:MOST_WAITS]]  # fmt: skip
    message = "\n".join((finding.message, *lines))
    return ranks, Finding(finding.code, finding.severity, message, finding.location, finding.help, finding.witness)


def _is_certain(disagreement: Disagreement) -> bool:
    return all(entry.channel is None for entry in disagreement.entries) and any(
        entry.op != "all_to_all" for entry in disagreement.entries
    )


def _unusual(analysis: Analysis, entries: Sequence[Entry]) -> tuple[int, ...]:
    """Return the ranks whose ring has their operation and its line less than half as often as another rank's ring."""
    counts = {}
    for entry in entries:
        op, ops = analysis.op(entry), analysis.job.by_rank[entry.rank].ring.ops
        counts[entry.rank] = sum(_signature(each) == _signature(op) for each in ops)
    return tuple(sorted(rank for rank, count in counts.items() if 2 * count < max(counts.values())))


def _has(analysis: Analysis, divergence: Divergence, disagreement: Disagreement) -> bool:
    """True if a disagreement is the first collective that differs, by the digests."""
    op = analysis.op(disagreement.entries[0])
    is_group = not op.is_message and divergence.key == group_key(group_text(op.group))
    return is_group and divergence.agreed <= op.number < divergence.different


def _digests_differ(analysis: Analysis, divergence: Divergence) -> tuple[tuple[int, ...], Finding]:
    forms = grouped((value, rank) for rank, value in sorted(divergence.digests.items()))
    last = divergence.different - 1
    since = f"#{last}" if divergence.agreed == last else f"one of #{divergence.agreed} to #{last}"
    sides = " and ".join(ranks_text(ranks) for ranks in forms.values())
    titles = {group_key(group_text(analysis.op(entry).group)): entry.group.title for entry in analysis.entries.values()}
    message = (
        f"the collectives of {titles.get(divergence.key, 'a group')} differ since {since} in operation, size or type, "
        f"by the digests of {sides}; the rings no longer have the first one that differs"
    )
    ranks = minority(divergence.digests) or tuple(sorted(divergence.digests))
    return ranks, DISAGREEMENT.finding(message)


def check_job(
    job: JobNow, *, patience_s: float = PATIENCE_S, slow_s: float = SLOW_S, busy: frozenset[int] = frozenset(),
    starting: frozenset[int] = frozenset(),
) -> Verdict:  # fmt: skip
    """Return the verdict about a job.

    Args:
        job: the rings and the processes.
        patience_s: wait of a rank, in seconds, from which the job counts as hung.
        slow_s: the same limit for a wait for a rank of ``busy``, which computes, and for an operation that all have
            issued.
        busy: ranks whose processes use a processor.
        starting: ranks that may not have begun yet: a wait for them does not count as a hang.
    """
    analysis = analyse(job)
    waits = waits_of(analysis)
    oldest = max((wait.seconds for wait in waits), default=0.0)
    failure = certain_failure(analysis, patience_s, oldest >= patience_s)
    if failure is None and oldest >= patience_s:
        failure = follow_waits(analysis, waits, patience_s, slow_s, busy, starting)
    if failure is None and job.is_over:
        failure = _killed_together(analysis)
    states = {
        rank.rank: ProcessState.GONE if job.is_over and rank.state is ProcessState.RUNNING else rank.state
        for rank in job.ranks
    }
    if failure is None:
        ended = all(rank.state is ProcessState.ENDED for rank in job.ranks) and not job.missing
        status = Status.ENDED if ended else Status.RUNNING
        return Verdict(status, Kind.NONE, (), waits, (), (), states, job.missing)
    positions = [job.by_rank[rank].plan_position(job.now_ns) for rank in failure.causes if rank in job.by_rank]
    return Verdict(
        failure.status, failure.kind, failure.causes, waits, tuple(failure.findings), failure.reasons, states,
        job.missing, tuple(filter(None, positions)),
    )  # fmt: skip


def follow_waits(
    analysis: Analysis,
    waits: Sequence[BlockedRank],
    patience_s: float,
    slow_s: float,
    busy: frozenset[int],
    starting: frozenset[int],
) -> Failure | None:
    """Follow the waits, the longest first, to ranks that wait for nobody, and to cycles. Hangs come before slowness."""
    slow = None
    for component in analysis.graph.ends(wait.rank for wait in waits if wait.seconds >= patience_s):
        if len(component) > 1:
            failure = _cycle(analysis, component, patience_s)
        elif component[0] in starting:
            continue
        else:
            failure = _end_of_waits(analysis, component[0], patience_s, slow_s, component[0] in busy)
        if failure is not None and failure.status is Status.HANG:
            return failure
        slow = slow or failure
    return slow


def _end_of_waits(analysis: Analysis, rank: int, patience_s: float, slow_s: float, is_busy: bool) -> Failure | None:
    """Return the failure of a rank that others wait for, and that waits for nobody; None before the patience ends."""
    now = analysis.job.by_rank.get(rank)
    if now is not None and now.state in (ProcessState.SILENT, ProcessState.STOPPED):
        limit_s = slow_s if any(map(now.is_opening, now.blocking)) else patience_s  # a driver may stop the heartbeat
        is_long = seconds_since_heartbeat(now, analysis.job) >= limit_s
        is_silent = is_long and now.state is ProcessState.SILENT  # a rank that is stopped for long was found before
        return Failure(Kind.STOPPED, (rank,), [stopped(now, analysis.job, "is silent")]) if is_silent else None
    if now is not None and now.blocking and now.state is not ProcessState.ENDED:
        return _unfinished(analysis, now, patience_s, slow_s)
    waits = analysis.graph.waiters(rank)
    longest = max(waits.values(), key=lambda wait: wait.seconds)
    if longest.seconds < patience_s:
        return None
    if now is None:
        message = f"{longest.text} for rank {rank}, which has no ring"
        suggested_fix = "it never called `watch`, or its file is not in this directory: look at its log and its process"
        return Failure(Kind.ABSENT, (rank,), [NEVER_ISSUED.finding(message, longest.location, suggested_fix)])
    if now.state is ProcessState.ENDED:
        candidates = (rank, *waits)
        ranks = most_suspect(analysis, candidates)
        ranks = (rank,) if set(ranks) == set(candidates) else ranks
        last = f"rank {rank} has ended its program; its last operation is {last_text(now)}"
        return Failure(Kind.ENDED, ranks, [_never_issued(analysis, rank, last)], reasons_for(analysis, ranks))
    outside_s = (analysis.job.now_ns - now.since_ns) / 1e9
    where = f", in {now.own_line}" if now.own_line else ""
    activity = "it computes" if is_busy else "it is idle"
    last = f"rank {rank} has been outside of communication for {time_text(outside_s * 1e6)}{where}; {activity}"
    if now.last is not None:
        last += f"; its last operation is {last_text(now)}"
    if is_busy and longest.seconds < slow_s:
        line = location_of(now.own_line.rpartition(" ")[0]) or longest.location
        finding = SLOW_RANK.finding(
            f"{longest.text} for rank {rank}, for {time_text(longest.seconds * 1e6)}\n{last}", line
        )
        return Failure(Kind.NONE, (rank,), [finding], status=Status.SLOW)
    return Failure(Kind.ABSENT, (rank,), [_never_issued(analysis, rank, last)])


def _never_issued(analysis: Analysis, rank: int, last: str) -> Finding:
    what = f"rank {rank} never issued its part of"
    return absence_finding(NEVER_ISSUED, analysis.graph, {rank: rank}, what, [last])


def _unfinished(analysis: Analysis, now: RankNow, patience_s: float, slow_s: float) -> Failure | None:
    rank = now.rank
    entries = analysis.blocking.get(rank, ())
    if not entries:  # a receive from any rank
        if (analysis.job.now_ns - now.since_ns) / 1e9 < patience_s:
            return None
        text = f"rank {rank} waits in {last_text(now)} for a message from any rank"
        return Failure(Kind.UNFINISHED, (rank,), [NOT_FINISHED.finding(text)])
    entry = next((each for each in entries if _seconds_still(analysis, each, entries) >= slow_s), None)
    if entry is None:
        return _left(analysis, entries, patience_s)
    ranks = diverging_ranks(analysis)
    members = _members(entry)
    return Failure(
        Kind.UNFINISHED, ranks or tuple(sorted(members)),
        [
            NOT_FINISHED.finding(
                f"{entry.text} is issued on all its ranks and does not end; rank {rank} has waited "
                f"{time_text(analysis.seconds(entry) * 1e6)}{at_text(analysis.op(entry))}",
                entry.location, "look at the computation before it on its stream, and at the network between its ranks",
            )
        ],
        reasons_for(analysis, ranks),
    )  # fmt: skip


def _left(analysis: Analysis, entries: Sequence[Entry], patience_s: float) -> Failure | None:
    """Return the failure of operations that all ranks have issued, and that a rank that has ended cannot finish."""
    for entry in entries:
        left = [
            rank for rank in _members(entry) if rank in analysis.job.by_rank and analysis.job.by_rank[rank].has_left
        ]
        if left and _seconds_still(analysis, entry, entries) >= patience_s:
            message = (
                f"{entry.text} is issued on all its ranks and does not end on rank {entry.rank}"
                f"{at_text(analysis.op(entry))}; {ranks_text(left)} ended meanwhile"
            )
            return Failure(Kind.ENDED, tuple(left), [NOT_FINISHED.finding(message, entry.location)])
    return None


def _members(entry: Entry) -> tuple[int, ...]:
    return entry.group.ranks if entry.channel is None else (entry.channel.src, entry.channel.dst)


def _seconds_still(analysis: Analysis, entry: Entry, entries: Sequence[Entry]) -> float:
    """Return the seconds since the last event of any part of an operation and, in a batch, of the whole batch."""
    batch = analysis.op(entry).batch
    together = [each for each in entries if each is entry or (batch is not None and analysis.op(each).batch == batch)]
    return min(analysis.seconds(part) for each in together for part in analysis.parts(each))


def _cycle(analysis: Analysis, component: Sequence[int], patience_s: float) -> Failure | None:
    """Return the failure of the shortest cycle of waits that are all long enough; None without one."""
    cycle = analysis.graph.cycle(component, patience_s)
    if not cycle:
        return None
    ranks = most_suspect(analysis, component)
    suggested_fix = "let one of them issue the operation that the other waits for before it waits itself"
    reasons = reasons_for(analysis, ranks) if set(ranks) != set(component) else ()
    return Failure(Kind.CYCLE, ranks, [cycle_finding(HANG_CYCLE, cycle, suggested_fix)], reasons)


_TAIL: Final = 64
"""Operations at the end of a ring that are compared with earlier ones, and the longest context."""
_ENOUGH: Final = 2
_POINTS_PARTED: Final = 4
_POINTS_DEVIATES: Final = 2
_POINTS_FEWER: Final = 1


def most_suspect(analysis: Analysis, candidates: Iterable[int]) -> tuple[int, ...]:
    """Return the candidates with the most signs that they left the common order; all of them without a difference."""
    ranks = sorted(set(candidates))
    points = dict.fromkeys(ranks, 0)
    odd = diverging_ranks(analysis)
    issued = {
        rank: max(analysis.share(entry) for entry in analysis.blocking[rank])
        for rank in ranks
        if rank in analysis.blocking and not analysis.job.by_rank[rank].has_left
    }
    # members that did not issue the operation either are on the side of a rank that has ended
    shares = {rank: issued.get(rank, 1 - max(issued.values(), default=0.0)) for rank in ranks}
    for rank in ranks:
        points[rank] += _POINTS_PARTED * (rank in odd)
        points[rank] += _POINTS_DEVIATES * (_deviation(analysis.job.by_rank[rank].ring.ops) is not None)
        points[rank] += _POINTS_FEWER * (shares[rank] < max(shares.values()))
    most = max(points.values())
    return tuple(rank for rank in ranks if points[rank] == most)


def diverging_ranks(analysis: Analysis) -> tuple[int, ...]:
    """Return the ranks that are not at the line of most ranks at the first divergence; none without such a line."""
    return minority({rank: op.at for rank, op in _first_divergence(analysis).items()})


def reasons_for(analysis: Analysis, ranks: Iterable[int]) -> tuple[str, ...]:
    """Return the reasons for ranks as the cause, in sentences."""
    reasons = []
    first, odd = _first_divergence(analysis), diverging_ranks(analysis)
    for rank in ranks:
        if rank in odd:
            op, other = first[rank], next(first[each] for each in first if each not in odd)
            text = f"rank {rank} issued collective #{op.number} of its group at {op.at}, "
            reasons.append(f"{text}most others at {other.at}: no step before had these lines together")
        ops = analysis.job.by_rank[rank].ring.ops
        deviating = _deviation(ops)
        if deviating is not None:
            reasons.append(
                f"rank {rank} issued {ring_entry(rank, 0, deviating).text}{at_text(deviating)} "
                "where its own earlier steps have another operation"
            )
    return tuple(reasons)


def _deviation(ops: Sequence[RingOp]) -> RingOp | None:
    """Return the first of the last operations whose predecessors have another successor elsewhere in the ring.

    The operations before it are the longest sequence that ends there and occurs elsewhere. Training repeats a step:
    this finds a rank that takes another branch than in all earlier steps, and not a rank that only waits for it.
    """
    signatures = [_signature(op) for op in ops]
    for end in range(max(1, len(ops) - _TAIL), len(ops)):
        longest = 0
        successors: set[object] = set()
        for other in range(1, len(ops)):
            if other == end:
                continue
            length, most = 0, min(other, end, _TAIL)
            while length < most and signatures[other - 1 - length] == signatures[end - 1 - length]:
                length += 1
            if length > longest:
                longest, successors = length, set()
            if length and length == longest:
                successors.add(signatures[other])
        if longest >= _ENOUGH and signatures[end] not in successors:
            return ops[end]
    return None


def _signature(op: RingOp) -> tuple[object, ...]:
    return op.op, op.group.name, op.peer, op.tag, op.num_inputs, op.num_outputs, op.at


def _first_divergence(analysis: Analysis) -> Mapping[int, RingOp]:
    """Return the operations of the first collective that ranks issued from a new combination of lines.

    Members of one collective often issue it from one line; if not, the same combination of lines occurs in every step.
    After an extra collective of one rank, a new combination occurs. Returns the operation of each of its members, empty
    if there is none, or if there is no earlier collective to compare with.
    """
    by_group: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, RingOp]]] = {}
    for now in analysis.job.ranks:
        for op in now.ring.ops:
            if not op.is_message and op.group.ranks:
                by_group.setdefault((op.group.name, op.group.ranks), {}).setdefault(op.number, {})[now.rank] = op
    candidates = []
    for (_, ranks), collectives in by_group.items():
        whole = [members for _, members in sorted(collectives.items()) if len(members) == len(ranks)]
        lines = [tuple(members[rank].at for rank in sorted(members)) for members in whole]
        counts = Counter(lines)
        usual = [index for index, line in enumerate(lines) if len(set(line)) == 1 or counts[line] >= _ENOUGH]
        after = usual[-1] + 1 if usual else len(lines)
        if usual and after < len(lines):
            candidates.append(whole[after])
    return min(candidates, key=lambda members: min(op.issued_ns for op in members.values()), default={})
