"""Hyper-connections on all ranks: bitwise the references, near the unpartitioned model, logged as the graph has it."""

import pytest

from tests.exec.test_blocks import MLA, MOE
from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

STREAMS = {"hyper_connections": {"streams": 3, "sinkhorn_iterations": 3}}
SP = {"tp": 2, "sequence_parallel": True}
PLANS = {
    "chunks": ({}, {"kind": "interleaved", "num_chunks": 2, "num_micro_batches": 4}, {"num_layers": 4}, {}),
    "sp, dp": (
        {**SP, "dp": 2}, {"kind": "zb_h1"}, {"activation_order": "bsh"}, {"run": {"main_grad_dtype": "float64"}},
    ),
    "tp, sliced messages": ({"tp": 2}, {}, {}, {"transport": {"forward": "partial", "backward": "partial"}}),
    "copies of stages": ({"dp": 2}, {"kind": "dualpipe", "num_micro_batches": 4}, {}, {}),
    "sequence splits": ({"tp": 2}, {"kind": "seq1f1b", "num_sequence_splits": 2}, {}, {}),
    "experts, ep, sp": ({**SP, "ep": 2}, {"kind": "zb_h1"}, {"moe": {**MOE, "aux_loss": 0.1}}, {}),
    "latent, tied, clipped": (SP, {}, {"mla": MLA, "tied_embedding": True}, {"run": {"clip_norm": 0.05}}),
    "again": (SP, {"kind": "zb_h1"}, {}, {"memory": {"recompute": "full"}}),
    "again, pieces": ({}, {"kind": "seq1f1b", "num_sequence_splits": 2}, {}, {"memory": {"recompute": "full"}}),
    "sizes, slots": (
        {"ep": 2}, {"kind": "zb_h1", "last_micro_batch_size": 1, "seq_lengths": [8, 4, 6]}, {"moe": MOE},
        {"buffers": {"receive_slots": 4, "free_output": "after_send_done"}},
    ),
    "dropout": ({"tp": 2}, {"kind": "zb_h1"}, {"dropout": 0.1, "swiglu_limit": 0.5}, {}),
}  # fmt: skip

WHOLE = {"chunks"}
"""Placements that add in the order of the unpartitioned model."""


def lowered(topology, schedule, model, sections, **run):
    run = {"steps": 2, "seed": 3, **sections.get("run", {}), **run}
    sections = {name: keys for name, keys in sections.items() if name != "run"}
    return subject(
        model={"num_layers": 2, **STREAMS, **model},
        topology=topology, schedule={"num_micro_batches": 3, **schedule}, run=run, **sections,
    ).unfolded().plan  # fmt: skip


@pytest.mark.slow(
    but=[
        "chunks",
        "tp, sliced messages",
        "copies of stages",
        "sequence splits",
        "latent, tied, clipped",
        "experts, ep, sp",
    ]
)
@pytest.mark.parametrize("name", PLANS)
def test_streams_have_the_bits_of_the_reference(name):
    from pipeproof.stages.reference.bound import parallel_bound
    from tests.exec.in_memory import compared

    plan = lowered(*PLANS[name])
    first, second = compared(plan)
    assert first.bitwise
    assert second.bitwise
    own = [one.name for one in first.gradients if "_streams." in one.name]
    assert len(own) == 3 * 2 * plan.spec.model.num_layers
    difference = max(one.unpartitioned_max_rel_diff for one in first.gradients)
    assert difference <= parallel_bound(plan.spec)
    assert (difference > 0) == (name not in WHOLE)


STAGES = {
    "split backward": ({"pp": 2}, {"kind": "zb_h1", "num_micro_batches": 3}, 2, None),
    "one and several streams cross": (
        {"pp": 4}, {"kind": "1f1b", "num_micro_batches": 2}, 2, [["embed"], ["layer.0"], ["layer.1"], ["norm", "head"]],
    ),
}  # fmt: skip


@pytest.mark.slow(but=["one and several streams cross"])
@pytest.mark.parametrize("name", STAGES)
def test_twenty_steps_of_a_pipeline_are_those_of_the_unpartitioned_model_bit_for_bit(name):
    from tests.exec.in_memory import unpartitioned_losses

    topology, schedule, num_layers, stages = STAGES[name]
    sections = {} if stages is None else {"stages": stages}
    plan = lowered(topology, schedule, {"num_layers": num_layers, "seq_length": 4}, sections, steps=20)
    assert len(set(unpartitioned_losses(plan))) == 20
