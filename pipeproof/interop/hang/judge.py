"""From the dumps of a hung run to findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeproof.interop.hang.codes import HANG_CYCLE, NEVER_ISSUED, NO_DUMP, NOT_FINISHED
from pipeproof.interop.hang.match import Matches, disagreements, match_entries
from pipeproof.interop.hang.read import read_dumps
from pipeproof.interop.hang.records import Dump, Unit
from pipeproof.interop.hang.waits import Node, Waits, first_stuck, shortest_cycle, wait_graph
from pipeproof.specs.finding import CycleWitness, Finding, OpsWitness, ProgramExcerpt, Severity, WitnessOp
from pipeproof.specs.render import finding_to_json

_LEFT_OUT = ".."
_NEIGHBOURS = 1
_MOST_NAMED = 8


@dataclass(frozen=True)
class HangReport:
    """What was read, and what was found in it."""

    dumps: tuple[Dump, ...]
    findings: tuple[Finding, ...]

    @property
    def num_pending(self) -> int:
        """Launches that are not done, on all ranks together."""
        return sum(len(dump.pending) for dump in self.dumps)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON data."""
        return {
            "ranks": [
                {
                    "rank": dump.rank,
                    "version": dump.version,
                    "launches": len(dump.units),
                    "pending": [unit.text for unit in dump.pending],
                    "whole": dump.whole,
                }
                for dump in self.dumps
            ],
            "findings": [finding_to_json(finding) for finding in self.findings],
        }


def judge_dumps(directory: Path) -> HangReport:
    """Read the dumps in a directory, and say what holds up what.

    Raises:
        PlanFileError: PP930, a dump cannot be read.
    """
    dumps = read_dumps(directory)
    return HangReport(dumps, tuple(_findings(dumps)))


def _findings(dumps: Sequence[Dump]) -> Iterator[Finding]:
    matches = match_entries(dumps)
    waits = wait_graph(dumps, matches)
    yield from _missing_dumps(dumps)
    differing = list(disagreements(matches))
    yield from differing
    cycle = _from_lowest_rank(shortest_cycle(waits))
    if cycle:
        yield _cycle_finding(dumps, waits, matches, cycle)
    never = list(_never_issued(dumps, waits))
    yield from never
    if not (differing or cycle or never):
        yield from _not_finished(waits)


def _from_lowest_rank(cycle: list[Node]) -> list[Node]:
    first = cycle.index(min(cycle)) if cycle else 0
    return cycle[first:] + cycle[:first]


def _missing_dumps(dumps: Sequence[Dump]) -> Iterator[Finding]:
    known = {dump.rank for dump in dumps}
    members = {rank for dump in dumps for unit in dump.units for rank in unit.entries[0].group.ranks}
    missing = sorted(members - known)
    if missing:
        yield Finding(
            NO_DUMP.code,
            Severity.WARNING,
            f"{len(missing)} of {len(members | known)} ranks have no dump: {_named(missing)}",
            help="what they did is unknown: they may have ended, or have been ended before they could write",
        )


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    return shown if len(ranks) <= _MOST_NAMED else f"{shown} and {len(ranks) - _MOST_NAMED} more"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_named(ranks)}"


def _cycle_finding(dumps: Sequence[Dump], waits: Waits, matches: Matches, cycle: Sequence[Node]) -> Finding:
    texts = [_op_text(waits, matches, cycle, place) for place in range(len(cycle))]
    number = {node: place for place, node in enumerate(cycle, start=1)}
    by_rank = {dump.rank: dump for dump in dumps}
    ranks = sorted({rank for rank, _ in cycle})
    programs = tuple(_excerpt(by_rank[rank], waits, number) for rank in ranks)
    witness = CycleWitness(tuple(WitnessOp(rank, text) for (rank, _), text in zip(cycle, texts, strict=True)), programs)
    places = _places(waits, cycle)
    location = next((entry.location for node in cycle for entry in waits.units[node].entries if entry.location), None)
    return Finding(
        HANG_CYCLE.code,
        Severity.ERROR,
        "\n".join((f"{len(cycle)} operations of {_ranks(ranks)} wait for each other, and none of them ends", *places)),
        location,
        _mend(waits, cycle),
        witness,
    )


