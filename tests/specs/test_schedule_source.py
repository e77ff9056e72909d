"""Keys of custom schedules: valid combinations, and the number of stages."""

import json

import jsonschema
import pytest

from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.plan import PlanSpec, plan_json_schema
from tests.plans import refusal
from tests.specs.plans import example

CUSTOM = {"kind": "custom", "programs": [["0F0"], ["1F0"]]}
FILE = {"kind": "file", "path": "s.csv"}


def load(**schedule):
    return plan_from_dict(example(topology={"pp": 2, "tp": 1}, schedule=schedule)).spec


@pytest.mark.parametrize(
    ("schedule", "num_stages"),
    [
        (CUSTOM, 2),
        (FILE, 2),
        (FILE | {"num_chunks": 2, "format": "csv-comms"}, 4),
        (FILE | {"placement": [[0, 3], [1, 2]]}, 4),
        (FILE | {"placement": [[1], [0, 2]]}, 3),
        (FILE | {"placement": [[0, 1], [1, 0]]}, 2),
        ({"kind": "zb_v", "num_chunks": 2, "placement": "v"}, 4),
        (FILE | {"placement": "loop"}, 2),
    ],
)
def test_valid_combinations(schedule, num_stages):
    spec = load(**schedule)
    assert spec.num_stages == num_stages
    dumped = spec.model_dump(mode="json")
    assert PlanSpec.model_validate(json.loads(json.dumps(dumped))) == spec
    jsonschema.validate(dumped, plan_json_schema())


def test_lists_by_stage_count_placed_stages():
    plan = example(topology={"pp": 2, "tp": 1}, schedule=FILE | {"placement": [[0, 2], [1]]}, cost={"forward_us": [1]})
    finding = refusal(plan)
    assert finding.code == "PP109"
    assert "schedule.placement makes 3 stages" in finding.message
