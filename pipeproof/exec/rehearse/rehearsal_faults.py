"""Faults of a rehearsal: as data that each rank writes to a file, and as findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeproof.diagnostics.finding import ElementRange, Finding, OpsWitness, RangesWitness, WitnessOp
from pipeproof.exec.store.run_codes import NOT_AS_PROMISED, NOT_AS_SENT

MOST_KEPT = 200
"""Most faults that a rank describes; it only counts the others."""


@dataclass(frozen=True, slots=True)
class ArrivalFault:
    """One fault on one rank in one step: elements that did not arrive, or that the layout places elsewhere.

    ``where`` is the channel or the group; for a layout, the boundary and direction. Only a layout has a work item
    ``work_item``, which lacks the elements ``lost`` and has ``foreign`` elements, of ``num_elements`` in all.
    """

    rank: int
    step: int
    op: str
    op_id: int
    where: str
    fact: str
    work_item: int = -1
    num_elements: int = 0
    lost: tuple[ElementRange, ...] = ()
    foreign: tuple[ElementRange, ...] = ()

    @property
    def is_of_layout(self) -> bool:
        """True if the messages are correct, but together do not match the receiver's layout."""
        return self.num_elements > 0


@dataclass(slots=True)
class ArrivalChecks:
    """Numbers of checked messages, collectives and elements of one rank, and its faults."""

    messages: int = 0
    collectives: int = 0
    elements: int = 0
    num_faults: int = 0
    faults: list[ArrivalFault] = field(default_factory=list)

    def add_fault(self, fault: ArrivalFault) -> None:
        """Count a fault, and store it while there are few."""
        self.num_faults += 1
        if len(self.faults) < MOST_KEPT:
            self.faults.append(fault)


def findings_of(faults: Sequence[ArrivalFault]) -> tuple[Finding, ...]:
    """Findings of all ranks: the first fault of arrivals on each channel, and all faults of layouts by boundary."""
    by_channel: dict[tuple[int, str], list[ArrivalFault]] = {}
    by_boundary: dict[str, list[ArrivalFault]] = {}
    for fault in faults:
        if fault.is_of_layout:
            by_boundary.setdefault(fault.where, []).append(fault)
        else:
            by_channel.setdefault((fault.rank, fault.where), []).append(fault)
    arrivals = (_arrival_finding(faults) for faults in by_channel.values())
    boundaries = sorted(by_boundary, key=lambda where: (where.endswith("backward"), where))  # the order of `check`
    return (*arrivals, *(_layout_finding(by_boundary[where]) for where in boundaries))


def _arrival_finding(faults: Sequence[ArrivalFault]) -> Finding:
    first = faults[0]
    more = f"; {len(faults) - 1} more faults on it" if len(faults) > 1 else ""
    return NOT_AS_SENT.finding(
        f"rank {first.rank}, step {first.step}, {first.op} over {first.where}: {first.fact}{more}",
        help="the plan is proved, so look at its execution: the order of ranks, the launcher's environment, the "
        "backend (`pipeproof doctor`), the link",
        witness=OpsWitness((WitnessOp(first.rank, first.op, first.op_id),)),
    )


def _layout_finding(faults: Sequence[ArrivalFault]) -> Finding:
    """Return the finding with the ranges of all receivers of the first work item, in the form of ``check``."""
    work_items = {(fault.step, fault.work_item) for fault in faults}
    first = [fault for fault in faults if (fault.step, fault.work_item) == min(work_items)]
    num_lost = sum(lost.stop - lost.start for fault in first for lost in fault.lost)
    steps, batches = ({item[index] for item in work_items} for index in (0, 1))
    number = f"each of {len(batches)} micro-batches" if len(batches) > 1 else f"micro-batch {min(batches)}"
    return NOT_AS_PROMISED.finding(
        f"{first[0].where}: {num_lost} of {sum(fault.num_elements for fault in first)} elements are wrong in "
        f"{number} of {len(steps)} steps",
        help="the messages are as sent: `pipeproof check` suggests fixes of the plan",
        witness=RangesWitness(
            tuple(lost for fault in first for lost in fault.lost),
            tuple(foreign for fault in first for foreign in fault.foreign),
        ),
    )
