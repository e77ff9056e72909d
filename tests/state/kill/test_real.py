"""Real commands that are killed at random times: a run that saves all the time, and a reshard."""

import os
import random
import signal
import time

import pytest

from pipeproof.state.open_checkpoint import file_findings
from pipeproof.state.read_state import find_state
from tests.exec.processes import Run
from tests.plans import plan_dict
from tests.state.tiny import files_below


class Killed(Run):
    """A run that is killed in the middle of its work."""

    def await_states(self, states, num_states):
        """Wait until the run has saved so many."""
        self._await(lambda: len(list(states.glob("step-*"))) >= num_states or self.process.poll() is not None)
        assert self.process.poll() is None, self.output

    def kill(self, *, launcher_alone):
        """By SIGKILL: nobody tidies up. No process of it may be left."""
        workers = [] if launcher_alone else self._workers()
        os.kill(self.process.pid, signal.SIGKILL)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._await(lambda: not self._workers())


def killed_while_it_saves(tmp_path, plan, states, *options, launcher_alone):
    """The files of a run that saves after every step, and is killed at some time after its second state."""
    before = set(states.glob("step-*"))
    run = Killed(tmp_path, plan, "--save", str(states), "--save-every", "1", *options)
    run.await_states(states, len(before) + 2)
    time.sleep(random.Random(launcher_alone).uniform(0, 0.5))
    run.kill(launcher_alone=launcher_alone)
    left = {path for path in states.iterdir() if not path.name.startswith(".")}
    assert len(left - before) >= 2
    assert left >= before
    for state in left:
        assert not file_findings(state)
    return files_below(states)


@pytest.mark.slow
@pytest.mark.needs_paddle
def test_runs_that_are_killed_while_they_save_can_be_resumed(tmp_path):
    states = tmp_path / "states"
    plan = plan_dict(topology={"pp": 2}, run={"steps": 10**6, "optimizer": "adamw"})
    first = killed_while_it_saves(tmp_path / "one", plan, states, launcher_alone=True)
    again = "--resume", str(states)
    before = killed_while_it_saves(tmp_path / "two", plan, states, *again, launcher_alone=False)
    assert {name: before.get(name) for name in first} == first
    newest = find_state(states)
    plan["run"]["steps"] = newest.steps_done + 2
    resumed = Run(tmp_path / "resumed", plan, *again, "--save", str(states)).end()
    assert resumed.status == 0, resumed.output  # the reference began anew, and has these bits
    assert all(step["bitwise"] for step in resumed.report["steps"])
    assert [step["step"] for step in resumed.report["steps"]] == [newest.steps_done, newest.steps_done + 1]
    now = files_below(states)
    assert {name: now[name] for name in before} == before
    assert find_state(states).steps_done == newest.steps_done + 2
