"""Stored activations against published closed forms; their block has LayerNorm and GELU, ours does not."""

from fractions import Fraction

import pytest

from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.model_family import input_lifetime, stored_activations
from pipeproof.stages.describe.stage_memory import (
    Lifetime,
    copied_bytes,
    moved_by_update,
    optimizer_bytes,
    state_of,
)
from tests.plans import plan_spec

GPT3 = {"hidden": 12288, "heads": 96}
MT_NLG = {"hidden": 20480, "heads": 128}
SEQ, ROWS = 2048, 1


def plan(hidden=64, heads=8, ffn=None, tp=1, sp=False, dtype="bfloat16", attention="unfused", seq=SEQ, **sections):
    memory = {"dtype": dtype, "attention": attention, **sections.pop("memory", {})}
    model = {"hidden_size": hidden, "num_heads": heads, "ffn_size": ffn or 4 * hidden, "seq_length": seq}
    model |= {"num_layers": 2, **sections.pop("model", {})}
    schedule = {"micro_batch_size": ROWS, **sections.pop("schedule", {})}
    topology = {"pp": 1, "tp": tp, "sequence_parallel": sp, **sections.pop("topology", {})}
    return plan_spec(model=model, topology=topology, schedule=schedule, memory=memory, **sections)


def held(spec, names=("layer.0",), size=None):
    layers = [layer for layer in describe_gpt(spec) if layer.name in names]
    return stored_activations(spec, layers, size or MicroBatchSize(spec.model.seq_length, ROWS))


def total(holdings, *lives):
    return sum(one.num_bytes for one in holdings if one.lifetime in (lives or (Lifetime.TO_INPUT, Lifetime.TO_WEIGHT)))


def published(hidden, heads, tp, *, sp, dropout=True):
    """Bytes of their block by the terms of arXiv:2205.05198, section 4.1, per token, with 16-bit activations."""
    outside = hidden * (1 if not sp else Fraction(1, tp))  # cut by sequence parallelism
    within, scores = Fraction(hidden, tp), Fraction(heads * SEQ, tp)
    terms = {
        "inputs of norms": 4 * outside,
        "inputs of qkv and of the first product of the MLP": 4 * outside,
        "q, k and v": 6 * within,
        "softmax": 2 * scores,
        "dropout of softmax: mask and output": 3 * scores if dropout else 0,
        "input of attention's last product": 2 * within,
        "input of GELU": 8 * within,
        "input of the MLP's last product": 8 * within,
        "masks of the two other dropouts": 2 * outside if dropout else 0,
    }
    return sum(terms.values()) * SEQ * ROWS


def test_their_terms_add_up_to_their_equations():
    for sizes in (GPT3, MT_NLG):
        h, a, sbh = sizes["hidden"], sizes["heads"], SEQ * ROWS * sizes["hidden"]
        assert published(h, a, 1, sp=False) == sbh * (34 + Fraction(5 * a * SEQ, h))  # equation 1
        assert published(h, a, 8, sp=False) == sbh * (10 + Fraction(24, 8) + Fraction(5 * a * SEQ, 8 * h))  # equation 2
        assert published(h, a, 8, sp=True) == Fraction(sbh, 8) * (34 + Fraction(5 * a * SEQ, h))  # equation 4


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("sizes", [GPT3, MT_NLG])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (8, False), (8, True)])
def test_our_block_differs_from_theirs_by_named_terms(sizes, tp, sp, dropout):
    h, model = sizes["hidden"], {"dropout": 0.1} if dropout else {}
    tokens = SEQ * ROWS
    between = Fraction(tokens, tp if sp else 1)
    gate = 2 * Fraction(4 * h, tp) * tokens  # SwiGLU has two inputs where GELU has one
    factors = 2 * 4 * between  # of RMSNorm; they leave out LayerNorm's means and deviations
    theirs = published(h, sizes["heads"], tp, sp=sp, dropout=dropout)
    again = plan(
        h, sizes["heads"], tp=tp, sp=sp, model=model, memory={"sequence_parallel_activations": "regather"}
    )  # as they do
    assert total(held(again)) == theirs + gate + factors
    whole = 2 * 2 * (tokens - between) * h  # the other ranks' parts of the inputs of products
    assert total(held(plan(h, sizes["heads"], tp=tp, sp=sp, model=model))) == theirs + gate + factors + whole


