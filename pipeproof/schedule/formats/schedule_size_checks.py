"""Checks of a schedule against the sizes of its plan: PP131, PP134, PP135, PP136, PP139."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import grouped, listed
from pipeproof.schedule.columns import Row
from pipeproof.schedule.formats.text_tokens import Findings
from pipeproof.schedule.ops import COMPUTE_KINDS, TARGET_KINDS
from pipeproof.specs.schedule import MISPLACED, NO_OPERATIONS, WRONG_MICRO_BATCHES, WRONG_RANKS, WRONG_STAGES


@dataclass(frozen=True, slots=True)
class Expected:
    """Sizes that a plan expects of its schedule; None accepts any.

    ``placement`` has the stages of each pipeline rank. ``num_splits`` is the
    number of sequence splits. With ``copies`` and no placement, every rank that
    computes a stage has a copy of it.
    """

    num_ranks: int | None = None
    num_micro_batches: int | None = None
    num_stages: int | None = None
    placement: tuple[tuple[int, ...], ...] | None = None
    num_splits: int | None = None
    copies: bool = False


@dataclass(frozen=True, slots=True)
class RawSchedule:
    """Rows of each pipeline rank from a file, with their locations, the ends of the ranks, and the file's location."""

    rows: Sequence[Sequence[Row]]
    origins: Sequence[Location]
    ends: Sequence[Location | None]
    start: Location | None

    def place(self, row: Row) -> Location | None:
        """The location of a row."""
        return row.place(self.origins)

    def of_stages(self) -> Iterator[tuple[int, Row]]:
        """Rank and row of all operations that belong to a stage themselves."""
        return ((rank, row) for rank, rows in enumerate(self.rows) for row in rows if row.op.kind not in TARGET_KINDS)

    def first_of_stages(self) -> list[tuple[tuple[int, int], Row]]:
        """The first row of each (stage, rank), in program order."""
        rows_of = grouped(((row.op.stage, rank), row) for rank, row in self.of_stages())
        return [(key, rows[0]) for key, rows in rows_of.items()]

    def computations(self) -> Iterator[tuple[int, Row]]:
        """Rank and row of all computations."""
        return ((rank, row) for rank, row in self.of_stages() if row.op.kind in COMPUTE_KINDS)


def check_fit(schedule: RawSchedule, expected: Expected, findings: Findings) -> None:
    """Add findings; stages and micro-batches are only checked if the ranks are right."""
    _check_ranks(schedule, expected, findings)
    if not findings.found:
        _check_micro_batches(schedule, expected, findings)
        check_splits(schedule, expected.num_splits, findings)
        _check_stages(schedule, expected, findings)


def _check_ranks(schedule: RawSchedule, expected: Expected, findings: Findings) -> None:
    if not schedule.rows:
        findings.add(NO_OPERATIONS, schedule.start, "the schedule has no operations")
        return
    for rank, rows in enumerate(schedule.rows):
        if not any(row.op.kind in COMPUTE_KINDS for row in rows):
            findings.add(
                NO_OPERATIONS,
                schedule.ends[rank],
                f"rank {rank} computes nothing",
                "give it a stage, or remove the rank",
            )
    actual, wanted = len(schedule.rows), expected.num_ranks
    if wanted is not None and actual != wanted:
        location = schedule.ends[-1]
        if actual > wanted and schedule.rows[wanted]:
            location = schedule.place(schedule.rows[wanted][0])
        message = f"the schedule has {actual} rank{'s' if actual > 1 else ''}, and topology.pp is {wanted}"
        findings.add(WRONG_RANKS, location, message, f"set topology.pp to {actual}, or take a schedule for {wanted}")


def _check_micro_batches(schedule: RawSchedule, expected: Expected, findings: Findings) -> None:
    wanted = expected.num_micro_batches
    if wanted is None:
        return
    of_micro_batches = [(rank, row) for rank, row in schedule.of_stages() if row.op.micro_batch is not None]
    largest = max((row.op.micro_batch or 0 for _, row in of_micro_batches), default=-1)
    beyond = grouped((rank, row) for rank, row in of_micro_batches if (row.op.micro_batch or 0) >= wanted)
    for row, *_ in beyond.values():
        message = f"{row.op} is of micro-batch {row.op.micro_batch}, and schedule.num_micro_batches is {wanted}"
        _wrong_number(schedule, row, message, largest, findings)
    if largest + 1 < wanted:
        message = f"the schedule has micro-batches 0..{largest}, and schedule.num_micro_batches is {wanted}"
        _wrong_number(schedule, schedule.rows[0][0], message, largest, findings)


