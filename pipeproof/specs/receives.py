"""The keys about receives: ``transport.recv_post``, when they are posted; ``cost.recv_slowdown``, what that costs."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from pipeproof.specs.problems import Problem, describe_value, problems_error
from pipeproof.specs.times import MAX_DENOMINATOR, as_fraction, fraction_to_json

RecvPost = Literal["just_in_time", "one_ahead", "as_sent"]
"""When receives are posted; ``pipeproof.comm.early_receives`` says where that is in a program."""


def _validate(value: object) -> Fraction | None:
    """An exact share of 1, written as a number or as ``a/b``."""
    if value is None:
        return None
    share = as_fraction(value)
    if share is None:
        message = f"`recv_slowdown` must be a share from 0 to 1, found {describe_value(value)}"
        raise problems_error([Problem("PP105", (), message, help="write a number such as 0.1, or a fraction: 1/8")])
    if not 0 <= share <= 1 or share.denominator > MAX_DENOMINATOR:
        message = f"`recv_slowdown` must be from 0 to 1, not finer than 1/{MAX_DENOMINATOR}, found "
        raise problems_error([Problem("PP106", (), message + describe_value(value), help="0.1 is a tenth of its time")])
    return share


def _to_json(value: Fraction | None) -> Any:
    return None if value is None else fraction_to_json(value)


_SHARE = {"type": "number", "minimum": 0, "maximum": 1}
_RATIO = {"type": "string", "pattern": "^[0-9]{1,30}/0*[1-9][0-9]{0,29}$"}

Slowdown = Annotated[
    Fraction | None,
    PlainValidator(_validate),
    PlainSerializer(_to_json, when_used="json"),
    WithJsonSchema({"anyOf": [_SHARE, _RATIO, {"type": "null"}]}),
]
"""A share of 1, exact, or None: not given."""
