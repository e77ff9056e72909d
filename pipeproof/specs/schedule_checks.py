"""Checks of the keys that give a schedule of one's own: a file, or programs in the plan, and its placement."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from pipeproof.specs.problems import KeyPath, Problem, describe_value, dotted, listed, problems_error

if TYPE_CHECKING:
    from pipeproof.specs.plan import PlanSpec
    from pipeproof.specs.schedule import ScheduleSpec

OWN_KINDS = ("file", "custom")
"""The kinds of schedule that no generator makes."""

MAX_STAGE = 2**32
"""Largest number of a stage."""


def _validate_placement(value: object) -> Literal["loop", "v"] | tuple[tuple[int, ...], ...]:
    if value == "loop" or value == "v":  # a comparison with each narrows the type
        return value
    if not isinstance(value, list | tuple):
        code = "PP106" if isinstance(value, str) else "PP105"
        raise problems_error([_not_a_placement(code, (), "loop, v or a list of the stages of each rank", value)])
    problems = []
    for rank, stages in enumerate(value):
        if not isinstance(stages, list | tuple):
            problems.append(_not_a_placement("PP105", (rank,), "a list of stages", stages))
            continue
        for index, stage in enumerate(stages):
            if type(stage) is not int:
                problems.append(_not_a_placement("PP105", (rank, index), "an integer", stage))
            elif not 0 <= stage <= MAX_STAGE:
                problems.append(_not_a_placement("PP106", (rank, index), "the number of a stage", stage))
    if problems:
        raise problems_error(problems)
    return tuple(tuple(stages) for stages in value)


def _not_a_placement(code: str, path: KeyPath, expected: str, found: object) -> Problem:
    name = dotted(("schedule", "placement", *path))
    return Problem(code, path, f"`{name}` must be {expected}, found {describe_value(found)}")


def _to_json(value: Literal["loop", "v"] | tuple[tuple[int, ...], ...]) -> str | list[list[int]]:
    return value if isinstance(value, str) else [list(stages) for stages in value]


StagePlacement = Annotated[
    Literal["loop", "v"] | tuple[tuple[int, ...], ...],
    PlainValidator(_validate_placement),
    PlainSerializer(_to_json, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "enum": ["loop", "v"]},
                {
                    "type": "array",
                    "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                },
            ]
        }
    ),
]
"""``loop``, ``v``, or the stages of each pipeline rank."""


def check_own_schedule(schedule: ScheduleSpec) -> list[Problem]:
    """PP104 where the schedule itself is missing, PP106 for keys that go with another kind."""
    problems = []
    for kind, key in (("file", "path"), ("custom", "programs")):
        given = getattr(schedule, key) is not None
        if schedule.kind == kind and not given:
            message = f"`schedule.{key}` is missing, which `kind: {kind}` needs"
            example = "path: schedules/zb.csv" if key == "path" else "programs: [[0F0, 0B0], [1F0, 1B0]]"
            problems.append(Problem("PP104", ("kind",), message, help=f"add `{example}`"))
        elif given and schedule.kind != kind:
            message = f"`schedule.{key}` is given, and `kind: {schedule.kind}` does not use it"
            problems.append(Problem("PP106", (key,), message, help=f"use kind: {kind}, or remove {key}", at_key=True))
    if schedule.programs == ():
        problems.append(Problem("PP106", ("programs",), "`schedule.programs` is empty", help="give one for each rank"))
    if schedule.format != "auto" and schedule.kind != "file":
        message = f"`schedule.format` is given, and `kind: {schedule.kind}` is not read from a file"
        problems.append(Problem("PP106", ("format",), message, help="use kind: file, or remove format", at_key=True))
    return problems


def check_placement(schedule: ScheduleSpec) -> list[Problem]:
    """PP106: a list of stages by rank has every stage, each as often as the others, and says how many there are."""
    placement = schedule.placement
    if not isinstance(placement, tuple):
        return []
    problems = []
    if schedule.num_chunks > 1:
        message = "`schedule.num_chunks` is given together with a list of stages as `schedule.placement`"
        problems.append(Problem("PP106", ("num_chunks",), message, help="remove num_chunks", at_key=True))
    copies = Counter(stage for stages in placement for stage in stages)
    lacking = [stage for stage in range(max(copies, default=0)) if stage not in copies]
    if lacking:
        message = f"`schedule.placement` lists stage {max(copies)}, and stage {listed(lacking, 'and')} is not there"
        problems.append(Problem("PP106", ("placement",), message, help="number stages from 0"))
    elif len(set(copies.values())) > 1 and not any(len(set(mine)) < len(mine) for mine in placement):
        few, many = (pick(copies, key=lambda stage: copies[stage]) for pick in (min, max))
        message = f"`schedule.placement` has stage {few} on {copies[few]} and stage {many} on {copies[many]} ranks"
        problems.append(Problem("PP106", ("placement",), message, help="list each stage once, or all equally often"))
    for rank, mine in enumerate(placement):
        if not mine:
            problems.append(Problem("PP106", ("placement", rank), f"pipeline rank {rank} has no stage"))
        elif len(set(mine)) < len(mine):
            problems.append(
                Problem("PP106", ("placement", rank), f"pipeline rank {rank} has one stage twice: {list(mine)}")
            )
    return problems


def check_placed_ranks(plan: PlanSpec) -> list[Problem]:
    """PP109: a list of stages for each pipeline rank."""
    placement, pp = plan.schedule.placement, plan.topology.pp
    if not isinstance(placement, tuple) or len(placement) == pp:
        return []
    ranks = f"{len(placement)} rank{'s' if len(placement) > 1 else ''}"
    message = f"`schedule.placement` has the stages of {ranks}, and topology.pp is {pp}"
    return [Problem("PP109", ("schedule", "placement"), message, help=f"give {pp} lists")]
