"""Diagnosis of a hung run from its dumps."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeproof.diagnostics.finding import CycleWitness, Finding, OpsWitness, ProgramExcerpt, WitnessOp
from pipeproof.diagnostics.text_output import finding_to_json
from pipeproof.interop.hang.collective_matches import Matches, disagreements, match_entries
from pipeproof.interop.hang.flight_recorder import Dump, Launch, read_dumps
from pipeproof.interop.hang.hang_codes import HANG_CYCLE, NEVER_ISSUED, NO_DUMP, NOT_FINISHED
from pipeproof.interop.hang.wait_graph import Node, Waits, first_stuck, shortest_cycle, wait_graph

_LEFT_OUT = ".."
_NEIGHBOURS = 1
_MOST_NAMED = 8


@dataclass(frozen=True)
class HangReport:
    """The dumps of a run, and the findings about them."""

    dumps: tuple[Dump, ...]
    findings: tuple[Finding, ...]

    @property
    def num_pending(self) -> int:
        """Number of launches that are not done, over all ranks."""
        return sum(len(dump.pending) for dump in self.dumps)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON data."""
        return {
            "ranks": [
                {
                    "rank": dump.rank,
                    "version": dump.version,
                    "launches": len(dump.launches),
                    "pending": [launch.text for launch in dump.pending],
                    "whole": dump.whole,
                }
                for dump in self.dumps
            ],
            "findings": [finding_to_json(finding) for finding in self.findings],
        }


def diagnose_dumps(directory: Path, ranks: Container[int] | None = None) -> HangReport:
    """Read the dumps in a directory, of all or of some ranks, and find what blocks the run.

    Raises:
        PlanFileError: PP930, a dump cannot be read.
    """
    dumps = read_dumps(directory, ranks)
    return HangReport(dumps, tuple(_findings(dumps)))


def _findings(dumps: Sequence[Dump]) -> Iterator[Finding]:
    matches = match_entries(dumps)
    waits = wait_graph(dumps, matches)
    yield from _missing_dumps(dumps)
    differing = [disagreement.finding for disagreement in disagreements(matches)]
    yield from differing
    cycle = _from_lowest_rank(shortest_cycle(waits))
    if cycle:
        yield _cycle_finding(dumps, waits, matches, cycle)
    never_issued = list(_never_issued(dumps, waits))
    yield from never_issued
    if not (differing or cycle or never_issued):
        yield from _not_finished(waits)


def _from_lowest_rank(cycle: list[Node]) -> list[Node]:
    first = cycle.index(min(cycle)) if cycle else 0
    return cycle[first:] + cycle[:first]


def _missing_dumps(dumps: Sequence[Dump]) -> Iterator[Finding]:
    known = {dump.rank for dump in dumps}
    members = {rank for dump in dumps for launch in dump.launches for rank in launch.entries[0].group.ranks}
    missing = sorted(members - known)
    if missing:
        yield NO_DUMP.finding(
            f"{len(missing)} of {len(members | known)} ranks have no dump: {_named(missing)}",
            help="their operations are unknown: they may have ended, or were killed before they could write",
        )


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    return shown if len(ranks) <= _MOST_NAMED else f"{shown} and {len(ranks) - _MOST_NAMED} more"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_named(ranks)}"


def _cycle_finding(dumps: Sequence[Dump], waits: Waits, matches: Matches, cycle: Sequence[Node]) -> Finding:
    texts = [_op_text(waits, matches, cycle, position) for position in range(len(cycle))]
    number = {node: position for position, node in enumerate(cycle, start=1)}
    by_rank = {dump.rank: dump for dump in dumps}
    ranks = sorted({rank for rank, _ in cycle})
    programs = tuple(_excerpt(by_rank[rank], number) for rank in ranks)
    witness = CycleWitness(tuple(WitnessOp(rank, text) for (rank, _), text in zip(cycle, texts, strict=True)), programs)
    issue_lines = _issue_lines(waits, cycle)
    location = next(
        (entry.location for node in cycle for entry in waits.launches[node].entries if entry.location), None
    )
    return HANG_CYCLE.finding(
        "\n".join(
            (f"{len(cycle)} operations of {_ranks(ranks)} wait for each other, and none of them ends", *issue_lines)
        ),
        location,
        _suggested_fix(waits, cycle),
        witness,
    )


