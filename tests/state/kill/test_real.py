"""Real commands that are killed at random times: a run that saves all the time, and a reshard."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeproof.state.checkpoint import open_checkpoint
from pipeproof.state.compare import compare_checkpoints
from pipeproof.state.faults import faults_of
from pipeproof.state.load import find_state
from tests.exec.processes import Run
from tests.plans import plan_dict
from tests.state.runs import plan_of
from tests.state.tiny import files_below, write_state

REPOSITORY = Path(__file__).parents[3]


class Killed(Run):
    """A run that is killed in the middle of its work."""

    def kill(self, *, launcher_alone):
        """By SIGKILL: nobody tidies up. No process of it may be left."""
        workers = [] if launcher_alone else self._workers()
        os.kill(self.process.pid, signal.SIGKILL)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._await(lambda: not self._workers())


def a_state_or_more(states):
    deadline = time.monotonic() + 100
    while len(list(states.glob("step-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.needs_paddle
@pytest.mark.parametrize("launcher_alone", [True, False], ids=["the launcher", "all processes"])
def test_a_run_that_is_killed_while_it_saves_can_be_resumed(tmp_path, launcher_alone):
    states = tmp_path / "states"
    plan = plan_dict(topology={"pp": 2}, run={"steps": 10**6, "optimizer": "adamw"})
    run = Killed(tmp_path / "killed", plan, "--save", str(states), "--save-every", "1")
    a_state_or_more(states)
    time.sleep(random.Random(launcher_alone).uniform(0, 0.5))
    run.kill(launcher_alone=launcher_alone)
    left = [path for path in states.iterdir() if not path.name.startswith(".")]
    assert len(left) >= 2
    for state in left:
        assert not faults_of(state)
    before, newest = files_below(states), find_state(states)
    plan["run"]["steps"] = newest.steps_done + 2
    resumed = Run(tmp_path / "resumed", plan, "--resume", str(states), "--save", str(states)).end()
    assert resumed.status == 0, resumed.output  # the reference began anew, and has these bits
    assert all(step["bitwise"] for step in resumed.report["steps"])
    assert [step["step"] for step in resumed.report["steps"]] == [newest.steps_done, newest.steps_done + 1]
    now = files_below(states)
    assert {name: now[name] for name in before} == before
    assert find_state(states).steps_done == newest.steps_done + 2


def test_a_reshard_command_that_is_killed_again_and_again_ends_right(tmp_path):
    sizes = {"hidden_size": 256, "ffn_size": 1024, "vocab_size": 2048, "num_layers": 2}
    at = plan_of(steps=9, topology={"pp": 1, "dp": 2}, memory={"shard_optimizer": "dp"}, model=sizes)
    source = write_state(at, tmp_path / "states", 2)
    target = plan_dict(
        topology={"pp": 1, "tp": 2},
        schedule={"num_micro_batches": 8, "micro_batch_size": 1},
        model={"seq_length": 4, **sizes},
        run={"backend": "paddle", "steps": 9, "optimizer": "adamw"},
    )
    (tmp_path / "plan.json").write_text(json.dumps(target))
    before, out = files_below(tmp_path / "states"), tmp_path / "out"
    words = [
        sys.executable,
        "-m",
        "pipeproof",
        "reshard",
        source,
        "--to",
        tmp_path / "plan.json",
        "-o",
        out,
        "--jobs",
        "2",
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    draw, num_killed = random.Random(9), 0
    for _ in range(4):
        command = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while command.poll() is None and not (tmp_path / ".out.reshard" / "new").exists():
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.15))
        command.kill()
        num_killed += command.wait() == -signal.SIGKILL
        if out.exists():
            break
        assert files_below(tmp_path / "states") == before
    assert num_killed
    if not out.exists():
        subprocess.run(words, env=environment, check=True, capture_output=True)
    assert files_below(tmp_path / "states") == before
    assert not faults_of(out)
    assert compare_checkpoints(open_checkpoint(source), open_checkpoint(out)).equal
    shutil.rmtree(out)