@pytest.mark.parametrize(("sizes", "saved"), [(GPT3, 70), (MT_NLG, 65)])
def test_selective_recompute_saves_of_their_block_what_they_say(sizes, saved):
    """5as/h of their 34 + 5as/h: 80 of 114, and 64 of 98; without dropout it is 2as/h."""
    h, a = sizes["hidden"], sizes["heads"]
    for model, elements in (({"dropout": 0.1}, 5), ({}, 2)):
        with_all, without = (
            held(plan(h, a, model=model)),
            held(plan(h, a, model=model, memory={"recompute": "selective"})),
        )
        core = total(with_all) - total(without)
        assert core == elements * a * SEQ * SEQ * ROWS
        assert total(without, Lifetime.IN_INPUT) == core
    theirs = Fraction(5, 2) * core
    assert round(100 * theirs / published(h, a, 1, sp=False)) == saved


MOE = {"num_experts": 8, "top_k": 2, "ffn_size": 48, "num_shared_experts": 1}
MLA = {"q_rank": 24, "kv_rank": 16, "nope_head_size": 8, "rope_head_size": 4, "value_head_size": 6}
T, H = SEQ * ROWS, 64
INPUT = 2 * T * H
"""Bytes of a tensor between layers."""


def again(modules, **sections):
    """(Bytes that the modules save, bytes that are there while I runs) of a block."""
    kept = total(held(plan(H, **sections)))
    memory = {"recompute": "selective", "recompute_modules": modules}
    recomputed = held(plan(H, **sections, memory=memory))
    return kept - total(recomputed), total(recomputed, Lifetime.IN_INPUT)


@pytest.mark.parametrize(
    ("modules", "model", "saved", "in_backward"),
    [
        (["core_attn"], {}, 2 * 8 * T * T, 2 * 8 * T * T),
        (["mlp"], {}, 2 * 3 * T * 4 * H, INPUT + 2 * 3 * T * 4 * H),  # gate, up and their product
        (["mlp"], {"mlp": "gelu"}, 2 * 2 * T * 4 * H, INPUT + 2 * 2 * T * 4 * H),
        (["layernorm"], {}, 2 * INPUT + 2 * 4 * T, 2 * INPUT + 2 * 4 * T),  # their results, and float32 factors
        (["layernorm"], {"norm": "layer"}, 2 * INPUT + 4 * 4 * T, 2 * INPUT + 4 * 4 * T),
        (["layernorm", "mlp"], {}, 2 * INPUT + 8 * T + 24 * T * H, 2 * INPUT + 8 * T + 24 * T * H),
        (["moe_act"], {"moe": MOE}, 2 * 2 * T * 48, 2 * 2 * T * 48),
        (["shared_experts"], {"moe": MOE}, 2 * 3 * T * 48, 2 * 3 * T * 48),
        (["mla_up_proj"], {"mla": MLA}, 2 * T * (8 * (12 + 12 + 6) - 4), 2 * T * 8 * (12 + 12 + 6)),
        (["moe"], {}, 0, 0),
        (["mlp"], {"moe": MOE}, 0, 0),
    ],
)
def test_modules_that_are_computed_again(modules, model, saved, in_backward):
    if modules == ["moe"]:  # the first block has no experts, and a model without any has no such module
        model = {"moe": {**MOE, "dense_layers": 1}}
    assert again(modules, model=model) == (saved, in_backward)


def test_a_router_with_its_experts_keeps_its_input():
    """Scores in float32, the tokens as sent, gate, up, their product, the returned results; and of shared experts."""
    visits = 2 * T
    inside = 4 * T * 8 + 2 * visits * (H + 3 * 48 + H) + 2 * T * 3 * 48
    assert again(["moe"], model={"moe": MOE}) == (inside, INPUT + inside)


def test_what_w_needs_of_recomputed_modules_is_there_after_i():
    """Inputs of gate and up, and of down; with the norms, their results and factors too."""
    memory = {"recompute": "selective", "recompute_modules": ["mlp"]}
    plain, mlp = held(plan(H)), held(plan(H, memory=memory))
    assert total(mlp, Lifetime.BETWEEN) - total(plain, Lifetime.BETWEEN) == INPUT + 2 * T * 4 * H
    norms = held(plan(H, memory={**memory, "recompute_modules": ["layernorm"]}))
    assert total(norms, Lifetime.BETWEEN) - total(plain, Lifetime.BETWEEN) == 2 * INPUT + 2 * 4 * T


