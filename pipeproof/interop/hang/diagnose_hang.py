"""Diagnosis of a hung run from its dumps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeproof.diagnostics.finding import Finding, ProgramExcerpt, Severity
from pipeproof.diagnostics.problems import grouped
from pipeproof.diagnostics.text_output import finding_to_json
from pipeproof.diagnostics.wait_graph import Wait, WaitGraph, absence_finding, cycle_finding, ranks_text, wait_lines
from pipeproof.interop.hang.collective_matches import disagreements, match_entries
from pipeproof.interop.hang.flight_recorder import Dump, Entry, Launch, State, read_dumps
from pipeproof.interop.hang.hang_codes import HANG_CYCLE, NEVER_ISSUED, NO_DUMP, NOT_FINISHED

_Node = tuple[int, int]
"""A launch that is not done: its rank, and its index among the rank's launches; ``_NOTHING`` for a rank without one."""
_NOTHING = -1
_LEFT_OUT = ".."
_NEIGHBOURS = 1
_MOST_NAMED = 8
_MOST_LAST = 16
"""Ranks whose last operations a text lists."""


@dataclass(frozen=True)
class HangReport:
    """The dumps of a run, the kind of its hang, the ranks that cause it, and the findings.

    ``kind`` is, as for rings, ``mismatch``, ``cycle``, ``absent``, ``unfinished`` or ``none``.
    """

    dumps: tuple[Dump, ...]
    kind: str
    causes: tuple[int, ...]
    findings: tuple[Finding, ...]

    @property
    def num_pending(self) -> int:
        """Number of launches that are not done, over all ranks."""
        return sum(len(dump.pending) for dump in self.dumps)

    @property
    def _named(self) -> str:
        return ranks_text(self.causes) if self.causes else "rank unknown"

    def lines(self) -> Iterator[str]:
        """Return the cause, and the last operation of each rank, the causing ranks first; nothing without a hang."""
        if self.kind == "none":
            return
        yield f"cause: {self._named}"
        for dump in sorted(self.dumps, key=lambda dump: dump.rank not in self.causes)[:_MOST_LAST]:
            last = dump.last
            what = "issued nothing" if last is None else f"finished {last.text}, and issued nothing after it"
            if last is not None and last.pending:
                what = f"is in {last.text}"
            yield f"rank {dump.rank} {what}{f' at {last.at}' if last is not None and last.at else ''}"
        if len(self.dumps) > _MOST_LAST:
            yield f"and {len(self.dumps) - _MOST_LAST} more ranks"

    def to_json(self) -> dict[str, Any]:
        """The report as JSON data."""
        return {
            "status": "ended" if self.kind == "none" else "hang",
            "kind": self.kind,
            "causes": list(self.causes),
            "ranks": [
                {
                    "rank": dump.rank,
                    "version": dump.version,
                    "launches": len(dump.launches),
                    "pending": [launch.text for launch in dump.pending],
                    "last": None
                    if dump.last is None
                    else {"op": dump.last.text, "at": dump.last.at, "state": dump.last.state.name.lower()},
                    "whole": dump.whole,
                }
                for dump in self.dumps
            ],
            "findings": [finding_to_json(finding) for finding in self.findings],
        }


def diagnose_dumps(directory: Path) -> HangReport:
    """Read the dumps in a directory, and find the cause of the hang.

    Raises:
        PlanFileError: PP930, a dump cannot be read.
    """
    dumps = read_dumps(directory)
    waits = _Waits(dumps)
    differing = list(disagreements(waits.matches))
    cycle = waits.graph.cycle()
    ends = list(waits.graph.ends())
    absent = [rank for (rank, index), *_ in ends if index == _NOTHING]
    silent = [rank for rank in absent if rank in waits.by_rank]
    without_dump = [rank for rank in absent if rank not in waits.by_rank]
    others = [each.finding for each in differing]
    others += [waits.cycle_finding(cycle)] if cycle else []
    others += waits.never_issued(silent)
    findings = [*waits.missing_dumps([] if others else without_dump), *others]
    unfinished = [min(end) for end in ends if end[0][1] != _NOTHING]
    if not others:
        findings += map(waits.not_finished, unfinished)
    by_kind = {
        "mismatch": [rank for each in differing[:1] for rank in each.odd_ranks],
        "cycle": [rank for (rank, _), _ in cycle],
        "absent": silent or without_dump,
    }
    kind = next((kind for kind, causes in by_kind.items() if causes), "unfinished" if unfinished else "none")
    return HangReport(dumps, kind, tuple(sorted(set(by_kind.get(kind, ())))), tuple(findings))


