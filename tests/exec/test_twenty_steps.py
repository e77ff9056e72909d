"""A pipeline alone over 20 steps of AdamW: the bits of the unpartitioned model, or of the ordered reference.

The same is tested for experts in ``test_balance``, for multi-token prediction in ``test_mtp``, for hyper-connections in
``test_streams``, for cuts and norms in ``test_cuts``.
"""

import pytest

from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

STEPS = 20
SCHEDULES = {
    "1f1b": {"kind": "1f1b"},
    "interleaved": {"kind": "interleaved", "num_chunks": 2},
    "zb_v": {"kind": "zb_v", "num_chunks": 2},
}
MODELS = {
    "GPT": {},
    "tied embedding, experts": {
        "tied_embedding": True,
        "moe": {"num_experts": 12, "top_k": 3, "ffn_size": 8, "dense_layers": 1},
    },
}


@pytest.mark.slow(but=["GPT-1f1b"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_twenty_steps_of_a_pipeline(model, schedule):
    from pipeproof.comm.accumulation_order import Accumulation, accumulation_of
    from pipeproof.stages.reference.bound import parallel_bound
    from tests.exec.in_memory import compared

    run = {"steps": STEPS, "seed": 5, "optimizer": "adamw", "learning_rate": 0.01}
    plan = subject(
        model={"seq_length": 4, **MODELS[model]},
        schedule={**SCHEDULES[schedule], "num_micro_batches": 2},
        run=run,
    ).plan  # fmt: skip
    steps = compared(plan)
    assert all(step.bitwise for step in steps)
    assert len({step.loss.tobytes() for step in steps}) == STEPS
    farthest = max(gradient.unpartitioned_max_rel_diff for step in steps for gradient in step.gradients)
    if model.startswith("tied"):
        assert accumulation_of(plan) is Accumulation.TWO_COPIES
        assert 0 < farthest <= parallel_bound(plan.spec)
    else:
        assert accumulation_of(plan) is Accumulation.IN_ORDER
        assert farthest == 0
        assert all(step.loss.tobytes() == step.unpartitioned_loss.tobytes() for step in steps)
