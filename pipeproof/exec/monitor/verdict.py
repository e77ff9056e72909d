"""Verdict about a watched job: which rank is the cause of a hang, and which ranks wait because of it.

A rank waits for another one if the operation that blocks it needs an operation
that the other rank has not issued. Following these waits from the ranks that
have waited longest leads to the cause: a rank that waits for nobody, or a
cycle. Of a cycle, and of a collective that only some members issued, the
probable cause is the rank that left the common order: by its own earlier
steps, by the lines of the other ranks, and by the number of ranks on its side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import networkx as nx

from pipeproof.diagnostics.finding import CycleWitness, Finding, Location, OpsWitness, WitnessOp
from pipeproof.diagnostics.text_output import finding_to_json
from pipeproof.exec.monitor.job import JobNow, ProcessState, RankNow
from pipeproof.exec.monitor.monitor_codes import RANK_FAILED, RANK_STOPPED, SLOW_RANK
from pipeproof.exec.monitor.own_history import deviation, minority, parted
from pipeproof.exec.monitor.ring import OpState, RingOp
from pipeproof.interop.hang.collective_matches import Disagreement, Matches, disagreements, match_entries
from pipeproof.interop.hang.flight_recorder import Channel, Dump, Entry, Group, Launch, State
from pipeproof.interop.hang.hang_codes import HANG_CYCLE, NEVER_ISSUED, NOT_FINISHED

PATIENCE_S: Final = 5.0
"""Wait of a rank from which a job counts as hung."""
SLOW_S: Final = 60.0
"""Wait for a rank that computes from which a job counts as hung."""
_FAILURE_GRACE_S: Final = 1.0
_POINTS_PARTED: Final = 4
_POINTS_DEVIATES: Final = 2
_POINTS_FEWER: Final = 1
_MOST_WAITS: Final = 16


class Status(StrEnum):
    """State of a job."""

    RUNNING = "running"
    SLOW = "slow"
    HANG = "hang"
    ENDED = "ended"


class Kind(StrEnum):
    """Kind of a hang."""

    NONE = "none"
    MISMATCH = "mismatch"
    """Members of a collective, or ends of a message, differ."""
    CYCLE = "cycle"
    """Ranks wait for each other."""
    ENDED = "ended"
    """A rank has ended its program, and others wait for it."""
    ABSENT = "absent"
    """A rank does not come: its host is elsewhere than in communication."""
    RAISED = "raised"
    KILLED = "killed"
    STOPPED = "stopped"
    UNFINISHED = "unfinished"
    """All parts are issued, and the operation does not end."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that waits: the operation that blocks it, its line, for how long, and for which ranks."""

    rank: int
    op: str
    at: str
    seconds: float
    ranks: tuple[int, ...]
    meaning: str = ""
    """Operation of the plan, its micro-batch and its stage, where they are known."""


