"""The keys ``transport.recv_order`` and ``cost.recv_slowdown``: values, refusals, and how they are written."""

from fractions import Fraction

import pytest
from jsonschema import Draft202012Validator

from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.plan import plan_json_schema
from tests.plans import plan_dict, plan_spec


def with_slowdown(value):
    return plan_dict(cost={"recv_slowdown": value})


@pytest.mark.parametrize(
    ("value", "share"), [(0, 0), (1, 1), (0.1, Fraction(1, 10)), ("1/8", Fraction(1, 8)), (None, None)]
)
def test_a_share_is_exact_and_is_written_so_that_it_loads_again(value, share):
    spec = plan_from_dict(with_slowdown(value)).spec
    assert spec.cost.recv_slowdown == share
    dumped = spec.model_dump(mode="json")
    assert plan_from_dict(dumped).spec == spec
    Draft202012Validator(plan_json_schema()).validate(dumped)
    Draft202012Validator(plan_json_schema()).validate(with_slowdown(value))


def test_a_slowdown_stands_beside_computed_times():
    spec = plan_spec(cost={"analytic": "h200", "recv_slowdown": 0.2})
    assert spec.cost.recv_slowdown == Fraction(1, 5)
