"""Parts of blocks on all ranks of a plan: bitwise the reference, near the unpartitioned model, and logged."""

import dataclasses

import pytest

from pipeproof.exec.compare.compare_log import compare_exchanges
from tests.features import GPT3, QWEN3
from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

GROUPS = {"num_kv_heads": 2, "head_size": 6}
"""Two query heads to a head of keys and values; 24 elements of queries where the hidden size is 16."""
MOE = {"num_experts": 12, "top_k": 3, "ffn_size": 8, "num_shared_experts": 1, "dense_layers": 1}
"""More than ten, so that numbers are not their texts' order; the first stage has a dense block and one with experts."""
MLA = {"q_rank": 6, "kv_rank": 4, "nope_head_size": 2, "rope_head_size": 4, "value_head_size": 3}
GATHERED = {"dispatcher": "all_gather"}
PLANS = {
    "groups": ({"tp": 2}, {}, GROUPS),
    "groups, sp, split backward": ({"tp": 2, "sequence_parallel": True}, {"kind": "zb_h1"}, GROUPS),
    "groups, sequence splits": ({"tp": 2}, {"kind": "seq1f1b", "num_sequence_splits": 2}, GROUPS),
    "one head of keys": ({}, {}, {"num_kv_heads": 1, "activation_order": "bsh"}),
    "experts": ({}, {"kind": "zb_h1"}, {"moe": MOE}),
    "experts, tp": ({"tp": 2}, {}, {"moe": MOE}),
    "experts, sp, dp": ({"tp": 2, "dp": 2, "sequence_parallel": True}, {"kind": "zb_h1"}, {"moe": MOE}),
    "experts, sequence splits": ({}, {"kind": "seq1f1b", "num_sequence_splits": 2}, {"moe": MOE}),
    "ep": ({"ep": 2}, {}, {"moe": MOE, **GROUPS}),
    "ep, dp, split backward": ({"ep": 2, "dp": 2}, {"kind": "zb_h1"}, {"moe": MOE, "activation_order": "bsh"}),
    "ep, sp": ({"ep": 2, "tp": 2, "sequence_parallel": True}, {}, {"moe": {**MOE, "score": "sigmoid"}}),
    "ep, copies of stages": ({"ep": 4}, {"kind": "dualpipe"}, {"moe": {**MOE, "normalize": False}}),
    "ep, sequence splits": ({"ep": 2}, {"kind": "seq1f1b", "num_sequence_splits": 2}, {"moe": MOE}),
    "gathered": ({"ep": 2}, {}, {"moe": {**MOE, **GATHERED}, **GROUPS}),
    "gathered, dp, split backward": (
        {"ep": 2, "dp": 2}, {"kind": "zb_h1"}, {"moe": {**MOE, **GATHERED}, "activation_order": "bsh"},
    ),
    "gathered, sp, losses": (
        {"ep": 2, "tp": 2, "sequence_parallel": True}, {},
        {"moe": {**MOE, **GATHERED, "score": "sigmoid", "aux_loss": 0.1, "expert_bias_rate": 0.01}},
    ),
    "gathered, copies of stages": ({"ep": 4}, {"kind": "dualpipe"}, {"moe": {**MOE, **GATHERED}}),
    "latent": ({}, {}, {"mla": MLA}),
    "latent, plain queries": ({}, {"kind": "zb_h1"}, {"mla": {**MLA, "q_rank": None}, "activation_order": "bsh"}),
    "latent, tp": ({"tp": 2}, {"kind": "seq1f1b", "num_sequence_splits": 2}, {"mla": MLA}),
    "latent, sp": ({"tp": 2, "sequence_parallel": True}, {"kind": "zb_h1"}, {"mla": MLA}),
    "latent, plain queries, sp": ({"tp": 2, "sequence_parallel": True}, {}, {"mla": {**MLA, "q_rank": None}}),
    "latent, experts, ep": ({"ep": 2}, {"kind": "dualpipe"}, {"mla": MLA, "moe": MOE}),
    "Qwen3": ({}, {"kind": "zb_h1"}, QWEN3),
    "Qwen3, sp, experts": ({"tp": 2, "ep": 2, "sequence_parallel": True}, {"kind": "zb_h1"}, {**QWEN3, "moe": MOE}),
    "Qwen3, cp": ({"tp": 2, "cp": 2}, {}, QWEN3),
    "GPT-3": ({}, {"kind": "zb_h1"}, {**GPT3, "tied_embedding": False}),
    "GPT-3, tp": ({"tp": 2}, {"kind": "zb_h1"}, {**GPT3, "dropout": 0.1}),
    "GPT-3, sp, cp": ({"tp": 2, "cp": 2, "sequence_parallel": True}, {}, {**GPT3, "activation_order": "bsh"}),
    "GPT-3, sizes of micro-batches": ({"dp": 2}, {"last_micro_batch_size": 1, "seq_lengths": [8, 4, 8, 6]}, GPT3),
    "LayerNorm of heads, sequence splits": (
        {"tp": 2, "sequence_parallel": True}, {"kind": "seq1f1b", "num_sequence_splits": 2}, {**GPT3, **QWEN3},
    ),
    "LayerNorm, latent": ({"tp": 2}, {}, {"mla": MLA, "norm": "layer", "mlp": "gelu_tanh"}),
    "LayerNorm, ahead": ({}, {"kind": "zb_h1"}, {"norm": "layer", "biases": "all", "mtp": {"num_modules": 2}}),
    "ep without experts": ({"ep": 2, "dp": 2}, {}, {}),
    "ep, sizes of micro-batches": ({"ep": 2}, {"last_micro_batch_size": 1, "seq_lengths": [8, 4, 8, 6]}, {"moe": MOE}),
}  # fmt: skip


