"""Real Paddle jobs over gloo with planted hangs: the monitor names the cause."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeproof.exec.monitor.follow import Follower, follow
from tests.interop.record.processes import ROOT, world

PROGRAM = Path(__file__).with_name("paddle_hangs.py")
pytestmark = pytest.mark.needs_paddle


@pytest.mark.slow(but=["missing_receive", "data_loader_stuck"])
@pytest.mark.parametrize(
    ("name", "kind", "code", "line"),
    [
        ("missing_receive", "cycle", "PP931", "dist.send(hidden, 1)"),
        ("data_loader_stuck", "absent", "PP933", "threading.Event().wait()"),
        ("exception", "raised", "PP953", ""),
        ("killed", "killed", "PP953", ""),
        ("stopped", "stopped", "PP954", ""),
    ],
    ids=["missing_receive", "data_loader_stuck", "exception", "killed", "stopped"],
)
def test_the_cause_of_a_planted_hang_is_named(tmp_path, name, kind, code, line):
    rings, environment = tmp_path / "rings", world()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), name, str(rank), str(rings)], cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment(rank)},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        found = follow(Follower(rings), report=lambda *_: None, timeout_s=240)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert found is not None
    verdict, job = found
    assert (verdict.status, verdict.kind, verdict.findings[0].code) == ("hang", kind, code)
    assert verdict.causes == (1,)
    number = 1 + next((i for i, text in enumerate(PROGRAM.read_text().splitlines()) if line and line in text), -1)
    assert not line or f"paddle_hangs.py:{number}" in verdict.findings[0].message
    assert job.by_rank[0].ring.header.framework.startswith("paddle ")
