"""Real jobs over gloo with planted hangs: the monitor names the cause, and has nothing against a healthy job."""

import json
import time

import pytest

from pipeproof.exec.monitor.follow import Follower, follow
from tests.cli.commands import invoke
from tests.docs.test_schemas import require_fit
from tests.exec.monitor.hang_jobs import CAUSES, outcome, running

WITH = {"torch": pytest.mark.needs_torch, "paddle": pytest.mark.needs_paddle}
JOBS = [
    pytest.param(framework, name, id=f"{framework}-{name}", marks=mark)
    for framework, mark in WITH.items()
    for name in CAUSES
]
KINDS = {
    "crossed_sends": "cycle", "missing_receive": "cycle", "extra_collective": "mismatch",
    "rank_local_keys": "mismatch", "exception": "raised", "killed": "killed", "stopped": "stopped",
    "data_loader_stuck": "absent", "wrong_group": "cycle", "micro_batch_counts": "cycle", "shape_mismatch": "mismatch",
}  # fmt: skip
CODES = {
    "cycle": "PP931", "mismatch": "PP932", "absent": "PP933", "raised": "PP953", "killed": "PP953", "stopped": "PP954",
}  # fmt: skip


@pytest.mark.slow(but=["torch-missing_receive", "torch-killed", "paddle-missing_receive"])
@pytest.mark.parametrize(("framework", "name"), JOBS)
def test_the_cause_of_a_planted_hang_is_named(tmp_path, framework, name):
    found = outcome(name, tmp_path / "rings", patience_s=5, framework=framework)
    verdict = found.verdict
    assert verdict is not None, found.log
    assert (verdict.status, verdict.kind, verdict.causes) == ("hang", KINDS[name], CAUSES[name])
    assert verdict.findings[0].code == CODES[verdict.kind]
    assert any("planted_hangs.py:" in finding.message for finding in verdict.findings)


@pytest.mark.slow
@pytest.mark.parametrize("framework", [pytest.param(name, marks=mark) for name, mark in WITH.items()])
def test_a_jittery_but_healthy_job_is_no_hang(tmp_path, framework):
    assert outcome("healthy", tmp_path / "rings", patience_s=20, framework=framework).verdict.status == "ended"


@pytest.mark.slow(but=["torch"])
@pytest.mark.parametrize("framework", [pytest.param(name, marks=mark) for name, mark in WITH.items()])
def test_a_rank_that_waits_long_for_others_that_make_progress_is_no_hang(tmp_path, framework):
    assert outcome("slow_start", tmp_path / "rings", patience_s=5, framework=framework).verdict.status == "ended"


@pytest.mark.needs_torch
def test_the_command_prints_the_cause(tmp_path):
    rings = tmp_path / "rings"
    with running("data_loader_stuck", rings):
        assert follow(Follower(rings, patience_s=3).look, report=lambda *_: None, timeout_s=300) is not None
        result = invoke("job", "hang", rings, "--follow", "--timeout", "2")
    assert result.exit_code == 1
    assert "cause: rank 1" in result.stdout
    assert "PP933" in result.stdout
    time.sleep(4)  # after the job was killed, its rings tell the same
    result = invoke("job", "hang", rings, "--format", "json", "--timeout", "1")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    require_fit("hang", report)
    assert (report["status"], report["kind"], report["causes"]) == ("hang", "absent", [1])
