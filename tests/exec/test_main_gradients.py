"""Gradients added in a wider type than that of the layers, and clamped SwiGLU: the bits of the references."""

import numpy as np
import pytest

from pipeproof.exec.compare.compare_log import compare_log
from pipeproof.stages.common import backend_ops as arithmetic
from tests.exec.test_blocks import GROUPS, MLA, MOE
from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

SP = {"tp": 2, "sequence_parallel": True}
LIMIT = 0.05
"""At weights as they begin, some of the gates and of the other factors are beyond it, and some are not."""
MODULES = {"mtp": {"num_modules": 2, "loss_weight": 0.3}}
STREAMS = {"hyper_connections": {"streams": 3, "sinkhorn_iterations": 4}}
EVEN = {"aux_loss": 0.01, "z_loss": 0.001, "expert_bias_rate": 0.01}
PLANS = {
    "dp, clipped": ({"dp": 2}, {"kind": "zb_h1"}, {}, {"clip_norm": 0.05}),
    "sp, tied": (SP, {}, {"tied_embedding": True}, {"clip_norm": 0.05}),
    "tp, ep": ({"tp": 2, "ep": 2}, {}, {"moe": MOE, "swiglu_limit": LIMIT}, {}),
    "copies, latent": ({"ep": 2}, {"kind": "dualpipe"}, {"mla": MLA, "moe": MOE}, {"optimizer": "sgd"}),
    "sequence splits": (SP, {"kind": "seq1f1b", "num_sequence_splits": 2}, GROUPS, {}),
    "modules, dropout": (SP, {}, {**MODULES, "dropout": 0.1}, {"clip_norm": 0.05}),
    "streams, dropout": (SP, {"kind": "zb_h1"}, {**STREAMS, "dropout": 0.1, "swiglu_limit": LIMIT}, {}),
    "losses of routers, dropout": ({"tp": 2, "ep": 2}, {}, {"moe": {**MOE, **EVEN}, "dropout": 0.1}, {}),
}


def lowered(topology, schedule, model, **run):
    run = {"steps": 2, "seed": 3, **run}
    return subject(topology=topology, schedule=schedule, model={"num_layers": 2, **model}, run=run).unfolded().plan


@pytest.mark.slow(
    but=[
        "dp, clipped",
        "sp, tied",
        "sequence splits",
        "modules, dropout",
        "streams, dropout",
        "losses of routers, dropout",
    ]
)
@pytest.mark.parametrize("name", PLANS)
def test_main_gradients_have_the_bits_of_the_reference_in_the_run_s_order(name):
    from pipeproof.stages.reference.bound import parallel_bound
    from tests.exec.in_memory import compared

    topology, schedule, model, run = PLANS[name]
    plan = lowered(topology, schedule, model, main_grad_dtype="float64", **run)
    first, second = compared(plan)
    assert first.bitwise
    assert second.bitwise
    assert max(one.unpartitioned_max_rel_diff for one in first.gradients) <= parallel_bound(plan.spec)


@pytest.mark.parametrize(
    ("run", "model"),
    [({"main_grad_dtype": "float64", "clip_norm": 0.05}, {"moe": MOE}), ({}, {"activation_order": "bsh"})],
)
def test_a_pipeline_alone_is_the_unpartitioned_model_over_twenty_steps(run, model):
    from tests.exec.in_memory import compared

    limited = {**model, "swiglu_limit": LIMIT}
    steps = compared(lowered({"pp": 2}, {"kind": "zb_h1", "num_micro_batches": 2}, limited, **{**run, "steps": 20}))
    assert len(steps) == 20
    assert all(step.bitwise for step in steps)
    assert all(one.unpartitioned_max_rel_diff == 0.0 for step in steps for one in step.gradients)


