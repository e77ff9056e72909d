"""Recomputation on all ranks of a plan: bitwise the reference, logged as the graph says, and on real processes."""

import dataclasses

import pytest

from pipeproof.exec.compare.compare_log import compare_exchanges
from pipeproof.schedule.ops import OpKind
from tests.exec.test_blocks import GROUPS, MLA, MOE, lowered
from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

SP = {"tp": 2, "sequence_parallel": True}
PLANS = {
    "sequence splits": ({}, {"kind": "seq1f1b", "num_sequence_splits": 4, "seq_lengths": [8, 4, 8, 4]}, {}),
    "groups, split backward": (SP, {"kind": "zb_h1"}, GROUPS),
    "latent, experts, tp": ({"tp": 2}, {}, {"mla": MLA, "moe": MOE}),
    "ep, copies of stages": ({"ep": 2}, {"kind": "dualpipe"}, {"moe": MOE}),
    "ep, sequence splits": ({"ep": 2}, {"kind": "seq1f1b", "num_sequence_splits": 2}, {"moe": MOE}),
}


@pytest.mark.slow(
    but=[
        "sequence splits-selective",
        "sequence splits-full",
        "groups, split backward-selective",
        "groups, split backward-full",
        "latent, experts, tp-selective",
        "latent, experts, tp-full",
    ]
)
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", PLANS)
def test_it_has_the_bits_of_the_reference(name, recompute):
    from tests.exec.in_memory import compared

    assert all(step.bitwise for step in compared(lowered(*PLANS[name], memory={"recompute": recompute})))


@pytest.mark.parametrize("name", ["groups, split backward", "latent, experts, tp", "ep, sequence splits"])
def test_recomputed_modules_have_the_bits_of_the_reference(name):
    from tests.exec.in_memory import compared

    modules = ["mlp", "moe", "shared_experts"] if "moe" in PLANS[name][2] else ["mlp"]
    memory = {"recompute": "selective", "recompute_modules": modules}
    assert all(step.bitwise for step in compared(lowered(*PLANS[name], memory=memory)))


def test_slots_and_released_outputs():
    from tests.exec.in_memory import compared

    sections = {"memory": {"recompute": "full"}, "buffers": {"receive_slots": 4, "free_output": "after_send_done"}}
    plan = subject(schedule={"kind": "zb_h1"}, run={"steps": 2}, **sections).unfolded().plan
    assert any(op.kind is OpKind.FREE for op in plan.graph.ops)
    assert all(step.bitwise for step in compared(plan))


def test_rows_that_come_again_otherwise_than_announced_are_found():
    """All-to-alls of a layer with experts in one input gradient: counts, two exchanges again, two of gradients."""
    from tests.exec.in_memory import run_all

    plan = lowered({"ep": 2}, {"kind": "zb_h1"}, {"moe": MOE}, memory={"recompute": "full"})
    rank = plan.ranks_of_stage(1)[0]
    log = run_all(plan)[1][rank].log
    places = [i for i, e in enumerate(log) if e.traffic and e.step == 1 and e.op.startswith("1I2/")]
    assert [log[place].dtype for place in places] == ["int64", *["float32"] * 4]
    assert list(compare_exchanges(plan.graph, rank, log)) == []
    for place in places[1:]:
        (to_first, from_first), *rest = log[place].traffic
        moved = dataclasses.replace(log[place], traffic=((to_first + 1, from_first), *rest))
        (found,) = compare_exchanges(plan.graph, rank, [*log[:place], moved, *log[place + 1 :]])
        assert found.message.startswith(f"rank {rank}, step 1, {moved.op}: rows [{to_first + 1}, ")
