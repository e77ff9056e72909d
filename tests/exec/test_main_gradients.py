"""Gradients added in a wider type than the layers', and clamped SwiGLU: the resulting changes."""

import numpy as np
import pytest

from pipeproof.exec.compare.compare_log import compare_log
from pipeproof.stages.common import backend_ops as arithmetic
from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

LIMIT = 0.05
"""Limit that only some of the initial gates and factors exceed."""


def lowered(topology, schedule, model, **run):
    run = {"steps": 2, "seed": 3, **run}
    return subject(topology=topology, schedule=schedule, model={"num_layers": 2, **model}, run=run).unfolded().plan


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
