"""The page of Fleet's own pipeline: its plans are ones that Fleet takes, and its figures are those of such runs."""

import json
from pathlib import Path

import pytest

EVIDENCE = Path(__file__).parents[2] / "validation" / "results"
RESULTS = json.loads((EVIDENCE / "fleet.json").read_text(encoding="utf-8"))


@pytest.fixture
def script(validation_script):
    return validation_script("make_fleet")


def test_all_of_fleets_classes_are_there(script):
    assert RESULTS["runs"].keys() == script.RUNS.keys()
    assert {run["scheduler"] for run in RESULTS["runs"].values()} == {
        "PipelineParallel", "PipelineParallelWithInterleave", "PipelineParallelWithInterleaveFthenB",
        "VPPFhenBInBalancedMemory",
    }  # fmt: skip


@pytest.mark.parametrize("name", RESULTS["runs"])
def test_figures_are_those_of_the_training(script, name):
    run, settings = RESULTS["runs"][name], script.RUNS[name]
    units, num_stages = settings.micro_batches * settings.replicas, settings.pp * settings.chunks
    assert run["computed_per_step"] == 2 * units * num_stages
    assert run["messages_per_step"] == 2 * units * (num_stages - 1)
    assert run["num_bitwise"] == run["num_gradients"] > 0
    assert len(run["losses"]) == settings.steps
    assert all(losses["fleet_loss"] == losses["loss"] for losses in run["losses"])
    assert run["matches"]


def test_partial_messages_spoil_every_weight_and_full_ones_none():
    full, partial = (RESULTS["partial"][name]["farthest"] for name in ("Fleet, full", "Fleet, partial"))
    assert max(full.values()) < 1e-5
    assert min(partial.values()) > 0.05