def _op_text(waits: Waits, matches: Matches, cycle: Sequence[Node], place: int) -> str:
    """The operation of a unit that meets the next one of the cycle, or the one before."""
    unit = waits.units[cycle[place]]
    for other in (cycle[(place + 1) % len(cycle)], cycle[place - 1]):
        theirs = {(entry.rank, entry.index) for entry in waits.units[other].entries}
        for entry in unit.entries:
            partners = matches.partners.get((entry.rank, entry.index), ())
            if any((partner.rank, partner.index) in theirs for partner in partners):
                return entry.text
    return unit.text


def _places(waits: Waits, cycle: Sequence[Node]) -> Iterator[str]:
    """Where in the user's code the operations of a cycle were issued."""
    for rank, place in cycle:
        entry = waits.units[rank, place].entries[0]
        if entry.location is not None:
            yield f"rank {rank} issued {entry.text} at {entry.location.file}:{entry.location.line}"


def _mend(waits: Waits, cycle: Sequence[Node]) -> str:
    """What takes the cycle apart."""
    entries = [entry for node in cycle for entry in waits.units[node].entries]
    if all(entry.channel is not None for entry in entries):
        return "let one of the ranks issue its receive first, or both ends in one batch (`dist.batch_isend_irecv`)"
    if all(entry.channel is None for entry in entries):
        return "let all ranks issue the collectives of their groups in one global order"
    return "let all ranks issue messages and collectives in one global order"


def _excerpt(dump: Dump, waits: Waits, number: dict[Node, int]) -> ProgramExcerpt:
    """The stretch of a rank's launches around those of the cycle."""
    numbered = {id(unit): number.get((dump.rank, place), 0) for place, unit in enumerate(dump.pending)}
    marked = [index for index, unit in enumerate(dump.units) if numbered.get(id(unit))]
    first, last = max(marked[0] - _NEIGHBOURS, 0), min(marked[-1] + _NEIGHBOURS, len(dump.units) - 1)
    ops = [(unit.text, numbered.get(id(unit), 0)) for unit in dump.units[first : last + 1]]
    if first:
        ops.insert(0, (_LEFT_OUT, 0))
    if last < len(dump.units) - 1:
        ops.append((_LEFT_OUT, 0))
    return ProgramExcerpt(dump.rank, tuple(text for text, _ in ops), tuple(mark for _, mark in ops))


def _never_issued(dumps: Sequence[Dump], waits: Waits) -> Iterator[Finding]:
    """PP933, one for each rank that is waited for: about the first that waits for it."""
    last = {dump.rank: dump.units[-1] if dump.units else None for dump in dumps}
    told: set[int] = set()
    for node, ranks in sorted(waits.absent.items(), key=lambda item: (item[0][1], item[0][0])):
        new = [rank for rank in ranks if rank not in told]
        told.update(new)
        if not new:
            continue
        unit = waits.units[node]
        lines = [f"rank {rank} issued {_last_text(last[rank])}" for rank in new[:_MOST_NAMED]]
        yield Finding(
            NEVER_ISSUED.code,
            Severity.ERROR,
            f"rank {node[0]} waits in {unit.text}, and {_ranks(new)} never issued its part",
            unit.entries[0].location,
            "\n".join(lines),
            OpsWitness((WitnessOp(node[0], f"{unit.text}: {unit.entries[0].tensor_text}"),)),
        )


def _last_text(unit: Unit | None) -> str:
    return "nothing" if unit is None else f"{unit.text} last, and finished it"


def _not_finished(waits: Waits) -> Iterator[Finding]:
    for node in first_stuck(waits):
        unit = waits.units[node]
        message = f"{unit.text} is {unit.state.name.lower()} on rank {node[0]} and not done, "
        yield Finding(
            NOT_FINISHED.code,
            Severity.WARNING,
            f"{message}though all its parts are issued alike",
            unit.entries[0].location,
            "look at the computation before it on its stream, and at the network between these ranks",
        )