def _op_text(waits: Waits, matches: Matches, cycle: Sequence[Node], position: int) -> str:
    """Return the operation of a launch that matches the next launch of the cycle, or the previous one."""
    launch = waits.launches[cycle[position]]
    for neighbour in (cycle[(position + 1) % len(cycle)], cycle[position - 1]):
        neighbour_entries = {(entry.rank, entry.index) for entry in waits.launches[neighbour].entries}
        for entry in launch.entries:
            partners = matches.partners.get((entry.rank, entry.index), ())
            if any((partner.rank, partner.index) in neighbour_entries for partner in partners):
                return entry.text
    return launch.text


def _issue_lines(waits: Waits, cycle: Sequence[Node]) -> Iterator[str]:
    """Lines that state where in the user's code the operations of a cycle were issued."""
    for rank, position in cycle:
        entry = waits.launches[rank, position].entries[0]
        if entry.location is not None:
            yield f"rank {rank} issued {entry.text} at {entry.location.file}:{entry.location.line}"


def _suggested_fix(waits: Waits, cycle: Sequence[Node]) -> str:
    """Return a change that breaks the cycle."""
    entries = [entry for node in cycle for entry in waits.launches[node].entries]
    if all(entry.channel is not None for entry in entries):
        return "let one of the ranks issue its receive first, or both ends in one batch (`dist.batch_isend_irecv`)"
    if all(entry.channel is None for entry in entries):
        return "let all ranks issue the collectives of their groups in one global order"
    return "let all ranks issue messages and collectives in one global order"


def _excerpt(dump: Dump, number: dict[Node, int]) -> ProgramExcerpt:
    """Return the part of a rank's launches around those of the cycle."""
    numbered = {id(launch): number.get((dump.rank, position), 0) for position, launch in enumerate(dump.pending)}
    marked = [index for index, launch in enumerate(dump.launches) if numbered.get(id(launch))]
    first, last = max(marked[0] - _NEIGHBOURS, 0), min(marked[-1] + _NEIGHBOURS, len(dump.launches) - 1)
    ops = [(launch.text, numbered.get(id(launch), 0)) for launch in dump.launches[first : last + 1]]
    if first:
        ops.insert(0, (_LEFT_OUT, 0))
    if last < len(dump.launches) - 1:
        ops.append((_LEFT_OUT, 0))
    return ProgramExcerpt(dump.rank, tuple(text for text, _ in ops), tuple(mark for _, mark in ops))


def _never_issued(dumps: Sequence[Dump], waits: Waits) -> Iterator[Finding]:
    """Find PP933: one for each rank that others wait for, at the first operation that waits."""
    last = {dump.rank: dump.launches[-1] if dump.launches else None for dump in dumps}
    reported: set[int] = set()
    for node, ranks in sorted(waits.absent.items(), key=lambda item: (item[0][1], item[0][0])):
        new = [rank for rank in ranks if rank not in reported]
        reported.update(new)
        if not new:
            continue
        launch = waits.launches[node]
        lines = [f"rank {rank} issued {_last_text(last[rank])}" for rank in new[:_MOST_NAMED]]
        yield NEVER_ISSUED.finding(
            f"rank {node[0]} waits in {launch.text}, and {_ranks(new)} never issued its part",
            launch.entries[0].location,
            "\n".join(lines),
            OpsWitness((WitnessOp(node[0], f"{launch.text}: {launch.entries[0].tensor_text}"),)),
        )


def _last_text(launch: Launch | None) -> str:
    return "nothing" if launch is None else f"{launch.text} last, and finished it"


def _not_finished(waits: Waits) -> Iterator[Finding]:
    for node in first_stuck(waits):
        launch = waits.launches[node]
        message = f"{launch.text} is {launch.state.name.lower()} on rank {node[0]} and not done, "
        yield NOT_FINISHED.finding(
            f"{message}although all ranks issued their parts",
            launch.entries[0].location,
            "look at the computation before it on its stream, and at the network between these ranks",
        )