class _Waits:
    """The wait graph of dumps.

    A launch waits for earlier ones in its queue; if the device has not started it, for all earlier ones of its rank;
    for its partners; and, if a partner is not issued, for the first launch that blocks the partner's rank.
    """

    def __init__(self, dumps: Sequence[Dump]) -> None:
        self.by_rank = {dump.rank: dump for dump in dumps}
        self.matches = match_entries(dumps)
        self._launches = {(dump.rank, index): launch for dump in dumps for index, launch in enumerate(dump.pending)}
        self._node_of = {id(launch): node for node, launch in self._launches.items()}
        self.graph: WaitGraph[_Node] = WaitGraph(sorted(self._launches))
        for (rank, index), launch in sorted(self._launches.items()):
            self._add_order(rank, index, launch)
            for entry in launch.entries:
                self._add_parts((rank, index), entry, entry.text if entry.channel is not None else launch.text)

    def _add_order(self, rank: int, index: int, launch: Launch) -> None:
        before = [(rank, earlier) for earlier in range(index)]
        same_queue = [earlier for earlier in before if self._launches[earlier].queue == launch.queue]
        for earlier in (same_queue or (before if launch.state is State.SCHEDULED else []))[-1:]:
            awaited = f"its own {self._launches[earlier].text}"
            self.graph.add((rank, index), earlier, _wait(launch.entries[0], launch.text, awaited, "which is before it"))

    def _add_parts(self, node: _Node, entry: Entry, text: str) -> None:
        key = entry.rank, entry.index
        for partner in self.matches.partners.get(key, ()):
            other = self._node_of.get(id(self.matches.launch_of[partner.rank, partner.index]))
            if other is not None and other != node:
                wait = _wait(entry, text, f"rank {partner.rank}", "which has issued its part")
                self.graph.add(node, other, replace(wait, is_mutual=True))
        for rank in self.matches.missing.get(key, ()):
            first = (rank, 0 if (rank, 0) in self._launches and rank != entry.rank else _NOTHING)
            self.graph.add(node, first, _wait(entry, text, f"rank {rank}", "which has not issued its part"))

    def missing_dumps(self, at_end: Sequence[int]) -> Iterator[Finding]:
        """Find PP934: ranks without a dump; an error if all waits end at some of them, ``at_end``."""
        dumps = self.by_rank.values()
        members = {rank for dump in dumps for launch in dump.launches for rank in launch.entries[0].group.ranks}
        missing = sorted(members - self.by_rank.keys())
        headline = f"{len(missing)} of {len(members | self.by_rank.keys())} ranks have no dump: {ranks_text(missing)}"
        suggested_fix = "their operations are unknown: they may have ended, or were killed before they could write"
        if at_end:
            nodes = {rank: (rank, _NOTHING) for rank in at_end}
            direct = {wait.rank for node in nodes.values() for wait in self.graph.waiters(node).values()}
            waits = {node: wait for node in self._launches for wait in self.graph.waits(node).values()}
            others = {wait.rank: wait for node, wait in reversed(waits.items()) if node[0] not in direct}
            lines = wait_lines([wait for _, wait in sorted(others.items())])
            finding = absence_finding(NO_DUMP, self.graph, nodes, f"{headline}; all waits end there, in", lines)
            yield replace(finding, severity=Severity.ERROR, help=suggested_fix)
        elif missing:
            yield NO_DUMP.finding(headline, help=suggested_fix)

    def cycle_finding(self, cycle: Sequence[tuple[_Node, Wait]]) -> Finding:
        """Return finding PP931: the shortest cycle of waits."""
        number = {node: position for position, (node, _) in enumerate(cycle, start=1)}
        programs = tuple(self._excerpt(rank, number) for rank in sorted({rank for rank, _ in number}))
        return cycle_finding(HANG_CYCLE, cycle, self._suggested_fix(list(number)), programs)

    def _suggested_fix(self, cycle: Sequence[_Node]) -> str:
        are_messages = {entry.channel is not None for node in cycle for entry in self._launches[node].entries}
        if are_messages == {True}:
            return "let one of the ranks issue its receive first, or both ends in one batch (`dist.batch_isend_irecv`)"
        what = "the collectives of their groups" if are_messages == {False} else "messages and collectives"
        return f"let all ranks issue {what} in one global order"

    def _excerpt(self, rank: int, number: dict[_Node, int]) -> ProgramExcerpt:
        """Return the part of a rank's launches around the cycle's launches."""
        launches = self.by_rank[rank].launches
        numbers = [number.get(self._node_of.get(id(launch), (rank, _NOTHING)), 0) for launch in launches]
        marked = [index for index, mark in enumerate(numbers) if mark]
        first, last = max(marked[0] - _NEIGHBOURS, 0), min(marked[-1] + _NEIGHBOURS, len(launches) - 1)
        ops = [(launch.text, mark) for launch, mark in zip(launches, numbers, strict=True)][first : last + 1]
        before, after = [(_LEFT_OUT, 0)] * (first > 0), [(_LEFT_OUT, 0)] * (last < len(launches) - 1)
        texts, marks = zip(*before, *ops, *after, strict=True)
        return ProgramExcerpt(rank, texts, marks)

    def never_issued(self, absent: Sequence[int]) -> Iterator[Finding]:
        """Find PP933: one for the ranks that never reached the same operations."""
        together = grouped((tuple(self.graph.waiters((rank, _NOTHING))), rank) for rank in absent)
        for ranks in together.values():
            lines = [f"rank {rank} issued {_last_text(self.by_rank[rank])}" for rank in ranks[:_MOST_NAMED]]
            nodes = {rank: (rank, _NOTHING) for rank in ranks}
            what = f"{ranks_text(ranks)} never issued {'its part' if len(ranks) == 1 else 'their parts'} of"
            yield absence_finding(NEVER_ISSUED, self.graph, nodes, what, lines)

    def not_finished(self, node: _Node) -> Finding:
        """Return finding PP935 about a launch that waits only for its partners, which also wait for nothing else."""
        launch = self._launches[node]
        message = f"{launch.text} is {launch.state.name.lower()} on rank {node[0]} and not done, "
        return NOT_FINISHED.finding(
            f"{message}although all ranks issued their parts",
            launch.entries[0].location,
            "look at the computation before it on its stream, and at the network between these ranks",
        )


def _wait(entry: Entry, op: str, awaited: str, why: str) -> Wait:
    location = entry.location
    at = "" if location is None else f"{location.file}:{location.line}"
    return Wait(entry.rank, op, awaited, why, at, location, entry.tensor_text)


def _last_text(dump: Dump) -> str:
    return f"{dump.launches[-1].text} last, and finished it" if dump.launches else "nothing"