def check_splits(schedule: RawSchedule, wanted: int | None, findings: Findings) -> None:
    """PP136: if sequences are split, each operation of a micro-batch names its split; otherwise none does.

    ``wanted`` is the number of splits; without it, sequences are split if any operation names one.
    """
    of_work = [(rank, row) for rank, row in schedule.of_stages() if row.op.micro_batch is not None]
    named = [row.op.split for _, row in of_work if row.op.split is not None]
    are_split = bool(named) if wanted is None else wanted > 1
    num_splits = wanted or inf
    unfit = grouped(
        (rank, row)
        for rank, row in of_work
        if (row.op.split is not None) != are_split or (row.op.split or 0) >= num_splits
    )
    into = "others do" if wanted is None else f"schedule.num_sequence_splits is {wanted}"
    for row, *_ in unfit.values():
        if row.op.split is None:
            message, fix = f"{row.op} names no split of its sequences, and {into}", "write it as in 2F0.s1"
        else:
            message = f"{row.op} is of split {row.op.split} of its sequences, and {into}"
            fix = f"set schedule.num_sequence_splits to {max(1, *named) + 1}, "
            fix += "if the schedule is as it should be"
        findings.add(WRONG_MICRO_BATCHES, schedule.place(row), message, fix)


def _wrong_number(schedule: RawSchedule, row: Row, message: str, largest: int, findings: Findings) -> None:
    fix = f"set schedule.num_micro_batches to {largest + 1}, if the schedule is as it should be"
    findings.add(WRONG_MICRO_BATCHES, schedule.place(row), message, fix)


def _check_stages(schedule: RawSchedule, expected: Expected, findings: Findings) -> None:
    holders = _holders_of_stages(schedule, expected)
    num_stages = expected.num_stages if expected.num_stages is not None else len(holders)
    present = {stage for (stage, _), _ in schedule.first_of_stages() if stage in holders}
    if expected.placement is None and present == set(range(len(present))) and len(present) != num_stages:
        _wrong_count(schedule, len(present), num_stages, findings)
        return
    for (stage, rank), row in schedule.first_of_stages():
        if stage >= num_stages:
            doc, message = WRONG_STAGES, f"{row.op} is of stage {stage}, and there are stages 0..{num_stages - 1}"
        elif stage not in holders:
            doc, message = MISPLACED, f"{row.op} on rank {rank} is of stage {stage}, which no rank computes"
        elif rank not in holders[stage]:
            hold = f"rank {holders[stage][0]} holds"
            if len(holders[stage]) > 1:
                hold = f"ranks {listed(holders[stage], 'and')} hold"
            doc, message = MISPLACED, f"{row.op} is on rank {rank}, and {hold} stage {stage}"
        else:
            continue
        findings.add(doc, schedule.place(row), message, "correct its stage, or move it to the rank of its stage")
    computed = {(row.op.stage, rank) for rank, row in schedule.computations()}
    nobody = (len(schedule.ends) - 1,)
    lacking = [(s, rank) for s in range(num_stages) for rank in holders.get(s, nobody) if (s, rank) not in computed]
    if lacking and not findings.found:
        stages = sorted({stage for stage, _ in lacking})
        at_fault = lacking[0][1]
        message = f"no rank computes stage{'s' if len(stages) > 1 else ''} {listed(stages, 'and')} of {num_stages}"
        if expected.placement is not None:
            message = f"schedule.placement puts stage {stages[0]} on rank {at_fault}, which does not compute it"
        findings.add(WRONG_STAGES, schedule.ends[at_fault], message)


def _wrong_count(schedule: RawSchedule, actual: int, wanted: int, findings: Findings) -> None:
    """Stages in good order, but more or fewer than the plan has."""
    beyond = [row for (stage, _), row in schedule.first_of_stages() if stage == wanted]
    location = schedule.place(beyond[0]) if beyond else schedule.ends[-1]
    message = f"the schedule has stages 0..{actual - 1}, and the plan {wanted} stage{'s' if wanted > 1 else ''}"
    chunks, rest = divmod(actual, len(schedule.rows))
    fix = f"set schedule.num_chunks to {chunks}" if not rest else "list the stages of each rank as schedule.placement"
    findings.add(WRONG_STAGES, location, message, f"{fix}, if the schedule is as it should be")


def _holders_of_stages(schedule: RawSchedule, expected: Expected) -> dict[int, tuple[int, ...]]:
    """The ranks of each stage: as the plan places it, with copies, else the rank that computes most of it.

    Without a placement and with copies, all ranks that compute it.
    """
    if expected.placement is not None:
        placed: dict[int, tuple[int, ...]] = {}
        for rank, stages in enumerate(expected.placement):
            for stage in stages:
                placed[stage] = (*placed.get(stage, ()), rank)
        return placed
    computed = Counter((row.op.stage, rank) for rank, row in schedule.computations())
    holders: dict[int, tuple[int, ...]] = {}
    for stage, rank in sorted(computed, key=lambda key: (-computed[key], key)):
        holders[stage] = (*holders.get(stage, ()), rank) if expected.copies else holders.get(stage, (rank,))
    return holders