WHOLE = {"one head of keys", "experts", "latent", "latent, plain queries", "Qwen3", "GPT-3", "LayerNorm, ahead"}
"""Placements that add in the order of the unpartitioned model."""


def lowered(topology, schedule, model, **sections):
    run, model = {"steps": 2, "seed": 3}, {"num_layers": 3, **model}
    return subject(model=model, topology=topology, schedule=schedule, run=run, **sections).unfolded().plan


@pytest.mark.slow(
    but=[
        "groups",
        "one head of keys",
        "experts",
        "experts, sequence splits",
        "ep",
        "latent",
        "latent, plain queries",
        "latent, sp",
        "ep without experts",
        "gathered",
        "gathered, sp, losses",
        "ep, sp",
        "groups, sp, split backward",
        "ep, sizes of micro-batches",
        "Qwen3",
        "GPT-3",
        "GPT-3, sp, cp",
        "LayerNorm of heads, sequence splits",
    ]
)
@pytest.mark.parametrize("name", PLANS)
def test_blocks_have_the_bits_of_the_reference(name):
    from pipeproof.stages.reference.bound import parallel_bound
    from tests.exec.in_memory import compared

    plan = lowered(*PLANS[name])
    first, second = compared(plan)
    assert first.bitwise
    assert second.bitwise
    difference = max(one.unpartitioned_max_rel_diff for one in first.gradients)
    assert difference <= parallel_bound(plan.spec)
    assert (difference > 0) == (name not in WHOLE)


def test_all_at_once_with_a_tied_head_and_a_clipped_norm():
    from tests.exec.in_memory import compared

    plan = subject(
        model={"num_layers": 2, "moe": MOE, **GROUPS, "tied_embedding": True},
        topology={"tp": 2, "ep": 2, "sequence_parallel": True},
        schedule={"kind": "zb_h1", "num_micro_batches": 3},
        run={"steps": 2, "seed": 3, "clip_norm": 0.05},
    )
    assert all(step.bitwise for step in compared(plan.unfolded().plan))


RECOMPUTED = {
    "full": ({}, {"memory": {"recompute": "full"}}),
    "selective": ({"cp": 2}, {"memory": {"recompute": "selective"}}),
    "regather": (
        {"tp": 2, "sequence_parallel": True}, {"memory": {"sequence_parallel_activations": "regather"}},
    ),
    "freed outputs": ({}, {"buffers": {"free_output": "after_send_done"}}),
}  # fmt: skip