@dataclass(frozen=True)
class Verdict:
    """State of a job, the ranks that cause its hang, those that wait, and the findings."""

    status: Status
    kind: Kind
    causes: tuple[int, ...]
    waits: tuple[Wait, ...]
    findings: tuple[Finding, ...]
    reasons: tuple[str, ...]
    states: Mapping[int, ProcessState]
    missing: tuple[int, ...]

    def lines(self) -> Iterator[str]:
        """Return the verdict as text, apart from its findings: the cause, the reasons, and the ranks that wait."""
        if self.status in (Status.HANG, Status.SLOW):
            named = f"rank{'s' if len(self.causes) > 1 else ''} {', '.join(map(str, self.causes)) or 'unknown'}"
            yield f"{'cause' if self.status is Status.HANG else 'slow'}: {named}"
            yield from (f"  because {reason}" for reason in self.reasons)
        else:
            yield f"{self.status}: no rank is the cause of a hang"
        for wait in self.waits[:_MOST_WAITS]:
            meaning = f" ({wait.meaning})" if wait.meaning else ""
            at = f" at {wait.at}" if wait.at else ""
            others = f" for rank{'s' if len(wait.ranks) > 1 else ''} {', '.join(map(str, wait.ranks))}"
            others = others if wait.ranks else ""
            yield f"rank {wait.rank} waits {wait.seconds:.1f} s in {wait.op}{meaning}{at}{others}"
        if self.missing:
            yield f"no ring of rank{'s' if len(self.missing) > 1 else ''} {', '.join(map(str, self.missing))}"

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON data."""
        return {
            "status": str(self.status),
            "kind": str(self.kind),
            "causes": list(self.causes),
            "reasons": list(self.reasons),
            "waits": [
                {
                    "rank": wait.rank, "op": wait.op, "at": wait.at, "seconds": round(wait.seconds, 3),
                    "ranks": list(wait.ranks), "meaning": wait.meaning,
                }
                for wait in self.waits
            ],
            "ranks": [{"rank": rank, "state": str(state)} for rank, state in sorted(self.states.items())],
            "ranks_without_ring": list(self.missing),
            "findings": [finding_to_json(finding) for finding in self.findings],
        }  # fmt: skip


@dataclass
class _Analysis:
    """The operations of all ranks, their matches, and the waits between ranks."""

    job: JobNow
    matches: Matches
    entries: dict[tuple[int, int], Entry]
    ops: dict[tuple[int, int], RingOp]
    blocking: dict[int, list[Entry]] = field(default_factory=dict)
    graph: nx.DiGraph[int] = field(default_factory=nx.DiGraph)

    def op(self, entry: Entry) -> RingOp:
        return self.ops[entry.rank, entry.index]

    def seconds(self, entry: Entry) -> float:
        """Seconds for which an operation has blocked its rank."""
        op = self.op(entry)
        return max(0.0, (self.job.now_ns - (op.waited_ns or op.issued_ns)) / 1e9)

    def missing(self, entry: Entry) -> tuple[int, ...]:
        """Ranks that have not issued their part of an operation, or whose device cannot reach it."""
        key = entry.rank, entry.index
        behind = (other.rank for other in self.matches.partners.get(key, ()) if self.is_behind(other))
        return tuple(sorted({*self.matches.missing.get(key, ()), *behind}))

    def is_behind(self, entry: Entry) -> bool:
        """True for an operation that is queued on its rank's device behind one that is not done."""
        return self.job.by_rank[entry.rank].is_behind(self.op(entry))

    def share(self, entry: Entry) -> float:
        """Part of the members of an operation that have issued it."""
        num_members = len(entry.group.ranks) if entry.channel is None else 2
        return 1 - len(self.missing(entry)) / max(num_members, 1)


def check_job(
    job: JobNow, *, patience_s: float = PATIENCE_S, slow_s: float = SLOW_S, busy: frozenset[int] = frozenset()
) -> Verdict:
    """Return the verdict about a job.

    Args:
        job: the rings and the processes.
        patience_s: wait of a rank, in seconds, from which the job counts as hung.
        slow_s: the same for a wait for a rank of ``busy``, which computes.
        busy: ranks whose processes use a processor.
    """
    analysis = _analyse(job)
    waits = _waits(analysis)
    oldest = max((wait.seconds for wait in waits), default=0.0)
    failure = _failure(analysis, oldest >= patience_s)
    if failure is None and oldest >= patience_s:
        failure = _follow_waits(analysis, waits, patience_s, slow_s, busy)
    states = {rank.rank: rank.state for rank in job.ranks}
    if failure is None:
        ended = all(rank.state is ProcessState.ENDED for rank in job.ranks) and not job.missing
        status = Status.ENDED if ended else Status.RUNNING
        return Verdict(status, Kind.NONE, (), waits, (), (), states, job.missing)
    return Verdict(
        failure.status, failure.kind, failure.causes, waits, tuple(failure.findings), failure.reasons, states,
        job.missing,
    )  # fmt: skip


@dataclass(frozen=True)
class _Failure:
    kind: Kind
    causes: tuple[int, ...]
    findings: Sequence[Finding]
    reasons: tuple[str, ...] = ()
    status: Status = Status.HANG


