"""``schedule.global_batch_size``: it gives the micro-batches, in sweeps too, and contradictions are refused."""

import json

import pytest
from jsonschema import Draft202012Validator

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.specs.load_plan import load_plan, plan_from_dict
from pipeproof.specs.plan import plan_json_schema
from pipeproof.verify.certificate import graph_digest
from pipeproof.verify.subject import make_subject
from tests.plans import plan_dict


def plan(**schedule):
    data = plan_dict(topology={"pp": 2, "dp": 2})
    data["schedule"] = {"kind": "1f1b", "micro_batch_size": 2, **schedule}
    return data


def test_it_gives_the_number_of_micro_batches():
    spec = plan_from_dict(plan(global_batch_size=16)).spec
    assert spec.schedule.num_micro_batches == 4


def test_expert_parallel_ranks_have_their_own_micro_batches():
    data = plan(global_batch_size=32)
    data["topology"] = {"pp": 2, "dp": 2, "ep": 2}
    data["model"] = {**data["model"], "moe": {"num_experts": 2, "top_k": 1, "ffn_size": 8}}
    assert plan_from_dict(data).spec.schedule.num_micro_batches == 4


def test_a_shorter_last_micro_batch_counts():
    assert plan_from_dict(plan(global_batch_size=14, last_micro_batch_size=1)).spec.schedule.num_micro_batches == 4


def test_the_plan_is_the_one_with_the_number():
    digests = {
        graph_digest(make_subject(plan_from_dict(plan(**keys))))
        for keys in (
            {"global_batch_size": 16},
            {"num_micro_batches": 4},
            {"global_batch_size": 16, "num_micro_batches": 4},
        )
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("keys", "code", "text", "help_text"),
    [
        ({"global_batch_size": 18}, "PP108", "18 does not divide by 4", "16 or 20"),
        ({"global_batch_size": 2}, "PP108", "2 does not divide by 4", "set it to 4"),
        (
            {"global_batch_size": 16, "num_micro_batches": 3},
            "PP106",
            "3 micro-batches of 2",
            "set global_batch_size to 12",
        ),
        (
            {"global_batch_size": 16, "last_micro_batch_size": 1},
            "PP106",
            "(the last has 1)",
            "set global_batch_size to 14",
        ),
        ({"global_batch_size": "16"}, "PP105", "must be an integer", None),
        ({"global_batch_size": 0}, "PP106", "at least 1", None),
        ({}, "PP104", "num_micro_batches", None),
    ],
)
def test_contradictions_are_refused_at_their_key(tmp_path, keys, code, text, help_text):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan(**keys), indent=1))
    with pytest.raises(PlanFileError) as caught:
        load_plan(file)
    (finding,) = caught.value.findings
    assert finding.code == code
    assert text in finding.message
    assert help_text is None or help_text in finding.help
    if keys:
        assert finding.location.line == 1 + file.read_text().splitlines().index(
            next(line for line in file.read_text().splitlines() if "global_batch_size" in line)
        )


def test_the_schema_for_editors_takes_either_key():
    valid = Draft202012Validator(plan_json_schema()).is_valid
    assert valid(plan(global_batch_size=16))
    assert valid(plan(num_micro_batches=4))
    assert not valid(plan())
