"""Rings that pipeproof's own jobs write: the monitor names the operation of the plan, without the plan."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeproof.exec.monitor.follow import Follower, follow
from pipeproof.exec.monitor.job import read_job, ring_files
from pipeproof.exec.monitor.ring import OpState
from tests.cli.commands import invoke

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("watched_pipeline.py")


def run(tmp_path, backend, *options, env=None, **changes):
    """Run a plan of two ranks with the command; return its output and the directory of the rings."""
    plan = yaml.safe_load((ROOT / "examples" / "gpt_pp4.yaml").read_text())
    plan["topology"] = {"pp": 2}
    plan["schedule"]["num_micro_batches"] = 4
    plan["run"] |= {"backend": backend, "steps": 3}
    for section, values in changes.items():
        plan[section] |= values
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(plan))
    done = subprocess.run(
        [sys.executable, "-m", "pipeproof", "run", str(file), *options], cwd=tmp_path, timeout=300, check=False,
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
    )  # fmt: skip
    return done, tmp_path / "rings"


@pytest.mark.parametrize(
    "backend",
    [pytest.param("torch", marks=pytest.mark.needs_torch), pytest.param("paddle", marks=pytest.mark.needs_paddle)],
)
def test_a_hang_of_a_run_has_its_operation_micro_batch_and_stage(tmp_path, backend):
    done, rings = run(tmp_path, backend, "--watch", "rings", "--inject", "1:1F2:hang", "--timeout", "8")
    assert done.returncode == 3, done.stdout + done.stderr
    report = json.loads(invoke("job", "hang", rings, "--format", "json").stdout)
    assert (report["status"], report["kind"], report["causes"]) == ("hang", "absent", [1])
    (position,) = report["plan"]
    assert position.startswith("rank 1 has been in 1F2 (step 0, stage 1, micro-batch 2) for ")
    (wait,) = report["waits"]
    assert (wait["rank"], wait["op"], wait["ranks"]) == (0, "recv 0<-1 #2", [1])
    assert wait["meaning"] == "0RECV_B2 of the plan: gradient of micro-batch 2, stage 0, step 0"


@pytest.mark.slow
@pytest.mark.needs_torch
def test_a_run_that_ends_well_has_all_of_its_operations_in_its_rings(tmp_path):
    done, rings = run(
        tmp_path, "torch", env={"PIPEPROOF_WATCH": "rings"}, topology={"pp": 2, "dp": 2}, run={"clip_norm": 1.0}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    job = read_job(ring_files(rings))
    assert [rank.state for rank in job.ranks] == ["ended"] * 4
    assert all(rank.ring.header.plan_op == "" for rank in job.ranks)
    ops = job.by_rank[0].ring.ops
    assert {op.state for op in ops} == {OpState.DONE}
    first = [op for op in ops if op.step == 0]
    assert [op.plan_op for op in first if op.op == "send"] == [f"0SEND_F{number}" for number in range(4)]
    assert [(op.micro_batch, op.kind) for op in first if op.op == "recv"] == [(number, "B") for number in range(4)]
    groups = {(op.group.name.partition(".")[0], op.group.ranks) for op in first if not op.is_message}
    assert ("dp", (0, 1)) in groups or ("dp", (0, 2)) in groups
    assert len(ops) == 3 * len(first)
    assert all(op.plan_op for op in ops)


@pytest.mark.needs_torch
def test_a_script_with_a_pipeline_is_watched_by_the_environment(tmp_path):
    rings = tmp_path / "rings"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PIPEPROOF_WATCH": str(rings), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT)]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment) for rank in range(2)]
    try:
        verdict, _ = follow(Follower(rings, patience_s=4).look, report=lambda *_: None, timeout_s=240)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert (verdict.status, verdict.kind, verdict.causes) == ("hang", "absent", (1,))
    (position,) = verdict.plan
    assert position.startswith("rank 1 has been in 1F2 (step 1, stage 1, micro-batch 2) for ")
    assert verdict.waits[0].meaning == "0RECV_B2 of the plan: gradient of micro-batch 2, stage 0, step 1"
    assert "watched_pipeline.py" in verdict.findings[0].message
