"""Sections of plans that are refused, each with the code and a part of the message or help of its one finding."""

import pytest

from tests.features import FEATURES
from tests.plans import plan_dict, refusal

NETWORK = {
    "ranks_per_node": 2,
    "node": {"bandwidth": 1, "latency_us": 1},
    "between": {"bandwidth": 0.1, "latency_us": 5},
    "launch_us": 2,
}
MOE = {"num_experts": 8, "top_k": 2, "ffn_size": 8}
MLA = {"kv_rank": 4, "nope_head_size": 2, "rope_head_size": 2, "value_head_size": 4}
HIDDEN = {"name": "hidden", "dims": "sbh"}
CUSTOM = {"kind": "custom", "programs": [["0F0"], ["1F0"]]}
FILE = {"kind": "file", "path": "s.csv"}
GPU = {"backend": "torch", "device": "gpu", "replay": True}
SIXTEEN = {**GPU, "dtype": "bfloat16"}


def compressed(**changes):
    section = FEATURES["compressed attention"]["model"]["compressed_attention"]
    return {"compressed_attention": {**section, **changes}}


REFUSED = [
    # a data sheet's times
    ({"cost": {"analytic": "h20"}}, "PP106", "did you mean `h200`?"),
    ({"cost": {"analytic": {"device": "H-200"}}}, "PP106", "did you mean `h200`?"),
    ({"cost": {"analytic": {"device": "h200", "dtipe": "float32"}}}, "PP102", "did you mean `dtype`?"),
    ({"cost": {"analytic": {"dtype": "float32"}}}, "PP104", "cost.analytic.device"),
    ({"cost": {"analytic": {"device": "h200", "matmul_efficiency": 1.5}}}, "PP106", "at most 1"),
    ({"cost": {"analytic": 3}}, "PP105", "a mapping of keys"),
    ({"cost": {"analytic": "h200", "forward_us": 100}}, "PP106", "remove forward_us"),
    ({"cost": {"analytic": "h200", "p2p_latency_us": 1}}, "PP106", "remove p2p_latency_us"),
    ({"cost": {"analytic": "h200"}, "run": {"dtype": "float64"}}, "PP106", "add `dtype: bfloat16`"),
    *(
        ({"cost": {"bucket_size": value}}, "PP106", "`cost.bucket_size`: must be an integer from 1 to 10")
        for value in (0, True, 1.5, "stages", [1])
    ),
    # a network
    ({"cost": {"network": {}}}, "PP104", "ranks_per_node` and `cost.network.node"),
    ({"cost": {"network": {"ranks_per_node": 1, "node": {"bandwidth": 1}}}}, "PP104", "`cost.network.between`"),
    ({"cost": {"network": {"ranks_per_node": 1, "node": {}}}}, "PP104", "cost.network.node.bandwidth"),
    ({"cost": {"network": NETWORK, "p2p_latency_us": 0}}, "PP106", "remove p2p_latency_us"),
    ({"cost": {"network": {**NETWORK, "ranks_per_node": 3, "ranks_per_nic": 2}}}, "PP106", "does not divide"),
    ({"cost": {"network": {**NETWORK, "algorithm": "rings"}}}, "PP106", "did you mean `ring`?"),
    ({"cost": {"network": {"launch_us": 3}, "analytic": "h200"}}, "PP106", "set cost.analytic.launch_us"),
    ({"cost": {"network": {"ranks_per_nic": 2}, "profile": "x.json"}}, "PP106", "which measured"),
    # receives
    ({"cost": {"recv_slowdown": -0.1}}, "PP106", "must be from 0 to 1"),
    ({"cost": {"recv_slowdown": 1.5}}, "PP106", "found number 1.5"),
    ({"cost": {"recv_slowdown": "9/8"}}, "PP106", "must be from 0 to 1"),
    ({"cost": {"recv_slowdown": "1/1000000000001"}}, "PP106", "not finer than 1/1000000000000"),
    ({"cost": {"recv_slowdown": "a tenth"}}, "PP105", "must be a share from 0 to 1"),
    ({"cost": {"recv_slowdown": float("nan")}}, "PP105", "must be a share"),
    ({"cost": {"recv_slowdown": True}}, "PP105", "found boolean true"),
    ({"cost": {"recv_slowdown": [0.1]}}, "PP105", "must be a share"),
    ({"transport": {"recv_order": "one_head"}}, "PP106", "prefetch_one"),
    # parts of a model
    ({"model": {"num_kv_heads": 3}}, "PP108", "set model.num_kv_heads to 2 or 4"),
    ({"model": {"head_size": 5}}, "PP108", "model.head_size 5 is odd"),
    ({"model": {"num_kv_heads": 2}, "topology": {"tp": 4}},
     "PP108", "set model.num_kv_heads to 4, or topology.tp to 2"),
    ({"model": {"mla": MLA, "head_size": 4}}, "PP106", "remove head_size"),
    ({"model": {"mla": MLA, "num_kv_heads": 4}}, "PP106", "remove num_kv_heads"),
    ({"model": {"mla": {**MLA, "rope_head_size": 3}}}, "PP108", "set it to 2 or 4"),
    ({"model": compressed(q_lora_rank=0)}, "PP106", "q_lora_rank` must be at least 1"),
    ({"model": compressed(layer_types=["sliding"])}, "PP106", "layer_types[0]"),
    ({"model": compressed(layer_types=[])}, "PP106", "has 0 entries"),
    ({"model": compressed(layer_types=["sliding_attention"] * 5)}, "PP106", "give 1 to 4"),
    ({"model": compressed(qk_rope_head_dim=3)}, "PP108", "set it to an even number up to 4"),
    ({"model": compressed(qk_rope_head_dim=6)}, "PP108", "whose size is 4"),
    ({"model": compressed(o_groups=3)}, "PP108", "set o_groups to 2 or 4"),
    ({"model": compressed(), "topology": {"tp": 4}}, "PP108", "set model.compressed_attention.o_groups to 4"),
    ({"model": compressed(compress_rates={"heavily_compressed_attention": 9})}, "PP108", "makes no entry"),
    ({"model": compressed(documents=[5, 2])}, "PP108", "give documents of 8 tokens together"),
    ({"model": compressed(documents=[2, 2, 2, 2])}, "PP108", "set it to 3 at least"),
    ({"model": compressed(documents=[])}, "PP106", "documents"),
    ({"model": compressed(rope_scaling={"factor": 2.0, "original_max_position_embeddings": 64, "beta_slow": 32})},
     "PP106", "exchange the two"),
    ({"model": compressed(), "topology": {"cp": 2}}, "PP106", "need the tokens before them"),
    ({"model": {**compressed(), "num_kv_heads": 2}}, "PP106", "remove num_kv_heads"),
    ({"model": {**compressed(), "mla": MLA}}, "PP106", "remove mla"),
    ({"model": {**compressed(), "dropout": 0.1}}, "PP106", "set its `attention` to 0"),
    ({"model": {"moe": {**MOE, "top_k": 9}}}, "PP106", "set model.moe.top_k to at most 8"),
    ({"model": {"moe": {**MOE, "dense_layers": 4}}}, "PP106", "leaves none of 4 blocks for experts"),
    ({"model": {"moe": {**MOE, "dense_layers": 1, "hash_layers": 4}}}, "PP106", "set it to at most 3"),
    ({"model": {"moe": {**MOE, "hash_layers": 1, "dispatcher": "all_gather"}}},
     "PP106", "use `dispatcher: all_to_all`"),
    ({"model": {"swiglu_formula": "silu"}}, "PP106", "`swiglu_limit` is not given"),
    ({"model": {"moe": {**MOE, "topk": 2}}}, "PP102", "did you mean `top_k`?"),
    ({"model": {"moe": {**MOE, "ffn_size": 9}}, "topology": {"tp": 2}},
     "PP108", "model.moe.ffn_size 9 does not divide by topology.tp 2"),
    ({"model": {"moe": {**MOE, "num_experts": 9}}, "topology": {"tp": 2, "experts_over_tp": True}},
     "PP108", "set model.moe.num_experts to 8 or 10, or topology.tp to 1 or 3"),
    ({"model": {"moe": MOE}, "topology": {"tp": 2, "ep": 2, "experts_over_tp": True}},
     "PP106", "set topology.ep to 1 and topology.dp to 2"),
    ({"model": {"moe": {**MOE, "top_k": 1}}, "topology": {"ep": 8, "cp": 2}},
     "PP108", "set model.seq_length to a multiple of 16"),
    # experts
    ({"model": {"moe": {**MOE, "aux_loss": -0.1}}}, "PP106", "aux_loss"),
    ({"model": {"moe": {**MOE, "z_loss": float("inf")}}}, "PP106", "z_loss"),
    ({"model": {"moe": {**MOE, "aux_loss": "0.01"}}}, "PP105", "aux_loss"),
    ({"model": {"moe": {**MOE, "expert_bias_rate": 0.0}}}, "PP106", "expert_bias_rate"),
    ({"model": {"moe": {**MOE, "expert_bias_rate": True}}}, "PP105", "expert_bias_rate"),
    ({"model": {"moe": {**MOE, "aux_los": 0.1}}}, "PP102", "aux_los"),
    ({"model": {"moe": {**MOE, "nodes_per_token": 0}}}, "PP106", "nodes_per_token"),
    ({"model": {"moe": {**MOE, "dispatch_dtype": "bfloat16"}}}, "PP106", "dispatch_dtype"),
    # streams, modules and dropout
    ({"model": {"hyper_connections": {"streams": 1}}}, "PP106", "model.hyper_connections.streams"),
    ({"model": {"hyper_connections": {}}}, "PP104", "model.hyper_connections.streams"),
    ({"model": {"hyper_connections": {"streams": 2, "sinkhorn_iterations": 0}}},
     "PP106", "model.hyper_connections.sinkhorn_iterations"),
    ({"model": {"hyper_connections": {"streams": 2, "iterations": 3}}}, "PP102", "`iterations`"),
    ({"model": {"hyper_connections": {"streams": "2"}}}, "PP105", "model.hyper_connections.streams"),
    ({"model": {"mtp": {"num_modules": 8}}},
     "PP108", "set model.seq_length to 9 at least, or model.mtp.num_modules to at"),
    ({"model": {"mtp": {"num_modules": 2}}, "schedule": {"seq_lengths": [8, 2, 8, 8]}},
     "PP108", "schedule.seq_lengths[1] is 2"),
    ({"model": {"mtp": {"num_modules": 1}, "hyper_connections": {"streams": 2}}},
     "PP106", "set model.mtp.magic_send to true"),
    ({"model": {"mtp": {"num_modules": 1, "magic_send": True, "embedding": "own"}}}, "PP106", "remove magic_send"),
    ({"model": {"mtp": {"num_modules": 1, "magic_send": True, "reads": "streams"}}},
     "PP106", "a learned contraction"),
    ({"model": {"mtp": {"num_modules": 2, "magic_send": True, "reads": "streams"},
                "hyper_connections": {"streams": 2, "contraction": "learned"}}}, "PP106", "which needs one module"),
    ({"model": {"mtp": {}}}, "PP104", "num_modules"),
    ({"model": {"mtp": {"num_modules": 1, "loss_weight": 0.0}}}, "PP106", "loss_weight"),
    ({"model": {"dropout": 1}}, "PP106", "`model.dropout` is a share of at least 0 and less than 1, found 1"),
    ({"model": {"dropout": -0.1}}, "PP106", "`model.dropout` is a share of at least 0 and less than 1, found -0.1"),
    ({"model": {"dropout": {"hidden": 1.5}}},
     "PP106", "`model.dropout.hidden` must be less than 1.0, found number 1.5"),
    ({"model": {"dropout": True}}, "PP105", "`model.dropout` must be a mapping of keys, found boolean true"),
    ({"model": {"swiglu_limit": 0}}, "PP106", "`model.swiglu_limit` must be more than 0.0, found integer 0"),
    # stages and boundaries
    ({"stages": "layers"},
     "PP106", '`stages` must be a list of stages, `uniform` or `layer:REGEX`, found string "layers"'),
    ({"stages": 2}, "PP105", "`stages` must be a list of stages, `uniform` or `layer:REGEX`, found integer 2"),
    ({"stages": "layer:"}, "PP106", "`stages: layer:` names no class of layers"),
    ({"stages": "layer:("}, "PP106", "missing )"),
    ({"stages": "layer:(?:a)"}, "PP106", "the pattern of `stages` has a colon"),
    ({"stages": ["embed", []]}, "PP105", '`stages[0]` must be a list of layers, found string "embed"'),
    ({"stages": [["embed", 3], []]}, "PP105", "`stages[0][1]` must be a string, found integer 3"),
    ({"stages": [[""], []]}, "PP106", "`stages[0][0]` must be the name of a layer"),
    ({"stages": "uniform", "schedule": {"kind": "interleaved", "num_chunks": 2}}, "PP106", "schedule.num_chunks 2"),
    ({"model": {"empty_layers": {"tail": -1}}}, "PP106", "`model.empty_layers.tail` must be at least 0"),
    ({"model": {"final_norm": "before_tail"}}, "PP106", "did you mean `before_tail_empty`"),
    ({"boundaries": [{**HIDDEN, "dims": "ssb"}]}, "PP106", " letter"),
    ({"boundaries": [{**HIDDEN, "dims": "sbH"}]}, "PP106", " letter"),
    ({"boundaries": [{"name": "x", "dims": "sq"}]}, "PP104", "sizes of the dims q of `x` are not known"),
    ({"boundaries": [{**HIDDEN, "shape": [1, 2]}]}, "PP109", "`shape` has 2 sizes, and `dims` names 3 dims"),
    ({"boundaries": [{**HIDDEN, "tp": "sharded(q)"}]}, "PP106", "must be invariant, replicated, sharded(s)"),
    ({"boundaries": [{**HIDDEN, "receiver_tp": "invarient"}]}, "PP106", 'found string "invarient"'),
    ({"boundaries": [{**HIDDEN, "dtype": "int64", "gradient": True}]}, "PP106", "int64, which has no gradient"),
    ({"boundaries": [{**HIDDEN, "edge": 1}]}, "PP106", "lies between stages 1 and 2, and the plan has 2 stages"),
    ({"boundaries": [HIDDEN, HIDDEN]}, "PP106", "crosses the same edge as entry 0"),
    ({"boundaries": [{**HIDDEN, "edge": 0}, HIDDEN]}, "PP106", "crosses the same edge as entry 0"),
    ({"boundaries": [HIDDEN, {**HIDDEN, "edge": 0}]}, "PP106", "crosses the same edge as entry 0"),
    ({"topology": {"pp": 2, "tp": 4}, "boundaries": [{**HIDDEN, "tp": "sharded(b)"}]},
     "PP108", "dim b of `hidden` has 2 elements, which do not divide by topology.tp 4"),
    ({"topology": {"pp": 2, "tp": 2}, "boundaries": [{**HIDDEN, "receiver_tp": "replicated"}]},
     "PP106", "addend on each rank"),
    ({"schedule": {"seq_lengths": [8, 8]}}, "PP109", "has 2 entries, and schedule.num_micro_batches is 4"),
    ({"schedule": {"seq_lengths": [8, 8, 8, 9]}}, "PP106", "micro-batch 3 has 9 tokens"),
    ({"schedule": {"last_micro_batch_size": 3}}, "PP106", "the last micro-batch has 3 sequences, more than"),
    ({"topology": {"pp": 2, "tp": 2, "cp": 2, "sequence_parallel": True}, "schedule": {"seq_lengths": [8, 8, 8, 6]}},
     "PP108", "schedule.seq_lengths[3] 6 does not divide by topology.cp 2 x topology.tp 2"),
    ({"topology": {"pp": 2, "cp": 3}}, "PP108", "model.seq_length 8 does not divide by topology.cp 3"),
    ({"boundaries": [{**HIDDEN, "nmae": 1}]}, "PP102", "has no key `nmae`"),
    ({"boundaries": [{"dims": "s"}]}, "PP104", "`boundaries[0].name` is missing"),
    # schedules of one's own
    ({"schedule": {"kind": "custom"}}, "PP104", "`schedule.programs` is missing"),
    ({"schedule": {"kind": "file"}}, "PP104", "`schedule.path` is missing"),
    ({"schedule": {"kind": "1f1b", "path": "s.csv"}}, "PP106", "`schedule.path` is given"),
    ({"schedule": CUSTOM | {"path": "s.csv"}}, "PP106", "`schedule.path` is given"),
    ({"schedule": FILE | {"programs": [["0F0"]]}}, "PP106", "`schedule.programs` is given"),
    ({"schedule": CUSTOM | {"format": "csv"}}, "PP106", "`schedule.format` is given"),
    ({"schedule": FILE | {"format": "cvs"}}, "PP106", "`schedule.format` must be auto, text, csv"),
    ({"schedule": FILE | {"placement": "zigzag"}}, "PP106", 'found string "zigzag"'),
    ({"schedule": FILE | {"placement": 2}}, "PP105", "must be loop, v or a list"),
    ({"schedule": FILE | {"placement": [0, [1]]}}, "PP105", "`schedule.placement[0]` must be a list of stages"),
    ({"schedule": FILE | {"placement": [[0], ["1"]]}}, "PP105", "`schedule.placement[1][0]` must be an integer"),
    ({"schedule": FILE | {"placement": [[0], [True]]}}, "PP105", "`schedule.placement[1][0]` must be an integer"),
    ({"schedule": FILE | {"placement": [[0], [-1]]}}, "PP106", "must be the number of a stage"),
    ({"schedule": FILE | {"placement": [[0], [2]]}}, "PP106", "lists stage 2, and stage 1 is missing"),
    ({"schedule": FILE | {"placement": [[0, 1], [1]]}}, "PP106", "stage 0 on 1 and stage 1 on 2 ranks"),
    ({"schedule": FILE | {"placement": [[0, 0], [1]]}}, "PP106", "pipeline rank 0 has one stage twice"),
    ({"schedule": FILE | {"placement": [[0, 1], []]}}, "PP106", "pipeline rank 1 has no stage"),
    ({"schedule": FILE | {"placement": [[0, 2], [1, 3]], "num_chunks": 2}},
     "PP106", "`schedule.num_chunks` is given together"),
    ({"schedule": FILE | {"placement": [[0], [1], [2]]}}, "PP109", "the stages of 3 ranks, and topology.pp is 2"),
    ({"schedule": CUSTOM | {"programs": []}}, "PP106", "`schedule.programs` is empty"),
    ({"schedule": CUSTOM | {"programs": "0F0"}}, "PP105", "`schedule.programs` must be a list"),
    ({"schedule": CUSTOM | {"programs": [["0F0"], [1]]}}, "PP105", "`schedule.programs[1][0]` must be a string"),
    # runs
    ({"run": {"dtype": "float64", "main_grad_dtype": "float32"}},
     "PP106", ("main_grad_dtype float32", "run.dtype float64")),
    ({"run": {"main_grad_dtype": "bfloat16"}}, "PP106", ("`run.main_grad_dtype`", 'found string "bfloat16"')),
    ({"run": {"main_grad_dtype": "float64"}, "memory": {"gradient_dtype": "bfloat16"}},
     "PP106", ("run.main_grad_dtype is float64", "memory.gradient_dtype", "bfloat16")),
    ({"run": {"clip_norm": 0}}, "PP106", "clip_norm"),
    ({"run": {"clip_norm": -1.0}}, "PP106", "clip_norm"),
    ({"run": {"clip_norm": float("inf")}}, "PP106", "clip_norm"),
    ({"run": {"clip_norm": float("nan")}}, "PP106", "clip_norm"),
    ({"run": {"clip_norm": "1"}}, "PP105", "clip_norm"),
    ({"run": {"backend": "torch", "replay": True}}, "PP106", ("run.device is cpu", "remove")),
    ({"run": GPU, "model": {"moe": MOE}}, "PP106", ("model.moe", "remove")),
    ({"run": GPU, "model": {"dropout": 0.1}}, "PP106", ("model.dropout", "remove")),
    ({"run": {**SIXTEEN, "main_grad_dtype": "float32"}, "model": {"moe": MOE}}, "PP106", ("model.moe", "remove")),
    ({"run": SIXTEEN, "model": {"moe": {**MOE, "ffn_size": 12}}}, "PP106", ("model.moe", "remove")),
    ({"run": SIXTEEN, "model": {"moe": MOE}, "topology": {"ep": 2}}, "PP106", ("model.moe", "remove")),
    ({"run": GPU, "buffers": {"free_output": "after_send_done"}}, "PP106", ("buffers.free_output", "remove")),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "code", "words"), REFUSED)
def test_a_plan_with_it_is_refused(sections, code, words):
    finding = refusal(plan_dict(**sections))
    assert finding.code == code
    for text in (words,) if isinstance(words, str) else words:
        assert text in f"{finding.message} {finding.help}"
