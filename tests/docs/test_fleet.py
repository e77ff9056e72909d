"""The page of Fleet's own pipeline: its plans are ones that Fleet takes, and its figures are those of such runs."""

import importlib
import json
from pathlib import Path

import pytest

from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.subject import make_subject
from validation.fleet.fleet_support import require_fleet_support

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = json.loads((DOCS / "fleet.json").read_text(encoding="utf-8"))


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS.parent / "validation" / "pages"))
    return importlib.import_module("make_fleet")


def test_all_of_fleets_classes_are_there(script):
    assert RESULTS["runs"].keys() == script.PLANS.keys()
    assert {run["scheduler"] for run in RESULTS["runs"].values()} == {
        "PipelineParallel", "PipelineParallelWithInterleave", "PipelineParallelWithInterleaveFthenB",
        "VPPFhenBInBalancedMemory",
    }  # fmt: skip


@pytest.mark.parametrize("name", RESULTS["runs"])
def test_figures_are_those_of_the_plan(script, name):
    run, subject = RESULTS["runs"][name], make_subject(plan_from_dict(script.plan_of(name)))
    require_fleet_support(subject)
    plan = subject.plan
    units = plan.spec.schedule.num_micro_batches * plan.spec.topology.dp
    assert run["computed_per_step"] == 2 * units * len(plan.stages)
    assert run["messages_per_step"] == 2 * units * (len(plan.stages) - 1)
    assert run["num_bitwise"] == run["num_gradients"]
    assert run["num_gradients"] == script.STEPS * sum(
        len(layer.parameters) for stage in range(len(plan.stages)) for layer in plan.layers_of(stage)
    )
    assert len(run["losses"]) == script.STEPS
    for losses in run["losses"]:
        assert losses["loss"] == losses["reference_loss"]
        assert abs(losses["fleet_loss"] - losses["loss"]) <= run["loss_bound"] * abs(losses["loss"])


def test_partial_messages_spoil_every_weight_and_full_ones_none():
    full, partial = (RESULTS["partial"][name]["farthest"] for name in ("Fleet, full", "Fleet, partial"))
    assert max(full.values()) < 1e-5
    assert min(partial.values()) > 0.05
