"""Gradients clipped to a global norm, which counts every element once on every placement of the weights."""

import pytest

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.launch.run_plan import RunOptions, require_runnable
from pipeproof.schedule.op_table import Row, build_graph
from pipeproof.schedule.ops import Op, OpKind
from pipeproof.verify.check_plan import check_subject
from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

PLANS = {
    "one rank": ({"pp": 1}, {"kind": "gpipe"}),
    "loop": ({"pp": 4}, {"kind": "1f1b"}),
    "sp, dp": ({"tp": 2, "dp": 2, "sequence_parallel": True}, {"kind": "zb_h1"}),
    "v": ({}, {"kind": "zb_v", "num_chunks": 2}),
    "copies": ({"tp": 2}, {"kind": "dualpipe"}),
}
SMALL = 0.05
"""A norm that the gradients of these plans exceed."""


def results(name, clip_norm=SMALL, **model):
    from tests.exec.in_memory import compared

    topology, schedule = PLANS[name]
    run = {"steps": 2} if clip_norm is None else {"steps": 2, "clip_norm": clip_norm}
    plan = subject(topology=topology, schedule=schedule, run=run, model=model).unfolded().plan
    return plan, compared(plan)


def test_the_pipeline_does_not_change_a_bit_of_the_norm():
    (_, first), *others = (results(name) for name in ("one rank", "loop", "v"))
    for _, steps in others:
        for step, expected in zip(steps, first, strict=True):
            assert {one.name: one.md5 for one in step.gradients} == {one.name: one.md5 for one in expected.gradients}


@pytest.mark.slow(but=["sp, dp"])
@pytest.mark.parametrize("name", ["loop", "sp, dp", "copies"])
def test_the_norm_counts_every_element_once(name):
    """The norm of all compared gradients equals the limit, except for rounding."""
    import numpy as np

    from tests.exec.in_memory import run_all

    topology, schedule = PLANS[name]
    norms = {}
    for clip_norm in (SMALL, 1e9):
        sections = {"topology": topology, "schedule": schedule, "model": {"tied_embedding": True}}
        plan = subject(**sections, run={"steps": 1, "clip_norm": clip_norm, "dtype": "float64"}).unfolded().plan
        ((*ranks,),), _ = run_all(plan)
        seen, total = set(), 0.0
        for rank, outcome in enumerate(ranks):
            coords = plan.mesh.coords(rank)
            for layer in plan.layers:
                for weight in layer.parameters:
                    part = coords["tp"] if "tp" in weight.sharded_over else 0
                    if weight.name in outcome.gradients and (weight.name, part) not in seen:
                        seen.add((weight.name, part))
                        total += float(np.sum(outcome.gradients[weight.name] ** 2))
        norms[clip_norm] = total**0.5
    assert norms[SMALL] == pytest.approx(SMALL, rel=1e-12)
    assert norms[1e9] > 2 * SMALL


def test_gradients_below_the_limit_stay_as_they_are():
    (_, clipped), (_, plain) = results("loop", 1e9), results("loop", None)
    for step, expected in zip(clipped, plain, strict=True):
        assert {one.name: one.md5 for one in step.gradients} == {one.name: one.md5 for one in expected.gradients}


def test_the_factor_is_the_quotient_rounded_once():
    import numpy as np
    import paddle

    from pipeproof.stages.paddle.optimizer import GradientClip

    limit = np.float32(0.05)
    for square in np.random.default_rng(3).uniform(0.01, 4.0, 2000).astype(np.float32):
        clip, weight = GradientClip({}, 1, 0.05, "float32"), paddle.ones([1])
        clip.squares = paddle.to_tensor(square.reshape(1))
        weight.grad = paddle.ones([1])
        clip.clip({"weight": weight})
        assert weight.grad.numpy()[0] == limit / max(np.sqrt(square), limit)


def test_a_collective_by_itself_is_refused_where_there_is_no_norm():
    """No adapter knows its operand."""
    seen = subject(topology={"tp": 2})
    rows = seen.graph.rows()
    for program in rows:
        program.append(Row(Op(OpKind.ALL_REDUCE, program[0].op.stage, axis="tp"), stop=1, group=0, reduction="sum"))
    report = check_subject(seen.with_graph(build_graph(rows, seen.graph.tensors, seen.graph.groups)))
    with pytest.raises(PipeproofError, match="rank 0 runs 0ALL_REDUCE:tp") as refused:
        require_runnable(report, RunOptions(unsafe=True))
    assert [one.code for one in refused.value.findings] == ["PP909"]