def test_recomputed_modules_with_sequence_parallelism_keep_a_ranks_own_tokens():
    """The input of an MLP on one rank of two; gathered for I, and again for W."""
    sections = {"tp": 2, "sp": True}
    regather = {"sequence_parallel_activations": "regather"}
    plain = held(plan(H, **sections, memory=regather))
    mlp = held(plan(H, **sections, memory={**regather, "recompute": "selective", "recompute_modules": ["mlp"]}))
    assert total(plain) - total(mlp) == 2 * 3 * T * 4 * H // 2
    kept = held(plan(H, **sections, memory={"recompute": "selective", "recompute_modules": ["mlp"]}))
    assert total(kept) - total(mlp) == INPUT // 2, "the gathered input of q, k and v"


@pytest.mark.parametrize(
    ("memory", "model", "topology", "message"),
    [
        ({"recompute": "none", "recompute_modules": ["mlp"]}, {}, {}, "and `memory.recompute` is none"),
        ({"recompute_modules": ["moe_act"]}, {}, {}, "has moe_act, and the model has no experts"),
        ({"recompute_modules": ["shared_experts"]}, {"moe": {**MOE, "num_shared_experts": 0}}, {}, "shared experts"),
        ({"recompute_modules": ["mla_up_proj"]}, {}, {}, "no latent attention"),
        ({"recompute_modules": ["layernorm"]}, {}, {"tp": 2, "sp": True}, "keeps what is gathered"),
    ],
)
def test_modules_that_a_plan_cannot_have(memory, model, topology, message):
    with pytest.raises(BadPlanError, match=message):
        plan(H, model=model, memory={"recompute": "selective", **memory}, **topology)


@pytest.mark.parametrize(("module", "tp"), [("moe", 1), ("mlp", 2)])
def test_pairs_that_alternate_issue_no_forward_in_a_backward(module, tp):
    sections = {"model": {"moe": {**MOE, "dense_layers": 1}}, "topology": {"ep": 2, "tp": tp, "pp": 1}}
    schedule = {"kind": "1f1b", "overlap": "pairs"}
    plan(H, schedule=schedule, memory={"recompute": "selective"}, **sections)
    with pytest.raises(BadPlanError, match=r"does not go together with `schedule.overlap`"):
        plan(H, schedule=schedule, memory={"recompute": "selective", "recompute_modules": [module]}, **sections)


def test_products_keep_for_w_what_the_zero_bubble_paper_counts():
    """32 sbh between I and W (arXiv:2401.10241, table 1): inputs 14, gradients of outputs 18; ours without the gate."""
    h = 64
    sbh = SEQ * ROWS * h
    products = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
    kept = [one for one in held(plan(h)) if one.name.removesuffix(".grad") in products]
    assert total(kept, Lifetime.TO_WEIGHT) == 14 * sbh
    assert total(kept, Lifetime.BETWEEN) == (18 + 8) * sbh  # 8: the gate's gradient


def test_full_recompute_keeps_inputs_and_one_block_at_a_time():
    full = plan(memory={"recompute": "full"})
    names = ("layer.0", "layer.1")
    once, both, one = held(plan(), names), held(full, names), held(full)
    h, tokens = full.model.hidden_size, SEQ * ROWS
    assert total(both) == 2 * 2 * tokens * h  # 2sbh a block, as in section 5
    assert total(both, Lifetime.IN_INPUT) == total(one, Lifetime.IN_INPUT) == total(held(plan())) - 2 * tokens * h
    for_w = total(once, Lifetime.TO_WEIGHT) + total(once, Lifetime.BETWEEN)
    assert total(both, Lifetime.TO_WEIGHT, Lifetime.BETWEEN) == for_w


def test_offloaded_blocks_are_on_the_device_while_they_are_copied():
    """Three of four blocks are in host memory between F and I; two of them are on the device while F or I runs."""
    four = {"num_layers": 4}
    names = [f"layer.{index}" for index in range(4)]
    whole = held(plan(model=four), names)
    spec = plan(model=four, memory={"offload_blocks": 3})
    offloaded = held(spec, names)
    block = total(whole) / 4
    assert total(offloaded) == block
    assert total(offloaded, Lifetime.IN_FORWARD) == total(offloaded, Lifetime.IN_INPUT) == 2 * block
    for_w = total(whole, Lifetime.TO_WEIGHT) * Fraction(3, 4)
    assert total(offloaded, Lifetime.BETWEEN) == total(whole, Lifetime.BETWEEN) + for_w
    assert sum(copied_bytes(spec, name, MicroBatchSize(SEQ, ROWS)) for name in names[:3]) == 3 * block
    one = held(plan(model=four, memory={"offload_blocks": 1}), names)
    assert (total(one), total(one, Lifetime.IN_FORWARD)) == (3 * block, block)


