"""Exact times of a plan: fractions of a microsecond, written as numbers or as ``a/b``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from pipeproof.specs.problems import KeyPath, Problem, describe_value, problems_error, shortened

MAX_TIME_US = 10**12
"""Longest time of a plan: about eleven and a half days."""

MAX_DENOMINATOR = 10**12
"""Finest resolution of a time, so that sums stay small exact fractions."""

_RATIO = re.compile(r"([0-9]{1,30})/([0-9]{1,30})", re.ASCII)

StageTimes = Fraction | tuple[Fraction, ...]
"""One time for every stage, or one per global stage."""


def exact_time(value: object, path: KeyPath, *, positive: bool) -> Fraction | Problem:
    """Read one time in microseconds, or say what is wrong with it.

    A float counts as the decimal that it prints as: 0.1 is 1/10, not the
    binary fraction next to it.
    """
    match value:
        case bool():
            time = None
        case int() | Fraction():
            time = Fraction(value)
        case float() if math.isfinite(value):
            time = Fraction(repr(value))
        case float():
            return Problem("PP106", path, f"a time must be finite, found {describe_value(value)}")
        case str():
            ratio = _RATIO.fullmatch(value)
            time = Fraction(int(ratio[1]), int(ratio[2])) if ratio and int(ratio[2]) else None
        case _:
            time = None
    if time is None:
        return Problem(
            "PP105",
            path,
            f"expected a time in microseconds, found {describe_value(value)}",
            help="write a number such as 100 or 0.5, or an exact fraction such as 1/3",
        )
    return _bounded(time, value, path, positive=positive)


def _bounded(time: Fraction, value: object, path: KeyPath, *, positive: bool) -> Fraction | Problem:
    found = describe_value(value) if not isinstance(value, Fraction) else shortened(str(value))
    if time < 0 or (positive and time == 0):
        least = "more than 0" if positive else "at least 0"
        return Problem("PP106", path, f"a time here must be {least}, found {found}")
    if time > MAX_TIME_US:
        return Problem("PP106", path, f"a time must be at most {MAX_TIME_US} us, found {found}")
    if time.denominator > MAX_DENOMINATOR:
        return Problem("PP106", path, f"a time must not be finer than 1/{MAX_DENOMINATOR} us, found {found}")
    return time


def _validate_one(value: object) -> Fraction:
    time = exact_time(value, (), positive=False)
    if isinstance(time, Problem):
        raise problems_error([time])
    return time


def _stage_times_validator(*, positive: bool) -> Callable[[object], StageTimes]:
    def validate(value: object) -> StageTimes:
        if not isinstance(value, list | tuple):
            time = exact_time(value, (), positive=positive)
            if isinstance(time, Problem):
                raise problems_error([time])
            return time
        times = [exact_time(item, (index,), positive=positive) for index, item in enumerate(value)]
        problems = [time for time in times if isinstance(time, Problem)]
        if problems:
            raise problems_error(problems)
        return tuple(time for time in times if isinstance(time, Fraction))

    return validate


def _to_json(value: StageTimes) -> Any:
    """An integer where the time is one, else ``a/b``: both load to the same time again."""
    if isinstance(value, tuple):
        return [_to_json(time) for time in value]
    return value.numerator if value.denominator == 1 else f"{value.numerator}/{value.denominator}"


def _one_schema(*, positive: bool) -> dict[str, Any]:
    bound = {"exclusiveMinimum": 0} if positive else {"minimum": 0}
    number = {"type": "number", **bound, "maximum": MAX_TIME_US}
    return {"anyOf": [number, {"type": "string", "pattern": "^[0-9]{1,30}/0*[1-9][0-9]{0,29}$"}]}


def _stage_schema(*, positive: bool) -> dict[str, Any]:
    one = _one_schema(positive=positive)
    return {"anyOf": [*one["anyOf"], {"type": "array", "items": one}]}


_SERIALIZER = PlainSerializer(_to_json, when_used="json")

Time = Annotated[Fraction, PlainValidator(_validate_one), _SERIALIZER, WithJsonSchema(_one_schema(positive=False))]
"""A time >= 0."""

TimeByStage = Annotated[
    StageTimes,
    PlainValidator(_stage_times_validator(positive=False)),
    _SERIALIZER,
    WithJsonSchema(_stage_schema(positive=False)),
]
"""A time >= 0, or a list of those by global stage."""

PositiveTimeByStage = Annotated[
    StageTimes,
    PlainValidator(_stage_times_validator(positive=True)),
    _SERIALIZER,
    WithJsonSchema(_stage_schema(positive=True)),
]
"""A time > 0, or a list of those by global stage."""
