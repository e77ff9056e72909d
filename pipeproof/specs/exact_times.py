"""Exact values of a plan: times in microseconds and shares of 1, written as numbers or as ``a/b``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, ValidationInfo, WithJsonSchema

from pipeproof.diagnostics.problems import KeyPath, Problem, describe_value, dotted, problems_error, shortened

MAX_TIME_US = 10**12
"""Longest time of a plan: about eleven and a half days."""

GRID_US = Fraction(1, 1000)
"""Times that come from a formula or a measurement are multiples of a nanosecond."""

MAX_DENOMINATOR = 10**12
"""Finest resolution of a time: sums stay small exact fractions."""

TIME_KEYS = ("forward_us", "backward_us", "backward_input_us", "backward_weight_us")
"""Keys of the times of computations, in ``cost`` and of custom layers."""

_RATIO = re.compile(r"([0-9]{1,30})/([0-9]{1,30})", re.ASCII)
_RATIO_TEXT = {"type": "string", "pattern": "^[0-9]{1,30}/0*[1-9][0-9]{0,29}$"}

StageTimes = Fraction | tuple[Fraction, ...]
"""One time for every stage, or one per global stage."""


def rounded(time: Fraction) -> Fraction:
    """Return the nearest time on the grid."""
    return round(time / GRID_US) * GRID_US


def rounded_up(time: Fraction) -> Fraction:
    """Return the next time on the grid that is not earlier."""
    return math.ceil(time / GRID_US) * GRID_US


def exact_time(value: object, name: str, path: KeyPath = (), *, positive: bool) -> Fraction | Problem:
    """Return one time in microseconds, or the problem with it.

    ``name`` is its key, ``path`` its position below that key: an index in a
    list. A float counts as the decimal that it prints as: 0.1 is 1/10, not the
    nearest binary fraction.
    """
    key = f"`{dotted((name, *path))}`"
    if isinstance(value, float) and not math.isfinite(value):
        return Problem("PP106", path, f"{key} must be finite, found {describe_value(value)}")
    time = as_fraction(value)
    if time is None:
        return Problem(
            "PP105",
            path,
            f"{key} must be a time in microseconds, found {describe_value(value)}",
            help="remove the quotes"
            if isinstance(value, str) and value.strip().isdecimal()
            else "write a number such as 100 or 0.5, or an exact fraction such as 1/3",
        )
    bound = _violated_bound(time, positive=positive)
    if bound is None:
        return time
    text = shortened(str(value)) if isinstance(value, Fraction) else describe_value(value)
    return Problem("PP106", path, f"{key} must {bound}, found {text}")


def _violated_bound(time: Fraction, *, positive: bool) -> str | None:
    if time < 0 or (positive and time == 0):
        return "be more than 0" if positive else "be at least 0"
    if time > MAX_TIME_US:
        return f"be at most {MAX_TIME_US} us"
    if time.denominator > MAX_DENOMINATOR:
        return f"not be finer than 1/{MAX_DENOMINATOR} us"
    return None


def as_fraction(value: object) -> Fraction | None:
    """Return a finite number, or ``a/b``, exactly; None for anything else."""
    if isinstance(value, int | Fraction) and not isinstance(value, bool):
        return Fraction(value)
    if isinstance(value, float):
        return Fraction(repr(float(value))) if math.isfinite(value) else None
    ratio = _RATIO.fullmatch(value) if isinstance(value, str) else None
    return Fraction(int(ratio[1]), int(ratio[2])) if ratio and int(ratio[2]) else None


def _validate_one(value: object, info: ValidationInfo) -> Fraction:
    time = exact_time(value, info.field_name or "time", positive=False)
    if isinstance(time, Problem):
        raise problems_error([time])
    return time


def _stage_times_validator(*, positive: bool) -> Callable[[object, ValidationInfo], StageTimes]:
    def validate(value: object, info: ValidationInfo) -> StageTimes:
        name = info.field_name or "time"
        items: list[tuple[KeyPath, object]] = [((), value)]
        if isinstance(value, list | tuple):
            items = [((index,), item) for index, item in enumerate(value)]
        times = [exact_time(item, name, path, positive=positive) for path, item in items]
        problems = [time for time in times if isinstance(time, Problem)]
        if problems:
            raise problems_error(problems)
        fractions = tuple(time for time in times if isinstance(time, Fraction))
        return fractions if isinstance(value, list | tuple) else fractions[0]

    return validate


def _to_json(value: StageTimes) -> Any:
    if isinstance(value, tuple):
        return [fraction_to_json(time) for time in value]
    return fraction_to_json(value)


def fraction_to_json(value: Fraction) -> int | str:
    """Return an integer, or a text ``a/b``; both load to the same value again."""
    return value.numerator if value.denominator == 1 else f"{value.numerator}/{value.denominator}"


def _one_schema(*, positive: bool) -> dict[str, Any]:
    bound = {"exclusiveMinimum": 0} if positive else {"minimum": 0}
    number = {"type": "number", **bound, "maximum": MAX_TIME_US}
    return {"anyOf": [number, _RATIO_TEXT]}


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
"""A time >= 0, or a list of such times by global stage."""

PositiveTimeByStage = Annotated[
    StageTimes,
    PlainValidator(_stage_times_validator(positive=True)),
    _SERIALIZER,
    WithJsonSchema(_stage_schema(positive=True)),
]
"""A time > 0, or a list of such times by global stage."""


def _validate_share(value: object, info: ValidationInfo) -> Fraction | None:
    """An exact share of 1, written as a number or as ``a/b``."""
    if value is None:
        return None
    share = as_fraction(value)
    if share is None:
        message = f"`{info.field_name}` must be a share from 0 to 1, found {describe_value(value)}"
        raise problems_error([Problem("PP105", (), message, help="write a number such as 0.1, or a fraction: 1/8")])
    if not 0 <= share <= 1 or share.denominator > MAX_DENOMINATOR:
        message = f"`{info.field_name}` must be from 0 to 1, not finer than 1/{MAX_DENOMINATOR}, found "
        raise problems_error([Problem("PP106", (), message + describe_value(value), help="0.1 is a tenth of its time")])
    return share


Slowdown = Annotated[
    Fraction | None,
    PlainValidator(_validate_share),
    PlainSerializer(fraction_to_json, when_used="json-unless-none"),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, _RATIO_TEXT, {"type": "null"}]}),
]
"""A share of 1, exact, or None: not given."""
