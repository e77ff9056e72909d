"""What is wrong with grouped-query and latent attention and with experts is said with the numbers and a way out."""

import jsonschema
import pytest

from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.model import model_content
from pipeproof.specs.plan import plan_json_schema
from tests.features import FEATURES
from tests.plans import plan_dict, refusal

MOE = {"num_experts": 8, "top_k": 2, "ffn_size": 8}
MLA = {"kv_rank": 4, "nope_head_size": 2, "rope_head_size": 2, "value_head_size": 4}


def test_what_plans_have_without_them():
    model = plan_from_dict(plan_dict()).spec.model
    assert (model.kv_heads, model.size_of_head, model.moe, model.mla) == (4, 4, None, None)
    assert not model.has_experts(0)


def test_which_blocks_have_experts():
    model = plan_from_dict(plan_dict(model={"moe": {**MOE, "dense_layers": 3}})).spec.model
    assert [model.has_experts(i) for i in range(4)] == [False, False, False, True]


@pytest.mark.parametrize(
    "model",
    [
        {"num_kv_heads": 1, "head_size": 10},
        {"hidden_size": 15, "head_size": 10},  # heads that the hidden size is no multiple of
        {"hidden_size": 15, "mla": MLA},
        {"moe": MOE},
        {"moe": {**MOE, "num_shared_experts": 2, "dense_layers": 3}, "mla": {**MLA, "q_rank": 3}},
    ],
)
def test_right_ones_load_and_stay_what_they_are(model):
    spec = plan_from_dict(plan_dict(model=model)).spec
    assert plan_from_dict(spec.model_dump(mode="json")).spec == spec
    assert jsonschema.Draft202012Validator(plan_json_schema()).is_valid(plan_dict(model=model))


def _compressed(**changes):
    section = FEATURES["compressed attention"]["model"]["compressed_attention"]
    return {"compressed_attention": {**section, **changes}}


@pytest.mark.parametrize(
    ("model", "topology", "code", "words"),
    [
        ({"num_kv_heads": 3}, {}, "PP108", "set model.num_kv_heads to 2 or 4"),
        ({"head_size": 5}, {}, "PP108", "model.head_size 5 is odd"),
        ({"num_kv_heads": 2}, {"tp": 4}, "PP108", "set model.num_kv_heads to 4, or topology.tp to 2"),
        ({"mla": MLA, "head_size": 4}, {}, "PP106", "remove head_size"),
        ({"mla": MLA, "num_kv_heads": 4}, {}, "PP106", "remove num_kv_heads"),
        ({"mla": {**MLA, "rope_head_size": 3}}, {}, "PP108", "set it to 2 or 4"),
        ({"mla": {"kv_rank": 4}}, {}, "PP104", "model.mla.nope_head_size"),
        (_compressed(q_lora_rank=0), {}, "PP106", "q_lora_rank` must be at least 1"),
        (_compressed(layer_types=["sliding"]), {}, "PP106", "layer_types[0]"),
        (_compressed(layer_types=[]), {}, "PP106", "has 0 entries"),
        (_compressed(layer_types=["sliding_attention"] * 5), {}, "PP106", "give 1 to 4"),
        (_compressed(qk_rope_head_dim=3), {}, "PP108", "set it to an even number up to 4"),
        (_compressed(qk_rope_head_dim=6), {}, "PP108", "whose size is 4"),
        (_compressed(o_groups=3), {}, "PP108", "set o_groups to 2 or 4"),
        (_compressed(), {"tp": 4}, "PP108", "set model.compressed_attention.o_groups to 4"),
        (_compressed(compress_rates={"heavily_compressed_attention": 9}), {}, "PP108", "makes no entry"),
        (_compressed(documents=[5, 2]), {}, "PP108", "give documents of 8 tokens together"),
        (_compressed(documents=[2, 2, 2, 2]), {}, "PP108", "set it to 3 at least"),
        (_compressed(documents=[]), {}, "PP106", "documents"),
        (
            _compressed(rope_scaling={"factor": 2.0, "original_max_position_embeddings": 64, "beta_slow": 32}),
            {},
            "PP106",
            "exchange the two",
        ),
        (_compressed(), {"cp": 2}, "PP106", "need the tokens before them"),
        ({**_compressed(), "num_kv_heads": 2}, {}, "PP106", "remove num_kv_heads"),
        ({**_compressed(), "mla": MLA}, {}, "PP106", "remove mla"),
        ({**_compressed(), "dropout": 0.1}, {}, "PP106", "set its `attention` to 0"),
        ({"moe": {**MOE, "top_k": 9}}, {}, "PP106", "set model.moe.top_k to at most 8"),
        ({"moe": {**MOE, "dense_layers": 4}}, {}, "PP106", "leaves none of 4 blocks for experts"),
        ({"moe": {**MOE, "dense_layers": 1, "hash_layers": 4}}, {}, "PP106", "set it to at most 3"),
        ({"moe": {**MOE, "hash_layers": 1, "dispatcher": "all_gather"}}, {}, "PP106", "use `dispatcher: all_to_all`"),
        ({"swiglu_formula": "silu"}, {}, "PP106", "`swiglu_limit` is not given"),
        ({"moe": {**MOE, "topk": 2}}, {}, "PP102", "did you mean `top_k`?"),
        ({"moe": {**MOE, "ffn_size": 9}}, {"tp": 2}, "PP108", "model.moe.ffn_size 9 does not divide by topology.tp 2"),
        ({"moe": MOE}, {"ep": 3}, "PP108", "set model.moe.num_experts to 6 or 9, or topology.ep to 2 or 4"),
        ({"moe": {**MOE, "top_k": 1}}, {"ep": 8, "cp": 2}, "PP108", "set model.seq_length to a multiple of 16"),
    ],
)
def test_what_is_wrong_is_said(model, topology, code, words):
    with pytest.raises(BadPlanError) as caught:
        plan_from_dict(plan_dict(model=model, topology=topology))
    found = [f for f in caught.value.findings if words in f"{f.message} {f.help}"]
    assert [f.code for f in found] == [code], caught.value.findings


def test_every_length_of_sequences_is_shared_out_evenly():
    schedule = {"seq_lengths": [8, 8, 6, 7]}
    found = refusal(plan_dict(model={"moe": {**MOE, "top_k": 1}}, topology={"ep": 2}, schedule=schedule))
    assert "7 tokens go to experts (schedule.seq_lengths[3] 7, model.moe.top_k 1)" in found.message


def test_the_dense_size_need_not_divide_where_no_block_has_it():
    model = {"ffn_size": 7, "moe": MOE}
    assert plan_from_dict(plan_dict(model=model, topology={"tp": 2})).spec.model.ffn_size == 7
    with pytest.raises(BadPlanError, match=r"model\.ffn_size 7"):
        plan_from_dict(plan_dict(model={**model, "moe": {**MOE, "dense_layers": 1}}, topology={"tp": 2}))


def test_a_dispatcher_of_experts_is_part_of_the_content_unless_it_is_the_default():
    """States of releases without the key can be resumed."""

    def moe_of(**keys):
        model = {"moe": {"num_experts": 4, "top_k": 2, "ffn_size": 8, **keys}}
        return model_content(plan_from_dict(plan_dict(model=model)).spec.model)["moe"]

    assert "dispatcher" not in moe_of()
    assert moe_of() == moe_of(dispatcher="all_to_all")
    assert moe_of(dispatcher="all_gather") == {**moe_of(), "dispatcher": "all_gather"}
