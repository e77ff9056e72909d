"""Parts of models, placements, schedules and memory on all ranks: the bits of the ordered reference in every step.

Each plan mixes several parts. Where a plan adds in the order of the unpartitioned model, its bits are that model's too;
elsewhere they are within the bound. Logs equal the graph. ``test_mixed`` draws more of such plans.
"""

import pytest

from pipeproof.diagnostics.finding import Severity
from pipeproof.exec.compare.compare_gradients import needs_ordered_reference
from pipeproof.exec.rank.executor_support import require_executable
from pipeproof.verify.check_plan import check_subject
from tests.features import FEATURES, GPT3, QWEN3
from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

GROUPS = {"num_kv_heads": 2, "head_size": 6}
"""Two query heads to a head of keys and values; 24 elements of queries where the hidden size is 16."""
MOE = {"num_experts": 12, "top_k": 3, "ffn_size": 8, "num_shared_experts": 1, "dense_layers": 1}
"""More than ten: the order of numbers differs from the order of their texts. The first stage has a dense block and one
with experts."""
MLA = {"q_rank": 6, "kv_rank": 4, "nope_head_size": 2, "rope_head_size": 4, "value_head_size": 3}
PLAIN = {**MLA, "q_rank": None}
BIAS_RATE = {"expert_bias_rate": 0.003}
BIAS = {**BIAS_RATE, "score": "sigmoid"}
EVEN = {"moe": {**MOE, "aux_loss": 0.1, "z_loss": 0.01, **BIAS}}
BY_TOKEN = {
    "moe": {**MOE, "score": "sqrtsoftplus", "hash_layers": 2, "routed_scale": 1.5, "aux_loss": 0.1, **BIAS_RATE},
    "swiglu_limit": 0.05, "swiglu_formula": "silu",
}  # fmt: skip
GATHERED = {"moe": {**MOE, "dispatcher": "all_gather"}}
STREAMS = {"hyper_connections": {"streams": 3, "sinkhorn_iterations": 3}}
STREAMS_V4 = {
    "hyper_connections": {
        **STREAMS["hyper_connections"], "sinkhorn": "softmax", "epsilon": 1e-6, "transposed": True,
        "contraction": "learned",
    }
}  # fmt: skip
AHEAD = {"mtp": {"num_modules": 2, "loss_weight": 0.4}}
NORMED_AHEAD = {"mtp": {**AHEAD["mtp"], "reads": "after_norm"}}
AHEAD_TIED = {"mtp": {**AHEAD["mtp"], "magic_send": True}, "tied_embedding": True}
TIED = {"tied_embedding": True}
DROPOUT = {"dropout": {"embedding": 0.1, "attention": 0.2, "hidden": 0.3}}
LIMIT = {"swiglu_limit": 0.05}
BATCH_FIRST = {"activation_order": "bsh"}

SP = {"tp": 2, "sequence_parallel": True}
ZB, V, DUAL = {"kind": "zb_h1"}, {"kind": "zb_v", "num_chunks": 2}, {"kind": "dualpipe"}
CHUNKS, PIECES = {"kind": "interleaved", "num_chunks": 2}, {"kind": "seq1f1b", "num_sequence_splits": 2}
SIZES = {"last_micro_batch_size": 1, "seq_lengths": [8, 4, 8, 6]}
FULL, SELECTIVE = {"memory": {"recompute": "full"}}, {"memory": {"recompute": "selective"}}
REGATHER = {"memory": {"sequence_parallel_activations": "regather"}}
PARTIAL = {"transport": {"forward": "partial", "backward": "partial"}}
SLOTS = {"buffers": {"receive_slots": 4, "free_output": "after_send_done"}}
CLIPPED = {"run": {"clip_norm": 0.05}}
WIDE = {"run": {"main_grad_dtype": "float64", "clip_norm": 0.05}}
OWN_STAGES = {"stages": [["embed", "layer.0"], ["layer.1", "mtp.0"], ["mtp.1", "norm", "head"]]}
NORM_BEFORE = {"empty_layers": {"head": 1, "tail": 3}, "final_norm": "before_tail_empty"}

