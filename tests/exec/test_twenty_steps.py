"""A pipeline alone over 20 steps of AdamW: the bits of the uncut model, or of the reference with its accumulation tree.

The same of other models is where these are tested: experts with ``test_balance``, multi-token prediction with
``test_mtp``, hyper-connections with ``test_streams``, cuts and norms with ``test_cuts``.
"""

import pytest

from tests.plans import subject

pytestmark = pytest.mark.needs_paddle

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


@pytest.fixture(scope="module", autouse=True)
def paddle_started():
    from pipeproof.stages.paddle.runtime import start_paddle

    start_paddle()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_twenty_steps_of_a_pipeline(model, schedule):
    from pipeproof.comm.accumulation import Accumulation, accumulation_of
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
    farthest = max(gradient.uncut_max_rel_diff for step in steps for gradient in step.gradients)
    if model.startswith("tied"):
        assert accumulation_of(plan) is Accumulation.TWO_COPIES
        assert 0 < farthest <= parallel_bound(plan.spec)
    else:
        assert accumulation_of(plan) is Accumulation.IN_ORDER
        assert farthest == 0
        assert all(step.loss.tobytes() == step.uncut_loss.tobytes() for step in steps)