def test_main_gradients_add_what_float32_would_lose():
    """Gradients of one micro-batch are float32 numbers; sums over four micro-batches are not."""
    from tests.exec.in_memory import run_all

    def share_in_float32(num_micro_batches):
        plan = lowered({"pp": 1}, {"num_micro_batches": num_micro_batches}, {}, main_grad_dtype="float64", steps=1)
        outcome = run_all(plan)[0][0][0]
        gradients = outcome.gradients.values()
        assert {gradient.dtype for gradient in gradients} == {np.dtype("float64")}
        assert outcome.loss.dtype == np.float32
        return np.mean([np.mean(g == g.astype(np.float32)) for g in gradients])

    assert share_in_float32(1) == 1.0
    assert share_in_float32(4) < 0.5


def test_sums_that_float64_holds_exactly_come_out_alike_in_any_order():
    from tests.exec.in_memory import compared

    furthest = []
    for run in ({}, {"main_grad_dtype": "float64"}):
        (step,) = compared(lowered({"dp": 2}, {}, {}, steps=1, **run))
        furthest.append(max(one.unpartitioned_max_rel_diff for one in step.gradients))
    assert furthest[0] > 0.0
    assert furthest[1] == 0.0


def test_an_optimizer_in_shares_of_wide_weights():
    from tests.exec.in_memory import compared

    sections = {"topology": {"dp": 2}, "memory": {"shard_optimizer": "dp"}, "schedule": {"num_micro_batches": 2}}
    run = {"steps": 2, "main_grad_dtype": "float64", "clip_norm": 0.05}
    assert all(step.bitwise for step in compared(subject(**sections, run=run).unfolded().plan))


def test_weights_that_the_optimizer_updates_are_wide_and_begin_as_those_of_the_dtype():
    from pipeproof.stages.describe.gpt import describe_gpt
    from pipeproof.stages.paddle.stage import PaddleStage

    plan = lowered({"pp": 1}, {}, {}, main_grad_dtype="float64").spec
    wide = PaddleStage(plan, describe_gpt(plan)).parameters
    narrow = PaddleStage(lowered({"pp": 1}, {}, {}).spec, describe_gpt(plan)).parameters
    for name, weight in wide.items():
        assert weight.numpy().dtype == np.float64
        assert np.array_equal(weight.numpy(), narrow[name].numpy())


def test_a_sum_of_gradients_in_another_type_is_found_in_the_log():
    from tests.exec.in_memory import run_all

    plan = lowered({"pp": 1, "dp": 2}, {}, {}, main_grad_dtype="float64")
    log = run_all(plan)[1][0].log
    (found,) = list(compare_log(plan.graph, 0, log, num_steps=1, dtype="float32"))[:1]
    assert "elements float32, the log has" in found.message
    assert "REDUCE_GRAD" in found.message
    assert found.message.endswith("elements float64")


def test_the_same_type_again_changes_no_bit():
    from tests.exec.in_memory import compared

    both = [compared(lowered({"dp": 2}, {}, {}, **run)) for run in ({}, {"main_grad_dtype": "float32"})]
    for step, expected in zip(*both, strict=True):
        assert [one.md5 for one in step.gradients] == [one.md5 for one in expected.gradients]


def test_some_gates_and_factors_are_clamped_and_some_are_not(monkeypatch):
    """Else the tests above would say nothing of the limit."""
    from tests.exec.in_memory import run_all

    seen = []
    clamped = arithmetic.clamped_swiglu

    def watched(gate, up, limit, **options):
        seen.extend([gate.numpy(), up.numpy()])
        return clamped(gate, up, limit, **options)

    monkeypatch.setattr(arithmetic, "clamped_swiglu", watched)
    run_all(lowered({"pp": 1}, {}, {"swiglu_limit": LIMIT}, steps=1))
    gates, factors = (np.concatenate([x.reshape(-1) for x in seen[place::2]]) for place in (0, 1))
    for share in (np.mean(gates > LIMIT), np.mean(np.abs(factors) > LIMIT)):
        assert 0.1 < share < 0.9
