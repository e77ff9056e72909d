"""Ranges of a rank's operations on its host, by their names, divided into steps.

Recognised names, each with a micro-batch and, except the last, a stage:

- ``pipeproof:1F0``: the text form of an operation, as our runtime names them, and as any program may;
- ``PP:1F0``: an action of PyTorch's pipeline runtime (schedules with several stages on a rank); an overlapped pair is
  ``PP:(1F0;1B0)OVERLAP_F_B``;
- ``Forward 0``, ``Backward 0``: PyTorch's GPipe, with one stage on each rank;
- ``Optimizer.step#Adam.step``: PyTorch's optimizers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from pipeproof.interop.profiles.profile_codes import not_assigned
from pipeproof.interop.profiles.rank_trace import RankTrace
from pipeproof.schedule.ops import COMPUTE_KINDS, RECV_KINDS, TRACE_PREFIX, Op, OpKind, parse_op

_OPTIMIZER = "Optimizer.step"
_TORCH_ACTION = "PP:"
_TORCH_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_TORCH_GPIPE = re.compile(r"(Forward|Backward) (\d+)", re.ASCII)
_NAME_THEM = "name the operations by ranges such as `pipeproof:0F1` (record_function)"
_KNOWN = "names of operations are `pipeproof:0F1`, `PP:0F1` and, with one stage on a rank, `Forward 1`"


class OpRange(NamedTuple):
    """Range of one operation, or of an overlapped pair. ``waits`` is True if waits for messages may be in it."""

    ops: tuple[Op, ...]
    start_ns: int
    end_ns: int
    waits: bool


@dataclass(frozen=True, slots=True)
class StepRanges:
    """Ranges of one step of a rank: computations in program order, the optimizer's, and all others."""

    computations: Sequence[OpRange]
    others: Sequence[OpRange]
    optimizer: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class RankSteps:
    """Complete steps of a rank; ``num_left_out`` operations of incomplete steps precede or follow them.

    ``ranges`` are all ranges of operations, ordered by their starts.
    """

    steps: Sequence[StepRanges]
    num_left_out: int
    ranges: Sequence[OpRange]


def steps_of_trace(trace: RankTrace, program: Sequence[Op]) -> RankSteps:
    """Return the steps of one rank, with the computations of ``program`` in its order.

    Raises:
        BadPlanError: PP164, the names are not understood, or the order differs.
    """
    ranges = list(_named(trace, program))
    optimizer = [(start, end) for name, start, end in trace.ranges if name.startswith(_OPTIMIZER)]
    if not ranges:
        raise not_assigned(trace.file, "no range names an operation", _NAME_THEM)
    _require_apart(trace, ranges)
    computed = [(position, op) for position, each in enumerate(ranges) for op in each.ops if op.kind in COMPUTE_KINDS]
    starts, num_left_out = _step_starts(trace, [op for _, op in computed], program)
    steps = []
    for start in starts:
        places = list(dict.fromkeys(position for position, _ in computed[start : start + len(program)]))
        before = computed[start - 1][0] if start else -1
        after = next((position for position, _ in computed[start + len(program) :]), len(ranges))
        # Receives of a step may be posted before its first computation; all else there belongs to the step before.
        early = [each for each in ranges[before + 1 : places[0]] if _receives(each.ops[0])]
        late = [each for each in ranges[places[-1] + 1 : after] if not _receives(each.ops[0])]
        between = ranges[places[0] : places[-1] + 1]
        inside = [each for each in between if not COMPUTE_KINDS & {op.kind for op in each.ops}]
        begin, end = ranges[places[0]].start_ns, ranges[after].start_ns if after < len(ranges) else None
        steps.append(
            StepRanges(
                [ranges[position] for position in places],
                [*early, *inside, *late],
                [(s, e) for s, e in optimizer if s >= begin and (end is None or s < end)],
            )
        )
    return RankSteps(steps, num_left_out, ranges)


def _receives(op: Op) -> bool:
    """Return True for a receive and for a wait for one."""
    return (op.target or op).kind in RECV_KINDS


def _named(trace: RankTrace, program: Sequence[Op]) -> Iterator[OpRange]:
    """Yield the ranges with the first kind of names that the trace has."""
    readers: tuple[tuple[str, Callable[[str], tuple[Op, ...]], bool], ...] = (
        (TRACE_PREFIX, lambda text: (parse_op(text),), False),
        (_TORCH_ACTION, _torch_action, True),
    )
    for prefix, read, waits in readers:
        matches = [each for each in trace.ranges if each.name.startswith(prefix)]
        for name, start, end in matches:
            try:
                yield OpRange(read(name.removeprefix(prefix)), start, end, waits=waits)
            except ValueError as error:
                raise not_assigned(trace.file, f"the range `{name}` names no operation", _KNOWN) from error
        if matches:
            return
    for name, start, end in trace.ranges:
        if match := _TORCH_GPIPE.fullmatch(name):
            stages = {op.stage for op in program}
            if len(stages) > 1:
                raise not_assigned(
                    trace.file, f"the range `{name}` names no stage, and this rank has {len(stages)}", _KNOWN
                )
            kind = OpKind.FORWARD if match[1] == "Forward" else OpKind.BACKWARD
            yield OpRange((Op(kind, min(stages), int(match[2])),), start, end, waits=True)


def _torch_action(text: str) -> tuple[Op, ...]:
    pair = _TORCH_PAIR.fullmatch(text)
    return tuple(map(parse_op, pair[1].split(";") if pair else (text,)))


def _require_apart(trace: RankTrace, ranges: Sequence[OpRange]) -> None:
    """Refuse ranges that overlap: their launches could belong to both."""
    for before, after in pairwise(ranges):
        if after.start_ns < before.end_ns:
            names = f"{'+'.join(map(str, before.ops))} and {'+'.join(map(str, after.ops))}"
            raise not_assigned(
                trace.file, f"the ranges of {names} overlap on the host", "give each rank a trace of its own"
            )


def _step_starts(trace: RankTrace, ops: Sequence[Op], program: Sequence[Op]) -> tuple[list[int], int]:
    """Return the indices in ``ops`` at which complete steps begin, and the number of operations outside of them."""
    position = next((position for position, op in enumerate(ops) if op == program[0]), len(ops))
    starts: list[int] = []
    while ops[position : position + len(program)]:
        for op, planned in zip(ops[position : position + len(program)], program, strict=False):
            if op != planned:
                raise not_assigned(
                    trace.file,
                    f"step {len(starts)} of the trace has {op} where the program of the plan has {planned}",
                    "give the plan of this run: its schedule, number of micro-batches and stages",
                )
        if position + len(program) > len(ops):
            break
        starts.append(position)
        position += len(program)
    if not starts:
        raise not_assigned(
            trace.file,
            f"no complete step: {len(ops)} operations, and a step has {len(program)}",
            "profile whole steps, at least two",
        )
    return starts, len(ops) - len(starts) * len(program)