def test_full_recompute_copies_inputs_alone():
    spec = plan(memory={"recompute": "full", "offload_blocks": 2})
    two = held(spec, ["layer.0", "layer.1"])
    assert total(two) == 0
    assert total(two, Lifetime.IN_FORWARD) == 2 * SEQ * 64 * 2


@pytest.mark.parametrize(
    ("dtype", "item"), [("float8", 1), ("float8_block", Fraction(33, 32)), ("float4", Fraction(9, 16))]
)
def test_inputs_of_products_in_fewer_bits(dtype, item):
    """Inputs of a token: h, h, h and 4 h elements; attention also stores its output, 2 h bytes."""
    cost = {"analytic": {"device": "b200", "matmul_dtype": dtype}}
    sizes = {"hidden": 64, "attention": "flash", "cost": cost}
    wide = held(plan(**sizes))
    narrow = held(plan(**sizes, memory={"product_inputs": "matmul_dtype"}))
    assert total(wide) - total(narrow) == SEQ * 64 * (7 * (2 - item) - 2)
    unfused = {**sizes, "attention": "unfused"}
    saved = total(held(plan(**unfused))) - total(held(plan(**unfused, memory={"product_inputs": "matmul_dtype"})))
    assert saved == SEQ * 64 * 7 * (2 - item)


@pytest.mark.parametrize(
    ("memory", "sections"),
    [
        ({"product_inputs": "matmul_dtype"}, {}),
        ({"product_inputs": "matmul_dtype"}, {"cost": {"analytic": "h100"}}),
        ({"offload_blocks": 1}, {"buffers": {"receive_slots": 2}}),
    ],
)
def test_keys_that_contradict_each_other_are_refused(memory, sections):
    with pytest.raises(BadPlanError, match="PP106"):
        plan(memory=memory, **sections)


def test_flash_attention_keeps_a_number_for_each_query_in_place_of_probabilities():
    unfused, flash = (total(held(plan(attention=kind))) for kind in ("unfused", "flash"))
    heads = 8
    assert unfused - flash == heads * SEQ * ROWS * (2 * SEQ - 4)


def test_context_parallelism_cuts_tokens_but_not_keys_and_values():
    one, four = (total(held(plan(attention="flash", topology={"cp": cp}))) for cp in (1, 4))
    key_value = 2 * 2 * 64 * SEQ
    assert four - key_value == Fraction(one - key_value, 4)