@pytest.mark.parametrize("name", RECOMPUTED)
def test_norms_of_heads_biases_and_positions_with_less_memory(name):
    from tests.exec.in_memory import compared

    topology, sections = RECOMPUTED[name]
    plan = lowered(topology, {"kind": "zb_h1"}, {**GPT3, **QWEN3, "num_layers": 2}, **sections)
    assert all(step.bitwise for step in compared(plan))


TINY = {"moe": {**MOE, "num_experts": 4, "top_k": 1, "num_shared_experts": 0}, "seq_length": 2}


def test_a_rank_to_which_no_token_goes_and_one_from_which_none_leaves():
    """A micro-batch of two tokens for two ranks: some exchanges move nothing, and backwards work with them."""
    from tests.exec.in_memory import compared, run_all

    plan = lowered({"pp": 1, "ep": 2}, {"micro_batch_size": 1}, TINY)
    assert all(step.bitwise for step in compared(plan))
    _, adapters = run_all(plan)
    rows = [
        [sum(row[way] for row in entry.traffic) for way in (0, 1)] for a in adapters for entry in a.log if entry.traffic
    ]
    assert any(sent == 0 for sent, _ in rows)
    assert any(received == 0 for _, received in rows)
    assert any(received > 2 for _, received in rows)


def test_experts_of_another_rank_are_seen(monkeypatch):
    """Each rank holds the other's experts: the first forward already has other bits."""
    from pipeproof.stages.common.experts import ExpertRegion
    from pipeproof.stages.paddle import stage
    from tests.exec.in_memory import compared

    plan = lowered(*PLANS["ep"])
    monkeypatch.setattr(stage, "ExpertRegion", lambda ops, rank, *rest: ExpertRegion(ops, 1 - rank, *rest))
    first, _ = compared(plan)
    assert not first.loss_is_bitwise
    assert not any(one.bitwise for one in first.gradients if ".experts." in one.name)


@pytest.fixture(scope="module")
def exchanged():
    """The plan of two stages with one and two layers of experts, and the log of a rank of the second."""
    from tests.exec.in_memory import run_all

    plan = lowered({"ep": 2}, {"kind": "zb_h1"}, {"moe": MOE, "num_layers": 4})
    rank = plan.ranks_of_stage(1)[0]
    _, adapters = run_all(plan)
    return plan.graph, rank, adapters[rank].log


def test_logs_say_how_many_rows_went_where(exchanged):
    graph, rank, log = exchanged
    entries = [entry for entry in log if entry.traffic]
    assert len(entries) == 2 * 4 * 2 * (3 + 2)
    assert len({entry.traffic for entry in entries}) > 10, "counts vary"
    assert all(sum(sent for sent, _ in e.traffic) == 16 * 3 for e in entries if e.dtype == "int64")
    assert list(compare_exchanges(graph, rank, log)) == []


@pytest.mark.parametrize("which", range(5))
def test_rows_that_were_not_announced_are_found(exchanged, which):
    graph, rank, log = exchanged
    unit = [i for i, e in enumerate(log) if e.traffic and e.step == 1 and e.op.startswith(("1F2/", "1I2/"))]
    forward, backward = unit[:6], unit[6:]
    place = [forward[1], forward[2], forward[5], backward[0], backward[3]][which]
    (to_first, from_first), *rest = log[place].traffic
    moved = dataclasses.replace(log[place], traffic=((to_first + 1, from_first), *rest))
    (found,) = compare_exchanges(graph, rank, [*log[:place], moved, *log[place + 1 :]])
    assert found.code == "PP901"
    assert found.message.startswith(f"rank {rank}, step 1, {moved.op}: rows [{to_first + 1}, ")


def test_rows_of_another_size_are_found(exchanged):
    graph, rank, log = exchanged
    place = [i for i, entry in enumerate(log) if entry.traffic][2]
    rows = sum(sent for sent, _ in log[place].traffic)
    shorter = dataclasses.replace(log[place], numel=rows * 15)
    (found,) = compare_exchanges(graph, rank, [*log[:place], shorter, *log[place + 1 :]])
    assert found.message.endswith(f"{rows} rows make {rows * 15} elements, and 48 768")
