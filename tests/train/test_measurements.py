"""Comparison, recording and profile of a pipeline, and the command line's output on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from pipeproof.analysis.align.compare_records import align
from pipeproof.analysis.align.loss_pairs import Tolerance
from pipeproof.interop.traces.check_traces import check_log
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import load_plan
from pipeproof.specs.profile_file import read_profile
from pipeproof.verify.check_plan import check
from pipeproof.verify.subject import make_subject
from tests.train.launch import run

pytestmark = pytest.mark.needs_torch

ROOT = Path(__file__).parents[2]


def test_a_pipeline_is_compared_recorded_and_profiled(tmp_path):
    run("measurements.py", 2, tmp_path)
    loaded = load_plan(tmp_path / "plan.yaml")
    assert not check(loaded).errors
    report = check_log(tmp_path / "messages", plan=loaded)
    assert [finding.code for finding in report.findings] == ["PP411"]
    found = align(tmp_path / "values", tmp_path / "whole", Tolerance(rounding=True))
    assert found.equal, found
    assert (found.tensors.num_compared, found.tensors.num_rounding) == (336, 0)

    content = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    content["cost"] = {"profile": "profile.json"}
    (tmp_path / "measured.yaml").write_text(yaml.safe_dump(content))
    measured = load_plan(tmp_path / "measured.yaml")
    assert simulate(make_subject(measured).plan).makespan > 0
    assert all(layer.activation_bytes for layer in loaded.spec.custom.layers)

    profile = read_profile(tmp_path / "profile.json")
    assert [stage.stage for stage in profile.stages] == [0, 1, 2, 3]
    assert profile.bare_messages


@pytest.mark.slow
def test_every_kind_and_split_has_the_bits_of_the_unpartitioned_module():
    done = run(ROOT / "benchmarks" / "gpu" / "train_check.py", 2, timeout=400)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 28
    assert [line for line in lines if not line["exact"]] == []