def _analyse(job: JobNow) -> _Analysis:
    dumps, ops = [], {}
    entries: dict[tuple[int, int], Entry] = {}
    for rank in job.ranks:
        launches = []
        for index, op in enumerate(rank.ring.ops):
            if op.is_message and op.peer is None:  # a receive from any rank has no channel yet
                continue
            entry = _entry(rank.rank, index, op)
            entries[rank.rank, index], ops[rank.rank, index] = entry, op
            launches.append(Launch(rank.rank, (entry,), entry.state, (entry.group,)))
        dumps.append(Dump(rank.rank, rank.ring.file, "ring", whole=True, launches=tuple(launches)))
    analysis = _Analysis(job, match_entries(dumps), entries, ops)
    for rank in job.ranks:
        analysis.graph.add_node(rank.rank)
        blocking = {op.seq for op in rank.blocking}
        for index, op in enumerate(rank.ring.ops):
            entry_of = entries.get((rank.rank, index))
            if op.seq in blocking and entry_of is not None:
                analysis.blocking.setdefault(rank.rank, []).append(entry_of)
                for other in analysis.missing(entry_of):
                    if other != rank.rank:
                        analysis.graph.add_edge(rank.rank, other)
    return analysis


def _entry(rank: int, index: int, op: RingOp) -> Entry:
    group = Group(op.group.name, "" if op.group.about == "eager" else op.group.about, op.group.ranks)
    channel = None
    if op.is_message and op.peer is not None:
        tag = 0 if op.group.backend == "nccl" else op.tag
        src, dst = (rank, op.peer) if op.op == "send" else (op.peer, rank)
        channel = Channel(group, src, dst, tag)
    return Entry(
        rank, index, op.op, group, op.number, channel, op.batch is not None,
        State.COMPLETED if op.state is OpState.DONE else State.STARTED,
        _sizes(op, op.num_inputs), _sizes(op, op.num_outputs), (op.dtype,) if op.dtype else (), _location(op.at),
    )  # fmt: skip


def _sizes(op: RingOp, num_elements: int) -> tuple[tuple[int, ...], ...]:
    """Return the shape of the only tensor where it is known to be the only one, else one flat shape of all elements."""
    num_first = 1
    for size in op.shape:
        num_first *= size
    if not num_elements:
        return ()
    return (op.shape if op.shape and num_first == num_elements else (num_elements,),)


def _location(at: str) -> Location | None:
    file, _, line = at.rpartition(":")
    return Location(file, int(line)) if file and line.isdigit() else None


def _waits(analysis: _Analysis) -> tuple[Wait, ...]:
    """Return the wait of each blocked rank, the longest first; of several operations, one that another rank misses."""
    waits = []
    for rank, entries in analysis.blocking.items():
        if analysis.job.by_rank[rank].state in (ProcessState.GONE, ProcessState.ENDED, ProcessState.RAISED):
            continue
        entry = max(entries, key=lambda entry: (bool(analysis.missing(entry)), analysis.seconds(entry)))
        ranks = tuple(sorted({other for each in entries for other in analysis.missing(each)} - {rank}))
        at = analysis.op(entry).at
        waits.append(Wait(rank, entry.text, at, analysis.seconds(entry), ranks, _meaning(analysis.op(entry))))
    return tuple(sorted(waits, key=lambda wait: (-wait.seconds, wait.rank)))


def _meaning(op: RingOp) -> str:
    if not op.kind:
        return ""
    micro_batch = "" if op.micro_batch is None else f" of micro-batch {op.micro_batch}"
    stage = "" if op.stage is None else f", stage {op.stage}"
    return f"{'activation' if op.kind == 'F' else 'gradient'}{micro_batch}{stage}"


def _failure(analysis: _Analysis, is_waiting: bool) -> _Failure | None:
    """Return a failure that is certain without following waits: a mismatch, an error, a process that does not run."""
    job = analysis.job
    raised = [rank for rank in job.ranks if rank.state is ProcessState.RAISED]
    in_call = [rank for rank in raised if rank.last is not None and _failed_last(rank)]
    own = sorted((rank for rank in raised if rank not in in_call), key=lambda rank: rank.ring.header.end_ns)
    gone = [rank for rank in job.ranks if rank.state is ProcessState.GONE and (in_call or _is_old(rank, job))]
    if own and (in_call or is_waiting or _is_old(own[0], job)):
        header = own[0].ring.header
        message = f"rank {header.rank} raised {header.error}"
        return _Failure(Kind.RAISED, (header.rank,), [_rank_failed(analysis, own[0], message)])
    mismatch = _unfinished_mismatch(analysis) if is_waiting or in_call or gone else None
    if mismatch is not None:
        ranks, finding = mismatch
        return _Failure(Kind.MISMATCH, ranks, [finding], _reasons(analysis, ranks))
    if gone:
        message = f"the process of rank {gone[0].rank} (PID {gone[0].ring.header.pid}) is gone and noted no end"
        ranks = tuple(rank.rank for rank in gone)
        return _Failure(Kind.KILLED, ranks, [_rank_failed(analysis, rank, message) for rank in gone[:1]])
    stopped = [rank for rank in job.ranks if rank.state is ProcessState.STOPPED]
    if stopped and (is_waiting or all(_seconds_since_heartbeat(rank, job) > PATIENCE_S for rank in stopped)):
        ranks = tuple(rank.rank for rank in stopped)
        return _Failure(Kind.STOPPED, ranks, [_stopped(rank, job, "is stopped (state T)") for rank in stopped])
    if in_call and all(_is_old(rank, job) for rank in in_call):
        first = min(in_call, key=lambda rank: rank.ring.header.end_ns)
        message = f"rank {first.rank} raised {first.ring.header.error} in {_last_text(first)}, before any other rank"
        return _Failure(Kind.RAISED, (first.rank,), [_rank_failed(analysis, first, message)])
    return None


