"""Errors of grouped-query and latent attention and of experts state the numbers and a way out."""

import jsonschema
import pytest

from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.model import model_content
from pipeproof.specs.plan import plan_json_schema
from tests.plans import plan_dict, plan_spec, refusal

MOE = {"num_experts": 8, "top_k": 2, "ffn_size": 8}
MLA = {"kv_rank": 4, "nope_head_size": 2, "rope_head_size": 2, "value_head_size": 4}


def test_what_plans_have_without_them():
    model = plan_spec().model
    assert (model.kv_heads, model.size_of_head, model.moe, model.mla) == (4, 4, None, None)
    assert not model.has_experts(0)
    moe = plan_spec(model={"moe": MOE}).model.moe
    assert (moe.aux_loss, moe.z_loss, moe.expert_bias_rate) == (0.0, 0.0, None)


def test_which_blocks_have_experts():
    model = plan_spec(model={"moe": {**MOE, "dense_layers": 3}}).model
    assert [model.has_experts(i) for i in range(4)] == [False, False, False, True]


@pytest.mark.parametrize(
    "model",
    [
        {"num_kv_heads": 1, "head_size": 10},
        {"hidden_size": 15, "head_size": 10},  # the heads do not divide the hidden size
        {"hidden_size": 15, "mla": MLA},
        {"moe": MOE},
        {"moe": {**MOE, "num_shared_experts": 2, "dense_layers": 3}, "mla": {**MLA, "q_rank": 3}},
    ],
)
def test_right_ones_load_and_stay_what_they_are(model):
    spec = plan_spec(model=model)
    assert plan_from_dict(spec.model_dump(mode="json")).spec == spec
    assert jsonschema.Draft202012Validator(plan_json_schema()).is_valid(plan_dict(model=model))


def test_one_of_several_findings_names_what_divides():
    with pytest.raises(BadPlanError) as caught:
        plan_from_dict(plan_dict(model={"moe": MOE}, topology={"ep": 3}))
    first, second = caught.value.findings
    assert (first.code, second.code) == ("PP108", "PP108")
    assert "set model.moe.num_experts to 6 or 9, or topology.ep to 2 or 4" in first.help


def test_all_missing_keys_are_named():
    with pytest.raises(BadPlanError) as caught:
        plan_from_dict(plan_dict(model={"mla": {"kv_rank": 4}}))
    missing = ("nope_head_size", "rope_head_size", "value_head_size")
    assert [(found.code, found.message) for found in caught.value.findings] == [
        ("PP104", f"`model.mla.{key}` is missing") for key in missing
    ]


def test_every_length_of_sequences_is_shared_out_evenly():
    schedule = {"seq_lengths": [8, 8, 6, 7]}
    found = refusal(plan_dict(model={"moe": {**MOE, "top_k": 1}}, topology={"ep": 2}, schedule=schedule))
    assert "7 tokens go to experts (schedule.seq_lengths[3] 7, model.moe.top_k 1)" in found.message


def test_the_dense_size_need_not_divide_where_no_block_has_it():
    model = {"ffn_size": 7, "moe": MOE}
    assert plan_spec(model=model, topology={"tp": 2}).model.ffn_size == 7
    with pytest.raises(BadPlanError, match=r"model\.ffn_size 7"):
        plan_from_dict(plan_dict(model={**model, "moe": {**MOE, "dense_layers": 1}}, topology={"tp": 2}))


def test_a_dispatcher_of_experts_is_part_of_the_content_unless_it_is_the_default():
    """States of releases without the key can be resumed."""

    def moe_of(**keys):
        model = {"moe": {"num_experts": 4, "top_k": 2, "ffn_size": 8, **keys}}
        return model_content(plan_spec(model=model).model)["moe"]

    assert "dispatcher" not in moe_of()
    assert moe_of() == moe_of(dispatcher="all_to_all")
    assert moe_of(dispatcher="all_gather") == {**moe_of(), "dispatcher": "all_gather"}
