"""Stacks of the ranks that cause a hang, asked of py-spy while they run."""

import json
import os
import subprocess
import sys
import time

import pytest

from tests.cli.commands import invoke
from tests.docs.test_schemas import require_fit
from tests.interop.hang.test_py_spy import STACKS, fake_py_spy

WAITS = """
import os, sys, time
from pathlib import Path
from pipeproof.exec.monitor.ring_recorder import RingRecorder
from pipeproof.signals import die_with_parent
die_with_parent(os.getppid())
ring = RingRecorder(Path(sys.argv[1]), 0, 2, "none 1.0")
ring.group("0", (0, 1), "gloo")
for _ in range(2):
    seq = ring.issue("all_reduce", "0", None, 0, "float32", (4,), 4, 4)
    ring.waits((seq,))
    if _ == 0:
        ring.done((seq,))
ring.start()
print("waits", flush=True)
time.sleep(60)
"""


@pytest.fixture
def hung(tmp_path):
    """Rank 0 waits for rank 1, whose process runs and has no ring."""
    rings = tmp_path / "rings"
    waiting = subprocess.Popen([sys.executable, "-c", WAITS, str(rings)], stdout=subprocess.PIPE)
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, "RANK": "1"})
    try:
        assert waiting.stdout.readline() == b"waits\n"
        time.sleep(1.2)
        yield rings, other.pid
    finally:
        for process in (waiting, other):
            process.kill()
            process.wait()
        waiting.stdout.close()


def test_a_rank_that_never_came_is_found_and_its_line_shown(monkeypatch, tmp_path, hung):
    rings, pid = hung
    fake_py_spy(monkeypatch, tmp_path, f'echo "$5" > {tmp_path}/pid; cat {STACKS}/json/rank_1.json')
    result = invoke("job", "hang", rings, "--timeout", "1")
    assert result.exit_code == 1
    assert "cause: rank 1\n  rank 1, by py-spy: next_batch (/home/user/job/train.py:4), called by step" in result.stdout
    assert (tmp_path / "pid").read_text() == f"{pid}\n"
    report = json.loads(invoke("job", "hang", rings, "--timeout", "1", "--format", "json").stdout)
    require_fit("hang", report)
    assert [(stack["rank"], stack["frames"][2]["function"]) for stack in report["stacks"]] == [(1, "next_batch")]


def test_a_refused_permission_is_a_note(monkeypatch, tmp_path, hung):
    rings, pid = hung
    fake_py_spy(monkeypatch, tmp_path, "echo 'Permission Denied: Try again' >&2; exit 1")
    result = invoke("job", "hang", rings, "--timeout", "1")
    assert result.exit_code == 1
    assert f"\n  no stack of rank 1: py-spy is not permitted to read PID {pid}: as root run" in result.stdout


def test_stacks_of_another_host_are_read_from_files(hung):
    rings, _ = hung
    result = invoke("job", "hang", rings, "--timeout", "1", "--stacks", STACKS / "text")
    assert "\n  rank 1, by py-spy: next_batch (train.py:4)" in result.stdout
