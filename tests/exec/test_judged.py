"""Comparison of runs without an ordered reference: the bound, and steps from the ranks' own weights."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from pipeproof.comm.op_graph import index_of
from pipeproof.exec.compare.compare_gradients import assembled_weights, is_checked_by_bound, needs_ordered_reference
from pipeproof.exec.launch.run_console import render_run, step_line
from tests.exec.test_compare import LOSS, report_of, whole_of_one
from tests.plans import subject

BOUND = 1e-3


def by_bound(ours, *, step=0, loss=LOSS, replicas_agree=True):
    """A report on one step that is checked by ``BOUND``."""
    report = report_of(ours, whole_of_one(), loss=loss)
    (first,) = report.steps
    gradients = tuple(replace(g, step=step, replicas_agree=replicas_agree) for g in first.gradients)
    first = replace(first, step=step, gradients=gradients)
    return replace(report, steps=(first,), is_checked_by_bound=True, parallel_bound=BOUND)


def moved(by):
    """Gradients; in one of them an element is farther from the reference, by a part of its largest."""
    ours = whole_of_one()
    gradient = next(iter(ours.values()))
    gradient.flat[0] += by * np.abs(gradient).max()
    return ours


def said(report):
    stream = io.StringIO()
    render_run(report, Console(file=stream, width=200), verbose=True)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("run", "changes", "by_bits"),
    [
        ({"backend": "torch"}, {}, True),
        ({"backend": "torch", "device": "gpu"}, {}, True),
        ({"backend": "torch", "device": "gpu", "deterministic": False}, {}, False),
        ({"backend": "torch"}, {"topology": {"dp": 2}}, False),
        ({"backend": "torch"}, {"schedule": {"kind": "dualpipe"}}, False),
        ({"backend": "paddle"}, {"topology": {"dp": 2}}, True),
    ],
)
def test_the_bound_is_the_verdict_for_pytorch_in_another_order(run, changes, by_bits):
    plan = subject(run=run, **changes).plan
    assert is_checked_by_bound(plan) is not by_bits
    assert needs_ordered_reference(plan) or by_bits


def test_within_the_bound_a_run_passes_without_the_bits():
    report = by_bound(moved(BOUND / 2), loss=np.float32(LOSS * (1 + BOUND / 2)))
    assert not report.steps[0].bitwise
    assert report.passed
    assert report.findings == ()
    assert report.to_json()["judged_by"] == "bound"
    assert "matches: every loss and every gradient of the first step, within the bound" in said(report)
    assert " within " in said(report)
    assert "differ" not in said(report)
    assert "[green]" in step_line(report.steps[0], BOUND)


def test_a_gradient_beyond_the_bound_fails_the_first_step_and_warns_in_a_later_one():
    report = by_bound(moved(2 * BOUND))
    assert not report.passed
    assert [(f.code, f.severity.value) for f in report.findings] == [("PP908", "error")]
    assert "[red]" in step_line(report.steps[0], BOUND)
    later = by_bound(moved(2 * BOUND), step=1)
    assert later.passed
    assert [(f.code, f.severity.value) for f in later.findings] == [("PP908", "warning")]


def test_a_first_step_from_saved_weights_is_checked_like_a_later_one():
    trained = replace(by_bound(moved(2 * BOUND)), reference_from_state=True)
    assert trained.passed
    assert [(f.code, f.severity.value) for f in trained.findings] == [("PP908", "warning")]
    assert "matches: every loss, within the bound" in said(trained)


@pytest.mark.parametrize("loss", [LOSS * (1 + 2 * BOUND), np.nan])
@pytest.mark.parametrize(("step", "from_state"), [(1, False), (0, True)])
def test_a_loss_beyond_the_bound_fails_in_any_step(loss, step, from_state):
    report = replace(by_bound(whole_of_one(), step=step, loss=np.float32(loss)), reference_from_state=from_state)
    assert not report.passed
    assert "PP904" in [finding.code for finding in report.findings]
    assert f"step {step}: the loss is" in report.findings[0].message


def test_ranks_that_hold_the_same_part_must_hold_the_same_bits():
    report = by_bound(whole_of_one(), replicas_agree=False)
    assert not report.passed
    assert "ranks with the same shard differ in embed.weight" in report.findings[0].message


@pytest.mark.parametrize("topology", [{}, {"tp": 2}, {"dp": 2}, {"pp": 1, "ep": 2}])
def test_weights_of_all_ranks_are_put_together(topology):
    model = {"moe": {"num_experts": 4, "top_k": 2, "ffn_size": 8}} if "ep" in topology else {}
    plan = subject(topology={"pp": 2, **topology}, model=model).plan
    rng = np.random.default_rng(0)
    parameters = {p.name: p for layer in plan.layers for p in layer.parameters}
    whole = {name: rng.random(p.shape, np.float32) for name, p in parameters.items()}
    ranks = [{} for _ in range(plan.mesh.num_ranks)]
    for stage in range(len(plan.stages)):
        for parameter in (p for layer in plan.layers_of(stage) for p in layer.parameters):
            for rank in plan.ranks_of_weight(stage, parameter.name):
                place = tuple(slice(*one) for one in index_of(plan, parameter, rank))
                ranks[rank][parameter.name] = whole[parameter.name][place]
    ranks[-1]["bias/layer.3.mlp"] = np.ones(4, np.float32)
    found = assembled_weights(plan, dict(enumerate(ranks)))
    assert found.keys() == {*whole, "bias/layer.3.mlp"}
    assert all(np.array_equal(found[name], array) for name, array in whole.items())