COMPRESSED = FEATURES["compressed attention"]["model"]

PLANS = {
    "float64, sgd, batch first": ({}, {}, BATCH_FIRST, {"run": {"dtype": "float64", "optimizer": "sgd"}}),
    "float64, sp, mean of micro-batches": (
        SP, {}, {}, {"run": {"dtype": "float64"}, "loss": {"normalization": "mean_of_micro_batches"}},
    ),
    "groups, sp, split backward": (SP, ZB, GROUPS, {}),
    "one head of keys, batch first": ({}, {}, {"num_kv_heads": 1, **BATCH_FIRST}, {}),
    "experts, sequence splits": ({}, PIECES, {"moe": MOE}, {}),
    "ep, groups": ({"ep": 2}, {}, {"moe": MOE, **GROUPS}, {}),
    "ep, sizes of micro-batches": ({"ep": 2}, SIZES, {"moe": MOE}, {}),
    "ep without experts": ({"ep": 2, "dp": 2}, {}, {}, {}),
    "experts by all-gather": ({"ep": 2}, {}, {**GATHERED, **GROUPS}, {}),
    "ep, experts by token id": ({"ep": 2}, {}, BY_TOKEN, {}),
    "experts by token id, rank with both ends, again": ({}, V, {**BY_TOKEN, "num_layers": 4, **BATCH_FIRST}, FULL),
    "experts by token id, sp, sequence splits": (SP, PIECES, BY_TOKEN, {}),
    "experts over tp": ({"tp": 2, "experts_over_tp": True}, ZB, {"moe": MOE, **BATCH_FIRST}, {}),
    "even experts over tp, sp, dp, again": ({**SP, "dp": 2, "experts_over_tp": True}, {}, EVEN, FULL),
    "experts by token id over tp, sp, sequence splits": ({**SP, "experts_over_tp": True}, PIECES, BY_TOKEN, {}),
    "latent": ({}, {}, {"mla": MLA}, {}),
    "latent, sp, split backward": (SP, ZB, {"mla": MLA}, {}),
    "latent, plain queries": ({}, ZB, {"mla": PLAIN, **BATCH_FIRST}, {}),
    "compressed": ({}, {}, COMPRESSED, {}),
    "compressed, tp": ({"tp": 2}, ZB, {**COMPRESSED, **BATCH_FIRST}, {}),
    "compressed, sp, experts": (SP, {}, {**COMPRESSED, "moe": MOE}, REGATHER),
    "compressed, again, ahead": ({"tp": 2}, {}, {**COMPRESSED, **AHEAD}, FULL),
    "compressed, selective, streams": (SP, SIZES, {**COMPRESSED, **STREAMS}, SELECTIVE),
    "Qwen3": ({}, ZB, QWEN3, {}),
    "GPT-3, untied": ({}, ZB, {**GPT3, "tied_embedding": False}, {}),
    "GPT-3, sp, cp": ({**SP, "cp": 2}, {}, {**GPT3, **BATCH_FIRST}, {}),
    "LayerNorm of heads, sequence splits": (SP, PIECES, {**GPT3, **QWEN3}, {}),
    "even experts": ({}, V, {**EVEN, "num_layers": 4}, {}),
    "even experts, tp": ({"tp": 2}, {}, EVEN, {}),
    "even experts, pieces, wide sums": ({}, PIECES, EVEN, WIDE),
    "cp 4, batch first": ({"cp": 4}, ZB, BATCH_FIRST, {}),
    "cp, copies of stages": ({"cp": 2}, DUAL, {}, {}),
    "cp, tied, clipped": ({"cp": 2}, {}, TIED, CLIPPED),
    "cp, core of attention again": (
        {"cp": 2}, {}, {}, {**SELECTIVE, "loss": {"normalization": "mean_of_micro_batches"}},
    ),
    "cp, modules ahead, again": ({"cp": 2}, {}, AHEAD, FULL),
    "cp, sp, dropout, groups": ({**SP, "cp": 2}, {}, {**DROPOUT, **GROUPS}, {}),
    "tied, one rank, clipped": ({"pp": 1}, {"kind": "gpipe"}, TIED, CLIPPED),
    "tied, four stages, clipped": ({"pp": 4}, {}, {**TIED, "num_layers": 4}, CLIPPED),
    "tied, tp": ({"tp": 2}, {}, TIED, {}),
    "tied, splits": ({}, PIECES, TIED, {}),
    "sp, dp, clipped": ({**SP, "dp": 2}, ZB, {}, CLIPPED),
    "copies, tp, tied, clipped": ({"tp": 2}, DUAL, TIED, CLIPPED),
    "streams, chunks": ({}, CHUNKS, {**STREAMS, "num_layers": 4}, {}),
    "streams, slices": ({"tp": 2}, {}, STREAMS, PARTIAL),
    "streams, copies of stages": ({"dp": 2}, DUAL, STREAMS, {}),
    "streams, latent, tied, clipped": (SP, {}, {**STREAMS, "mla": MLA, **TIED}, CLIPPED),
    "streams, dropout, limit, wide sums": (SP, ZB, {**STREAMS, "dropout": 0.1, **LIMIT}, WIDE),
    "streams of DeepSeek-V4, split backward": (SP, ZB, STREAMS_V4, {}),
    "streams of DeepSeek-V4, ahead, rank with both ends": (
        {}, V, {**STREAMS_V4, "mtp": AHEAD_TIED["mtp"], "num_layers": 4, **BATCH_FIRST}, FULL,
    ),
    "streams of DeepSeek-V4, ahead, ep, experts by token id": (
        {"ep": 2}, {}, {**STREAMS_V4, **AHEAD_TIED, **BY_TOKEN}, {},
    ),
    "ahead, behind the norm": ({"tp": 2}, ZB, NORMED_AHEAD, {}),
    "ahead, behind the norm, sp, sequence splits, norm before empty layers": (
        {**SP, "pp": 3}, PIECES, {**NORMED_AHEAD, **NORM_BEFORE}, {},
    ),
    "ahead, own embeddings, behind the norm, rank with both ends": (
        {}, V, {"mtp": {**NORMED_AHEAD["mtp"], "embedding": "own"}, "num_layers": 4}, FULL,
    ),
    "ahead, own embeddings, ep, sp": ({**SP, "ep": 2}, {}, {"mtp": {**AHEAD["mtp"], "embedding": "own"}}, {}),
    "ahead, slices": ({"tp": 2}, {}, AHEAD, PARTIAL),
    "ahead, stages of their own": ({"pp": 3}, {}, {**AHEAD, "num_layers": 2}, OWN_STAGES),
    "ahead, a rank with both ends": ({}, V, {**AHEAD, "num_layers": 4}, {}),
    "ahead, embedded again, copies of stages": ({}, DUAL, AHEAD_TIED, {}),
    "ahead, embedded again, sequence splits": (SP, PIECES, AHEAD_TIED, {}),
    "ahead, embedded again, dropout": ({"tp": 2}, {}, {**AHEAD_TIED, "dropout": 0.1}, {}),
    "ahead, embedded again, norm before empty layers": ({"pp": 3}, {}, {**AHEAD_TIED, **NORM_BEFORE}, {}),
    "dropout, sp, batch first": (SP, ZB, {**DROPOUT, **BATCH_FIRST}, {}),
    "dropout, sequence splits, again": ({}, PIECES, DROPOUT, FULL),
    "dropout, latent, selective": ({"tp": 2}, {}, {**DROPOUT, "mla": MLA}, SELECTIVE),
    "selective, sequence splits": (
        {}, {"kind": "seq1f1b", "num_sequence_splits": 4, "seq_lengths": [8, 4, 8, 4]}, {}, SELECTIVE,
    ),
    "again, groups, sp": (SP, ZB, GROUPS, FULL),
    "again, latent, experts, tp": ({"tp": 2}, {}, {"mla": MLA, "moe": MOE}, FULL),
    "again in slots": ({}, ZB, {}, {**FULL, **SLOTS}),
    "recomputed MLPs": (SP, ZB, GROUPS, {"memory": {"recompute": "selective", "recompute_modules": ["mlp"]}}),
    "recomputed experts": (
        {"tp": 2}, {}, {"mla": MLA, "moe": MOE},
        {"memory": {"recompute": "selective", "recompute_modules": ["mlp", "moe", "shared_experts"]}},
    ),
    "regathered, sizes of micro-batches": (SP, SIZES, {}, REGATHER),
    "regathered, groups, tied": (SP, ZB, {**GROUPS, **TIED}, REGATHER),
    "regathered, latent, batch first": (SP, ZB, {"mla": MLA, **BATCH_FIRST}, REGATHER),
    "v, clipped": ({}, V, {"num_layers": 4}, CLIPPED),
    "parts of GPT-3 and Qwen3, again": ({}, ZB, {**GPT3, **QWEN3}, FULL),
    "parts of GPT-3 and Qwen3, regathered": (SP, ZB, {**GPT3, **QWEN3}, REGATHER),
    "wide sums, dp": ({"dp": 2}, ZB, {}, WIDE),
    "wide sums, sequence splits": (SP, PIECES, GROUPS, WIDE),
}  # fmt: skip


