"""Keys of custom schedules: valid combinations, and the number of stages."""

import json

import jsonschema
import pytest

from pipeproof.diagnostics.source import PlanFileError
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


@pytest.mark.parametrize(
    ("schedule", "code", "fragment"),
    [
        ({"kind": "custom"}, "PP104", "`schedule.programs` is missing"),
        ({"kind": "file"}, "PP104", "`schedule.path` is missing"),
        ({"kind": "1f1b", "path": "s.csv"}, "PP106", "`schedule.path` is given"),
        (CUSTOM | {"path": "s.csv"}, "PP106", "`schedule.path` is given"),
        (FILE | {"programs": [["0F0"]]}, "PP106", "`schedule.programs` is given"),
        (CUSTOM | {"format": "csv"}, "PP106", "`schedule.format` is given"),
        (FILE | {"format": "cvs"}, "PP106", "`schedule.format` must be auto, text, csv"),
        (FILE | {"placement": "zigzag"}, "PP106", 'found string "zigzag"'),
        (FILE | {"placement": 2}, "PP105", "must be loop, v or a list"),
        (FILE | {"placement": [0, [1]]}, "PP105", "`schedule.placement[0]` must be a list of stages"),
        (FILE | {"placement": [[0], ["1"]]}, "PP105", "`schedule.placement[1][0]` must be an integer"),
        (FILE | {"placement": [[0], [True]]}, "PP105", "`schedule.placement[1][0]` must be an integer"),
        (FILE | {"placement": [[0], [-1]]}, "PP106", "must be the number of a stage"),
        (FILE | {"placement": [[0], [2]]}, "PP106", "lists stage 2, and stage 1 is missing"),
        (FILE | {"placement": [[0, 1], [1]]}, "PP106", "stage 0 on 1 and stage 1 on 2 ranks"),
        (FILE | {"placement": [[0, 0], [1]]}, "PP106", "pipeline rank 0 has one stage twice"),
        (FILE | {"placement": [[0, 1], []]}, "PP106", "pipeline rank 1 has no stage"),
        (FILE | {"placement": [[0, 2], [1, 3]], "num_chunks": 2}, "PP106", "`schedule.num_chunks` is given together"),
        (FILE | {"placement": [[0], [1], [2]]}, "PP109", "the stages of 3 ranks, and topology.pp is 2"),
        (CUSTOM | {"programs": []}, "PP106", "`schedule.programs` is empty"),
        (CUSTOM | {"programs": "0F0"}, "PP105", "`schedule.programs` must be a list"),
        (CUSTOM | {"programs": [["0F0"], [1]]}, "PP105", "`schedule.programs[1][0]` must be a string"),
    ],
)
def test_invalid_combinations_are_refused(schedule, code, fragment):
    with pytest.raises(PlanFileError) as caught:
        load(**schedule)
    (finding,) = caught.value.findings
    assert finding.code == code
    assert fragment in finding.message


def test_lists_by_stage_count_placed_stages():
    plan = example(topology={"pp": 2, "tp": 1}, schedule=FILE | {"placement": [[0, 2], [1]]}, cost={"forward_us": [1]})
    finding = refusal(plan)
    assert finding.code == "PP109"
    assert "schedule.placement makes 3 stages" in finding.message
