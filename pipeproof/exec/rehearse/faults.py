"""What a rehearsal finds wrong: on a rank as data that it leaves in a file, for people as findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeproof.exec.rehearse.codes import NOT_AS_PROMISED, NOT_AS_SENT
from pipeproof.specs.finding import ElementRange, Finding, OpsWitness, RangesWitness, Severity, WitnessOp

MOST_KEPT = 200
"""Faults that a rank describes; of more it tells the number."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong on one rank in one step: elements that did not arrive, or do not lie as promised.

    ``where`` is the channel or the group, or, of a layout, the boundary and
    direction. ``unit`` is the unit of work, of a layout alone, which has the
    elements ``lost`` and ``foreign`` of ``num_elements`` that should be there.
    """

    rank: int
    step: int
    op: str
    op_id: int
    where: str
    fact: str
    unit: int = -1
    num_elements: int = 0
    lost: tuple[ElementRange, ...] = ()
    foreign: tuple[ElementRange, ...] = ()

    @property
    def is_of_layout(self) -> bool:
        """Whether the messages are those of the graph, and what they make is not what the layout says."""
        return self.num_elements > 0

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Fault:
        """Read what ``asdict`` made."""
        ranges = {key: tuple(ElementRange(**one) for one in data[key]) for key in ("lost", "foreign")}
        return cls(**{**data, **ranges})


@dataclass(slots=True)
class Checked:
    """What one rank has looked at, and what it found."""

    messages: int = 0
    collectives: int = 0
    elements: int = 0
    num_faults: int = 0
    faults: list[Fault] = field(default_factory=list)

    def blame(self, fault: Fault) -> None:
        """Keep a fault, as long as there are few."""
        self.num_faults += 1
        if len(self.faults) < MOST_KEPT:
            self.faults.append(fault)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; ``from_json`` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Checked:
        """Read what ``to_json`` wrote."""
        return cls(**{**data, "faults": [Fault.from_json(fault) for fault in data["faults"]]})


def findings_of(faults: Sequence[Fault]) -> tuple[Finding, ...]:
    """The faults of all ranks: of arrivals the first on each channel, of layouts those of a boundary together."""
    by_place: dict[tuple[int, str], list[Fault]] = {}
    by_boundary: dict[str, list[Fault]] = {}
    for fault in faults:
        if fault.is_of_layout:
            by_boundary.setdefault(fault.where, []).append(fault)
        else:
            by_place.setdefault((fault.rank, fault.where), []).append(fault)
    arrivals = (_of_arrival(found) for found in by_place.values())
    boundaries = sorted(by_boundary, key=lambda where: (where.endswith("backward"), where))  # as check has them
    return (*arrivals, *(_of_layout(by_boundary[where]) for where in boundaries))


def _of_arrival(faults: Sequence[Fault]) -> Finding:
    first = faults[0]
    more = f"; so are {len(faults) - 1} more on it" if len(faults) > 1 else ""
    return Finding(
        NOT_AS_SENT.code,
        Severity.ERROR,
        f"rank {first.rank}, step {first.step}, {first.op} over {first.where}: {first.fact}{more}",
        help="the plan is proved, so look at what carries it out: the order of ranks, the launcher's environment, the "
        "backend (`pipeproof doctor`), the link",
        witness=OpsWitness((WitnessOp(first.rank, first.op, first.op_id),)),
    )


def _of_layout(faults: Sequence[Fault]) -> Finding:
    """Shown with the ranges of all receivers of the first unit of work, as ``check`` shows them."""
    units = {(fault.step, fault.unit) for fault in faults}
    here = [fault for fault in faults if (fault.step, fault.unit) == min(units)]
    num_lost = sum(one.stop - one.start for fault in here for one in fault.lost)
    batches, steps = ({one[place] for one in units} for place in (1, 0))
    number = f"each of {len(batches)} micro-batches" if len(batches) > 1 else f"micro-batch {min(batches)}"
    return Finding(
        NOT_AS_PROMISED.code,
        Severity.ERROR,
        f"{here[0].where}: {num_lost} of {sum(fault.num_elements for fault in here)} elements lie wrongly in "
        f"{number} of {len(steps)} steps",
        help="what arrived was sent so: `pipeproof check` says what mends the plan",
        witness=RangesWitness(
            tuple(one for fault in here for one in fault.lost), tuple(one for fault in here for one in fault.foreign)
        ),
    )
