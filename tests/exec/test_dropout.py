"""Dropout on all ranks of a plan: the bits of the references, for any order and number of draws."""

import pytest

from tests.exec.test_blocks import GROUPS, MLA, MOE
from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

RATES = {"embedding": 0.1, "attention": 0.2, "hidden": 0.3}
SP = {"tp": 2, "sequence_parallel": True}
PIECES = {"kind": "seq1f1b", "num_sequence_splits": 2}
PLANS = {
    "tp": ({"tp": 2}, {}, {}, {}),
    "sp, batch first": (SP, {"kind": "zb_h1"}, {"activation_order": "bsh"}, {}),
    "sp, groups, dp, uneven sizes": (
        {**SP, "dp": 2}, {"last_micro_batch_size": 1, "seq_lengths": [8, 4, 8, 6]}, GROUPS, {},
    ),
    "ep, sp": ({**SP, "ep": 2}, {}, {"moe": MOE}, {}),
    "sequence splits, sp": (SP, PIECES, GROUPS, {}),
    "sequence splits, computed again": ({}, PIECES, {}, {"recompute": "full"}),
    "latent, selective": ({"tp": 2}, {}, {"mla": MLA}, {"recompute": "selective"}),
    "cp, sp": ({**SP, "cp": 2}, {}, GROUPS, {}),
    "copies, computed again": ({"ep": 2}, {"kind": "dualpipe"}, {"moe": MOE}, {"recompute": "full"}),
}  # fmt: skip


def lowered(topology, schedule, model, memory, *, steps=2, dropout=RATES):
    sections = {"topology": topology, "schedule": schedule, "memory": memory}
    model = {"num_layers": 2, "dropout": dropout, **model}
    return subject(**sections, model=model, run={"steps": steps, "seed": 3}).unfolded().plan


@pytest.mark.slow(but=["tp", "sp, batch first", "sequence splits, computed again", "latent, selective", "cp, sp"])
@pytest.mark.parametrize("name", PLANS)
def test_ranks_have_the_bits_of_the_reference_in_their_order(name):
    from pipeproof.stages.reference.bound import parallel_bound
    from tests.exec.in_memory import compared

    plan = lowered(*PLANS[name])
    first, second = compared(plan)
    assert first.bitwise
    assert second.bitwise
    assert 0 < max(one.unpartitioned_max_rel_diff for one in first.gradients) <= parallel_bound(plan.spec)


@pytest.mark.slow(but=["full"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_pipeline_alone_is_the_unpartitioned_model_over_twenty_steps(recompute):
    from tests.exec.in_memory import compared

    plan = lowered({"pp": 2}, {"num_micro_batches": 2}, {}, {"recompute": recompute}, steps=20)
    steps = compared(plan)
    assert len(steps) == 20
    assert all(step.bitwise for step in steps)
    assert all(one.unpartitioned_max_rel_diff == 0.0 for step in steps for one in step.gradients)


@pytest.mark.parametrize("place", RATES)
def test_elements_are_dropped_at_every_position(place):
    from tests.exec.in_memory import run_all

    losses = []
    for dropout in (None, {place: RATES[place]}):
        plan = lowered({"pp": 1}, {}, {}, {}, steps=1, dropout=dropout)
        losses.append(run_all(plan)[0][0][0].loss)
    assert losses[0] != losses[1]


def test_a_rank_with_the_mask_of_another_is_seen(monkeypatch):
    """Each tensor-parallel rank takes the other's heads of the mask: from the first forward on, bits differ."""
    from pipeproof.stages.describe.synthetic import DropoutKeys
    from tests.exec.in_memory import run_all

    plan = lowered({"pp": 1, "tp": 2}, {}, {}, {}, steps=1, dropout={"attention": 0.3})
    right = run_all(plan)[0][0][0].loss
    mine = DropoutKeys.of_attention
    monkeypatch.setattr(
        DropoutKeys,
        "of_attention",
        lambda self, layer, rate, heads, queries: mine(self, layer, rate, (2 - heads[0], 6 - heads[1]), queries),
    )
    assert run_all(plan)[0][0][0].loss != right