def test_splits_of_a_sequence_add_up_to_the_whole():
    schedule = {"kind": "seq1f1b", "num_sequence_splits": 4}
    whole = total(held(plan(attention="flash")))
    split = plan(attention="flash", schedule=schedule)
    assert 4 * total(held(split, size=MicroBatchSize(SEQ // 4, ROWS))) == whole


def test_grouped_queries_keep_fewer_keys_and_values():
    full, grouped = (total(held(plan(model={"num_kv_heads": kv}))) for kv in (8, 2))
    assert full - grouped == 2 * 2 * (8 - 2) * 8 * SEQ  # k and v, 6 heads of 8 elements


def test_latent_attention_keeps_compressed_vectors_and_heads():
    mla = {"q_rank": 24, "kv_rank": 16, "nope_head_size": 8, "rope_head_size": 4, "value_head_size": 6}
    one = {
        h.name: h.num_bytes
        for h in held(plan(model={"mla": mla}))
        if h.lifetime in (Lifetime.TO_INPUT, Lifetime.TO_WEIGHT)
    }
    assert one["attn.q_up"] == 2 * 24 * SEQ
    assert one["attn.kv_up"] == 2 * 16 * SEQ
    assert one["attn.q_down"] == 2 * 64 * SEQ
    assert "attn.kv_down" not in one  # it has the input of q_down
    assert one["attn.qkv_out"] == 2 * 8 * (12 + 12 + 6) * SEQ
    assert one["attn.out"] == 2 * 8 * 6 * SEQ


def test_experts_keep_every_visit_of_a_token():
    moe = {"num_experts": 8, "top_k": 3, "ffn_size": 32, "num_shared_experts": 1}
    one = {
        h.name: h.num_bytes
        for h in held(plan(model={"moe": moe}))
        if h.lifetime in (Lifetime.TO_INPUT, Lifetime.TO_WEIGHT)
    }
    assert one["mlp.router"] == 2 * 64 * SEQ
    assert one["mlp.scores"] == 4 * 8 * SEQ
    assert one["mlp.experts.gate_up"] == one["mlp.unpermute"] == 3 * 2 * 64 * SEQ
    assert one["mlp.experts.swiglu"] == 2 * one["mlp.experts.down"] == 3 * 2 * 2 * 32 * SEQ
    assert one["mlp.shared.swiglu"] == 2 * one["mlp.shared.down"] == 2 * 2 * 32 * SEQ
    assert "mlp.shared.gate_up" not in one  # its input is the router's


def test_the_head_keeps_float32_logits_and_has_their_gradient_while_i_runs():
    spec = plan(model={"vocab_size": 1000}, tp=2)
    loss = [one for one in held(spec, ("head",)) if one.is_logits]
    logits = 4 * 500 * SEQ * ROWS
    assert {one.lifetime: one.num_bytes for one in loss} == {
        Lifetime.TO_INPUT: logits + 8 * SEQ,
        Lifetime.IN_INPUT: logits,
    }


@pytest.mark.parametrize(
    ("dtype", "optimizer", "size"),
    [("float32", "adamw", 8), ("bfloat16", "adamw", 12), ("float64", "adamw", 16), ("float32", "sgd", 0),
     ("bfloat16", "sgd", 4)],
)  # fmt: skip
def test_optimizer_states(dtype, optimizer, size):
    assert optimizer_bytes(plan(dtype=dtype, run={"optimizer": optimizer})) == size


def test_states_and_what_a_step_moves_of_them():
    """16-bit weights: 16 bytes a parameter in section 3 of arXiv:1910.02054; here gradients add 2, being float32."""
    spec = plan(topology={"dp": 4}, memory={"shard_optimizer": "dp"})
    alone = plan(topology={"dp": 4})
    layers = describe_gpt(spec)
    numel = sum(64 * n for n in (32, 32)) + 2 * (4 * 64 * 64 + 3 * 64 * 256 + 2 * 64) + 64
    state = state_of(alone, layers)
    assert (state.parameters, state.gradients, state.optimizer) == (2 * numel, 4 * numel, 12 * numel)
    assert state_of(spec, layers).optimizer == 3 * numel
    assert moved_by_update(state) == (2 * 2 + 4 + 2 * 12) * numel
    assert moved_by_update(state_of(spec, layers)) == Fraction((2 * 2 + 4 + 2 * 12) * numel, 4)


def test_all_ranks_that_hold_a_weight_share_its_state():
    """Megatron-LM's distributed optimizer: dp x cp of experts, dp x cp x ep of all others."""
    moe = {"num_experts": 8, "top_k": 2, "ffn_size": 32}
    topology = {"dp": 4, "cp": 2, "ep": 4}
    spec, over_dp = (
        plan(model={"moe": moe}, topology=topology, memory={"shard_optimizer": "dp", "optimizer_ranks": ranks})
        for ranks in ("replicas", "dp")
    )
    layers = describe_gpt(spec)
    experts, whole = 2 * 8 * 3 * 64 * 32 // 4, state_of(spec, layers).parameters // 2
    others = whole - experts
    assert state_of(over_dp, layers).optimizer == 12 * (experts + others) // 4
    assert state_of(spec, layers).optimizer == 12 * (experts // (4 * 2) + others // (4 * 2 * 4))
    moved = moved_by_update(state_of(spec, layers))
    assert moved == (2 * 2 + 4 + 2 * 12) * (Fraction(experts, 4 * 2) + Fraction(others, 4 * 2 * 4))
    one = plan(model={"moe": moe}, topology=topology, memory={"optimizer_ranks": "replicas"})
    assert state_of(one, layers).optimizer == 12 * whole


def test_experts_are_sharded_over_ep():
    moe = {"num_experts": 8, "top_k": 2, "ffn_size": 32}
    one, four = (state_of(spec, describe_gpt(spec)) for spec in (
        plan(model={"moe": moe}, topology={"ep": ep}) for ep in (1, 4)
    ))  # fmt: skip
    experts = 2 * 8 * 3 * 64 * 32
    assert one.parameters - four.parameters == 2 * (experts - experts // 4)


def test_what_a_stage_is_given_is_what_its_first_layer_keeps():
    layers = {layer.name: layer for layer in describe_gpt(plan())}
    assert input_lifetime(plan(), [layers["layer.0"]]) is Lifetime.TO_WEIGHT
    assert input_lifetime(plan(), [layers["head"]]) is Lifetime.TO_WEIGHT
    assert not input_lifetime(plan(tp=2, sp=True), [layers["head"]])  # it gathers, and keeps that
    assert input_lifetime(plan(tp=2, sp=True, memory={"sequence_parallel_activations": "regather"}), [layers["head"]])
    assert not input_lifetime(plan(), [])