def _failed_last(rank: RankNow) -> bool:
    return any(op.state is OpState.FAILED for op in rank.ring.ops[-2:])


def _is_old(rank: RankNow, job: JobNow) -> bool:
    header = rank.ring.header
    return (job.now_ns - max(header.heartbeat_ns, header.end_ns)) / 1e9 > _FAILURE_GRACE_S


def _seconds_since_heartbeat(rank: RankNow, job: JobNow) -> float:
    return (job.now_ns - rank.ring.header.heartbeat_ns) / 1e9


def _rank_failed(analysis: _Analysis, rank: RankNow, message: str) -> Finding:
    last = rank.last
    lines = [message, f"its last operation is {_last_text(rank)}"]
    suggested_fix = "look at the end of its own log first; the errors of the other ranks follow from it"
    if rank.state is ProcessState.GONE:
        suggested_fix = "look at the kernel's log (`dmesg -T | grep -i kill`) and at the scheduler's for PID "
        suggested_fix += str(rank.ring.header.pid)
    return RANK_FAILED.finding("\n".join(lines), None if last is None else _location(last.at), suggested_fix)


def _last_text(rank: RankNow) -> str:
    op = rank.last
    if op is None:
        return "none"
    return f"{_entry(rank.rank, 0, op).text}{' at ' + op.at if op.at else ''}"


def _stopped(rank: RankNow, job: JobNow, what: str) -> Finding:
    header = rank.ring.header
    seconds = _seconds_since_heartbeat(rank, job)
    return RANK_STOPPED.finding(
        f"rank {rank.rank} (PID {header.pid} on {header.host}) {what}; its last heartbeat is {seconds:.1f} s old\n"
        f"its last operation is {_last_text(rank)}",
        None if rank.last is None else _location(rank.last.at),
        f"if nobody debugs it: kill -CONT {header.pid}",
    )


def _unfinished_mismatch(analysis: _Analysis) -> tuple[tuple[int, ...], Finding] | None:
    """Return the ranks that differ, and the finding, of the first mismatch that is not done on one of its ranks."""
    unfinished: list[Disagreement] = [
        disagreement
        for disagreement in disagreements(analysis.matches)
        if any(entry.state is not State.COMPLETED for entry in disagreement.entries)
    ]
    if not unfinished:
        return None
    first = min(unfinished, key=lambda each: min(analysis.op(entry).issued_ns for entry in each.entries))
    ranks = minority({entry.rank: (entry.kind, entry.num_elements, entry.dtypes) for entry in first.entries})
    if len(ranks) > 1:
        ranks = _most_suspect(analysis, ranks)
    finding = first.finding
    lines = [f"rank {entry.rank} issued {entry.text} of {entry.tensor_text}{_at(analysis.op(entry))}"
             for entry in first.entries[:_MOST_WAITS]]  # fmt: skip
    message = "\n".join((finding.message, *lines))
    return ranks, Finding(finding.code, finding.severity, message, finding.location, finding.help, finding.witness)


def _at(op: RingOp) -> str:
    return f" at {op.at}" if op.at else ""


