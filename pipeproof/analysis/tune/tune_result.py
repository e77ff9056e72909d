"""Result of a search: the rows, the counts of layouts, and their JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

from pipeproof.analysis.tune.layouts import Layout
from pipeproof.analysis.tune.present_step import PresentStep
from pipeproof.sim.timeline import number_to_json


@dataclass(frozen=True)
class TuneRow:
    """A layout that passed ``check``, with its figures.

    ``step`` is the simulated time of a step in seconds, exact. ``parts_s`` has the parts of a step in seconds, which
    add up to it (``evaluate_layout.PARTS``). Rates are per device: ``tflops_per_gpu`` counts the model's products
    without recomputation, and ``mfu`` is its share of the device's peak; both are None unless times are computed.
    ``peak_gib`` is the memory of the rank that holds most. ``plan`` has the keys of a plan file, ``notes`` are the
    codes of warnings and notes of its check. ``why`` is a sentence that compares the row with the plan on its own
    ranks, or with the first row. ``difference_error`` is the error of the ratio
    of its step to the shortest one if the step is within it, a tie; else None. ``step_within`` is the share that the
    80 % interval of ``step`` reaches to either side, from comparable measurements, or None.
    ``deadlocks_with`` names the channel models with which a conditional plan deadlocks.
    """

    rank: int
    layout: Layout
    step: Fraction
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float | None
    mfu: float | None
    peak_gib: float
    parts_s: Mapping[str, float]
    why: str
    difference_error: float | None
    step_within: float | None
    digest: str
    notes: tuple[str, ...]
    deadlocks_with: str | None
    plan: Mapping[str, Any] = field(repr=False)

    @property
    def step_s(self) -> float:
        """Time of a step in seconds."""
        return float(self.step)


@dataclass(frozen=True)
class TuneCounts:
    """Numbers of layouts at each step of a search.

    ``tried`` layouts divide and exist in the framework, ``bounded`` have a bound of their time below the worst row's
    time, ``simulated`` were simulated and ``checked`` were checked by every rule. ``removed`` counts layouts that were
    removed before, by reason, meshes as one each; ``unfit`` are schedules that do not exist for their sizes,
    ``over_memory`` layouts whose lower bound of memory is over the limit, ``over_memory_simulated`` layouts that are
    over it in the simulation. ``refused`` counts rows that failed their check, by code.
    """

    tried: int
    unfit: int
    over_memory: int
    bounded: int
    simulated: int
    over_memory_simulated: int
    checked: int
    removed: Mapping[str, int]
    refused: Mapping[str, int]


@dataclass(frozen=True)
class TuneResult:
    """The layouts with the shortest steps, the shortest first; of ties with its mesh, the simplest is first.

    ``assumptions`` are sentences about values that the caller did not give, ``notes`` about the needs of rows.
    ``present`` is the step of the plan itself in a search on its own ranks; None in a search on a number of devices.
    ``expected_error`` is the mean share by which comparable steps are off, those like the first row's, or None.
    ``nearest`` is the smallest change that allows a layout, if there is none.
    ``device`` is None if times are not computed, ``memory_gib`` if no limit was given.
    """

    framework: str
    device: str | None
    num_gpus: int
    memory_gib: float | None
    global_batch: int
    seq_length: int
    cost_source: str
    rows: tuple[TuneRow, ...]
    counts: TuneCounts
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    present: PresentStep | None = None
    expected_error: float | None = None
    nearest: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The form of ``tune --format json``; see ``docs/schemas/tune.schema.json``."""
        content = {
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
            "present": None if self.present is None else self.present.to_json(),
            "rows": [_row_to_json(row) for row in self.rows],
            "counts": asdict(self.counts),
        }
        return {**vars(self), **content}


def _row_to_json(row: TuneRow) -> dict[str, Any]:
    content = asdict(row)
    step = number_to_json("step_s", content.pop("step"))
    return {**content, **step, "notes": list(row.notes), "parts_s": dict(row.parts_s), "plan": dict(row.plan)}
