"""``pipeproof sweep``: refuses kindly, ends at Ctrl-C, and its output fits its schema."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from pipeproof.analysis.sweep import run_sweep as run_module
from tests.cli.commands import REPOSITORY, invoke
from tests.default_signals import default_signals
from tests.sweep.files import axes, write_plan

GRID = {"schedule.num_micro_batches": [3, 4], "topology.tp": [1, 3]}
SCHEMA = Draft202012Validator(json.loads((REPOSITORY / "docs" / "schemas" / "sweep.schema.json").read_text()))


@pytest.fixture(autouse=True)
def in_threads(monkeypatch):
    """Threads in place of processes, which take a second to start; ``tests/sweep/test_run.py`` has those."""
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr(run_module, "own_processes", ThreadPoolExecutor)


@pytest.fixture
def words(tmp_path):
    """The plan and the values, as words of the command."""
    return [write_plan(tmp_path), *axes(GRID)]


def test_the_table_has_the_best_and_the_refused(words):
    done = invoke("sweep", *words)
    assert done.exit_code == 0, done.output
    assert "best by makespan: 2 of 4 points" in done.stdout
    assert "refused PP108: 2; first schedule.num_micro_batches=3, topology.tp=3: " in done.stdout


def test_json_fits_its_schema(words):
    content = json.loads(invoke("sweep", *words, "--format", "json").stdout)
    SCHEMA.validate(content)
    assert [point["status"] for point in content["points"]] == ["ok", "refused", "ok", "refused"]
    for broken in ({**content, "points": []}, {**content, "unit": "s"}, {**content, "more": 1}):
        assert not SCHEMA.is_valid(broken)
    assert not SCHEMA.is_valid({**content, "points": [{**content["points"][0], "status": "refused"}]})


def test_other_settings_are_those_of_all_points(words):
    result = invoke("sweep", *words[:3], "--set", "topology.tp=2", "--format", "json")
    assert [point["set"] for point in json.loads(result.stdout)["points"]] == [
        {"schedule.num_micro_batches": 3}, {"schedule.num_micro_batches": 4},
    ]  # fmt: skip


def test_a_point_that_failed_is_status_3(words, monkeypatch):
    import pipeproof.analysis.sweep.evaluate_point

    def broken(*arguments):
        raise RuntimeError("broken")

    monkeypatch.setattr(pipeproof.analysis.sweep.evaluate_point, "simulate", broken)
    result = invoke("sweep", *words)
    assert result.exit_code == 3
    assert "failed: 2; first " in result.stdout
    assert "RuntimeError: broken" in result.stdout


def test_ctrl_c_ends_the_workers(tmp_path):
    """In its own process group with real workers; all of them get the signal, as on a terminal."""
    values = {"schedule.num_micro_batches": list(range(2, 600))}
    command = [sys.executable, "-m", "pipeproof", "sweep", str(write_plan(tmp_path)), *axes(values), "--workers", "1"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=default_signals
    )
    children_file = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 120
    try:
        children = set()
        while len(children) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            children = set(children_file.read_text().split())  # Python has one of its own next to the worker
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in stderr
    assert "Traceback" not in stderr
    while any(map(_lives, children)) and time.monotonic() < deadline:  # that one ends a little later
        time.sleep(0.02)
    assert not any(map(_lives, children))


def _lives(pid):
    """True if a process still runs; one that has ended may wait for its parent for ever."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