def lowered(topology, schedule, model, sections=(), *, steps=2):
    """The lowered plan, which passes check."""
    sections = dict(sections)
    run = {"steps": steps, "seed": 3, **sections.pop("run", {})}
    one = subject(
        model={"num_layers": 3, **model}, topology=topology, schedule=schedule, run=run, **sections
    ).unfolded()
    assert [finding for finding in check_subject(one).findings if finding.severity is Severity.ERROR] == []
    require_executable(one)
    return one.plan


def require_bits(plan):
    """The steps; losses and gradients have the bits of the reference, and logs equal the graph."""
    from pipeproof.stages.reference.bound import parallel_bound
    from tests.exec.in_memory import compared

    steps = compared(plan)
    assert len(steps) == plan.spec.run.steps
    assert all(step.bitwise for step in steps), [step.routers for step in steps]
    difference = max(one.unpartitioned_max_rel_diff for one in steps[0].gradients)
    assert difference <= parallel_bound(plan.spec)
    assert difference == 0 or needs_ordered_reference(plan)
    return steps


@pytest.mark.parametrize("name", PLANS)
def test_all_ranks_have_the_bits_of_the_reference(name):
    require_bits(lowered(*PLANS[name]))


TWENTY = {
    "1f1b": ({}, {}, {"seq_length": 4}, {}),
    "chunks, tied, experts": ({}, CHUNKS, {"num_layers": 4, "seq_length": 4, **TIED, "moe": MOE}, {}),
    "selective, dropout": ({}, {}, DROPOUT, SELECTIVE),
    "again, dropout": ({}, {}, DROPOUT, FULL),
    "experts, wide sums, limit": ({}, ZB, {"moe": MOE, **LIMIT}, WIDE),
    "cp": ({"cp": 2}, {}, {}, {}),
    "even experts": ({}, {"kind": "zb_v", "num_chunks": 2}, {"num_layers": 4, **EVEN}, {}),
    "even experts, data ranks": ({"pp": 1, "ep": 2}, {}, EVEN, {}),
    "ahead, split backward": ({}, ZB, {**AHEAD, "seq_length": 4}, {}),
    "streams on four stages": (
        {"pp": 4}, {}, {**STREAMS, "seq_length": 4},
        {"stages": [["embed"], ["layer.0"], ["layer.1"], ["norm", "head"]]},
    ),
}  # fmt: skip


@pytest.mark.slow(but=["1f1b", "again, dropout", "streams on four stages"])
@pytest.mark.parametrize("name", TWENTY)
def test_twenty_steps_of_adamw_keep_the_bits(name):
    topology, schedule, model, sections = TWENTY[name]
    sections = {**sections, "run": {**sections.get("run", {}), "optimizer": "adamw", "learning_rate": 0.01}}
    schedule = {"num_micro_batches": 2, **schedule}
    plan = lowered(topology, schedule, {"num_layers": 2, **model}, sections, steps=20)
    steps = require_bits(plan)
    assert len({step.loss.tobytes() for step in steps}) == 20
    if not needs_ordered_reference(plan):
        assert all(one.unpartitioned_max_rel_diff == 0 for step in steps for one in step.gradients)