def _follow_waits(
    analysis: _Analysis, waits: Sequence[Wait], patience_s: float, slow_s: float, busy: frozenset[int]
) -> _Failure | None:
    """Follow the waits of the rank that has waited longest to a rank that waits for nobody, or to a cycle."""
    for start in waits:
        if start.seconds < patience_s:
            break
        reachable = {start.rank, *nx.descendants(analysis.graph, start.rank)}
        component = _last_component(analysis.graph.subgraph(reachable))
        if len(component) > 1:
            return _cycle(analysis, component)
        (rank,) = component
        failure = _end_of_waits(analysis, rank, start, slow_s, rank in busy)
        if failure is not None:
            return failure
    return None


def _last_component(graph: nx.DiGraph[int]) -> tuple[int, ...]:
    """Return the ranks of a strongly connected component that no wait leaves."""
    condensed = nx.condensation(graph)
    last = [tuple(sorted(condensed.nodes[node]["members"])) for node in condensed if condensed.out_degree(node) == 0]
    return min(last)


def _end_of_waits(analysis: _Analysis, rank: int, start: Wait, slow_s: float, is_busy: bool) -> _Failure | None:
    """Return the failure of a rank that others wait for, and that waits for nobody."""
    now = analysis.job.by_rank.get(rank)
    issuers = list(analysis.graph.predecessors(rank))
    if now is None:
        message = f"rank {start.rank} waits in {start.op}{_at_text(start)} for rank {rank}, which has no ring"
        suggested_fix = "it never called `watch`, or its file is not in this directory: look at its log and its process"
        return _Failure(Kind.ABSENT, (rank,), [NEVER_ISSUED.finding(message, _location(start.at), suggested_fix)])
    if now.state is ProcessState.SILENT:
        return _Failure(Kind.STOPPED, (rank,), [_stopped(now, analysis.job, "is silent")])
    if now.state is ProcessState.ENDED:
        candidates = (rank, *issuers)
        ranks = _most_suspect(analysis, candidates)
        ranks = (rank,) if set(ranks) == set(candidates) else ranks
        last = f"rank {rank} has ended its program; its last operation is {_last_text(now)}"
        finding = _never_issued(analysis, issuers, rank, last)
        return _Failure(Kind.ENDED, ranks, [finding], _reasons(analysis, ranks))
    if now.blocking:
        is_first = all(op.number == 0 and op.state is OpState.ISSUED for op in now.blocking)
        return None if is_first and start.seconds < slow_s else _unfinished(analysis, rank)
    seconds = (analysis.job.now_ns - now.since_ns) / 1e9
    where = f", in {now.own_line}" if now.own_line else ""
    activity = "it computes" if is_busy else "it is idle"
    last = f"rank {rank} has been outside of communication for {seconds:.1f} s{where}; {activity}"
    if now.last is not None:
        last += f"; its last operation is {_last_text(now)}"
    if is_busy and start.seconds < slow_s:
        wait = f"rank {start.rank} has waited {start.seconds:.1f} s in {start.op}{_at_text(start)} for rank {rank}"
        finding = SLOW_RANK.finding(
            f"{wait}\n{last}",
            _location(now.own_line.rpartition(" ")[0]) or _location(start.at),
        )
        return _Failure(Kind.NONE, (rank,), [finding], status=Status.SLOW)
    finding = _never_issued(analysis, issuers, rank, last)
    return _Failure(Kind.ABSENT, (rank,), [finding])


def _at_text(wait: Wait) -> str:
    return f" at {wait.at}" if wait.at else ""


def _never_issued(analysis: _Analysis, issuers: Iterable[int], rank: int, last: str) -> Finding:
    entries = [
        entry for issuer in sorted(issuers) for entry in analysis.blocking[issuer] if rank in analysis.missing(entry)
    ]
    first = entries[0]
    lines = [f"rank {entry.rank} waits in {entry.text}{_at(analysis.op(entry))} for rank {rank}"
             for entry in entries[:_MOST_WAITS]]  # fmt: skip
    message = "\n".join((f"rank {rank} never issued its part of {first.text}", *lines, last))
    witness = OpsWitness(tuple(WitnessOp(entry.rank, f"{entry.text}: {entry.tensor_text}") for entry in entries))
    return NEVER_ISSUED.finding(message, first.location, witness=witness)


