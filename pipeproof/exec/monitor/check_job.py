"""Check of a watched job: which rank is the cause of a hang, and which ranks wait because of it.

Following the waits from the ranks that have waited longest leads to the cause:
a rank that waits for nobody, or a cycle. Of a cycle, and of a collective that
only some members issued, the probable cause is the rank that left the common
order: by its own earlier steps, by the lines of the other ranks, and by the
number of ranks on its side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import networkx as nx

from pipeproof.diagnostics.finding import CycleWitness, Finding, OpsWitness, WitnessOp
from pipeproof.exec.monitor.failures import Failure, certain_failure, last_text, stopped
from pipeproof.exec.monitor.job import JobNow, ProcessState
from pipeproof.exec.monitor.lateness import job_lateness, straggler_findings
from pipeproof.exec.monitor.monitor_codes import SLOW_RANK
from pipeproof.exec.monitor.own_history import minority, parted
from pipeproof.exec.monitor.ring import OpState
from pipeproof.exec.monitor.suspects import most_suspect, reasons_for
from pipeproof.exec.monitor.verdict import MOST_WAITS, PATIENCE_S, SLOW_S, Kind, Status, Verdict, Wait
from pipeproof.exec.monitor.waits import Analysis, analyse, at_text, location_of, waits_of
from pipeproof.interop.hang.flight_recorder import Entry
from pipeproof.interop.hang.hang_codes import HANG_CYCLE, NEVER_ISSUED, NOT_FINISHED

if TYPE_CHECKING:
    from pipeproof.exec.monitor.plan_ops import PlanOps


def check_job(
    job: JobNow, *, patience_s: float = PATIENCE_S, slow_s: float = SLOW_S, busy: frozenset[int] = frozenset(),
    starting: frozenset[int] = frozenset(), plan: PlanOps | None = None,
) -> Verdict:  # fmt: skip
    """Return the verdict about a job.

    Args:
        job: the rings and the processes.
        patience_s: wait of a rank, in seconds, from which the job counts as hung.
        slow_s: the same for a wait for a rank of ``busy``, which computes.
        busy: ranks whose processes use a processor.
        starting: ranks that may not have begun yet: a wait for one of them is no hang.
        plan: the plan that the job executes, for names of its operations.
    """
    analysis = analyse(job, plan)
    waits = waits_of(analysis)
    oldest = max((wait.seconds for wait in waits), default=0.0)
    failure = certain_failure(analysis, oldest >= patience_s)
    if failure is None and oldest >= patience_s:
        failure = follow_waits(analysis, waits, patience_s, slow_s, busy, starting)
    states = {rank.rank: rank.state for rank in job.ranks}
    late = job_lateness(job)
    if failure is None:
        ended = all(rank.state is ProcessState.ENDED for rank in job.ranks) and not job.missing
        status = Status.ENDED if ended else Status.RUNNING
        stragglers = tuple(straggler_findings(late))
        return Verdict(status, Kind.NONE, (), waits, stragglers, (), states, job.missing, lateness=late)
    return Verdict(
        failure.status, failure.kind, failure.causes, waits, tuple(failure.findings), failure.reasons, states,
        job.missing, tuple(_plan_notes(job, failure.causes, plan)), late,
    )  # fmt: skip


def _plan_notes(job: JobNow, causes: Sequence[int], plan: PlanOps | None) -> Iterator[str]:
    """Return where the ranks of a cause are in the plan: by themselves where they execute it, else by counting."""
    for rank in causes:
        now = job.by_rank.get(rank)
        position = "" if now is None else now.plan_position(job.now_ns)
        if position:
            yield position
        elif plan is not None:
            yield from plan.notes(job, (rank,))


def follow_waits(
    analysis: Analysis,
    waits: Sequence[Wait],
    patience_s: float,
    slow_s: float,
    busy: frozenset[int],
    starting: frozenset[int],
) -> Failure | None:
    """Follow the waits of the rank that has waited longest to a rank that waits for nobody, or to a cycle."""
    for start in waits:
        if start.seconds < patience_s:
            break
        reachable = {start.rank, *nx.descendants(analysis.graph, start.rank)}
        component = _last_component(analysis.graph.subgraph(reachable))
        if len(component) > 1:
            return _cycle(analysis, component)
        (rank,) = component
        if rank in starting:
            continue
        failure = _end_of_waits(analysis, rank, start, slow_s, rank in busy)
        if failure is not None:
            return failure
    return None


def _last_component(graph: nx.DiGraph[int]) -> tuple[int, ...]:
    """Return the ranks of a strongly connected component that no wait leaves."""
    condensed = nx.condensation(graph)
    last = [tuple(sorted(condensed.nodes[node]["members"])) for node in condensed if condensed.out_degree(node) == 0]
    return min(last)


def _end_of_waits(analysis: Analysis, rank: int, start: Wait, slow_s: float, is_busy: bool) -> Failure | None:
    """Return the failure of a rank that others wait for, and that waits for nobody."""
    now = analysis.job.by_rank.get(rank)
    issuers = list(analysis.graph.predecessors(rank))
    if now is None:
        message = f"rank {start.rank} waits in {start.op}{_wait_at(start)} for rank {rank}, which has no ring"
        suggested_fix = "it never called `watch`, or its file is not in this directory: look at its log and its process"
        return Failure(Kind.ABSENT, (rank,), [NEVER_ISSUED.finding(message, location_of(start.at), suggested_fix)])
    if now.state is ProcessState.SILENT:
        return Failure(Kind.STOPPED, (rank,), [stopped(now, analysis.job, "is silent")])
    if now.state is ProcessState.ENDED:
        candidates = (rank, *issuers)
        ranks = most_suspect(analysis, candidates)
        ranks = (rank,) if set(ranks) == set(candidates) else ranks
        last = f"rank {rank} has ended its program; its last operation is {last_text(now)}"
        finding = _never_issued(analysis, issuers, rank, last)
        return Failure(Kind.ENDED, ranks, [finding], reasons_for(analysis, ranks))
    if now.blocking:
        is_first = all(op.number == 0 and op.state is OpState.ISSUED for op in now.blocking)
        return None if is_first and start.seconds < slow_s else _unfinished(analysis, rank)
    seconds = (analysis.job.now_ns - now.since_ns) / 1e9
    where = f", in {now.own_line}" if now.own_line else ""
    activity = "it computes" if is_busy else "it is idle"
    last = f"rank {rank} has been outside of communication for {seconds:.1f} s{where}; {activity}"
    if now.last is not None:
        last += f"; its last operation is {last_text(now)}"
    if is_busy and start.seconds < slow_s:
        wait = f"rank {start.rank} has waited {start.seconds:.1f} s in {start.op}{_wait_at(start)} for rank {rank}"
        finding = SLOW_RANK.finding(
            f"{wait}\n{last}",
            location_of(now.own_line.rpartition(" ")[0]) or location_of(start.at),
        )
        return Failure(Kind.NONE, (rank,), [finding], status=Status.SLOW)
    finding = _never_issued(analysis, issuers, rank, last)
    return Failure(Kind.ABSENT, (rank,), [finding])


def _wait_at(wait: Wait) -> str:
    return f" at {wait.at}" if wait.at else ""


def _never_issued(analysis: Analysis, issuers: Iterable[int], rank: int, last: str) -> Finding:
    entries = [
        entry for issuer in sorted(issuers) for entry in analysis.blocking[issuer] if rank in analysis.missing(entry)
    ]
    first = entries[0]
    lines = [f"rank {entry.rank} waits in {entry.text}{at_text(analysis.op(entry))} for rank {rank}"
             for entry in entries[:MOST_WAITS]]  # fmt: skip
    message = "\n".join((f"rank {rank} never issued its part of {first.text}", *lines, last))
    witness = OpsWitness(tuple(WitnessOp(entry.rank, f"{entry.text}: {entry.tensor_text}") for entry in entries))
    return NEVER_ISSUED.finding(message, first.location, witness=witness)


def _unfinished(analysis: Analysis, rank: int) -> Failure:
    entry = analysis.blocking[rank][0] if rank in analysis.blocking else None
    if entry is None:  # a receive from any rank
        text = f"rank {rank} waits in {last_text(analysis.job.by_rank[rank])} for a message from any rank"
        return Failure(Kind.UNFINISHED, (rank,), [NOT_FINISHED.finding(text)])
    suspects = parted({each.rank: each.ring.ops for each in analysis.job.ranks})
    ranks = minority({member: op.at for member, op in suspects.items()}) if suspects else ()
    members = entry.group.ranks if entry.channel is None else (entry.channel.src, entry.channel.dst)
    return Failure(
        Kind.UNFINISHED, ranks or tuple(sorted(members)),
        [
            NOT_FINISHED.finding(
                f"{entry.text} is issued on all its ranks and does not end; rank {rank} has waited "
                f"{analysis.seconds(entry):.1f} s{at_text(analysis.op(entry))}",
                entry.location, "look at the computation before it on its stream, and at the network between its ranks",
            )
        ],
        reasons_for(analysis, ranks) if ranks else (),
    )  # fmt: skip


def _cycle(analysis: Analysis, component: Sequence[int]) -> Failure:
    graph = analysis.graph.subgraph(component)
    cycle = min(
        (
            nx.shortest_path(graph, after, rank)
            for rank in component
            for after in sorted(graph.successors(rank))
        ),
        key=lambda path: (len(path), path),
    )  # fmt: skip
    first = cycle.index(min(cycle))
    cycle = cycle[first:] + cycle[:first]
    steps = []
    for rank, other in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
        entry = next(each for each in analysis.blocking[rank] if other in analysis.missing(each))
        steps.append((rank, other, entry))
    lines = [
        f"rank {rank} waits in {entry.text}{at_text(analysis.op(entry))} for rank {other}, "
        f"{_absence(analysis, entry, other)}"
        for rank, other, entry in steps
    ]
    ranks = most_suspect(analysis, component)
    names = ", ".join(map(str, cycle))
    finding = HANG_CYCLE.finding(
        "\n".join((f"ranks {names} wait for each other, and none of them continues", *lines)),
        steps[0][2].location,
        "let one of them issue the operation that the other waits for before it waits itself",
        CycleWitness(tuple(WitnessOp(rank, entry.text) for rank, _, entry in steps)),
    )
    return Failure(Kind.CYCLE, ranks, [finding], reasons_for(analysis, ranks) if set(ranks) != set(component) else ())


def _absence(analysis: Analysis, entry: Entry, other: int) -> str:
    """Return why the part of another rank is missing."""
    partners = analysis.matches.partners.get((entry.rank, entry.index), ())
    part = next((partner for partner in partners if partner.rank == other), None)
    return (
        "which has not issued its part" if part is None else f"whose part{at_text(analysis.op(part))} is queued behind"
    )