def _unfinished(analysis: _Analysis, rank: int) -> _Failure:
    entry = analysis.blocking[rank][0] if rank in analysis.blocking else None
    if entry is None:  # a receive from any rank
        text = f"rank {rank} waits in {_last_text(analysis.job.by_rank[rank])} for a message from any rank"
        return _Failure(Kind.UNFINISHED, (rank,), [NOT_FINISHED.finding(text)])
    suspects = parted({each.rank: each.ring.ops for each in analysis.job.ranks})
    ranks = minority({member: op.at for member, op in suspects.items()}) if suspects else ()
    members = entry.group.ranks if entry.channel is None else (entry.channel.src, entry.channel.dst)
    return _Failure(
        Kind.UNFINISHED, ranks or tuple(sorted(members)),
        [
            NOT_FINISHED.finding(
                f"{entry.text} is issued on all its ranks and does not end; rank {rank} has waited "
                f"{analysis.seconds(entry):.1f} s{_at(analysis.op(entry))}",
                entry.location, "look at the computation before it on its stream, and at the network between its ranks",
            )
        ],
        _reasons(analysis, ranks) if ranks else (),
    )  # fmt: skip


def _cycle(analysis: _Analysis, component: Sequence[int]) -> _Failure:
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
        f"rank {rank} waits in {entry.text}{_at(analysis.op(entry))} for rank {other}, "
        f"{_absence(analysis, entry, other)}"
        for rank, other, entry in steps
    ]
    ranks = _most_suspect(analysis, component)
    names = ", ".join(map(str, cycle))
    finding = HANG_CYCLE.finding(
        "\n".join((f"ranks {names} wait for each other, and none of them continues", *lines)),
        steps[0][2].location,
        "let one of them issue the operation that the other waits for before it waits itself",
        CycleWitness(tuple(WitnessOp(rank, entry.text) for rank, _, entry in steps)),
    )
    return _Failure(Kind.CYCLE, ranks, [finding], _reasons(analysis, ranks) if set(ranks) != set(component) else ())


def _absence(analysis: _Analysis, entry: Entry, other: int) -> str:
    """Return why the part of another rank is missing."""
    partners = analysis.matches.partners.get((entry.rank, entry.index), ())
    part = next((partner for partner in partners if partner.rank == other), None)
    return "which has not issued its part" if part is None else f"whose part{_at(analysis.op(part))} is queued behind"


def _most_suspect(analysis: _Analysis, candidates: Iterable[int]) -> tuple[int, ...]:
    """Return the candidates with the most signs that they left the common order; all of them without a difference."""
    ranks = sorted(set(candidates))
    points = dict.fromkeys(ranks, 0)
    suspects = parted({each.rank: each.ring.ops for each in analysis.job.ranks})
    lines = {rank: op.at for rank, op in suspects.items()}
    odd = minority(lines) if suspects else ()
    issued = {
        rank: max(analysis.share(entry) for entry in analysis.blocking[rank])
        for rank in ranks
        if rank in analysis.blocking
    }
    # on the side of a rank that has ended are the members that did not issue the operation either
    shares = {rank: issued.get(rank, 1 - max(issued.values(), default=0.0)) for rank in ranks}
    for rank in ranks:
        points[rank] += _POINTS_PARTED * (rank in odd and len(odd) < len(lines))
        points[rank] += _POINTS_DEVIATES * (deviation(analysis.job.by_rank[rank].ring.ops) is not None)
        points[rank] += _POINTS_FEWER * (shares[rank] < max(shares.values()))
    most = max(points.values())
    return tuple(rank for rank in ranks if points[rank] == most)


def _reasons(analysis: _Analysis, ranks: Iterable[int]) -> tuple[str, ...]:
    """Return what speaks for ranks as the cause, in sentences."""
    reasons = []
    suspects = parted({each.rank: each.ring.ops for each in analysis.job.ranks})
    lines = {rank: op.at for rank, op in suspects.items()}
    odd = minority(lines) if suspects else ()
    for rank in ranks:
        if rank in odd and len(odd) < len(lines):
            op, other = suspects[rank], next(suspects[each] for each in lines if each not in odd)
            text = f"rank {rank} issued collective #{op.number} of its group at {op.at}, "
            reasons.append(f"{text}most others at {other.at}: no step before had these lines together")
        ops = analysis.job.by_rank[rank].ring.ops
        deviating = deviation(ops)
        if deviating is not None:
            reasons.append(
                f"rank {rank} issued {_entry(rank, 0, deviating).text}{_at(deviating)} "
                "where its own earlier steps have another operation"
            )
    return tuple(reasons)
